//! A thousand disks, most without a front-end: no thread wakes up, and each disk costs little.
//!
//! The test runs in its own program, so that it counts no other test's server.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::rig;
use crate::rig::disks::count;
use crate::rig::passed::serves;
use crate::rig::rest::{come_to_rest, status_kib, switches};
use crate::rig::{FrontEnd, Guest, MIB, Options, PATIENCE, Rig, feature};

/// Disks in one process.
const DISKS: usize = 1000;
/// Disks with a front-end and a started queue.
const USED: usize = 50;
/// The time in which no thread may wake up.
const WATCH: Duration = Duration::from_secs(5);
/// Image and listening socket.
const FDS_OF_AN_IDLE_DISK: usize = 2;
/// The front-end's descriptors (memory, kick, call, err), the connection, and the session's own wake-up and pause.
const FDS_OF_A_SESSION: usize = 7;
/// The front-end's ends of these descriptors, except for wake-up and pause.
const FDS_OF_A_FRONT_END: usize = 5;
/// More would mean a buffer or a thread for each disk.
const MOST_KIB_OF_AN_IDLE_DISK: u64 = 8;
/// The used part of a thread's stack, the rings' buffers, and the test guest's bookkeeping.
const MOST_KIB_OF_A_STARTED_QUEUE: u64 = 256;

/// Raises the descriptor limit as far as the system allows.
fn raise_descriptor_limit(needed: usize) {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let enough = limit.maximum.is_none_or(|maximum| maximum > needed as u64);
    assert!(enough, "{needed} descriptors are needed, the hard limit is {:?}", limit.maximum);
}

/// The process's resources: descriptors, private memory in KiB.
#[derive(Clone, Copy)]
struct Cost {
    fds: usize,
    kib: u64,
}

impl Cost {
    fn now() -> Self {
        Self { fds: count("/proc/self/fd"), kib: status_kib("RssAnon:") }
    }

    /// Prints the average cost of each of `number` since `before`, and returns it.
    fn each_since(self, before: Self, number: usize, what: &str) -> (usize, u64) {
        let (fds, kib) = (self.fds - before.fds, self.kib.saturating_sub(before.kib));
        let each = |total: f64| total / number as f64;
        println!("{number} {what}: {:.2} KiB, {:.1} descriptors each", each(kib as f64), each(fds as f64));
        (fds / number, kib / number as u64)
    }
}

fn start_queue(mut front_end: FrontEnd) -> (FrontEnd, Guest) {
    front_end.negotiate(feature::USUAL);
    front_end.share_memory(16 * MIB);
    let guest = front_end.start_queue(0, 256, feature::USUAL);
    (front_end, guest)
}

#[test]
fn thousand_disks_wake_up_no_thread_and_cost_little_each() {
    let _alone = crate::alone();
    raise_descriptor_limit(DISKS * 2 + USED * 12 + 100);
    let mut rig = Rig::start(Options { disks: 1, workers: 2, ..Options::default() });
    assert!(serves(&mut rig.guest_of(0).1));
    assert!(come_to_rest());

    let (bare, began) = (Cost::now(), Instant::now());
    (1..=DISKS).for_each(|number| rig.add(number).unwrap());
    println!("{DISKS} disks added in {:?}", began.elapsed());
    let idle = Cost::now();
    let (fds, kib) = idle.each_since(bare, DISKS, "idle disks");
    assert_eq!(fds, FDS_OF_AN_IDLE_DISK);
    assert!(kib <= MOST_KIB_OF_AN_IDLE_DISK, "{kib} KiB each");

    let front_ends: Vec<_> = (1..=USED).map(|number| rig.connect_to(number)).collect();
    assert!(front_ends.iter().all(|front_end| front_end.ask_u64(rig::code::GET_QUEUE_NUM) == 4));
    let connected = Cost::now();
    let (fds, _) = connected.each_since(idle, USED, "front-ends connected (both ends)");
    assert_eq!(fds, 4, "connection, its other end, wake-up, pause");

    let mut used: Vec<_> = front_ends.into_iter().map(start_queue).collect();
    assert!(used.iter_mut().all(|(_, guest)| serves(guest)));
    let (fds, kib) = Cost::now().each_since(idle, USED, "sessions with a started queue (both ends)");
    assert_eq!(fds, FDS_OF_A_SESSION + FDS_OF_A_FRONT_END);
    assert!(kib <= MOST_KIB_OF_A_STARTED_QUEUE, "{kib} KiB each");

    assert!(come_to_rest(), "the threads never come to rest");
    let before = switches();
    std::thread::sleep(WATCH);
    let after = switches();
    assert!(before.len() >= USED + 3, "workers, acceptor and sessions are expected: {before:?}");
    assert_eq!(after, before);
    assert!(used.iter_mut().all(|(_, guest)| serves(guest)));
    assert!(serves(&mut rig.guest_of(DISKS).1), "the last of them is found");

    let began = Instant::now();
    rig.running().remove_disk(&Rig::name(DISKS / 2), true, PATIENCE).unwrap();
    println!("one removed in {:?}", began.elapsed());
    let began = Instant::now();
    assert!(rig.stop().is_clean());
    println!("all stopped in {:?}", began.elapsed());
}
