//! `bareblk top` without a terminal: tables, lines of JSON, servers that start and stop.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::Value;

use crate::load::Served;
use crate::rig::{Place, assert_says, output, top, wrong_usage};

/// `bareblk top` with many intervals; the test reads its lines as they are printed.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Reads up to the first line that `is_wanted`, and returns it.
    fn wait(&mut self, what: &str, is_wanted: impl Fn(&Value) -> bool) -> Value {
        let mut values = self.lines.by_ref().map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        values.find(|line| is_wanted(line)).unwrap_or_else(|| panic!("it ended before {what}"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn disk<'v>(line: &'v Value, name: &str) -> &'v Value {
    let disks = line["disks"].as_array().unwrap_or_else(|| panic!("no disks: {line}"));
    disks.iter().find(|disk| disk["name"] == name).unwrap_or_else(|| panic!("no {name}: {line}"))
}

fn json(served: &Served, interval: &str) -> Command {
    let mut command = top();
    command.arg("--control").arg(served.control()).args(["--json", "--interval", interval]);
    command
}

#[test]
fn without_a_terminal_each_interval_is_a_table() {
    let served = Served::start();
    let _load = served.load();
    let mut command = top();
    command.arg("--control").arg(served.control()).args(["--interval", "0.3", "--count", "3"]);
    let text = output(command);
    assert_eq!(text.matches(" IOPS, ").count(), 3, "{text}");
    assert_says(&text, &["WORKER", "CPU%", "DISK", "STATE", "\n root ", "\n spare ", "no guest"]);
    assert!(!text.contains('\u{1b}'), "{text:?}");
    let figures: Vec<_> = text.lines().filter(|line| line.starts_with(" root ")).collect();
    let is_busy = |line: &&&str| line.split_whitespace().nth(1).is_some_and(|iops| iops != "0");
    assert_eq!(figures.iter().filter(is_busy).count(), 3, "{text}");
}

#[test]
fn lines_of_json_have_the_requests_that_the_guest_sent() {
    let served = Served::start();
    let load = served.load();
    let mut command = json(&served, "0.3");
    command.args(["--count", "3"]);
    let text = output(command);
    let sent = load.requests() as f64;
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    let number = |value: &Value| value.as_f64().unwrap();
    let told =
        |key| lines.iter().map(|line| number(&disk(line, "root")[key]) * number(&line["seconds"])).sum();
    let (all, reads): (f64, f64) = (told("iops"), told("reads_per_s"));
    // The other requests were sent before the first reading or after the last one, or are still in flight.
    assert!(all > 0.0 && all <= sent + 8.0, "{all} of {sent}");
    assert!(reads > 0.0 && reads < all, "{reads} reads of {all}");
    assert_eq!(
        (&disk(&lines[2], "spare")["state"], &lines[0]["version"]),
        (&"no-guest".into(), &env!("CARGO_PKG_VERSION").into())
    );
    assert_eq!(lines[1]["server"], served.control().to_string_lossy().into_owned());
}

#[test]
fn server_that_goes_and_comes_again_is_a_line_and_then_watched_again() {
    let mut served = Served::start();
    let mut running = Running::start(json(&served, "0.1"));
    running.wait("a sample", |line| line["disks"].is_array());
    served.server.take().unwrap().kill();
    let line = running.wait("the loss", |line| line["error"].is_string());
    assert_says(line["error"].as_str().unwrap(), &["server", "control.sock"]);
    served.start_server();
    let line = running.wait("a sample of the next server", |line| line["disks"].is_array());
    assert_eq!(disk(&line, "root")["state"], "no-guest");
}

#[test]
fn server_that_is_not_there_yet_is_watched_beside_another_one() {
    let (served, late) = (Served::start(), Place::new());
    let mut command = json(&served, "0.1");
    command.arg("--control").arg(late.socket("late.sock"));
    let mut running = Running::start(command);
    let line = running.wait("the one", |line| line["disks"].is_array());
    assert_eq!(line["server"], served.control().to_string_lossy().into_owned());
    let line = running.wait("the other", |line| line["error"].is_string());
    assert_says(line["error"].as_str().unwrap(), &["there is no server at", "late.sock"]);
}

#[test]
fn reader_that_closes_the_pipe_ends_it() {
    let served = Served::start();
    let mut running = Running::start(json(&served, "0.1"));
    running.wait("a sample", |line| line["disks"].is_array());
    let Running { child, lines } = &mut running;
    *lines =
        BufReader::new(Command::new("true").stdout(Stdio::piped()).spawn().unwrap().stdout.unwrap()).lines();
    assert!(child.wait().unwrap().success());
}

#[test]
fn impossible_numbers_are_wrong_usage() {
    for (option, value) in [("--interval", "0.01"), ("--interval", "soon"), ("--count", "0")] {
        let mut command = top();
        command.args([option, value]);
        assert_says(
            &wrong_usage(command),
            &[&format!("'{value}' for '{option} <"), "(see bareblk top --help)"],
        );
    }
}
