//! A worker without a server: it serves its queue, counts what it submits, and leaves nothing behind.
//!
//! Not here: the path of a request as such (`requests.rs`).
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod rig;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blk_server::{DEFAULT_POLL, DiskConfig, LoneWorker, Wce};
use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use io_engine::{EngineConfig, IoUringEngine, Recorder};
use rig::{PATIENCE, wait_readable};
use rustix::event::{EventfdFlags, eventfd};
use virtio_blk::{RequestHeader, kind};
use virtqueue::{DriverQueue, RingFeatures, RingLayout};

const DATA_BYTES: u32 = 4096;
const HEADERS: u64 = 0x4_0000;
const STATUSES: u64 = 0x5_0000;
const DATA: u64 = 0x6_0000;

struct Bed {
    worker: LoneWorker,
    ring: DriverQueue,
    view: MemoryView,
    kick: OwnedFd,
    call: OwnedFd,
    recorder: Recorder,
    _file: tempfile::NamedTempFile,
}

fn bed(cache: CacheMode) -> Bed {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let options = ImageOptions { cache, ..ImageOptions::new(file.path()) };
    let image = Image::open(&HostOpener, &options).unwrap();
    let disk = DiskConfig {
        name: "lone".into(),
        image,
        serial: "lone".into(),
        queues: 1,
        queue_size: 64,
        wce: Wce::Guest,
    };
    let region = Region::from_memfd(GuestAddress(0), 4 << 20).unwrap();
    let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
    let view = MemoryView::new(Arc::clone(&memory));
    let layout = RingLayout {
        queue_size: 64,
        descriptors: GuestAddress(0),
        avail: GuestAddress(0x1_0000),
        used: GuestAddress(0x2_0000),
    };
    let features = RingFeatures { event_idx: true, indirect: false, packed: false };
    let ring = DriverQueue::new(&view, layout, features).unwrap();
    let fd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let (kick, call) = (fd(), fd());
    let recorder = Recorder::new();
    let config = EngineConfig { recorder: Some(recorder.clone()), ..EngineConfig::default() };
    let engine = Box::new(IoUringEngine::new(config).unwrap());
    let (its_kick, its_call) = (kick.try_clone().unwrap(), call.try_clone().unwrap());
    let worker =
        LoneWorker::start(engine, disk, memory, layout, features, its_kick, its_call, DEFAULT_POLL).unwrap();
    Bed { worker, ring, view, kick, call, recorder, _file: file }
}

impl Bed {
    /// One batch of writes; returns their status bytes.
    fn write(&mut self, requests: u64) -> Vec<u8> {
        (0..requests).for_each(|slot| self.add(slot));
        self.ring.publish();
        if self.ring.kick_needed() {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        }
        let mut statuses = Vec::new();
        while statuses.len() < usize::try_from(requests).unwrap() {
            match self.ring.pop_used().unwrap() {
                Some(used) => {
                    let mut status = [0xff];
                    self.view.read(STATUSES + used.token, &mut status).unwrap();
                    statuses.push(status[0]);
                }
                None if self.ring.arm_interrupts().unwrap() => {}
                None => {
                    assert!(wait_readable(&self.call, Instant::now() + PATIENCE), "no completion");
                    rustix::io::read(&self.call, &mut [0; 8]).unwrap();
                }
            }
        }
        statuses
    }

    fn add(&mut self, slot: u64) {
        let header = RequestHeader { kind: kind::OUT, sector: slot * u64::from(DATA_BYTES) / 512 };
        self.view.store(HEADERS + slot * 16, &header.to_bytes()).unwrap();
        let readable = [
            GuestRange { addr: HEADERS + slot * 16, len_bytes: 16 },
            GuestRange { addr: DATA + slot * u64::from(DATA_BYTES), len_bytes: DATA_BYTES },
        ];
        self.ring.add(&readable, &[GuestRange { addr: STATUSES + slot, len_bytes: 1 }], slot).unwrap();
    }
}

#[test]
fn every_request_is_answered_and_counted_once() {
    let mut bed = bed(CacheMode::Writeback);
    assert_eq!(bed.write(10), [0; 10]);
    let first = bed.worker.submissions();
    assert_eq!(bed.write(7), [0; 7]);
    let second = bed.worker.submissions().since(first);
    assert_eq!((first.requests, second.requests), (10, 7));
    assert!(second.mean_us().unwrap() > 0.0);
}

#[test]
fn writes_are_durable_from_the_start_where_the_cache_mode_says_so() {
    let dsync = rustix::io::ReadWriteFlags::DSYNC.bits().cast_signed();
    let durable = |cache| {
        let mut bed = bed(cache);
        bed.write(1);
        bed.recorder.records().iter().filter(|record| record.flags & dsync != 0).count()
    };
    assert_eq!((durable(CacheMode::Writethrough), durable(CacheMode::Writeback)), (1, 0));
}

#[test]
fn dropped_worker_ends_its_thread_and_lets_go_of_the_image() {
    let bed = bed(CacheMode::Writeback);
    let path = bed._file.path().to_owned();
    drop(bed.worker);
    let options = ImageOptions { lock_timeout: Duration::ZERO, ..ImageOptions::new(path) };
    let options = ImageOptions { cache: CacheMode::Writeback, ..options };
    assert!(Image::open(&HostOpener, &options).is_ok());
}
