//! Servers that take over from each other under load: no request is lost, fails or completes twice, and no front-end
//! reconnects. If a live upgrade fails, the old server continues.
//!
//! - The servers are the real `bareblk serve` in its sandbox; the front-end is the driver library with the model of
//!   `killed`.
//! - `BAREBLK_LONG=1` sets many more upgrades. The test prints the pauses; `BAREBLK_PAUSES=FILE` also stores them as
//!   JSON.
//!
//! Tests with real guests are in `guest_restart.rs`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod broken;
mod cut;
mod mapped;
pub mod merge;
mod overlay;
mod remote;

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use xtask::sizes;

use crate::killed::load::{Load, Overlap, Rings};
use crate::killed::model;
use crate::rig::{Contents, Place, Server, Starting, assert_says, bareblk, eventually, output};

const MIB: u64 = 1 << 20;

/// A disk with a control socket, and its current server.
struct Disk {
    place: Place,
    image: PathBuf,
    args: Vec<String>,
    server: Option<Server>,
    pauses_ms: Vec<f64>,
    /// Reads an image that is on another machine.
    contents: Option<Contents>,
}

impl Disk {
    fn new(args: &[&str]) -> Self {
        let place = Place::new();
        let image = place.image("disk.raw", 4 * MIB);
        Self::start(place, image, args, None)
    }

    /// A disk on another machine.
    fn remote(image: &str, args: &[&str], contents: Contents) -> Self {
        Self::start(Place::new(), image.into(), args, Some(contents))
    }

    fn start(place: Place, image: PathBuf, args: &[&str], contents: Option<Contents>) -> Self {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let mut disk = Self { place, image, args, server: None, pauses_ms: Vec::new(), contents };
        disk.server = Some(Server::start(disk.command()));
        disk
    }

    fn socket(&self) -> PathBuf {
        self.place.socket("s")
    }

    fn control(&self) -> PathBuf {
        self.place.socket("c")
    }

    fn command(&self) -> Command {
        let mut command = self.place.serve(&self.image, "s");
        command
            .args(["--name", "root", "--queues", "2"])
            .arg("--control")
            .arg(self.control())
            .args(&self.args);
        command
    }

    /// The command that starts the next server.
    fn taker(&self) -> Command {
        let mut command = self.command();
        command.arg("--take-over").arg(self.control());
        command
    }

    /// Starts a new server that takes over; checks that the old server exits with 0.
    fn hand_on(&mut self) {
        let (successor, lines) = Starting::new(self.taker()).wait_lines(2);
        let old = self.server.replace(successor).unwrap();
        let log = old.log_file();
        assert_eq!(old.wait_ended().code(), Some(0));
        let log = std::io::read_to_string(log).unwrap();
        assert_says(&log, &["another server has taken over all disks"]);
        assert!(!log.contains("panicked") && !log.contains("ERROR"), "{log}");
        let pause = lines[0].split("paused for ").nth(1).and_then(|rest| rest.split(' ').next());
        self.pauses_ms.extend(pause.map(|pause| pause.parse::<f64>().unwrap()));
    }

    /// Checks the disk's totals, to which all servers add: its counters and its histograms.
    fn has_answered(&self, requests: u64) {
        let totals = || {
            let mut command = bareblk();
            command.args(["ctl", "stats", "--json", "--control"]).arg(self.control());
            let answer: serde_json::Value = serde_json::from_str(&output(command)).unwrap();
            let disk = &answer["ok"]["disks"][0];
            let sum =
                |of: [&serde_json::Value; 4]| of.iter().map(|count| count.as_u64().unwrap()).sum::<u64>();
            let counted = ["reads", "writes", "flushes", "other"].map(|key| &disk["totals"][key]);
            let timed = ["read", "write", "flush", "other"].map(|kind| &disk["latency"][kind]["count"]);
            [sum(counted), sum(timed)]
        };
        // The counters change shortly after the guest sees a completion.
        let is = || (totals() == [requests; 2]).then_some(());
        eventually(&format!("{requests} requests, not {:?}", totals()), is);
    }

