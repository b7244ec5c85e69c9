//! qcow2 images that guests write: the old server closes the tables while the guest pauses, and the new one reads them.

use std::time::Duration;

use super::broken::{Hand, wait_refused};
use super::{Disk, hand_on_under_load, notices_nothing};
use crate::killed::load::{Load, Overlap, Rings};
use crate::qcow2::{assert_consistent, content_in, folder, tool};
use crate::rig::{Place, assert_says, ctl, eventually, ok, output, refusal};

/// Small clusters, so that nearly every write changes the tables; over a backing file it copies first.
fn written(words: &[&str], args: &[&str]) -> Option<Disk> {
    let place = Place::new();
    let folder = folder(&place);
    let image = place.path("a.qcow2");
    std::fs::File::create(place.path("base.raw")).unwrap().set_len(3 << 20).unwrap();
    tool(&place, "qemu-img", &[&["create", "-q", "-f", "qcow2"], words, &["a.qcow2", "4M"]].concat())?;
    let folders = folder.display().to_string();
    let args = [&["--format", "qcow2", "--backing-folders", &folders], args].concat();
    let contents = move || {
        // Nothing is leaked, although servers have come and gone under load.
        assert_consistent(&folder, "a.qcow2", false);
        content_in(&folder, "a.qcow2")
    };
    Some(Disk::start(place, image, &args, Some(Box::new(contents))))
}

#[test]
fn image_that_grows_goes_from_server_to_server() {
    let Some(disk) = written(&["-o", "cluster_size=4k"], &["--workers", "2"]) else { return };
    hand_on_under_load(disk, Rings::Split, true);
}

#[test]
fn image_over_a_backing_file_goes_from_server_to_server() {
    let Some(disk) = written(&["-b", "base.raw", "-F", "raw"], &[]) else { return };
    hand_on_under_load(disk, Rings::Packed, false);
}

#[test]
fn old_server_opens_the_tables_again_when_the_new_one_says_no() {
    let Some(mut disk) = written(&["-o", "cluster_size=4k"], &["--workers", "2"]) else { return };
    let load = Load::connect(disk.socket(), Rings::Split, Overlap::No, 8);
    notices_nothing(load, &mut disk, |disk| {
        for times in 1..6 {
            let mut hand = Hand::ready(disk, "{\"BeginWith\":{\"extras\":[\"qcow2\",\"qcow2-written\"]}}");
            hand.hear("StatesEnd");
            hand.say("{\"No\":{\"why\":\"no reason\"}}");
            wait_refused(disk, times);
            std::thread::sleep(Duration::from_millis(fastrand::u64(..30)));
        }
        disk.hand_on();
    });
}

#[test]
fn disk_grows_under_load_and_goes_from_server_to_server() {
    let Some(mut disk) = written(&["-o", "cluster_size=4k", "-b", "base.raw", "-F", "raw"], &[]) else {
        return;
    };
    let mut load = Load::connect(disk.socket(), Rings::Split, Overlap::No, fastrand::u64(..));
    load.may_grow = true;
    notices_nothing(load, &mut disk, |disk| {
        // Within the L1 table, and beyond it.
        for size in ["+3M", "9M", "+5G"] {
            output(ctl(&disk.place, &["resize", "root", size]));
            std::thread::sleep(Duration::from_millis(fastrand::u64(..40)));
            disk.hand_on();
        }
        let shown = ok(&disk.place, &["list"]);
        assert_eq!(shown["disks"][0]["size_bytes"], (9_u64 << 20) + (5 << 30), "{shown}");
        assert_says(
            &refusal(ctl(&disk.place, &["resize", "root", "1M", "--force"])),
            &["cannot shrink", "--shrink"],
        );
        // Its L1 table would have more than 32 MiB.
        assert_says(&refusal(ctl(&disk.place, &["resize", "root", "9T"])), &["a.qcow2", "L1 table"]);
    });
}

#[test]
fn older_server_does_not_take_a_written_image_over() {
    let Some(mut disk) = written(&[], &[]) else { return };
    let load = Load::connect(disk.socket(), Rings::Split, Overlap::No, 9);
    notices_nothing(load, &mut disk, |disk| {
        let mut hand = Hand::agreed(disk);
        hand.say("{\"BeginWith\":{\"extras\":[\"qcow2\"]}}");
        wait_refused(disk, 1);
        let log = disk.server.as_ref().unwrap().log();
        assert_says(&log, &["disk `root` is a writable qcow2 image", "restart the server instead"]);
    });
}

/// The tables are closed when a guest stops its disk, so a server that is killed afterwards leaves nothing behind.
#[test]
fn image_has_no_leaks_when_its_guest_has_stopped() {
    let Some(mut disk) = written(&["-o", "cluster_size=4k"], &[]) else { return };
    let mut model = {
        let mut load = Load::connect(disk.socket(), Rings::Split, Overlap::No, 10);
        load.work();
        load.verify();
        load.model
    };
    let folder = folder(&disk.place);
    let log = || disk.server.as_ref().unwrap().log();
    eventually("the guest has stopped", || log().contains("no longer in use").then_some(()));
    disk.server.take().unwrap().kill();
    assert_consistent(&folder, "a.qcow2", false);
    let bytes = content_in(&folder, "a.qcow2");
    let used = usize::try_from(model.sectors() * 512).unwrap();
    model.check_all(0, &bytes[..used]).unwrap();
}
