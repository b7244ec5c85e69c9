//! `bareblk ctl flush`, `show`, `health`, `pause` and `snapshot`, on the real program.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blk_driver::{Device, Durability, Options};
use rustix::process::{Pid, Signal, kill_process};

use crate::rig::small_fs::{Kind, SmallFs};
use crate::rig::{
    DEADLINE, Place, Server, assert_says, bareblk, bench, ctl, eventually, ok, output, refusal,
};

const MIB: u64 = 1 << 20;

/// A server of one disk, `root`, on `image`.
fn served(place: &Place, image: &Path) -> Server {
    let mut command = place.serve(image, "s");
    command.args(["--name", "root", "--control"]).arg(place.socket("c"));
    Server::start(command)
}

/// A load of random writes, which ends when dropped.
struct Load(Child);

impl Load {
    fn start(place: &Place) -> Self {
        let mut command = bench();
        command.args(["--rw=randwrite", "--iodepth=8", "--runtime=300", "--socket"]).arg(place.socket("s"));
        let load = Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        load.wait_progress(place);
        load
    }

    /// Waits for more completed writes.
    fn wait_progress(&self, place: &Place) {
        let writes = || ok(place, &["stats"])["disks"][0]["queues"][0]["writes"].as_u64().unwrap_or(0);
        let before = writes();
        eventually("writes go on", || (writes() > before + 100).then_some(()));
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        kill_process(Pid::from_child(&self.0), Signal::KILL).unwrap();
        self.0.wait().unwrap();
    }
}

// ---- questions

#[test]
fn page_of_a_disk_has_its_settings_sessions_and_counters() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command
        .args(["--name", "root", "--queues", "3", "--cache", "writeback", "--control"])
        .arg(place.socket("c"));
    let _server = Server::start(command);
    let page = output(ctl(&place, &["show", "root"]));
    assert_says(&page, &["disk       root", "size       1M", "sessions   0", "queues     0 of 3"]);
    assert_says(&page, &["cache              writeback", "queue-size         1024"]);
    let shown = ok(&place, &["show", "root"]);
    assert_eq!((&shown["name"], &shown["settings"]["queues"]), (&"root".into(), &"3".into()));
    let _load = Load::start(&place);
    assert_says(&output(ctl(&place, &["show", "disk.raw"])), &["sessions   1", "DISK", "WRITES"]);
    assert_says(&refusal(ctl(&place, &["show", "none"])), &["there is no disk `none`"]);
}

#[test]
fn healthy_server_says_so_and_one_whose_worker_hangs_fails_the_check() {
    let place = Place::new();
    let server = served(&place, &place.image("disk.raw", MIB));
    assert_eq!(output(ctl(&place, &["health"])), "healthy (workers: 1, disks: 1)\n");
    assert_eq!(ok(&place, &["health"])["healthy"], true);
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap().flatten();
    let name =
        |task: &std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    let worker = tasks.into_iter().find(|task| name(task).starts_with("bareblk-work")).expect("a worker");
    let worker = worker.file_name().into_string().unwrap();
    // A debugger stops only the worker's thread.
    let Some(_stopped) = Stopped::attach(&worker) else { return };
    let run = ctl(&place, &["health", "--timeout", "1"]).output().unwrap();
    assert_eq!(run.status.code(), Some(1));
    assert_says(&String::from_utf8(run.stdout).unwrap(), &["worker 0 does not respond"]);
}

/// A thread that a tracer has stopped; it continues when dropped.
struct Stopped(Child);

