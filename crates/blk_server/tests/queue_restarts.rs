//! A front-end that restarts its queue again and again, with bad requests in the ring: logs stay short.
//!
//! In a program of its own because it counts the lines that the whole process logs. Not here: bad requests
//! without restarts (`rapid_fire.rs`).
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod rig;

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

use rig::raw_guest::{raw_guest, table};
use rig::{MIB, Options, Rig, code, eventually, vring_state};

/// Five per disk and ten seconds are allowed; this leaves room for a very slow machine.
const FEW_LINES: usize = 20;
const RESTARTS: u16 = 200;
/// In the ring at each start.
const BAD_REQUESTS: u16 = 5;

/// Lines logged.
static LINES: AtomicUsize = AtomicUsize::new(0);

struct CountLines;

impl Write for CountLines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LINES.fetch_add(bytes.iter().filter(|byte| **byte == b'\n').count(), Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn queue_restarted_200_times_over_bad_requests_logs_a_few_lines() {
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(|| CountLines)
        .init();
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
    let lines = LINES.load(Ordering::Relaxed);
    assert!((1..=FEW_LINES).contains(&lines), "{lines} lines");
}
