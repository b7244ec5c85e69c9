//! What one request costs in the device half: kick, ring, parsing, in-flight slot, status, call; no I/O.
//!
//! A driver fills the ring with reads and kicks; the real worker loop serves them on this thread with an
//! engine that completes at once and moves no data. Only the device half is on the clock.
//!
//! `cargo bench -p blk_server --bench device_half` measures time. Instructions, per batch of 64 × 1000:
//! `valgrind --tool=callgrind --toggle-collect='*InlineWorker*serve*' <bench binary> --callgrind`,
//! and `--packed` behind it for packed rings.
//!
//! Not here: real I/O and a real guest (`cargo xtask demo`).
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::hint::black_box;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blk_server::{DiskConfig, InlineWorker, Wce};
use criterion::{BenchmarkId, Criterion, Throughput};
use disk_image::{HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use io_engine::{EngineConfig, NullEngine};
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::{DriverQueue, RingFeatures, RingLayout};

const QUEUE_SIZE: u16 = 256;
const IMAGE_BYTES: u64 = 64 << 20;
const DATA_BASE: u64 = 16 << 20;
const HEADER_BASE: u64 = 1 << 20;

struct Bench {
    worker: InlineWorker,
    ring: DriverQueue,
    kick: OwnedFd,
    call: OwnedFd,
    view: MemoryView,
    next_sector: u64,
    _image: tempfile::NamedTempFile,
}

impl Bench {
    fn new(packed: bool) -> Self {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(IMAGE_BYTES).unwrap();
        let mut options = ImageOptions::new(image.path());
        options.cache = disk_image::CacheMode::Writeback;
        let disk_image = Image::open(&HostOpener, &options).unwrap();
        let disk = DiskConfig {
            name: "bench".into(),
            image: disk_image,
            serial: "bench".into(),
            queues: 1,
            queue_size: QUEUE_SIZE,
            wce: Wce::Guest,
            engine: None,
            workers: None,
        };
        let region = Region::from_memfd(GuestAddress(0), 128 << 20).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
        let view = MemoryView::new(Arc::clone(&memory));
        let layout = RingLayout {
            queue_size: QUEUE_SIZE,
            descriptors: GuestAddress(0),
            avail: GuestAddress(0x1_0000),
            used: GuestAddress(0x2_0000),
        };
        let features = RingFeatures { event_idx: true, indirect: true, packed };
        let ring = DriverQueue::new(&view, layout, features).unwrap();
        let fd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (kick, call) = (fd(), fd());
        let engine = Box::new(NullEngine::new(&EngineConfig::default()).unwrap());
        let (worker_kick, worker_call) = (kick.try_clone().unwrap(), call.try_clone().unwrap());
        let worker =
            InlineWorker::start(engine, disk, memory, layout, features, worker_kick, worker_call).unwrap();
        Self { worker, ring, kick, call, view, next_sector: 0, _image: image }
    }

    /// Header, 4 KiB of data, status: three descriptors, as Linux sends them without indirect tables.
    fn add(&mut self, slot: u64) {
        let header = HEADER_BASE + slot * 64;
        let mut bytes = [0; 16];
        bytes[8..].copy_from_slice(&self.next_sector.to_le_bytes());
        self.next_sector = (self.next_sector + 8 * 7919) % (IMAGE_BYTES / 512);
        self.view.store(header, &bytes).unwrap();
        let readable = [GuestRange { addr: header, len_bytes: 16 }];
        let data = GuestRange { addr: DATA_BASE + slot * 4096, len_bytes: 4096 };
        let writable = [data, GuestRange { addr: header + 32, len_bytes: 1 }];
        self.ring.add(&readable, &writable, slot).unwrap();
    }

    /// One batch; returns the time of the device half.
    fn batch(&mut self, depth: u64) -> Duration {
        (0..depth).for_each(|slot| self.add(slot));
        self.ring.publish();
        if self.ring.kick_needed() {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        }
        let start = Instant::now();
        self.worker.serve();
        let spent = start.elapsed();
        let mut done = 0;
        while let Some(used) = self.ring.pop_used().unwrap() {
            assert_eq!(black_box(used).written_bytes, 4097);
            done += 1;
        }
        assert_eq!(done, depth);
        assert!(!self.ring.arm_interrupts().unwrap());
        rustix::io::read(&self.call, &mut [0; 8]).unwrap();
        spent
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
