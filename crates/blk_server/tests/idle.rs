//! A server with started queues and nothing to do sleeps: no thread of it wakes up.
//!
//! In a program of its own, so that no other test's server is counted.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod rig;

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use rig::raw_guest::connected;
use rig::{Options, Rig, eventually, feature};

/// How long nothing may happen.
const WATCH: Duration = Duration::from_secs(10);
/// Polling ends, and threads settle, within this.
const SETTLE: Duration = Duration::from_millis(500);

/// The server's threads, by id, and how often each was put to sleep or pushed aside.
fn switches() -> BTreeMap<String, (String, u64)> {
    let task = |entry: fs::DirEntry| {
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let name = fs::read_to_string(entry.path().join("comm")).ok()?.trim().to_owned();
        let counts = status.lines().filter(|line| line.contains("ctxt_switches"));
        let counts = counts.filter_map(|line| line.split_whitespace().last()?.parse::<u64>().ok());
        let id = entry.file_name().into_string().ok()?;
        name.starts_with("bareblk-").then(|| (id, (name, counts.sum())))
    };
    fs::read_dir("/proc/self/task").unwrap().filter_map(|entry| task(entry.unwrap())).collect()
}

fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn idle_server_with_four_started_queues_wakes_up_no_thread() {
    let rig = Rig::start(Options::default());
    let front_end = connected(&rig, feature::USUAL);
    let mut guests: Vec<_> = (0..4).map(|i| front_end.start_queue(i, 256, feature::USUAL)).collect();
    assert!(guests.iter_mut().all(|guest| guest.read(0, 4096).status == Some(0)));
    let settled = eventually(|| {
        let before = switches();
        std::thread::sleep(SETTLE);
        switches() == before
    });
    assert!(settled, "the threads never come to rest");
    let before = switches();
    std::thread::sleep(WATCH);
    let after = switches();
    println!("resident memory: {} KiB, front-end's memory included", resident_kib());
    assert!(before.len() >= 3, "worker, acceptor and session are expected: {before:?}");
    assert_eq!(after, before);
    assert!(guests.iter_mut().all(|guest| guest.read(0, 4096).status == Some(0)));
}
