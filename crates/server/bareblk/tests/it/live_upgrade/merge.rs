//! Jobs that merge the layers of a disk (`ctl stream`, `ctl commit`): guests notice nothing.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blk_driver::{Device, Durability, Options};
use rustix::fs::XattrFlags;
use rustix::process::Signal;
use serde_json::Value;

use super::{Disk, MIB, notices_nothing};
use crate::killed::load::{Load, Overlap, Rings};
use crate::qcow2::{assert_consistent, content_in, folder, tool};
use crate::rig::{DEADLINE, Place, Server, assert_says, ctl, eventually, ok, output, refusal};

/// A disk whose contents are read from its present image.
fn disk(place: Place, image: PathBuf, args: &[&str]) -> (Disk, Arc<Mutex<PathBuf>>) {
    let top = Arc::new(Mutex::new(image.clone()));
    let (folder, shared) = (folder(&place), Arc::clone(&top));
    let contents = move || content_of(&folder, &shared.lock().unwrap());
    (Disk::start(place, image, args, Some(Box::new(contents))), top)
}

pub fn content_of(folder: &Path, image: &Path) -> Vec<u8> {
    if image.extension().unwrap() == "raw" {
        return std::fs::read(image).unwrap();
    }
    let name = image.file_name().unwrap().to_str().unwrap();
    assert_consistent(folder, name, true);
    content_in(folder, name)
}

/// Serves the disk from now on as these words say.
fn configure(disk: &mut Disk, top: &Mutex<PathBuf>, keys: &str) {
    let words: Vec<(&str, &str)> = keys.split(' ').filter_map(|key| key.split_once('=')).collect();
    let wanted = words.iter().filter(|(key, _)| ["format", "backing-folders", "serial"].contains(key));
    disk.args.truncate(2);
    disk.args.extend(wanted.flat_map(|(key, value)| [format!("--{key}"), (*value).to_owned()]));
    disk.image = words.iter().find(|(key, _)| *key == "image").unwrap().1.into();
    top.lock().unwrap().clone_from(&disk.image);
}

fn overlay(disk: &mut Disk, top: &Mutex<PathBuf>, name: &str) {
    let file = format!("root={}", disk.place.path(name).display());
    let answer = ok(&disk.place, &["snapshot", "--overlay", &file]);
    configure(disk, top, answer["keys"][0].as_str().unwrap());
}

/// Serves a disk `root` that clients of the control socket change.
fn command(place: &Place, image: &Path, words: &[&str]) -> Command {
    let mut command = place.serve(image, "s");
    command.args(["--name", "root", "--control"]).arg(place.socket("c")).args(words);
    command
}

fn take_snapshot(place: &Place, top: &Path) {
    output(ctl(place, &["snapshot", "--overlay", &format!("root={}", top.display())]));
}

fn refused(place: &Place, words: &[&str], says: &[&str]) {
    assert_says(&refusal(ctl(place, words)), says);
}

fn job(place: &Place) -> Value {
    ok(place, &["jobs"])["jobs"][0].clone()
}

/// Waits until the disk's job has ended well.
fn ended(place: &Place) -> Value {
    eventually("the job's end", || {
        let job = job(place);
        assert_ne!(job["state"], "failed", "{job}");
        (job["state"] == "completed").then_some(job)
    })
}

fn commit(disk: &mut Disk, top: &Mutex<PathBuf>) {
    output(ctl(&disk.place, &["commit", "root"]));
    let job = ended(&disk.place);
    configure(disk, top, job["keys"].as_str().unwrap());
}

fn pauses(disk: &Disk) {
    let log = std::io::read_to_string(disk.server.as_ref().unwrap().log_file()).unwrap();
    let resumed = log.lines().filter(|line| line.contains("resume with other images"));
    resumed.for_each(|line| println!("  {}", line.split("paused=").nth(1).unwrap_or(line)));
}

/// Overlays, each merged into the image below it, with a live upgrade during the last commit.
fn commits_under_load(mut disk: Disk, top: &Mutex<PathBuf>, rings: Rings, log: bool) {
    let load = Load::connect_with(disk.socket(), rings, Overlap::No, log, fastrand::u64(..));
    let below = disk.image.clone();
    notices_nothing(load, &mut disk, |disk| {
        for count in 1..=3 {
            overlay(disk, top, &format!("top-{count}.qcow2"));
            std::thread::sleep(Duration::from_millis(fastrand::u64(..80)));
            commit(disk, top);
            assert_eq!(disk.image, below);
            pauses(disk);
        }
        overlay(disk, top, "last.qcow2");
        // Without data it has four clusters.
        let len_bytes = || std::fs::metadata(disk.place.path("last.qcow2")).unwrap().len();
        eventually("a first write", || (len_bytes() > 4 << 16).then_some(()));
        output(ctl(&disk.place, &["commit", "root", "--rate", "1"]));
        output(ctl(&disk.place, &["job", "root", "--pause"]));
        disk.hand_on();
        let job = job(&disk.place);
        assert_eq!(job["state"], "paused", "{job}");
        output(ctl(&disk.place, &["job", "root", "--rate", "off"]));
        output(ctl(&disk.place, &["job", "root", "--resume"]));
        let ended = ended(&disk.place);
        configure(disk, top, ended["keys"].as_str().unwrap());
        disk.hand_on();
    });
}

