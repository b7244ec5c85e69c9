//! A warm queue does not allocate: requests of every kind run repeatedly under a counting allocator.
#![allow(missing_docs, clippy::unwrap_used)]

use std::time::{Duration, Instant};

use blk_driver::{Completion, DeviceEnd, Durability, Queue, Request, Work};
use guest_mem::{GuestRange, MemoryView};
use virtio_blk::Segment;
use virtqueue::{Chain, DeviceQueue, RingFeatures};

use crate::rig::{FULL, LONG, PLAIN, Rig, rig};

/// Answers all requests, also without allocating.
fn serve(view: &MemoryView, ring: &mut DeviceQueue, chain: &mut Chain, end: &DeviceEnd) {
    while let Some(tag) = ring.pop(chain).unwrap() {
        view.store(chain.writable().last().unwrap().addr, &[0]).unwrap();
        ring.push_used(tag, 1);
    }
    ring.publish();
    if ring.needs_notification() {
        blk_driver::Doorbell::ring(&*end.call);
    }
}

/// Pushes one request of each kind, with a deadline; one is cancelled.
fn push_all(queue: &mut Queue, data: &[GuestRange], segments: &[Segment]) {
    let deadline = Some(Instant::now() + LONG);
    let works = [
        Work::Read { sector: 0, data },
        Work::Write { sector: 0, data: &data[..1], durability: Durability::Cached },
        Work::Write { sector: 0, data, durability: Durability::Durable },
        Work::Flush,
        Work::Discard { segments },
        Work::WriteZeroes { segments },
        Work::GetId { data: data[0] },
        Work::Flush,
    ];
    for (token, work) in (0..).zip(works) {
        queue.push(&Request { work, token, deadline }).unwrap();
    }
    queue.submit();
    assert!(queue.cancel(7));
}

/// Completions of [`push_all`]: one for each request, and the return of the cancelled request.
const ENDINGS: usize = 9;

fn allocations_of_a_warm_queue(features: RingFeatures) -> u64 {
    let Rig { mut queue, mut device, buffer, .. } = rig(64, features);
    let mut chain = Chain::with_capacity(64);
    let data: Vec<_> =
        (0..6).map(|at| GuestRange { addr: buffer.range().addr + at * 512, len_bytes: 512 }).collect();
    let segments = [Segment { sector: 0, sectors: 8, unmap: false }; 16];
    let mut out = [Completion::default(); 4];
    let mut round = || {
        push_all(&mut queue, &data, &segments);
        let mut ended = 0;
        while ended < ENDINGS {
            serve(&device.view, &mut device.ring, &mut chain, &device.end);
            ended += queue.wait(&mut out, Duration::from_millis(1)).unwrap();
        }
        assert_eq!(ended, ENDINGS);
    };
    // Slots are reused last in, first out, but not in the same order in each round.
    (0..20).for_each(|_| round());
    allocation_counter::measure(|| (0..100).for_each(|_| round())).count_total
}

#[test]
fn warm_queue_with_tables_does_not_allocate() {
    assert_eq!(allocations_of_a_warm_queue(FULL), 0);
}

#[test]
fn warm_queue_without_tables_does_not_allocate() {
    assert_eq!(allocations_of_a_warm_queue(PLAIN), 0);
}

#[test]
fn warm_packed_queue_does_not_allocate() {
    assert_eq!(allocations_of_a_warm_queue(RingFeatures { packed: true, ..FULL }), 0);
}

#[test]
fn counting_allocator_counts() {
    assert_eq!(allocation_counter::measure(|| drop(std::hint::black_box(Box::new(7_u64)))).count_total, 1);
}
