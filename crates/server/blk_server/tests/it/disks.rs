//! Adds, removes and resizes disks while the server and other guests continue.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use blk_server::{AdminError, DiskConfig, Server, ServerConfig, ServerError, SocketConfig};
use disk_image::{CacheMode, HostOpener, Image, ImageError, ImageOptions, ResizeError};
use io_engine::{Fault, Verb, When};
use rustix::io::Errno;

use crate::rig::disks::BRIEFLY;
use crate::rig::passed::{add_transfer, faulty, hold, let_go, serves};
use crate::rig::{CALM, Guest, MIB, Options, PATIENCE, Rig, code, eventually, feature, kind, ready};

const OK: u8 = 0;
const IOERR: u8 = 1;

/// Writes and reads back one block after another, each with its own number, until told to stop or until the disk is
/// removed. Returns the number of acknowledged writes.
fn load(guest: &mut Guest, stop: &AtomicBool, done: &AtomicU64) {
    for number in 0.. {
        if stop.load(Relaxed) {
            return;
        }
        let sector = number % 256 * 8;
        let data = u64::to_le_bytes(number + 1).repeat(512);
        assert_eq!(guest.write(sector, &data).status, Some(OK));
        assert_eq!(guest.read(sector, 4096).data, data);
        done.store(number + 1, Relaxed);
    }
}

/// Whether the requests of the neighbouring guest still complete.
fn goes_on(done: &AtomicU64) -> bool {
    let before = done.load(Relaxed);
    eventually(|| done.load(Relaxed) > before + 20)
}

/// Calls `act` while a guest of disk 0 works.
fn under_load(rig: &Rig, act: impl FnOnce(&AtomicU64)) {
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let (_front_end, mut guest) = ready(rig, feature::USUAL);
    std::thread::scope(|scope| {
        let _stops = Stops(&stop);
        scope.spawn(|| load(&mut guest, &stop, &done));
        act(&done);
    });
}

struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn read_write(rig: &Rig, number: usize) -> Result<Image, ImageError> {
    let path = rig.image_of(number);
    Image::open(&HostOpener, &ImageOptions { lock_timeout: Duration::ZERO, ..ImageOptions::new(path) })
}

#[test]
fn disk_added_under_load_serves_its_guest_and_the_other_goes_on() {
    let rig = Rig::start(Options { workers: 2, ..Options::default() });
    under_load(&rig, |done| {
        for number in 1..6 {
            rig.add(number).unwrap();
            let (_front_end, mut guest) = rig.guest_of(number);
            assert!(serves(&mut guest));
            assert!(goes_on(done));
        }
    });
    let names: Vec<_> = (0..6).map(Rig::name).collect();
    assert_eq!(rig.running().disk_names(), names);
}

#[test]
fn disk_removed_under_its_own_load_loses_nothing_acknowledged_and_its_neighbour_goes_on() {
    let rig = Rig::start(Options { disks: 2, workers: 2, ..Options::default() });
    under_load(&rig, |done| {
        let (front_end, mut guest) = rig.guest_of(1);
        let sent: Vec<_> = (0..64)
            .map(|n| {
                let data = u64::to_le_bytes(n + 1).repeat(512);
                guest.view.store(8 * MIB + n * 4096, &data).unwrap();
                add_transfer(&mut guest, kind::OUT, n * 8, 8 * MIB + n * 4096, 4096)
            })
            .collect();
        guest.submit();
        rig.remove(1).unwrap();
        assert!(front_end.is_closed());
        for (n, pending) in (0..).zip(&sent) {
            // Each request has either completed successfully or was never taken from the ring.
            let status = pending.status(&guest);
            assert!([OK, 0xff].contains(&status), "status {status}");
            let written: Vec<u8> = u64::to_le_bytes(n + 1).repeat(512);
            assert!(status != OK || rig.bytes_of(1, n * 4096, 4096) == written, "write {n} is lost");
        }
        assert!(goes_on(done));
    });
    assert!(!rig.socket_of(1).exists());
    assert_eq!(rig.running().disk_names(), ["test0"]);
    read_write(&rig, 1).unwrap();
}