#[test]
fn overlays_are_committed_to_a_raw_image_under_load() {
    let place = Place::new();
    let image = place.image("disk.raw", 4 * MIB);
    let (disk, top) = disk(place, image, &["--workers", "2"]);
    commits_under_load(disk, &top, Rings::Split, true);
}

#[test]
fn overlays_are_committed_to_a_qcow2_image_with_a_backing_file_under_load() {
    let place = Place::new();
    place.image("base.raw", 3 * MIB);
    // Clusters of the image below are partly hidden by the overlay's.
    let words = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=256k",
        "-b",
        "base.raw",
        "-F",
        "raw",
        "a.qcow2",
        "4M",
    ];
    if tool(&place, "qemu-img", &words).is_none() {
        return;
    }
    let (image, folders) = (place.path("a.qcow2"), folder(&place).display().to_string());
    let words = ["--workers", "2", "--format", "qcow2", "--backing-folders", &folders];
    let (disk, top) = disk(place, image, &words);
    commits_under_load(disk, &top, Rings::Packed, false);
}

#[test]
fn image_gets_all_that_lies_below_it_under_load() {
    let place = Place::new();
    let image = place.image("disk.raw", 4 * MIB);
    if tool(&place, "qemu-img", &["--version"]).is_none() {
        return;
    }
    let (mut disk, top) = disk(place, image.clone(), &["--workers", "2"]);
    let load = Load::connect_with(disk.socket(), Rings::Split, Overlap::No, true, fastrand::u64(..));
    notices_nothing(load, &mut disk, |disk| {
        for count in 1..=3 {
            std::thread::sleep(Duration::from_millis(fastrand::u64(..80)));
            overlay(disk, &top, &format!("top-{count}.qcow2"));
        }
        output(ctl(&disk.place, &["stream", "root", "--rate", "1"]));
        disk.hand_on();
        output(ctl(&disk.place, &["job", "root", "--rate", "off"]));
        ended(&disk.place);
        pauses(disk);
        let shown = ok(&disk.place, &["list"]);
        assert_eq!(shown["disks"][0]["layers"], 1, "{shown}");
        // The image needs nothing else any more.
        ["top-1.qcow2", "top-2.qcow2"]
            .iter()
            .for_each(|name| std::fs::remove_file(disk.place.path(name)).unwrap());
        std::fs::remove_file(&image).unwrap();
        disk.hand_on();
    });
}

/// The backing file gets the size of the disk.
#[test]
fn disk_that_has_grown_is_committed() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let words = ["create", "-q", "-f", "qcow2", "-b", "disk.raw", "-F", "raw", "a.qcow2"];
    if tool(&place, "qemu-img", &words).is_none() {
        return;
    }
    let folder = folder(&place);
    for name in ["disk.raw", "a.qcow2"] {
        let mut command = place.serve(&place.path(name), "s");
        command.args(["--name", "root", "--control"]).arg(place.socket("c"));
        if name == "a.qcow2" {
            command.args(["--format", "qcow2", "--backing-folders"]).arg(&folder);
        }
        let server = Server::start(command);
        let top = place.path(&format!("top-of-{name}.qcow2"));
        take_snapshot(&place, &top);
        output(ctl(&place, &["resize", "root", "3M"]));
        let (_device, mut queues) = Device::connect(&Options::new(place.socket("s"))).unwrap();
        queues[0].write_blocking(5000, &[7; 4096], Durability::Durable, DEADLINE).unwrap();
        // The end of the image's path names the disk, too.
        output(ctl(&place, &["commit", top.file_name().unwrap().to_str().unwrap(), "--wait"]));
        let disk = ok(&place, &["list"])["disks"][0].clone();
        assert_eq!(
            (&disk["size_bytes"], &disk["image"]),
            (&(3 * MIB).into(), &place.path(name).to_str().unwrap().into())
        );
        let mut read = [0; 8192];
        queues[0].read_blocking(4992, &mut read, DEADLINE).unwrap();
        assert!(read[..4096].iter().all(|byte| *byte == 0) && read[4096..].iter().all(|byte| *byte == 7));
        assert!(server.stop(Signal::TERM).success());
    }
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 3 * MIB);
    assert_consistent(&folder, "a.qcow2", false);
}

