//! Shared by the tests: folders for disks and sockets, servers to start, error lines to read.
#![allow(dead_code)] // each test binary uses only a part

#[path = "../../../../io_engine/tests/contract/beds/ceph.rs"]
pub mod ceph;
#[path = "../../../../blk_server/tests/it/rig/fuse_disk.rs"]
pub mod fuse_disk;
pub mod hanging;
#[path = "../../../../io_engine/tests/contract/beds/nbd_server.rs"]
pub mod nbd_server;
#[path = "../../../../blk_server/tests/it/rig/small_fs.rs"]
pub mod small_fs;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Time limit of a wait, far longer than any step takes on an idle machine. Only a failing test waits this long.
pub const DEADLINE: Duration = Duration::from_secs(300);

/// Reads a disk's whole image, on another machine.
pub type Contents = Box<dyn Fn() -> Vec<u8>>;

/// Folders for disks (on a real file system) and sockets (with a short path).
pub struct Place {
    disks: TempDir,
    sockets: TempDir,
}

impl Place {
    pub fn new() -> Self {
        let disks = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self { disks, sockets: tempfile::tempdir().unwrap() }
    }

    /// Puts the disks on tmpfs.
    pub fn in_memory() -> Self {
        Self { disks: tempfile::tempdir_in("/dev/shm").unwrap(), sockets: tempfile::tempdir().unwrap() }
    }

    /// A path in the disks' folder. Makes no file.
    pub fn path(&self, name: &str) -> PathBuf {
        self.disks.path().join(name)
    }

    /// Makes a sparse file, and returns its path.
    pub fn image(&self, name: &str, size_bytes: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(size_bytes).unwrap();
        path
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }

    /// The disks' folder.
    pub fn folder(&self) -> &Path {
        self.disks.path()
    }

    /// `bareblk serve IMAGE --socket SOCKET`; the caller may add options.
    pub fn serve(&self, image: &Path, socket: &str) -> Command {
        let mut command = bareblk();
        command.arg("serve").arg(image).arg("--socket").arg(self.socket(socket));
        command
    }
}

/// `bareblk` without the tester's environment variables.
pub fn bareblk() -> Command {
    let mut command = Command::new(program());
    command.env_remove("RUST_LOG").env_remove("NO_COLOR").stdin(Stdio::null());
    command
}

/// `bareblk bench`; the caller may add options.
pub fn bench() -> Command {
    bench_program();
    let mut command = bareblk();
    command.arg("bench");
    command
}

/// `bareblk top`; the caller may add options.
pub fn top() -> Command {
    monitor_program();
    let mut command = bareblk();
    command.arg("top").env_remove("BAREBLK_CONTROL");
    command
}

/// `bareblk ctl` with these words, for the server with the control socket `c`.
pub fn ctl(place: &Place, words: &[&str]) -> Command {
    let mut command = bareblk();
    command.arg("ctl").arg("--control").arg(place.socket("c")).args(words);
    command
}

/// Runs `bareblk ctl`, and returns the value of `ok` in the answer.
pub fn ok(place: &Place, words: &[&str]) -> Value {
    let answer: Value = serde_json::from_str(&output(ctl(place, &[&["--json"], words].concat()))).unwrap();
    answer["ok"].clone()
}

/// Adds the disk `near`, a file of 16 MiB, with the socket `near`. Needs a server with `--allow-folders` of the disks' folder.
pub fn add_near(place: &Place) {
    let words = [
        format!("image={}", place.image("near.raw", 16 << 20).display()),
        format!("socket={}", place.socket("near").display()),
    ];
    output(ctl(place, &["add", "name=near", &words[0], &words[1]]));
}

fn program() -> PathBuf {
    beside_own("bareblk", "bareblk")
}

/// The program of `bareblk bench`, which `bareblk` finds beside itself.
pub fn bench_program() -> PathBuf {
    beside_own("bareblk_bench", "bareblk-bench")
}

/// The program of `bareblk top`, which `bareblk` finds beside itself.
pub fn monitor_program() -> PathBuf {
    beside_own("bareblk_monitor", "bareblk-monitor")
}