#[test]
fn disk_is_in_use_from_its_guests_first_ring_to_the_end_of_its_front_end() {
    let rig = Rig::start(Options { disks: 2, ..Options::default() });
    let (front_end, mut guest) = rig.guest_of(1);
    let refused = || rig.running().remove_disk("test1", false, PATIENCE);
    assert!(matches!(refused(), Err(AdminError::InUse { .. })));
    assert!(serves(&mut guest), "a refusal changes nothing");
    front_end.stop_queue(0);
    assert!(matches!(refused(), Err(AdminError::InUse { .. })), "the guest may be starting again");
    drop(front_end);
    assert!(eventually(|| refused().is_ok()));
    assert!(matches!(refused(), Err(AdminError::NoDisk { .. })));
}

#[test]
fn front_end_that_never_started_a_ring_does_not_keep_its_disk() {
    let rig = Rig::start(Options { disks: 2, ..Options::default() });
    let silent = rig.connect_to(1);
    let mut waiting = rig.connect_to(1);
    waiting.negotiate(feature::USUAL);
    waiting.share_memory(16 * MIB);
    rig.running().remove_disk("test1", false, PATIENCE).unwrap();
    assert!(silent.is_closed() && waiting.is_closed());
}

#[test]
fn requests_that_hang_are_given_up_when_the_time_is_over_and_those_of_other_disks_are_not() {
    let (options, engine) = faulty();
    let rig = Rig::start(Options { disks: 2, ..options });
    let (_front_end, mut guest) = rig.guest_of(1);
    let (_other, mut neighbour) = rig.guest_of(0);
    hold(&engine);
    let hung = add_transfer(&mut guest, kind::OUT, 0, 8 * MIB, 4096);
    let spared = add_transfer(&mut neighbour, kind::OUT, 0, 8 * MIB, 4096);
    guest.submit();
    neighbour.submit();
    assert!(eventually(|| engine.hanging() == 2));
    rig.running().remove_disk("test1", true, BRIEFLY).unwrap();
    assert_eq!((hung.status(&guest), spared.status(&neighbour)), (IOERR, 0xff));
    assert_eq!(engine.hanging(), 1);
    let_go(&engine);
    neighbour.wait_for(spared.token);
    assert_eq!(spared.status(&neighbour), OK);
    read_write(&rig, 1).unwrap();
}

#[test]
fn device_that_never_answers_keeps_its_disk_without_front_ends_until_it_is_removed_again() {
    let (options, engine) = faulty();
    let rig = Rig::start(Options { disks: 2, ..options });
    let (front_end, mut guest) = rig.guest_of(1);
    engine.inject(When::Always, Fault::Stick, 1);
    let stuck = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| engine.hanging() == 1));
    let refused = rig.running().remove_disk("test1", true, BRIEFLY);
    assert!(matches!(refused, Err(AdminError::StillInFlight { .. })), "{refused:?}");
    assert!(rig.connect_to(1).is_closed(), "nobody gets in, and nobody waits");
    let (disk, socket) = rig.disk(2);
    let again = rig.running().add_disk(DiskConfig { name: "test1".into(), ..disk }, &socket);
    assert!(matches!(again, Err(AdminError::DiskExists { .. })), "{again:?}");
    assert!(matches!(read_write(&rig, 1), Err(ImageError::Locked { .. })));
    let (_other, mut neighbour) = rig.guest_of(0);
    assert!(serves(&mut neighbour));
    let_go(&engine);
    rig.remove(1).unwrap();
    assert!(front_end.is_closed());
    assert_eq!(stuck.status(&guest), OK, "done in the end, it is not denied");
    rig.add(1).unwrap();
    assert!(serves(&mut rig.guest_of(1).1));
}

#[test]
fn changes_of_a_disk_that_is_being_removed_are_refused_at_once_and_others_are_made() {
    let (options, engine) = faulty();
    let rig = Rig::start(Options { disks: 2, ..options });
    let (_front_end, mut guest) = rig.guest_of(1);
    hold(&engine);
    let pending = add_transfer(&mut guest, kind::OUT, 0, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| engine.hanging() == 1));
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| rig.remove(1));
        let turned_away = || rig.connect_to(1).is_closed();
        assert!(eventually(turned_away));
        let twice = rig.running().remove_disk("test1", true, PATIENCE);
        assert!(matches!(twice, Err(AdminError::Busy { .. })), "{twice:?}");
        let resized = rig.running().resize_disk("test1", 32 * MIB, false);
        assert!(matches!(resized, Err(AdminError::Busy { .. })), "{resized:?}");
        rig.running().refresh_capacities();
        rig.running().resize_disk("test0", 32 * MIB, false).unwrap();
        rig.add(2).unwrap();
        assert!(!removal.is_finished());
        let_go(&engine);
        removal.join().unwrap().unwrap();
    });
    assert_eq!(pending.status(&guest), OK);
    assert_eq!(rig.running().disk_names(), ["test0", "test2"]);
}

