//! A driver and the real worker loop on the same thread, for the benchmarks of the device half.

use std::hint::black_box;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blk_server::{DiskConfig, InlineWorker, Wce};
use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use io_engine::Engine;
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::{DriverQueue, RingFeatures, RingLayout};

const QUEUE_SIZE: u16 = 256;
const HEADER_BASE: u64 = 1 << 20;
/// Where data buffers may lie, up to the end of the memory.
pub const DATA_BASE: u64 = 16 << 20;
pub const BLOCK_BYTES: u64 = 4096;

/// A guest whose memory is this region.
pub fn guest(region: Region) -> Arc<GuestMemory> {
    Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap())
}

pub struct Rig {
    worker: InlineWorker,
    ring: DriverQueue,
    kick: OwnedFd,
    call: OwnedFd,
    view: MemoryView,
    headers: u64,
}

impl Rig {
    /// Rings and headers from `base` on, in memory that other rigs may use too.
    pub fn new(
        base: u64,
        engine: Box<dyn Engine>,
        image: &Path,
        memory: Arc<GuestMemory>,
        packed: bool,
    ) -> Self {
        let mut options = ImageOptions::new(image);
        options.cache = CacheMode::Writeback;
        let disk = DiskConfig {
            name: "bench".into(),
            image: Image::open(&HostOpener, &options).unwrap(),
            serial: "bench".into(),
            queues: 1,
            queue_size: QUEUE_SIZE,
            wce: Wce::Guest,
            engine: None,
            workers: None,
            coalescing: None,
            park: None,
        };
        let view = MemoryView::new(Arc::clone(&memory));
        let layout = RingLayout {
            queue_size: QUEUE_SIZE,
            descriptors: GuestAddress(base),
            avail: GuestAddress(base + 0x1_0000),
            used: GuestAddress(base + 0x2_0000),
        };
        let features = RingFeatures { event_idx: true, indirect: true, packed };
        let ring = DriverQueue::new(&view, layout, features).unwrap();
        let fd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (kick, call) = (fd(), fd());
        let (worker_kick, worker_call) = (kick.try_clone().unwrap(), call.try_clone().unwrap());
        let worker =
            InlineWorker::start(engine, disk, memory, layout, features, worker_kick, worker_call).unwrap();
        Self { worker, ring, kick, call, view, headers: base + HEADER_BASE }
    }

    /// Header, 4 KiB of data, status: three descriptors, as Linux sends them without indirect tables.
    pub fn add(&mut self, slot: u64, kind: u32, sector: u64, data_addr: u64) {
        let header = self.headers + slot * 64;
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        self.view.store(header, &bytes).unwrap();
        let head = GuestRange { addr: header, len_bytes: 16 };
        let data = GuestRange { addr: data_addr, len_bytes: BLOCK_BYTES as u32 };
        let status = GuestRange { addr: header + 32, len_bytes: 1 };
        let added = match kind {
            virtio_blk::kind::OUT => self.ring.add(&[head, data], &[status], slot),
            _ => self.ring.add(&[head], &[data, status], slot),
        };
        added.unwrap();
    }

    /// Lets the device serve everything that was added. Returns the time of the device half.
    pub fn serve(&mut self, requests: u64) -> Duration {
        self.ring.publish();
        if self.ring.kick_needed() {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        }
        let start = Instant::now();
        self.worker.serve();
        let spent = start.elapsed();
        let mut done = 0;
        while let Some(used) = self.ring.pop_used().unwrap() {
            assert!(black_box(used).written_bytes > 0);
            done += 1;
        }
        assert_eq!(done, requests);
        assert!(!self.ring.arm_interrupts().unwrap());
        rustix::io::read(&self.call, &mut [0; 8]).unwrap();
        spent
    }
}
