//! qcow2 images as disks, on the real program in its sandbox, compared with what `qemu-img` reads.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use blk_driver::{Device, Durability, Options, Segment};
use rustix::process::Signal;
use xtask::skip::{Reason, skip};

use crate::rig::{DEADLINE, Place, Server, assert_says, bareblk, ctl, ok, output, refusal, wrong_usage};

const MIB: u64 = 1 << 20;

/// Runs a tool of QEMU in the place's folder.
pub fn tool(place: &Place, tool: &str, words: &[&str]) -> Option<()> {
    tool_in(&folder(place), tool, words)
}

pub fn folder(place: &Place) -> PathBuf {
    place.path("x").parent().unwrap().to_owned()
}

fn tool_in(folder: &Path, tool: &str, words: &[&str]) -> Option<()> {
    let Ok(output) = Command::new(tool).args(words).current_dir(folder).output() else {
        skip(Reason::NoProgram(tool.into()), "Debian: package qemu-utils");
        return None;
    };
    assert!(output.status.success(), "{tool} {words:?}: {output:?}");
    Some(())
}

/// A chain of three images: `top.qcow2` on `bases/middle.qcow2` on `bases/base.raw`.
pub fn chain(place: &Place) -> Option<PathBuf> {
    std::fs::create_dir(place.path("bases")).unwrap();
    let base: Vec<u8> = (0..3 * MIB).map(|at| (at / 1000) as u8).collect();
    std::fs::write(place.path("bases/base.raw"), base).unwrap();
    tool(
        place,
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "bases/middle.qcow2", "4M"],
    )?;
    tool(
        place,
        "qemu-io",
        &["-f", "qcow2", "-c", "write -P 17 100k 900k", "-c", "write -z 2M 64k", "bases/middle.qcow2"],
    )?;
    let words = ["create", "-q", "-f", "qcow2", "-b", "bases/middle.qcow2", "-F", "qcow2", "top.qcow2", "5M"];
    tool(place, "qemu-img", &words)?;
    tool(
        place,
        "qemu-io",
        &["-f", "qcow2", "-c", "write -P 33 64k 3k", "-c", "write -c -P 34 4M 64k", "top.qcow2"],
    )?;
    Some(place.path("top.qcow2"))
}

pub fn content(place: &Place, name: &str) -> Vec<u8> {
    content_in(&folder(place), name)
}

pub fn content_in(folder: &Path, name: &str) -> Vec<u8> {
    tool_in(folder, "qemu-img", &["convert", "-f", "qcow2", "-O", "raw", name, "content"]).unwrap();
    std::fs::read(folder.join("content")).unwrap()
}

pub fn serve(place: &Place, image: &Path, words: &[&str]) -> Command {
    let mut command = place.serve(image, "s");
    command
        .args(["--name", "root", "--readonly", "--format", "qcow2", "--control"])
        .arg(place.socket("c"))
        .args(words);
    command
}

/// As [`serve`], for a guest that writes.
pub fn serve_writable(place: &Place, image: &Path, words: &[&str]) -> Command {
    let mut command = place.serve(image, "s");
    command.args(["--name", "root", "--format", "qcow2", "--control"]).arg(place.socket("c")).args(words);
    command
}

/// Fails on errors, and on leaks unless they are allowed.
pub fn assert_consistent(folder: &Path, name: &str, may_leak: bool) {
    let check = Command::new("qemu-img").args(["check", "-f", "qcow2", name]).current_dir(folder).output();
    let check = check.unwrap();
    let is_sound = matches!((check.status.code(), may_leak), (Some(0), _) | (Some(3), true));
    assert!(is_sound, "{check:?}");
}

pub fn folders(place: &Place) -> String {
    place.path("bases").display().to_string()
}

/// What a driver reads from the whole disk.
fn read(place: &Place, socket: &str) -> Vec<u8> {
    let (device, mut queues) = Device::connect(&Options::new(place.socket(socket))).unwrap();
    let mut bytes = vec![0xee; usize::try_from(512 * device.info().capacity_sectors).unwrap()];
    for (at, chunk) in (0..).step_by(96 << 1).zip(bytes.chunks_mut(96 << 10)) {
        queues[0].read_blocking(at, chunk, DEADLINE).unwrap();
    }
    bytes
}

