//! The real program under a service manager, which the tests imitate: the program's notifications, and the sockets
//! passed to it.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::rig::{DEADLINE, Place, Server, assert_says, bareblk, mode, output, refusal};

const MIB: u64 = 1 << 20;

/// The receiving end of `NOTIFY_SOCKET`.
struct Manager(UnixDatagram);

impl Manager {
    fn new(place: &Place) -> Self {
        let socket = UnixDatagram::bind(place.socket("notify")).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        Self(socket)
    }

    fn next(&self) -> String {
        let mut message = [0; 4096];
        let length = self.0.recv(&mut message).expect("a message");
        String::from_utf8(message[..length].to_vec()).unwrap()
    }

    /// Waits for the next message that begins with `begin`.
    fn wait(&self, begin: &str) -> String {
        std::iter::from_fn(|| Some(self.next())).find(|message| message.starts_with(begin)).unwrap()
    }

    fn says_nothing_for(&self, time: Duration) -> bool {
        self.0.set_read_timeout(Some(time)).unwrap();
        let silent = self.0.recv(&mut [0; 4096]).is_err();
        self.0.set_read_timeout(Some(DEADLINE)).unwrap();
        silent
    }
}

fn managed(place: &Place, command: &mut Command) -> Manager {
    let manager = Manager::new(place);
    command.env("NOTIFY_SOCKET", place.socket("notify"));
    manager
}

fn config(place: &Place, text: &str) -> Command {
    let file = place.path("bareblk.toml");
    std::fs::write(&file, text).unwrap();
    let mut command = bareblk();
    command.arg("serve").arg("--config").arg(file);
    command
}

fn disk(place: &Place, name: &str, socket: &Path) -> String {
    let image = place.image(&format!("{name}.raw"), MIB);
    format!("[[disk]]\nname = '{name}'\nimage = '{}'\nsocket = '{}'\n", image.display(), socket.display())
}

fn bench(socket: &Path) -> String {
    let mut command = crate::rig::bench();
    command.arg("--socket").arg(socket).args(["--rw", "write", "--bs", "4k", "--size", "64k"]);
    output(command)
}

// ---- notifications

#[test]
fn manager_is_told_of_start_and_stop() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    let manager = managed(&place, &mut command);
    let server = Server::start(command);
    assert_eq!(manager.next(), "READY=1\nSTATUS=serving 1 disk");
    assert!(place.socket("s").exists(), "ready before the socket is there");
    assert!(server.stop(Signal::TERM).success());
    assert_says(&manager.next(), &["STOPPING=1\n", "STATUS=stopping"]);
}

#[test]
fn manager_is_told_of_a_reload_its_time_and_its_end() {
    let place = Place::new();
    let (one, two) = (disk(&place, "one", &place.socket("1")), disk(&place, "two", &place.socket("2")));
    let mut command = config(&place, &one);
    let manager = managed(&place, &mut command);
    let server = Server::start(command);
    manager.wait("READY=1");
    std::fs::write(place.path("bareblk.toml"), format!("{one}{two}")).unwrap();
    let now = |clock| {
        let now = rustix::time::clock_gettime(clock);
        now.tv_sec * 1_000_000 + now.tv_nsec / 1000
    };
    let before = now(rustix::time::ClockId::Monotonic);
    server.signal(Signal::HUP);
    let reloading = manager.next();
    let usec = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect(&reloading);
    let usec: i64 = usec.lines().next().unwrap().parse().unwrap();
    assert!((before..=now(rustix::time::ClockId::Monotonic)).contains(&usec), "{usec}, not since {before}");
    assert_eq!(manager.wait("READY=1"), "READY=1\nSTATUS=serving 2 disks");
    std::fs::write(place.path("bareblk.toml"), "no").unwrap();
    server.signal(Signal::HUP);
    manager.wait("RELOADING=1");
    assert_says(&manager.wait("READY=1"), &["serving 2 disks", "mistake"]);
}

#[test]
fn manager_that_is_not_there_does_not_keep_it_from_serving() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.env("NOTIFY_SOCKET", place.socket("nobody"));
    let server = Server::start(command);
    assert_says(&server.log(), &["NOTIFY_SOCKET=", "cannot notify the service manager"]);
}

// ---- watchdog

#[test]
fn watchdog_hears_of_a_server_again_and_again() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    let manager = managed(&place, &mut command);
    command.env("WATCHDOG_USEC", "300000").args(["--workers", "3"]);
    let server = Server::start(command);
    (0..3).for_each(|_| drop(manager.wait("WATCHDOG=1")));
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn watchdog_that_is_too_short_is_told_at_its_shortest_and_said() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    let manager = managed(&place, &mut command);
    command.env("WATCHDOG_USEC", "1");
    let server = Server::start(command);
    server.wait_logged("WATCHDOG_USEC=1 is too short");
    assert_says(&server.log(), &["once per 10ms", "at least 30ms"]);
    manager.wait("WATCHDOG=1");
    assert!(server.stop(Signal::TERM).success());
}

