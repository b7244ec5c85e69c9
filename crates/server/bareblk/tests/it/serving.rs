//! The real program while it is serving: image locks, signals, sockets, logs.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::SystemTime;

use fuser::{
    BackgroundSession, Config, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, MountOption,
    OpenFlags, ReplyAttr, ReplyEntry, ReplyOpen, Request,
};
use rustix::process::Signal;
use xtask::skip::{Reason, skip};

use crate::rig;
use crate::rig::{DEADLINE, Place, Server, Starting, assert_says, bareblk, is_root, output, refusal};

const MIB: u64 = 1 << 20;

// ---- image locks

#[test]
fn image_of_a_running_server_is_refused_with_its_process_id() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let server = Server::start(place.serve(&image, "a"));
    let mut second = place.serve(&image, "b");
    second.args(["--lock-timeout", "0"]);
    let holder = format!("bareblk (pid {})", server.pid());
    assert_says(&refusal(second), &["locked by", &holder, "--lock-timeout"]);
}

#[test]
fn image_with_a_reader_is_refused_to_a_writer() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let mut reader = place.serve(&image, "a");
    reader.arg("--readonly");
    let _reader = Server::start(reader);
    let mut writer = place.serve(&image, "b");
    writer.args(["--lock-timeout", "0"]);
    assert_says(&refusal(writer), &["locked by"]);
}

#[test]
fn two_readers_share_an_image() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let reader = |socket| {
        let mut command = place.serve(&image, socket);
        command.args(["--readonly", "--lock-timeout", "0"]);
        Server::start(command)
    };
    let (mut first, mut second) = (reader("a"), reader("b"));
    assert!(first.is_running() && second.is_running());
}

#[test]
fn server_that_waits_for_the_image_serves_when_its_holder_is_killed() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let holder = Server::start(place.serve(&image, "a"));
    let waiting = Starting::new(place.serve(&image, "b"));
    waiting.wait_logged("waiting for the image's lock; Ctrl-C gives up");
    waiting.wait_logged(&format!("bareblk (pid {})", holder.pid()));
    holder.kill();
    assert!(waiting.wait_ready().is_running());
}

/// Ignores SIGINT, as in a `command &` of a shell without job control.
fn with_interrupts_ignored(command: Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' INT; exec \"$@\"", "sh"]).arg(command.get_program()).args(command.get_args());
    shell.env_remove("RUST_LOG").env_remove("NO_COLOR").stdin(Stdio::null());
    shell
}

#[test]
fn server_that_waits_for_the_image_can_be_interrupted() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let _holder = Server::start(place.serve(&image, "a"));
    let waiting = Starting::new(with_interrupts_ignored(place.serve(&image, "b")));
    waiting.wait_logged("waiting for the image's lock");
    waiting.signal(Signal::INT);
    assert_eq!(waiting.wait_ended().signal(), Some(Signal::INT.as_raw()));
    assert!(!place.socket("b").exists());
}

/// A FUSE file system that never answers an open.
struct NeverOpens(Mutex<Vec<ReplyOpen>>);

impl Filesystem for NeverOpens {
    fn lookup(&self, _req: &Request, _parent: INodeNo, _name: &OsStr, reply: ReplyEntry) {
        reply.entry(&DEADLINE, &attr(INodeNo(2)), Generation(0));
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&DEADLINE, &attr(ino));
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.0.lock().unwrap().push(reply);
    }
}

fn attr(ino: INodeNo) -> FileAttr {
    let kind = if ino == INodeNo::ROOT { FileType::Directory } else { FileType::RegularFile };
    let (epoch, size) = (SystemTime::UNIX_EPOCH, MIB);
    FileAttr {
        ino,
        size,
        blocks: size / 512,
        atime: epoch,
        mtime: epoch,
        ctime: epoch,
        crtime: epoch,
        kind,
        perm: 0o700,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// Unmounted when dropped, even if a process still waits for an answer.
struct Mounted(PathBuf, Option<BackgroundSession>);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
        drop(self.1.take());
    }
}