/// Without a guest, no session opens and closes the tables.
#[test]
fn image_is_committed_resized_and_handed_on_without_a_guest() {
    let place = Place::new();
    let words = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "a.qcow2", "1M"];
    if tool(&place, "qemu-img", &words).is_none() {
        return;
    }
    let folder = folder(&place);
    let words =
        ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "-b", "a.qcow2", "-F", "qcow2", "top.qcow2"];
    tool(&place, "qemu-img", &words).unwrap();
    tool(&place, "qemu-io", &["-c", "write -q -P 0x22 64k 512k", "top.qcow2"]).unwrap();
    let folders = folder.display().to_string();
    let args = ["--workers", "1", "--format", "qcow2", "--backing-folders", &folders];
    let (mut disk, top) = disk(place, folder.join("top.qcow2"), &args);
    commit(&mut disk, &top);
    // Beyond the L1 table.
    output(ctl(&disk.place, &["resize", "root", "+4G"]));
    disk.hand_on();
    output(ctl(&disk.place, &["resize", "root", "+4G"]));
    let (device, mut queues) = Device::connect(&Options::new(disk.socket())).unwrap();
    assert_eq!(device.info().capacity_sectors, (8 << 21) + 2048);
    let mut read = [0; 4096];
    queues[0].read_blocking(256, &mut read, DEADLINE).unwrap();
    assert_eq!(read, [0x22; 4096]);
    queues[0].write_blocking(7 << 21, &[7; 4096], Durability::Durable, DEADLINE).unwrap();
    drop((device, queues));
    disk.stop();
    assert_consistent(&folder, "a.qcow2", false);
}

/// The image below has larger clusters: when a commit writes a part of one, guests go on reading the rest of it.
#[test]
fn rest_of_a_larger_cluster_stays_while_a_part_of_it_is_committed() {
    let place = Place::new();
    std::fs::write(place.path("base.raw"), vec![0x11; 4 << 20]).unwrap();
    let folder = folder(&place);
    let words =
        ["create", "-q", "-f", "qcow2", "-o", "cluster_size=2M", "-b", "base.raw", "-F", "raw", "a.qcow2"];
    if tool(&place, "qemu-img", &words).is_none() {
        return;
    }
    // So that the image has an L2 table.
    tool(&place, "qemu-io", &["-c", "write -q -P 0x11 2M 64k", "a.qcow2"]).unwrap();
    let words = ["create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "top.qcow2"];
    tool(&place, "qemu-img", &words).unwrap();
    tool(&place, "qemu-io", &["-c", "write -q -P 0x22 64k 64k", "top.qcow2"]).unwrap();
    let mut command = place.serve(&place.path("top.qcow2"), "s");
    command.args(["--name", "root", "--control"]).arg(place.socket("c"));
    command.args(["--format", "qcow2", "--backing-folders"]).arg(&folder);
    let server = Server::start(command);
    output(ctl(&place, &["commit", "root", "--rate", "1"]));
    eventually("a copy", || (job(&place)["copied_bytes"] != 0).then_some(()));
    let (_device, mut queues) = Device::connect(&Options::new(place.socket("s"))).unwrap();
    let mut read_all = || {
        let mut bytes = vec![0; 4 << 20];
        for (number, part) in bytes.chunks_mut(64 << 10).enumerate() {
            queues[0].read_blocking(number as u64 * 128, part, DEADLINE).unwrap();
        }
        let part = 64 << 10..128 << 10;
        assert!(bytes[part.clone()].iter().all(|byte| *byte == 0x22));
        assert!(bytes[..part.start].iter().chain(&bytes[part.end..]).all(|byte| *byte == 0x11));
    };
    read_all();
    output(ctl(&place, &["job", "root", "--cancel"]));
    read_all();
    output(ctl(&place, &["commit", "root", "--wait"]));
    read_all();
    assert!(server.stop(Signal::TERM).success());
    assert_consistent(&folder, "a.qcow2", true);
}

/// A start with the old configuration would let the guest see old data.
#[test]
fn committed_image_is_not_served_again() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let serve = |image: &Path, words: &[&str]| command(&place, image, words);
    let server = Server::start(serve(&image, &[]));
    let top = place.path("top.qcow2");
    take_snapshot(&place, &top);
    assert_says(
        &output(ctl(&place, &["commit", "root", "--wait"])),
        &["before the next start", "disk.raw format=raw"],
    );
    assert_says(&output(ctl(&place, &["jobs"])), &["root", "commit", "completed", "100%", "disk.raw"]);
    server.kill();
    let folder = folder(&place).display().to_string();
    let old = refusal(serve(&top, &["--format", "qcow2", "--backing-folders", &folder]));
    assert_says(&old, &["top.qcow2 was committed to", "disk.raw", "delete this one"]);
    assert!(Server::start(serve(&image, &[])).stop(Signal::TERM).success());
}

