//! Moves that coincide with a front-end's own stops and starts, and workers with several rings.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blk_server::{AdminError, EngineSource, WorkerId, WorkerOptions};
use io_engine::{Engine, EngineConfig, FakeHandle, IoUringEngine, IoUringOptions, KernelAge, ThreadsEngine};

use crate::rig::passed::{add_transfer, hold, let_go, serves};
use crate::rig::workers::{ENOUGH, SHORT, fake_in_the_first_worker, guests, server, wait_for_stop};
use crate::rig::{CALM, Guest, MIB, Options, PATIENCE, Rig, eventually, feature, kind, ready};

/// Makes one request of the queue hang.
fn hang(handle: &FakeHandle, guest: &mut Guest) {
    hold(handle);
    add_transfer(guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| handle.hanging() == 1));
}

#[test]
fn move_keeps_to_its_limit_while_the_queues_own_stop_hangs() {
    let (options, handle) = fake_in_the_first_worker();
    let rig = Rig::start(options);
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    hang(&handle, &mut guest);
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| front_end.stop_queue(0));
        wait_for_stop(&rig, 0);
        let (sender, moved) = channel();
        let server = server(&rig);
        scope.spawn(move || sender.send(server.attach("test0", 0, WorkerId(1), SHORT)));
        let moved = moved.recv_timeout(PATIENCE).expect("the move waits for the stop");
        assert!(matches!(moved, Err(AdminError::NotDrained { .. })), "{moved:?}");
        assert_eq!(server.add_worker(WorkerOptions::default()).unwrap(), WorkerId(2));
        let_go(&handle);
        assert_eq!(stopping.join().unwrap(), 1);
    });
}

#[test]
fn change_that_meets_another_that_hangs_keeps_to_its_limit() {
    let (options, handle) = fake_in_the_first_worker();
    let rig = Rig::start(options);
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    hang(&handle, &mut guest);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| server(&rig).attach("test0", 0, WorkerId(1), ENOUGH));
        // Worker 0 already has the queue, so without another change this call does nothing.
        let stays = || server(&rig).attach("test0", 0, WorkerId(0), SHORT);
        assert!(eventually(|| matches!(stays(), Err(AdminError::OthersChange { .. }))));
        for _ in 0..2 {
            let (sender, refused) = channel();
            let server = server(&rig);
            scope.spawn(move || sender.send(server.remove_worker(WorkerId(1), SHORT)));
            let refused = refused.recv_timeout(ENOUGH / 2).expect("it waits for the other change");
            assert!(matches!(refused, Err(AdminError::OthersChange { .. })), "{refused:?}");
        }
        assert_eq!(server(&rig).add_worker(WorkerOptions::default()).unwrap(), WorkerId(2));
        let_go(&handle);
        first.join().unwrap().unwrap();
    });
}

#[test]
fn stop_does_not_wait_for_a_move_that_hangs() {
    let (options, handle) = fake_in_the_first_worker();
    let rig = Rig::start(options);
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    hang(&handle, &mut guest);
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| server(&rig).attach("test0", 0, WorkerId(1), Duration::from_secs(3600)));
        std::thread::sleep(SHORT);
        let report = server(&rig).shut_down(CALM);
        assert_eq!(report.unfinished, ["test0"]);
        let moved = moving.join().unwrap();
        assert!(matches!(moved, Err(AdminError::Stopping)), "{moved:?}");
        let refused = rig.add(1).unwrap_err();
        assert!(matches!(refused, AdminError::Stopping), "{refused:?}");
        assert!(!rig.socket_of(1).exists());
        let_go(&handle);
    });
}

/// An engine that a worker can create only when the test allows it.
struct SlowToStart {
    source: Arc<EngineSource>,
    /// Receives a message when a worker starts to create such an engine.
    begun: Receiver<()>,
    allow: SyncSender<()>,
}

fn slow_to_start() -> SlowToStart {
    let (allow, allowed) = sync_channel::<()>(2);
    let (begin, begun) = sync_channel(8);
    let allowed = Mutex::new(allowed);
    let engine = move || {
        let _ = begin.try_send(());
        let _ = allowed.lock().unwrap().recv();
        Ok(Box::new(ThreadsEngine::new(EngineConfig::default())?) as Box<dyn Engine>)
    };
    SlowToStart { source: EngineSource::new("slow", 1024, Box::new(engine)), begun, allow }
}

#[test]
fn queue_that_is_attached_while_it_starts_goes_where_it_was_attached() {
    let SlowToStart { source, begun, allow } = slow_to_start();
    let options = Options { workers: 2, disks: 2, other_engine: Some(source), ..Options::default() };
    let rig = Rig::start(options);
    let mut front_end = rig.connect_to(1);
    front_end.negotiate(feature::USUAL);
    front_end.share_memory(16 * MIB);
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| front_end.start_queue(0, 256, feature::USUAL));
        // The queue goes to worker 0, which has the fewest.
        begun.recv_timeout(PATIENCE).unwrap();
        let refused = server(&rig).attach("test1", 0, WorkerId(1), SHORT);
        assert!(matches!(refused, Err(AdminError::NotStarted { .. })), "{refused:?}");
        let attaching = scope.spawn(|| server(&rig).attach("test1", 0, WorkerId(1), ENOUGH));
        std::thread::sleep(SHORT);
        (0..2).for_each(|_| allow.send(()).unwrap());
        let mut guest = starting.join().unwrap();
        attaching.join().unwrap().unwrap();
        assert_eq!(rig.report_of(1).queues[0].worker, WorkerId(1));
        assert!(serves(&mut guest));
    });
}

