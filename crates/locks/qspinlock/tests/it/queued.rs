//! The queued locks with real threads: exclusion, progress, order.
//!
//! See also: `lock_api`'s contract for all locks (`contract.rs`), long runs (`torture/`).
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lock_api::RawMutex;
use qspinlock::{Clock, Deadline, Fair, Hybrid, Native, PvQSpinLock, QSpinLock, QueueLock};

const _: () = assert!(size_of::<QSpinLock>() == 4 && size_of::<PvQSpinLock<Fair>>() == 4);

fn count_together<L: RawMutex + Send + Sync + 'static>(threads: u64, rounds: u64) {
    let numbers = Arc::new(lock_api::Mutex::<L, [u64; 4]>::new([0; 4]));
    let workers: Vec<_> = (0..threads)
        .map(|_| {
            let numbers = Arc::clone(&numbers);
            thread::spawn(move || {
                for _ in 0..rounds {
                    let mut numbers = numbers.lock();
                    let before = *numbers;
                    assert!(before.iter().all(|n| *n == before[0]), "another thread is inside: {before:?}");
                    numbers.iter_mut().for_each(|n| *n += 1);
                }
            })
        })
        .collect();
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    assert_eq!(*numbers.lock(), [threads * rounds; 4]);
}

#[test]
fn many_threads_under_a_fair_lock_lose_nothing() {
    count_together::<PvQSpinLock<Fair>>(16, 2_000);
}

#[test]
fn many_threads_under_a_hybrid_lock_lose_nothing() {
    count_together::<PvQSpinLock<Hybrid>>(16, 20_000);
}

#[test]
fn two_threads_under_a_native_lock_lose_nothing() {
    count_together::<QSpinLock>(2, 20_000);
}

#[test]
fn timed_waiters_give_up_and_the_others_go_on() {
    let lock = Arc::new(lock_api::Mutex::<PvQSpinLock<Hybrid>, u64>::new(0));
    let workers: Vec<_> = (0..8_u64)
        .map(|worker| {
            let lock = Arc::clone(&lock);
            thread::spawn(move || {
                let mut got = 0;
                for round in 0..300 {
                    let wait = Duration::from_micros((worker * 37 + round * 11) % 200);
                    if let Some(mut guard) = lock.try_lock_for(wait) {
                        *guard += 1;
                        got += 1;
                        if round % 8 == 0 {
                            thread::sleep(Duration::from_micros(50));
                        }
                    }
                }
                got
            })
        })
        .collect();
    let got: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
    assert_eq!(*lock.lock(), got);
    assert!(!lock.is_locked());
}

#[test]
fn waiter_that_is_late_from_the_beginning_leaves_nothing_in_the_queue() {
    let lock = PvQSpinLock::<Fair>::new();
    assert!(lock.try_acquire());
    let late = Deadline { clock: Clock::Monotonic, at_ns: 1 };

    let taken = lock.acquire_before(late);

    assert!(!taken && !lock.is_wanted());
}

#[test]
fn native_names_the_policy_and_not_another_algorithm() {
    fn is_native(_: &QueueLock<Native, qspinlock::Linux>) {}
    is_native(&QSpinLock::new());
}
