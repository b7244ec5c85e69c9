//! Kills of servers whose disk is a qcow2 image that grows: what a killed server leaves has leaks at most, and every
//! acknowledged write.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use xtask::sizes;

use super::{Ask, Copies, Disk, MIB, kills, random, survives};
use crate::killed::load::{Load, Overlap, Rings};
use crate::qcow2::{assert_consistent, content_in, folder, tool};
use crate::rig::{Place, ctl, ok, output};

#[test]
fn nothing_is_lost_with_servers_that_are_killed_while_a_qcow2_image_grows() {
    let mut random = random();
    // With small clusters, nearly every write changes the tables. Over a backing file, it copies first.
    for (rings, overlap, words) in [
        (Rings::Split, Overlap::No, &["-o", "cluster_size=4k"][..]),
        (Rings::Packed, Overlap::Yes, &[]),
        (Rings::Split, Overlap::Yes, &["-b", "base.raw", "-F", "raw"]),
    ] {
        let place = Place::new();
        let folder = folder(&place);
        let image = place.path("a.qcow2");
        std::fs::File::create(place.path("base.raw")).unwrap().set_len(3 << 20).unwrap();
        let words = [&["create", "-q", "-f", "qcow2"], words, &["a.qcow2", "4M"]].concat();
        if tool(&place, "qemu-img", &words).is_none() {
            return;
        }
        let folders = folder.display().to_string();
        let mut disk = Disk::with(
            place,
            image,
            &["--format", "qcow2", "--workers", "2", "--backing-folders", &folders],
            Some(Box::new(move || {
                assert_consistent(&folder, "a.qcow2", true);
                content_in(&folder, "a.qcow2")
            })),
        );
        kills(&mut disk, rings, overlap, Copies::No, &mut random);
    }
}

/// The guest goes on in an overlay, the server is killed at any instant afterwards, and the next one serves the overlay.
#[test]
fn nothing_is_lost_with_servers_that_are_killed_after_the_guest_has_gone_on_in_an_overlay() {
    let mut random = random();
    for rings in [Rings::Split, Rings::Packed] {
        let place = Place::new();
        if tool(&place, "qemu-img", &["--version"]).is_none() {
            return;
        }
        let (image, folder) = (place.image("disk.raw", 4 * MIB), folder(&place));
        let control = place.socket("c").display().to_string();
        let top = Arc::new(Mutex::new(String::new()));
        let content_top = Arc::clone(&top);
        let contents = move || {
            let top = content_top.lock().unwrap();
            assert_consistent(&folder, &top, true);
            content_in(&folder, &top)
        };
        let words = ["--workers", "2", "--control", &control];
        let mut disk = Disk::with(place, image, &words, Some(Box::new(contents)));
        let load = Load::connect(disk.socket(), rings, Overlap::No, random.u64(..));
        survives(load, &mut disk, |disk, load| {
            for count in 0..4 {
                load.live(&mut random);
                let name = format!("top-{count}.qcow2");
                let file = format!("root={}", disk.place.path(&name).display());
                let answer = ok(&disk.place, &["snapshot", "--overlay", &file]);
                load.live(&mut random);
                disk.kill();
                disk.image = disk.place.path(&name);
                let keys =
                    answer["keys"][0].as_str().unwrap().split(' ').filter_map(|key| key.split_once('='));
                let wanted = keys.filter(|(key, _)| ["format", "backing-folders", "serial"].contains(key));
                disk.args.truncate(words.len());
                disk.args.extend(wanted.flat_map(|(key, value)| [format!("--{key}"), value.to_owned()]));
                disk.start();
                *top.lock().unwrap() = name;
                if random.bool() {
                    load.verify();
                }
            }
        });
    }
}

/// The image that a start must serve: a committed one is refused.
fn present(top: &Path, below: &Path) -> PathBuf {
    let is_committed = rustix::fs::getxattr(top, "user.bareblk.committed", &mut [0_u8; 4096][..]).is_ok();
    if is_committed { below.to_owned() } else { top.to_owned() }
}

