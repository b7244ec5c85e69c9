//! Tests with real threads that hand ops over to a completion worker: data, faults, and workers that join, leave and
//! change roles.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use disk_image::CacheMode;
use rustix::io::Errno;

use super::*;
use crate::engine::OpError;
use crate::placed::test_bed::{
    Bed, DEPTH, PATIENCE, Worker, check_room_that_was_seen, config, fake, idle_until, io_uring, linux_aio,
    on_thread,
};
use crate::{EngineConfig, Fault, IoUringEngine, Recorder, Verb, When};

const POLICIES: [&str; 5] = ["count:1", "count:8", "time:20", "time:1000", "adaptive"];

fn placement(make: EngineMaker, policy: &str, owner: Option<u32>) -> CompletionPlacement {
    CompletionPlacement::new(make, DEPTH, policy.parse().unwrap(), owner)
}

/// Each worker, including the owner, leaves when its rounds are done.
fn run_and_leave(placement: &CompletionPlacement, bed: &Arc<Bed>, rounds: &[u64]) {
    let threads: Vec<_> = (0..)
        .zip(rounds)
        .map(|(number, &rounds)| {
            on_thread(placement.engine(number).unwrap(), number.into(), bed, move |worker| {
                worker.write_and_check(rounds, 32, true);
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn worker_alone_is_its_own_completion_worker() {
    let bed = Bed::buffered();
    let placement = placement(io_uring(), "adaptive", None);
    let mut worker = Worker::start(placement.engine(7).unwrap(), 0, &bed);
    worker.write_and_check(20, 32, true);
    assert_eq!(placement.completion_worker(), Some(7));
    assert_eq!(placement.counters().hand_overs, 0);
    drop(worker);
    assert_eq!(placement.completion_worker(), None);
}

#[test]
fn data_of_two_workers_is_right_with_every_policy_whether_they_spin_or_sleep() {
    let bed = Bed::buffered();
    for policy in POLICIES {
        for sleeps in [[true, true], [true, false], [false, true]] {
            let placement = placement(io_uring(), policy, Some(0));
            run_owner_and_other(&placement, &bed, sleeps);
            let counted = placement.counters();
            assert!(counted.ops >= 40 * 32, "{policy}: {counted:?}");
            assert_eq!(counted.passed, counted.ops, "{policy}");
        }
    }
}

/// The owner continues until the others have finished.
fn run_owner_and_other(placement: &CompletionPlacement, bed: &Arc<Bed>, sleeps: [bool; 2]) {
    let done = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&done);
    let owner = on_thread(placement.engine(0).unwrap(), 0, bed, move |worker| {
        worker.write_and_check(20, 32, sleeps[0]);
        idle_until(worker, &told);
    });
    while placement.completion_worker() != Some(0) {
        std::thread::yield_now();
    }
    let other = on_thread(placement.engine(1).unwrap(), 1, bed, move |worker| {
        worker.write_and_check(20, 32, sleeps[1]);
    });
    let other = other.join();
    done.store(true, Ordering::Release);
    owner.join().unwrap();
    other.unwrap();
}

#[test]
fn data_of_three_workers_past_the_page_cache_is_right() {
    let Some(bed) = Bed::new(CacheMode::None) else { return };
    run_and_leave(&placement(io_uring(), "adaptive", None), &bed, &[30, 40, 50]);
    run_and_leave(&placement(linux_aio(), "count:4", None), &bed, &[30, 40, 50]);
}

#[test]
fn others_go_on_when_the_completion_worker_leaves() {
    let bed = Bed::buffered();
    for policy in POLICIES {
        let placement = placement(io_uring(), policy, Some(0));
        run_and_leave(&placement, &bed, &[3, 60, 40]);
        assert!(placement.counters().moves >= 1, "{policy}: {:?}", placement.counters());
        assert_eq!(placement.completion_worker(), None);
    }
}

#[test]
fn completion_worker_changes_under_load_again_and_again() {
    let bed = Bed::buffered();
    let placement = placement(io_uring(), "adaptive", None);
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
    let deadline = Instant::now() + PATIENCE;
    for turn in 0..30_u32 {
        placement.set_completion_worker(Some(turn % 3));
        while placement.completion_worker() != Some(turn % 3) {
            assert!(
                Instant::now() < deadline,
                "turn {turn}: the owner stays {:?}",
                placement.completion_worker()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    done.store(true, Ordering::Release);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(placement.counters().moves >= 29);
}

#[test]
fn change_has_a_time_limit_only_while_no_caller_waits_for_it() {
    let bed = Bed::buffered();
    let (make, handles) = fake();
    let placement = placement(make, "count:1", Some(0));
    let mut first = Worker::start(placement.engine(0).unwrap(), 0, &bed);
    handles.lock().unwrap()[0].inject(When::Always, Fault::Hang, 1);
    first.push(first.op(0, 0, true));
    let mut second = Worker::start(placement.engine(1).unwrap(), 1, &bed);
    let mut due_after = |change: &dyn Fn()| {
        change();
        assert!(first.pass(false).is_empty());
        second.engine.submit().unwrap();
        second.engine.due()
    };
    assert_eq!(due_after(&|| placement.limit_change("disk")), None, "the owner is as asked for");
    assert_eq!(due_after(&|| placement.set_completion_worker(Some(1))), None, "the caller has its own limit");
    let due = due_after(&|| placement.limit_change("disk"));
    assert!(due.is_some());
    assert_eq!(due_after(&|| placement.limit_change("disk")), due, "a second queue starts");
    assert_eq!(due_after(&|| placement.set_completion_worker(Some(0))), None);
    handles.lock().unwrap()[0].release().unwrap();
    assert!(first.finish(1)[0].result.is_ok());
    assert_eq!((placement.completion_worker(), placement.wanted()), (Some(0), Some(0)));
}

#[test]
fn workers_come_and_go_while_one_works() {
    let bed = Bed::buffered();
    let placement = placement(io_uring(), "count:4", None);
    let steady =
        on_thread(placement.engine(0).unwrap(), 0, &bed, |worker| worker.write_and_check(300, 16, true));
    for turn in 0..20 {
        on_thread(placement.engine(1).unwrap(), 1, &bed, |worker| worker.write_and_check(3, 16, true))
            .join()
            .unwrap();
        on_thread(placement.engine(2 + turn).unwrap(), 2, &bed, |_| ()).join().unwrap();
    }
    steady.join().unwrap();
    assert_eq!(placement.completion_worker(), None);
}

#[test]
fn sleeping_workers_miss_no_wake_up_with_one_op_at_a_time() {
    let bed = Bed::buffered();
    for policy in ["count:1", "adaptive"] {
        let placement = placement(io_uring(), policy, Some(0));
        let done = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&done);
        let owner =
            on_thread(placement.engine(0).unwrap(), 0, &bed, move |worker| idle_until_rung(worker, &told));
        while placement.completion_worker() != Some(0) {
            std::thread::yield_now();
        }
        on_thread(placement.engine(1).unwrap(), 1, &bed, |worker| worker.write_and_check(1500, 1, true))
            .join()
            .unwrap();
        done.store(true, Ordering::Release);
        // Any change wakes all participants. It is repeated, because the owner may check `stop` before a change
        // and sleep after it.
        while !owner.is_finished() {
            placement.set_completion_worker(None);
            std::thread::yield_now();
        }
        owner.join().unwrap();
    }
}

/// Sleeps without a limit: a lost wake-up hangs.
fn idle_until_rung(worker: &mut Worker, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        worker.engine.submit().unwrap();
        assert!(worker.reap().is_empty());
        worker.engine.wait(None).unwrap();
    }
}

#[test]
fn errors_and_short_transfers_go_to_the_worker_whose_op_it_was() {
    let bed = Bed::buffered();
    let (make, handles) = fake();
    let placement = placement(make, "count:4", Some(0));
    let mut owner = Worker::start(placement.engine(0).unwrap(), 0, &bed);
    handles.lock().unwrap()[0].inject(When::Verb(Verb::Write), Fault::Errno(Errno::NOSPC), 1);
    handles.lock().unwrap()[0].inject(When::Verb(Verb::Write), Fault::Short(512), 3);
    handles.lock().unwrap()[0].shuffle(99);
    let done = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&done);
    let other = on_thread(placement.engine(1).unwrap(), 1, &bed, move |worker| {
        for token in 0..8 {
            worker.push(worker.op(token, token, true));
        }
        let ended = worker.finish(8);
        worker.write_and_check(20, 32, true);
        told.store(true, Ordering::Release);
        ended
    });
    idle_until(&mut owner, &done);
    let ended = other.join().unwrap();
    let failed = ended.iter().filter(|ended| ended.result == Err(OpError::Errno(Errno::NOSPC))).count();
    assert_eq!((failed, ended.iter().filter(|ended| ended.result.is_ok()).count()), (1, 7));
    assert_eq!(owner.engine.stats().resumed_calls, 3);
}

#[test]
fn cancelling_gives_up_the_workers_own_ops_and_nobody_elses() {
    let bed = Bed::buffered();
    let (make, handles) = fake();
    let placement = placement(make, "count:1", Some(0));
    let mut owner = Worker::start(placement.engine(0).unwrap(), 0, &bed);
    let fake = handles.lock().unwrap()[0].clone();
    fake.inject(When::Always, Fault::Hang, 4);
    let (ready, waits) = std::sync::mpsc::channel();
    let (go, told) = std::sync::mpsc::channel();
    let other = on_thread(placement.engine(1).unwrap(), 1, &bed, move |worker| {
        (0..2).for_each(|token| worker.push(worker.op(token, token, true)));
        worker.engine.submit().unwrap();
        ready.send(()).unwrap();
        told.recv().unwrap();
        worker.engine.cancel_all();
        worker.finish(2)
    });
    waits.recv().unwrap();
    (0..2).for_each(|token| owner.push(owner.op(token, token, true)));
    while fake.hanging() < 4 {
        assert!(owner.pass(false).is_empty());
    }
    go.send(()).unwrap();
    while !other.is_finished() {
        assert!(owner.pass(false).is_empty(), "the owner's own op was given up");
    }
    let ended = other.join().unwrap();
    assert!(ended.iter().all(|ended| ended.result == Err(OpError::Cancelled)), "{ended:?}");
    fake.release().unwrap();
    assert!(owner.finish(2).iter().all(|ended| ended.result.is_ok()));
}

#[test]
fn ops_not_yet_taken_by_the_owner_are_given_up_without_being_started() {
    let bed = Bed::buffered();
    let (make, handles) = fake();
    let placement = placement(make, "count:1", Some(0));
    let mut owner = Worker::start(placement.engine(0).unwrap(), 0, &bed);
    let mut other = Worker::start(placement.engine(1).unwrap(), 1, &bed);
    (0..2).for_each(|token| other.push(other.op(token, token, true)));
    other.engine.submit().unwrap();
    other.push(other.op(2, 2, true));
    other.engine.cancel_all();
    owner.engine.submit().unwrap();
    let ended = other.finish(3);
    assert!(ended.iter().all(|ended| ended.result == Err(OpError::Cancelled)), "{ended:?}");
    assert_eq!(handles.lock().unwrap()[0].calls(), 0);
}

#[test]
fn dropping_a_worker_leaves_its_memory_with_the_owner_until_the_kernel_is_done() {
    let bed = Bed::buffered();
    let (make, handles) = fake();
    let placement = placement(make, "count:1", Some(0));
    let mut owner = Worker::start(placement.engine(0).unwrap(), 0, &bed);
    let fake = handles.lock().unwrap()[0].clone();
    fake.inject(When::Always, Fault::Stick, 2);
    let mut other = Worker::start(placement.engine(1).unwrap(), 1, &bed);
    let before = Arc::strong_count(&bed.memory);
    (0..2).for_each(|token| other.push(other.op(token, token, true)));
    other.engine.submit().unwrap();
    owner.engine.submit().unwrap();
    assert_eq!(fake.hanging(), 2);
    drop(other);
    assert!(owner.pass(false).is_empty());
    assert!(
        Arc::strong_count(&bed.memory) > before - 1,
        "the engine let go of memory that a call may write to"
    );
    fake.release().unwrap();
    assert!(owner.pass(false).is_empty());
    owner.engine.submit().unwrap();
    assert_eq!(Arc::strong_count(&bed.memory), before - 1);
    assert_eq!(owner.engine.in_flight(), 0);
    owner.write_and_check(3, 32, true);
}

#[test]
fn dropping_the_owner_passes_on_what_others_have_in_flight() {
    let bed = Bed::buffered();
    let (make, handles) = fake();
    let placement = placement(make, "count:1", Some(0));
    let owner = Worker::start(placement.engine(0).unwrap(), 0, &bed);
    let fake = handles.lock().unwrap()[0].clone();
    fake.inject(When::Always, Fault::Hang, 2);
    let other = on_thread(placement.engine(1).unwrap(), 1, &bed, move |worker| {
        (0..6).for_each(|token| worker.push(worker.op(token, token, true)));
        let ended = worker.finish(6);
        worker.write_and_check(5, 32, true);
        ended
    });
    let mut owner = owner;
    while fake.hanging() < 2 {
        owner.pass(false);
    }
    let releases = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        fake.release().unwrap();
    });
    drop(owner);
    releases.join().unwrap();
    assert!(other.join().unwrap().iter().all(|ended| ended.result.is_ok()));
    assert_eq!(handles.lock().unwrap().len(), 2, "the other worker made an engine of its own");
}

#[test]
fn flush_reaches_the_engine_after_the_writes_that_were_seen_complete() {
    const ROUNDS: u64 = 40;
    let bed = Bed::buffered();
    let recorder = Recorder::new();
    let config = EngineConfig { recorder: Some(recorder.clone()), ..config() };
    let make: EngineMaker = Box::new(move || Ok(Box::new(IoUringEngine::new(config.clone())?)));
    let placement = placement(make, "time:100", Some(0));
    let mut owner = Worker::start(placement.engine(0).unwrap(), 0, &bed);
    let done = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&done);
    let other = on_thread(placement.engine(1).unwrap(), 1, &bed, move |worker| {
        for round in 0..ROUNDS {
            // Two writes that the flush covers, and one that is in flight at the same time.
            (0..2).for_each(|block| worker.push(worker.op(round, block, true)));
            assert!(worker.finish(2).iter().all(|ended| ended.result.is_ok()));
            worker.push(worker.op(round, 2, true));
            worker.push(worker.flush(round));
            assert!(worker.finish(2).iter().all(|ended| ended.result.is_ok()));
        }
        told.store(true, Ordering::Release);
    });
    idle_until(&mut owner, &done);
    other.join().unwrap();
    let records = recorder.records();
    let syncs = records.iter().filter(|record| record.verb == Verb::Sync);
    assert_eq!(syncs.clone().count() as u64, ROUNDS);
    for (round, sync) in (0..).zip(syncs) {
        let covered = records.iter().filter(|record| {
            let seen = record.completed.is_some_and(|(when, _)| when < sync.issued);
            record.verb == Verb::Write && seen
        });
        // The flush covers two writes of this round and all writes of earlier rounds.
        assert!(covered.count() >= 3 * round + 2, "the flush of round {round} came too early");
    }
}

#[test]
fn file_that_the_engine_refuses_fails_its_ops_and_no_others() {
    let bed = Bed::buffered();
    let Some(direct) = Bed::new(CacheMode::None) else { return };
    // Linux AIO accepts no file that is open through the page cache.
    let placement = placement(linux_aio(), "count:1", Some(0));
    let mut owner = Worker::start(placement.engine(0).unwrap(), 0, &direct);
    let mut other = Worker::start(placement.engine(1).unwrap(), 1, &bed);
    other.push(other.op(5, 0, true));
    other.engine.submit().unwrap();
    owner.engine.submit().unwrap();
    let ended = other.finish(1);
    assert_eq!(ended[0].result, Err(OpError::Errno(Errno::IO)));
    owner.write_and_check(2, 16, true);
}

#[test]
fn more_workers_than_the_depth_has_shares_for_are_refused() {
    let bed = Bed::buffered();
    let placement = placement(io_uring(), "adaptive", None);
    let mut workers: Vec<_> =
        (0..4).map(|number| Worker::start(placement.engine(number).unwrap(), number.into(), &bed)).collect();
    workers.iter_mut().for_each(|worker| worker.engine.submit().unwrap());
    let error = placement.engine(4).unwrap().start().err().unwrap();
    assert_eq!(
        error.to_string(),
        "a depth of 128 is too small for 5 workers, because each needs 32: make it larger, or use fewer \
         workers for this disk"
    );
    assert!(workers.iter().all(|worker| worker.engine.room() == 32));
}

#[test]
fn engine_that_cannot_be_made_is_an_error_and_leaves_nobody_behind() {
    let placement = placement(Box::new(|| Err(std::io::ErrorKind::Unsupported.into())), "adaptive", None);
    assert_eq!(placement.engine(0).unwrap().start().err().unwrap().kind(), std::io::ErrorKind::Unsupported);
    assert_eq!((placement.completion_worker(), placement.0.registry().list.len()), (None, 0));
}

#[test]
fn worker_that_cannot_make_an_engine_leaves_it_to_another_until_it_is_alone() {
    let bed = Bed::buffered();
    let (make, made) = (io_uring(), AtomicUsize::new(0));
    let second_fails = move || match made.fetch_add(1, Ordering::Relaxed) {
        1 => Err(std::io::ErrorKind::OutOfMemory.into()),
        _ => make(),
    };
    let placement = placement(Box::new(second_fails), "count:1", Some(0));
    let mut first = Worker::start(placement.engine(0).unwrap(), 0, &bed);
    let mut second = Worker::start(placement.engine(1).unwrap(), 1, &bed);
    placement.set_completion_worker(Some(1));
    for worker in [&mut first, &mut second] {
        worker.engine.submit().unwrap();
        assert_eq!(placement.completion_worker(), None);
    }
    first.write_and_check(2, 16, false);
    assert_eq!(placement.completion_worker(), Some(0));
    drop(first);
    second.write_and_check(2, 16, true);
    assert_eq!(placement.completion_worker(), Some(1));
}

#[test]
fn all_workers_wait_for_each_other_at_the_end_and_nothing_is_left() {
    let bed = Bed::buffered();
    let placement = placement(io_uring(), "adaptive", None);
    let before = Arc::strong_count(&bed.memory);
    run_and_leave(&placement, &bed, &[20, 20, 20, 20]);
    assert_eq!(Arc::strong_count(&bed.memory), before);
    assert!(placement.0.registry().list.is_empty());
}

#[test]
fn room_that_a_worker_has_seen_remains_until_its_next_pass_although_another_worker_comes() {
    let placement = placement(io_uring(), "count:1", Some(0));
    check_room_that_was_seen(placement.engine(0).unwrap(), placement.engine(1).unwrap());
}
