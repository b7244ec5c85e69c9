//! Queues move between workers, and workers are added and removed, while guests use their disks.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blk_server::{AdminError, EngineSource, QueueReport, WorkerId, WorkerOptions};
use io_engine::{Engine, EngineConfig, MmapEngine, SyncEngine, ThreadsEngine};

use crate::rig::format::{Format, on_both_formats};
use crate::rig::passed::{add_transfer, faulty, hold, let_go, serves};
use crate::rig::workers::{ENOUGH, SHORT, fake_in_the_first_worker, guests, server};
use crate::rig::{Guest, MIB, Options, Rig, eventually, feature, kind, ready};

on_both_formats! {
    queues_that_move_under_load_lose_nothing,
    queue_that_moves_while_idle_is_served_after_the_next_kick,
    queue_that_moved_stops_and_starts_again,
    memory_changes_after_a_move,
}

fn with_workers(workers: usize) -> Options {
    Options { workers, ..Options::default() }
}

fn queue(rig: &Rig, index: u16) -> QueueReport {
    let report = server(rig).report();
    report.disks[0].queues.iter().find(|queue| queue.index == index).cloned().unwrap()
}

fn worker_of(rig: &Rig, index: u16) -> u32 {
    queue(rig, index).worker.0
}

fn attach(rig: &Rig, queue: u16, worker: u32) -> Result<(), AdminError> {
    server(rig).attach("test0", queue, WorkerId(worker), ENOUGH).map(drop)
}

/// Writes 16 blocks at once and reads them back at once, at least one time, until told to stop. Each queue has its own
/// part of the disk.
fn load(mut guest: Guest, end: &AtomicBool) -> u64 {
    let queue = u64::from(guest.index);
    let addr = |n: u64| (8 + 2 * queue) * MIB + n * 4096;
    let mut round = 0;
    loop {
        round += 1;
        let byte = |n: u64| (queue * 50 + n + round) as u8;
        for verb in [kind::OUT, kind::IN] {
            for n in 0..16 {
                guest.view.store(addr(n), &[if verb == kind::OUT { byte(n) } else { 0 }; 4096]).unwrap();
                add_transfer(&mut guest, verb, (queue * 16 + n) * 8, addr(n), 4096);
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
            return round;
        }
    }
}

fn queues_that_move_under_load_lose_nothing(ring: Format) {
    let rig = Rig::start(with_workers(3));
    let mut front_end = rig.connect();
    let guests = guests(&mut front_end, ring.usual(), 4);
    let end = AtomicBool::new(false);
    let rounds: Vec<u64> = std::thread::scope(|scope| {
        let loads: Vec<_> = guests.into_iter().map(|guest| scope.spawn(|| load(guest, &end))).collect();
        for step in 0..200_u32 {
            // Each queue visits each worker, in a different order each time.
            attach(&rig, (step % 4) as u16, (step.wrapping_mul(2_654_435_761) >> 8) % 3).unwrap();
            attach(&rig, (step % 4) as u16, (step / 4) % 3).unwrap();
        }
        end.store(true, Ordering::Relaxed);
        loads.into_iter().map(|load| load.join().unwrap()).collect()
    });
    let moves: u64 = (0..4).map(|index| queue(&rig, index).counters.moves).sum();
    assert!(moves >= 100, "{moves} moves");
    for (index, rounds) in (0..).zip(rounds) {
        let counters = || queue(&rig, index).counters;
        let both = (rounds * 16, rounds * 16);
        assert!(eventually(|| (counters().writes, counters().reads) == both), "{:?}", counters());
        let counters = counters();
        assert_eq!((counters.written_bytes, counters.errors), (rounds * 16 * 4096, 0));
    }
}

fn queue_that_moves_while_idle_is_served_after_the_next_kick(ring: Format) {
    let rig = Rig::start(with_workers(2));
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    for worker in [1, 0, 1, 0, 1] {
        attach(&rig, 0, worker).unwrap();
        assert_eq!(worker_of(&rig, 0), worker);
        // The old worker must not take the kick away.
        std::thread::sleep(Duration::from_millis(5));
        assert!(serves(&mut guest));
    }
}

fn queue_that_moved_stops_and_starts_again(ring: Format) {
    let rig = Rig::start(with_workers(2));
    let (front_end, mut guest) = ready(&rig, ring.usual());
    assert!(serves(&mut guest));
    attach(&rig, 0, 1).unwrap();
    assert!(serves(&mut guest));
    front_end.stop_queue(0);
    let mut again = front_end.start_queue(0, 256, ring.usual());
    assert!(serves(&mut again));
    assert_eq!(worker_of(&rig, 0), 1, "it was attached there");
}

fn memory_changes_after_a_move(ring: Format) {
    let rig = Rig::start(with_workers(2));
    let (mut front_end, mut guest) = ready(&rig, ring.usual());
    attach(&rig, 0, 1).unwrap();
    front_end.add_region(64 * MIB, MIB);
    assert!(serves(&mut guest));
    attach(&rig, 0, 0).unwrap();
    front_end.remove_region(64 * MIB);
    assert!(serves(&mut guest));
}

#[test]
fn queue_with_a_request_that_hangs_stays_and_goes_on() {
    let (options, handle) = fake_in_the_first_worker();
    let rig = Rig::start(options);
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    assert!(serves(&mut guest));
    hold(&handle);
    let pending = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| handle.hanging() == 1));
    let refused = server(&rig).attach("test0", 0, WorkerId(1), SHORT).unwrap_err();
    assert!(matches!(refused, AdminError::NotDrained { queue: 0, stays: WorkerId(0), .. }), "{refused}");
    assert_eq!(worker_of(&rig, 0), 0);
    // The worker takes the next request although the one before it hangs.
    add_transfer(&mut guest, kind::IN, 8, 9 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| handle.hanging() == 2));
    let_go(&handle);
    assert!((0..2).all(|_| guest.next_used().is_some()));
    assert_eq!(pending.status(&guest), 0);
    assert!(serves(&mut guest));
    attach(&rig, 0, 1).unwrap();
    assert!(serves(&mut guest));
}

