//! At most one writer: between our own servers, and between us and QEMU's tools.
//!
//! Locks belong to an open file, not to a process, so two opens in one process stand for two servers.
//! The tests with QEMU's tools are skipped, with a line, where these are not installed.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use disk_image::{FileId, HostOpener, Image, ImageError, ImageOptions, Opener};
use xtask::skip::{Reason, skip};

use crate::rig::{SOON, assert_says, image, open, options, read_only, refusal};

fn soon(options: ImageOptions) -> ImageOptions {
    ImageOptions { lock_timeout: SOON, ..options }
}

#[test]
fn second_writer_in_one_process_is_refused_and_told_so() {
    let (_folder, path) = image(1 << 20);
    let _first = open(&options(&path)).unwrap();
    let ourselves = format!("another disk of this process (pid {})", std::process::id());
    assert_says(&refusal(&options(&path)), &["disk.raw", "locked by", &ourselves, "not released within 0 s"]);
}

#[test]
fn reader_is_refused_beside_a_writer_and_writer_beside_a_reader() {
    let (_folder, path) = image(1 << 20);
    let writer = open(&options(&path)).unwrap();
    assert!(matches!(open(&read_only(&path)), Err(ImageError::Locked { .. })));
    drop(writer);
    let _reader = open(&soon(read_only(&path))).unwrap();
    assert!(matches!(open(&options(&path)), Err(ImageError::Locked { .. })));
}

#[test]
fn readers_share() {
    let (_folder, path) = image(1 << 20);
    let _first = open(&read_only(&path)).unwrap();
    assert!(open(&read_only(&path)).is_ok());
}

#[test]
fn lock_outlives_the_image_while_its_file_is_in_use() {
    let (_folder, path) = image(1 << 20);
    let image = open(&options(&path)).unwrap();
    let engines_copy = Arc::clone(image.file().unwrap());
    drop(image);
    assert!(matches!(open(&options(&path)), Err(ImageError::Locked { .. })));
    drop(engines_copy);
    assert!(open(&soon(options(&path))).is_ok());
}

#[test]
fn waiting_opener_gets_the_image_when_the_holder_lets_go() {
    let (_folder, path) = image(1 << 20);
    let holder = open(&options(&path)).unwrap();
    let waiting = soon(options(&path));
    let waiter = std::thread::spawn(move || open(&waiting).map(|image| image.capacity_sectors()));
    std::thread::sleep(std::time::Duration::from_millis(250));
    assert!(!waiter.is_finished());
    drop(holder);
    assert_eq!(waiter.join().unwrap().unwrap(), 2048);
}

#[test]
fn exclusive_lock_of_an_unrelated_program_counts_as_held() {
    let (_folder, path) = image(1 << 20);
    let other = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let whole_file =
        nix::libc::flock { l_type: nix::libc::F_WRLCK as i16, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    nix::fcntl::fcntl(&other, nix::fcntl::FcntlArg::F_OFD_SETLK(&whole_file)).unwrap();
    assert_says(&refusal(&options(&path)), &["locked by", &format!("(pid {})", std::process::id())]);
}

/// Is the tool there? If not, says so once per test.
fn have(tool: &str) -> bool {
    let have = Command::new(tool).arg("--version").stdout(Stdio::null()).status().is_ok();
    if !have {
        skip(Reason::NoProgram(tool.into()), "Debian: package qemu-utils");
    }
    have
}

fn qemu_io(path: &Path, arguments: &[&str]) -> Output {
    Command::new("qemu-io").args(["-f", "raw"]).args(arguments).arg(path).output().unwrap()
}

fn assert_qemu_refused(output: &Output) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("lock"), "status {}: {text}", output.status);
}

/// A `qemu-io` process that has the image open and waits for commands; killed on drop.
struct OpenQemuIo(Child);

impl OpenQemuIo {
    fn start(path: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw"]).args(arguments).arg(path);
        let child = Self(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap());
        let id = FileId::from(&std::fs::metadata(path).unwrap());
        let start = std::time::Instant::now();
        while HostOpener.lock_holders(id).is_empty() {
            assert!(start.elapsed() < SOON, "qemu-io did not lock the image");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        child
    }
}

impl Drop for OpenQemuIo {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn qemu_writer_is_refused_while_we_write_and_welcome_after() {
    if !have("qemu-io") {
        return;
    }
    let (_folder, path) = image(1 << 20);
    let ours = open(&options(&path)).unwrap();
    assert_qemu_refused(&qemu_io(&path, &["-c", "write 0 512"]));
    drop(ours);
    assert!(open(&soon(options(&path))).is_ok()); // waits until no fork has a copy
    let output = qemu_io(&path, &["-c", "write 0 512"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn qemu_writer_is_refused_while_we_only_read_and_a_qemu_reader_is_not() {
    if !have("qemu-io") {
        return;
    }
    let (_folder, path) = image(1 << 20);
    let _ours = open(&read_only(&path)).unwrap();
    assert_qemu_refused(&qemu_io(&path, &["-c", "write 0 512"]));
    assert!(qemu_io(&path, &["-r", "-c", "read 0 512"]).status.success());
}

#[test]
fn qemu_img_cannot_resize_what_we_serve() {
    if !have("qemu-img") {
        return;
    }
    let (_folder, path) = image(1 << 20);
    let _ours = open(&options(&path)).unwrap();
    let output =
        Command::new("qemu-img").args(["resize", "-f", "raw"]).arg(&path).arg("2M").output().unwrap();
    assert_qemu_refused(&output);
}

#[test]
fn we_are_refused_while_qemu_writes_and_told_which_process_it_is() {
    if !have("qemu-io") {
        return;
    }
    let (_folder, path) = image(1 << 20);
    let qemu = OpenQemuIo::start(&path, &[]);
    let holder = format!("qemu-io (pid {})", qemu.0.id());
    assert_says(&refusal(&options(&path)), &[&holder]);
    assert_says(&refusal(&read_only(&path)), &[&holder]);
}

#[test]
fn we_may_read_beside_a_reading_qemu() {
    if !have("qemu-io") {
        return;
    }
    let (_folder, path) = image(1 << 20);
    let _qemu = OpenQemuIo::start(&path, &["-r"]);
    assert!(open(&read_only(&path)).is_ok());
}

#[test]
fn killed_holders_image_is_taken_over_by_the_one_who_waits() {
    if !have("qemu-io") {
        return;
    }
    let (_folder, path) = image(1 << 20);
    let qemu = OpenQemuIo::start(&path, &[]);
    let waiting = soon(options(&path));
    let waiter = std::thread::spawn(move || Image::open(&HostOpener, &waiting).is_ok());
    drop(qemu);
    assert!(waiter.join().unwrap());
}