#[test]
fn front_end_that_never_reads_its_replies_does_not_hold_up_a_removal() {
    let rig = Rig::start(Options { disks: 2, ..Options::default() });
    let deaf = rig.connect_to(1);
    deaf.socket().set_nonblocking(true).unwrap();
    let mut message = [0; 12];
    message[0] = code::GET_FEATURES as u8;
    message[4] = 1;
    let (mut since, full) = (std::time::Instant::now(), CALM);
    // Waits until the session has waited for room for a while, within its five seconds.
    while since.elapsed() < full {
        if rustix::io::write(deaf.socket(), &message).is_ok() {
            since = std::time::Instant::now();
        }
    }
    rig.running().remove_disk("test1", true, Duration::ZERO).unwrap();
}

#[test]
fn disk_whose_sync_failed_is_removed_and_that_it_is_not_flushed_is_said() {
    let (options, engine) = faulty();
    let rig = Rig::start(Options { disks: 2, ..options });
    let (_front_end, mut guest) = rig.guest_of(1);
    engine.inject(When::Verb(Verb::Sync), Fault::Errno(Errno::IO), 1);
    assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).status, Some(IOERR));
    assert!(rig.report_of(1).failed);
    let removed = rig.remove(1);
    assert!(matches!(removed, Err(AdminError::NotFlushed { .. })), "{removed:?}");
    assert_eq!(rig.running().disk_names(), ["test0"]);
    read_write(&rig, 1).unwrap();
}

#[test]
fn disk_that_ignores_flushes_is_removed_without_one() {
    let (options, engine) = faulty();
    let mut options = Options { disks: 2, ..options };
    options.image.cache = CacheMode::Unsafe;
    let rig = Rig::start(options);
    let (_front_end, mut guest) = rig.guest_of(1);
    assert!(serves(&mut guest));
    rig.remove(1).unwrap();
    drop(engine);
}

#[test]
fn image_name_and_socket_of_a_removed_disk_are_free_at_once() {
    let rig = Rig::start(Options { disks: 2, ..Options::default() });
    under_load(&rig, |done| {
        for _ in 0..20 {
            let (_front_end, mut guest) = rig.guest_of(1);
            assert!(serves(&mut guest));
            rig.remove(1).unwrap();
            rig.add(1).unwrap();
        }
        assert!(goes_on(done));
    });
    assert!(serves(&mut rig.guest_of(1).1));
}

#[test]
fn name_or_socket_that_is_taken_is_refused_and_the_image_let_go() {
    let rig = Rig::start(Options::default());
    let (disk, socket) = rig.disk(1);
    let refused = rig.running().add_disk(DiskConfig { name: "test0".into(), ..disk }, &socket);
    assert!(matches!(refused, Err(AdminError::DiskExists { .. })), "{refused:?}");
    let (disk, mut socket) = rig.disk(1);
    let folder = rig.socket.parent().unwrap();
    socket.path = folder.join(".").join(rig.socket.file_name().unwrap());
    let refused = rig.running().add_disk(disk, &socket).unwrap_err();
    let AdminError::Start(why) = refused else { panic!("{refused:?}") };
    assert!(matches!(*why, ServerError::SocketTwice { ref other, .. } if other == "test0"), "{why:?}");
    rig.add(1).unwrap();
    assert!(serves(&mut rig.guest_of(0).1) && serves(&mut rig.guest_of(1).1));
}

fn start(disks: Vec<(DiskConfig, SocketConfig)>) -> Result<Server, ServerError> {
    let engine = || Ok(Box::new(io_engine::IoUringEngine::new(io_engine::EngineConfig::default())?) as _);
    let engine = blk_server::EngineSource::new("test", 1024, Box::new(engine));
    let config =
        ServerConfig { engine, workers: vec![], poll: Duration::ZERO, balance: blk_server::Balance::Off };
    let opener: std::sync::Arc<dyn disk_image::Opener> = std::sync::Arc::new(HostOpener);
    Server::start(&config, &opener, disks)
}

