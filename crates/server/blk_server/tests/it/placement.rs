//! Disks whose requests complete on a different worker from their queue's: data, moves, changes of the completion
//! worker, errors.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blk_server::{EngineFactory, EngineSource, Placement, PlacementReport, Server, WorkerId, WorkerOptions};
use io_engine::{
    Engine, EngineConfig, FakeEngine, FakeHandle, Fault, HandOver, IoUringEngine, LinuxAioEngine, SyncEngine,
    Verb, When,
};

use crate::rig;
use crate::rig::passed::{add_transfer, serves};
use crate::rig::{FrontEnd, Guest, MIB, Options, PATIENCE, Rig, eventually, feature, kind};

const DEPTH: u32 = 512;

fn config() -> EngineConfig {
    EngineConfig { depth: DEPTH, pollable: true, ..EngineConfig::default() }
}

fn uring(several_threads: bool) -> EngineFactory {
    let config = EngineConfig { several_threads, ..config() };
    Box::new(move || Ok(Box::new(IoUringEngine::new(config.clone())?) as Box<dyn Engine>))
}

fn aio() -> EngineFactory {
    Box::new(|| Ok(Box::new(LinuxAioEngine::new(config())?) as Box<dyn Engine>))
}

type Fakes = Arc<Mutex<Vec<FakeHandle>>>;

/// Engines that fail on request, in the order of their creation.
fn faulty() -> (EngineFactory, Fakes) {
    let fakes = Fakes::default();
    let made = Arc::clone(&fakes);
    let make = move || {
        let (engine, handle) = FakeEngine::new(config())?;
        made.lock().unwrap().push(handle);
        Ok(Box::new(engine) as Box<dyn Engine>)
    };
    (Box::new(make), fakes)
}

fn shared(reap_on_submit: bool) -> Placement {
    Placement::Shared { reap_on_submit, completion_worker: None }
}

fn completion(hand_over: &str, completion_worker: Option<u32>) -> Placement {
    let hand_over: HandOver = hand_over.parse().unwrap();
    Placement::Completion { hand_over, completion_worker: completion_worker.map(WorkerId) }
}

/// The second disk has a completion worker; the first one has none.
fn start(make: EngineFactory, placement: Placement, workers: usize) -> Rig {
    let source = EngineSource::placed("placed", DEPTH, make, placement);
    Rig::start(Options { disks: 2, other_engine: Some(source), workers, ..Options::default() })
}

fn server(rig: &Rig) -> &Server {
    rig.server.as_ref().unwrap()
}

fn report(rig: &Rig) -> PlacementReport {
    server(rig).report().disks[1].placement.clone()
}

fn guests(rig: &Rig, count: u16) -> (FrontEnd, Vec<Guest>) {
    let mut front_end = rig.connect_to(1);
    front_end.negotiate(feature::USUAL);
    front_end.share_memory(16 * MIB);
    let guests = (0..count).map(|index| front_end.start_queue(index, 256, feature::USUAL)).collect();
    (front_end, guests)
}

/// Tells loads to end, even if the test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Writes and reads back until told to stop, or for this many rounds.
fn load(guest: &mut Guest, rounds: u64, end: &AtomicBool) {
    let queue = u64::from(guest.index);
    let addr = |n: u64| (8 + 2 * queue) * MIB + n * 4096;
    for round in 0..rounds {
        let byte = |n: u64| (queue * 50 + n + round) as u8;
        for verb in [kind::OUT, kind::IN] {
            for n in 0..16 {
                guest.view.store(addr(n), &[if verb == kind::OUT { byte(n) } else { 0 }; 4096]).unwrap();
                add_transfer(guest, verb, (queue * 16 + n) * 8, addr(n), 4096);
            }
            guest.submit();
            assert!((0..16).all(|_| guest.next_used().is_some()), "queue {queue} was forgotten");
        }
        let mut read = vec![0; 4096];
        for n in 0..16 {
            guest.view.read(addr(n), &mut read).unwrap();
            assert_eq!(read, vec![byte(n); 4096], "queue {queue}, round {round}");
        }
        if end.load(Ordering::Relaxed) {
            return;
        }
    }
}

