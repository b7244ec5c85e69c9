//! The cost of a request in the rings alone: both halves, and the device's share, for split and packed rings,
//! each also with an in-flight log.
//!
//! A request is three buffers in an indirect table (header, data, status), as a block driver sends it;
//! batches of 64.
//!
//! `cargo bench -p virtqueue --bench rings` measures time. Instructions of one half, per 64 × 1000 requests:
//! `valgrind --tool=callgrind --toggle-collect='*device_pass*' <bench binary> --callgrind split|packed|split_logged|packed_logged`
//! (`*driver_fills*` and `*driver_reaps*` for the other half)
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use virtqueue::{Chain, DeviceQueue, DriverQueue, LogArea, RingFeatures, RingLayout};

const QUEUE_SIZE: u16 = 256;
const BATCH: u64 = 64;
/// Name, packed, logged.
const FORMATS: [(&str, bool, bool); 4] = [
    ("split", false, false),
    ("packed", true, false),
    ("split_logged", false, true),
    ("packed_logged", true, true),
];
const TABLES: u64 = 1 << 20;
const DATA: u64 = 2 << 20;

struct Bench {
    driver: DriverQueue,
    device: DeviceQueue,
    chain: Chain,
}

impl Bench {
    fn new((_, packed, logged): (&str, bool, bool)) -> Self {
        let memory = |bytes| {
            let region = Region::from_memfd(GuestAddress(0), bytes).unwrap();
            Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap())
        };
        let view = MemoryView::new(memory(16 << 20));
        let layout = RingLayout {
            queue_size: QUEUE_SIZE,
            descriptors: GuestAddress(0),
            avail: GuestAddress(0x1_0000),
            used: GuestAddress(0x2_0000),
        };
        let features = RingFeatures { event_idx: true, indirect: true, packed };
        let driver = DriverQueue::new(&view, layout, features).unwrap();
        let (base, log) = (driver.initial_base(), LogArea::new(memory(1 << 20), 0, QUEUE_SIZE));
        let device = if logged {
            DeviceQueue::with_log(&view, layout, features, base, &log).unwrap()
        } else {
            DeviceQueue::new(&view, layout, features, base).unwrap()
        };
        Self { driver, device, chain: Chain::with_capacity(QUEUE_SIZE) }
    }

    #[inline(never)]
    fn driver_fills(&mut self) -> bool {
        for slot in 0..BATCH {
            let at = DATA + slot * 8192;
            let readable = [GuestRange { addr: at, len_bytes: 16 }];
            let data = GuestRange { addr: at + 4096, len_bytes: 4096 };
            let writable = [data, GuestRange { addr: at + 16, len_bytes: 1 }];
            let table = GuestAddress(TABLES + slot * 64);
            self.driver.add_indirect(&readable, &writable, table, slot).unwrap();
        }
        self.driver.publish();
        self.driver.kick_needed()
    }

    #[inline(never)]
    fn device_pass(&mut self) -> bool {
        self.device.disable_kicks();
        while let Some(tag) = self.device.pop(&mut self.chain).unwrap() {
            black_box(&self.chain);
            self.device.push_used(tag, 4097);
        }
        self.device.publish();
        let notify = self.device.needs_notification();
        black_box(self.device.enable_kicks().unwrap());
        notify
    }

    #[inline(never)]
    fn driver_reaps(&mut self) -> u64 {
        self.driver.disable_interrupts();
        let mut done = 0;
        while let Some(used) = self.driver.pop_used().unwrap() {
            done += u64::from(black_box(used).written_bytes == 4097);
        }
        black_box(self.driver.arm_interrupts().unwrap());
        done
    }

    /// Runs one batch. Returns the time of the device half.
    fn batch(&mut self) -> Duration {
        black_box(self.driver_fills());
        let started = Instant::now();
        black_box(self.device_pass());
        let device = started.elapsed();
        assert_eq!(self.driver_reaps(), BATCH);
        device
    }
}

fn rings(criterion: &mut Criterion) {
    for half in ["both_halves", "device_half"] {
        let mut group = criterion.benchmark_group(half);
        group.throughput(Throughput::Elements(BATCH));
        for format in FORMATS {
            let mut bench = Bench::new(format);
            group.bench_function(format.0, |bencher| {
                bencher.iter_custom(|batches| {
                    let started = Instant::now();
                    let device = (0..batches).map(|_| bench.batch()).sum();
                    if half == "device_half" { device } else { started.elapsed() }
                });
            });
        }
        group.finish();
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--callgrind") {
        let named =
            FORMATS.into_iter().find(|(name, ..)| arguments.get(at + 1).is_some_and(|given| given == name));
        let mut bench = Bench::new(named.unwrap_or(FORMATS[0]));
        (0..1000).for_each(|_| _ = black_box(bench.batch()));
        return;
    }
    let mut criterion = Criterion::default().configure_from_args();
    rings(&mut criterion);
    criterion.final_summary();
}
