//! Every queue size and depth, split and packed, with and without tables: every pushed request comes back.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use blk_driver::{PushError, Request, Work};
use virtqueue::RingFeatures;

use crate::rig::{FULL, PLAIN, Rig, rig};

/// Fills the queue to `depth` and empties it, often enough for the ring's indices to wrap.
fn pass_around(rig: &mut Rig, depth: usize) {
    let data = [rig.data(512)];
    let rounds = 3 * usize::from(rig.queue.queue_size()).div_ceil(depth) + 1;
    for round in 0..rounds as u64 {
        for at in 0..depth as u64 {
            rig.push(Work::Read { sector: at, data: &data }, round << 32 | at);
        }
        rig.queue.submit();
        assert_eq!(rig.device.serve(), depth);
        let tokens: Vec<_> = rig.completions().iter().map(|c| c.token & 0xffff_ffff).collect();
        assert_eq!(tokens, (0..depth as u64).collect::<Vec<_>>());
    }
    assert_eq!(rig.queue.in_flight(), 0);
}

/// Depths from 1 to the maximum, in steps that include both.
fn all_depths(queue_size: u16, features: RingFeatures) {
    let mut rig = rig(queue_size, features);
    let most = rig.queue.room(1);
    let expected = if features.indirect { usize::from(queue_size) } else { usize::from(queue_size) / 3 };
    assert_eq!(most, expected);
    let step = (most / 7).max(1);
    (1..=most).step_by(step).chain([most]).filter(|&depth| depth > 0).for_each(|depth| {
        pass_around(&mut rig, depth);
    });
}

fn all_sizes(features: RingFeatures) {
    (1..=10).for_each(|shift| all_depths(1 << shift, features));
}

#[test]
fn split_ring_with_tables_carries_as_many_requests_as_it_has_entries() {
    all_sizes(FULL);
}

#[test]
fn split_ring_without_tables_carries_a_third() {
    all_sizes(PLAIN);
}

#[test]
fn packed_ring_with_tables_carries_as_many_requests_as_it_has_entries() {
    all_sizes(RingFeatures { packed: true, ..FULL });
}

#[test]
fn packed_ring_without_tables_carries_a_third() {
    all_sizes(RingFeatures { packed: true, ..PLAIN });
}

#[test]
fn ring_of_two_without_tables_takes_a_flush_and_says_why_it_takes_no_read() {
    let mut rig = rig(2, PLAIN);
    let data = [rig.data(512)];
    let refused = rig.queue.push(&Request::new(Work::Read { sector: 0, data: &data }, 1)).unwrap_err();
    assert!(matches!(refused, PushError::Ring(_)));
    assert_eq!(rig.queue.room(1), 0);
    rig.push(Work::Flush, 2);
    rig.queue.submit();
    rig.device.serve();
    assert_eq!(rig.results(), [(2, Ok(()))]);
}

#[test]
fn queue_size_that_is_no_power_of_two_makes_no_queue() {
    let bell = std::sync::Arc::new(blk_driver::EventFd::new().unwrap());
    let pool = blk_driver::PoolOptions { size_bytes: 4096, huge_pages: false };
    let refused = blk_driver::alone(100, PLAIN, pool, bell).unwrap_err();
    assert!(refused.to_string().contains("100"), "{refused}");
}
