//! Many disks in one process: a configuration file is served; it is refused with its mistakes named; and the server
//! follows its changes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::rig;
use crate::rig::{
    Place, Server, Starting, assert_says, bareblk, bench, eventually, output, refusal, wrong_usage,
};

const MIB: u64 = 1 << 20;

/// Writes a configuration file beside the images, and returns its path.
fn write(place: &Place, text: &str) -> PathBuf {
    let path = place.path("bareblk.toml");
    std::fs::write(&path, text).unwrap();
    path
}

/// Makes an image of 1 MiB and returns its table; the socket has the disk's name.
fn disk(place: &Place, name: &str, more: &str) -> String {
    let image = place.path(name);
    if !image.exists() {
        place.image(name, MIB);
    }
    let (image, socket) = (image.display(), place.socket(name).display().to_string());
    format!("[[disk]]\nname = '{name}'\nimage = '{image}'\nsocket = '{socket}'\n{more}\n")
}

fn serve(path: &std::path::Path) -> Command {
    let mut command = bareblk();
    command.args(["serve", "--config"]).arg(path);
    command
}

fn start(place: &Place, text: &str) -> Server {
    Server::start(serve(&write(place, text)))
}

/// Writes and reads every block with verification.
fn works(place: &Place, socket: &str) {
    let mut command = bench();
    command.args(["--rw=write", "--bs=4k", "--size=1m", "--iodepth=8", "--verify=crc32c", "--socket"]);
    output({
        command.arg(place.socket(socket));
        command
    });
}

fn connects(place: &Place, socket: &str) -> bool {
    UnixStream::connect(place.socket(socket)).is_ok()
}

// ---- served disks

#[test]
fn disks_with_different_engines_and_caches_are_served_at_once() {
    let place = Place::new();
    let text = disk(&place, "a", "engine = 'threads'\ncache = 'writeback'\nio-threads = 3")
        + &disk(&place, "b", "engine = 'sync'\ncache = 'directsync'\nwce = 'fixed'")
        + &disk(&place, "c", "engine = 'posix-aio'\nfd-pool = 2\ncache = 'unsafe'");
    let (server, lines) = Starting::new(serve(&write(&place, &text))).wait_lines(4);
    let expected =
        |name| format!("bareblk: serving {} on {}", place.path(name).display(), place.socket(name).display());
    assert_eq!(lines, [expected("a"), expected("b"), expected("c"), "bareblk: serving 3 disks".to_owned()]);
    std::thread::scope(|scope| {
        for name in ["a", "b", "c"] {
            let place = &place;
            scope.spawn(move || works(place, name));
        }
    });
    let log = server.log();
    assert_says(&log, &["disk=\"a\"", "cache=writeback", "engine=threads", "io_threads=3"]);
    assert_says(&log, &["cache=directsync", "wce=fixed", "engine=sync", "engine=posix-aio", "fd_pool=2"]);
    assert!(server.stop(Signal::TERM).success());
    assert!(["a", "b", "c"].iter().all(|name| !place.socket(name).exists()));
}

#[test]
fn two_hundred_disks_start_and_stop() {
    let place = Place::new();
    let text: String = (0..200).map(|n| disk(&place, &format!("d{n}"), "queues = 1")).collect();
    let (server, lines) = Starting::new(serve(&write(&place, &text))).wait_lines(201);
    assert_eq!(lines[200], "bareblk: serving 200 disks");
    assert!((0..200).all(|n| connects(&place, &format!("d{n}"))));
    assert!(server.stop(Signal::TERM).success());
    assert!((0..200).all(|n| !place.socket(&format!("d{n}")).exists()));
}

#[test]
fn image_is_made_at_the_first_start_and_kept_at_the_next() {
    let place = Place::new();
    let text = disk(&place, "a", "create = '2M'");
    std::fs::remove_file(place.path("a")).unwrap();
    assert!(start(&place, &text).stop(Signal::TERM).success());
    std::fs::write(place.path("a"), vec![7; 4096]).unwrap();
    assert!(start(&place, &text).stop(Signal::TERM).success());
    assert_eq!(std::fs::read(place.path("a")).unwrap(), vec![7; 4096]);
}

#[test]
fn images_made_for_a_start_that_fails_are_removed_again() {
    let place = Place::new();
    let _other = Server::start(place.serve(&place.image("b", MIB), "other"));
    let text = disk(&place, "a", "create = '2M'") + &disk(&place, "b", "lock-timeout = 0");
    std::fs::remove_file(place.path("a")).unwrap();
    assert_says(&refusal(serve(&write(&place, &text))), &["locked by", "bareblk (pid"]);
    assert!(!place.path("a").exists() && !place.socket("a").exists());
}

#[test]
fn limit_of_open_files_that_is_too_low_for_all_disks_is_one_warning_with_the_number() {
    let place = Place::new();
    let path = write(&place, &(disk(&place, "a", "") + &disk(&place, "b", "queues = 256")));
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "ulimit -n 200 && exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_bareblk"),
        "serve",
        "--config",
    ]);
    let server = Server::start({
        command.arg(path).env_remove("RUST_LOG");
        command
    });
    let log = server.log();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("open files")).collect();
    // 4/3 × (2 × 10 + 3 × (64 + 256))
    assert_eq!(warnings.len(), 1, "{log}");
    assert_says(warnings[0], &["WARN", "may need 1307 open files", "only 200 are allowed", "LimitNOFILE"]);
}

// ---- refused files

