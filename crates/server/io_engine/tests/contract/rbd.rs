//! Faults of a Ceph cluster: its daemons stop, its images change, and another client wants them.

use std::time::{Duration, Instant};

use disk_image::{Access, CapacityChange, Image, ImageError, ImageOptions, Location};
use io_engine::{Completion, Durability, EngineConfig, Event, OpError, OpKind, Unmap};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::bed::{Bed, IMAGE_BYTES, PATIENCE, config, is_zero, pattern};
use crate::beds::{CephImage, open_rbd, rbd_on, rbd_options, rbd_worker};

const BLOCK: u64 = 4096;
/// Requests in flight at a time.
const TOGETHER: u64 = 32;

fn ok(completions: &[Completion]) -> bool {
    completions.iter().all(|completion| completion.result == Ok(()))
}

fn write(bed: &Bed, block: u64) -> OpKind {
    OpKind::Write { range: bed.range(block * BLOCK, BLOCK), durability: Durability::Cached }
}

fn refused(options: &ImageOptions) -> ImageError {
    let Location::Rbd(spec) = &options.location else { panic!("{options:?}") };
    Image::open_rbd(spec, options, None).unwrap_err()
}

fn shown(options: &ImageOptions) -> String {
    format!("{:?}", refused(options))
}

/// The options of `image` for the image with this name.
fn named(image: &CephImage, name: &str) -> ImageOptions {
    let location = Location::parse(std::path::Path::new(name)).unwrap();
    ImageOptions { location, ..rbd_options(image) }
}

#[test]
fn requests_wait_while_the_storage_daemon_is_stopped_and_then_complete() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let mut bed = rbd_on(&rbd_options(&image));
    let osd = Pid::from_raw(image.pid("osd")).unwrap();
    kill_process(osd, Signal::STOP).unwrap();
    for number in 0..TOGETHER {
        bed.store(number * BLOCK, &pattern(number, BLOCK as usize));
        bed.push(number, write(&bed, number), &[(number * BLOCK, BLOCK)]);
    }
    bed.engine.submit().unwrap();
    // Nothing completes while the daemon is stopped.
    assert!(bed.settle().is_empty());
    kill_process(osd, Signal::CONT).unwrap();
    assert!(ok(&bed.finish(TOGETHER as usize)));
    for number in 0..TOGETHER {
        assert_eq!(bed.read(number * BLOCK, BLOCK), pattern(number, BLOCK as usize));
    }
}

/// Sleeps until the next completion, without a time limit.
fn sleep_for_completion(bed: &mut Bed) -> Completion {
    loop {
        bed.engine.wait(None).unwrap();
        let mut events = Vec::new();
        bed.engine.reap(&mut events);
        if let Some(Event::Completed(completion)) = events.pop() {
            return completion;
        }
    }
}

#[test]
fn lock_is_kept_until_its_last_user_releases_it() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let mut bed = rbd_on(&rbd_options(&image));
    // A resize has the lock, too, until it is done.
    bed.image.backing().begin_use(&|| true).unwrap();
    bed.image.backing().end_use().unwrap();
    bed.write(0, &pattern(1, 4096));
    assert!(bed.run(OpKind::Flush, &[]).result.is_ok());
    bed.image.backing().end_use().unwrap();
    assert!(!image.rbd(&["lock", "ls", image.name()]).contains("client."));
}

#[test]
fn worker_whose_write_finds_no_room_is_woken_when_another_workers_writes_complete() {
    const LARGE: u64 = 512 << 10;
    const MANY: u64 = 160; // 80 MiB, more than an image may have in flight
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let disk = open_rbd(&rbd_options(&image));
    disk.backing().begin_use(&|| true).unwrap();
    let deep = EngineConfig { depth: 256, ..config() };
    let (mut busy, mut idle) = (rbd_worker(disk.clone(), deep), rbd_worker(disk, config()));
    let osd = Pid::from_raw(image.pid("osd")).unwrap();
    kill_process(osd, Signal::STOP).unwrap();
    for number in 0..MANY {
        let kind = OpKind::Write { range: busy.range(0, LARGE), durability: Durability::Cached };
        busy.push(number, kind, &[(0, LARGE)]);
        // One submission takes only one such call.
        busy.engine.submit().unwrap();
    }
    let kind = write(&idle, 0);
    idle.push(0, kind, &[(0, BLOCK)]);
    idle.engine.submit().unwrap();
    let (done, woken) = std::sync::mpsc::channel();
    let waiting = std::thread::spawn(move || {
        let _ = done.send(sleep_for_completion(&mut idle).result);
    });
    kill_process(osd, Signal::CONT).unwrap();
    // Meanwhile the busy worker does nothing.
    assert_eq!(woken.recv_timeout(PATIENCE), Ok(Ok(())));
    waiting.join().unwrap();
    assert!(ok(&busy.finish(MANY as usize)));
}

