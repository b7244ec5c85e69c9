//! Kills servers, front-ends, or both, with SIGKILL at random times. No acknowledged write is lost, no write is stale,
//! and no request fails or completes twice.
//!
//! - The guest is the driver library, which outlives the real `bareblk serve`; the next server resubmits requests from
//!   the in-flight log. Reads are checked while servers die and return. After each death, everything is read.
//! - A seed determines the schedule; the test prints it, and `BAREBLK_KILL_SEED` repeats it. `BAREBLK_LONG=1` sets many
//!   more kills.
//!
//! Tests with real guests are in `guest_restart.rs`; `virtqueue` tests deaths between any two stores.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

pub mod load;
mod mapped;
pub mod model;
mod remote;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::Duration;

use blk_driver::UserMemory;
use fastrand::Rng;
use load::{Load, Overlap, Rings, Seen};
use rustix::process::Signal;
use xtask::sizes;

use crate::rig;
use crate::rig::{Contents, Place, Server};

const MIB: u64 = 1 << 20;
/// The longest life of a server under load: long enough for some hundred requests.
const LONGEST_LIFE: Duration = Duration::from_millis(100);
/// A life so short that the server dies while a front-end connects, or while it resubmits requests.
const SHORTEST_LIVES: Duration = Duration::from_millis(4);

/// Prints the seed, so that a schedule can be repeated.
pub fn random() -> Rng {
    let seed =
        std::env::var("BAREBLK_KILL_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    println!("BAREBLK_KILL_SEED={seed}");
    Rng::with_seed(seed)
}

fn sleep_up_to(longest: Duration, random: &mut Rng) {
    thread::sleep(Duration::from_micros(random.u64(..longest.as_micros() as u64)));
}

/// A disk and its current server.
struct Disk {
    place: Place,
    image: PathBuf,
    args: Vec<String>,
    server: Option<Server>,
    /// Number of requests that servers resubmitted from the log.
    redone: u64,
    /// Number of servers that broke a killed server's lock of an image in a cluster.
    broken_locks: usize,
    /// Reads an image that is on another machine.
    contents: Option<Contents>,
}

impl Disk {
    fn new(args: &[&str]) -> Self {
        Self::at(Place::new(), args)
    }

    fn at(place: Place, args: &[&str]) -> Self {
        let image = place.image("disk.raw", 4 * MIB);
        Self::with(place, image, args, None)
    }

    fn with(place: Place, image: PathBuf, args: &[&str], contents: Option<Contents>) -> Self {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let mut disk = Self { place, image, args, server: None, redone: 0, broken_locks: 0, contents };
        disk.start();
        disk
    }

    fn start(&mut self) {
        let mut command = self.place.serve(&self.image, "s");
        command.args(["--name", "root", "--queues", "2"]).args(&self.args);
        self.server = Some(Server::start(command));
    }

    fn kill(&mut self) {
        let server = self.server.take().unwrap();
        let log = server.log_file();
        server.kill();
        let log = std::io::read_to_string(log).unwrap();
        assert!(!log.contains("panicked"), "{log}");
        self.redone += redone(&log);
        self.broken_locks += log.matches("broke the lock").count();
    }

    /// Stops the server with SIGTERM.
    fn stop(&mut self) {
        let server = self.server.take().unwrap();
        let log = server.log_file();
        let ended = server.stop(Signal::TERM);
        let log = std::io::read_to_string(log).unwrap();
        assert_eq!(ended.code(), Some(0), "{log}");
        self.redone += redone(&log);
    }

    fn socket(&self) -> PathBuf {
        self.place.socket("s")
    }

    fn bytes(&self, sectors: u64) -> Vec<u8> {
        let file = || std::fs::read(&self.image).unwrap();
        let mut bytes = self.contents.as_ref().map_or_else(file, |read| read());
        bytes.truncate(sectors as usize * model::SECTOR_BYTES);
        bytes
    }
}

/// The number of requests that the server resubmitted.
fn redone(log: &str) -> u64 {
    let counts = log.lines().filter_map(|line| line.split_once("redone=")).map(|(_, count)| count);
    let numbers = counts.map(|count| count.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default());
    numbers.map(|digits| digits.parse::<u64>().unwrap()).sum()
}

/// Commands to the load's thread, which answers when it has completed one.
enum Ask {
    /// Complete some more requests.
    Work(Sender<()>),
    /// Complete all requests and read everything.
    Verify(Sender<()>),
}

struct Asking(Sender<Ask>);

impl Asking {
    fn ask(&self, ask: fn(Sender<()>) -> Ask) {
        let (answer, answered) = channel();
        // Without an answer, the thread has failed; the join reports why.
        let _ = self.0.send(ask(answer)).map(|()| answered.recv());
    }

    /// Lets a server live: one server in four very briefly, the others for some time.
    fn live(&self, random: &mut Rng) {
        if random.u8(..4) == 0 {
            return sleep_up_to(SHORTEST_LIVES, random);
        }
        self.ask(Ask::Work);
        sleep_up_to(LONGEST_LIFE, random);
    }

    fn verify(&self) {
        self.ask(Ask::Verify);
    }
}

/// Runs `load` while `disturb` kills servers, then reads everything through a server and from the image.
fn survives(mut load: Load, disk: &mut Disk, disturb: impl FnOnce(&mut Disk, &Asking)) -> Seen {
    let mut load = thread::scope(|scope| {
        let (ask, asked) = channel();
        let thread = scope.spawn(move || {
            run(&mut load, &asked);
            load
        });
        let asking = Asking(ask);
        disturb(disk, &asking);
        asking.verify();
        drop(asking);
        thread.join().unwrap()
    });
    let (seen, model) = (load.seen, &load.model);
    println!(
        "  {} requests, {} writes, {} sectors read and checked, {} reconnects",
        seen.ended,
        model.writes(),
        model.sectors_checked,
        seen.reconnects
    );
    assert_eq!(seen.sent_again, 0, "the log was not used");
    let sectors = model.sectors();
    disk.stop();
    load.model.check_all(0, &disk.bytes(sectors)).unwrap();
    seen
}

fn run(load: &mut Load, asked: &Receiver<Ask>) {
    loop {
        match asked.try_recv() {
            Ok(Ask::Work(answer)) => {
                load.work();
                let _ = answer.send(());
            }
            Ok(Ask::Verify(answer)) => {
                load.verify();
                let _ = answer.send(());
            }
            Err(TryRecvError::Empty) => load.step(),
            Err(TryRecvError::Disconnected) => return,
        }
    }
}

/// Whether the engine copies data between guest memory and the image.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Copies {
    Yes,
    No,
}

