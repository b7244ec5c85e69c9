//! The properties of a valid image, and how they follow its file's size.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::os::unix::fs::{FileExt, PermissionsExt, symlink};

use disk_image::{Alignment, CacheMode, CapacityChange, ImageOptions, RangeError, ResizeError};

use crate::rig;
use crate::rig::{assert_says, folder, image, open, options, read_only};

fn buffered(path: &std::path::Path) -> ImageOptions {
    ImageOptions { cache: CacheMode::Writeback, ..options(path) }
}

#[test]
fn direct_image_can_be_read_and_written_in_its_own_alignment() {
    let (_folder, path) = image(1 << 20);
    let image = open(&options(&path)).unwrap();
    let Alignment { memory_bytes, offset_bytes } = image.alignment();
    let (memory, len) = (memory_bytes as usize, offset_bytes as usize);
    let mut buffer = vec![0_u8; len + 3 * memory];
    let start = buffer.as_ptr().align_offset(2 * memory) + memory; // aligned to `memory`, and no better
    let data = &mut buffer[start..start + len];
    let written: Vec<u8> = (0..len).map(|at| (at % 251) as u8 + 1).collect();
    data.copy_from_slice(&written);
    assert_eq!(image.file().unwrap().write_at(data, u64::from(offset_bytes)).unwrap(), len);
    data.fill(0);
    assert_eq!(image.file().unwrap().read_at(data, u64::from(offset_bytes)).unwrap(), len);
    assert!(data == written, "what was read is not what was written");
    assert!(image.block_size() >= offset_bytes);
}

#[test]
fn direct_image_on_tmpfs_is_probed_by_reading() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(512).unwrap(); // smaller than the larger probes
    let image = open(&options(&path)).unwrap();
    assert!(image.alignment().offset_bytes.is_power_of_two());
    assert_eq!(image.block_size(), image.alignment().offset_bytes.max(512));
}

#[test]
fn opened_file_blocks_and_has_the_direct_flag_that_was_asked_for() {
    let (_folder, path) = image(1 << 20);
    let flags = |options| rustix::fs::fcntl_getfl(open(&options).unwrap().file().unwrap()).unwrap();
    let direct = flags(options(&path));
    let cached = flags(ImageOptions { lock_timeout: rig::SOON, ..buffered(&path) });
    assert!(direct.contains(rustix::fs::OFlags::DIRECT) && !cached.contains(rustix::fs::OFlags::DIRECT));
    assert!(!direct.contains(rustix::fs::OFlags::NONBLOCK));
}

#[test]
fn page_cache_takes_any_alignment_but_the_guest_sees_the_same_blocks() {
    let (_folder, path) = image(1 << 20);
    let direct = open(&options(&path)).unwrap().block_size();
    let cached = open(&ImageOptions { lock_timeout: rig::SOON, ..buffered(&path) }).unwrap();
    assert_eq!(cached.alignment(), Alignment { memory_bytes: 1, offset_bytes: 1 });
    assert_eq!(cached.block_size(), direct);
}

#[test]
fn block_size_asked_for_is_offered_and_enforced() {
    let (_folder, path) = image(1 << 20);
    let image = open(&ImageOptions { block_size: Some(4096), ..options(&path) }).unwrap();
    assert_eq!((image.block_size(), image.capacity_sectors()), (4096, 2048));
    assert!(image.check(8, 4096).is_ok());
    assert!(matches!(image.check(1, 512), Err(RangeError::Misaligned { block_size_bytes: 4096, .. })));
}

#[test]
fn created_image_has_its_size_and_a_private_mode_and_stays() {
    let folder = folder();
    let path = folder.path().join("disk.raw");
    let image = open(&ImageOptions { create_bytes: Some(3 << 20), ..options(&path) }).unwrap();
    assert_eq!(image.capacity_sectors(), (3 << 20) / 512);
    drop(image);
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777 & !0o600), (3 << 20, 0));
}

#[test]
fn writable_file_offers_discard_and_unmapping_zeroes() {
    let (_folder, path) = image(1 << 20);
    let image = open(&options(&path)).unwrap();
    let discard = image.discard_limits().unwrap();
    assert_eq!(discard.max_segments, 16);
    assert_eq!(discard.max_sectors % discard.sector_alignment, 0);
    assert!(discard.sector_alignment * 512 >= image.block_size());
    assert!(image.write_zeroes_limits().unwrap().may_unmap);
}

#[test]
fn discard_off_offers_zeroes_without_unmapping() {
    let (_folder, path) = image(1 << 20);
    let image = open(&ImageOptions { discard: false, ..options(&path) }).unwrap();
    assert_eq!(image.discard_limits(), None);
    assert!(!image.write_zeroes_limits().unwrap().may_unmap);
}

#[test]
fn read_only_image_offers_neither_discard_nor_zeroes() {
    let (_folder, path) = image(1 << 20);
    let image = open(&read_only(&path)).unwrap();
    assert!(image.read_only());
    assert_eq!((image.discard_limits(), image.write_zeroes_limits()), (None, None));
}

#[test]
fn opening_changes_neither_the_data_nor_the_blocks_of_an_image() {
    use std::os::unix::fs::MetadataExt;
    let (_folder, path) = image(0);
    std::fs::write(&path, vec![0xa5; 1 << 20]).unwrap();
    std::fs::File::open(&path).unwrap().sync_all().unwrap();
    let blocks = std::fs::metadata(&path).unwrap().blocks();
    drop(open(&options(&path)).unwrap());
    assert_eq!(std::fs::metadata(&path).unwrap().blocks(), blocks);
    assert!(std::fs::read(&path).unwrap() == vec![0xa5; 1 << 20]);
}

