//! A guest keeps filling its ring with invalid requests: the log stays short, and other queues still work.
//!
//! The test runs in its own program, because it counts the lines that the whole process logs.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::sync::atomic::{AtomicBool, Ordering};

use crate::log_lines;
use crate::rig::raw_guest::{PLAIN, RawGuest, connected, last, readable, table, writable};
use crate::rig::{Options, Rig, header_bytes};

/// The server allows five lines in ten seconds; the rest is for a very slow machine.
const FEW_LINES: usize = 100;

/// Five invalid chains: cut-off header, loop, empty table, unknown type, no status.
fn prepare(raw: &RawGuest) -> [u16; 5] {
    let at = raw.area();
    raw.store(at, &header_bytes(77, 0));
    let chains = [
        readable(at, 15, 1),
        last(at + 0x800, 1),
        readable(at, 16, 2),
        table(at, 0),
        readable(at, 16, 5),
        writable(at + 0x1000, 512, 1),
        writable(at, 0, 7),
        last(at, 0),
    ];
    raw.set(&chains);
    [0, 2, 3, 4, 6]
}

/// Sends invalid requests as fast as they complete until told to stop; returns their number.
fn flood(raw: &mut RawGuest, stop: &AtomicBool) -> u64 {
    let heads = prepare(raw);
    let mut answered = 0;
    while !stop.load(Ordering::Relaxed) {
        heads.iter().for_each(|head| raw.ring.offer(*head));
        raw.guest.kick();
        for _ in heads {
            raw.next_used().expect("an invalid request never comes back");
            answered += 1;
        }
    }
    answered
}

#[test]
fn flood_of_invalid_requests_keeps_the_log_short_and_other_queues_served() {
    let _alone = log_lines::keep_lines();
    let rig = Rig::start(Options::default());
    let front_end = connected(&rig, PLAIN);
    let mut raw = RawGuest::start(&front_end, 0);
    let mut other = front_end.start_queue(1, 256, PLAIN);
    let stop = AtomicBool::new(false);
    let (served, answered) = std::thread::scope(|scope| {
        let flooding = scope.spawn(|| flood(&mut raw, &stop));
        let served = (0..2000).filter(|i| other.write(*i, &[1; 512]).status == Some(0)).count();
        stop.store(true, Ordering::Relaxed);
        (served, flooding.join().unwrap())
    });
    assert_eq!(served, 2000);
    assert!(answered >= 1000, "only {answered} invalid requests");
    let lines = log_lines::counted();
    assert!((1..=FEW_LINES).contains(&lines), "{lines} lines for {answered} invalid requests");
    assert!(raw.works());
}
