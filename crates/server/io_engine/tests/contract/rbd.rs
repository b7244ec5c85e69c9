//! Faults of a Ceph cluster: its daemons stop, its images change, and another client wants them.

use disk_image::{Access, CapacityChange, Image, ImageError, ImageOptions, Location};
use io_engine::{Completion, Durability, OpError, OpKind};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::bed::{Bed, IMAGE_BYTES, pattern};
use crate::beds::{CephImage, open_rbd, rbd_on, rbd_options};

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
    Image::open_rbd(spec, options).unwrap_err()
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

#[test]
fn second_writer_is_refused_and_a_reader_is_not() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let first = open_rbd(&rbd_options(&image));
    let at_once = ImageOptions { lock_timeout: std::time::Duration::ZERO, ..rbd_options(&image) };
    let error = shown(&at_once);
    assert!(error.contains("Unreachable") && error.contains("Locked"), "{error}");
    assert!(open_rbd(&ImageOptions { access: Access::ReadOnly, ..rbd_options(&image) }).read_only());
    drop(first);
    open_rbd(&rbd_options(&image));
}

#[test]
fn lock_that_another_client_breaks_ends_every_request_for_good() {
    let Some(image) = CephImage::new(IMAGE_BYTES) else { return };
    let mut bed = rbd_on(&rbd_options(&image));
    bed.write(0, &pattern(1, 4096));
    let locks = image.rbd(&["lock", "ls", image.name()]);
    let lock = locks.lines().find(|line| line.starts_with("client.")).unwrap();
    let words: Vec<&str> = lock.split_whitespace().collect();
    image.rbd(&["lock", "rm", image.name(), &words[1..3].join(" "), words[0]]);
    for _ in 0..2 {
        let kind = write(&bed, 0);
        assert_eq!(bed.run(kind, &[(0, BLOCK)]).result, Err(OpError::Errno(Errno::IO)));
    }
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
