//! Busy polling and interrupt coalescing: how workers wait, and when they signal.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::sync::Arc;
use std::time::Duration;

use blk_server::{BUSY_POLL, Coalescing, DiskConfig, InlineWorker, ParkPolicy, ParkWhat, QueueCounters, Wce};
use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, MemoryView, Region};
use io_engine::{EngineConfig, FakeEngine, Fault, Verb, When};
use virtqueue::{DriverQueue, RingLayout};

use crate::rig::passed::{add_transfer, event, faulty, let_go, serves, take_signals};
use crate::rig::raw_guest::PLAIN;
use crate::rig::{Guest, MIB, Options, Rig, eventually, feature, format, kind, ready};

fn counters(rig: &Rig) -> QueueCounters {
    rig.server.as_ref().unwrap().report().disks[0].queues[0].counters
}

fn sleeps(rig: &Rig) -> u64 {
    rig.server.as_ref().unwrap().report().workers[0].counters.sleeps
}

#[test]
fn worker_that_polls_busily_needs_no_kicks_and_never_sleeps_while_a_queue_runs() {
    let rig = Rig::start(Options { poll: BUSY_POLL, ..Options::default() });
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    assert!(serves(&mut guest));
    let (kicks, slept) = (counters(&rig).kicks, sleeps(&rig));
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        assert!(serves(&mut guest));
    }
    assert_eq!((counters(&rig).kicks, sleeps(&rig)), (kicks, slept));
    front_end.stop_queue(0);
    assert!(eventually(|| sleeps(&rig) > slept), "a worker without queues goes on polling");
}

fn coalescing(count: u32) -> Option<Coalescing> {
    Some(Coalescing::new(count, Duration::from_millis(10)).unwrap())
}

#[test]
fn interrupt_comes_in_time_although_too_few_requests_complete() {
    let (options, handle) = faulty();
    let rig = Rig::start(Options { coalescing: coalescing(64), ..options });
    let (_front_end, mut guest) = ready(&rig, PLAIN);
    // One request stays in flight, so that completions might wait for it.
    handle.inject(When::Always, Fault::Hang, 1);
    add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| handle.hanging() == 1));
    for sector in 1..4 {
        let pending = add_transfer(&mut guest, kind::IN, sector * 8, 9 * MIB, 4096);
        guest.submit();
        let used = guest.next_used().expect("the interrupt never came");
        assert_eq!((used.token, pending.status(&guest)), (pending.token, 0));
    }
    let_go(&handle);
    assert!(guest.next_used().is_some());
}

#[test]
fn requests_that_complete_together_are_all_told_of() {
    let rig = Rig::start(Options { coalescing: coalescing(1024), ..Options::buffered() });
    let (_front_end, mut guest) = ready(&rig, PLAIN);
    take_signals(&guest.call);
    for n in 0..32 {
        add_transfer(&mut guest, kind::OUT, n * 8, 8 * MIB + n * 4096, 4096);
    }
    guest.submit();
    assert!((0..32).all(|_| guest.next_used().is_some()));
    assert!(serves(&mut guest));
    assert!(eventually(|| counters(&rig).writes == 33));
}

/// A worker that runs only when the test calls it, with one queue, and its guest.
fn by_hand(engine: FakeEngine, image: Image, hold: ParkPolicy) -> (InlineWorker, Guest) {
    let disk = DiskConfig {
        name: "test".into(),
        serial: image.default_serial(),
        image,
        queues: 1,
        queue_size: 256,
        wce: Wce::Guest,
        engine: None,
        workers: None,
        coalescing: coalescing(64),
        park: Some(hold),
    };
    let region = Region::from_memfd(GuestAddress(0), 16 * MIB).unwrap();
    let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
    let view = MemoryView::new(Arc::clone(&memory));
    let layout = RingLayout {
        queue_size: 256,
        descriptors: GuestAddress(0),
        avail: GuestAddress(0x8000),
        used: GuestAddress(0xa000),
    };
    let features = format::ring_features(PLAIN);
    let ring = DriverQueue::new(&view, layout, features).unwrap();
    let (kick, call, err) = (event(), event(), event());
    let (its_kick, its_call) = (kick.try_clone().unwrap(), call.try_clone().unwrap());
    let worker =
        InlineWorker::start(Box::new(engine), disk, memory, layout, features, its_kick, its_call).unwrap();
    (worker, Guest { index: 0, layout, features, view, ring, kick, call, err, next_token: 0 })
}

/// No further completion ends the wait: a parked request may complete only after hours, and a queue that moves or stops
/// loses its timer.
#[test]
fn interrupt_does_not_wait_for_a_request_that_fails_and_is_parked() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("disk.raw");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(MIB).unwrap();
    let image =
        Image::open(&HostOpener, &ImageOptions { cache: CacheMode::Writeback, ..ImageOptions::new(&path) })
            .unwrap();
    let (engine, fake) = FakeEngine::new(EngineConfig::default()).unwrap();
    let hold = ParkPolicy { what: ParkWhat::Any, retry_after: None };
    let (mut worker, mut guest) = by_hand(engine, image, hold);

    fake.inject(When::Overlaps(Verb::Read, 4096..8192), Fault::Hang, 1);
    let waits = add_transfer(&mut guest, kind::IN, 8, 8 * MIB, 4096);
    let done = add_transfer(&mut guest, kind::IN, 0, 9 * MIB, 4096);
    guest.submit();
    worker.serve();
    assert_eq!((fake.hanging(), done.status(&guest)), (1, 0));
    // The released read is now beyond the end of the image, and is parked.
    file.set_len(0).unwrap();
    fake.release().unwrap();
    worker.serve();
    assert_eq!((fake.hanging(), waits.status(&guest), take_signals(&guest.call)), (0, 0xff, 1));
}
