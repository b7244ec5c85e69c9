//! `bareblk top` with fake servers: they are silent, answer nonsense, or send names with terminal commands in them.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use serde_json::{Value, json};

use crate::rig::{Place, assert_says, output, refusal, top};

/// A fake server that sends our greeting and then `answer`'s result for each line; after `None` it never answers.
pub struct FakeServer {
    pub place: Place,
}

impl FakeServer {
    pub fn start(answer: impl Fn(&Value) -> Option<String> + Send + Clone + 'static) -> Self {
        let place = Place::new();
        let listener = UnixListener::bind(place.socket("fake.sock")).unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let answer = answer.clone();
                thread::spawn(move || serve(stream, &answer));
            }
        });
        Self { place }
    }

    pub fn control(&self) -> PathBuf {
        self.place.socket("fake.sock")
    }
}

fn serve(mut stream: UnixStream, answer: &dyn Fn(&Value) -> Option<String>) {
    let _ = stream.write_all(b"{\"bareblk\":\"9.9\\u001b[31m\",\"protocol\":1}\n");
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    while let Some(Ok(line)) = lines.next() {
        let Some(answer) = answer(&serde_json::from_str(&line).unwrap()) else { continue };
        if stream.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// The answer `ok` to any request.
pub fn ok(request: &Value, ok: &Value) -> Option<String> {
    Some(format!("{}\n", json!({"id": request["id"], "ok": ok})))
}

pub fn evil_answer() -> Value {
    let evil = "\u{1b}[2J\u{1b}]0;gotcha\u{7}\r\n\u{9b}31m\u{202e}x";
    let queue = json!({"queue": 65535, "reads": u64::MAX, "read_bytes": u64::MAX, "worker_ns": u64::MAX, "in_flight": u64::MAX});
    let latency = json!({evil: {"max_ns": u64::MAX, "buckets": [[u64::MAX, u64::MAX], [0, 1]]}});
    let disk = json!({"name": evil, "image": evil, "held": u64::MAX, "size_bytes": u64::MAX, "queues": [queue, queue], "latency": latency});
    json!({"at_ns": u64::MAX, "disks": [disk, {}, {"name": "ü".repeat(3000)}], "workers": [{}]})
}

fn lines(control: &Path, options: &[&str]) -> Command {
    let mut command = top();
    command.arg("--control").arg(control).args(["--interval", "0.1"]).args(options);
    command
}

fn json_lines(control: &Path, count: &str) -> Vec<Value> {
    let text = output(lines(control, &["--json", "--count", count]));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn socket_that_never_greets_is_an_error() {
    let place = Place::new();
    let _listener = UnixListener::bind(place.socket("silent.sock")).unwrap();
    assert_says(&refusal(lines(&place.socket("silent.sock"), &[])), &["does not greet as a bareblk server"]);
}

#[test]
fn server_that_never_answers_counts_as_gone() {
    let server = FakeServer::start(|_| None);
    let lines = json_lines(&server.control(), "1");
    assert_says(lines[0]["error"].as_str().unwrap(), &["does not answer"]);
}

#[test]
fn wrong_answers_are_told_and_the_server_is_asked_again() {
    for (answer, told) in [
        ("{}\n", "neither `ok` nor `error`"),
        ("garbage\n", "cannot read the answer"),
        ("{\"id\":1,\"ok\":{\"disks\":7}}\n", "cannot read the server's answer to `stats`"),
        ("{\"id\":1,\"error\":{\"kind\":\"failed\",\"message\":\"no\\u001b[2J\"}}\n", "no\\u{1b}[2J"),
        ("\u{0}", "does not answer"),
    ] {
        let server = FakeServer::start(move |_| Some(answer.to_owned()));
        let count = if answer.ends_with('\n') { 3 } else { 1 };
        let lines = json_lines(&server.control(), &count.to_string());
        assert_eq!(lines.len(), count);
        lines.iter().for_each(|line| assert_says(line["error"].as_str().unwrap(), &[told]));
    }
}

#[test]
fn names_and_numbers_of_a_hostile_server_do_no_harm_to_the_reader() {
    let server = FakeServer::start(|request| ok(request, &evil_answer()));
    for options in [&["--count", "2"][..], &["--count", "2", "--json"]] {
        let text = output(lines(&server.control(), options));
        assert!(!text.contains(['\u{1b}', '\u{7}', '\r', '\u{9b}', '\u{202e}']), "{text:?}");
        assert!(text.contains("gotcha"), "{text}");
    }
}

/// Server versions before the histograms refuse the field by name, and have no limits.
#[test]
fn older_server_is_asked_in_its_own_words() {
    let server = FakeServer::start(|request| {
        if request.as_object().unwrap().len() == 2 && request["do"] == "stats" {
            return ok(request, &json!({"at_ns": 1, "disks": [{"name": "old"}]}));
        }
        Some(format!(
            "{}\n",
            json!({"id": request["id"], "error": {"kind": "bad-request", "message": "unknown field"}})
        ))
    });
    let lines = json_lines(&server.control(), "2");
    assert_eq!(lines[1]["disks"][0]["name"], "old", "{lines:?}");
    assert_eq!(lines[1]["disks"][0]["latency"], Value::Null);
}

#[test]
fn newer_server_is_asked_for_histograms_and_limits() {
    let server = FakeServer::start(|request| match request["do"].as_str() {
        Some("limit") => {
            ok(request, &json!({"groups": [{"group": "g", "limits": [{"limit": "iops", "rate": 10}]}]}))
        }
        _ => {
            let count = request["id"].as_u64().unwrap();
            let latency = json!({"read": {"max_ns": 900, "buckets": [[1000, count]]}});
            let disk = json!({"name": "new", "latency": latency, "throttling": {"group": "g"}});
            ok(request, &json!({"disks": [disk], "asked": request["histograms"]}))
        }
    });
    let lines = json_lines(&server.control(), "2");
    assert_eq!(lines[1]["disks"][0]["latency"]["p99_ns"], 900, "{lines:?}");
    assert_eq!(lines[1]["limits"][0]["name"], "g");
}