#[test]
fn jobs_that_cannot_be_done_are_refused_and_change_nothing() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let folder = folder(&place).display().to_string();
    let serve = |image: &Path, words: &[&str]| Server::start(command(&place, image, words));
    let server = serve(&image, &[]);
    refused(&place, &["commit", "root"], &["disk.raw", "no backing file"]);
    refused(&place, &["stream", "root"], &["disk.raw", "no backing file"]);
    refused(&place, &["reclaim", "root"], &["disk.raw", "no qcow2 image"]);
    refused(&place, &["stream", "other"], &["other"]);
    refused(&place, &["job", "root", "--cancel"], &["root", "no running job"]);
    let top = place.path("top.qcow2");
    take_snapshot(&place, &top);
    output(ctl(&place, &["stream", "root", "--rate", "1"]));
    output(ctl(&place, &["job", "root", "--pause"]));
    refused(&place, &["commit", "root"], &["root", "has a running job (stream)", "--cancel"]);
    refused(&place, &["snapshot", "--overlay", &format!("root={folder}/x.qcow2")], &["has a running job"]);
    refused(&place, &["remove", "root"], &["has a running job"]);
    output(ctl(&place, &["job", "root", "--cancel"]));
    assert_eq!(job(&place)["state"], "cancelled");
    assert_eq!(ok(&place, &["list"])["disks"][0]["layers"], 2);
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn image_below_that_others_need_is_not_changed() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let folder = folder(&place).display().to_string();
    let serve = |image: &Path, words: &[&str]| Server::start(command(&place, image, words));
    let server = serve(&image, &[]);
    let top = place.path("top.qcow2");
    take_snapshot(&place, &top);
    assert!(server.stop(Signal::TERM).success());
    // Another disk needs the image below as it is.
    let server = serve(&top, &["--format", "qcow2", "--backing-folders", &folder]);
    let words = ["create", "-q", "-f", "qcow2", "-b", "disk.raw", "-F", "raw", "clone.qcow2"];
    if tool(&place, "qemu-img", &words).is_some() {
        let clone = place.path("clone.qcow2");
        let words =
            [format!("image={}", clone.display()), format!("socket={}", place.socket("s2").display())];
        let format = ["name=clone", "format=qcow2", &format!("backing-folders={folder}")].map(str::to_owned);
        let words: Vec<&str> = words.iter().chain(&format).map(String::as_str).collect();
        output(ctl(&place, &[&["add"], &words[..]].concat()));
        refused(&place, &["commit", "root", "--wait"], &["disk.raw is locked by"]);
        assert_eq!(job(&place)["state"], "failed");
        output(ctl(&place, &["remove", "clone"]));
        output(ctl(&place, &["commit", "root", "--wait"]));
    }
    assert!(server.stop(Signal::TERM).success());
    // Another overlay, which no program has open, needs the image below as it is.
    let server = serve(&image, &[]);
    let top = place.path("top-2.qcow2");
    take_snapshot(&place, &top);
    let other = place.path("other.qcow2");
    std::fs::write(&other, "").unwrap();
    let mark = other.as_os_str().as_encoded_bytes();
    rustix::fs::setxattr(&image, "user.bareblk.overlay", mark, XattrFlags::empty()).unwrap();
    refused(&place, &["commit", "root", "--wait"], &["disk.raw", "the overlay", "other.qcow2 depends on it"]);
    std::fs::remove_file(&other).unwrap();
    output(ctl(&place, &["commit", "root", "--wait"]));
    assert!(server.stop(Signal::TERM).success());
    // Internal snapshots need the image below.
    let words = ["create", "-q", "-f", "qcow2", "-b", "disk.raw", "-F", "raw", "kept.qcow2"];
    if tool(&place, "qemu-img", &words).is_some() {
        tool(&place, "qemu-img", &["snapshot", "-c", "one", "kept.qcow2"]).unwrap();
        let server = serve(&place.path("kept.qcow2"), &["--format", "qcow2", "--backing-folders", &folder]);
        refused(&place, &["stream", "root"], &["kept.qcow2", "internal snapshots", "qemu-img snapshot -d"]);
        assert!(server.stop(Signal::TERM).success());
    }
}
