//! Images in a Ceph cluster as disks, on the real program, in its sandbox, and a real cluster.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::rig::ceph::CephImage;
use crate::rig::{
    Place, Server, add_near, assert_says, bench, ctl, eventually, ok, output, refusal, wrong_usage,
};

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

/// As in a live migration between hosts: both servers have the image open, and one at a time has a guest.
#[test]
fn two_servers_serve_one_image_in_turn() {
    let Some(image) = CephImage::new(16 * MIB) else { return };
    let places = [Place::new(), Place::new()];
    let servers =
        places.each_ref().map(|place| Server::start(serve(place, &image, &["--lock-timeout", "1"])));
    for place in [&places[0], &places[1], &places[0]] {
        verify(place, "s", &[]);
    }
    let mut load = bench();
    load.arg("--socket").arg(places[0].socket("s")).args(["--rw=randwrite", "--size=4m", "--time_based"]);
    let mut load = load.args(["--runtime=600", "--json"]).stdout(Stdio::null()).spawn().unwrap();
    eventually("the first server has a guest", || {
        (ok(&places[0], &["stats"])["disks"][0]["queues"][0]["writes"].as_u64()? > 0).then_some(())
    });
    let mut second = bench();
    second.arg("--socket").arg(places[1].socket("s")).args(["--rw=randwrite", "--size=4m"]);
    assert!(!second.output().unwrap().status.success());
    servers[1].wait_logged("in use by another client");
    load.kill().unwrap();
    load.wait().unwrap();
    verify(&places[1], "s", &[]);
    for server in servers {
        assert!(server.stop(Signal::TERM).success());
    }
}

/// `rbd bench` takes the lock as QEMU's librbd does, and would give it up if it were asked.
#[test]
fn lock_of_a_client_that_lives_is_not_asked_for() {
    let Some(image) = CephImage::new(16 * MIB) else { return };
    let place = Place::new();
    let server = Server::start(serve(&place, &image, &["--lock-timeout", "1"]));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let words = ["--io-type", "write", "--io-size", "4096", "--io-total", "64M", image.name()];
            image.rbd(&[&["bench"], &words[..]].concat())
        });
        eventually("the other client has the lock", || {
            image.rbd(&["lock", "ls", image.name()]).contains("client.").then_some(())
        });
        let mut ours = bench();
        ours.arg("--socket").arg(place.socket("s")).args(["--rw=randwrite", "--size=4m"]);
        assert!(!ours.output().unwrap().status.success());
        server.wait_logged("in use by another client");
        // It has written everything.
        assert_says(&other.join().unwrap(), &["elapsed"]);
    });
    verify(&place, "s", &[]);
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

/// Adds a disk with this name and socket, on the shared connection.
fn add_shared(place: &Place, name: &str, image: &CephImage) {
    let words = [
        format!("name={name}"),
        format!("image={}", image.spec()),
        format!("socket={}", place.socket(name).display()),
        format!("rbd-conf={}", image.conf().display()),
    ];
    output(ctl(place, &["add", &words[0], &words[1], &words[2], &words[3], "rbd-share-connection=true"]));
}

/// Writes to the disk `far` without an end, and meanwhile runs `fault`. Returns when a write fails, or after minutes.
fn writes_go_on(place: &Place, fault: impl FnOnce()) -> bool {
    let writes = || ok(place, &["stats"])["disks"][0]["queues"][0]["writes"].as_u64().unwrap_or(0);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut command = bench();
            command.arg("--socket").arg(place.socket("s")).args(["--rw=randwrite", "--size=4m"]);
            command.args(["--runtime=600", "--time_based"]).output().unwrap().status.success()
        });
        eventually("writes go on", || (writes() > 0).then_some(()));
        fault();
        load.join().unwrap()
    })
}

fn health(place: &Place) -> String {
    let health = assert_cmd::Command::from_std(ctl(place, &["health"])).assert().code(1);
    String::from_utf8_lossy(&health.get_output().stdout).into_owned()
}

/// The cluster carries out the writes of a client whose lock is gone, unless it is blocklisted, too.
#[test]
fn lock_removed_without_a_blocklist_ends_the_disks_writes_and_no_other_disks() {
    let Some(image) = CephImage::new(16 * MIB) else { return };
    let Some(other) = CephImage::new(16 * MIB) else { return };
    let (place, next) = (Place::new(), Place::new());
    let server = Server::start(serve(&place, &image, &["--rbd-share-connection"]));
    add_shared(&place, "beside", &other);
    assert!(!writes_go_on(&place, || image.remove_lock_only()), "writes go on although the lock is gone");
    let text = health(&place);
    assert_says(&text, &["disk far has failed: another client has broken or removed its lock"]);
    assert!(!text.contains("beside"), "{text}");
    assert_says(&server.log(), &["has removed this image's lock, or the image itself", "added again"]);
    verify(&place, "beside", &[]);
    // The guest has left, so this server writes no more.
    let second = Server::start(serve(&next, &image, &["--lock-timeout", "0"]));
    verify(&next, "s", &[]);
    output(ctl(&place, &["remove", "far"]));
    add_shared(&place, "far", &image);
    verify(&place, "far", &[]);
    for server in [server, second] {
        assert!(server.stop(Signal::TERM).success());
    }
}

#[test]
fn image_removed_by_force_ends_its_requests_and_another_disk_goes_on() {
    let Some(image) = CephImage::new(16 * MIB) else { return };
    let place = Place::new();
    let mut command = serve(&place, &image, &[]);
    command.arg("--allow-folders").arg(place.folder());
    let server = Server::start(command);
    add_near(&place);
    let removed = writes_go_on(&place, || {
        // Ceph's tool does not remove an image that a client uses.
        let refused = image.command("rbd", &["rm", "--no-progress", image.name()]).output().unwrap();
        assert_says(&String::from_utf8_lossy(&refused.stderr), &["image still has watchers"]);
        image.remove_header();
        verify(&place, "near", &[]);
    });
    assert!(!removed, "writes go on although the image is gone");
    assert_says(&server.log(), &[&image.spec(), "has removed this image's lock, or the image itself"]);
    assert_says(&health(&place), &["disk far has failed"]);
    verify(&place, "near", &[]);
    output(ctl(&place, &["remove", "far"]));
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn broken_lock_fails_every_disk_of_its_connection_and_health_names_them() {
    let Some(image) = CephImage::new(16 * MIB) else { return };
    let Some(other) = CephImage::new(16 * MIB) else { return };
    let place = Place::new();
    let add = |name, image: &CephImage| add_shared(&place, name, image);
    let server = Server::start(serve(&place, &image, &["--rbd-share-connection"]));
    add("beside", &other);
    assert!(!writes_go_on(&place, || drop(image.break_lock())), "writes go on although the lock is broken");
    let text = health(&place);
    assert_says(&text, &["disk far has failed: another client", "disk beside has failed: another client"]);
    let told = |image: &CephImage| {
        let about = |line: &&str| line.contains(&image.spec()) && line.contains("every request fails until");
        server.log().lines().filter(about).count()
    };
    assert_eq!([told(&image), told(&other)], [1, 1]);
    output(ctl(&place, &["remove", "beside"]));
    add("beside", &other);
    verify(&place, "beside", &[]);
    // The guest knows which of its writes were refused; all others are durable.
    output(ctl(&place, &["remove", "far"]));
    add("far", &image);
    verify(&place, "far", &[]);
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