/// The stop waits for a control client whose image is still in use.
#[test]
fn watchdog_has_no_complaints_while_the_server_stops() {
    let place = Place::new();
    let used = place.image("used.raw", MIB);
    let _other = Server::start(place.serve(&used, "other"));
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    let manager = managed(&place, &mut command);
    command.env("WATCHDOG_USEC", "60000").arg("--control").arg(place.socket("c"));
    let server = Server::start(command);
    manager.wait("WATCHDOG=1");
    let mut ctl = bareblk();
    ctl.arg("ctl").arg("--socket").arg(place.socket("c")).args(["add", "lock-timeout=600"]);
    ctl.arg(format!("image={}", used.display())).arg(format!("socket={}", place.socket("2").display()));
    let mut waiting = ctl.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    server.wait_logged("waiting for the image's lock");
    let mut log = server.log_file();
    let ended = server.stop(Signal::TERM);
    waiting.wait().unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut log, &mut text).unwrap();
    assert!(
        ended.success()
            && text.contains("the stop interrupts a control client")
            && !text.contains("no answer from"),
        "{text}"
    );
}

#[test]
fn watchdog_of_another_process_hears_nothing() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    let manager = managed(&place, &mut command);
    command.env("WATCHDOG_USEC", "30000").env("WATCHDOG_PID", "1");
    let server = Server::start(command);
    manager.wait("READY=1");
    assert!(manager.says_nothing_for(Duration::from_millis(300)));
    assert!(!server.log().contains("watchdog"), "{}", server.log());
}

/// Stops a thread of the server with ptrace until the tracer's standard input is closed. This is a Python script,
/// because ptrace in Rust needs unsafe code.
const TRACER: &str = "
import ctypes, sys
ptrace, thread = ctypes.CDLL(None, use_errno=True).ptrace, int(sys.argv[1])
SEIZE, INTERRUPT = 0x4206, 0x4207
if ptrace(SEIZE, thread, None, None) or ptrace(INTERRUPT, thread, None, None):
    sys.exit('ptrace: %d' % ctypes.get_errno())
print('held', flush=True)
sys.stdin.read()
";

fn freeze(server: &Server, name: &str) -> Option<Child> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    let named =
        |task: &PathBuf| std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name);
    let task = tasks.map(|task| task.unwrap().path()).find(named).expect(name);
    let mut tracer = Command::new("python3");
    tracer.args(["-c", TRACER]).arg(task.file_name().unwrap());
    let mut tracer = tracer.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().ok()?;
    let mut line = String::new();
    BufReader::new(tracer.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (line == "held\n").then_some(tracer)
}

fn silence_of(thread: &str, words: &[&str]) {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    let manager = managed(&place, &mut command);
    command.env("WATCHDOG_USEC", "3000000").args(["--workers", "2"]);
    let server = Server::start(command);
    manager.wait("WATCHDOG=1");
    let Some(mut tracer) = freeze(&server, thread) else {
        return xtask::skip::skip(xtask::skip::Reason::NoPtrace, "");
    };
    server.wait_logged("no answer from");
    while !manager.says_nothing_for(Duration::from_millis(1)) {}
    assert!(manager.says_nothing_for(Duration::from_millis(2500)), "told that it is alive, and it is not");
    assert_says(&server.log(), words);
    drop(tracer.stdin.take());
    tracer.wait().unwrap();
    manager.wait("WATCHDOG=1");
}

#[test]
fn watchdog_hears_nothing_while_a_worker_hangs() {
    silence_of("bareblk-work-1", &["worker 1"]);
}

#[test]
fn watchdog_hears_nothing_while_the_main_loop_hangs() {
    silence_of("bareblk", &["no answer from the main loop"]);
}

// ---- sockets

/// Runs `command` with these sockets from descriptor 3 on. A shell arranges the descriptors, because choosing their
/// numbers is unsafe in Rust.
fn passing(command: &Command, sockets: &[(&str, &UnixListener)]) -> Command {
    let mut script = String::new();
    for (index, (_, socket)) in sockets.iter().enumerate() {
        let high = nix::fcntl::fcntl(socket, nix::fcntl::FcntlArg::F_DUPFD(100)).unwrap();
        script.push_str(&format!("exec {}<&{high} {high}<&-; ", index + 3));
    }
    let names: Vec<&str> = sockets.iter().map(|(name, _)| *name).collect();
    let (count, names) = (sockets.len(), names.join(":"));
    script.push_str(&format!("LISTEN_PID=$$ LISTEN_FDS={count} LISTEN_FDNAMES={names} exec \"$@\""));
    let mut shell = Command::new("bash");
    shell.args(["-c", &script, "sh"]).arg(command.get_program()).args(command.get_args());
    shell.env_remove("RUST_LOG").stdin(Stdio::null());
    shell
}

