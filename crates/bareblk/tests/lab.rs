//! `bareblk lab` as a process: what it prints, what it refuses, what it leaves behind.
//!
//! Not here: what is in the report (`lab`'s own tests).
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod rig;

use std::path::Path;
use std::process::{Command, Stdio};

use rig::{Place, assert_says, bareblk, eventually, output, refusal, wrong_usage};
use rustix::process::{Pid, Signal, kill_process};

fn run_aio(out: &Path) -> Command {
    let mut command = bareblk();
    command.args(["lab", "run", "aio", "--quick", "--out"]).arg(out);
    command
}

fn entries(folder: &Path) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

#[test]
fn list_names_each_experiment_with_its_question() {
    let mut command = bareblk();
    command.args(["lab", "list"]);
    assert_says(&output(command), &["aio", "native speed?", "2008"]);
}

#[test]
fn unknown_experiment_is_refused_with_the_known_ones() {
    let place = Place::new();
    let mut command = bareblk();
    command.args(["lab", "run", "nonsense", "--out"]).arg(place.path("out"));
    assert_says(&refusal(command), &["'nonsense' is unknown", "aio"]);
    assert!(!place.path("out").exists());
}

#[test]
fn folder_for_results_that_cannot_be_made_is_named() {
    // Nobody can make a folder in a file, root included.
    let place = Place::new();
    let file = place.image("file", 512);
    assert_says(&refusal(run_aio(&file.join("out"))), &["file/out", "--out", "Not a directory"]);
}

#[test]
fn missing_storage_is_named_and_nothing_is_left() {
    let place = Place::new();
    let mut command = run_aio(&place.path("out"));
    command.arg("--storage").arg(place.path("none"));
    assert_says(&refusal(command), &["none", "--storage", "No such file"]);
    assert!(!place.path("out").exists());
}

#[test]
fn rounds_and_seconds_outside_their_limits_are_refused() {
    let place = Place::new();
    let mut command = run_aio(&place.path("out"));
    command.args(["--rounds", "0"]);
    assert_says(&wrong_usage(command), &["--rounds", "0"]);
    let mut command = run_aio(&place.path("out"));
    command.args(["--seconds", "1e9"]);
    assert_says(&wrong_usage(command), &["--seconds", "0.001 to 3600"]);
}

#[test]
fn short_run_prints_a_table_and_where_the_report_is() {
    let place = Place::new();
    let mut command = run_aio(&place.path("out"));
    command.args(["--rounds", "1", "--seconds", "0.002"]);
    let text = output(command);
    assert_says(&text, &["bare metal, O_DIRECT", "cache=none, io_uring", "report: ", "report.html"]);
    assert_eq!(entries(&place.path("out")), 2);
}

fn interrupted_while(place: &Place, is_so: impl Fn(&Path) -> bool) {
    let out = place.path("out");
    let mut command = run_aio(&out);
    command.args(["--rounds", "1000"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    eventually("it runs", || is_so(&out).then_some(()));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(
        (ended.status.code(), said.as_str()),
        (Some(1), "bareblk: interrupted; nothing was written\n")
    );
    assert!(ended.stdout.is_empty());
    assert!(!out.exists(), "{} entries are left", entries(&out));
}

/// The test file's size so far.
fn filled_bytes(out: &Path) -> u64 {
    let find = |folder: &Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).find(|path| path.to_string_lossy().contains(".bareblk-lab-"))
    };
    let file = find(out).and_then(|scratch| find(&scratch)).map(|folder| folder.join("disk.raw"));
    file.and_then(|file| std::fs::metadata(file).ok()).map_or(0, |metadata| metadata.len())
}

#[test]
fn interrupt_while_the_file_is_filled_leaves_nothing() {
    interrupted_while(&Place::new(), |out| filled_bytes(out) > 0);
}

#[test]
fn interrupt_while_it_measures_leaves_nothing() {
    // fio's report, or a client's ring, exists only between the samples' start and end: a full file is enough.
    interrupted_while(&Place::new(), |out| filled_bytes(out) == 256 << 20);
}