#[test]
fn queue_does_not_go_to_a_worker_that_hangs() {
    let SlowToStart { source, begun, allow } = slow_to_start();
    let options = Options { workers: 2, disks: 2, other_engine: Some(source), ..Options::default() };
    let rig = Rig::start(options);
    let (_other_front_end, mut guest) = ready(&rig, feature::USUAL);
    server(&rig).attach("test1", 0, WorkerId(1), ENOUGH).unwrap();
    let mut front_end = rig.connect_to(1);
    front_end.negotiate(feature::USUAL);
    front_end.share_memory(16 * MIB);
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| front_end.start_queue(0, 256, feature::USUAL));
        begun.recv_timeout(PATIENCE).unwrap();
        let refused = server(&rig).attach("test0", 0, WorkerId(1), SHORT);
        assert!(matches!(refused, Err(AdminError::Unsuitable { .. })), "{refused:?}");
        assert!(serves(&mut guest));
        (0..2).for_each(|_| allow.send(()).unwrap());
        starting.join().unwrap();
    });
    server(&rig).attach("test0", 0, WorkerId(1), ENOUGH).unwrap();
    assert!(serves(&mut guest));
}

#[test]
fn queue_that_restarts_while_its_worker_leaves_is_served_by_one_that_stays() {
    let (options, handle) = fake_in_the_first_worker();
    let rig = Rig::start(options);
    let mut front_end = rig.connect();
    let mut guests = guests(&mut front_end, feature::USUAL, 2);
    for queue in [0, 1] {
        server(&rig).attach("test0", queue, WorkerId(0), ENOUGH).unwrap();
    }
    hang(&handle, &mut guests[0]);
    std::thread::scope(|scope| {
        let removing = scope.spawn(|| server(&rig).remove_worker(WorkerId(0), ENOUGH));
        std::thread::sleep(SHORT);
        front_end.stop_queue(1);
        let mut again = front_end.start_queue(1, 256, feature::USUAL);
        std::thread::sleep(SHORT);
        let_go(&handle);
        removing.join().unwrap().unwrap();
        assert!((0..3).all(|_| serves(&mut again)));
        assert_eq!(front_end.stop_queue(1), 6);
    });
    assert_eq!(server(&rig).report().workers.len(), 1);
}

#[test]
fn queue_restarts_again_and_again_while_its_worker_is_removed() {
    let rig = Rig::start(Options { workers: 2, ..Options::default() });
    let mut front_end = rig.connect();
    let mut guest = guests(&mut front_end, feature::USUAL, 1).remove(0);
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (rig, end) = (&rig, &end);
        scope.spawn(move || {
            for _ in 0..300 {
                let oldest = server(rig).report().workers[0].id;
                server(rig).attach("test0", 0, oldest, ENOUGH).unwrap();
                server(rig).remove_worker(oldest, ENOUGH).unwrap();
                server(rig).add_worker(WorkerOptions::default()).unwrap();
            }
            end.store(true, Ordering::Relaxed);
        });
        while !end.load(Ordering::Relaxed) {
            assert!(serves(&mut guest));
            assert_eq!(front_end.stop_queue(0), 2);
            guest = front_end.start_queue(0, 256, feature::USUAL);
        }
        assert!(serves(&mut guest));
    });
}

/// A worker has io_uring as base engine and as second engine. The second engine's eventfd ends each sleep.
fn two_rings_serve(second: impl Fn() -> std::io::Result<IoUringEngine> + Send + Sync + 'static) {
    let first = || Ok(Box::new(IoUringEngine::new(EngineConfig::default())?) as Box<dyn Engine>);
    let source = EngineSource::new("second", 1024, Box::new(move || Ok(Box::new(second()?))));
    let engine: Option<blk_server::EngineFactory> = Some(Box::new(first));
    let rig = Rig::start(Options { disks: 2, engine, other_engine: Some(source), ..Options::default() });
    let mut front_end = rig.connect_to(1);
    let mut guest = guests(&mut front_end, feature::USUAL, 1).remove(0);
    let sleeps = || server(&rig).report().workers[0].counters.sleeps;
    for _ in 0..600 {
        let before = sleeps();
        assert!(serves(&mut guest));
        let end = Instant::now() + PATIENCE;
        while sleeps() == before {
            assert!(Instant::now() < end, "the worker does not fall asleep");
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    assert!(serves(&mut guest));
}

#[test]
fn ring_with_a_kernel_thread_beside_a_plain_one_serves_for_long() {
    let options =
        IoUringOptions { sqpoll_idle: Some(Duration::from_millis(50)), ..IoUringOptions::default() };
    two_rings_serve(move || IoUringEngine::with(&options, &EngineConfig::default()));
}

#[test]
fn ring_of_an_older_kernel_beside_a_plain_one_serves_for_long() {
    two_rings_serve(|| IoUringEngine::as_if_on(KernelAge::Before6_1, EngineConfig::default()));
}