/// Overlays are committed, or get what lies below them; the server is killed meanwhile or soon afterwards.
#[test]
fn nothing_is_lost_with_servers_that_are_killed_while_layers_are_merged() {
    let mut random = random();
    for (rings, job) in [(Rings::Split, "commit"), (Rings::Packed, "commit"), (Rings::Split, "stream")] {
        let place = Place::new();
        if tool(&place, "qemu-img", &["--version"]).is_none() {
            return;
        }
        let (raw, folder) = (place.image("disk.raw", 4 * MIB), folder(&place));
        let folders = folder.display().to_string();
        let control = place.socket("c").display().to_string();
        let served = Arc::new(Mutex::new(raw.clone()));
        let content_of = Arc::clone(&served);
        let contents = move || crate::live_upgrade::merge::content_of(&folder, &content_of.lock().unwrap());
        let words = ["--workers", "2", "--control", &control, "--serial", "x"];
        let mut disk = Disk::with(place, raw.clone(), &words, Some(Box::new(contents)));
        let load = Load::connect(disk.socket(), rings, Overlap::No, random.u64(..));
        survives(load, &mut disk, |disk, load| {
            let (mut below, mut switched) = (raw, 0);
            // A chain has at most 16 layers.
            let kills = sizes::OTHER_KILLS.now().min(14);
            for count in 0..kills {
                let top = disk.place.path(&format!("top-{count}.qcow2"));
                output(ctl(&disk.place, &["snapshot", "--overlay", &format!("root={}", top.display())]));
                load.live(&mut random);
                output(ctl(&disk.place, &[job, "root"]));
                std::thread::sleep(Duration::from_micros(random.u64(..60_000)));
                disk.kill();
                disk.image = present(&top, &below);
                switched += u32::from(disk.image == below);
                below.clone_from(&disk.image);
                disk.args.truncate(words.len());
                if disk.image.extension().unwrap() == "qcow2" {
                    let format = ["--format", "qcow2", "--backing-folders", &folders];
                    disk.args.extend(format.map(str::to_owned));
                }
                disk.start();
                served.lock().unwrap().clone_from(&disk.image);
                load.verify();
            }
            println!("  {job}: {switched} of {kills} had switched");
        });
    }
}

/// What killed servers leak is freed while the guest goes on. Afterwards the image has no leaks and the guest's data.
#[test]
fn leaks_of_killed_servers_are_reclaimed_under_load() {
    let mut random = random();
    for (rings, overlap, words) in
        [(Rings::Split, Overlap::No, &["-o", "cluster_size=4k"][..]), (Rings::Packed, Overlap::Yes, &[])]
    {
        let place = Place::new();
        let (image, folder) = (place.path("a.qcow2"), folder(&place));
        let words = [&["create", "-q", "-f", "qcow2"], words, &["a.qcow2", "4M"]].concat();
        if tool(&place, "qemu-img", &words).is_none() {
            return;
        }
        let control = place.socket("c").display().to_string();
        let contents = move || {
            assert_consistent(&folder, "a.qcow2", false);
            content_in(&folder, "a.qcow2")
        };
        let words = ["--format", "qcow2", "--workers", "2", "--control", &control];
        let mut disk = Disk::with(place, image, &words, Some(Box::new(contents)));
        let load = Load::connect(disk.socket(), rings, overlap, random.u64(..));
        survives(load, &mut disk, |disk, load| {
            let mut reclaimed = 0;
            let kills = sizes::OTHER_KILLS.now();
            for _ in 0..kills {
                load.ask(Ask::Work);
                disk.kill();
                disk.start();
                load.live(&mut random);
                let said = output(ctl(&disk.place, &["reclaim", "root", "--wait"]));
                assert!(said.contains("no leaks") || said.contains("reclaimed "), "{said}");
                reclaimed += u32::from(said.contains("reclaimed "));
            }
            println!("  {reclaimed} of {kills} servers had leaked");
            assert!(reclaimed > 0);
        });
    }
}