#[test]
fn start_that_waits_for_a_file_system_that_hangs_names_the_image_and_can_be_interrupted() {
    let place = Place::new();
    let folder = place.path("hangs");
    std::fs::create_dir(&folder).unwrap();
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("bareblk-test".into())];
    let mounted = fuser::spawn_mount2(NeverOpens(Mutex::default()), &folder, &config);
    let _mounted = match mounted {
        Ok(session) => Mounted(folder.clone(), Some(session)),
        Err(error) => return skip(Reason::NoFuse, error),
    };
    let image = folder.join("disk.raw");
    let waiting = Starting::new(with_interrupts_ignored(place.serve(&image, "s")));
    waiting.wait_logged("its file system does not respond; still waiting (Ctrl-C gives up)");
    waiting.wait_logged(&image.display().to_string());
    waiting.signal(Signal::INT);
    assert_eq!(waiting.wait_ended().signal(), Some(Signal::INT.as_raw()));
    assert!(!place.socket("s").exists());
}

// ---- images of another format

/// An image whose first bytes are those of a different format.
fn foreign(place: &Place, name: &str) -> PathBuf {
    let image = place.path(name);
    std::fs::write(&image, [b"QFI\xfb\0\0\0\x03".as_slice(), &[0; 65_528]].concat()).unwrap();
    image
}

#[test]
fn image_that_looks_like_qcow2_is_refused_and_unchanged_unless_it_is_said_to_be_raw() {
    let place = Place::new();
    let image = foreign(&place, "disk.qcow2");
    let before = std::fs::read(&image).unwrap();
    let line = refusal(place.serve(&image, "s"));
    assert_says(
        &line,
        &[
            "disk.qcow2 looks like qcow2",
            "give --format qcow2, or",
            "qemu-img convert -O raw",
            "--format raw",
        ],
    );
    assert!(std::fs::read(&image).unwrap() == before && !place.socket("s").exists());
    let mut command = place.serve(&image, "s");
    command.args(["--format", "raw"]);
    let server = Server::start(command);
    assert!(!server.log().contains("looks like"), "{}", server.log());
}

#[test]
fn disk_whose_guest_wrote_another_formats_bytes_is_left_out_and_the_others_are_served() {
    let place = Place::new();
    let table = |name: &str, image: &std::path::Path, more: &str| {
        format!("[[disk]]\nname = '{name}'\nimage = {image:?}\nsocket = {:?}\n{more}\n", place.socket(name))
    };
    let (odd, good) = (foreign(&place, "odd"), place.image("good", MIB));
    let file = place.path("bareblk.toml");
    let write = |more: &str| {
        let control = format!("control = {:?}\n", place.socket("c"));
        std::fs::write(&file, control + &table("odd", &odd, more) + &table("good", &good, "")).unwrap();
    };
    write("");
    let mut command = bareblk();
    command.args(["serve", "--config"]).arg(&file);
    let (server, lines) = Starting::new(command).wait_lines(2);
    assert_eq!(lines[1], "bareblk: serving 1 disk");
    assert_says(&server.log(), &["ERROR", "disk=\"odd\"", "looks like qcow2", "--format raw"]);
    assert!(!place.socket("odd").exists() && UnixStream::connect(place.socket("good")).is_ok());
    let reload = || {
        let mut command = bareblk();
        command.args(["ctl", "reload", "--control"]).arg(place.socket("c"));
        output(command)
    };
    assert_says(&reload(), &["not changed: odd: ", "looks like qcow2"]);
    write("format = 'raw'");
    assert_eq!(reload(), "added odd\n");
    // The disk was served, so a change of its settings or a live upgrade must not take the disk from its guest.
    write("queues = 2");
    assert_eq!(reload(), "replaced odd\n");
    let mut next = bareblk();
    next.args(["serve", "--take-over"]).arg(place.socket("c")).arg("--config").arg(&file);
    let (next, lines) = Starting::new(next).wait_lines(5);
    assert_eq!(lines[4], "bareblk: serving 2 disks");
    assert!(UnixStream::connect(place.socket("odd")).is_ok());
    drop((server, next));
}

#[test]
fn image_that_the_server_created_is_raw_whatever_its_guest_wrote() {
    let place = Place::new();
    let file = place.path("bareblk.toml");
    let (image, socket) = (foreign(&place, "disk"), place.socket("s"));
    std::fs::write(&file, format!("[[disk]]\nimage = {image:?}\nsocket = {socket:?}\ncreate = '64K'\n"))
        .unwrap();
    let mut command = bareblk();
    command.args(["serve", "--config"]).arg(&file);
    Server::start(command);
}

// ---- checks and second starts

