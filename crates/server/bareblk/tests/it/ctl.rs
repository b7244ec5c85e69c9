//! The control socket: every verb, through `bareblk ctl` and as raw JSON, and which users may use which verb.
//!
//! This file has the queries. `ctl/changes.rs` has the changes, `ctl/access.rs` the socket and who may use it,
//! `ctl/unreachable.rs` servers that do not answer, `ctl/nuisances.rs` clients that misbehave, `ctl/monitor.rs` the
//! monitor socket.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[path = "ctl/access.rs"]
mod access;
#[path = "ctl/changes.rs"]
mod changes;
#[path = "ctl/monitor.rs"]
mod monitor;
#[path = "ctl/nuisances.rs"]
mod nuisances;
#[path = "ctl/unreachable.rs"]
mod unreachable;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};
use xtask::skip::{Reason, skip};

use crate::rig;
use crate::rig::{
    DEADLINE, Place, Server, Starting, assert_says, bareblk, ctl, eventually, is_root, ok, output, refusal,
};

const MIB: u64 = 1 << 20;

/// A server of one disk, `root`, with a control socket.
fn controlled(place: &Place) -> Server {
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.args(["--name", "root", "--control"]).arg(place.socket("c"));
    Server::start(command)
}

/// A raw client of the control socket.
struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects and reads nothing.
    fn connect(place: &Place) -> Self {
        let stream = UnixStream::connect(place.socket("c")).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        Self { stream: BufReader::new(stream) }
    }

    /// Connects and reads the greeting.
    fn new(place: &Place) -> Self {
        let mut client = Self::connect(place);
        assert_eq!(client.line().unwrap()["protocol"], 1);
        client
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).unwrap();
    }

    /// The next line; `None` at the end of the stream.
    fn line(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => Some(serde_json::from_str(&line).unwrap()),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn ask(&mut self, request: &Value) -> Value {
        self.send(format!("{request}\n").as_bytes());
        self.line().unwrap()
    }

    fn error_kind(&mut self, request: &Value) -> Value {
        self.ask(request)["error"]["kind"].clone()
    }
}

/// Checks that the server still answers other clients.
fn assert_well(place: &Place, server: &mut Server) {
    assert!(server.is_running());
    assert_eq!(ok(place, &["list"])["disks"][0]["name"], "root");
}

fn threads(server: &Server, name: &str) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|found| found.trim_end() == name).count()
}

fn open_to_all(socket: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt;
    let open = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap()
    };
    open(socket, 0o666);
    open(socket.parent().unwrap(), 0o755);
}

/// Runs the program as user 4321, through its descriptor, because other users may have no access to its folders.
fn as_user_4321(program: &std::fs::File, socket: &std::path::Path) -> Command {
    use std::os::fd::AsRawFd;
    rustix::io::fcntl_setfd(program, rustix::io::FdFlags::empty()).unwrap();
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
    command.args(["ctl", "list", "--socket"]).arg(socket).uid(4321).gid(4321).current_dir("/");
    command
}

#[test]
fn list_shows_the_disk_in_a_table_and_in_json() {
    let place = Place::new();
    let _server = controlled(&place);
    let table = output(ctl(&place, &["list"]));
    assert_says(&table, &["DISK", "root", "disk.raw", "1M", "0/64"]);
    let disk = &ok(&place, &["list"])["disks"][0];
    let shown =
        [&disk["name"], &disk["size_bytes"], &disk["sessions"], &disk["read_only"], &disk["queues_offered"]];
    assert_eq!(shown, [&json!("root"), &json!(MIB), &json!(0), &json!(false), &json!(64)]);
    assert_eq!(disk["socket"], place.socket("s").to_str().unwrap());
}

#[test]
fn stats_name_the_process_and_count_its_time() {
    let place = Place::new();
    let server = controlled(&place);
    let (first, second) = (ok(&place, &["stats"]), ok(&place, &["stats"]));
    assert_eq!(first["pid"], server.pid());
    assert!(second["at_ns"].as_u64().unwrap() > first["at_ns"].as_u64().unwrap());
    assert_eq!(first["disks"][0]["queues"], json!([]));
    assert_says(&output(ctl(&place, &["stats"])), &["WORKER", "1 of 1 disks have no running queue"]);
}

#[test]
fn stats_of_named_disks_without_queues_and_with_buckets_are_answered_and_others_refused() {
    let place = Place::new();
    let _server = controlled(&place);
    let mut client = Client::new(&place);
    let wanted = json!({"id": 1, "do": "stats", "disks": ["root"], "queues": false, "histograms": true});
    let disk = client.ask(&wanted)["ok"]["disks"][0].clone();
    assert_eq!((&disk["totals"]["reads"], &disk["latency"]["read"]["buckets"]), (&json!(0), &json!([])));
    let error = client.error_kind(&json!({"id": 2, "do": "stats", "disks": ["root", "x"]}));
    assert_eq!(error, "no-disk");
    assert_eq!(client.error_kind(&json!({"id": 3, "do": "stats", "histogram": true})), "bad-request");
}