#[test]
fn image_is_closed_when_its_requests_end_although_their_worker_is_gone() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let disk = open_rbd(&rbd_options(&image));
    disk.backing().begin_use(&|| true).unwrap();
    let impatient = EngineConfig { drain_timeout: Duration::from_millis(50), ..config() };
    let mut bed = rbd_worker(disk, impatient);
    let osd = Pid::from_raw(image.pid("osd")).unwrap();
    kill_process(osd, Signal::STOP).unwrap();
    for number in 0..TOGETHER {
        bed.push(number, write(&bed, number), &[(number * BLOCK, BLOCK)]);
    }
    bed.engine.submit().unwrap();
    drop(bed);
    kill_process(osd, Signal::CONT).unwrap();
    let end = Instant::now() + PATIENCE;
    // librbd watches the image's header while the image is open.
    while !image.rbd(&["status", image.name()]).contains("Watchers: none") {
        assert!(Instant::now() < end, "the image stays open");
    }
}

#[test]
fn second_writer_waits_for_the_first_one_and_a_reader_does_not() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let at_once = ImageOptions { lock_timeout: Duration::ZERO, ..rbd_options(&image) };
    let (first, second) = (open_rbd(&rbd_options(&image)), open_rbd(&at_once));
    first.backing().begin_use(&|| true).unwrap();
    let error = second.backing().begin_use(&|| true).unwrap_err();
    assert!(error.to_string().contains("in use by another client"), "{error}");
    let reader = open_rbd(&ImageOptions { access: Access::ReadOnly, ..rbd_options(&image) });
    reader.backing().begin_use(&|| true).unwrap();
    first.backing().end_use().unwrap();
    second.backing().begin_use(&|| true).unwrap();
    assert!(first.backing().begin_use(&|| false).is_err());
}

fn is_refused(bed: &mut Bed) -> bool {
    let kinds = [write(bed, 0), OpKind::Read { range: bed.range(0, BLOCK) }];
    kinds.into_iter().all(|kind| bed.run(kind, &[(0, BLOCK)]).result == Err(OpError::Errno(Errno::IO)))
}

#[test]
fn lock_that_another_client_breaks_ends_every_request_for_good() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let mut bed = rbd_on(&rbd_options(&image));
    bed.write(0, &pattern(1, 4096));
    let address = image.break_lock();
    let kind = write(&bed, 0);
    assert_eq!(bed.run(kind, &[(0, BLOCK)]).result, Err(OpError::Errno(Errno::IO)));
    assert!(bed.image.backing().is_refused() && is_refused(&mut bed));
    let mut next = rbd_on(&rbd_options(&image));
    next.write(0, &pattern(2, 4096));
    // The cluster forgets it by itself after an hour.
    image.run("ceph", &["osd", "blocklist", "rm", &address]);
    assert!(is_refused(&mut bed));
    assert_eq!(next.read(0, 4096), pattern(2, 4096));
}

#[test]
fn broken_lock_ends_every_image_of_its_connection_and_the_next_image_gets_a_new_one() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let Some(other) = CephImage::new(IMAGE_BYTES) else { return };
    let [shared, others] = [&image, &other].map(|image| {
        let mut options = rbd_options(image);
        options.rbd.cluster.share = true;
        options
    });
    let (mut bed, mut beside) = (rbd_on(&shared), rbd_on(&others));
    bed.write(0, &pattern(1, 4096));
    image.break_lock();
    let kind = write(&bed, 0);
    assert_eq!(bed.run(kind, &[(0, BLOCK)]).result, Err(OpError::Errno(Errno::IO)));
    assert!(beside.image.backing().is_refused() && is_refused(&mut beside));
    // The other image still holds the old connection.
    drop(bed);
    let mut again = rbd_on(&shared);
    again.write(0, &pattern(2, 4096));
    assert!(!again.image.backing().is_refused() && is_refused(&mut beside));
}