#[test]
fn check_says_what_would_be_served_and_starts_nothing() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let check = || {
        let mut command = place.serve(&image, "s");
        command.args(["--check", "--name", "root", "--queues", "2"]);
        output(command)
    };
    let text = check();
    assert_says(&text, &["disk root: ", "1048576 bytes", "engine ", "2 queues", "valid: 1 disk, 1 worker"]);
    assert!(!text.contains("in use") && !place.socket("s").exists());
    let server = Server::start(place.serve(&image, "s"));
    assert_says(&check(), &[&format!("in use now by bareblk (pid {})", server.pid())]);
    let mut create = place.serve(&place.path("new.raw"), "s2");
    create.args(["--create", "1M", "--check"]);
    assert_says(&output(create), &["would be created with 1048576 bytes"]);
    assert!(!place.path("new.raw").exists());
}

#[test]
fn check_lists_the_mistakes_of_all_disks_and_fails() {
    let place = Place::new();
    let table = |name: &str, image: &std::path::Path| {
        format!("[[disk]]\nname = '{name}'\nimage = {image:?}\nsocket = {:?}\n", place.socket(name))
    };
    let (odd, empty, good) = (foreign(&place, "odd"), place.image("empty", 0), place.image("good", MIB));
    let file = place.path("bareblk.toml");
    std::fs::write(&file, table("odd", &odd) + &table("empty", &empty) + &table("good", &good)).unwrap();
    let run = bareblk().args(["serve", "--check", "--config"]).arg(&file).output().unwrap();
    let (said, errors) = (String::from_utf8(run.stdout).unwrap(), String::from_utf8(run.stderr).unwrap());
    assert_eq!((run.status.code(), said.as_str(), errors.lines().count()), (Some(1), "", 2), "{errors}");
    assert_says(&errors, &["odd looks like qcow2", "empty is empty"]);
}

#[test]
fn second_start_of_a_server_with_a_control_socket_ends_soon_and_names_the_first() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let start = || {
        let mut command = place.serve(&image, "s");
        command.arg("--control").arg(place.socket("c"));
        command
    };
    let first = Server::start(start());
    // The two lines are its log and its error.
    let run = start().output().unwrap();
    let text = String::from_utf8(run.stderr).unwrap();
    assert_eq!((run.status.code(), text.lines().count()), (Some(1), 2), "{text}");
    let pid = format!("(pid {})", first.pid());
    assert_says(&text, &["waiting a moment", "control socket", &pid, "bareblk ctl reload", "--take-over"]);
    // The second server waits for a server that is stopping.
    let second = Starting::new(start());
    second.wait_logged("waiting a moment");
    assert!(first.stop(Signal::TERM).success());
    second.wait_ready();
}

// ---- stops

#[test]
fn interrupted_server_exits_with_zero_and_its_socket_is_gone() {
    let place = Place::new();
    let server = Server::start(place.serve(&place.image("disk.raw", MIB), "s"));
    assert!(place.socket("s").exists());
    assert_eq!(server.stop(Signal::INT).code(), Some(0));
    assert!(!place.socket("s").exists());
}

#[test]
fn terminated_server_with_a_connected_front_end_exits_with_zero() {
    let place = Place::new();
    let server = Server::start(place.serve(&place.image("disk.raw", MIB), "s"));
    let _front_end = UnixStream::connect(place.socket("s")).unwrap();
    assert_eq!(server.stop(Signal::TERM).code(), Some(0));
    assert!(!place.socket("s").exists());
}

#[test]
fn killed_servers_socket_is_replaced_at_the_next_start() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    Server::start(place.serve(&image, "s")).kill();
    assert!(place.socket("s").exists());
    let _next = Server::start(place.serve(&image, "s"));
    assert!(UnixStream::connect(place.socket("s")).is_ok());
}

// ---- the socket

#[test]
fn socket_is_for_its_owner_only_unless_told_otherwise() {
    let place = Place::new();
    let _server = Server::start(place.serve(&place.image("disk.raw", MIB), "s"));
    assert_eq!(rig::mode(&place.socket("s")), 0o600);
}

#[test]
fn socket_gets_the_mode_that_was_asked_for() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.args(["--socket-mode", "666"]);
    let _server = Server::start(command);
    assert_eq!(rig::mode(&place.socket("s")), 0o666);
}

#[test]
fn socket_gets_the_owner_and_group_that_were_asked_for() {
    if !is_root() {
        return skip(Reason::NotRoot, "only root gives files away");
    }
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.args(["--socket-owner", "daemon", "--socket-group", "4321"]);
    let _server = Server::start(command);
    let socket = std::fs::metadata(place.socket("s")).unwrap();
    assert_eq!((socket.uid(), socket.gid()), (1, 4321)); // the user `daemon` is 1 on every Linux
}

