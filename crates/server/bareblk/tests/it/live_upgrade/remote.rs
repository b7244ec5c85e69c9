//! Disks on other machines: both servers open them, and the storage's lock changes hands while the guest pauses.

use std::path::Path;

use rustix::process::Signal;

use super::{Disk, MIB, hand_on_under_load};
use crate::killed::load::{Load, Overlap, Rings};
use crate::rig::ceph::CephImage;
use crate::rig::nbd_server::NbdServer;
use crate::rig::{Server, assert_says, refusal};

#[test]
fn export_of_an_nbd_server_goes_from_server_to_server() {
    let Some(export) = NbdServer::file(4 * MIB, &[]) else { return };
    let (uri, file) = (export.uri(), export.file_path());
    let disk = Disk::remote(&uri, &[], Box::new(move || std::fs::read(&file).unwrap()));
    hand_on_under_load(disk, Rings::Split, true);
}

#[test]
fn export_with_one_connection_goes_from_server_to_server() {
    let words = ["--filter=multi-conn", "multi-conn-mode=disable"];
    let Some(export) = NbdServer::file(4 * MIB, &words) else { return };
    let (uri, file) = (export.uri(), export.file_path());
    let disk = Disk::remote(&uri, &["--workers", "2"], Box::new(move || std::fs::read(&file).unwrap()));
    hand_on_under_load(disk, Rings::Packed, false);
}

#[test]
fn image_in_a_cluster_goes_from_server_to_server() {
    let Some(image) = CephImage::new(4 * MIB) else { return };
    let (spec, conf) = (image.spec(), image.conf().display().to_string());
    let disk = Disk::remote(&spec, &["--rbd-conf", &conf], Box::new(move || image.contents()));
    hand_on_under_load(disk, Rings::Split, true);
}

#[test]
fn upgrade_while_the_nbd_server_hangs_is_refused_and_the_disk_goes_on() {
    let Some(export) = NbdServer::qemu_nbd(4 * MIB, &["--shared=1"]) else { return };
    let uri = export.uri();
    // This server accepts one client at a time, so the new server cannot open the disk.
    let mut disk = Disk::remote(&uri, &[], Box::new(Vec::new));
    let refused = refusal(disk.taker());
    assert_says(&refused, &["cannot take over", "disk `root` is on another machine", "without --take-over"]);
    let mut load = Load::connect(disk.socket(), Rings::Split, Overlap::No, 1);
    load.work();
    load.verify();
    drop(load);
    disk.stop();
}

#[test]
fn disk_that_still_waits_for_its_server_waits_in_the_new_one_too() {
    let Some(mut export) = NbdServer::file(4 * MIB, &[]) else { return };
    export.kill();
    let uri = export.uri();
    let disk = Disk::remote(&uri, &[], Box::new(Vec::new));
    let new = Server::start(disk.taker());
    assert_says(&new.ready_line, &["not yet serving", Path::new(&uri).to_str().unwrap()]);
    assert_eq!(disk.server.unwrap().wait_ended().code(), Some(0));
    assert!(new.stop(Signal::TERM).success());
}
