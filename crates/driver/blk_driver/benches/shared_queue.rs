//! The cost of an uncontended lock: one thread, a plain queue compared with a shared one behind each lock.
//!
//! One pass submits a batch, lets a device on the same thread serve it, and takes the completions; it takes
//! the lock twice. For the cost per request, divide the difference to `queue` by the batch size.
//!
//! `cargo bench -p blk_driver --bench shared_queue`.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::hint::black_box;
use std::sync::Arc;

use blk_driver::{
    Buffer, Completion, Doorbell, KickPolicy, PoolOptions, Queue, Request, SharedQueue, Work, alone,
};
use criterion::{BenchmarkId, Criterion, Throughput};
use guest_mem::{GuestRange, MemoryView};
use lock_api::RawMutex;
use qspinlock::{Api04, StdMutex, TicketLock};
use virtqueue::{Chain, DeviceQueue, RingFeatures};

const QUEUE_SIZE: u16 = 256;
const FEATURES: RingFeatures = RingFeatures { event_idx: true, indirect: true, packed: false };

/// A doorbell without effect: the device runs when it is called.
#[derive(Debug)]
struct Silent;

impl Doorbell for Silent {
    fn ring(&self) {}
}

/// Takes every chain and returns it.
struct NullDevice {
    ring: DeviceQueue,
    view: MemoryView,
    chain: Chain,
}

impl NullDevice {
    fn serve(&mut self) {
        while let Some(tag) = self.ring.pop(&mut self.chain).unwrap() {
            self.view.store(self.chain.writable().last().unwrap().addr, &[0]).unwrap();
            self.ring.push_used(tag, self.chain.writable_bytes() as u32);
        }
        self.ring.publish();
        black_box(self.ring.needs_notification());
    }
}

/// A queue with one owner, or one that several threads could share.
trait Target {
    fn submit(&mut self, requests: &[Request<'_>]);
    fn completions(&mut self, out: &mut [Completion]) -> usize;
}

impl Target for Queue {
    fn submit(&mut self, requests: &[Request<'_>]) {
        requests.iter().for_each(|request| self.push(request).unwrap());
        Queue::submit(self);
    }

    fn completions(&mut self, out: &mut [Completion]) -> usize {
        Queue::completions(self, out).unwrap()
    }
}

impl<L: RawMutex> Target for SharedQueue<L> {
    fn submit(&mut self, requests: &[Request<'_>]) {
        assert_eq!(SharedQueue::submit(self, requests), Ok(requests.len()));
    }

    fn completions(&mut self, out: &mut [Completion]) -> usize {
        SharedQueue::completions(self, out).unwrap()
    }
}

struct Bench<T> {
    target: T,
    device: NullDevice,
    data: [GuestRange; 1],
    _buffer: Buffer,
}

impl<T: Target> Bench<T> {
    fn new(share: impl FnOnce(Queue) -> T) -> Self {
        let pool = PoolOptions { size_bytes: 1 << 20, huge_pages: false };
        let (queue, pool, end) = alone(QUEUE_SIZE, FEATURES, pool, Arc::new(Silent)).unwrap();
        let buffer = pool.take(4096).unwrap();
        let device = NullDevice {
            ring: end.device().unwrap(),
            view: MemoryView::new(Arc::clone(&end.memory)),
            chain: Chain::with_capacity(QUEUE_SIZE),
        };
        Self { target: share(queue), device, data: [buffer.range()], _buffer: buffer }
    }

    fn run(mut self, criterion: &mut Criterion, name: &str) {
        let mut group = criterion.benchmark_group("shared_queue_4k_read");
        for batch in [1_u64, 32] {
            let read = |token| Request::new(Work::Read { sector: 0, data: &self.data }, token);
            let requests: Vec<_> = (0..batch).map(read).collect();
            let mut out = vec![Completion::default(); requests.len()];
            group.throughput(Throughput::Elements(batch));
            group.bench_function(BenchmarkId::new(name, batch), |bencher| {
                bencher.iter(|| {
                    self.target.submit(&requests);
                    self.device.serve();
                    assert_eq!(self.target.completions(&mut out), requests.len());
                });
            });
        }
        group.finish();
    }
}

fn shared<L: RawMutex>(criterion: &mut Criterion, name: &str) {
    Bench::new(|queue| SharedQueue::<L>::new(queue, KickPolicy::Unlocked)).run(criterion, name);
}

fn shared_queue(criterion: &mut Criterion) {
    Bench::new(|queue| queue).run(criterion, "queue");
    shared::<TicketLock>(criterion, "ticket");
    shared::<StdMutex>(criterion, "std");
    shared::<parking_lot::RawMutex>(criterion, "parking_lot");
    shared::<Api04<parking_lot_012::RawMutex>>(criterion, "parking_lot_0.12");
}

criterion::criterion_group!(benches, shared_queue);
criterion::criterion_main!(benches);