    /// Stops the last server with SIGTERM.
    fn stop(&mut self) {
        let server = self.server.take().unwrap();
        let log = server.log_file();
        assert_eq!(server.stop(Signal::TERM).code(), Some(0));
        let log = std::io::read_to_string(log).unwrap();
        assert!(log.contains("everything is on stable storage"), "{log}");
        assert!(!self.socket().exists() && !self.control().exists(), "its sockets are still there");
    }

    fn bytes(&self, sectors: u64) -> Vec<u8> {
        let file = || std::fs::read(&self.image).unwrap();
        let mut bytes = self.contents.as_ref().map_or_else(file, |read| read());
        bytes.truncate(sectors as usize * model::SECTOR_BYTES);
        bytes
    }
}

/// Sets the flag when dropped, so that the other threads end even if the test fails.
struct SetWhenDropped<'a>(&'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `load` while `disturb` runs, then reads everything through the last server and from the image.
fn notices_nothing(mut load: Load, disk: &mut Disk, disturb: impl FnOnce(&mut Disk)) {
    let over = AtomicBool::new(false);
    let mut load = thread::scope(|scope| {
        let is_over = &over;
        let thread = scope.spawn(move || {
            load.work();
            while !is_over.load(Ordering::Relaxed) {
                load.step();
            }
            load.work();
            load.verify();
            load
        });
        let end = SetWhenDropped(&over);
        disturb(disk);
        drop(end);
        thread.join().unwrap()
    });
    let (seen, sectors) = (load.seen, load.model.sectors());
    println!("  {} requests, {} sectors read and checked", seen.ended, load.model.sectors_checked);
    assert_eq!(seen.reconnects, 0, "the front-end noticed");
    disk.has_answered(seen.ended + seen.durable_writes);
    disk.stop();
    load.model.check_all(0, &disk.bytes(sectors)).unwrap();
}

fn hands_on(rings: Rings, log: bool, args: &[&str]) -> Vec<f64> {
    hand_on_under_load(Disk::new(args), rings, log)
}

fn hand_on_under_load(mut disk: Disk, rings: Rings, log: bool) -> Vec<f64> {
    let args = disk.args.clone();
    let mut load = Load::connect_with(disk.socket(), rings, Overlap::No, log, fastrand::u64(..));
    // An NBD server copies between its page cache and its buffers.
    load.model.may_tear = disk.image.starts_with("nbd+unix:");
    let count = sizes::TAKE_OVERS.now();
    println!("{rings:?}, in-flight log: {log}, {args:?}: {count} take-overs");
    notices_nothing(load, &mut disk, |disk| {
        for _ in 0..count {
            thread::sleep(Duration::from_millis(fastrand::u64(..50)));
            disk.hand_on();
        }
    });
    assert_eq!(disk.pauses_ms.len() as u64, count, "a live upgrade that did not say how long it paused");
    tell(&mut disk.pauses_ms, &format!("{rings:?}, log {log}, {args:?}"));
    disk.pauses_ms
}

/// Prints the pauses, and writes them to a file if the environment names one.
fn tell(pauses_ms: &mut [f64], what: &str) {
    pauses_ms.sort_by(f64::total_cmp);
    let at = |percent: usize| pauses_ms[(pauses_ms.len() * percent).div_ceil(100).max(1) - 1];
    let (p50, p99, max) = (at(50), at(99), at(100));
    let count = pauses_ms.len();
    println!("  pause in ms: p50 {p50:.2}, p99 {p99:.2}, max {max:.2} of {count}");
    if let Ok(file) = std::env::var("BAREBLK_PAUSES") {
        use std::io::Write;
        let mut file = std::fs::File::options().create(true).append(true).open(file).unwrap();
        let row = format!(
            "{{\"what\": {what:?}, \"count\": {count}, \"p50_ms\": {p50}, \"p99_ms\": {p99}, \"max_ms\": {max}, \"all_ms\": {pauses_ms:?}}}"
        );
        writeln!(file, "{row}").unwrap();
    }
}