/// Waits until the image's client has noticed that it may no longer write.
fn until_refused(bed: &Bed) {
    let end = Instant::now() + PATIENCE;
    while !bed.image.backing().is_refused() {
        assert!(Instant::now() < end, "the lost lock is not noticed");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// `rbd lock rm` without a blocklist: the cluster still carries out the old owner's writes.
#[test]
fn lock_that_is_removed_without_a_blocklist_ends_every_request_and_the_next_client_waits_for_its_owner() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let mut bed = rbd_on(&rbd_options(&image));
    bed.write(0, &pattern(1, 4096));
    image.remove_lock_only();
    // The lock is free, but its owner does not know that yet.
    let next = open_rbd(&ImageOptions { lock_timeout: Duration::ZERO, ..rbd_options(&image) });
    let error = next.backing().begin_use(&|| true).unwrap_err();
    assert!(error.to_string().contains("in use by another client"), "{error}");
    until_refused(&bed);
    assert!(is_refused(&mut bed));
    assert!(bed.image.backing().begin_use(&|| true).is_err(), "the lost lock is taken again");
    drop(bed);
    let mut next = rbd_on(&rbd_options(&image));
    assert_eq!(next.read(0, 4096), pattern(1, 4096));
    next.write(0, &pattern(2, 4096));
    assert!(!next.image.backing().is_refused());
}

#[test]
fn image_that_is_removed_by_force_ends_every_request() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let mut bed = rbd_on(&rbd_options(&image));
    bed.write(0, &pattern(1, 4096));
    image.remove_header();
    until_refused(&bed);
    assert!(is_refused(&mut bed));
}

#[test]
fn size_that_another_client_changes_is_seen_and_nothing_is_cut_off_silently() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let mut bed = rbd_on(&rbd_options(&image));
    image.rbd(&["resize", "--no-progress", image.name(), "--size", "32M"]);
    let grown = bed.image.refresh_capacity().unwrap();
    assert_eq!(grown, CapacityChange::Grown { from: IMAGE_BYTES / 512, to: (32 << 20) / 512 });
    bed.write(24 << 20, &pattern(3, 4096));
    assert_eq!(bed.read(24 << 20, 4096), pattern(3, 4096));
    image.rbd(&["resize", "--no-progress", "--allow-shrink", image.name(), "--size", "16M"]);
    bed.image.refresh_capacity().unwrap();
    let range = bed.range(24 << 20, BLOCK);
    let beyond = OpKind::Write { range, durability: Durability::Cached };
    assert_eq!(bed.run(beyond, &[(0, BLOCK)]).result, Err(OpError::Errno(Errno::IO)));
    let read = bed.run(OpKind::Read { range }, &[(0, BLOCK)]);
    assert!(matches!(read.result, Err(OpError::EndOfImage { .. })), "{read:?}");
    // Across the end: librbd would cut these off.
    let across = bed.range((16 << 20) - BLOCK, 2 * BLOCK);
    let read = bed.run(OpKind::Read { range: across }, &[(0, 2 * BLOCK)]);
    assert!(matches!(read.result, Err(OpError::EndOfImage { .. })), "{read:?}");
    let (unmap, durability) = (Unmap::Allowed, Durability::Cached);
    for kind in [
        OpKind::Write { range: across, durability },
        OpKind::WriteZeroes { range: across, unmap, durability },
        OpKind::Discard { range: across, durability },
    ] {
        let pieces: &[_] = if kind.moves_data() { &[(0, 2 * BLOCK)] } else { &[] };
        assert_eq!(bed.run(kind, pieces).result, Err(OpError::Errno(Errno::IO)), "{kind:?}");
    }
}