/// The program `name` of the crate `package`. For a test, cargo builds only the programs of the test's own crate.
fn beside_own(package: &str, name: &str) -> PathBuf {
    let own = option_env!("CARGO_BIN_EXE_bareblk").or(option_env!("CARGO_BIN_EXE_bareblk-bench"));
    let own = own.or(option_env!("CARGO_BIN_EXE_bareblk-monitor")).map(PathBuf::from).expect("a program");
    if own.ends_with(name) { own } else { xtask::programs::beside(&own, package, name) }
}

/// Runs the command and returns its one error line.
pub fn refusal(command: Command) -> String {
    one_line(command, 1)
}

/// Runs a command with invalid arguments and returns its error.
pub fn wrong_usage(command: Command) -> String {
    one_line(command, 2)
}

fn one_line(command: Command, exit_code: i32) -> String {
    let output = assert_cmd::Command::from_std(command).timeout(DEADLINE).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(exit_code), "{text}");
    let line = text.strip_suffix('\n').expect("a whole line");
    assert!(line.starts_with("bareblk: ") && !line.contains('\n'), "not one line: {text}");
    line.to_owned()
}

/// Runs the command, checks that it succeeds, and returns its standard output.
pub fn output(command: Command) -> String {
    let run = assert_cmd::Command::from_std(command).timeout(DEADLINE).assert().success();
    String::from_utf8(run.get_output().stdout.clone()).unwrap()
}

pub fn assert_says(text: &str, parts: &[&str]) {
    let missing: Vec<_> = parts.iter().filter(|part| !text.contains(**part)).collect();
    assert!(missing.is_empty(), "`{text}` does not say {missing:?}");
}

pub fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A running server; killed when dropped.
pub struct Server {
    child: Child,
    log: tempfile::NamedTempFile,
    pub ready_line: String,
}

impl Server {
    /// Starts the server and waits for its "serving" line.
    pub fn start(command: Command) -> Self {
        Starting::new(command).wait_ready()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Kills the server with SIGKILL. The socket file remains.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends the signal and waits for the exit.
    pub fn stop(mut self, signal: Signal) -> ExitStatus {
        self.signal(signal);
        eventually("it ends", || self.child.try_wait().unwrap())
    }

    /// Waits for the exit without sending a signal.
    pub fn wait_ended(mut self) -> ExitStatus {
        eventually("it ends", || self.child.try_wait().unwrap())
    }

    /// The server's standard error so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log.path()).unwrap()
    }

    /// The server's standard error, readable even after the exit.
    pub fn log_file(&self) -> File {
        self.log.reopen().unwrap()
    }

    pub fn wait_logged(&self, part: &str) {
        eventually(part, || self.log().contains(part).then_some(()));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server that may not be serving yet.
pub struct Starting {
    server: Server,
    lines: mpsc::Receiver<String>,
}

impl Starting {
    pub fn new(mut command: Command) -> Self {
        let log = tempfile::NamedTempFile::new().unwrap();
        command.stdout(Stdio::piped()).stderr(log.reopen().unwrap());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { server: Server { child, log, ready_line: String::new() }, lines }
    }

    pub fn wait_logged(&self, part: &str) {
        self.server.wait_logged(part);
    }

    pub fn signal(&self, signal: Signal) {
        self.server.signal(signal);
    }

    /// Waits for the exit without sending a signal.
    pub fn wait_ended(self) -> ExitStatus {
        self.server.wait_ended()
    }

    /// Waits for `count` lines on standard output.
    pub fn wait_lines(self, count: usize) -> (Server, Vec<String>) {
        let line = || self.lines.recv_timeout(DEADLINE);
        let lines =
            (0..count).map(|_| line().unwrap_or_else(|_| panic!("does not serve: {}", self.server.log())));
        let lines = lines.collect();
        (self.server, lines)
    }

    pub fn wait_ready(mut self) -> Server {
        let line = self.lines.recv_timeout(DEADLINE);
        self.server.ready_line = line.unwrap_or_else(|_| panic!("does not serve: {}", self.server.log()));
        self.server
    }
}

/// Calls `ask` until it returns a value.
pub fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < end, "not within {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