fn four_queues_on_two_workers(make: EngineFactory, placement: Placement) -> PlacementReport {
    let rig = start(make, placement, 2);
    let (_front_end, guests) = guests(&rig, 4);
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for mut guest in guests {
            let end = &end;
            scope.spawn(move || load(&mut guest, 25, end));
        }
    });
    report(&rig)
}

#[test]
fn data_of_four_queues_on_two_workers_is_right_in_every_placement() {
    for hand_over in ["count:1", "count:16", "time:50", "adaptive"] {
        let placement = completion(hand_over, Some(1));
        let report = four_queues_on_two_workers(uring(false), placement);
        assert_eq!(
            (report.placement, report.completion_worker),
            (placement, Some(WorkerId(1))),
            "{report:?}"
        );
        assert!(report.counters.ops > 0 && report.counters.passed > 0, "{report:?}");
    }
    for reap_on_submit in [true, false] {
        let report = four_queues_on_two_workers(uring(true), shared(reap_on_submit));
        assert_eq!(report.counters.ops, 4 * 25 * 32, "{report:?}");
    }
    four_queues_on_two_workers(aio(), shared(true));
    four_queues_on_two_workers(aio(), completion("adaptive", None));
    let report = four_queues_on_two_workers(uring(false), Placement::Queue);
    assert_eq!(report, PlacementReport::default());
}

#[test]
fn queues_move_and_workers_come_and_go_in_every_placement() {
    let placements = [(false, completion("adaptive", None)), (true, shared(true)), (true, shared(false))];
    for (several_threads, placement) in placements {
        let rig = start(uring(several_threads), placement, 3);
        let (_front_end, guests) = guests(&rig, 4);
        let end = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for mut guest in guests {
                let end = &end;
                scope.spawn(move || load(&mut guest, u64::MAX, end));
            }
            let _ends = Ends(&end);
            for step in 0..60_u32 {
                let worker = server(&rig).report().workers[(step / 4 % 3) as usize].id;
                server(&rig).attach("test1", (step % 4) as u16, worker, PATIENCE).unwrap();
                if step % 15 == 7 {
                    let oldest = server(&rig).report().workers[0].id;
                    server(&rig).add_worker(WorkerOptions::default()).unwrap();
                    server(&rig).remove_worker(oldest, PATIENCE).unwrap();
                }
            }
        });
    }
}

#[test]
fn completion_worker_needs_no_queue_of_the_disk_and_changes_at_run_time() {
    let rig = start(uring(false), completion("adaptive", Some(2)), 3);
    assert_eq!(report(&rig).completion_worker, None);
    let (front_end, mut guests) = guests(&rig, 1);
    assert!(serves(&mut guests[0]));
    assert!(eventually(|| report(&rig).completion_worker == Some(WorkerId(2))));
    let end = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (told, guest) = (&end, &mut guests[0]);
        scope.spawn(move || load(guest, u64::MAX, told));
        let _ends = Ends(&end);
        for turn in 0..9 {
            let worker = WorkerId(turn % 3);
            server(&rig).set_completion_worker("test1", Some(worker), PATIENCE).unwrap();
            assert_eq!(report(&rig).completion_worker, Some(worker), "{:?}", report(&rig));
        }
        server(&rig).set_completion_worker("test1", None, Duration::ZERO).unwrap();
    });
    assert_eq!(report(&rig).completion_worker, Some(WorkerId(2)), "who was it stays when the choice is free");
    // The balancer counts a worker's requests for other queues as its work.
    let host = &server(&rig).report().workers[2];
    let worked = host.counters.submission_time + host.counters.completion_time;
    assert!(host.queues == 0 && host.counters.busy_passes > 0 && !worked.is_zero(), "{host:?}");
    front_end.stop_queue(0);
    assert!(eventually(|| report(&rig).completion_worker.is_none()), "an engine outlives the last queue");
}