#[test]
fn chain_is_served_in_the_sandbox_as_qemu_reads_it() {
    let place = Place::new();
    let Some(image) = chain(&place) else { return };
    let expected = content(&place, "top.qcow2");
    let folders = folders(&place);
    let server = Server::start(serve(&place, &image, &["--backing-folders", &folders, "--workers", "2"]));
    assert!(read(&place, "s") == expected, "the driver reads something else than qemu-img");
    let disk = ok(&place, &["list"])["disks"][0].clone();
    assert_eq!(
        (&disk["format"], &disk["layers"], &disk["size_bytes"]),
        (&"qcow2".into(), &3.into(), &(5 * MIB).into())
    );
    assert_says(&output(ctl(&place, &["list"])), &["FORMAT", "qcow2/3"]);
    assert_says(&output(ctl(&place, &["show", "root"])), &["format             qcow2"]);
    output(ctl(&place, &["flush", "root"]));
    assert_says(
        &refusal(ctl(&place, &["resize", "root", "8M"])),
        &["5242880", "8388608", "qcow2", "qemu-img resize"],
    );
    let snapshot = format!("root={}", place.path("copy").display());
    assert_says(&refusal(ctl(&place, &["snapshot", &snapshot])), &["qcow2", "qemu-img create"]);
    assert!(!place.path("copy").exists());
    server.signal(Signal::HUP);
    assert_eq!(ok(&place, &["list"])["disks"][0]["size_bytes"], 5 * MIB);
    // Added while the server runs, from the folder of an image that was named at the start.
    let words = ["add", "name=again", "readonly=true", "format=qcow2"].map(str::to_owned);
    let more = [
        format!("image={}", image.display()),
        format!("socket={}", place.socket("t").display()),
        format!("backing-folders={folders}"),
    ];
    let words: Vec<&str> = words.iter().chain(&more).map(String::as_str).collect();
    output(ctl(&place, &words));
    assert!(read(&place, "t") == expected);
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn live_upgrade_opens_the_chain_again() {
    let place = Place::new();
    let Some(image) = chain(&place) else { return };
    let (expected, folders) = (content(&place, "top.qcow2"), folders(&place));
    let words = ["--backing-folders", &folders];
    let old = Server::start(serve(&place, &image, &words));
    assert!(read(&place, "s") == expected);
    let take = |format: &str| {
        let mut command = place.serve(&image, "s");
        command.args(["--name", "root", "--readonly", "--format", format]).args(words);
        command.arg("--control").arg(place.socket("c")).arg("--take-over").arg(place.socket("c"));
        command
    };
    assert_says(
        &refusal(take("raw")),
        &["disk `root`: format is qcow2 in the running server but raw in the new one"],
    );
    assert!(read(&place, "s") == expected, "the old server goes on");
    let new = Server::start(take("qcow2"));
    assert!(old.wait_ended().success());
    assert!(read(&place, "s") == expected);
    assert!(new.stop(Signal::TERM).success());
}

#[test]
fn images_that_cannot_be_served_are_refused_with_file_field_and_remedy() {
    let place = Place::new();
    let Some(image) = chain(&place) else { return };
    let folder = folders(&place);
    assert_says(&refusal(place.serve(&image, "s")), &["top.qcow2", "looks like", "--format qcow2, or"]);
    // A name in an image allows nothing.
    assert_says(
        &refusal(serve(&place, &image, &[])),
        &["top.qcow2", "bases/middle.qcow2", "it must be in a folder of --backing-folders"],
    );
    assert_says(
        &refusal(serve(&place, &image, &["--backing-folders", "/usr/lib"])),
        &["bases/middle.qcow2", "--backing-folders"],
    );
    let raw = place.image("disk.raw", MIB);
    assert_says(
        &refusal(serve(&place, &raw, &["--backing-folders", &folder])),
        &["disk.raw", "not a qcow2 image", "0x00000000", "0x514649fb"],
    );
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[20..24].copy_from_slice(&40_u32.to_be_bytes());
    std::fs::write(place.path("bad.qcow2"), bytes).unwrap();
    assert_says(
        &refusal(serve(&place, &place.path("bad.qcow2"), &[])),
        &["bad.qcow2", "cluster_bits is 40", "9 to 21"],
    );
}

#[test]
fn check_says_what_would_be_served() {
    let place = Place::new();
    let Some(image) = chain(&place) else { return };
    let mut command = bareblk();
    command.args([
        "serve",
        "--check",
        "--readonly",
        "--format",
        "qcow2",
        "--backing-folders",
        &folders(&place),
    ]);
    command.arg(&image).arg("--socket").arg(place.socket("s"));
    assert_says(&output(command), &["5242880 bytes", "read-only", "qcow2 with 3 layers", "valid: 1 disk"]);
}

/// Writes, zeroes and discards at places that are not allocated, compressed, or in the files below.
#[test]
fn chain_is_written_in_the_sandbox_and_only_its_top_changes() {
    let place = Place::new();
    let Some(image) = chain(&place) else { return };
    let below =
        || ["bases/middle.qcow2", "bases/base.raw"].map(|name| std::fs::read(place.path(name)).unwrap());
    let (mut expected, before, folders) = (content(&place, "top.qcow2"), below(), folders(&place));
    let words = ["--backing-folders", &folders, "--workers", "2", "--queues", "2"];
    let server = Server::start(serve_writable(&place, &image, &words));
    let options = Options { queues: 2, ..Options::new(place.socket("s")) };
    let (device, mut queues) = Device::connect(&options).unwrap();
    assert!(!device.info().read_only);
    let mut random = fastrand::Rng::with_seed(7);
    let blocks = expected.len() / 4096;
    for turn in 0..200 {
        let (first, count) = (random.usize(..blocks - 32), random.usize(1..=32));
        let bytes = &mut expected[first * 4096..(first + count) * 4096];
        let (sector, queue) = (first as u64 * 8, &mut queues[turn % 2]);
        let segments = [Segment { sector, sectors: count as u32 * 8, unmap: random.bool() }];
        match random.u8(..8) {
            0 => {
                bytes.fill(0);
                queue.write_zeroes_blocking(&segments, DEADLINE).unwrap();
            }
            1 => {
                let segments = [Segment { unmap: false, ..segments[0] }];
                queue.discard_blocking(&segments, DEADLINE).unwrap();
                // Whole clusters read as zeroes then; other blocks keep what they have.
                let is_inside = |at: usize| first <= at / 16 * 16 && at / 16 * 16 + 16 <= first + count;
                let discarded = (first..).zip(bytes.chunks_mut(4096)).filter(|(at, _)| is_inside(*at));
                discarded.for_each(|(_, block)| block.fill(0));
            }
            _ => {
                bytes.fill_with(|| random.u8(..));
                queue.write_blocking(sector, bytes, Durability::Cached, DEADLINE).unwrap();
            }
        }
    }
    queues[0].flush_blocking(DEADLINE).unwrap();
    drop((queues, device));
    assert!(read(&place, "s") == expected, "the driver reads something else than it has written");
    output(ctl(&place, &["flush", "root"]));
    assert!(server.stop(Signal::TERM).success());
    assert!(content(&place, "top.qcow2") == expected, "qemu-img reads something else");
    assert!(below() == before, "a backing file has changed");
    assert_consistent(&folder(&place), "top.qcow2", false);
}

#[test]
fn removed_disk_has_no_leaks_and_a_killed_server_leaves_no_errors() {
    let place = Place::new();
    if tool(&place, "qemu-img", &["create", "-q", "-f", "qcow2", "a.qcow2", "64M"]).is_none() {
        return;
    }
    let image = place.path("a.qcow2");
    let write = |byte: u8| {
        let (_device, mut queues) = Device::connect(&Options::new(place.socket("s"))).unwrap();
        queues[0]
            .write_blocking(u64::from(byte) * 128, &[byte; 4096], Durability::Durable, DEADLINE)
            .unwrap();
    };
    let server = Server::start(serve_writable(&place, &image, &[]));
    write(1);
    server.kill();
    assert_consistent(&folder(&place), "a.qcow2", true);
    let server = Server::start(serve_writable(&place, &image, &[]));
    write(2);
    output(ctl(&place, &["remove", "root", "--force"]));
    let bytes = content(&place, "a.qcow2");
    assert!((1..=2_u8).all(|byte| bytes[usize::from(byte) << 16..][..4096] == [byte; 4096]));
    assert!(server.stop(Signal::TERM).success());
    // Only the killed server has leaked.
    tool(&place, "qemu-img", &["check", "-q", "-r", "leaks", "-f", "qcow2", "a.qcow2"]).unwrap();
    let server = Server::start(serve_writable(&place, &image, &[]));
    write(3);
    assert!(server.stop(Signal::TERM).success());
    assert_consistent(&folder(&place), "a.qcow2", false);
}

/// Each is served read-only instead, or by nobody.
#[test]
fn images_that_cannot_be_written_are_refused_with_the_reason() {
    let place = Place::new();
    if tool(&place, "qemu-img", &["create", "-q", "-f", "qcow2", "a.qcow2", "8M"]).is_none() {
        return;
    }
    let image = place.path("a.qcow2");
    let good = std::fs::read(&image).unwrap();
    for (bit, word) in [(1, "dirty"), (2, "corrupt")] {
        let mut bytes = good.clone();
        bytes[79] |= bit;
        std::fs::write(&image, bytes).unwrap();
        assert_says(&refusal(serve_writable(&place, &image, &[])), &["a.qcow2", word, "--readonly"]);
    }
    let words = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "a.qcow2", "8M"];
    tool(&place, "qemu-img", &words).unwrap();
    assert_says(&refusal(serve_writable(&place, &image, &[])), &["a.qcow2", "below 4 KiB", "--readonly"]);
    let server = Server::start(serve(&place, &image, &[]));
    assert!(server.stop(Signal::TERM).success());
}