#[test]
fn zeroes_are_exact_and_a_discard_keeps_its_neighbours_wherever_they_begin() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let mut bed = rbd_on(&rbd_options(&image));
    let cached = Durability::Cached;
    let kinds = |bed: &Bed, at: u64, len: u64| {
        let range = bed.range(at, len);
        let zeroes = |unmap| OpKind::WriteZeroes { range, unmap, durability: cached };
        [zeroes(Unmap::Allowed), zeroes(Unmap::Forbidden), OpKind::Discard { range, durability: cached }]
    };
    // Within a block of the cluster, across some, and across two objects.
    for (at, len) in [(512, 1024), (3584, 13 << 10), ((4 << 20) - 1536, 3072)] {
        for kind in kinds(&bed, at, len) {
            let first = at - 512;
            let mut expected = pattern(1, len as usize + 1024);
            bed.write(first, &expected);
            assert_eq!(bed.run(kind, &[]).result, Ok(()));
            let found = bed.read(first, len + 1024);
            if let OpKind::Discard { .. } = kind {
                // What is between is undefined.
                expected[512..][..len as usize].copy_from_slice(&found[512..][..len as usize]);
            } else {
                expected[512..][..len as usize].fill(0);
            }
            assert!(found == expected, "{kind:?}");
        }
    }
}

#[test]
fn gigabytes_are_discarded_and_zeroed_by_one_request() {
    const LEN: u64 = 5 << 30;
    let Some(image) = CephImage::new(LEN) else { return };
    let mut bed = rbd_on(&rbd_options(&image));
    let (range, durability) = (bed.range(0, LEN), Durability::Durable);
    let zeroes = OpKind::WriteZeroes { range, unmap: Unmap::Allowed, durability };
    for kind in [OpKind::Discard { range, durability }, zeroes] {
        [0, LEN - BLOCK].into_iter().for_each(|at| bed.write(at, &pattern(1, 4096)));
        assert_eq!(bed.run(kind, &[]).result, Ok(()));
        [0, LEN - BLOCK].into_iter().for_each(|at| assert!(is_zero(&bed.read(at, BLOCK)), "{kind:?}"));
    }
}

#[test]
fn renamed_image_is_used_on() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let mut bed = rbd_on(&rbd_options(&image));
    bed.write(0, &pattern(1, 4096));
    let other = format!("{}-other", image.name());
    image.rbd(&["mv", image.name(), &other]);
    bed.write(BLOCK, &pattern(2, 4096));
    assert_eq!((bed.read(0, BLOCK), bed.read(BLOCK, BLOCK)), (pattern(1, 4096), pattern(2, 4096)));
    image.rbd(&["mv", &other, image.name()]);
}

/// librbd watches no image that it opened for reading.
#[test]
fn reader_keeps_the_size_of_its_opening() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let mut reader = rbd_on(&ImageOptions { access: Access::ReadOnly, ..rbd_options(&image) });
    for size in ["32M", "8M"] {
        image.rbd(&["resize", "--no-progress", "--allow-shrink", image.name(), "--size", size]);
        assert_eq!(reader.image.refresh_capacity().unwrap(), CapacityChange::Unchanged);
    }
    // What was cut off reads as zeroes.
    assert!(is_zero(&reader.read(12 << 20, BLOCK)));
}

#[test]
fn snapshot_is_read_and_needs_readonly() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let mut bed = rbd_on(&rbd_options(&image));
    bed.write(0, &pattern(1, 4096));
    image.rbd(&["snap", "create", "--no-progress", &format!("{}@then", image.name())]);
    bed.write(0, &pattern(2, 4096));
    drop(bed);
    let then = named(&image, &format!("{}@then", image.spec()));
    assert!(shown(&then).contains("Snapshot"));
    let mut bed = rbd_on(&ImageOptions { access: Access::ReadOnly, ..then });
    assert_eq!(bed.read(0, 4096), pattern(1, 4096));
    drop(bed);
    image.rbd(&["snap", "purge", "--no-progress", image.name()]);
}

#[test]
fn image_that_cannot_be_opened_is_refused_with_what_is_wrong() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    assert!(shown(&named(&image, "rbd:rbd/none")).contains("NoImage"));
    assert!(shown(&named(&image, "rbd:none/none")).contains("NoPool"));
    let mut stranger = rbd_options(&image);
    stranger.rbd.cluster.id = "stranger".to_owned();
    assert!(shown(&stranger).contains("Refused"));
    let mut nowhere = rbd_options(&image);
    nowhere.rbd.cluster.conf = "/nonexistent/ceph.conf".into();
    assert!(shown(&nowhere).contains("Configuration"));
    for feature in ["fast-diff", "exclusive-lock"] {
        image.rbd(&["feature", "disable", image.name(), feature]);
    }
    assert!(shown(&rbd_options(&image)).contains("NoLock"));
    let mut without = rbd_options(&image);
    without.rbd.lock = false;
    open_rbd(&without);
}
