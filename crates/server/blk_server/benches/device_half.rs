//! Measures one request in the device half: kick, ring, parsing, in-flight slot, status, call; no I/O.
//!
//! A driver fills the ring with reads and kicks; the real worker loop serves them on this thread with an engine
//! that completes at once and moves no data. Only the device half is timed.
//!
//! `cargo bench -p blk_server --bench device_half` measures time. Instructions, per batch of 64 × 1000:
//! `valgrind --tool=callgrind --toggle-collect='*InlineWorker*serve*' <bench binary> --callgrind`,
//! and `--packed` behind it for packed rings.
//!
//! `cargo bench -p blk_server --bench device_half -- --workers` compares two workers with one, in turns. Each worker has
//! its own thread, disk and queue; both queues are in the memory of one guest. The drivers cost the workers nothing,
//! because a thread that refills its ring is not on the clock. It needs two idle cores.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_precision_loss)]

use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use guest_mem::{GuestAddress, GuestMemory, Region};
use io_engine::{EngineConfig, NullEngine};
use rig::{BLOCK_BYTES, DATA_BASE, Rig, guest};

mod rig;

const IMAGE_BYTES: u64 = 64 << 20;
const MEMORY_BYTES: u64 = 128 << 20;
const DEPTH: u64 = 64;
const WARM_UP_BATCHES: u64 = 1_000;
const PACE_BATCHES: u64 = 40_000;
const ROUNDS: usize = 30;
/// Of 30 rounds, the 10th smallest and the 10th largest.
const LOWER: usize = 9;

struct Bench {
    rig: Rig,
    data_base: u64,
    next_sector: u64,
    _image: tempfile::NamedTempFile,
}

impl Bench {
    fn new(packed: bool) -> Self {
        Self::at(0, memory(1), packed)
    }

    /// In the part of the memory that begins at `base`.
    fn at(base: u64, memory: Arc<GuestMemory>, packed: bool) -> Self {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(IMAGE_BYTES).unwrap();
        let engine = Box::new(NullEngine::new(&EngineConfig::default()).unwrap());
        let rig = Rig::new(base, engine, image.path(), memory, packed);
        Self { rig, data_base: base + DATA_BASE, next_sector: 0, _image: image }
    }

    /// Runs one batch. Returns the time of the device half.
    fn batch(&mut self, depth: u64) -> Duration {
        for slot in 0..depth {
            self.rig.add(slot, virtio_blk::kind::IN, self.next_sector, self.data_base + slot * BLOCK_BYTES);
            self.next_sector = (self.next_sector + 8 * 7919) % (IMAGE_BYTES / 512);
        }
        self.rig.serve(depth)
    }
}

/// The memory of a guest with this many workers.
fn memory(workers: u64) -> Arc<GuestMemory> {
    guest(Region::from_memfd(GuestAddress(0), workers * MEMORY_BYTES).unwrap())
}

/// Requests per second of each of `workers` workers at the same time, while the device half runs.
fn paces(workers: u64, packed: bool) -> Vec<f64> {
    let (memory, start) = (memory(workers), Barrier::new(workers as usize));
    let pace = |worker| {
        let mut bench = Bench::at(worker * MEMORY_BYTES, Arc::clone(&memory), packed);
        (0..WARM_UP_BATCHES).for_each(|_| _ = bench.batch(DEPTH));
        start.wait();
        let spent: Duration = (0..PACE_BATCHES).map(|_| bench.batch(DEPTH)).sum();
        (PACE_BATCHES * DEPTH) as f64 / spent.as_secs_f64()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|worker| scope.spawn(move || pace(worker))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Two workers relative to one: the median of the rounds' ratios, and the interval that has it in 95 % of all runs.
fn two_workers(packed: bool) {
    let mut ratios: Vec<f64> =
        (0..ROUNDS).map(|_| paces(2, packed).iter().sum::<f64>() / paces(1, packed)[0]).collect();
    ratios.sort_by(f64::total_cmp);
    let median = f64::midpoint(ratios[ROUNDS / 2 - 1], ratios[ROUNDS / 2]);
    let ring = if packed { "packed" } else { "split" };
    println!(
        "{ring}: two workers serve {median:.3} ({:.3}-{:.3}) times the requests of one, depth {DEPTH}, {ROUNDS} rounds",
        ratios[LOWER],
        ratios[ROUNDS - 1 - LOWER]
    );
}

fn device_half(criterion: &mut Criterion) {
    for (name, packed) in [("device_half_4k_read", false), ("device_half_4k_read_packed", true)] {
        let mut group = criterion.benchmark_group(name);
        for depth in [1, 8, 64] {
            let mut bench = Bench::new(packed);
            group.throughput(Throughput::Elements(depth));
            group.bench_with_input(BenchmarkId::new("depth", depth), &depth, |bencher, &depth| {
                bencher.iter_custom(|batches| (0..batches).map(|_| bench.batch(depth)).sum());
            });
        }
        group.finish();
    }
}

fn main() {
    let told = |wanted: &str| std::env::args().any(|arg| arg == wanted);
    if told("--callgrind") {
        let mut bench = Bench::new(told("--packed"));
        (0..1000).for_each(|_| _ = black_box(bench.batch(DEPTH)));
        return;
    }
    if told("--workers") {
        [false, true].into_iter().for_each(two_workers);
        return;
    }
    let mut criterion = Criterion::default().configure_from_args();
    device_half(&mut criterion);
    criterion.final_summary();
}
