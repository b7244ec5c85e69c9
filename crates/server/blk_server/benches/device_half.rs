//! Measures one request in the device half: kick, ring, parsing, in-flight slot, status, call; no I/O.
//!
//! A driver fills the ring with reads and kicks; the real worker loop serves them on this thread with an engine
//! that completes at once and moves no data. Only the device half is timed.
//!
//! `cargo bench -p blk_server --bench device_half` measures time. Instructions, per batch of 64 × 1000:
//! `valgrind --tool=callgrind --toggle-collect='*InlineWorker*serve*' <bench binary> --callgrind`,
//! and `--packed` behind it for packed rings.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use guest_mem::{GuestAddress, Region};
use io_engine::{EngineConfig, NullEngine};
use rig::{BLOCK_BYTES, DATA_BASE, Rig};

mod rig;

const IMAGE_BYTES: u64 = 64 << 20;
const MEMORY_BYTES: u64 = 128 << 20;

struct Bench {
    rig: Rig,
    next_sector: u64,
    _image: tempfile::NamedTempFile,
}

impl Bench {
    fn new(packed: bool) -> Self {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(IMAGE_BYTES).unwrap();
        let memory = Region::from_memfd(GuestAddress(0), MEMORY_BYTES).unwrap();
        let engine = Box::new(NullEngine::new(&EngineConfig::default()).unwrap());
        Self { rig: Rig::new(engine, image.path(), memory, packed), next_sector: 0, _image: image }
    }

    /// Runs one batch. Returns the time of the device half.
    fn batch(&mut self, depth: u64) -> Duration {
        for slot in 0..depth {
            self.rig.add(slot, virtio_blk::kind::IN, self.next_sector, DATA_BASE + slot * BLOCK_BYTES);
            self.next_sector = (self.next_sector + 8 * 7919) % (IMAGE_BYTES / 512);
        }
        self.rig.serve(depth)
    }
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
        (0..1000).for_each(|_| _ = black_box(bench.batch(64)));
        return;
    }
    let mut criterion = Criterion::default().configure_from_args();
    device_half(&mut criterion);
    criterion.final_summary();
}