#[test]
fn disk_that_is_given_a_number_of_workers_is_spread_over_so_many() {
    let rig = Rig::start(with_workers(4));
    let mut front_end = rig.connect();
    let mut guests = guests(&mut front_end, feature::USUAL, 4);
    let places = || (0..4).map(|index| worker_of(&rig, index)).collect::<Vec<_>>();
    assert_eq!(places(), [0, 1, 2, 3]);
    server(&rig).attach_all("test0", &[WorkerId(3)], ENOUGH).unwrap();
    assert_eq!(places(), [3; 4]);
    server(&rig).spread("test0", NonZeroUsize::new(2), ENOUGH).unwrap();
    assert_eq!(places(), [3, 3, 0, 0]);
    assert!(guests.iter_mut().all(serves));
    // No queue is bound to a worker: a queue that starts again may start on either of these two.
    front_end.stop_queue(2);
    front_end.stop_queue(3);
    server(&rig).remove_worker(WorkerId(0), ENOUGH).unwrap();
    let mut again = [2, 3].map(|index| front_end.start_queue(index, 256, feature::USUAL));
    assert_eq!(places(), [3, 3, 1, 1]);
    server(&rig).spread("test0", None, ENOUGH).unwrap();
    assert_eq!(places(), [3, 2, 1, 1]);
    assert!(again.iter_mut().chain(&mut guests[..2]).all(serves));
}

#[test]
fn list_of_workers_with_one_that_does_not_exist_moves_nothing() {
    let rig = Rig::start(with_workers(2));
    let mut front_end = rig.connect();
    let _guests = guests(&mut front_end, feature::USUAL, 2);
    let refused = server(&rig).attach_all("test0", &[WorkerId(1), WorkerId(7)], ENOUGH).unwrap_err();
    assert_eq!(refused.to_string(), "there is no worker 7");
    assert_eq!((worker_of(&rig, 0), worker_of(&rig, 1)), (0, 1));
}

#[test]
fn guest_that_stops_its_queue_during_a_move_that_hangs_gets_its_answer() {
    let (options, handle) = fake_in_the_first_worker();
    let rig = Rig::start(options);
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    hold(&handle);
    add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| handle.hanging() == 1));
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| server(&rig).attach("test0", 0, WorkerId(1), ENOUGH));
        let stopping = scope.spawn(|| front_end.stop_queue(0));
        std::thread::sleep(SHORT);
        let_go(&handle);
        moving.join().unwrap().unwrap();
        assert_eq!(stopping.join().unwrap(), 1);
    });
}

