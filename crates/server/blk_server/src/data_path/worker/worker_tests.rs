//! Tests a worker that has no thread, with the drivers of its disks: how much a pass takes from each disk, and when the
//! worker sleeps.

#![allow(clippy::cast_possible_truncation)] // the test's own values are small

use std::sync::mpsc::{channel, sync_channel};
use std::sync::{Mutex, PoisonError};

use disk_image::{CacheMode, HostOpener, Image, ImageOptions, Opener};
use guest_mem::{Budget, GuestAddress, GuestRange, Limits, MemoryView, Region};
use io_engine::{Engine, EngineConfig, FakeEngine, FakeHandle, Fault, NullEngine, Verb, When};
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::{DriverQueue, RingFeatures, RingLayout};

use super::*;
use crate::data_path::disk::session_link::SessionLink;
use crate::data_path::disk::write_cache::Wce;
use crate::data_path::disk::{Disk, DiskConfig};
use crate::data_path::queue::queue_start::QueueStart;
use crate::data_path::throttle::disk_throttle::{BucketSet, DiskThrottle};
use crate::data_path::throttle::limits::LimitSettings;
use crate::host::signal::signal;

const QUEUE_SIZE: u16 = 256;
const REQUESTS: u64 = 64;
const RING_BYTES: u64 = 0x4_0000;
const REQUEST_BASE: u64 = 8 << 20;
const FEATURES: RingFeatures = RingFeatures { event_idx: true, indirect: true, packed: false };

fn fd() -> Arc<OwnedFd> {
    Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
}

fn worker(engine: Box<dyn Engine>) -> (Worker, std::sync::mpsc::Sender<Command>, Arc<OwnedFd>) {
    let engine = Mutex::new(Some(engine));
    let make = move || Ok(engine.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap());
    let base = EngineSource::new("test", 1024, Box::new(make));
    let ((commands, received), wakeup) = (channel(), fd());
    let worker = Worker::new(WorkerId(0), base, received, Arc::clone(&wakeup), Duration::ZERO);
    (worker.unwrap(), commands, wakeup)
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
        park: None,
    };
    let opener: Arc<dyn Opener> = Arc::new(HostOpener);
    Arc::new(Disk::new(config, &opener, &Budget::new(Limits::of_process())).unwrap())
}

fn layout(queue: u64) -> RingLayout {
    let at = |place| GuestAddress(queue * RING_BYTES + place);
    RingLayout { queue_size: QUEUE_SIZE, descriptors: at(0), avail: at(0x1_0000), used: at(0x2_0000) }
}

fn memory() -> MemoryView {
    let memory = Region::from_memfd(GuestAddress(0), 16 << 20).unwrap();
    MemoryView::new(Arc::new(GuestMemory::new(vec![Arc::new(memory)]).unwrap()))
}

/// A ring with reads of 512 bytes.
fn driver(view: &MemoryView, queue: u64) -> DriverQueue {
    let mut ring = DriverQueue::new(view, layout(queue), FEATURES).unwrap();
    fill(&mut ring, view, queue);
    ring
}

fn fill(ring: &mut DriverQueue, view: &MemoryView, queue: u64) {
    for request in 0..REQUESTS {
        let header = REQUEST_BASE + (queue * REQUESTS + request) * 1024;
        view.store(header, &[0; 16]).unwrap(); // VIRTIO_BLK_T_IN, sector 0
        let range = |addr, len_bytes| GuestRange { addr, len_bytes };
        let readable = [range(header, 16)];
        ring.add(&readable, &[range(header + 64, 512), range(header + 32, 1)], request).unwrap();
    }
    ring.publish();
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
        meter: disk.totals().start_queue(),
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
    let view = memory();
    let engine = Box::new(NullEngine::new(&EngineConfig::default()).unwrap());
    let (mut worker, commands, wakeup) = worker(engine);
    let mut rings: Vec<DriverQueue> = (0..9).map(|queue| driver(&view, queue)).collect();
    let (done, started) = sync_channel(9);
    for queue in 0..9 {
        let disk = if queue < 8 { &busy } else { &neighbour };
        let start = Arc::new(start(disk, queue, &view));
        commands.send(Command::Start(start, done.clone())).unwrap();
    }
    signal(&wakeup);
    worker.sleep();
    worker.pass(Instant::now()); // this pass starts the queues only after it has looked for requests
    assert!((0..9).all(|_| matches!(started.try_recv(), Ok(Some(_)))));

    worker.pass(Instant::now());
    let first: Vec<u64> = rings.iter_mut().map(answered).collect();
    worker.pass(Instant::now());
    let second: Vec<u64> = rings.iter_mut().map(answered).collect();

    // A disk's budget covers the batches of two queues. The next pass takes from the next two queues.
    assert_eq!(first, [32, 32, 0, 0, 0, 0, 0, 0, 32]);
    assert_eq!(second, [0, 0, 32, 32, 0, 0, 0, 0, 32]);
}

/// A disk whose device holds its reads until the test releases them, on a worker that does not poll.
struct StuckDisk {
    worker: Worker,
    engine: FakeHandle,
    view: MemoryView,
    rings: Vec<DriverQueue>,
    kicks: Vec<Arc<OwnedFd>>,
    _commands: std::sync::mpsc::Sender<Command>,
    _folder: tempfile::TempDir,
}