/// Kills the server `count` times under one load.
fn kills(disk: &mut Disk, rings: Rings, overlap: Overlap, copies: Copies, random: &mut Rng) {
    let count = sizes::SERVER_KILLS.now().div_ceil(4);
    println!("{rings:?}, overlapping writes: {overlap:?}, {count} kills");
    let mut load = Load::connect(disk.socket(), rings, overlap, random.u64(..));
    load.model.may_tear = copies == Copies::Yes;
    let seen = survives(load, disk, |disk, load| {
        for _ in 0..count {
            load.live(random);
            disk.kill();
            disk.start();
            // Waits only sometimes: in the other cases the next server must die while it resubmits its predecessor's
            // requests.
            if random.bool() {
                load.verify();
            }
        }
    });
    assert!(u64::from(seen.reconnects) <= count);
}

/// Runs both formats, with and without overlapping writes, each with a quarter of the kills. Returns the count of
/// resubmissions.
fn survives_kills(copies: Copies, disk: impl Fn() -> Disk) -> u64 {
    let mut random = random();
    let mut redone = 0;
    for (rings, overlap) in [
        (Rings::Split, Overlap::No),
        (Rings::Packed, Overlap::No),
        (Rings::Split, Overlap::Yes),
        (Rings::Packed, Overlap::Yes),
    ] {
        let mut disk = disk();
        kills(&mut disk, rings, overlap, copies, &mut random);
        redone += disk.redone;
    }
    println!("{redone} requests were done again by successors");
    redone
}

#[test]
fn nothing_is_lost_with_servers_that_are_killed_over_io_uring() {
    assert!(survives_kills(Copies::No, || Disk::new(&["--engine", "io_uring"])) > 0, "nothing was in flight");
}

#[test]
fn nothing_is_lost_with_servers_that_are_killed_over_linux_aio() {
    assert!(
        survives_kills(Copies::No, || Disk::new(&["--engine", "linux-aio"])) > 0,
        "nothing was in flight"
    );
}

#[test]
fn nothing_is_lost_with_servers_that_are_killed_over_threads() {
    let threads = || Disk::new(&["--engine", "threads", "--cache", "writeback"]);
    assert!(survives_kills(Copies::Yes, threads) > 0, "nothing was in flight");
}

/// The engine copies at once, so few servers die with requests in flight.
#[test]
fn nothing_is_lost_with_servers_that_are_killed_over_a_mapping() {
    survives_kills(Copies::Yes, || Disk::at(Place::in_memory(), &["--engine", "mmap"]));
}

// ---- kills during other changes