#[test]
fn worker_that_is_removed_hands_its_queues_over_under_load() {
    let rig = Rig::start(with_workers(2));
    let mut front_end = rig.connect();
    let guests = guests(&mut front_end, feature::USUAL, 4);
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let loads: Vec<_> = guests.into_iter().map(|guest| scope.spawn(|| load(guest, &end))).collect();
        for _ in 0..20 {
            let new = server(&rig).add_worker(WorkerOptions::default()).unwrap();
            server(&rig).attach("test0", 3, new, ENOUGH).unwrap();
            let oldest = server(&rig).report().workers[0].id;
            server(&rig).remove_worker(oldest, ENOUGH).unwrap();
        }
        end.store(true, Ordering::Relaxed);
        loads.into_iter().for_each(|load| assert!(load.join().unwrap() > 0));
    });
    let report = server(&rig).report();
    assert_eq!(report.workers.iter().map(|worker| worker.queues).sum::<usize>(), 4);
    assert_eq!(report.workers.iter().map(|worker| worker.id.0).collect::<Vec<_>>(), [20, 21]);
}

#[test]
fn what_does_not_exist_is_named() {
    let rig = Rig::start(with_workers(1));
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    let server = server(&rig);
    let attach =
        |disk: &str, queue, worker| server.attach(disk, queue, WorkerId(worker), ENOUGH).unwrap_err();
    assert_eq!(attach("other", 0, 0).to_string(), "there is no disk `other`");
    assert_eq!(
        attach("test0", 4, 0).to_string(),
        "disk `test0` has no queue 4: it has 4 queues, counted from 0"
    );
    assert_eq!(attach("test0", 0, 7).to_string(), "there is no worker 7");
    let gone = server.remove_worker(WorkerId(7), ENOUGH).unwrap_err();
    assert!(matches!(gone, AdminError::NoWorker { .. }));
    let last = server.remove_worker(WorkerId(0), ENOUGH).unwrap_err();
    assert_eq!(last.to_string(), "worker 0 is the last worker: add another worker first");
    assert!(serves(&mut guest));
}

#[test]
fn queue_attached_before_it_runs_starts_there() {
    let rig = Rig::start(with_workers(3));
    attach(&rig, 0, 2).unwrap();
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    assert!(serves(&mut guest));
    assert_eq!(worker_of(&rig, 0), 2);
}

#[test]
fn queues_of_a_disk_are_spread_over_the_workers() {
    let rig = Rig::start(with_workers(2));
    let mut front_end = rig.connect();
    let _guests = guests(&mut front_end, feature::USUAL, 4);
    let places: Vec<u32> = (0..4).map(|index| worker_of(&rig, index)).collect();
    assert_eq!(places.iter().filter(|&&worker| worker == 0).count(), 2, "{places:?}");
}

#[test]
fn disks_with_engines_of_their_own_share_a_worker() {
    type Make = fn(EngineConfig) -> std::io::Result<Box<dyn Engine>>;
    let engines: [(&str, Make); 3] = [
        ("sync", |config| Ok(Box::new(SyncEngine::new(config)?))),
        ("threads", |config| Ok(Box::new(ThreadsEngine::new(config)?))),
        ("mmap", |config| Ok(Box::new(MmapEngine::new(config)?))),
    ];
    for (name, make) in engines {
        let factory = move || make(EngineConfig::default());
        let source = EngineSource::new(name, 1024, Box::new(factory));
        let folder = Some(std::path::PathBuf::from("/dev/shm"));
        let options = Options { disks: 2, folder, other_engine: Some(source), ..with_workers(2) };
        let rig = Rig::start(options);
        let end = AtomicBool::new(false);
        // The sessions must outlive their guests.
        let mut front_ends = [0, 1].map(|disk| rig.connect_to(disk));
        std::thread::scope(|scope| {
            let mut loads = vec![];
            for front_end in &mut front_ends {
                for guest in guests(front_end, feature::USUAL, 2) {
                    let end = &end;
                    loads.push(scope.spawn(move || load(guest, end)));
                }
            }
            for step in 0..40_u32 {
                for disk in ["test0", "test1"] {
                    let worker = WorkerId(step % 2);
                    server(&rig).attach(disk, (step / 2 % 2) as u16, worker, ENOUGH).unwrap();
                }
            }
            end.store(true, Ordering::Relaxed);
            loads.into_iter().for_each(|load| assert!(load.join().unwrap() > 0, "{name}"));
        });
    }
}

