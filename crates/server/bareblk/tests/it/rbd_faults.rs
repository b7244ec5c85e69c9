//! Kills and stops the daemons of a Ceph cluster at random times, breaks the server's connections to it, and fills it.
//! Requests wait; none fails, none is lost, and no read is stale.
//!
//! `our driver's load and its model (killed/) → bareblk serve → a cluster of this test's own`
//!
//! - After most faults, the next one waits until the server's requests complete again. The others follow at once, often
//!   before the storage daemon is ready: a pause may then last as long as several faults together.
//! - A seed determines the schedule; the test prints it, and `BAREBLK_KILL_SEED` repeats it. `BAREBLK_LONG=1` sets many
//!   more faults.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ceph_cluster::{Cluster, RunningCluster, Store};
use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;
use xtask::sizes;
use xtask::skip::{Reason, skip};

use crate::killed::load::{Load, Overlap, Rings};
use crate::killed::model::SECTOR_BYTES;
use crate::killed::{SetWhenDropped, random};
use crate::rig::ceph::{CephImage, cluster};
use crate::rig::{Place, Server, add_near, bench, eventually, ok};

const MIB: u64 = 1 << 20;
/// The longest life of a daemon between two faults, and the longest time without it.
const LONGEST: Duration = Duration::from_secs(2);
/// One of so many faults follows the one before at once.
const AT_ONCE: u32 = 4;
/// One of so many messages of the server to the cluster breaks its connection.
const BROKEN_CONNECTIONS: u32 = 200;

/// A running cluster. It must end before its folder is removed: without the folder, nothing knows its processes.
pub struct OwnCluster {
    pub cluster: RunningCluster,
    _folder: TempDir,
}

/// A cluster that this test alone uses. Its programs are those of the other tests' cluster.
pub fn own_cluster(store: Store) -> Option<OwnCluster> {
    let programs = cluster()?;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    symlink(programs.join("root"), folder.path().join("root")).unwrap();
    let own = Cluster::start(folder.path(), &programs, store, None, &mut |_| ()).unwrap();
    Some(OwnCluster { cluster: own.until_dropped(), _folder: folder })
}

/// What happens to the cluster.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// The storage daemon hangs.
    OsdHangs,
    /// The storage daemon is killed and started again.
    OsdDies,
    /// The monitor is killed and started again.
    MonDies,
    /// Both are killed and started again.
    BothDie,
}

impl Fault {
    const ALL: [Self; 4] = [Self::OsdHangs, Self::OsdDies, Self::MonDies, Self::BothDie];

    pub fn happen(self, image: &CephImage, random: &mut Rng) {
        let pid = |daemon| Pid::from_raw(image.pid(daemon)).unwrap();
        let dying: &[&str] = match self {
            Self::OsdHangs => {
                kill_process(pid("osd"), Signal::STOP).unwrap();
                sleep_up_to_longest(random);
                return kill_process(pid("osd"), Signal::CONT).unwrap();
            }
            Self::OsdDies => &["osd"],
            Self::MonDies => &["mon"],
            Self::BothDie => &["mon", "osd"],
        };
        for daemon in dying {
            let pid = pid(daemon);
            kill_process(pid, Signal::KILL).unwrap();
            eventually("the daemon has ended", || test_kill_process(pid).is_err().then_some(()));
        }
        sleep_up_to_longest(random);
        for &daemon in dying {
            image.run(&format!("ceph-{daemon}"), &["-i", if daemon == "mon" { "a" } else { "0" }]);
        }
    }
}

fn sleep_up_to_longest(random: &mut Rng) {
    thread::sleep(Duration::from_micros(random.u64(..LONGEST.as_micros() as u64)));
}

/// The cluster's configuration for a client whose connections break.
fn with_broken_connections(conf: &Path, own: &Path) {
    let text = std::fs::read_to_string(conf).unwrap();
    std::fs::write(own, format!("{text}\n[client]\nms_inject_socket_failures = {BROKEN_CONNECTIONS}\n"))
        .unwrap();
}

/// Runs the load until `is_over`, then reads everything. Counts completed requests in `ended`. Returns the longest time
/// without one.
fn run(load: &mut Load, is_over: &AtomicBool, ended: &AtomicU64) -> Duration {
    let (mut longest, mut last) = (Duration::ZERO, Instant::now());
    while !is_over.load(Ordering::Relaxed) {
        let before = load.seen.ended;
        load.step();
        if load.seen.ended > before {
            longest = longest.max(last.elapsed());
            last = Instant::now();
            ended.store(load.seen.ended, Ordering::Relaxed);
        }
    }
    load.verify();
    longest
}

/// Waits for the next completed request, or until the load has ended. Returns how long.
fn until_it_goes_on(ended: &AtomicU64, is_finished: impl Fn() -> bool) -> Duration {
    let (begin, before) = (Instant::now(), ended.load(Ordering::Relaxed));
    eventually("requests complete", || {
        (ended.load(Ordering::Relaxed) > before || is_finished()).then(|| begin.elapsed())
    })
}

