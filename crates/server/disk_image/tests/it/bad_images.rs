//! Every unusable image is refused with one line that names the problem, the value, the limit and a remedy.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use disk_image::{CacheMode, Image, ImageError, ImageOptions};

use crate::rig::{FailingOpener, assert_says, folder, image, open, options, read_only, refusal, refusal_by};

const EIO: i32 = 5;
const EACCES: i32 = 13;
const EROFS: i32 = 30;

#[test]
fn missing_image_is_named_and_create_is_suggested() {
    let folder = folder();
    let line = refusal(&options(&folder.path().join("none.raw")));
    assert_says(&line, &["none.raw", "does not exist", "--create SIZE"]);
}

#[test]
fn directory_is_called_one() {
    let folder = folder();
    assert_says(&refusal(&options(folder.path())), &["is a directory", "regular file or a block device"]);
}

#[test]
fn named_pipe_is_refused_without_waiting_for_its_other_end() {
    let folder = folder();
    let pipe = folder.path().join("pipe");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    assert_says(&refusal(&read_only(&pipe)), &["is a named pipe"]);
}

#[test]
fn character_device_is_refused() {
    assert_says(&refusal(&options("/dev/null".as_ref())), &["/dev/null", "is a character device"]);
}

#[test]
fn socket_is_refused() {
    let folder = folder();
    let path = folder.path().join("s");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    assert_says(&refusal(&options(&path)), &["is a socket"]);
}

#[test]
fn image_that_may_only_be_read_suggests_readonly() {
    let (_folder, path) = image(1 << 20);
    let opener = FailingOpener { write_open: Some(EACCES), ..FailingOpener::default() };
    assert_says(&refusal_by(&opener, &options(&path)), &["for writing", "--readonly"]);
}

#[test]
fn image_on_a_read_only_file_system_suggests_readonly() {
    let (_folder, path) = image(1 << 20);
    let opener = FailingOpener { write_open: Some(EROFS), ..FailingOpener::default() };
    assert_says(&refusal_by(&opener, &options(&path)), &["for writing", "--readonly"]);
}

#[test]
fn running_program_as_image_is_refused_for_writing() {
    let program = std::env::current_exe().unwrap();
    let error = open(&options(&program)).unwrap_err();
    assert!(matches!(error, ImageError::Unwritable { .. }), "{error}");
}

#[test]
fn unreadable_image_does_not_suggest_readonly() {
    let (_folder, path) = image(1 << 20);
    let opener =
        FailingOpener { write_open: Some(EACCES), read_open: Some(EACCES), ..FailingOpener::default() };
    let line = refusal_by(&opener, &options(&path));
    assert_says(&line, &["for reading", "permissions"]);
    assert!(!line.contains("--readonly"), "{line}");
}

#[test]
fn other_failures_keep_the_kernels_reason_as_source() {
    let (_folder, path) = image(1 << 20);
    let opener = FailingOpener { write_open: Some(EIO), ..FailingOpener::default() };
    let error = disk_image::Image::open(&opener, &options(&path)).unwrap_err();
    let source = std::error::Error::source(&error).unwrap();
    assert_says(&source.to_string(), &["os error 5"]);
}

#[test]
fn empty_image_is_refused_with_the_unit_of_a_right_size() {
    let (_folder, path) = image(0);
    assert_says(&refusal(&options(&path)), &["0 bytes", "multiple of 512"]);
}

#[test]
fn image_with_half_a_block_at_the_end_is_told_its_next_size() {
    let (_folder, path) = image(1_000_000);
    let wanted = ImageOptions { block_size: Some(4096), ..options(&path) };
    assert_says(&refusal(&wanted), &["1000000 bytes", "block size 4096", "1003520 bytes", "--block-size"]);
}

#[test]
fn image_of_another_format_is_not_advised_to_grow_by_a_few_bytes() {
    let (_folder, path) = image(0);
    std::fs::write(&path, [b"QFI\xfb\0\0\0\x03".as_slice(), &[0; 200_000]].concat()).unwrap();
    let line = refusal(&options(&path));
    assert_says(&line, &["200008 bytes", "looks like a qcow2 image", "qemu-img convert -O raw"]);
    assert!(!line.contains("truncate"), "{line}");
}

#[test]
fn block_size_that_is_no_power_of_two_is_refused() {
    let (_folder, path) = image(1 << 20);
    let wanted = ImageOptions { block_size: Some(1000), ..options(&path) };
    assert_says(&refusal(&wanted), &["1000", "power of two", "512 to 4096"]);
}

#[test]
fn block_size_larger_than_a_page_is_refused() {
    let (_folder, path) = image(1 << 20);
    let wanted = ImageOptions { block_size: Some(8192), ..options(&path) };
    assert_says(&refusal(&wanted), &["8192", "512 to 4096"]);
}

/// Every Linux has this file, any user can read it, and sysfs has no direct I/O.
const FILE_WITHOUT_DIRECT_IO: &str = "/sys/kernel/uevent_seqnum";