#[test]
fn server_with_a_name_or_a_socket_twice_does_not_start_and_touches_nothing() {
    let mut rig = Rig::start(Options { disks: 0, ..Options::default() });
    assert!(rig.stop().is_clean());
    let (disk, socket) = rig.disk(2);
    // Leaves a socket file, as a dead server does. The server removes such a file, but only after all checks.
    drop(std::os::unix::net::UnixListener::bind(rig.socket_of(1)).unwrap());
    let named_twice = vec![rig.disk(1), (DiskConfig { name: "test1".into(), ..disk }, socket)];
    let refused = start(named_twice);
    assert!(matches!(refused, Err(ServerError::NameTwice { .. })), "{refused:?}");
    let ((first, socket), (second, _)) = (rig.disk(1), rig.disk(2));
    let refused = start(vec![(first, socket.clone()), (second, socket)]);
    assert!(matches!(refused, Err(ServerError::SocketTwice { .. })), "{refused:?}");
    assert!(rig.socket_of(1).exists());
    assert!(start(vec![rig.disk(1), rig.disk(2)]).unwrap().stop(PATIENCE).is_clean());
}

#[test]
fn one_image_is_two_disks_if_both_only_read_it() {
    let rig = Rig::start(Options { disks: 0, ..Options::default() });
    let (_, socket) = rig.disk(1);
    let reader = || {
        let options = ImageOptions::new(rig.image_of(1));
        let access = disk_image::Access::ReadOnly;
        Image::open(&HostOpener, &ImageOptions { access, lock_timeout: Duration::ZERO, ..options })
    };
    let disk = |number: usize, image| {
        let name = Rig::name(number);
        let (config, _) = rig.disk(number + 10);
        DiskConfig { name, image, ..config }
    };
    rig.running().add_disk(disk(1, reader().unwrap()), &socket).unwrap();
    let socket = SocketConfig { path: rig.socket_of(2), ..socket };
    rig.running().add_disk(disk(2, reader().unwrap()), &socket).unwrap();
    assert!(matches!(read_write(&rig, 1), Err(ImageError::Locked { .. })));
    assert!(rig.report_of(1).read_only && rig.report_of(2).read_only);
    rig.remove(1).unwrap();
    assert!(matches!(read_write(&rig, 1), Err(ImageError::Locked { .. })));
    rig.remove(2).unwrap();
    read_write(&rig, 1).unwrap();
}

#[test]
fn disk_grows_while_its_guest_reads_and_the_guest_is_told() {
    let rig = Rig::start(Options::default());
    let watcher = rig.connect();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    watcher.negotiate(feature::USUAL);
    watcher.ok(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    under_load(&rig, |done| {
        for mib in 17..40 {
            rig.running().resize_disk("test0", mib * MIB, false).unwrap();
            let mut message = [0; 12];
            ours.read_exact(&mut message).unwrap();
            assert_eq!(watcher.config(0, 8), (mib * MIB / 512).to_le_bytes());
        }
        assert!(goes_on(done));
    });
    assert_eq!(rig.report_of(0).capacity_sectors, 39 * MIB / 512);
    assert_eq!(std::fs::metadata(&rig.image).unwrap().len(), 39 * MIB);
    assert!(eventually(|| rig.report_of(0).sessions == 1), "the load's front-end has gone");
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    assert_eq!(guest.write(38 * MIB / 512, &[7; 4096]).status, Some(OK));
    assert_eq!(rig.image_bytes(38 * MIB, 4096), [7; 4096]);
}

#[test]
fn disk_shrinks_only_if_forced_and_then_requests_behind_its_end_fail() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    assert_eq!(guest.write(12 * MIB / 512, &[7; 4096]).status, Some(OK));
    let refused = rig.running().resize_disk("test0", 8 * MIB, false);
    let sizes = (16 * MIB, 8 * MIB);
    assert!(
        matches!(refused, Err(AdminError::WouldShrink { from_bytes, to_bytes, .. })
            if (from_bytes, to_bytes) == sizes),
        "{refused:?}"
    );
    assert_eq!(guest.read(12 * MIB / 512, 4096).data, [7; 4096]);
    rig.running().resize_disk("test0", 8 * MIB, true).unwrap();
    assert_eq!(front_end.config(0, 8), (8 * MIB / 512).to_le_bytes());
    assert_eq!(guest.read(12 * MIB / 512, 4096).status, Some(IOERR));
    assert_eq!(guest.write(12 * MIB / 512, &[7; 4096]).status, Some(IOERR));
    assert_eq!(guest.read(8 * MIB / 512 - 8, 4096).status, Some(OK));
    assert_eq!(std::fs::metadata(&rig.image).unwrap().len(), 8 * MIB);
    rig.running().resize_disk("test0", 16 * MIB, false).unwrap();
    assert_eq!(guest.read(12 * MIB / 512, 4096).data, [0; 4096]);
}

