//! Exports of NBD servers as disks, on the real program and real servers: nbdkit and qemu-nbd.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use crate::killed::load::{Load, Overlap, Rings};
use crate::rig::nbd_server::NbdServer;
use crate::rig::{
    Place, Server, Starting, assert_says, bareblk, bench, ctl, eventually, ok, output, refusal, wrong_usage,
};

const MIB: u64 = 1 << 20;

/// `bareblk serve URI` with a control socket; the disk is `far`.
fn serve(place: &Place, uri: &str, words: &[&str]) -> Command {
    let mut command = place.serve(Path::new(uri), "s");
    command.args(["--name", "far", "--control"]).arg(place.socket("c")).args(words);
    command
}

/// Writes the disk, reads it back and compares.
fn verify(place: &Place, socket: &str, size: &str, words: &[&str]) {
    let mut command = bench();
    command.arg("--socket").arg(place.socket(socket)).args(["--bs=16k", "--iodepth=8", "--json"]);
    command.args(["--verify=crc32c", "--rw=randwrite", "--size", size]).args(words);
    output(command);
}

fn state(place: &Place) -> String {
    output(ctl(place, &["list"]))
}

#[test]
fn export_is_served_on_several_workers_and_the_usual_commands_work() {
    let Some(export) = NbdServer::file(16 * MIB, &[]) else { return };
    let place = Place::new();
    let server = Server::start(serve(&place, &export.uri(), &["--workers", "2", "--queues", "2"]));
    assert_says(
        &server.ready_line,
        &["serving nbd+unix:///?socket=", &place.socket("s").display().to_string()],
    );
    verify(&place, "s", "4m", &["--numjobs=2"]);
    let disk = ok(&place, &["list"])["disks"][0].clone();
    assert_eq!((&disk["engine"], &disk["size_bytes"]), (&"nbd".into(), &(16 * MIB).into()));
    output(ctl(&place, &["flush", "far"]));
    output(ctl(&place, &["limit", "far", "iops=100000"]));
    assert_says(&refusal(ctl(&place, &["resize", "far", "32M"])), &["16777216", "at its server", "33554432"]);
    output(ctl(&place, &["remove", "far"]));
    let (image, socket) =
        (format!("image={}", export.uri()), format!("socket={}", place.socket("t").display()));
    assert_eq!(output(ctl(&place, &["add", "name=again", &image, &socket])), "again\n");
    verify(&place, "t", "8m", &[]);
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn export_of_a_server_with_one_connection_is_served_by_one_worker() {
    let Some(export) = NbdServer::file(16 * MIB, &["--filter=multi-conn", "multi-conn-mode=disable"]) else {
        return;
    };
    let place = Place::new();
    let server = Server::start(serve(&place, &export.uri(), &["--workers", "2", "--queues", "2"]));
    verify(&place, "s", "4m", &["--numjobs=2"]);
    output(ctl(&place, &["flush", "far"]));
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn load_goes_on_when_the_server_is_killed_and_comes_back() {
    let Some(mut export) = NbdServer::file(16 * MIB, &[]) else { return };
    let place = Place::new();
    let server = Server::start(serve(&place, &export.uri(), &[]));
    std::thread::scope(|scope| {
        let load = scope.spawn(|| verify(&place, "s", "16m", &["--loops=3"]));
        for _ in 0..3 {
            let before = ok(&place, &["stats"])["disks"][0]["queues"][0]["writes"].as_u64().unwrap_or(0);
            eventually("writes go on", || {
                let writes = ok(&place, &["stats"])["disks"][0]["queues"][0]["writes"].as_u64().unwrap_or(0);
                (writes > before || load.is_finished()).then_some(())
            });
            export.kill();
            export.start().unwrap();
        }
        load.join().unwrap();
    });
    server.wait_logged("connection to the NBD server lost");
    server.wait_logged("connected to the NBD server again");
    assert!(server.stop(Signal::TERM).success());
}

/// The last flush needs a new connection, which the thread of a session may not make itself.
#[test]
fn guest_leaves_after_the_nbd_server_was_restarted_unnoticed() {
    let Some(mut export) = NbdServer::file(16 * MIB, &[]) else { return };
    let place = Place::new();
    let server = Server::start(serve(&place, &export.uri(), &[]));
    let mut load = Load::connect(place.socket("s"), Rings::Split, Overlap::No, 1);
    load.model.may_tear = true;
    load.work();
    load.verify();
    export.kill();
    export.start().unwrap();
    drop(load);
    server.wait_logged("no longer in use");
    assert!(!server.log().contains("WARN"), "{}", server.log());
    verify(&place, "s", "16m", &[]);
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn start_without_the_nbd_server_serves_the_other_disks_and_this_one_later() {
    let Some(mut export) = NbdServer::file(16 * MIB, &[]) else { return };
    export.kill();
    let place = Place::new();
    let file = place.path("bareblk.toml");
    let [control, near, far] = ["c", "n", "s"].map(|name| place.socket(name).display().to_string());
    let image = place.image("near.raw", 16 * MIB).display().to_string();
    let text = format!(
        "control = '{control}'\n[[disk]]\nname = 'near'\nimage = '{image}'\nsocket = '{near}'\n\
         [[disk]]\nname = 'far'\nimage = '{}'\nsocket = '{far}'\n",
        export.uri()
    );
    std::fs::write(&file, text).unwrap();
    let mut command = bareblk();
    command.arg("serve").arg("--config").arg(&file);
    let (server, lines) = Starting::new(command).wait_lines(3);
    assert_says(&lines[0], &["serving", "near.raw"]);
    assert_says(&lines[1], &["not yet serving nbd+unix:", "cannot be reached", "cannot connect"]);
    assert_eq!(lines[2], "bareblk: serving 1 disk; 1 disk waits for its server");
    verify(&place, "n", "8m", &[]);
    assert_says(&state(&place), &["disk far is not served yet", "cannot connect to the NBD server"]);
    let health = assert_cmd::Command::from_std(ctl(&place, &["health"])).assert().code(1);
    assert_says(&String::from_utf8_lossy(&health.get_output().stdout), &["disk far is not served yet"]);
    export.start().unwrap();
    eventually("the disk is served", || (!state(&place).contains("not served yet")).then_some(()));
    verify(&place, "s", "8m", &[]);
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn waiting_disk_can_be_removed() {
    let Some(mut export) = NbdServer::file(16 * MIB, &[]) else { return };
    export.kill();
    let place = Place::new();
    let server = Server::start(serve(&place, &export.uri(), &[]));
    assert_says(&server.ready_line, &["not yet serving"]);
    output(ctl(&place, &["remove", "far"]));
    assert!(!state(&place).contains("far"));
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn requests_are_parked_while_the_server_hangs_and_go_on_afterwards() {
    let Some(export) = NbdServer::qemu_nbd(16 * MIB, &[]) else { return };
    let place = Place::new();
    let words = ["--on-error", "hold", "--retry-after", "1", "--nbd-timeout", "1"];
    let server = Server::start(serve(&place, &export.uri(), &words));
    verify(&place, "s", "8m", &[]);
    let pid = Pid::from_child(export.process());
    kill_process(pid, Signal::STOP).unwrap();
    std::thread::scope(|scope| {
        let load = scope.spawn(|| verify(&place, "s", "8m", &[]));
        eventually("requests are parked", || {
            (ok(&place, &["list"])["disks"][0]["held"].as_u64() > Some(0)).then_some(())
        });
        kill_process(pid, Signal::CONT).unwrap();
        load.join().unwrap();
    });
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn export_that_cannot_be_served_ends_the_start_with_its_reason() {
    let place = Place::new();
    if let Some(export) = NbdServer::qemu_nbd(16 * MIB, &["--export-name=right", "--read-only"]) {
        let wrong = refusal(serve(&place, &export.uri_of("wrong"), &[]));
        assert_says(&wrong, &["cannot be served", "no export 'wrong'", "check the URI's path"]);
        let read_only = refusal(serve(&place, &export.uri_of("right"), &[]));
        assert_says(&read_only, &["exports it read-only", "--readonly"]);
        let server = Server::start(serve(&place, &export.uri_of("right"), &["--readonly"]));
        assert!(server.stop(Signal::TERM).success());
    }
    let wrong = |uri: &str, words: &[&str]| refusal(serve(&place, uri, words));
    assert_says(&wrong("nbd+unix:///x", &[]), &["add ?socket=PATH"]);
    assert_says(&wrong("nbds://storage/x", &[]), &["TLS needs credentials", "tls-certificates=DIR"]);
    let shared = wrong_usage(serve(&place, "nbd://storage/x", &["--placement", "shared"]));
    assert_says(&shared, &["--placement queue"]);
}

#[test]
fn sandbox_connects_only_to_servers_of_the_configuration() {
    let (Some(export), Some(other)) = (NbdServer::file(16 * MIB, &[]), NbdServer::file(16 * MIB, &[])) else {
        return;
    };
    let place = Place::new();
    let server = Server::start(serve(&place, &export.uri(), &[]));
    let (image, socket) =
        (format!("image={}", other.uri()), format!("socket={}", place.socket("t").display()));
    let refused = refusal(ctl(&place, &["add", "name=other", &image, &socket]));
    assert_says(&refused, &["the sandbox does not allow NBD server", &other.socket().display().to_string()]);
    assert!(server.stop(Signal::TERM).success());
}
