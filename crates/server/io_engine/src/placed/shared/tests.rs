//! Tests several real threads that share one engine behind a lock: data, wake-ups, roles, faults, leaving.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use disk_image::CacheMode;

use super::*;
use crate::engine::OpError;
use crate::placed::test_bed::{
    Bed, DEPTH, PATIENCE, Worker, check_room_that_was_seen, fake, idle_until, io_uring, linux_aio, on_thread,
    shared_io_uring,
};
use crate::{EngineConfig, Fault, SyncEngine, When};

fn run_and_leave(placement: &SharedPlacement, bed: &Arc<Bed>, rounds: &[u64], sleeps: bool) {
    let threads: Vec<_> = (0..)
        .zip(rounds)
        .map(|(number, &rounds)| {
            on_thread(placement.engine(number).unwrap(), number.into(), bed, move |worker| {
                worker.write_and_check(rounds, 32, sleeps);
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn data_of_two_workers_is_right_whoever_reaps_and_whether_they_spin_or_sleep() {
    let bed = Bed::buffered();
    for reap_on_submit in [true, false] {
        for sleeps in [true, false] {
            let placement = SharedPlacement::new(shared_io_uring(), DEPTH, reap_on_submit, None);
            run_and_leave(&placement, &bed, &[20, 20], sleeps);
            let counted = placement.counters();
            assert_eq!((counted.ops, counted.passed), (2 * 20 * 64, 2 * 20 * 64), "{counted:?}");
            assert!(counted.locked > counted.hand_overs, "{counted:?}");
            assert_eq!(placement.completion_worker(), None);
        }
    }
}

#[test]
fn data_of_three_workers_past_the_page_cache_is_right() {
    let Some(bed) = Bed::new(CacheMode::None) else { return };
    for reap_on_submit in [true, false] {
        let uring = SharedPlacement::new(shared_io_uring(), DEPTH, reap_on_submit, Some(1));
        run_and_leave(&uring, &bed, &[20, 30, 40], true);
        let aio = SharedPlacement::new(linux_aio(), DEPTH, reap_on_submit, Some(1));
        run_and_leave(&aio, &bed, &[20, 30, 40], true);
    }
}

#[test]
fn completion_worker_changes_under_load_again_and_again() {
    let bed = Bed::buffered();
    for reap_on_submit in [true, false] {
        let placement = SharedPlacement::new(shared_io_uring(), DEPTH, reap_on_submit, None);
        let done = Arc::new(AtomicBool::new(false));
        let threads: Vec<_> = (0..3)
            .map(|number| {
                let done = Arc::clone(&done);
                on_thread(placement.engine(number).unwrap(), number.into(), &bed, move |worker| {
                    while !done.load(Ordering::Acquire) {
                        worker.write_and_check(1, 32, true);
                    }
                })
            })
            .collect();
        for turn in 0..100_u32 {
            placement.set_completion_worker(Some(turn % 3));
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(placement.completion_worker(), Some(0));
        done.store(true, Ordering::Release);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn workers_come_and_go_while_one_works() {
    let bed = Bed::buffered();
    let placement = SharedPlacement::new(shared_io_uring(), DEPTH, false, None);
    let steady =
        on_thread(placement.engine(0).unwrap(), 0, &bed, |worker| worker.write_and_check(200, 16, true));
    for turn in 0..20 {
        on_thread(placement.engine(1).unwrap(), 1, &bed, |worker| worker.write_and_check(2, 16, true))
            .join()
            .unwrap();
        on_thread(placement.engine(2 + turn).unwrap(), 2, &bed, |_| ()).join().unwrap();
    }
    steady.join().unwrap();
    assert!(placement.0.own.engine.lock().is_none(), "the engine outlives its workers");
}

#[test]
fn one_op_at_a_time_misses_no_wake_up_when_another_worker_reaps() {
    let bed = Bed::buffered();
    let placement = SharedPlacement::new(shared_io_uring(), DEPTH, false, Some(0));
    let done = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&done);
    let owner = on_thread(placement.engine(0).unwrap(), 0, &bed, move |worker| idle_until(worker, &told));
    while placement.completion_worker() != Some(0) {
        std::thread::yield_now();
    }
    on_thread(placement.engine(1).unwrap(), 1, &bed, |worker| worker.write_and_check(500, 1, true))
        .join()
        .unwrap();
    done.store(true, Ordering::Release);
    owner.join().unwrap();
}

#[test]
fn cancelling_gives_up_the_workers_own_ops_and_nobody_elses() {
    let bed = Bed::buffered();
    let (make, handles) = fake();
    let placement = SharedPlacement::new(make, DEPTH, true, Some(0));
    let mut owner = Worker::start(placement.engine(0).unwrap(), 0, &bed);
    let mut other = Worker::start(placement.engine(1).unwrap(), 1, &bed);
    let fake = handles.lock().unwrap()[0].clone();
    fake.inject(When::Always, Fault::Hang, 4);
    for worker in [&mut owner, &mut other] {
        (0..2).for_each(|token| worker.push(worker.op(token, token, true)));
        worker.engine.submit().unwrap();
    }
    other.push(other.op(2, 2, true));
    other.engine.cancel_all();
    let mut ended = other.pass(false);
    assert!(owner.pass(false).is_empty(), "the owner's own ops were given up");
    ended.extend(other.pass(false));
    assert_eq!(ended.len(), 3);
    assert!(ended.iter().all(|ended| ended.result == Err(OpError::Cancelled)), "{ended:?}");
    fake.release().unwrap();
    assert!(owner.finish(2).iter().all(|ended| ended.result.is_ok()));
}

#[test]
fn worker_that_leaves_with_ops_in_flight_gives_them_up_and_others_keep_theirs() {
    let bed = Bed::buffered();
    let (make, handles) = fake();
    let placement = SharedPlacement::new(make, DEPTH, true, Some(0));
    let before = Arc::strong_count(&bed.memory);
    let mut owner = Worker::start(placement.engine(0).unwrap(), 0, &bed);
    let fake = handles.lock().unwrap()[0].clone();
    fake.inject(When::Always, Fault::Hang, 4);
    (0..2).for_each(|token| owner.push(owner.op(token, token, true)));
    owner.engine.submit().unwrap();
    let mut other = Worker::start(placement.engine(1).unwrap(), 1, &bed);
    (0..2).for_each(|token| other.push(other.op(token, token, true)));
    other.engine.submit().unwrap();
    let releases = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        fake.release().unwrap();
    });
    // Dropping also waits until this participant's ops have ended, because its thread may end next.
    drop(other);
    releases.join().unwrap();
    assert!(owner.finish(2).iter().all(|ended| ended.result.is_ok()));
    owner.write_and_check(3, 32, true);
    drop(owner);
    assert_eq!(Arc::strong_count(&bed.memory), before);
}

#[test]
fn worker_leaves_although_a_call_of_its_own_never_ends_and_its_memory_stays() {
    let bed = Bed::buffered();
    let (make, handles) = fake();
    let placement = SharedPlacement::new(make, DEPTH, true, Some(0));
    let mut owner = Worker::start(placement.engine(0).unwrap(), 0, &bed);
    let fake = handles.lock().unwrap()[0].clone();
    fake.inject(When::Always, Fault::Stick, 1);
    let before = Arc::strong_count(&bed.memory);
    let mut other = Worker::start(placement.engine(1).unwrap(), 1, &bed);
    other.push(other.op(0, 0, true));
    other.engine.submit().unwrap();
    let began = Instant::now();
    drop(other);
    assert!(began.elapsed() < PATIENCE);
    assert_eq!(Arc::strong_count(&bed.memory), before + 1, "the stuck op lost its hold on the memory");
    owner.write_and_check(2, 16, true);
    fake.release().unwrap();
    owner.write_and_check(2, 16, true);
    assert_eq!(Arc::strong_count(&bed.memory), before);
}

#[test]
fn engines_that_cannot_be_shared_say_so() {
    let make = || Ok(Box::new(SyncEngine::new(EngineConfig::default())?) as Box<dyn Engine>);
    let sync =
        SharedPlacement::new(Box::new(make), DEPTH, true, None).engine(0).unwrap().start().err().unwrap();
    assert_eq!(sync.kind(), std::io::ErrorKind::Unsupported);
    let begins = sync.to_string().starts_with("placement shared needs io_uring or linux-aio, not sync");
    assert!(begins, "{sync}");
    let bound = SharedPlacement::new(io_uring(), DEPTH, true, None).engine(0).unwrap().start();
    if let Err(error) = bound {
        let wants = "an io_uring engine for several threads needs `several_threads` and excludes `iopoll`";
        assert_eq!(error.to_string(), wants);
    }
}

#[test]
fn room_that_a_worker_has_seen_remains_until_its_next_pass_although_another_worker_comes() {
    let placement = SharedPlacement::new(shared_io_uring(), DEPTH, true, Some(0));
    check_room_that_was_seen(placement.engine(0).unwrap(), placement.engine(1).unwrap());
}
