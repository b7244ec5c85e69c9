//! A worker without a thread and the drivers of two disks: what one pass takes of each.
//!
//! Not here: the order by itself (`turn.rs`), real engines and front-ends (`tests/`).

use std::sync::mpsc::{channel, sync_channel};
use std::sync::{Mutex, PoisonError};

use disk_image::{CacheMode, HostOpener, Image, ImageOptions, Opener};
use guest_mem::{Budget, GuestAddress, GuestRange, Limits, MemoryView, Region};
use io_engine::{Engine, EngineConfig, NullEngine};
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::{DriverQueue, RingFeatures, RingLayout};

use super::*;
use crate::data_path::disk::session_link::SessionLink;
use crate::data_path::disk::write_cache::Wce;
use crate::data_path::disk::{Disk, DiskConfig};
use crate::data_path::queue::queue_start::QueueStart;
use crate::host::signal::signal;

const QUEUE_SIZE: u16 = 256;
const REQUESTS: u64 = 64;
const RING_BYTES: u64 = 0x4_0000;
const REQUEST_BASE: u64 = 8 << 20;
const FEATURES: RingFeatures = RingFeatures { event_idx: true, indirect: true, packed: false };

fn fd() -> Arc<OwnedFd> {
    Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
}

fn worker() -> (Worker, std::sync::mpsc::Sender<Command>, Arc<OwnedFd>) {
    let engine: Box<dyn Engine> = Box::new(NullEngine::new(&EngineConfig::default()).unwrap());
    let engine = Mutex::new(Some(engine));
    let make = move || Ok(engine.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap());
    let base = EngineSource::new("test", 1024, Box::new(make));
    let ((commands, received), doorbell) = (channel(), fd());
    let worker = Worker::new(WorkerId(0), base, received, Arc::clone(&doorbell), Duration::ZERO);
    (worker.unwrap(), commands, doorbell)
}

fn disk(name: &str, folder: &tempfile::TempDir) -> Arc<Disk> {
    let path = folder.path().join(name);
    let (create_bytes, cache) = (Some(1 << 20), CacheMode::Writeback);
    let options = ImageOptions { create_bytes, cache, ..ImageOptions::new(path) };
    let config = DiskConfig {
        name: name.into(),
        image: Image::open(&HostOpener, &options).unwrap(),
        serial: name.into(),
        queues: 8,
        queue_size: QUEUE_SIZE,
        wce: Wce::Guest,
        engine: None,
        workers: None,
        coalescing: None,
        hold: None,
    };
    let opener: Arc<dyn Opener> = Arc::new(HostOpener);
    Arc::new(Disk::new(config, &opener, &Budget::new(Limits::of_process())).unwrap())
}

fn layout(queue: u64) -> RingLayout {
    let at = |place| GuestAddress(queue * RING_BYTES + place);
    RingLayout { queue_size: QUEUE_SIZE, descriptors: at(0), avail: at(0x1_0000), used: at(0x2_0000) }
}

/// A ring with reads of 512 bytes.
fn driver(view: &MemoryView, queue: u64) -> DriverQueue {
    let mut ring = DriverQueue::new(view, layout(queue), FEATURES).unwrap();
    for request in 0..REQUESTS {
        let header = REQUEST_BASE + (queue * REQUESTS + request) * 1024;
        view.store(header, &[0; 16]).unwrap(); // VIRTIO_BLK_T_IN, sector 0
        let range = |addr, len_bytes| GuestRange { addr, len_bytes };
        let readable = [range(header, 16)];
        ring.add(&readable, &[range(header + 64, 512), range(header + 32, 1)], request).unwrap();
    }
    ring.publish();
    ring
}

fn start(disk: &Arc<Disk>, queue: u64, view: &MemoryView) -> QueueStart {
    QueueStart {
        disk: Arc::clone(disk),
        session: SessionLink::new(0).unwrap(),
        index: 0,
        memory: Arc::clone(view.memory()),
        layout: Some(layout(queue)),
        ring: FEATURES,
        base: 0,
        cache_choice_unknown: false,
        kick: fd(),
        call: Some(fd()),
        err: None,
        meter: Arc::default(),
        log: None,
        leaves_unbegun: false,
    }
}

fn answered(ring: &mut DriverQueue) -> u64 {
    let mut count = 0;
    while ring.pop_used().unwrap().is_some() {
        count += 1;
    }
    count
}

#[test]
fn disk_with_many_full_queues_gets_one_budget_beside_a_disk_with_one() {
    let folder = tempfile::tempdir().unwrap();
    let (busy, neighbour) = (disk("busy", &folder), disk("neighbour", &folder));
    let memory = Region::from_memfd(GuestAddress(0), 16 << 20).unwrap();
    let view = MemoryView::new(Arc::new(GuestMemory::new(vec![Arc::new(memory)]).unwrap()));
    let (mut worker, commands, doorbell) = worker();
    let mut rings: Vec<DriverQueue> = (0..9).map(|queue| driver(&view, queue)).collect();
    let (done, started) = sync_channel(9);
    for queue in 0..9 {
        let disk = if queue < 8 { &busy } else { &neighbour };
        let start = Arc::new(start(disk, queue, &view));
        commands.send(Command::Start(start, done.clone())).unwrap();
    }
    signal(&doorbell);
    worker.sleep();
    worker.pass(Instant::now()); // starts the queues, after it has looked for requests
    assert!((0..9).all(|_| matches!(started.try_recv(), Ok(Some(_)))));

    worker.pass(Instant::now());
    let first: Vec<u64> = rings.iter_mut().map(answered).collect();
    worker.pass(Instant::now());
    let second: Vec<u64> = rings.iter_mut().map(answered).collect();

    // Two queues' batches are a disk's budget; the next two come next.
    assert_eq!(first, [32, 32, 0, 0, 0, 0, 0, 0, 32]);
    assert_eq!(second, [0, 0, 32, 32, 0, 0, 0, 0, 32]);
}