#[test]
fn split_rings_with_a_log_go_from_server_to_server() {
    hands_on(Rings::Split, true, &[]);
}

#[test]
fn packed_rings_with_a_log_go_from_server_to_server() {
    hands_on(Rings::Packed, true, &[]);
}

#[test]
fn split_rings_without_a_log_go_from_server_to_server() {
    hands_on(Rings::Split, false, &[]);
}

#[test]
fn packed_rings_without_a_log_go_from_server_to_server() {
    hands_on(Rings::Packed, false, &[]);
}

/// The old server has opened the image several times; the new server's helper must open it again.
#[test]
fn queues_of_two_workers_go_from_server_to_server() {
    hands_on(Rings::Split, true, &["--workers", "2"]);
}

#[test]
fn servers_without_a_sandbox_hand_on_too() {
    hands_on(Rings::Packed, false, &["--sandbox", "off"]);
}

/// Servers with configuration files. The new server has an additional disk; later commands need the new server's
/// helper.
#[test]
fn new_server_may_have_further_disks_and_can_be_changed_as_the_old_one_could() {
    let place = Place::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| (name, place.image(name, 4 * MIB), place.socket(name)));
    let control = place.socket("control");
    let file = |disks: &[&(&str, PathBuf, PathBuf)]| {
        let tables = disks.iter().map(|(name, image, socket)| {
            format!("[[disk]]\nname = '{name}'\nimage = {image:?}\nsocket = {socket:?}\n")
        });
        let path = place.path("bareblk.toml");
        std::fs::write(&path, format!("control = {control:?}\n{}", tables.collect::<String>())).unwrap();
        path
    };
    let serve = |file: PathBuf| {
        let mut command = bareblk();
        command.arg("serve").arg("--config").arg(file);
        command
    };
    let (old, _) = Starting::new(serve(file(&[&a]))).wait_lines(2);
    let mut load = Load::connect(a.2.clone(), Rings::Split, Overlap::No, 9);
    load.work();
    let mut taker = serve(file(&[&a, &b]));
    taker.arg("--take-over").arg(&control);
    let (new, lines) = Starting::new(taker).wait_lines(4);
    assert!(lines[0].starts_with("bareblk: took over disk a; its guest paused for"), "{lines:?}");
    assert_eq!(lines[3], "bareblk: serving 2 disks");
    assert_eq!(old.wait_ended().code(), Some(0));
    load.work();
    assert_eq!(Load::connect(b.2.clone(), Rings::Packed, Overlap::No, 10).seen.reconnects, 0);
    let ctl = |args: &[String]| {
        let mut command = bareblk();
        command.arg("ctl").arg("--control").arg(&control).args(args);
        output(command)
    };
    let added = [
        ("name", c.0.to_owned()),
        ("image", c.1.display().to_string()),
        ("socket", c.2.display().to_string()),
    ];
    let words = added.map(|(key, value)| format!("{key}={value}"));
    assert_eq!(ctl(&[&["add".to_owned()][..], &words].concat()), "c\n");
    ctl(&["remove", "b"].map(str::to_owned));
    assert!(c.2.exists() && !b.2.exists());
    load.verify();
    drop(load);
    assert_eq!(new.stop(Signal::TERM).code(), Some(0));
    assert!(!a.2.exists() && !control.exists());
}

#[test]
fn disk_without_a_front_end_is_handed_on_and_its_socket_goes_on() {
    let mut disk = Disk::new(&[]);
    disk.hand_on();
    assert!(disk.pauses_ms.is_empty());
    let mut load = Load::connect(disk.socket(), Rings::Split, Overlap::No, 1);
    load.work();
    load.verify();
    drop(load);
    disk.stop();
}
