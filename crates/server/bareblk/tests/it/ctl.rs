//! The control socket: every verb, through `bareblk ctl` and as raw JSON, and which users may use which verb.
//!
//! `ctl/nuisances.rs` has clients that misbehave, `ctl/monitor.rs` the monitor socket.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[path = "ctl/monitor.rs"]
mod monitor;
#[path = "ctl/nuisances.rs"]
mod nuisances;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};
use xtask::skip::{Reason, skip};

use crate::rig;
use crate::rig::{
    DEADLINE, Place, Server, Starting, assert_says, bareblk, eventually, is_root, output, refusal,
};

const MIB: u64 = 1 << 20;

/// A server of one disk, `root`, with a control socket.
fn controlled(place: &Place) -> Server {
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.args(["--name", "root", "--control"]).arg(place.socket("c"));
    Server::start(command)
}

fn ctl(place: &Place, words: &[&str]) -> Command {
    let mut command = bareblk();
    command.arg("ctl").args(words).arg("--control").arg(place.socket("c"));
    command
}

/// Sends a command, and returns the value of `ok` in the answer.
fn ok(place: &Place, words: &[&str]) -> Value {
    let mut command = ctl(place, words);
    command.arg("--json");
    let answer: Value = serde_json::from_str(&output(command)).unwrap();
    answer["ok"].clone()
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

// ---- queries

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

// ---- changes

#[test]
fn disk_is_added_served_resized_and_removed() {
    let place = Place::new();
    let _server = controlled(&place);
    let settings = [("image", place.image("more.raw", MIB)), ("socket", place.socket("more"))];
    let settings = settings.map(|(key, path)| format!("{key}={}", path.display()));
    assert_eq!(output(ctl(&place, &["add", "name=more", &settings[0], &settings[1], "queues=4"])), "more\n");
    assert!(UnixStream::connect(place.socket("more")).is_ok());
    assert_eq!(ok(&place, &["list"])["disks"][1]["queues_offered"], 4);
    output(ctl(&place, &["resize", "more", "2M"]));
    assert_eq!(ok(&place, &["list"])["disks"][1]["size_bytes"], 2 * MIB);
    output(ctl(&place, &["resize", "more", "+1.5M"]));
    assert_eq!(ok(&place, &["list"])["disks"][1]["size_bytes"], 3 * MIB + MIB / 2);
    assert_says(
        &refusal(ctl(&place, &["resize", "more", "+18446744073709551104"])),
        &["more", "cannot grow"],
    );
    eventually("the disk is free to go", || {
        assert_cmd::Command::from_std(ctl(&place, &["remove", "more"]))
            .output()
            .unwrap()
            .status
            .success()
            .then_some(())
    });
    assert!(!place.socket("more").exists());
    assert_eq!(ok(&place, &["list"])["disks"].as_array().unwrap().len(), 1);
}

#[test]
fn disk_that_cannot_be_added_is_refused_with_its_reason_and_nothing_changes() {
    let place = Place::new();
    let mut server = controlled(&place);
    let mut client = Client::new(&place);
    let image = place.image("more.raw", MIB);
    let mut add = |disk: Value| client.error_kind(&json!({"id": 1, "do": "add", "disk": disk}));
    assert_eq!(add(json!({"name": "root", "image": image, "socket": place.socket("x")})), "disk-exists");
    assert_eq!(
        add(json!({"name": "x", "image": image, "socket": place.socket("x"), "qeues": 1})),
        "bad-settings"
    );
    assert_eq!(add(json!({"name": "x", "image": image})), "bad-settings");
    assert_eq!(add(json!({"name": "x", "image": "/no/image", "socket": place.socket("x")})), "bad-settings");
    assert_eq!(add(json!({"name": "x", "image": image, "socket": place.socket("s")})), "failed");
    assert_eq!(add(json!({})), "bad-settings");
    assert_eq!(ok(&place, &["list"])["disks"].as_array().unwrap().len(), 1);
    assert_well(&place, &mut server);
}

#[test]
fn disk_shrinks_by_force_only() {
    let place = Place::new();
    let _server = controlled(&place);
    assert_says(&refusal(ctl(&place, &["resize", "root", "512K"])), &["root", "1048576", "524288", "force"]);
    output(ctl(&place, &["resize", "root", "512K", "--force"]));
    assert_eq!(ok(&place, &["list"])["disks"][0]["size_bytes"], MIB / 2);
}

#[test]
fn disks_that_do_not_exist_are_named_in_the_refusal() {
    let place = Place::new();
    let _server = controlled(&place);
    let words = [
        &["resize", "none", "4M"][..],
        &["resize", "none", "+4M"],
        &["remove", "none"],
        &["attach", "none", "0", "0"],
        &["placement", "none"],
        &["placement", "none", "--completion-worker", "0"],
    ];
    for words in words {
        assert_says(&refusal(ctl(&place, words)), &["there is no disk `none`: the disks are `root`"]);
    }
    assert_says(&refusal(ctl(&place, &["stats", "root", "none"])), &["there is no disk `none`"]);
}

#[test]
fn disk_without_a_name_is_shown_and_found_by_its_file_name() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let mut command = place.serve(&image, "s");
    command.arg("--control").arg(place.socket("c"));
    let _server = Server::start(command);
    let whole = image.canonicalize().unwrap().display().to_string();
    assert_eq!(ok(&place, &["list"])["disks"][0]["name"], whole);
    for name in ["disk.raw", whole.as_str()] {
        output(ctl(&place, &["resize", name, "+1M"]));
        output(ctl(&place, &["resize", name, "4M"]));
        output(ctl(&place, &["resize", name, "1M", "--force"]));
        assert_eq!(ok(&place, &["stats", name])["disks"][0]["name"], whole);
    }
    let table = output(ctl(&place, &["list"]));
    assert!(table.lines().nth(1).unwrap().trim_start().starts_with("disk.raw "), "{table}");
    let other = place.path("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::copy(&image, other.join("disk.raw")).unwrap();
    let [image, socket] = [("image", other.join("disk.raw")), ("socket", place.socket("s2"))]
        .map(|(key, path)| format!("{key}={}", path.display()));
    output(ctl(&place, &["add", &image, &socket]));
    assert_says(&refusal(ctl(&place, &["remove", "disk.raw"])), &["several disks", &whole, "other/disk.raw"]);
    assert_says(&output(ctl(&place, &["list"])), &[&whole]);
    output(ctl(&place, &["remove", "other/disk.raw"]));
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
fn resume_of_a_disk_without_parked_requests_says_so() {
    let place = Place::new();
    let _server = controlled(&place);
    assert_eq!(output(ctl(&place, &["resume", "root"])), "disk root has no parked requests\n");
}

// ---- answers in JSON

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

#[test]
fn workers_come_and_go_and_the_last_one_stays() {
    let place = Place::new();
    let _server = controlled(&place);
    assert_eq!(output(ctl(&place, &["workers", "add", "--nice", "5"])), "worker 1\n");
    let workers = ok(&place, &["workers"]);
    assert_eq!(workers["workers"][1]["settings"]["nice"], 5);
    output(ctl(&place, &["workers", "remove", "0"]));
    assert_says(&refusal(ctl(&place, &["workers", "remove", "1"])), &["worker 1 is the last worker"]);
    assert_says(&refusal(ctl(&place, &["workers", "remove", "0"])), &["there is no worker 0"]);
}

#[test]
fn attach_names_the_queue_or_the_worker_that_does_not_exist() {
    let place = Place::new();
    let _server = controlled(&place);
    let attached = output(ctl(&place, &["attach", "root", "0", "0"]));
    assert_eq!(attached, "queue 0 of disk root does not run yet: it will start on worker 0\n");
    assert_says(&refusal(ctl(&place, &["attach", "root", "64", "0"])), &["`root` has no queue 64", "64"]);
    assert_says(&refusal(ctl(&place, &["attach", "root", "0", "9"])), &["there is no worker 9"]);
}

#[test]
fn placement_shows_the_completion_worker_and_changes_it() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.args([
        "--name",
        "root",
        "--workers",
        "2",
        "--placement",
        "completion",
        "--completion-worker",
        "0",
    ]);
    command.arg("--control").arg(place.socket("c"));
    let server = Server::start(command);
    let shown = output(ctl(&place, &["placement", "root"]));
    assert_says(&shown, &["COMPLETION WORKER", "root", "completion, adaptive"]);
    let wanted = || ok(&place, &["placement", "root"])["placement"]["wanted_completion_worker"].clone();
    assert_eq!(wanted(), 0);
    assert_eq!(output(ctl(&place, &["placement", "root", "--completion-worker", "1"])), "");
    assert_eq!(wanted(), 1);
    output(ctl(&place, &["placement", "root", "--completion-worker", "none"]));
    assert_eq!(wanted(), Value::Null);
    assert_says(&server.log(), &[r#""do":"placement""#, r#""completion_worker":1"#]);
    let no_worker = ctl(&place, &["placement", "root", "--completion-worker", "2"]);
    assert_says(&refusal(no_worker), &["there is no worker 2"]);
    let mut client = Client::new(&place);
    let kind =
        client.error_kind(&json!({"id": 1, "do": "placement", "disk": "root", "completion_worker": -1}));
    assert_eq!((kind, wanted()), (json!("bad-request"), Value::Null));
}

#[test]
fn placement_of_a_disk_without_a_completion_worker_says_so() {
    let place = Place::new();
    let _server = controlled(&place);
    assert_says(&output(ctl(&place, &["placement", "root"])), &["root", "queue"]);
    let refused = ctl(&place, &["placement", "root", "--completion-worker", "0"]);
    assert_says(&refusal(refused), &["`root` has no completion worker", "--placement completion"]);
    let request = json!({"id": 1, "do": "placement", "disk": "root", "completion_worker": null});
    assert_eq!(Client::new(&place).error_kind(&request), "not-placed");
}

#[test]
fn reload_without_a_file_looks_at_the_images_sizes() {
    let place = Place::new();
    let _server = controlled(&place);
    place.image("disk.raw", 2 * MIB);
    assert_eq!(output(ctl(&place, &["reload"])), "nothing to change\n");
    assert_eq!(ok(&place, &["list"])["disks"][0]["size_bytes"], 2 * MIB);
}

#[test]
fn reload_follows_the_configuration_file_and_says_what_it_did() {
    let place = Place::new();
    let disk = |name: &str| {
        let (image, socket) = (place.image(name, MIB), place.socket(name));
        format!("[[disk]]\nname = {name:?}\nimage = {image:?}\nsocket = {socket:?}\n")
    };
    let file = place.path("bareblk.toml");
    let top = format!("control = {:?}\n", place.socket("c"));
    std::fs::write(&file, format!("{top}{}{}", disk("a"), disk("b"))).unwrap();
    let mut command = bareblk();
    command.args(["serve", "--config"]).arg(&file);
    let _server = Server::start(command);
    std::fs::write(&file, format!("{top}{}{}", disk("b"), disk("new"))).unwrap();
    assert_eq!(output(ctl(&place, &["reload"])), "added new\nremoved a\n");
    std::fs::write(&file, "nonsense").unwrap();
    assert_says(&refusal(ctl(&place, &["reload"])), &["bareblk.toml"]);
    assert_eq!(ok(&place, &["list"])["disks"].as_array().unwrap().len(), 2);
}

#[test]
fn changes_are_in_the_log_and_questions_are_not() {
    let place = Place::new();
    let server = controlled(&place);
    output(ctl(&place, &["resize", "root", "2M"]));
    ok(&place, &["list"]);
    assert_says(
        &server.log(),
        &["a control client changed the server", r#""do":"resize""#, r#""size_bytes":2097152"#],
    );
    assert!(!server.log().contains("list"), "{}", server.log());
}

// ---- stops

#[test]
fn shutdown_returns_when_the_server_has_stopped() {
    let place = Place::new();
    let server = controlled(&place);
    output(ctl(&place, &["shutdown"]));
    assert!(!place.socket("s").exists() && !place.socket("c").exists());
    server.wait_logged("everything is on stable storage");
    assert_says(&server.log(), &["a control client requested a stop"]);
}

#[test]
fn terminated_server_removes_its_control_socket_and_tells_its_clients() {
    let place = Place::new();
    let server = controlled(&place);
    let mut client = Client::new(&place);
    assert_eq!(server.stop(Signal::TERM).code(), Some(0));
    assert_eq!(client.line().unwrap()["error"]["kind"], "stopping");
    assert_eq!(client.line(), None);
    assert!(!place.socket("c").exists());
}

// ---- the socket

#[test]
fn control_socket_is_for_its_owner_only() {
    let place = Place::new();
    let _server = controlled(&place);
    assert_eq!(rig::mode(&place.socket("c")), 0o600);
}

#[test]
fn control_socket_of_a_killed_server_is_replaced() {
    let place = Place::new();
    controlled(&place).kill();
    assert!(place.socket("c").exists());
    let mut server = controlled(&place);
    assert_well(&place, &mut server);
}

#[test]
fn control_socket_that_cannot_be_had_keeps_the_server_from_starting() {
    let place = Place::new();
    let mut first = controlled(&place);
    let second = |control: &std::path::Path| {
        let mut command = place.serve(&place.image("other.raw", MIB), "other");
        command.arg("--control").arg(control);
        // Suppresses the log line that names the socket's owner at once.
        command.env("RUST_LOG", "error");
        refusal(command)
    };
    assert_says(&second(&place.socket("c")), &["control socket", "in use by a running server"]);
    assert_says(&second(&place.socket("no/folder")), &["control socket", "folder", "create it first"]);
    assert_says(&second(&place.path("disk.raw")), &["control socket", "not a socket"]);
    assert!(!place.socket("other").exists());
    assert_well(&place, &mut first);
}

#[test]
fn another_user_is_refused_even_if_the_socket_lets_him_in() {
    if !is_root() {
        return skip(Reason::NotRoot, "only root can become another user");
    }
    let place = Place::new();
    let mut server = controlled(&place);
    open_to_all(&place.socket("c"));
    let program = std::fs::File::open(env!("CARGO_BIN_EXE_bareblk")).unwrap();
    let mut command = as_user_4321(&program, &place.socket("c"));
    let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert_says(&said, &["user 4321 may not control this server", "root"]);
    server.wait_logged("control client refused: user 4321");
    assert_well(&place, &mut server);
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

// ---- a client without its server

#[test]
fn missing_server_is_told_with_what_to_do() {
    let place = Place::new();
    assert_says(&refusal(ctl(&place, &["list"])), &["there is no server at", "--control", "BAREBLK_CONTROL"]);
    controlled(&place).kill();
    assert_says(&refusal(ctl(&place, &["list"])), &["no server listens at", "start the server again"]);
    let mut command = bareblk();
    command.args(["ctl", "list", "--socket"]).arg(place.image("file", 1));
    assert_says(&refusal(command), &["file", "is not a socket"]);
}

#[test]
fn socket_of_a_disk_is_recognised_as_another_one() {
    let place = Place::new();
    let _server = controlled(&place);
    let mut command = bareblk();
    command.args(["ctl", "list", "--socket"]).arg(place.socket("s"));
    assert_says(&refusal(command), &["does not greet as a bareblk server", "is it a disk's socket?"]);
}

/// A fake server that sends `says`, reads one line if `asked`, and then closes the connection.
fn impostor(place: &Place, says: &'static str, asked: bool) -> std::thread::JoinHandle<()> {
    let listener = UnixListener::bind(place.socket("c")).unwrap();
    std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        client.write_all(says.as_bytes()).unwrap();
        if asked {
            BufReader::new(&client).read_line(&mut String::new()).unwrap();
        } else {
            let _ = client.read_to_end(&mut Vec::new());
        }
    })
}

#[test]
fn server_of_another_protocol_is_told_with_both_versions() {
    let place = Place::new();
    let server = impostor(&place, "{\"bareblk\": \"9.9\", \"protocol\": 2}\n", false);
    let line = refusal(ctl(&place, &["list"]));
    assert_says(&line, &["bareblk 9.9", "protocol 2", env!("CARGO_PKG_VERSION"), "speaks 1"]);
    server.join().unwrap();
}

#[test]
fn server_that_goes_away_in_the_middle_leaves_open_what_was_done() {
    let place = Place::new();
    let server = impostor(&place, "{\"bareblk\": \"0.1.0\", \"protocol\": 1}\n", true);
    let line = refusal(ctl(&place, &["remove", "root"]));
    assert_says(&line, &["closed the connection before it answered", "it may have carried out the request"]);
    server.join().unwrap();
}

#[test]
fn answer_of_a_hostile_server_does_not_reach_the_terminal_as_it_is() {
    let place = Place::new();
    let says = "{\"bareblk\": \"1\", \"protocol\": 1}\n{\"id\": 1, \"error\": {\"kind\": \"x\", \"message\": \"a\\u001b[2Jb\\nc\"}}\n";
    let server = impostor(&place, says, true);
    let line = refusal(ctl(&place, &["list"]));
    assert!(!line.contains('\x1b'), "{line:?}");
    server.join().unwrap();
}

#[test]
fn server_that_has_no_control_socket_serves_as_before() {
    let place = Place::new();
    let serving = Starting::new(place.serve(&place.image("disk.raw", MIB), "s")).wait_ready();
    assert_eq!(threads(&serving, "bareblk-control"), 0);
}