#[test]
fn image_of_another_format_is_opened_and_named_with_and_without_the_page_cache() {
    let (_folder, path) = image(0);
    std::fs::write(&path, [b"vhdxfile".as_slice(), &[0; 8184]].concat()).unwrap();
    assert_eq!(open(&options(&path)).unwrap().foreign_format(), Some("VHDX"));
    let cached = ImageOptions { lock_timeout: rig::SOON, ..buffered(&path) };
    assert_eq!(open(&cached).unwrap().foreign_format(), Some("VHDX"));
}

#[test]
fn image_of_zeroes_and_a_new_one_are_raw() {
    let (_folder, path) = image(512);
    let small = ImageOptions { cache: CacheMode::Writeback, block_size: Some(512), ..options(&path) };
    assert_eq!(open(&small).unwrap().foreign_format(), None);
    let new = ImageOptions { create_bytes: Some(1 << 20), ..options(&path.with_extension("new")) };
    assert_eq!(open(&new).unwrap().foreign_format(), None);
}

#[test]
fn serial_and_path_are_those_of_the_links_target() {
    let (folder, path) = image(1 << 20);
    let link = folder.path().join("link");
    symlink(&path, &link).unwrap();
    let image = open(&options(&link)).unwrap();
    let canonical = std::fs::canonicalize(&path).unwrap();
    let sum = std::process::Command::new("sh")
        .args(["-c", "printf %s \"$1\" | sha256sum", "sh"])
        .arg(&canonical)
        .output()
        .unwrap();
    assert_eq!(image.path(), canonical);
    assert_eq!(image.default_serial(), String::from_utf8_lossy(&sum.stdout)[..20]);
}

#[test]
fn grown_file_is_taken_over_and_the_new_sectors_are_inside() {
    let (_folder, path) = image(1 << 20);
    let image = open(&options(&path)).unwrap();
    assert!(image.check(2048, 4096).is_err());
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(2 << 20).unwrap();
    assert_eq!(image.refresh_capacity().unwrap(), CapacityChange::Grown { from: 2048, to: 4096 });
    assert!(image.check(2048, 4096).is_ok());
    assert_eq!(image.capacity_sectors(), 4096);
}

#[test]
fn growth_by_less_than_a_block_is_no_change() {
    let (_folder, path) = image(1 << 20);
    let image = open(&options(&path)).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len((1 << 20) + 100).unwrap();
    assert_eq!(image.refresh_capacity().unwrap(), CapacityChange::Unchanged);
}

#[test]
fn shrunk_file_is_reported_and_the_capacity_stays() {
    let (_folder, path) = image(1 << 20);
    let image = open(&options(&path)).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    assert_eq!(image.refresh_capacity().unwrap(), CapacityChange::Shrunk { from: 2048, to: 8 });
    assert_eq!(image.capacity_sectors(), 2048);
}

#[test]
fn resized_file_has_the_new_size_at_once_and_its_new_sectors_are_inside() {
    let (_folder, path) = image(1 << 20);
    let image = open(&options(&path)).unwrap();
    assert_eq!(image.resize(2 << 20, false).unwrap(), 2048);
    assert_eq!((image.capacity_sectors(), std::fs::metadata(&path).unwrap().len()), (4096, 2 << 20));
    assert!(image.check(4088, 4096).is_ok());
}

#[test]
fn size_that_is_not_whole_blocks_or_nothing_is_refused_with_the_next_that_is() {
    let (_folder, path) = image(1 << 20);
    let image = open(&ImageOptions { block_size: Some(4096), ..options(&path) }).unwrap();
    let ragged = image.resize((1 << 20) + 512, false).unwrap_err().to_string();
    assert_says(&ragged, &["1049088 bytes", "block size 4096", "use 1052672"]);
    assert_says(&image.resize(0, true).unwrap_err().to_string(), &["cannot have 0 bytes", "use 4096"]);
    assert_says(&image.resize(u64::MAX, true).unwrap_err().to_string(), &["block size 4096"]);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
}

#[test]
fn size_beyond_what_the_file_system_takes_changes_nothing() {
    let (_folder, path) = image(1 << 20);
    let image = open(&options(&path)).unwrap();
    let refused = image.resize(u64::MAX - 4095, false);
    assert!(matches!(refused, Err(ResizeError::System { .. })), "{refused:?}");
    assert_eq!(image.capacity_sectors(), 2048);
}

#[test]
fn smaller_size_is_refused_unless_forced_and_then_what_lies_behind_is_outside() {
    let (_folder, path) = image(1 << 20);
    let image = open(&options(&path)).unwrap();
    let refused = image.resize(4096, false);
    let (from, wanted) = (1 << 20, 4096);
    assert!(
        matches!(refused, Err(ResizeError::WouldShrink { from_bytes, wanted_bytes, .. })
            if (from_bytes, wanted_bytes) == (from, wanted)),
        "{refused:?}"
    );
    assert_eq!(image.resize(4096, true).unwrap(), 2048);
    assert_eq!((image.capacity_sectors(), std::fs::metadata(&path).unwrap().len()), (8, 4096));
    assert!(image.check(8, 512).is_err());
}

#[test]
fn size_between_the_capacity_and_a_file_that_grew_meanwhile_cuts_it_and_is_refused() {
    let (_folder, path) = image(1 << 20);
    let image = open(&options(&path)).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4 << 20).unwrap();
    let refused = image.resize(2 << 20, false);
    assert!(matches!(refused, Err(ResizeError::WouldShrink { .. })), "{refused:?}");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 4 << 20);
}

#[test]
fn read_only_image_keeps_its_size() {
    let (_folder, path) = image(1 << 20);
    let image = open(&read_only(&path)).unwrap();
    assert_says(&image.resize(2 << 20, false).unwrap_err().to_string(), &["read-only"]);
}
