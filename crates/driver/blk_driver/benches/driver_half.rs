//! The driver's cost per request: slot, header, chain, publication, kick, completion; no I/O and no data.
//!
//! A device on the same thread takes each chain and returns it at once, with status OK. `both` is the time of
//! driver and device together; `device_alone` is the time of the device's part of the same pass (with the
//! clock read twice in it). The driver's share is the difference.
//!
//! `cargo bench -p blk_driver --bench driver_half` measures time. Instructions, per batch of 64 × 1000:
//! `valgrind --tool=callgrind --toggle-collect='*driver_pass*' <bench binary> --callgrind`
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use blk_driver::{Buffer, Completion, DeviceEnd, Doorbell, PoolOptions, Queue, Request, Work, alone};
use criterion::{BenchmarkId, Criterion, Throughput};
use guest_mem::{GuestRange, MemoryView, SharedSlice};
use virtqueue::{Chain, DeviceQueue, RingFeatures};

const QUEUE_SIZE: u16 = 256;
const DEPTH: usize = 64;

/// A doorbell without effect: the device runs when it is called.
#[derive(Debug)]
struct Silent;

impl Doorbell for Silent {
    fn ring(&self) {}
}

/// Takes every chain and returns it.
struct NullDevice {
    ring: DeviceQueue,
    chain: Chain,
    /// The queue's private region, for storing status bytes.
    own: SharedSlice<u8>,
    own_addr: u64,
}

impl NullDevice {
    fn new(end: &DeviceEnd) -> Self {
        let view = MemoryView::new(Arc::clone(&end.memory));
        let holds = |addr: u64| {
            view.memory()
                .regions()
                .iter()
                .find(move |r| r.spec().guest_addr.0 <= addr && addr < r.guest_end())
        };
        let spec = *holds(end.layout.descriptors.0).unwrap().spec();
        let own = view.memory().shared_slice(spec.guest_addr, spec.size_bytes as usize).unwrap();
        let ring = end.device().unwrap();
        Self { ring, chain: Chain::with_capacity(QUEUE_SIZE), own, own_addr: spec.guest_addr.0 }
    }

    #[inline(never)]
    fn serve(&mut self) {
        while let Some(tag) = self.ring.pop(&mut self.chain).unwrap() {
            let status_addr = self.chain.writable().last().unwrap().addr;
            self.own.store((status_addr - self.own_addr) as usize, 0, Relaxed);
            self.ring.push_used(tag, self.chain.writable_bytes() as u32);
        }
        self.ring.publish();
        black_box(self.ring.needs_notification());
    }
}

struct Bench {
    queue: Queue,
    device: NullDevice,
    _buffers: Vec<Buffer>,
    ranges: Vec<GuestRange>,
    out: Vec<Completion>,
    next_sector: u64,
}

impl Bench {
    fn new(features: RingFeatures) -> Self {
        let pool = PoolOptions { size_bytes: 16 << 20, huge_pages: false };
        let (queue, pool, end) = alone(QUEUE_SIZE, features, pool, Arc::new(Silent)).unwrap();
        let buffers: Vec<Buffer> = (0..DEPTH).map(|_| pool.take(4096).unwrap()).collect();
        let ranges = buffers.iter().map(Buffer::range).collect();
        let out = vec![Completion::default(); DEPTH];
        Self { queue, device: NullDevice::new(&end), _buffers: buffers, ranges, out, next_sector: 0 }
    }

    /// The driver's first part of a batch: submission.
    #[inline(never)]
    fn driver_pass_push(&mut self, depth: usize) {
        for (token, range) in (0..).zip(&self.ranges[..depth]) {
            self.next_sector = (self.next_sector + 8 * 7919) % (1 << 24);
            let work = Work::Read { sector: self.next_sector, data: std::slice::from_ref(range) };
            self.queue.push(&Request::new(work, token)).unwrap();
        }
        if let Some(kick) = self.queue.prepare_kick() {
            kick.notify();
        }
    }

    /// The second part: completions.
    #[inline(never)]
    fn driver_pass_complete(&mut self, depth: usize) {
        let taken = self.queue.completions(&mut self.out).unwrap();
        assert_eq!(taken, depth);
        black_box(&self.out);
    }

    fn batch(&mut self, depth: usize) {
        self.driver_pass_push(depth);
        self.device.serve();
        self.driver_pass_complete(depth);
    }

    /// Runs one batch; returns the time of the device's part.
    fn device_time(&mut self, depth: usize) -> Duration {
        self.driver_pass_push(depth);
        let start = Instant::now();
        self.device.serve();
        let spent = start.elapsed();
        self.driver_pass_complete(depth);
        spent
    }
}

fn features(name: &str) -> RingFeatures {
    let indirect = !name.contains("direct_only");
    RingFeatures { event_idx: true, indirect, packed: name.contains("packed") }
}

fn driver_half(criterion: &mut Criterion) {
    for ring in ["split", "split_direct_only", "packed"] {
        let mut group = criterion.benchmark_group(format!("driver_half_4k_read_{ring}"));
        for depth in [1, DEPTH] {
            let mut bench = Bench::new(features(ring));
            group.throughput(Throughput::Elements(depth as u64));
            group.bench_with_input(BenchmarkId::new("both", depth), &depth, |bencher, &depth| {
                bencher.iter(|| bench.batch(depth));
            });
            group.bench_with_input(BenchmarkId::new("device_alone", depth), &depth, |bencher, &depth| {
                bencher.iter_custom(|batches| (0..batches).map(|_| bench.device_time(depth)).sum());
            });
        }
        group.finish();
    }
}

fn main() {
    if std::env::args().any(|arg| arg == "--callgrind") {
        let mut bench = Bench::new(features("split"));
        (0..1000).for_each(|_| bench.batch(DEPTH));
        return;
    }
    let mut criterion = Criterion::default().configure_from_args();
    driver_half(&mut criterion);
    criterion.final_summary();
}
