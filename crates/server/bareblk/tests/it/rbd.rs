//! Images in a Ceph cluster as disks, on the real program, in its sandbox, and a real cluster.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use crate::rig::ceph::CephImage;
use crate::rig::{Place, Server, assert_says, bench, ctl, eventually, ok, output, refusal, wrong_usage};

const MIB: u64 = 1 << 20;

/// `bareblk serve rbd:…` with a control socket; the disk is `far`.
fn serve(place: &Place, image: &CephImage, words: &[&str]) -> Command {
    let mut command = place.serve(Path::new(&image.spec()), "s");
    command.args(["--name", "far", "--rbd-conf"]).arg(image.conf());
    command.arg("--control").arg(place.socket("c")).args(words);
    command
}

/// Writes the disk, reads it back and compares.
fn verify(place: &Place, socket: &str, words: &[&str]) {
    let mut command = bench();
    command.arg("--socket").arg(place.socket(socket)).args(["--bs=16k", "--iodepth=8", "--json"]);
    command.args(["--verify=crc32c", "--rw=randwrite", "--size=4m"]).args(words);
    output(command);
}

#[test]
fn image_is_served_on_several_workers_and_the_usual_commands_work() {
    let Some(image) = CephImage::new(16 * MIB) else { return };
    let place = Place::new();
    let server = Server::start(serve(&place, &image, &["--workers", "2", "--queues", "2"]));
    assert_says(&server.ready_line, &["serving rbd:rbd/test-"]);
    verify(&place, "s", &["--numjobs=2"]);
    let disk = ok(&place, &["list"])["disks"][0].clone();
    assert_eq!((&disk["engine"], &disk["size_bytes"]), (&"rbd".into(), &(16 * MIB).into()));
    output(ctl(&place, &["flush", "far"]));
    output(ctl(&place, &["resize", "far", "32M"]));
    assert_says(&image.rbd(&["info", image.name()]), &["size 32 MiB"]);
    output(ctl(&place, &["remove", "far"]));
    let words = [
        format!("image={}", image.spec()),
        format!("socket={}", place.socket("t").display()),
        format!("rbd-conf={}", image.conf().display()),
    ];
    output(ctl(&place, &["add", "name=again", &words[0], &words[1], &words[2]]));
    verify(&place, "t", &[]);
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn load_waits_for_a_stopped_storage_daemon_and_goes_on() {
    let Some(image) = CephImage::new(16 * MIB) else { return };
    let place = Place::new();
    let server = Server::start(serve(&place, &image, &[]));
    let osd = Pid::from_raw(image.pid("osd")).unwrap();
    let writes = || ok(&place, &["stats"])["disks"][0]["queues"][0]["writes"].as_u64().unwrap_or(0);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| verify(&place, "s", &["--loops=20"]));
        eventually("writes go on", || (writes() > 0).then_some(()));
        kill_process(osd, Signal::STOP).unwrap();
        // Other requests of the server do not wait.
        output(ctl(&place, &["list"]));
        kill_process(osd, Signal::CONT).unwrap();
        load.join().unwrap();
    });
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn server_that_is_killed_leaves_a_lock_that_the_next_one_gets() {
    let Some(image) = CephImage::new(16 * MIB) else { return };
    let place = Place::new();
    Server::start(serve(&place, &image, &[])).kill();
    std::fs::remove_file(place.socket("c")).unwrap();
    // The cluster notices after some seconds that the first server has ended.
    let server = Server::start(serve(&place, &image, &[]));
    let served = || (!output(ctl(&place, &["list"])).contains("not served yet")).then_some(());
    eventually("the image's lock is free", served);
    verify(&place, "s", &[]);
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn image_that_cannot_be_served_ends_the_start_with_its_reason() {
    let place = Place::new();
    let serve_text = |text: &str| place.serve(Path::new(text), "s");
    assert_says(&refusal(serve_text("rbd:pool")), &["needs a pool and an image", "rbd:POOL/IMAGE"]);
    let mut shared = serve_text("rbd:pool/image");
    shared.args(["--placement", "shared"]);
    assert_says(&wrong_usage(shared), &["--placement queue"]);
    let Some(image) = CephImage::new(16 * MIB) else { return };
    let mut missing = place.serve(Path::new("rbd:rbd/none"), "s");
    missing.arg("--rbd-conf").arg(image.conf());
    assert_says(&refusal(missing), &["rbd:rbd/none", "does not exist", "rbd create"]);
    let stranger = refusal(serve(&place, &image, &["--rbd-id", "stranger"]));
    assert_says(&stranger, &["client.stranger", "--rbd-id"]);
    let mut nowhere = serve_text(&image.spec());
    nowhere.args(["--rbd-conf", "/nonexistent/ceph.conf"]);
    assert_says(&refusal(nowhere), &["/nonexistent/ceph.conf", "--rbd-conf"]);
}

#[test]
fn server_without_such_a_disk_at_its_start_reaches_no_cluster() {
    let Some(image) = CephImage::new(16 * MIB) else { return };
    let place = Place::new();
    let mut command = place.serve(&place.image("near.raw", 4 * MIB), "s");
    command.arg("--control").arg(place.socket("c"));
    let server = Server::start(command);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", server.pid())).unwrap();
    assert!(!maps.contains("librbd"));
    let words = [
        format!("image={}", image.spec()),
        format!("socket={}", place.socket("t").display()),
        format!("rbd-conf={}", image.conf().display()),
    ];
    let refused = refusal(ctl(&place, &["add", "name=far", &words[0], &words[1], &words[2]]));
    assert_says(&refused, &["started without RBD disks", "restart it"]);
    assert!(server.stop(Signal::TERM).success());
}