#[test]
fn impossible_sizes_and_unknown_disks_are_refused_with_the_reason() {
    let rig = Rig::start(Options::default());
    let ragged = rig.running().resize_disk("test0", 16 * MIB + 100, false);
    let Err(AdminError::Resize { source: ResizeError::Ragged { .. }, .. }) = ragged else {
        panic!("{ragged:?}")
    };
    let huge = rig.running().resize_disk("test0", !4095, false);
    assert!(matches!(huge, Err(AdminError::Resize { .. })), "{huge:?}");
    assert!(matches!(rig.running().resize_disk("none", MIB, false), Err(AdminError::NoDisk { .. })));
    let removed = rig.running().remove_disk("none", true, Duration::MAX);
    assert!(matches!(removed, Err(AdminError::NoDisk { .. })), "{removed:?}");
    assert_eq!(rig.report_of(0).capacity_sectors, 16 * MIB / 512);
}

#[test]
fn endless_timeout_is_as_good_as_a_long_one() {
    let rig = Rig::start(Options { disks: 2, ..Options::default() });
    assert!(serves(&mut rig.guest_of(1).1));
    rig.running().remove_disk("test1", true, Duration::MAX).unwrap();
    assert_eq!(rig.running().disk_names(), ["test0"]);
}

#[test]
fn report_tells_what_each_disk_is() {
    let rig = Rig::start(Options { disks: 2, ..Options::default() });
    let (_front_end, _guest) = rig.guest_of(1);
    let disks = rig.running().report().disks;
    let [idle, used] = &disks[..] else { panic!("{disks:?}") };
    assert_eq!((idle.name.as_str(), idle.sessions), ("test0", 0));
    assert_eq!((used.name.as_str(), used.sessions), ("test1", 1));
    assert_eq!((&used.image, &used.socket), (&rig.image_of(1).canonicalize().unwrap(), &rig.socket_of(1)));
    assert_eq!((used.capacity_sectors, used.queues_offered), (16 * MIB / 512, 4));
    assert_eq!((used.read_only, used.failed, used.engine.as_str()), (false, false, "test"));
}

/// Acts as one of many concurrent callers. Each refusal must be one that another caller can have caused.
fn meddle(rig: &Rig, salt: u64) {
    for step in 0..30 {
        let outcome = match (step + salt) % 4 {
            0 => add_if_free(rig),
            1 => rig.running().remove_disk("test1", true, PATIENCE),
            2 => rig.running().resize_disk("test1", (17 + step) * MIB, true),
            _ => {
                rig.running().refresh_capacities();
                assert!(!rig.running().report().disks.is_empty());
                Ok(())
            }
        };
        let expected = match &outcome {
            Err(AdminError::Start(why)) => matches!(**why, ServerError::SocketTwice { .. }),
            Err(error) => matches!(
                error,
                AdminError::NoDisk { .. } | AdminError::Busy { .. } | AdminError::DiskExists { .. }
            ),
            Ok(()) => true,
        };
        assert!(expected, "{outcome:?}");
    }
}

fn add_if_free(rig: &Rig) -> Result<(), AdminError> {
    let Ok(image) = read_write(rig, 1) else { return Ok(()) };
    let (config, socket) = rig.disk(100 + usize::try_from(rustix::thread::gettid().as_raw_pid()).unwrap());
    let socket = SocketConfig { path: rig.socket_of(1), ..socket };
    rig.running().add_disk(DiskConfig { name: "test1".into(), image, ..config }, &socket)
}

#[test]
fn many_callers_at_once_get_in_nobodys_way_for_long_and_the_disk_is_whole_afterwards() {
    let rig = Rig::start(Options { disks: 2, workers: 2, ..Options::default() });
    under_load(&rig, |done| {
        std::thread::scope(|scope| {
            (0..4).for_each(|salt| {
                _ = scope.spawn({
                    let rig = &rig;
                    move || meddle(rig, salt)
                })
            });
        });
        assert!(goes_on(done));
    });
    if rig.running().disk_names().len() == 1 {
        add_if_free(&rig).unwrap();
    }
    assert!(serves(&mut rig.guest_of(1).1));
}