// ---- output

#[test]
fn ready_line_names_image_and_socket_when_front_ends_can_connect() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let server = Server::start(place.serve(&image, "s"));
    assert!(UnixStream::connect(place.socket("s")).is_ok());
    let expected = format!("bareblk: serving {} on {}", image.display(), place.socket("s").display());
    assert_eq!(server.ready_line, expected);
}

#[test]
fn start_is_one_line_in_the_log_without_colours() {
    let place = Place::new();
    let server = Server::start(place.serve(&place.image("disk.raw", MIB), "s"));
    let log = server.log();
    assert_eq!(log.lines().count(), 1, "{log}");
    assert_says(
        &log,
        &["INFO", "serving", "disk.raw", "size_bytes=1048576", "cache=none", "engine=io_uring"],
    );
    assert!(!log.contains('\x1b'), "{log}");
}

#[test]
fn log_lines_are_json_when_asked_for() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.args(["--log-format", "json", "--serial", "a \"b\""]);
    let server = Server::start(command);
    let line: serde_json::Value = serde_json::from_str(&server.log()).unwrap();
    assert_eq!(line["fields"]["serial"], "a \"b\"");
    assert!(line["timestamp"].is_string());
}

#[test]
fn log_filter_of_the_environment_goes_before_verbosity() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.arg("-vv").env("RUST_LOG", "error");
    let server = Server::start(command);
    assert_eq!(server.log(), "");
}

#[test]
fn serial_is_the_same_for_the_same_path_at_the_next_start() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let serial = || {
        let mut command = place.serve(&image, "s");
        command.args(["--log-format", "json"]);
        let server = Server::start(command);
        let line: serde_json::Value = serde_json::from_str(&server.log()).unwrap();
        assert!(server.stop(Signal::TERM).success());
        line["fields"]["serial"].as_str().unwrap().to_owned()
    };
    let (first, second) = (serial(), serial());
    assert_eq!(first, second);
    assert_eq!(first.len(), 20);
}

#[test]
fn hangup_makes_it_look_at_the_images_size_again() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let server = Server::start(place.serve(&image, "s"));
    place.image("disk.raw", 2 * MIB);
    server.signal(Signal::HUP);
    server.wait_logged("image grew");
    assert!(server.stop(Signal::TERM).success());
}

/// The log goes to a pipe whose reader has exited.
#[test]
fn server_survives_that_nobody_reads_its_log() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    rig::eventually("it serves", || UnixStream::connect(place.socket("s")).ok());
    drop(child.stderr.take());
    let front_end = UnixStream::connect(place.socket("s")).unwrap();
    front_end.shutdown(std::net::Shutdown::Both).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
    let status = rig::eventually("it ends", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
}

#[test]
fn soft_limit_of_open_files_is_raised_to_the_hard_one() {
    let place = Place::new();
    let serve = place.serve(&place.image("disk.raw", MIB), "s");
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -Sn 64 && exec \"$@\"", "sh"])
        .arg(serve.get_program())
        .args(serve.get_args());
    let server = Server::start(command);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.pid())).unwrap();
    let open_files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<_> = open_files.split_whitespace().skip(3).take(2).collect();
    assert_eq!(numbers[0], numbers[1]);
}

// ---- together with QEMU

#[test]
fn printed_arguments_connect_a_stock_qemu() {
    let place = Place::new();
    let _server = Server::start(place.serve(&place.image("disk.raw", MIB), "s"));
    let mut command = bareblk();
    command.args(["vmm-args", "--memory", "64M", "--queues", "2", "--socket"]).arg(place.socket("s"));
    let text = output(command);
    let probe = Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status();
    if probe.is_err() {
        return skip(Reason::NoProgram("qemu-system-x86_64".into()), "");
    }
    let args: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let qemu = "qemu-system-x86_64 -accel tcg -nodefaults -display none -S -monitor stdio";
    let mut shell = assert_cmd::Command::new("sh");
    shell.arg("-c").arg(format!("{qemu} {}", args.join("\n"))).timeout(DEADLINE);
    let run = shell.write_stdin("info qtree\nquit\n").assert().success();
    let tree = String::from_utf8_lossy(&run.get_output().stdout).into_owned();
    assert_says(&tree, &["vhost-user-blk", "num-queues = 2", "queue-size = 1024", "chardev = \"bareblk-s\""]);
}
