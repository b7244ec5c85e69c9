//! An idle server with started queues sleeps: none of its threads wakes up.
//!
//! The test runs in its own program, so that it counts no other test's server.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::time::Duration;

use blk_server::{Balance, DiskLimits};

use crate::rig::raw_guest::connected;
use crate::rig::rest::{come_to_rest, status_kib, switches};
use crate::rig::{Options, Rig, feature};

/// The time in which no thread may wake up.
const WATCH: Duration = Duration::from_secs(10);

/// Starts a server with these options, a front-end and guests with started queues, and watches it while idle.
fn watch_idle(options: Options, limits: &DiskLimits, threads_at_least: usize) {
    let rig = Rig::start(options);
    rig.running().limit_disk("test0", limits.clone()).unwrap();
    let front_end = connected(&rig, feature::USUAL);
    let mut guests: Vec<_> = (0..4).map(|i| front_end.start_queue(i, 256, feature::USUAL)).collect();
    assert!(guests.iter_mut().all(|guest| guest.read(0, 4096).status == Some(0)));
    let settled = come_to_rest();
    assert!(settled, "the threads never come to rest");
    let before = switches();
    std::thread::sleep(WATCH);
    let after = switches();
    println!("resident memory: {} KiB, front-end's memory included", status_kib("VmRSS:"));
    assert!(before.len() >= threads_at_least, "{threads_at_least} threads are expected: {before:?}");
    assert_eq!(after, before);
    assert!(guests.iter_mut().all(|guest| guest.read(0, 4096).status == Some(0)));
}

/// The cases run one after the other, because each counts all threads of this process.
#[test]
fn idle_server_with_four_started_queues_wakes_up_no_thread_balanced_limited_or_not() {
    let _alone = crate::alone();
    // The threads are a worker, the acceptor and a session.
    let mut limits = DiskLimits::default();
    watch_idle(Options::default(), &limits, 3);
    // The threads are two workers, the acceptor, a session and the balancer.
    watch_idle(Options { workers: 2, balance: Balance::Auto, ..Options::default() }, &limits, 5);
    // Limits that the guests have waited for.
    limits.own.set("iops", Some(2));
    watch_idle(Options::default(), &limits, 3);
}