#[test]
fn limit_for_slow_requests_follows_the_file_and_is_off_without_one() {
    let place = Place::new();
    let (image, socket, control) = (place.image("disk.raw", MIB), place.socket("s"), place.socket("c"));
    let file = place.path("bareblk.toml");
    let write = |more: &str| {
        let text = format!(
            "control = {control:?}\n[[disk]]\nname = 'root'\nimage = {image:?}\nsocket = {socket:?}\n{more}"
        );
        std::fs::write(&file, text).unwrap();
    };
    write("");
    let mut command = bareblk();
    command.arg("serve").arg("--config").arg(&file);
    let _server = Server::start(command);
    let slow = || output(ctl(&place, &["slow", "root"]));
    assert_eq!(slow(), "disk root records no slow requests: set its slow-ms\n");
    write("slow-ms = 250\n");
    assert_eq!(output(ctl(&place, &["reload"])), "changed root\n");
    assert_eq!(slow(), "no request of disk root has taken 250 ms or longer\n");
    assert_eq!(ok(&place, &["stats"])["disks"][0]["slow_ms"], 250);
    write("slow-ms = 0\n");
    assert_says(&refusal(ctl(&place, &["reload"])), &["slow-ms", "0", "1"]);
    write("");
    assert_eq!(output(ctl(&place, &["reload"])), "changed root\n");
    assert_eq!(ok(&place, &["slow", "root"]), json!({"slow_ms": null, "requests": []}));
}

#[test]
fn watched_stats_are_printed_until_nobody_reads_them() {
    let place = Place::new();
    let _server = controlled(&place);
    let mut watcher = ctl(&place, &["stats", "--watch", "0.5"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watcher.stdout.take().unwrap()).lines();
    assert_says(&lines.next().unwrap().unwrap(), &["0 requests/s", "– µs of processor time per request"]);
    drop(lines);
    let status = eventually("the watcher ends", || watcher.try_wait().unwrap());
    assert!(status.success());
}

#[test]
fn control_socket_of_the_environment_is_asked_unless_another_is_named() {
    let place = Place::new();
    let _server = controlled(&place);
    let mut command = bareblk();
    command.args(["ctl", "list"]).env("BAREBLK_CONTROL", place.socket("c"));
    assert_says(&output(command), &["root"]);
    let mut command = ctl(&place, &["list"]);
    command.env("BAREBLK_CONTROL", "/nowhere");
    assert_says(&output(command), &["root"]);
}

#[test]
fn stats_show_only_the_disks_that_are_named() {
    let place = Place::new();
    let _server = controlled(&place);
    let settings = [("image", place.image("more.raw", MIB)), ("socket", place.socket("more"))];
    let [image, socket] = settings.map(|(key, path)| format!("{key}={}", path.display()));
    output(ctl(&place, &["add", "name=more", &image, &socket]));
    let names = |words: &[&str]| {
        let disks = ok(&place, words)["disks"].as_array().unwrap().clone();
        disks.into_iter().map(|disk| disk["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!((names(&["stats"]).len(), names(&["stats", "more"])), (2, vec!["more".to_owned()]));
    assert_says(&output(ctl(&place, &["stats", "more"])), &["1 of 1 disks have no running queue"]);
}

#[test]
fn every_error_is_one_object_on_standard_output_for_those_who_ask_for_json() {
    let place = Place::new();
    let error = |words: &[&str]| {
        let run = ctl(&place, &[words, &["--json"]].concat()).output().unwrap();
        let text = String::from_utf8(run.stdout).unwrap();
        assert_eq!(text.lines().count(), 1, "{words:?}: {text}");
        assert_eq!(String::from_utf8(run.stderr).unwrap().lines().count(), 1, "{words:?}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        (answer["error"]["kind"].as_str().unwrap().to_owned(), run.status.code().unwrap())
    };
    assert_eq!(error(&["list"]), ("unreachable".to_owned(), 1));
    let _server = controlled(&place);
    assert_eq!(error(&["remove", "none"]), ("no-disk".to_owned(), 1));
    assert_eq!(error(&["resize", "none", "+1M"]), ("no-disk".to_owned(), 1));
    assert_eq!(error(&["stats", "none", "--watch", "1"]), ("no-disk".to_owned(), 1));
    assert_eq!(error(&["resize", "root", "+18446744073709551104"]), ("failed".to_owned(), 1));
    assert_eq!(error(&["attach", "root", "abc", "0"]), ("usage".to_owned(), 2));
    assert_eq!(error(&["add", "queues=1", "queues=2"]), ("usage".to_owned(), 2));
}
