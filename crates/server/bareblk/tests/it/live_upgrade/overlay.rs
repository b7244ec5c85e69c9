//! Snapshots by overlay: guests go on in new images, and notice nothing.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blk_driver::{Device, Durability, Options};
use rustix::process::Signal;

use super::{Disk, MIB, notices_nothing};
use crate::killed::load::{Load, Overlap, Rings};
use crate::qcow2::{assert_consistent, content_in, folder, tool};
use crate::rig::{DEADLINE, Place, Server, assert_says, ctl, ok, output, refusal};

/// A disk whose contents are read from the image that the last overlay made.
fn disk(place: Place, image: PathBuf, args: &[&str]) -> (Disk, Arc<Mutex<String>>) {
    let top = Arc::new(Mutex::new(String::new()));
    let (folder, name) = (folder(&place), Arc::clone(&top));
    let contents = move || {
        let name = name.lock().unwrap().clone();
        assert_consistent(&folder, &name, false);
        content_in(&folder, &name)
    };
    (Disk::start(place, image, args, Some(Box::new(contents))), top)
}

fn overlay(place: &Place, name: &str) -> serde_json::Value {
    let file = format!("root={}", place.path(name).display());
    ok(place, &["snapshot", "--overlay", &file])
}

/// Puts overlays over a disk under load, and hands it over in between.
fn overlays_under_load(mut disk: Disk, top: &Mutex<String>, rings: Rings, log: bool) {
    let load = Load::connect_with(disk.socket(), rings, Overlap::No, log, fastrand::u64(..));
    notices_nothing(load, &mut disk, |disk| {
        for count in 1..=4 {
            std::thread::sleep(Duration::from_millis(fastrand::u64(..80)));
            let name = format!("top-{count}.qcow2");
            let answer = overlay(&disk.place, &name);
            println!("  paused for {} ns", answer["paused_ns"]);
            top.lock().unwrap().clone_from(&name);
            disk.image = disk.place.path(&name);
            let keys = answer["keys"][0].as_str().unwrap();
            let key = |name: &str| {
                let start = format!("{name}=");
                keys.split(' ').find_map(|key| key.strip_prefix(&start)).unwrap().to_owned()
            };
            let (workers, folders, serial) = ("2", key("backing-folders"), key("serial"));
            let args = [
                "--workers",
                workers,
                "--format",
                "qcow2",
                "--backing-folders",
                &folders,
                "--serial",
                &serial,
            ];
            disk.args = args.map(str::to_owned).to_vec();
            if count == 2 {
                disk.hand_on();
            }
        }
        let shown = ok(&disk.place, &["list"]);
        assert_eq!(shown["disks"][0]["layers"], 5, "{shown}");
    });
}

#[test]
fn overlays_grow_over_a_raw_image_under_load() {
    let place = Place::new();
    if tool(&place, "qemu-img", &["--version"]).is_none() {
        return;
    }
    let image = place.image("disk.raw", 4 * MIB);
    let (disk, top) = disk(place, image, &["--workers", "2"]);
    overlays_under_load(disk, &top, Rings::Split, true);
}

#[test]
fn overlays_grow_over_a_qcow2_image_under_load() {
    let place = Place::new();
    let words = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "a.qcow2", "4M"];
    if tool(&place, "qemu-img", &words).is_none() {
        return;
    }
    let image = place.path("a.qcow2");
    let (disk, top) = disk(place, image, &["--workers", "2", "--format", "qcow2"]);
    overlays_under_load(disk, &top, Rings::Packed, false);
}

/// The number in a disk's first sector.
fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