#[test]
fn slow_engine_beside_the_base_engine_wakes_a_sleeping_worker() {
    let (mut options, handle) = faulty();
    let fake = options.engine.take().unwrap();
    let source = EngineSource::new("fake", 64, fake);
    let rig = Rig::start(Options { disks: 2, other_engine: Some(source), ..with_workers(1) });
    let mut front_end = rig.connect_to(1);
    let mut guest = guests(&mut front_end, feature::USUAL, 1).remove(0);
    assert!(serves(&mut guest));
    hold(&handle);
    add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| handle.hanging() == 1));
    let sleeps = || server(&rig).report().workers[0].counters.sleeps;
    let before = sleeps();
    std::thread::sleep(Duration::from_millis(200));
    assert!(sleeps() - before < 20, "the worker does not sleep while it waits for two engines");
    let_go(&handle);
    assert!(guest.next_used().is_some());
    assert!(serves(&mut guest));
}

#[test]
fn each_worker_has_the_image_open_for_itself_under_one_lock() {
    let rig = Rig::start(with_workers(2));
    let open_files = || {
        let fds = std::fs::read_dir("/proc/self/fd").unwrap();
        fds.filter(|fd| std::fs::read_link(fd.as_ref().unwrap().path()).is_ok_and(|to| to == rig.image))
            .count()
    };
    let before = open_files();
    let mut front_end = rig.connect();
    let _guests = guests(&mut front_end, feature::USUAL, 2);
    let running = open_files();
    front_end.stop_queue(0);
    front_end.stop_queue(1);
    assert_eq!((before, running), (1, 2));
    assert!(eventually(|| open_files() == 1));
}

#[test]
fn report_tells_workers_and_disks() {
    let rig = Rig::start(Options { disks: 2, ..with_workers(2) });
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    assert!(serves(&mut guest));
    let report = server(&rig).report();
    let names: Vec<_> = report.disks.iter().map(|disk| disk.name.as_str()).collect();
    assert_eq!((names, report.workers.len()), (vec!["test0", "test1"], 2));
    let disk = &report.disks[0];
    assert_eq!((disk.sessions, disk.queues.len(), disk.queues_offered), (1, 1, 4));
    assert_eq!((disk.image.as_path(), disk.capacity_sectors), (rig.image.as_path(), 16 * MIB / 512));
    // The worker counts a pass after the guest can see its results.
    let counted = || {
        let counters = queue(&rig, 0).counters;
        (counters.writes, counters.reads, counters.in_flight) == (1, 1, 0)
    };
    assert!(eventually(counted), "{:?}", queue(&rig, 0).counters);
    let counters = queue(&rig, 0).counters;
    assert!(counters.kicks > 0 && counters.calls > 0);
    assert!(report.workers[0].counters.busy_passes > 0);
}

#[test]
fn kick_for_the_base_engine_wakes_a_worker_that_sleeps_on_two() {
    let (mut options, handle) = faulty();
    let source = EngineSource::new("fake", 64, options.engine.take().unwrap());
    let rig = Rig::start(Options { disks: 2, other_engine: Some(source), ..with_workers(1) });
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    let mut other_front_end = rig.connect_to(1);
    let mut other = guests(&mut other_front_end, feature::USUAL, 1).remove(0);
    hold(&handle);
    add_transfer(&mut other, kind::IN, 0, 8 * MIB, 4096);
    other.submit();
    assert!(eventually(|| handle.hanging() == 1));
    for _ in 0..5 {
        // Polling has ended by then.
        std::thread::sleep(SHORT);
        assert!(serves(&mut guest));
    }
    let_go(&handle);
    assert!(other.next_used().is_some());
}
