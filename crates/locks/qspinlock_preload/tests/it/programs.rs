//! Unmodified programs of the distribution under the library: their output must be right, and the dynamic
//! linker must report that they call the library for the locks that each test is about.
//!
//! A program that is not installed is skipped, with its name; `cargo xtask test` installs all of them.
//!
//! See also: single calls (`locks.rs`, `conditions.rs`). Results by program: `docs/how-to/qspinlock-preload.md`.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use xtask::packages::find_program;
use xtask::skip::{Reason, skip};

use crate::preloaded;

/// Long, because a slow machine must not look like a program that hangs.
const LIMIT: Duration = Duration::from_secs(240);
const MIB: usize = 1 << 20;

/// A working folder, and the symbols that programs in it were bound to.
struct Stage {
    folder: TempDir,
}

impl Stage {
    /// `None`, with a message, if `program` is not installed.
    fn for_program(program: &str, package: &str) -> Option<Self> {
        if find_program(program).is_none() {
            skip(Reason::NoProgram(program.into()), format!("Debian: package {package}"));
            return None;
        }
        Some(Self { folder: tempfile::tempdir().unwrap() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns text that compresses well but not to almost nothing. It is the same each time.
    fn input(&self, length: usize) -> PathBuf {
        let mut state = 1_u64;
        let line = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            format!("{:010} a line of text that is much like the others\n", state >> 34)
        };
        let text: String = (0..length / 58).map(line).collect();
        fs::write(self.path("input"), text).unwrap();
        self.path("input")
    }

    /// Returns a command that runs `program` under the library in the folder; the dynamic linker logs the symbols it
    /// binds.
    fn preloaded(&self, program: &str) -> Command {
        let mut command = Command::new(find_program(program).unwrap());
        command.current_dir(self.folder.path()).env("LD_PRELOAD", preloaded::library());
        command
            .env("LD_DEBUG", "bindings")
            .env("LD_DEBUG_OUTPUT", self.path("bindings"))
            .stdin(Stdio::null());
        command
    }

    /// Returns the functions of the library that the dynamic linker bound other files to.
    fn calls(&self) -> BTreeSet<String> {
        let library = preloaded::library().display().to_string();
        let to_the_library = format!(" to {library} ");
        let by_itself = format!("binding file {library} ");
        let mut calls = BTreeSet::new();
        for file in fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().path()) {
            if !file.file_name().unwrap().to_string_lossy().starts_with("bindings.") {
                continue;
            }
            let text = String::from_utf8_lossy(&fs::read(file).unwrap()).into_owned();
            let bound =
                text.lines().filter(|line| line.contains(&to_the_library) && !line.contains(&by_itself));
            calls.extend(
                bound.filter_map(|line| Some(line.split_once('`')?.1.split_once('\'')?.0.to_owned())),
            );
        }
        calls
    }

    fn assert_calls(&self, expected: &[&str]) {
        let calls = self.calls();
        println!("calls: {}", calls.iter().map(String::as_str).collect::<Vec<_>>().join(" "));
        let missing: Vec<_> = expected.iter().filter(|call| !calls.contains(**call)).collect();
        assert!(missing.is_empty(), "not bound to the library: {missing:?} (bound: {calls:?})");
    }
}

/// Returns the command's output. Fails unless the command succeeds in time.
fn finished(command: &mut Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        let hangs = is_done.recv_timeout(LIMIT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
        if hangs {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    });
    let output = child.wait_with_output().unwrap();
    drop(done);
    watchdog.join().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let printed = String::from_utf8_lossy(&output.stdout[..output.stdout.len().min(4000)]);
    assert!(output.status.success(), "{command:?} ended with {}\n{said}\n{printed}", output.status);
    output
}

fn same(path: &Path, bytes: &[u8]) -> bool {
    fs::read(path).unwrap() == bytes
}

#[test]
fn xz_with_four_threads_gives_back_what_it_was_given() {
    let Some(stage) = Stage::for_program("xz", "xz-utils") else { return };
    let input = stage.input(4 * MIB);

    let small =
        finished(stage.preloaded("xz").args(["-T4", "--block-size=512KiB", "-1", "-k", "-c"]).arg(&input));
    fs::write(stage.path("small.xz"), &small.stdout).unwrap();
    let again = finished(stage.preloaded("xz").args(["-T4", "-d", "-c", "small.xz"]));

    assert!(small.stdout.len() < 2 * MIB && same(&input, &again.stdout));
    stage.assert_calls(&["pthread_mutex_lock", "pthread_cond_signal", "pthread_cond_wait"]);
}

#[test]
fn zstd_with_four_threads_gives_back_what_it_was_given() {
    let Some(stage) = Stage::for_program("zstd", "zstd") else { return };
    let input = stage.input(8 * MIB);

    let small = finished(stage.preloaded("zstd").args(["-q", "-T4", "-B512KiB", "-c"]).arg(&input));
    fs::write(stage.path("small.zst"), &small.stdout).unwrap();
    let again = finished(stage.preloaded("zstd").args(["-q", "-d", "-c", "small.zst"]));

    assert!(small.stdout.len() < 4 * MIB && same(&input, &again.stdout));
    stage.assert_calls(&["pthread_mutex_lock", "pthread_cond_wait"]);
}

#[test]
fn sort_with_four_threads_sorts() {
    let Some(stage) = Stage::for_program("sort", "coreutils") else { return };
    let input = stage.input(32 * MIB);

    // `sort` uses threads for inputs of at least 128 Ki lines.
    let sorted = finished(stage.preloaded("sort").args(["--parallel=4", "-S", "200M"]).arg(&input));

    let text = fs::read_to_string(input).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert!(String::from_utf8(sorted.stdout).unwrap().lines().eq(lines));
    stage.assert_calls(&["pthread_mutex_lock", "pthread_cond_signal"]);
}

#[test]
fn git_packs_with_four_threads_and_finds_no_fault_in_it() {
    let Some(stage) = Stage::for_program("git", "git") else { return };
    let input = fs::read(stage.input(2 * MIB)).unwrap();
    let git = |arguments: &[&str]| {
        let who = [
            "-c",
            "user.name=n",
            "-c",
            "user.email=e",
            "-c",
            "init.defaultBranch=main",
            "-c",
            "pack.threads=4",
        ];
        finished(stage.preloaded("git").args(who).args(arguments))
    };
    git(&["init", "-q", "r"]);
    for (number, part) in input.chunks(16 << 10).enumerate() {
        fs::write(stage.path("r").join(number.to_string()), part).unwrap();
    }
    git(&["-C", "r", "add", "."]);
    git(&["-C", "r", "commit", "-q", "-m", "all"]);

    git(&["-C", "r", "repack", "-a", "-d", "-f", "-q", "--threads=4"]);
    git(&["-C", "r", "fsck", "--full", "--strict"]);
    let found = git(&["-C", "r", "grep", "--threads", "4", "-c", "a line", "HEAD"]);

    let counts = String::from_utf8(found.stdout).unwrap();
    let lines: usize =
        counts.lines().map(|line| line.rsplit(':').next().unwrap().parse::<usize>().unwrap()).sum();
    assert!(lines >= 2 * MIB / 58 - 200, "{lines} lines found");
    stage.assert_calls(&["pthread_mutex_lock", "pthread_cond_wait"]);
}

const SQLITE: &str = r#"
import sqlite3, threading, concurrent.futures
db = sqlite3.connect("file.db")
db.execute("pragma journal_mode=wal")
db.execute("create table t(k integer primary key, writer integer, n integer)")
db.commit()
def insert(writer):
    own = sqlite3.connect("file.db", timeout=200)
    for n in range(50):
        with own: own.execute("insert into t(writer, n) values(?, ?)", (writer, n))
    own.close()
threads = [threading.Thread(target=insert, args=(writer,)) for writer in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(db.execute("select count(*), count(distinct writer * 1000 + n) from t").fetchone(), db.execute("pragma integrity_check").fetchone()[0])
# Without isolation_level=None, two threads can both begin a transaction: Python checks and begins in two steps.
shared = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
shared.execute("create table t(n)")
with concurrent.futures.ThreadPoolExecutor(8) as pool: list(pool.map(lambda n: shared.execute("insert into t values(?)", (n,)), range(2000)))
print(shared.execute("select count(*), sum(n) from t").fetchone())
"#;

#[test]
fn sqlite_with_eight_threads_keeps_every_row_in_a_file_and_in_memory() {
    let Some(stage) = Stage::for_program("python3", "python3") else { return };

    let said = finished(stage.preloaded("python3").args(["-c", SQLITE]));

    assert_eq!(String::from_utf8_lossy(&said.stdout), "(400, 400) ok\n(2000, 1999000)\n");
    stage.assert_calls(&["pthread_mutex_lock", "pthread_mutex_trylock", "pthread_cond_timedwait"]);
}

const PYTHON: &str = r#"
import threading, queue, hashlib, concurrent.futures, sys
sys.setswitchinterval(1e-4)
jobs, results, lock, total = queue.Queue(4), queue.Queue(), threading.Lock(), [0, 0]
def work():
    while (n := jobs.get()) is not None:
        with lock:
            total[0] += n
            total[1] = total[0]
        results.put(hashlib.sha256(bytes([n % 256]) * 100000).hexdigest())
threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads: thread.start()
for n in range(500): jobs.put(n)
for _ in threads: jobs.put(None)
for thread in threads: thread.join()
barrier = threading.Barrier(8)
with concurrent.futures.ThreadPoolExecutor(8) as pool: list(pool.map(lambda _: barrier.wait(), range(64)))
print(total, results.qsize(), len(set(results.queue)))
"#;

#[test]
fn python_with_sixteen_threads_hands_all_work_out_and_back() {
    let Some(stage) = Stage::for_program("python3", "python3") else { return };

    let said = finished(stage.preloaded("python3").args(["-c", PYTHON]));

    assert_eq!(String::from_utf8_lossy(&said.stdout), "[124750, 124750] 500 256\n");
    stage.assert_calls(&["pthread_mutex_lock", "pthread_cond_timedwait", "pthread_cond_signal"]);
}

/// A server that is stopped on drop.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Debian's `redis-server` is the same program under another name, in a package that starts a service on
/// installation.
const REDIS: &str = "redis-check-rdb";

fn redis(stage: &Stage, threads: &str) -> Server {
    let mut command = stage.preloaded(REDIS);
    command.arg0("redis-server").args([
        "--port",
        "0",
        "--unixsocket",
        "socket",
        "--save",
        "",
        "--io-threads",
        threads,
    ]);
    let log = fs::File::create(stage.path("log")).unwrap();
    let server = Server(command.args(["--io-threads-do-reads", "yes"]).stdout(log).spawn().unwrap());
    let begin = Instant::now();
    while !stage.path("socket").exists() {
        let log = || fs::read_to_string(stage.path("log")).unwrap();
        assert!(begin.elapsed() < LIMIT, "no socket: {}", log());
        std::thread::sleep(Duration::from_millis(10));
    }
    server
}

/// Clients of several threads increment and push values; all of them must arrive.
fn redis_serves_its_benchmark(threads: &str, requests: usize) {
    let Some(stage) = Stage::for_program(REDIS, "redis-tools") else { return };
    let mut server = redis(&stage, threads);
    let cli = |arguments: &[&str]| {
        let output = finished(stage.preloaded("redis-cli").args(["-s", "socket"]).args(arguments));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let requests = requests.to_string();
    let load =
        ["-s", "socket", "--threads", "2", "-c", "8", "-n", &requests, "-t", "set,incr,lpush", "--csv"];

    let report = finished(stage.preloaded("redis-benchmark").args(load));

    let report = String::from_utf8(report.stdout).unwrap();
    assert!(["SET", "INCR", "LPUSH"].iter().all(|test| report.contains(&format!("\"{test}\""))), "{report}");
    assert_eq!(
        [cli(&["get", "counter:__rand_int__"]), cli(&["llen", "mylist"])],
        [requests.clone(), requests]
    );
    let _ = stage.preloaded("redis-cli").args(["-s", "socket", "shutdown", "nosave"]).output().unwrap();
    assert!(server.0.wait().unwrap().success());
    stage.assert_calls(&["pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait"]);
}

#[test]
fn redis_serves_a_benchmark_of_two_threads() {
    redis_serves_its_benchmark("1", 5000);
}

#[test]
fn redis_with_threads_for_io_serves_a_benchmark_of_two_threads() {
    // Redis's I/O threads spin while they wait for each other, even on a busy machine.
    redis_serves_its_benchmark("2", 400);
}

#[test]
fn stress_ng_finds_no_fault_in_mutexes_and_threads_with_spin_locks() {
    let Some(stage) = Stage::for_program("stress-ng", "stress-ng") else { return };
    let load =
        ["--mutex", "2", "--mutex-procs", "4", "--pthread", "1", "--pthread-max", "32", "--timeout", "2s"];

    let report = finished(stage.preloaded("stress-ng").args(load));

    let report =
        String::from_utf8_lossy(&report.stderr).into_owned() + &String::from_utf8_lossy(&report.stdout);
    assert!(report.contains("successful run completed") && !report.contains("fail:"), "{report}");
    stage.assert_calls(&[
        "pthread_mutex_lock",
        "pthread_mutex_unlock",
        "pthread_spin_lock",
        "pthread_spin_unlock",
    ]);
}

#[test]
fn fio_with_four_threads_verifies_what_it_wrote() {
    let Some(stage) = Stage::for_program("fio", "fio") else { return };
    let jobs =
        ["--name=j", "--thread", "--numjobs=4", "--size=4M", "--rw=randrw", "--bs=4k", "--verify=crc32c"];
    let engine = ["--directory=.", "--ioengine=posixaio", "--iodepth=16", "--output-format=json"];

    let report = finished(stage.preloaded("fio").args(jobs).args(engine));

    let report = String::from_utf8(report.stdout).unwrap();
    assert_eq!(report.matches("\"error\" : 0,").count(), 4, "{report}");
    stage.assert_calls(&["pthread_mutex_lock", "pthread_cond_wait"]);
}

#[test]
fn qemu_img_converts_with_eight_coroutines_and_compares_equal() {
    let Some(stage) = Stage::for_program("qemu-img", "qemu-utils") else { return };
    fs::rename(stage.input(8 * MIB), stage.path("input.raw")).unwrap();
    fs::File::options().write(true).open(stage.path("input.raw")).unwrap().set_len(16 * MIB as u64).unwrap();
    let image = |arguments: &[&str]| finished(stage.preloaded("qemu-img").args(arguments));

    image(&["convert", "-m", "8", "-W", "-c", "-f", "raw", "-O", "qcow2", "input.raw", "output.qcow2"]);
    let compared = image(&["compare", "-f", "raw", "-F", "qcow2", "input.raw", "output.qcow2"]);

    assert_eq!(String::from_utf8_lossy(&compared.stdout), "Images are identical.\n");
    stage.assert_calls(&["pthread_mutex_lock", "pthread_cond_timedwait"]);
}