#[test]
fn completion_worker_stays_when_the_disks_only_queue_moves_and_is_replaced_when_removed() {
    for (several_threads, placement) in [
        (false, completion("adaptive", Some(2))),
        (true, Placement::Shared { reap_on_submit: false, completion_worker: Some(WorkerId(2)) }),
    ] {
        let rig = start(uring(several_threads), placement, 3);
        let (_front_end, mut guests) = guests(&rig, 1);
        let end = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (end, guest) = (&end, &mut guests[0]);
            scope.spawn(move || load(guest, u64::MAX, end));
            let _ends = Ends(end);
            for turn in 0..10 {
                server(&rig).attach("test1", 0, WorkerId(turn % 2), PATIENCE).unwrap();
                let hosts = || report(&rig).completion_worker == Some(WorkerId(2));
                assert!(eventually(hosts), "{placement}, turn {turn}: {:?}", report(&rig));
            }
            server(&rig).remove_worker(WorkerId(2), PATIENCE).unwrap();
            // Worker 0 may still be leaving the engine; the result is the same.
            let hosts = || report(&rig).completion_worker.is_some_and(|worker| worker != WorkerId(2));
            assert!(eventually(hosts), "{placement}: {:?}", report(&rig));
        });
        assert!(guests.iter_mut().all(serves));
    }
}

#[test]
fn queues_are_spread_over_as_many_workers_as_the_depth_has_shares_for() {
    for (bound, workers) in [(None, 2), (Some(3), 1)] {
        let source = EngineSource::placed("placed", 64, uring(false), completion("adaptive", bound));
        let options = Options { disks: 2, other_engine: Some(source), workers: 4, ..Options::default() };
        let rig = Rig::start(options);
        let (_front_end, mut guests) = guests(&rig, 4);
        assert!(guests.iter_mut().all(serves));
        let serve = |worker: &&blk_server::WorkerReport| worker.queues > 0;
        assert_eq!(server(&rig).report().workers.iter().filter(serve).count(), workers, "bound to {bound:?}");
    }
}

#[test]
fn completion_worker_that_does_not_run_dry_in_time_stays_and_goes_on() {
    let (make, engines) = faulty();
    let rig = start(make, completion("count:1", Some(0)), 2);
    let (_front_end, mut guests) = guests(&rig, 2);
    assert!(guests.iter_mut().all(serves));
    let fake = engines.lock().unwrap().last().unwrap().clone();
    fake.inject(When::Verb(Verb::Read), Fault::Stick, 1);
    add_transfer(&mut guests[0], kind::IN, 0, 8 * MIB, 4096);
    guests[0].submit();
    assert!(eventually(|| fake.hanging() > 0));
    let stays = server(&rig).set_completion_worker("test1", Some(WorkerId(1)), Duration::from_millis(50));
    let stays = stays.unwrap_err().to_string();
    assert_eq!(
        stays,
        "disk `test1` still has requests in flight after 0.05 s, so its completion worker is unchanged"
    );
    assert_eq!(report(&rig).placement.completion_worker(), Some(WorkerId(0)));
    // The stuck request no longer delays the other queue.
    assert!(serves(&mut guests[1]));
    fake.release().unwrap();
    assert!(guests[0].next_used().is_some());
    server(&rig).set_completion_worker("test1", Some(WorkerId(1)), PATIENCE).unwrap();
    assert!(guests.iter_mut().all(serves));
}

/// The first engine never completes its first read, which is in the ring before the queue starts.
fn stuck_from_the_start() -> (Rig, Fakes, FrontEnd, Guest) {
    let fakes = Fakes::default();
    let made = Arc::clone(&fakes);
    let make = move || {
        let (engine, handle) = FakeEngine::new(config())?;
        handle.inject(When::Verb(Verb::Read), Fault::Stick, u64::from(made.lock().unwrap().is_empty()));
        made.lock().unwrap().push(handle);
        Ok(Box::new(engine) as Box<dyn Engine>)
    };
    let rig = start(Box::new(make), completion("count:1", Some(1)), 2);
    server(&rig).attach("test1", 0, WorkerId(0), PATIENCE).unwrap();
    server(&rig).attach("test1", 1, WorkerId(0), PATIENCE).unwrap();
    let mut front_end = rig.connect_to(1);
    front_end.negotiate(feature::USUAL);
    front_end.share_memory(16 * MIB);
    let mut guest = front_end.new_guest(0, 256, feature::USUAL);
    add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    front_end.announce_queue(&guest);
    front_end.ok(rig::code::SET_VRING_ENABLE, &rig::vring_state(0, 1), &[]);
    (rig, fakes, front_end, guest)
}