/// Runs `CEPH_FAULTS` faults under one load.
fn survives(cluster: &Cluster, rings: Rings, random: &mut Rng) {
    let image = CephImage::of(cluster.folder().to_owned(), 4 * MIB);
    let place = Place::new();
    // The server finds the keyring in the folder of the configuration.
    let conf = image.conf().with_file_name("broken-connections.conf");
    with_broken_connections(&image.conf(), &conf);
    let mut command = place.serve(Path::new(&image.spec()), "s");
    command.args(["--queues", "2", "--workers", "2", "--rbd-conf"]).arg(&conf);
    let server = Server::start(command);
    let mut load = Load::connect(place.socket("s"), rings, Overlap::No, random.u64(..));
    let (is_over, ended, begin) = (AtomicBool::new(false), AtomicU64::new(0), Instant::now());
    let (mut counts, mut after_one) = ([0; Fault::ALL.len()], Duration::ZERO);
    let longest = thread::scope(|scope| {
        let thread = scope.spawn(|| run(&mut load, &is_over, &ended));
        let over = SetWhenDropped(&is_over);
        let faults = sizes::CEPH_FAULTS.now();
        for _ in (0..faults).take_while(|_| !thread.is_finished()) {
            let number = random.usize(..Fault::ALL.len());
            counts[number] += 1;
            Fault::ALL[number].happen(&image, random);
            if random.u32(..AT_ONCE) > 0 {
                after_one = after_one.max(until_it_goes_on(&ended, || thread.is_finished()));
            }
            sleep_up_to_longest(random);
        }
        drop(over);
        thread.join().unwrap()
    });
    println!(
        "{rings:?}: {:?} of {counts:?} in {} s; {} requests, {} writes, {} sectors read and checked; longest wait \
         after a fault was over {} ms, longest pause, over several faults, {} ms",
        Fault::ALL,
        begin.elapsed().as_secs(),
        load.seen.ended,
        load.model.writes(),
        load.model.sectors_checked,
        after_one.as_millis(),
        longest.as_millis()
    );
    assert_eq!(load.seen.reconnects, 0);
    assert!(server.stop(Signal::TERM).success());
    check_contents(&mut load, &image);
}

/// Compares the image with the model.
fn check_contents(load: &mut Load, image: &CephImage) {
    let bytes = load.model.sectors() as usize * SECTOR_BYTES;
    load.model.check_all(0, &image.contents()[..bytes]).unwrap();
}

#[test]
fn nothing_is_lost_while_a_clusters_daemons_die_and_connections_break() {
    let mut random = random();
    let Some(own) = own_cluster(Store::Bluestore) else { return };
    survives(&own.cluster, Rings::Split, &mut random);
    survives(&own.cluster, Rings::Packed, &mut random);
}

/// Sets whether the storage daemon says that its disk is full.
fn set_full(image: &CephImage, kind: &str) {
    image.run("ceph", &["tell", "osd.0", "injectfull", kind]);
}

fn bench_succeeds(place: &Place, socket: &str, rw: &str) -> bool {
    let mut command = bench();
    command.arg("--socket").arg(place.socket(socket)).args([rw, "--size=4m", "--bs=16k"]);
    command.output().unwrap().status.success()
}

#[test]
fn writes_to_a_full_cluster_are_parked_and_go_on_when_there_is_room() {
    if !sizes::CEPH_FILLS.now() {
        return skip(Reason::NotLong, "a cluster starts for this test alone");
    }
    let mut random = random();
    let Some(own) = own_cluster(Store::Memstore) else { return };
    // A full cluster refuses only what needs more room. The load's write-zeroes remove small objects again and again.
    let image = CephImage::with(own.cluster.folder().to_owned(), 4 * MIB, &["--object-size", "4K"]);
    let place = Place::new();
    let mut command = place.serve(Path::new(&image.spec()), "s");
    command.args(["--name", "far", "--on-error", "hold-on-enospc", "--retry-after", "1", "--rbd-conf"]);
    command.arg(image.conf()).arg("--control").arg(place.socket("c"));
    command.arg("--allow-folders").arg(place.folder());
    let server = Server::start(command);
    add_near(&place);
    let mut load = Load::connect(place.socket("s"), Rings::Split, Overlap::No, random.u64(..));
    let (is_over, ended) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let thread = scope.spawn(|| run(&mut load, &is_over, &ended));
        let _over = SetWhenDropped(&is_over);
        for _ in 0..2 {
            until_it_goes_on(&ended, || thread.is_finished());
            set_full(&image, "full");
            eventually("writes are parked", || {
                (ok(&place, &["list"])["disks"][0]["held"].as_u64() > Some(0)).then_some(())
            });
            assert!(bench_succeeds(&place, "near", "--rw=randwrite"));
            set_full(&image, "none");
            until_it_goes_on(&ended, || thread.is_finished());
        }
    });
    server.wait_logged("No space left on device");
    assert!(server.stop(Signal::TERM).success());
    check_contents(&mut load, &image);
}
