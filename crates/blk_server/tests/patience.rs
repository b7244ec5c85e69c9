//! How workers wait and when they call: busy polling, interrupt coalescing.
//!
//! Not here: how long any of it takes; the benchmarks measure that.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod rig;

use std::time::Duration;

use blk_server::{BUSY_POLL, Coalescing, QueueCounters};
use io_engine::{Fault, When};
use rig::passed::{add_transfer, faulty, let_go, serves, take_signals};
use rig::raw_guest::PLAIN;
use rig::{MIB, Options, Rig, eventually, feature, kind, ready};

fn counters(rig: &Rig) -> QueueCounters {
    rig.server.as_ref().unwrap().report().disks[0].queues[0].counters
}

fn sleeps(rig: &Rig) -> u64 {
    rig.server.as_ref().unwrap().report().workers[0].counters.sleeps
}

#[test]
fn worker_that_polls_busily_needs_no_kicks_and_never_sleeps_while_a_queue_runs() {
    let rig = Rig::start(Options { poll: BUSY_POLL, ..Options::default() });
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    assert!(serves(&mut guest));
    let (kicks, slept) = (counters(&rig).kicks, sleeps(&rig));
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        assert!(serves(&mut guest));
    }
    assert_eq!((counters(&rig).kicks, sleeps(&rig)), (kicks, slept));
    front_end.stop_queue(0);
    assert!(eventually(|| sleeps(&rig) > slept), "a worker without queues goes on polling");
}

fn coalescing(count: u32) -> Option<Coalescing> {
    Some(Coalescing::new(count, Duration::from_millis(10)).unwrap())
}

#[test]
fn interrupt_comes_in_time_although_too_few_requests_complete() {
    let (options, handle) = faulty();
    let rig = Rig::start(Options { coalescing: coalescing(64), ..options });
    let (_front_end, mut guest) = ready(&rig, PLAIN);
    // One request stays in flight, so that what completes might wait for it.
    handle.inject(When::Always, Fault::Hold, 1);
    add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| handle.held() == 1));
    for sector in 1..4 {
        let pending = add_transfer(&mut guest, kind::IN, sector * 8, 9 * MIB, 4096);
        guest.submit();
        let used = guest.next_used().expect("the interrupt never came");
        assert_eq!((used.token, pending.status(&guest)), (pending.token, 0));
    }
    let_go(&handle);
    assert!(guest.next_used().is_some());
}

#[test]
fn requests_that_complete_together_are_all_told_of() {
    let rig = Rig::start(Options { coalescing: coalescing(1024), ..Options::buffered() });
    let (_front_end, mut guest) = ready(&rig, PLAIN);
    take_signals(&guest.call);
    for n in 0..32 {
        add_transfer(&mut guest, kind::OUT, n * 8, 8 * MIB + n * 4096, 4096);
    }
    guest.submit();
    assert!((0..32).all(|_| guest.next_used().is_some()));
    assert!(serves(&mut guest));
    assert!(eventually(|| counters(&rig).writes == 33));
}