fn inode(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).unwrap())
}

#[test]
fn passed_socket_is_the_disks_with_its_path_and_stays_as_it_was() {
    let place = Place::new();
    let path = place.socket("s");
    let socket = UnixListener::bind(&path).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o612)).unwrap();
    let before = inode(&path);
    let command = place.serve(&place.image("disk.raw", MIB), "s");
    let server = Server::start(passing(&command, &[("anything", &socket)]));
    bench(&path);
    assert_eq!((inode(&path), mode(&path)), (before, 0o612));
    // As the peer, the kernel reports the process that called listen last. The server leaves the manager's backlog
    // unchanged.
    let stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let peer = rustix::net::sockopt::socket_peercred(&stream).unwrap();
    assert_eq!(peer.pid.as_raw_nonzero().get().unsigned_abs(), std::process::id());
    assert!(server.stop(Signal::TERM).success());
    assert_eq!(inode(&path), before, "the socket's file is its maker's to remove");
}

#[test]
fn front_end_that_came_before_the_server_is_served() {
    let place = Place::new();
    let path = place.socket("s");
    let socket = UnixListener::bind(&path).unwrap();
    let waiting = {
        let path = path.clone();
        std::thread::spawn(move || bench(&path))
    };
    let command = place.serve(&place.image("disk.raw", MIB), "s");
    let _server = Server::start(passing(&command, &[("anything", &socket)]));
    assert_says(&waiting.join().unwrap(), &["write"]);
}

#[test]
fn sockets_are_told_apart_by_name_where_paths_differ() {
    let place = Place::new();
    let listener = |name: &str| UnixListener::bind(place.socket(name)).unwrap();
    let (a, b, spare) = (listener("a"), listener("b"), listener("spare"));
    let text = disk(&place, "one", &place.socket("1")) + &disk(&place, "two", &place.socket("b"));
    let command = config(&place, &text);
    // `b` belongs to disk two by its path, whatever its name.
    let server = Server::start(passing(&command, &[("one", &a), ("one", &b), ("three", &spare)]));
    server.wait_logged("no disk is served there");
    assert_says(&server.log(), &["spare", "`three`"]);
    bench(&place.socket("a"));
    bench(&place.socket("b"));
    assert!(!place.socket("1").exists());
}

#[test]
fn passed_socket_is_there_again_for_a_disk_that_comes_back() {
    let place = Place::new();
    let socket = UnixListener::bind(place.socket("1")).unwrap();
    let (one, two) = (disk(&place, "one", &place.socket("1")), disk(&place, "two", &place.socket("2")));
    let command = config(&place, &format!("{one}{two}"));
    let server = Server::start(passing(&command, &[("one", &socket)]));
    for (text, line) in [(two.clone(), "disk removed"), (format!("{one}{two}"), "disk added")] {
        std::fs::write(place.path("bareblk.toml"), text).unwrap();
        server.signal(Signal::HUP);
        server.wait_logged(line);
    }
    bench(&place.socket("1"));
}

#[test]
fn control_socket_can_be_passed_too() {
    let place = Place::new();
    let socket = UnixListener::bind(place.socket("c")).unwrap();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.arg("--control").arg(place.socket("c"));
    let server = Server::start(passing(&command, &[("x", &socket)]));
    let mut ctl = bareblk();
    ctl.arg("ctl").arg("--socket").arg(place.socket("c")).arg("list");
    assert_says(&output(ctl), &["disk.raw"]);
    assert!(server.stop(Signal::TERM).success());
    assert!(place.socket("c").exists());
}

#[test]
fn descriptor_that_is_no_listening_socket_is_refused() {
    let place = Place::new();
    let command = place.serve(&place.image("disk.raw", MIB), "s");
    let mut shell = Command::new("bash");
    let script = "exec 3</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=vm1 exec \"$@\"";
    shell.args(["-c", script, "sh"]).arg(command.get_program()).args(command.get_args());
    assert_says(
        &refusal(shell),
        &["descriptor 3", "`vm1`", "not a listening unix stream socket", "ListenStream="],
    );
}

#[test]
fn descriptors_for_another_process_are_left_alone() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.env("LISTEN_PID", "1").env("LISTEN_FDS", "2");
    let server = Server::start(command);
    assert_says(&server.ready_line, &["serving"]);
}