/// A guest writes a number to the first disk, and then to the second one.
#[test]
fn disks_of_one_command_are_kept_as_of_one_instant() {
    let place = Place::new();
    let [one, two] = ["one", "two"].map(|name| place.image(&format!("{name}.raw"), MIB));
    let mut command = place.serve(&one, "s1");
    command.args(["--name", "one"]).arg("--control").arg(place.socket("c"));
    let server = Server::start(command);
    output(ctl(
        &place,
        &[
            "add",
            &format!("image={}", two.display()),
            &format!("socket={}", place.socket("s2").display()),
            "name=two",
        ],
    ));
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut disks =
                ["s1", "s2"].map(|socket| Device::connect(&Options::new(place.socket(socket))).unwrap());
            let mut written = 0_u64;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                written += 1;
                let mut sector = [0; 4096];
                sector[..8].copy_from_slice(&written.to_le_bytes());
                for (_, queues) in &mut disks {
                    queues[0].write_blocking(0, &sector, Durability::Cached, DEADLINE).unwrap();
                }
            }
            written
        });
        let mut below = [one.clone(), two.clone()];
        for count in 0..5 {
            std::thread::sleep(Duration::from_millis(20));
            let next = ["one", "two"].map(|name| place.path(&format!("{name}-{count}.qcow2")));
            let words =
                ["one", "two"].iter().zip(&next).map(|(name, path)| format!("{name}={}", path.display()));
            let words: Vec<String> = words.collect();
            output(ctl(&place, &["snapshot", "--overlay", &words[0], &words[1]]));
            // The images below do not change any more, and other programs may read them.
            let numbers = below.each_ref().map(|path| match path.extension().unwrap() == "raw" {
                true => number(&std::fs::read(path).unwrap()),
                false => number(&content_in(&folder(&place), path.file_name().unwrap().to_str().unwrap())),
            });
            assert!(numbers[0] == numbers[1] || numbers[0] == numbers[1] + 1, "{numbers:?}");
            below = next;
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(writer.join().unwrap() > 5, "hardly any writes");
    });
    assert!(server.stop(Signal::TERM).success());
}

/// A start with the old configuration would let the guest write below the overlay.
#[test]
fn image_below_an_overlay_is_not_served_for_writing() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let serve = |words: &[&str]| {
        let mut command = place.serve(&image, "s");
        command.args(["--name", "root", "--control"]).arg(place.socket("c")).args(words);
        command
    };
    let server = Server::start(serve(&[]));
    overlay(&place, "top.qcow2");
    server.kill();
    assert_says(&refusal(serve(&[])), &["disk.raw", "top.qcow2", "--format qcow2", "setfattr -x"]);
    assert!(Server::start(serve(&["--readonly"])).stop(Signal::TERM).success());
    // Without the overlay, the guest goes back to the snapshot.
    std::fs::remove_file(place.path("top.qcow2")).unwrap();
    assert!(Server::start(serve(&[])).stop(Signal::TERM).success());
}

#[test]
fn overlay_that_cannot_be_made_changes_nothing() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let serve = |words: &[&str]| {
        let mut command = place.serve(&image, "s");
        command.args(["--name", "root", "--control"]).arg(place.socket("c")).args(words);
        Server::start(command)
    };
    let refused = |words: &[&str], says: &[&str]| {
        assert_says(&refusal(ctl(&place, &[&["snapshot", "--overlay"], words].concat())), says);
    };
    let at = |name: &str| format!("root={}", place.path(name).display());
    let server = serve(&[]);
    std::fs::write(place.path("there"), "mine").unwrap();
    refused(&[&at("there")], &["there", "exists already", "another path"]);
    assert_eq!(std::fs::read(place.path("there")).unwrap(), b"mine");
    refused(&["data=/x"], &["data"]);
    refused(&[&at("a"), &at("b")], &["root appears twice"]);
    refused(&["root=/usr/lib/x.qcow2"], &["/usr/lib/x.qcow2"]);
    refused(&[&at("no/folder")], &["no/folder"]);
    assert!(server.stop(Signal::TERM).success());
    // Another file has taken the image's name.
    let server = serve(&[]);
    std::fs::rename(&image, place.path("moved")).unwrap();
    std::fs::write(&image, vec![0; usize::try_from(MIB).unwrap()]).unwrap();
    refused(&[&at("a")], &["disk.raw", "another file has taken the name"]);
    assert!(!place.path("a").exists());
    assert!(server.stop(Signal::TERM).success());
    let server = serve(&["--readonly"]);
    refused(&[&at("a")], &["disk.raw", "read-only"]);
    assert!(server.stop(Signal::TERM).success());
    let server = serve(&["--placement", "shared"]);
    refused(&[&at("a")], &["needs placement queue"]);
    let (_device, mut queues) = Device::connect(&Options::new(place.socket("s"))).unwrap();
    queues[0].write_blocking(0, &[7; 4096], Durability::Durable, DEADLINE).unwrap();
    assert!(!place.path("a").exists());
    assert!(server.stop(Signal::TERM).success());
}