impl StuckDisk {
    /// Creates the disk with `queues` queues, of which the first `full` have requests.
    fn new(queues: u64, full: u64) -> Self {
        let (folder, view) = (tempfile::tempdir().unwrap(), memory());
        let disk = disk("stuck", &folder);
        let config = EngineConfig { depth: 64, ..EngineConfig::default() };
        let (engine, handle) = FakeEngine::new(config).unwrap();
        handle.inject(When::Verb(Verb::Read), Fault::Stick, 64);
        let (mut worker, commands, wakeup) = worker(Box::new(engine));
        let ring = |queue| DriverQueue::new(&view, layout(queue), FEATURES).unwrap();
        let mut rings: Vec<DriverQueue> = (0..queues).map(ring).collect();
        (0..full).for_each(|queue| fill(&mut rings[queue as usize], &view, queue));
        let (done, _started) = sync_channel(queues as usize);
        let starts = (0..queues).map(|queue| Arc::new(start(&disk, queue, &view)));
        let mut kicks = Vec::new();
        for start in starts {
            kicks.push(Arc::clone(&start.kick));
            commands.send(Command::Start(start, done.clone())).unwrap();
        }
        signal(&wakeup);
        worker.sleep();
        Self { worker, engine: handle, view, rings, kicks, _commands: commands, _folder: folder }
    }

    /// Runs the worker until it sleeps, which must take at most `passes` passes.
    fn runs_until_it_sleeps(&mut self, passes: usize) {
        let sleeps = (0..passes).any(|_| !self.worker.pass(Instant::now()) && !self.worker.arm());
        assert!(sleeps, "the worker still runs after {passes} passes");
    }

    /// Releases the device's requests. The worker must answer all of them.
    fn ends_well(&mut self) {
        self.engine.clear();
        self.engine.release().unwrap();
        let (mut count, all) = (0, self.rings.len() as u64 * REQUESTS);
        for _ in 0..30 {
            self.worker.sleep();
            self.runs_until_it_sleeps(100);
            count += self.rings.iter_mut().map(answered).sum::<u64>();
            if count == all {
                return;
            }
        }
        panic!("{count} of {all} requests are answered");
    }
}

#[test]
fn worker_sleeps_while_a_disk_with_two_full_queues_has_no_room() {
    let mut disk = StuckDisk::new(2, 2);
    disk.runs_until_it_sleeps(100);
    disk.ends_well();
}

#[test]
fn worker_sleeps_while_a_disk_with_three_full_queues_has_no_room() {
    let mut disk = StuckDisk::new(3, 3);
    disk.runs_until_it_sleeps(100);
    disk.ends_well();
}

#[test]
fn worker_sleeps_after_a_kick_for_a_disk_without_room() {
    let mut disk = StuckDisk::new(3, 1);
    disk.runs_until_it_sleeps(100);
    for queue in 1..3 {
        fill(&mut disk.rings[queue as usize], &disk.view, queue);
        signal(&disk.kicks[queue as usize]);
        disk.worker.sleep();
        disk.runs_until_it_sleeps(100);
    }
    disk.ends_well();
}

#[test]
fn queue_that_waits_for_its_limit_lets_the_worker_sleep_and_is_served_when_its_gate_opens() {
    let (folder, view) = (tempfile::tempdir().unwrap(), memory());
    let disk = disk("limited", &folder);
    let mut settings = LimitSettings::default();
    settings.set("iops", Some(300));
    let throttle = DiskThrottle::new(BucketSet::new(settings), None, &Arc::default()).unwrap();
    disk.set_throttle(Some(Arc::new(throttle)));
    let engine = Box::new(NullEngine::new(&EngineConfig::default()).unwrap());
    let (mut worker, commands, wakeup) = worker(engine);
    let mut ring = driver(&view, 0);
    let (done, _started) = sync_channel(1);
    commands.send(Command::Start(Arc::new(start(&disk, 0, &view)), done)).unwrap();
    signal(&wakeup);
    let (mut count, mut sleeps) = (0, 0);
    // The credit is 30 requests.
    while count < REQUESTS {
        worker.sleep();
        sleeps += 1;
        let comes_to_rest = (0..1000).any(|_| !worker.pass(Instant::now()) && !worker.arm());
        count += answered(&mut ring);
        assert!(comes_to_rest && sleeps < 1000, "{count} requests after {sleeps} sleeps");
    }
    assert!(sleeps > 1, "the limit holds");
    // Nothing waits, so no timer is set.
    assert_eq!(worker.timers.sleep_limit(), None);
}

#[test]
fn queue_that_starts_and_stops_again_and_again_while_its_gate_is_shut_leaves_nothing_behind() {
    let (folder, view) = (tempfile::tempdir().unwrap(), memory());
    let disk = disk("limited", &folder);
    let mut settings = LimitSettings::default();
    settings.set("iops", Some(1));
    let throttle = DiskThrottle::new(BucketSet::new(settings), None, &Arc::default()).unwrap();
    throttle.take_over(&[1_000_000, 0, 0, 0, 0, 0]);
    disk.set_throttle(Some(Arc::new(throttle)));
    let engine = Box::new(NullEngine::new(&EngineConfig::default()).unwrap());
    let (mut worker, commands, wakeup) = worker(engine);
    let mut ring = driver(&view, 0);
    for _ in 0..10 {
        let (done, started) = sync_channel(1);
        commands.send(Command::Start(Arc::new(start(&disk, 0, &view)), done)).unwrap();
        signal(&wakeup);
        worker.sleep();
        assert!((0..1000).any(|_| !worker.pass(Instant::now()) && !worker.arm()));
        assert_eq!(worker.gated.len(), 1);
        let id = started.try_recv().unwrap().unwrap();
        let (done, stopped) = sync_channel(1);
        commands.send(Command::Stop(id, done)).unwrap();
        signal(&wakeup);
        worker.sleep();
        worker.pass(Instant::now());
        assert_eq!(stopped.try_recv().unwrap(), 0);
    }
    assert_eq!(answered(&mut ring), 0);
    assert!(worker.gated.is_empty());
}
