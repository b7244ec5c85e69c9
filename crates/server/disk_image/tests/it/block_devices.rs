//! Block devices as images, with a loop device. Skipped, with a line, without root or loop devices.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use disk_image::{CacheMode, CapacityChange, ImageError, ImageOptions, ResizeError};
use xtask::skip::{Reason, skip};

use crate::rig;
use crate::rig::{assert_says, image, open, options, refusal};

/// A loop device over a file; detached on drop.
struct Loop {
    device: PathBuf,
    backing: PathBuf,
    _folder: tempfile::TempDir,
}

impl Loop {
    fn attach(size_bytes: u64, arguments: &[&str]) -> Option<Self> {
        let (folder, backing) = image(size_bytes);
        let output =
            Command::new("losetup").args(["--find", "--show"]).args(arguments).arg(&backing).output();
        let output = output.ok().filter(|output| output.status.success());
        let Some(output) = output else {
            skip(Reason::NoLoopDevice, "");
            return None;
        };
        let device = String::from_utf8(output.stdout).unwrap().trim().into();
        Some(Self { device, backing, _folder: folder })
    }

    fn path(&self) -> &Path {
        &self.device
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        Command::new("losetup").arg("--detach").arg(&self.device).status().ok();
    }
}

#[test]
fn loop_device_has_its_files_size_and_its_queues_limits() {
    let Some(device) = Loop::attach(1 << 20, &[]) else { return };
    let image = open(&options(device.path())).unwrap();
    assert_eq!((image.capacity_sectors(), image.block_size()), (2048, 512));
    let sysfs = Path::new("/sys/class/block").join(device.path().file_name().unwrap()).join("queue");
    let granularity = std::fs::read_to_string(sysfs.join("discard_granularity")).unwrap();
    let granularity: u32 = granularity.trim().parse().unwrap();
    assert_eq!(image.discard_limits().map(|limits| limits.sector_alignment * 512), Some(granularity));
    assert!(image.write_zeroes_limits().unwrap().may_unmap);
}

#[test]
fn device_with_4k_sectors_offers_4k_blocks_and_refuses_smaller_ones() {
    let Some(device) = Loop::attach(1 << 20, &["--sector-size", "4096"]) else { return };
    assert_eq!(open(&options(device.path())).unwrap().block_size(), 4096);
    let smaller = ImageOptions { block_size: Some(512), lock_timeout: rig::SOON, ..options(device.path()) };
    assert_says(&refusal(&smaller), &["block size 512", "4096 bytes", "--block-size 4096"]);
}

#[test]
fn device_is_locked_against_a_second_writer() {
    let Some(device) = Loop::attach(1 << 20, &[]) else { return };
    let _first = open(&options(device.path())).unwrap();
    assert!(matches!(open(&options(device.path())), Err(ImageError::Locked { .. })));
}

fn claim(device: &Path) -> rustix::io::Result<std::os::fd::OwnedFd> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::EXCL | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open(device, flags, rustix::fs::Mode::empty())
}

#[test]
fn device_that_is_claimed_as_by_a_mount_is_served_to_readers_only() {
    let Some(device) = Loop::attach(1 << 20, &[]) else { return };
    let _mount = claim(device.path()).unwrap();
    assert_says(&refusal(&options(device.path())), &["in use by the kernel", "mounted", "unmount"]);
    let reader = ImageOptions { lock_timeout: rig::SOON, ..rig::read_only(device.path()) };
    assert!(open(&reader).is_ok());
}

#[test]
fn device_in_use_by_a_writer_cannot_be_mounted_and_can_afterwards() {
    let Some(device) = Loop::attach(1 << 20, &[]) else { return };
    let image = open(&options(device.path())).unwrap();
    assert_eq!(claim(device.path()).err(), Some(rustix::io::Errno::BUSY));
    drop(image);
    let start = std::time::Instant::now(); // a test that forks may hold a copy until exec
    while claim(device.path()).is_err() {
        assert!(start.elapsed() < rig::SOON);
    }
}

#[test]
fn waiting_writer_gets_the_device_when_the_first_one_lets_go() {
    let Some(device) = Loop::attach(1 << 20, &[]) else { return };
    let first = open(&options(device.path())).unwrap();
    let waiting = ImageOptions { lock_timeout: rig::SOON, ..options(device.path()) };
    let waiter = std::thread::spawn(move || open(&waiting).map(drop));
    std::thread::sleep(std::time::Duration::from_millis(250));
    assert!(!waiter.is_finished());
    drop(first);
    waiter.join().unwrap().unwrap();
}

#[test]
fn buffered_512_byte_blocks_on_4k_sectors_offer_zeroes_but_no_discard() {
    let Some(device) = Loop::attach(1 << 20, &["--sector-size", "4096"]) else { return };
    let cache = CacheMode::Writeback;
    let small = ImageOptions { block_size: Some(512), cache, ..options(device.path()) };
    let image = open(&small).unwrap();
    assert_eq!((image.block_size(), image.discard_limits()), (512, None));
    assert!(!image.write_zeroes_limits().unwrap().may_unmap);
}

#[test]
fn grown_device_is_taken_over() {
    let Some(device) = Loop::attach(1 << 20, &[]) else { return };
    let image = open(&options(device.path())).unwrap();
    std::fs::OpenOptions::new().write(true).open(&device.backing).unwrap().set_len(2 << 20).unwrap();
    let resized = Command::new("losetup").arg("--set-capacity").arg(device.path()).status().unwrap();
    assert!(resized.success());
    assert_eq!(image.refresh_capacity().unwrap(), CapacityChange::Grown { from: 2048, to: 4096 });
}

#[test]
fn device_is_resized_from_outside_and_its_size_read_again() {
    let Some(device) = Loop::attach(1 << 20, &[]) else { return };
    let image = open(&options(device.path())).unwrap();
    let refused = image.resize(2 << 20, false);
    assert!(matches!(refused, Err(ResizeError::BlockDevice { size_bytes: 1_048_576, .. })), "{refused:?}");
    std::fs::OpenOptions::new().write(true).open(&device.backing).unwrap().set_len(2 << 20).unwrap();
    let resized = Command::new("losetup").arg("--set-capacity").arg(device.path()).status().unwrap();
    assert!(resized.success());
    assert_eq!(image.resize(2 << 20, false).unwrap(), 2048);
    assert_eq!(image.capacity_sectors(), 4096);
}

#[test]
fn punching_a_hole_into_an_offered_device_works() {
    let Some(device) = Loop::attach(1 << 20, &[]) else { return };
    let image = open(&options(device.path())).unwrap();
    assert!(image.discard_limits().is_some());
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    assert_eq!(rustix::fs::fallocate(image.file().unwrap(), punch, 4096, 8192), Ok(()));
}