/// No caller waits for this change, but it must not block the disk forever either.
#[test]
fn completion_worker_that_a_starting_queue_asks_for_in_vain_is_given_up() {
    // The completion worker may be ready before the first request. Then nothing hangs, and the test tries again.
    let stuck = (0..20).map(|_| stuck_from_the_start()).find(|(_, fakes, ..)| {
        let is_stuck = || fakes.lock().unwrap().first().is_some_and(|fake| fake.hanging() > 0);
        (0..20).any(|_| {
            is_stuck() || {
                std::thread::sleep(Duration::from_millis(10));
                false
            }
        })
    });
    let (rig, fakes, front_end, mut first) = stuck.expect("a read that never ends");
    let mut second = front_end.start_queue(1, 256, feature::USUAL);
    assert!(serves(&mut second), "waits for a request that never ends");
    // The queues are served again before the change is recorded as given up.
    let workers = || {
        let report = report(&rig);
        (report.completion_worker, report.placement.completion_worker())
    };
    assert!(eventually(|| workers() == (Some(WorkerId(0)), None)), "{:?}", workers());
    fakes.lock().unwrap()[0].release().unwrap();
    assert!(first.next_used().is_some());
    server(&rig).set_completion_worker("test1", Some(WorkerId(1)), PATIENCE).unwrap();
    assert!(serves(&mut first) && serves(&mut second));
}

/// Each flush ends on another thread. Each time, the placed engine's ring interrupts the other ring's poll of it; for a
/// descriptor of a front-end the server would give up after fewer interruptions.
#[test]
fn worker_sleeps_with_io_in_flight_again_and_again() {
    for (several_threads, placement) in [(false, completion("count:1", None)), (true, shared(true))] {
        let source = EngineSource::placed("placed", DEPTH, uring(several_threads), placement);
        let options =
            Options { disks: 2, other_engine: Some(source), poll: Duration::ZERO, ..Options::default() };
        let rig = Rig::start(options);
        let (_front_end, mut guests) = guests(&rig, 1);
        for _ in 0..300 {
            assert_eq!(guests[0].request(kind::FLUSH, 0, &[], 0).status, Some(0));
        }
    }
}

#[test]
fn idle_disk_in_a_placement_wakes_nobody() {
    let placements = [(false, completion("time:50", Some(1))), (true, shared(false))];
    for (several_threads, placement) in placements {
        let rig = start(uring(several_threads), placement, 2);
        let (_front_end, mut guests) = guests(&rig, 2);
        assert!(guests.iter_mut().all(serves));
        let sleeps =
            || server(&rig).report().workers.iter().map(|worker| worker.counters.sleeps).sum::<u64>();
        // Waits until work after the last completion has ended.
        let rests = || {
            let before = sleeps();
            std::thread::sleep(Duration::from_millis(500));
            sleeps() == before
        };
        assert!(eventually(rests), "{placement}");
    }
}

#[test]
fn what_cannot_be_bound_or_placed_says_so() {
    let rig = start(uring(false), Placement::Queue, 2);
    let refused =
        |disk: &str, worker| server(&rig).set_completion_worker(disk, Some(WorkerId(worker)), PATIENCE);
    let no_disk = refused("other", 0).unwrap_err().to_string();
    assert_eq!(no_disk, "there is no disk `other`");
    let queue = refused("test1", 0).unwrap_err().to_string();
    assert!(queue.starts_with("disk `test1` has no completion worker: its placement is queue"), "{queue}");

    let rig = start(uring(false), completion("adaptive", None), 2);
    let refused = server(&rig).set_completion_worker("test1", Some(WorkerId(9)), PATIENCE).unwrap_err();
    assert_eq!(refused.to_string(), "there is no worker 9");
    assert_eq!(report(&rig).placement.completion_worker(), None);

    let sync: EngineFactory = Box::new(|| Ok(Box::new(SyncEngine::new(config())?) as Box<dyn Engine>));
    let rig = start(sync, shared(true), 2);
    let mut front_end = rig.connect_to(1);
    front_end.negotiate(feature::USUAL);
    front_end.share_memory(16 * MIB);
    let mut guest = front_end.start_queue(0, 256, feature::USUAL);
    guest.submit();
    // The queue does not start, and the server continues.
    assert!(server(&rig).report().disks[1].queues.is_empty());
    let (_front_end, mut plain) = rig::ready(&rig, feature::USUAL);
    assert!(serves(&mut plain));
}