impl Stopped {
    /// `None` if tracing is not possible; the test then prints the reason.
    fn attach(thread: &str) -> Option<Self> {
        const STOP: &str = "\
import ctypes, os, sys
libc = ctypes.CDLL(None)
thread = int(sys.argv[1])
if libc.ptrace(16, thread, None, None): sys.exit(1)  # PTRACE_ATTACH
os.waitpid(thread, 0x40000000)  # __WALL
print('stopped', flush=True)
sys.stdin.read()";
        let mut command = Command::new("python3");
        command.args(["-c", STOP, thread]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                xtask::skip::skip(xtask::skip::Reason::NoProgram("python3".into()), error);
                return None;
            }
        };
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
        if line.is_empty() {
            xtask::skip::skip(xtask::skip::Reason::NoPtrace, "the worker cannot be stopped");
            return None;
        }
        Some(Self(child))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

// ---- flushes and pauses

#[test]
fn flush_is_done_and_a_disk_that_there_is_not_is_named() {
    let place = Place::new();
    let server = served(&place, &place.image("disk.raw", MIB));
    assert_eq!(output(ctl(&place, &["flush", "root"])), "");
    server.wait_logged(r#""do":"flush""#);
    assert_says(&refusal(ctl(&place, &["flush", "none"])), &["there is no disk `none`"]);
}

#[test]
fn command_runs_while_nothing_is_written_and_its_exit_code_is_passed_on() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let _server = served(&place, &image);
    let load = Load::start(&place);
    let twice = format!("a=$(cksum {0}); sleep 0.3; [ \"$a\" = \"$(cksum {0})\" ]", image.display());
    // The image changes constantly, except during a pause.
    assert!(!Command::new("sh").args(["-c", &twice]).status().unwrap().success());
    output(ctl(&place, &["pause", "root", "--", "sh", "-c", &twice]));
    load.wait_progress(&place);
    let run = ctl(&place, &["pause", "root", "--", "sh", "-c", "exit 7"]).output().unwrap();
    assert_eq!(run.status.code(), Some(7));
    assert_says(&refusal(ctl(&place, &["pause", "root", "--", "/no/program"])), &["cannot run /no/program"]);
    load.wait_progress(&place);
    let paused = ok(&place, &["pause", "root", "--", "true"]);
    assert!(paused["paused_ns"].as_u64().unwrap() > 0, "{paused}");
}

#[test]
fn pause_without_a_command_ends_with_its_client() {
    let place = Place::new();
    let server = served(&place, &place.image("disk.raw", MIB));
    let load = Load::start(&place);
    let mut client =
        ctl(&place, &["pause", "root"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    let out = client.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut said).unwrap();
    assert_says(&said, &["disk root is paused", "press Enter"]);
    // A second pause must wait for the first.
    assert_says(
        &refusal(ctl(&place, &["pause", "root", "--timeout", "0", "--", "true"])),
        &["another client"],
    );
    client.kill().unwrap();
    client.wait().unwrap();
    load.wait_progress(&place);
    drop(load);
    // A stop does not wait for a pause.
    let mut client =
        ctl(&place, &["pause", "root"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let out = client.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut said).unwrap();
    assert!(server.stop(Signal::TERM).success());
    drop(client.stdin.take());
    client.wait().unwrap();
}

// ---- snapshots

#[test]
fn file_system_without_reflinks_is_named_and_nothing_remains() {
    let Some(fs) = SmallFs::mount(Kind::Tmpfs, 8) else { return };
    let (place, path) = (Place::new(), |name: &str| fs.path().join(name));
    let image = path("disk.raw");
    std::fs::File::create(&image).unwrap().set_len(MIB).unwrap();
    let mut command = place.serve(&image, "s");
    command.args(["--cache", "writeback", "--name", "root", "--control"]).arg(place.socket("c"));
    let _server = Server::start(command);
    let snapshot = |name: &str| format!("root={}", path(name).display());
    let line = refusal(ctl(&place, &["snapshot", &snapshot("snap")]));
    assert_says(&line, &["cannot take a snapshot of disk `root`", "cannot clone files", "XFS", "btrfs"]);
    assert!(!path("snap").exists());
    assert_says(&refusal(ctl(&place, &["snapshot", &snapshot("disk.raw")])), &["exists already and stays"]);
    assert_says(&refusal(ctl(&place, &["snapshot", "root=/etc/snap"])), &["/etc/snap", "--allow-folders"]);
    assert_says(&refusal(ctl(&place, &["snapshot", "none=/x"])), &["there is no disk `none`"]);
    let twice = [snapshot("a"), snapshot("b")];
    assert_says(&refusal(ctl(&place, &["snapshot", &twice[0], &twice[1]])), &["disk root appears twice"]);
    assert!(!path("a").exists() && !path("b").exists());
}

/// Two disks of one server on a file system with reflinks.
struct Pair {
    place: Place,
    fs: SmallFs,
    _server: Server,
}

impl Pair {
    fn start() -> Option<Self> {
        let (place, fs) = (Place::new(), SmallFs::mount(Kind::Xfs, 320)?);
        let table = |name: &str| {
            let image = fs.path().join(name);
            std::fs::File::create(&image).unwrap().set_len(MIB).unwrap();
            format!("[[disk]]\nname = '{name}'\nimage = {image:?}\nsocket = {:?}\n", place.socket(name))
        };
        let file = place.path("bareblk.toml");
        let top = format!("control = {:?}\n", place.socket("c"));
        std::fs::write(&file, top + &table("first") + &table("second")).unwrap();
        let mut command = bareblk();
        command.args(["serve", "--config"]).arg(&file);
        let server = Server::start(command);
        Some(Self { place, fs, _server: server })
    }

    fn snapshot(&self, name: &str) -> PathBuf {
        self.fs.path().join(name)
    }

    fn word(&self, disk: &str, name: &str) -> String {
        format!("{disk}={}", self.snapshot(name).display())
    }
}

fn number(file: &Path) -> u64 {
    let bytes = std::fs::read(file).unwrap();
    assert_eq!(bytes.len(), usize::try_from(MIB).unwrap());
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

#[test]
fn snapshots_of_two_disks_are_of_one_instant() {
    let Some(pair) = Pair::start() else { return };
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Writes increasing numbers, always to the first disk before the second.
        scope.spawn(|| {
            let disk = |name| Device::connect(&Options::new(pair.place.socket(name))).unwrap();
            let ((_a, mut first), (_b, mut second)) = (disk("first"), disk("second"));
            let mut block = [0; 4096];
            for count in 1_u64.. {
                if end.load(Ordering::Relaxed) {
                    break;
                }
                block[..8].copy_from_slice(&count.to_le_bytes());
                for queue in [&mut first[0], &mut second[0]] {
                    queue.write_blocking(0, &block, Durability::Cached, DEADLINE).unwrap();
                }
            }
        });
        let mut before = 0;
        for round in 0..10 {
            std::thread::sleep(Duration::from_millis(20));
            let files = [format!("a{round}"), format!("b{round}")];
            let words = [pair.word("second", &files[1]), pair.word("first", &files[0])];
            let said = output(ctl(&pair.place, &["snapshot", &words[0], &words[1]]));
            assert_says(&said, &["second: ", "paused for"]);
            let counts = files.map(|file| number(&pair.snapshot(&file)));
            assert!(counts[0] == counts[1] || counts[0] == counts[1] + 1, "{counts:?}");
            assert!(counts[0] >= before, "{counts:?} after {before}");
            before = counts[0];
        }
        end.store(true, Ordering::Relaxed);
        assert!(before > 0);
    });
}

#[test]
fn snapshot_that_fails_for_one_disk_leaves_none() {
    let Some(pair) = Pair::start() else { return };
    let other = pair.place.path("elsewhere");
    let words = [pair.word("first", "snap"), format!("second={}", other.display())];
    // No image is in the folder of the second snapshot.
    assert_says(&refusal(ctl(&pair.place, &["snapshot", &words[0], &words[1]])), &["--allow-folders"]);
    assert!(!pair.snapshot("snap").exists() && !other.exists());
    std::fs::write(pair.snapshot("taken"), "x").unwrap();
    let words = [pair.word("first", "snap"), pair.word("second", "taken")];
    assert_says(&refusal(ctl(&pair.place, &["snapshot", &words[0], &words[1]])), &["taken exists already"]);
    assert!(!pair.snapshot("snap").exists());
    assert_eq!(std::fs::read(pair.snapshot("taken")).unwrap(), b"x");
}