#[test]
fn each_mistake_is_one_line_with_file_line_and_value_and_nothing_is_made() {
    let place = Place::new();
    let text = disk(&place, "a", "create = '2M'") + &disk(&place, "b", "qeues = 2\nqueue-size = 100");
    std::fs::remove_file(place.path("a")).unwrap();
    let path = write(&place, &text);
    let run = serve(&path).output().unwrap();
    let text = String::from_utf8(run.stderr).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!((run.status.code(), lines.len()), (Some(1), 2), "{text}");
    let begin = format!("bareblk: {}", path.display());
    assert!(
        lines[0].starts_with(&format!("{begin}:10: there is no key `qeues`: did you mean `queues`?")),
        "{text}"
    );
    assert!(lines[1].starts_with(&format!("{begin}:11: queue-size = 100 is invalid: ")), "{text}");
    assert!(!place.path("a").exists() && !place.socket("a").exists());
}

#[test]
fn file_that_cannot_be_read_is_named() {
    let place = Place::new();
    assert_says(&refusal(serve(&place.path("none.toml"))), &["none.toml", "cannot be read", "No such file"]);
    assert_says(&refusal(serve(&place.path(""))), &["cannot be read"]);
}

#[test]
fn settings_beside_the_file_are_wrong_usage() {
    let place = Place::new();
    let path = write(&place, &disk(&place, "a", ""));
    for beside in
        [["--queues", "2"], ["--engine", "sync"], ["--poll-us", "0"], ["--workers", "2"], ["--socket", "s"]]
    {
        let mut command = serve(&path);
        command.args(beside);
        assert_says(&wrong_usage(command), &["--config", beside[0]]);
    }
}

// ---- a file that changes

fn load(place: &Place, socket: &str) -> Child {
    let mut command = bench();
    command.args(["--rw=randrw", "--iodepth=8", "--runtime=300", "--socket"]).arg(place.socket(socket));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    eventually("it works", || {
        let mut threads = std::fs::read_dir(format!("/proc/{}/task", child.id())).ok()?.flatten();
        threads.find(|thread| {
            std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name == "bench-0\n")
        })
    });
    child
}

/// Waits for the end of the load. Its exit code is 1 if a request failed.
fn end_of(load: Child) {
    kill_process(Pid::from_child(&load), Signal::INT).unwrap();
    let ended = load.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{}", String::from_utf8_lossy(&ended.stderr));
}

#[test]
fn hangup_adds_a_disk_and_removes_one_while_a_third_is_under_load() {
    let place = Place::new();
    let (kept, goes, comes) = (disk(&place, "kept", ""), disk(&place, "goes", ""), disk(&place, "comes", ""));
    let server = start(&place, &(kept.clone() + &goes));
    let load = load(&place, "kept");
    write(&place, &(kept + &comes));
    server.signal(Signal::HUP);
    server.wait_logged("configuration reloaded: added comes; removed goes");
    assert!(connects(&place, "comes") && !place.socket("goes").exists());
    works(&place, "comes");
    end_of(load);
    // The server released the image of the removed disk.
    let _again = Server::start(place.serve(&place.path("goes"), "again"));
}

#[test]
fn hangup_refuses_what_would_disturb_a_guest_and_does_the_rest() {
    let place = Place::new();
    let server =
        start(&place, &(disk(&place, "busy", "") + &disk(&place, "gone", "") + &disk(&place, "idle", "")));
    let busy = load(&place, "busy");
    let gone = load(&place, "gone");
    let text = disk(&place, "busy", "queues = 2") + &disk(&place, "idle", "queues = 2\nserial = 'new'");
    write(&place, &text);
    server.signal(Signal::HUP);
    server.wait_logged("configuration reloaded in part");
    let log = server.log();
    assert_says(
        &log,
        &[
            "replaced idle",
            "busy: queues cannot change",
            "gone: the file no longer has this disk",
            "serial=\"new\"",
        ],
    );
    end_of(busy);
    end_of(gone);
    eventually("the front-ends have left, and it can be done", || {
        server.signal(Signal::HUP);
        std::thread::sleep(std::time::Duration::from_millis(200));
        server.log().contains("configuration reloaded: ").then_some(())
    });
    assert!(!place.socket("gone").exists() && connects(&place, "busy"));
}

#[test]
fn hangup_changes_the_rights_of_a_socket_in_place() {
    let place = Place::new();
    let server = start(&place, &disk(&place, "a", ""));
    let front_end = UnixStream::connect(place.socket("a")).unwrap();
    write(&place, &disk(&place, "a", "socket-mode = 660"));
    server.signal(Signal::HUP);
    server.wait_logged("configuration reloaded: changed a");
    assert_eq!(rig::mode(&place.socket("a")), 0o660);
    drop(front_end);
}

#[test]
fn hangup_with_a_broken_file_changes_nothing_and_is_one_line() {
    let place = Place::new();
    let good = disk(&place, "a", "");
    let server = start(&place, &good);
    let lines_before = server.log().lines().count();
    let path = write(&place, &(disk(&place, "b", "") + "queues = 0\n"));
    server.signal(Signal::HUP);
    server.wait_logged("configuration not reloaded, nothing has changed");
    let log = server.log();
    assert_eq!(log.lines().count(), lines_before + 1, "{log}");
    assert_says(&log, &[&format!("{}:6: queues = 0", path.display())]);
    assert!(connects(&place, "a") && !place.socket("b").exists());
    write(&place, &good);
    server.signal(Signal::HUP);
    server.wait_logged("configuration reloaded: nothing to change");
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn disk_that_cannot_be_as_it_is_wanted_is_served_as_before() {
    let place = Place::new();
    let server = start(&place, &disk(&place, "a", "cache = 'writeback'"));
    // The engine `mmap` refuses this image. The server detects that only when it tries.
    write(&place, &disk(&place, "a", "cache = 'writeback'\nengine = 'mmap'"));
    server.signal(Signal::HUP);
    server.wait_logged("the disk is served as before");
    works(&place, "a");
}
