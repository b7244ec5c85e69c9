//! A front-end keeps restarting its queue, with invalid requests in the ring: the log stays short.
//!
//! The test runs in its own program, because it counts the lines that the whole process logs.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use crate::log_lines;
use crate::rig::raw_guest::{raw_guest, table};
use crate::rig::{MIB, Options, Rig, code, eventually, vring_state};

/// The server allows five lines per disk in ten seconds; the rest is for a very slow machine.
const FEW_LINES: usize = 20;
const RESTARTS: u16 = 200;
/// Invalid requests in the ring at each start.
const BAD_REQUESTS: u16 = 5;

#[test]
fn queue_restarted_200_times_over_bad_requests_logs_a_few_lines() {
    let _alone = log_lines::keep_lines();
    let rig = Rig::start(Options::default());
    let (front_end, raw) = raw_guest(&rig);
    raw.set(&[table(4 * MIB, 5)]); // no whole number of descriptors
    (0..256).for_each(|entry| raw.ring.set_avail_entry(entry, 0));
    for restart in 1..=RESTARTS {
        front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 0), &[]);
        raw.ring.set_avail_idx(restart * BAD_REQUESTS);
        front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
        assert!(eventually(|| raw.ring.used_idx() == restart * BAD_REQUESTS));
    }
    let lines = log_lines::counted();
    assert!((1..=FEW_LINES).contains(&lines), "{lines} lines");
}