#[test]
fn file_system_without_direct_io_suggests_the_page_cache() {
    let line = refusal(&read_only(FILE_WITHOUT_DIRECT_IO.as_ref()));
    assert_says(&line, &["O_DIRECT", "refuses", "--cache writeback"]);
}

#[test]
fn file_system_without_direct_io_works_through_the_page_cache() {
    let path = FILE_WITHOUT_DIRECT_IO.as_ref();
    let image = open(&ImageOptions { cache: CacheMode::Writeback, ..read_only(path) }).unwrap();
    assert_eq!(image.alignment(), disk_image::Alignment::BUFFERED);
}

#[test]
fn create_over_an_existing_image_leaves_it_alone() {
    let (_folder, path) = image(4096);
    std::fs::write(&path, [7; 4096]).unwrap();
    let line = refusal(&ImageOptions { create_bytes: Some(1 << 20), ..options(&path) });
    assert_says(&line, &["exists already", "leave out --create"]);
    assert_eq!(std::fs::read(&path).unwrap(), [7; 4096]);
}

#[test]
fn create_in_a_missing_folder_is_refused() {
    let folder = folder();
    let path = folder.path().join("none/disk.raw");
    let line = refusal(&ImageOptions { create_bytes: Some(1 << 20), ..options(&path) });
    assert_says(&line, &["cannot be created", "1048576 bytes", "folder"]);
}

#[test]
fn create_with_an_impossible_size_leaves_no_file() {
    let folder = folder();
    let path = folder.path().join("disk.raw");
    let line = refusal(&ImageOptions { create_bytes: Some(1 << 62), ..options(&path) });
    assert_says(&line, &["cannot be created", "4611686018427387904 bytes"]);
    assert!(!path.exists());
}

#[test]
fn create_that_fails_after_the_file_was_made_removes_it() {
    let folder = folder();
    let path = folder.path().join("disk.raw");
    let opener = FailingOpener { canonical_path: Some(EIO), ..FailingOpener::default() };
    refusal_by(&opener, &ImageOptions { create_bytes: Some(1 << 20), ..options(&path) });
    assert!(!path.exists());
}

#[test]
fn create_of_nothing_or_of_half_a_sector_is_refused_and_makes_no_file() {
    let folder = folder();
    let path = folder.path().join("disk.raw");
    let empty = refusal(&ImageOptions { create_bytes: Some(0), ..options(&path) });
    let ragged = refusal(&ImageOptions { create_bytes: Some(1000), ..options(&path) });
    assert_says(&empty, &["--create", "0 bytes", "use 512"]);
    assert_says(&ragged, &["--create", "1000 bytes", "block size 512", "use 1024"]);
    assert!(!ragged.contains("truncate"), "{ragged}");
    assert!(!path.exists());
}

#[test]
fn create_for_reading_only_is_refused_and_makes_no_file() {
    let folder = folder();
    let path = folder.path().join("disk.raw");
    let line = refusal(&ImageOptions { create_bytes: Some(4096), ..read_only(&path) });
    assert_says(&line, &["--create", "--readonly"]);
    assert!(!path.exists());
}

/// A qcow2 image of 64 KiB on top of the raw file `base`.
fn qcow2_over_base() -> Vec<u8> {
    let mut bytes = vec![0; 4 * 65536];
    let name = (512_u64, b"base");
    let fields: [(usize, &[u8]); 11] = [
        (0, b"QFI\xfb\0\0\0\x03"),
        (8, &name.0.to_be_bytes()),
        (16, &4_u32.to_be_bytes()),
        (20, &16_u32.to_be_bytes()),
        (24, &65536_u64.to_be_bytes()),
        (36, &1_u32.to_be_bytes()),
        (40, &(3 * 65536_u64).to_be_bytes()),
        (48, &65536_u64.to_be_bytes()),
        (56, &1_u32.to_be_bytes()),
        (96, &[0, 0, 0, 4, 0, 0, 0, 104, 0xe2, 0x79, 0x2a, 0xca, 0, 0, 0, 3, b'r', b'a', b'w']),
        (512, name.1),
    ];
    fields.into_iter().for_each(|(at, field)| bytes[at..at + field.len()].copy_from_slice(field));
    bytes
}

#[test]
fn backing_file_that_a_link_replaces_after_the_check_is_refused() {
    let folder = folder();
    let at = |name: &str| folder.path().canonicalize().unwrap().join(name);
    std::fs::create_dir(at("allowed")).unwrap();
    let (top, base) = (at("allowed/top"), at("allowed/base"));
    std::fs::write(&top, qcow2_over_base()).unwrap();
    std::fs::write(at("secret"), [7; 65536]).unwrap();
    std::fs::write(&base, [1; 65536]).unwrap();
    let options = ImageOptions { backing_folders: vec![at("allowed")], ..read_only(&top) };
    drop(Image::open_qcow2(&FailingOpener::default(), &options).unwrap());
    let opener = FailingOpener { replaced: Some((base, at("secret"))), ..FailingOpener::default() };
    let error = Image::open_qcow2(&opener, &options).unwrap_err();
    assert!(format!("{error:?}").contains("PermissionDenied"), "{error:?}");
}