/// A client of the control socket that moves both queues between two workers until the server has died.
fn move_queues(socket: PathBuf) {
    use std::io::{BufRead, BufReader, Write};
    let Ok(stream) = std::os::unix::net::UnixStream::connect(socket) else { return };
    let (mut stream, mut line) = (BufReader::new(stream), String::new());
    for number in 0_u64.. {
        line.clear();
        if stream.read_line(&mut line).is_err() || !line.ends_with('\n') {
            return;
        }
        assert!(number == 0 || line.contains("\"ok\""), "{line}");
        let (queue, worker) = (number % 2, number / 2 % 2);
        let request =
            format!(r#"{{"id":{number},"do":"attach","disk":"root","queue":{queue},"worker":{worker}}}"#);
        if writeln!(stream.get_mut(), "{request}").is_err() {
            return;
        }
    }
}

fn survives_kills_during_moves(rings: Rings, random: &mut Rng) {
    let place = Place::new();
    let control = place.socket("c").display().to_string();
    let mut disk = Disk::at(place, &["--workers", "2", "--control", &control]);
    let load = Load::connect(disk.socket(), rings, Overlap::No, random.u64(..));
    survives(load, &mut disk, |disk, load| {
        for _ in 0..sizes::OTHER_KILLS.now() {
            thread::scope(|scope| {
                let control = disk.place.socket("c");
                scope.spawn(move || move_queues(control));
                load.live(random);
                disk.kill();
            });
            disk.start();
            load.verify();
        }
    });
}

#[test]
fn nothing_is_lost_with_servers_that_are_killed_while_queues_move() {
    let mut random = random();
    survives_kills_during_moves(Rings::Split, &mut random);
    survives_kills_during_moves(Rings::Packed, &mut random);
}

/// An address outside every other region.
const HOT_PLUGGED: u64 = 0x5555_0000_0000;

fn memory() -> UserMemory {
    let fd = rustix::fs::memfd_create("plugged", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, MIB).unwrap();
    UserMemory { fd, offset_bytes: 0, len_bytes: MIB, addr: HOT_PLUGGED }
}

/// Sets the flag when dropped, so that the other threads end even if the test fails.
pub struct SetWhenDropped<'a>(pub &'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn nothing_is_lost_with_servers_that_are_killed_while_memory_comes_and_goes() {
    let mut random = random();
    let mut disk = Disk::new(&[]);
    let load = Load::connect(disk.socket(), Rings::Split, Overlap::No, random.u64(..));
    let (device, is_over) = (Arc::clone(&load.device), AtomicBool::new(false));
    let over = SetWhenDropped(&is_over);
    let plug = || {
        let mut plugged = 0;
        while !is_over.load(Ordering::Relaxed) {
            // The back-end may die before it answers; the driver then tries again.
            plugged += u64::from(device.register(memory()).is_ok() && device.unregister(HOT_PLUGGED).is_ok());
        }
        plugged
    };
    let plugged = thread::scope(move |scope| {
        let plug = scope.spawn(plug);
        survives(load, &mut disk, |disk, load| {
            for _ in 0..2 * sizes::OTHER_KILLS.now() {
                load.live(&mut random);
                disk.kill();
                disk.start();
                load.verify();
            }
        });
        drop(over);
        plug.join().unwrap()
    });
    println!("  memory was added and taken away {plugged} times");
    assert!(plugged > 0);
}

// ---- front-ends

/// A front-end that writes at random, in its own process. The front-end's in-flight log dies with it.
fn front_end(disk: &Disk) -> Child {
    let mut command: Command = rig::bench();
    command.args(["--rw=randwrite", "--iodepth=32", "--runtime=600", "--inflight=on", "--socket"]);
    command.arg(disk.socket()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn wait_writing(disk: &Disk) {
    let pid = disk.server.as_ref().unwrap().pid();
    let written = || {
        let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
        let line = io.lines().find_map(|line| line.strip_prefix("write_bytes: ")).unwrap();
        line.parse::<u64>().unwrap()
    };
    let before = written();
    rig::eventually("the front-end writes", || (written() > before).then_some(()));
}

/// Zeroes the whole disk through a new front-end: no write of the dead front-end arrives later.
fn starts_clean(disk: &mut Disk, rings: Rings, random: &mut Rng) {
    let mut load = Load::connect(disk.socket(), rings, Overlap::No, random.u64(..));
    load.erase();
    (0..50).for_each(|_| load.step());
    load.verify();
}

#[test]
fn front_ends_that_are_killed_leave_a_server_that_gives_the_next_one_a_clean_start() {
    let mut random = random();
    let mut disk = Disk::new(&[]);
    for kill in 0..2 * sizes::OTHER_KILLS.now() {
        let mut front_end = front_end(&disk);
        wait_writing(&disk);
        sleep_up_to(LONGEST_LIFE, &mut random);
        front_end.kill().unwrap();
        front_end.wait().unwrap();
        starts_clean(&mut disk, if kill % 2 == 0 { Rings::Split } else { Rings::Packed }, &mut random);
    }
    assert!(disk.server.as_mut().unwrap().is_running());
    disk.stop();
    assert_eq!(disk.redone, 0, "the next front-end was not served what the dead one had in flight");
}

#[test]
fn front_end_and_server_that_are_killed_together_leave_a_disk_that_can_be_used() {
    let mut random = random();
    let mut disk = Disk::new(&[]);
    for _ in 0..sizes::OTHER_KILLS.now() {
        let mut front_end = front_end(&disk);
        wait_writing(&disk);
        sleep_up_to(LONGEST_LIFE, &mut random);
        front_end.kill().unwrap();
        disk.kill();
        front_end.wait().unwrap();
        disk.start();
        starts_clean(&mut disk, Rings::Split, &mut random);
    }
    disk.stop();
}