/// Images that the server makes are images for QEMU, too.
#[test]
fn new_images_are_made_with_and_without_a_backing_file() {
    let place = Place::new();
    let (folder, words) =
        (folder(&place), ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "middle.qcow2"]);
    std::fs::write(place.path("base.raw"), vec![0x11; 1 << 20]).unwrap();
    if tool(&place, "qemu-img", &words).is_none() {
        return;
    }
    let folders = folder.display().to_string();
    let server = Server::start(serve_writable(&place, &place.path("new.qcow2"), &["--create", "8M"]));
    let write = |socket: &str| {
        let (_device, mut queues) = Device::connect(&Options::new(place.socket(socket))).unwrap();
        queues[0].write_blocking(8, &[7; 4096], Durability::Durable, DEADLINE).unwrap();
    };
    write("s");
    // A clone, added while the server runs.
    let clone = |name: &str, size: &str, backing: &str, format: &str| {
        let words = [
            format!("image={}", place.path(name).display()),
            format!("socket={}", place.socket("s2").display()),
            format!("create={size}"),
            format!("backing={}", place.path(backing).display()),
            format!("backing-format={format}"),
            format!("backing-folders={folders}"),
        ];
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        ctl(&place, &[&["add", "name=clone", "format=qcow2"], &words[..]].concat())
    };
    for (name, backing, format) in [("one.qcow2", "base.raw", "raw"), ("two.qcow2", "middle.qcow2", "qcow2")]
    {
        output(clone(name, "2M", backing, format));
        write("s2");
        output(ctl(&place, &["remove", "clone"]));
        let bytes = content(&place, name);
        assert!(
            bytes[..4096].iter().all(|byte| *byte == 0x11) && bytes[4096..8192].iter().all(|byte| *byte == 7)
        );
        assert!(
            bytes[8192..1 << 20].iter().all(|byte| *byte == 0x11)
                && bytes[1 << 20..].iter().all(|byte| *byte == 0)
        );
        assert_consistent(&folder, name, false);
    }
    let refused = |command, says: &[&str]| {
        assert_says(&refusal(command), says);
        assert!(!place.path("no.qcow2").exists(), "a new image is left");
    };
    refused(
        clone("no.qcow2", "512K", "base.raw", "raw"),
        &["524288", "base.raw", "1048576", "that size or more"],
    );
    refused(clone("no.qcow2", "2M", "none.raw", "raw"), &["none.raw"]);
    refused(clone("no.qcow2", "2M", "base.raw", "qcow2"), &["base.raw", "qcow2"]);
    assert!(server.stop(Signal::TERM).success());
    assert_consistent(&folder, "new.qcow2", false);
}

#[test]
fn new_image_that_cannot_be_as_wanted_is_refused() {
    let place = Place::new();
    std::fs::write(place.path("new.qcow2"), "").unwrap();
    let new = serve_writable(&place, &place.path("new.qcow2"), &["--create", "8M"]);
    assert_says(&refusal(new), &["new.qcow2", "exists"]);
    let no = |words: &[&str]| wrong_usage(serve_writable(&place, &place.path("no.qcow2"), words));
    assert_says(&no(&["--create", "8M", "--backing", "base.raw"]), &["needs --backing-format"]);
    assert_says(&no(&["--backing", "base.raw", "--backing-format", "raw"]), &["needs --create"]);
}
