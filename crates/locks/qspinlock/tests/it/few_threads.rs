//! The shipped queued locks on Linux's futexes, with few threads and rounds. Sized for Miri, which interprets
//! every step; each seed gives another order of steps, and other old values to read.
//!
//! See also: all interleavings (`src/model/`), many threads (`queued.rs`).
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use lock_api::{Mutex, RawMutex, RawMutexFair, RawMutexTimed};
use qspinlock::{Linux, Policy, QueueLock};

const THREADS: u32 = 3;
const ROUNDS: u32 = 4;

/// Fewer looks: with the shipped policies a thread would hardly ever sleep under Miri.
struct Impatient<P>(core::marker::PhantomData<P>);

impl<P: Policy> Policy for Impatient<P> {
    const SLEEPS: bool = true;
    const PASS_LIMIT: u32 = if P::PASS_LIMIT > 2 { 2 } else { P::PASS_LIMIT };
    const SERVES_THE_AWAKE: bool = P::SERVES_THE_AWAKE;
    const NEWCOMER_LOOKS: u32 = if P::NEWCOMER_LOOKS > 1 { 1 } else { P::NEWCOMER_LOOKS };
    const WAITER_LOOKS: u32 = 2;
    const WAITER_LOOKS_BEHIND_A_SLEEPER: u32 = 1;
    const HEIR_LOOKS: u32 = 2;
    const HEIR_NAP_NS: u64 = P::HEIR_NAP_NS;
}

fn together<T: Send + 'static>(run: impl Fn(u32) -> T + Send + Sync + 'static) -> Vec<T> {
    let run = Arc::new(run);
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let run = Arc::clone(&run);
            thread::spawn(move || run(thread))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn sum_is_what_was_added<R: RawMutex + Send + Sync + 'static>() {
    let number = Arc::new(Mutex::<R, u32>::new(0));
    let theirs = Arc::clone(&number);
    together(move |_| (0..ROUNDS).for_each(|_| *theirs.lock() += 1));
    assert_eq!(*number.lock(), THREADS * ROUNDS);
    assert!(!number.is_locked());
}

fn sum_is_what_was_added_when_some_release_fairly_and_some_only_try<
    R: RawMutexFair + Send + Sync + 'static,
>() {
    let number = Arc::new(Mutex::<R, u32>::new(0));
    let theirs = Arc::clone(&number);
    let added = together(move |thread| {
        let add = |round| match (thread + round) % 3 {
            0 => theirs.try_lock().map_or(0, |mut number| {
                *number += 1;
                1
            }),
            1 => {
                let mut number = theirs.lock();
                *number += 1;
                lock_api::MutexGuard::unlock_fair(number);
                1
            }
            _ => {
                *theirs.lock() += 1;
                1
            }
        };
        (0..ROUNDS).map(add).sum::<u32>()
    });
    assert_eq!(*number.lock(), added.iter().sum::<u32>());
    assert!(!number.is_locked());
}

fn who_gives_up_leaves_a_lock_that_works<R: RawMutexTimed<Duration = Duration> + Send + Sync + 'static>() {
    let number = Arc::new(Mutex::<R, u32>::new(0));
    let theirs = Arc::clone(&number);
    let added = together(move |thread| {
        let wait = Duration::from_micros(u64::from(thread) * 20);
        let add = |_| {
            theirs.try_lock_for(wait).map_or(0, |mut number| {
                *number += 1;
                1
            })
        };
        (0..ROUNDS).map(add).sum::<u32>()
    });
    assert_eq!(*number.lock(), added.iter().sum::<u32>());
    assert!(!number.is_locked());
}

/// The lock's memory may be freed as soon as another thread has the lock: the unlocking thread must no longer
/// touch it.
fn lock_is_freed_by_who_has_it_last<R: RawMutex + Send + Sync + 'static>() {
    for _ in 0..ROUNDS {
        let boxed = Arc::new(Mutex::<R, Option<mpsc::Sender<()>>>::new(None));
        let theirs = Arc::clone(&boxed);
        let held = boxed.lock();
        let other = thread::spawn(move || drop(theirs.lock()));
        drop(held);
        drop(boxed);
        other.join().unwrap();
    }
}

macro_rules! few_threads {
    ($($module:ident: $policy:ty),*) => {
        $(mod $module {
            type Lock = super::QueueLock<super::Impatient<$policy>, super::Linux>;

            #[test]
            fn sum_is_what_was_added() {
                super::sum_is_what_was_added::<Lock>();
            }
            #[test]
            fn sum_is_what_was_added_when_some_release_fairly_and_some_only_try() {
                super::sum_is_what_was_added_when_some_release_fairly_and_some_only_try::<Lock>();
            }
            #[test]
            fn who_gives_up_leaves_a_lock_that_works() {
                super::who_gives_up_leaves_a_lock_that_works::<Lock>();
            }
            #[test]
            fn lock_is_freed_by_who_has_it_last() {
                super::lock_is_freed_by_who_has_it_last::<Lock>();
            }
        })*
    };
}

few_threads!(fifo: qspinlock::Fifo, fair: qspinlock::Fair, hybrid: qspinlock::Hybrid);
