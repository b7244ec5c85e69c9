//! Checks `lock_api`'s contract for each of our locks.
//!
//! See also: fairness (`src/ticket/tests.rs`), all interleavings of two threads (`src/model/`).
#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Arc;
use std::thread;

use lock_api::{Mutex, RawMutex};

const THREADS: usize = 4;
/// Miri interprets every step, and on two cores spinners take turns.
const ROUNDS: usize = if cfg!(miri) { 20 } else { 2_000 };

/// The sum is kept in two words; if two threads were inside at once, the words would differ.
fn words_stay_equal_under_threads<R: RawMutex + Send + Sync + 'static>() {
    let mutex = Arc::new(Mutex::<R, _>::new([0_usize; 2]));
    let add = |mutex: Arc<Mutex<R, [usize; 2]>>| {
        for _ in 0..ROUNDS {
            let mut words = mutex.lock();
            words[0] += 1;
            words[1] = words[0];
            drop(words);
            thread::yield_now(); // for more threads than cores, and a lock that only spins
        }
    };
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            thread::spawn({
                let mutex = Arc::clone(&mutex);
                move || add(mutex)
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(*mutex.lock(), [THREADS * ROUNDS; 2]);
}

fn try_lock_fails_only_while_held<R: RawMutex>() {
    let mutex = Mutex::<R, _>::new(0);
    let held = mutex.lock();
    assert!(mutex.is_locked() && mutex.try_lock().is_none());
    drop(held);
    assert!(!mutex.is_locked() && mutex.try_lock().is_some());
    assert!(mutex.try_lock().is_some());
}

fn panic_while_held_unlocks<R: RawMutex + Send + Sync + 'static>() {
    let mutex = Arc::new(Mutex::<R, _>::new(7));
    let theirs = Arc::clone(&mutex);
    let panicked = thread::spawn(move || {
        let _held = theirs.lock();
        panic!("meant to");
    });
    assert!(panicked.join().is_err());
    assert_eq!(*mutex.lock(), 7);
    assert_eq!(mutex.try_lock().map(|value| *value), Some(7));
}

fn forgotten_guard_leaves_a_mutex_that_is_locked_and_can_be_moved_and_dropped<R: RawMutex>() {
    let mutex = Box::new(Mutex::<R, _>::new(0));
    std::mem::forget(mutex.lock());
    let moved = *mutex;
    assert!(moved.try_lock().is_none());
    drop(moved);
}

fn state_may_outlive_its_lock<R: RawMutex>() {
    let raw = Box::new(R::INIT);
    let state = raw.lock();
    drop(raw);
    let moved = Some(state);
    drop(moved);
}

macro_rules! contract {
    ($module:ident, $lock:ty) => {
        mod $module {
            #[test]
            fn words_stay_equal_under_threads() {
                super::words_stay_equal_under_threads::<$lock>();
            }
            #[test]
            fn try_lock_fails_only_while_held() {
                super::try_lock_fails_only_while_held::<$lock>();
            }
            #[test]
            fn panic_while_held_unlocks() {
                super::panic_while_held_unlocks::<$lock>();
            }
            #[test]
            fn forgotten_guard_leaves_a_mutex_that_is_locked_and_can_be_moved_and_dropped() {
                super::forgotten_guard_leaves_a_mutex_that_is_locked_and_can_be_moved_and_dropped::<$lock>();
            }
            #[test]
            fn state_may_outlive_its_lock() {
                super::state_may_outlive_its_lock::<$lock>();
            }
        }
    };
}

contract!(ticket_lock, qspinlock::TicketLock);
contract!(std_mutex, qspinlock::StdMutex);
#[cfg(feature = "stats")]
contract!(profiled, qspinlock::stats::Profiled<qspinlock::TicketLock>);
#[cfg(feature = "misuse")]
contract!(checked, qspinlock::checked::Checked<qspinlock::PvQSpinLock>);
#[cfg(feature = "lock_api_04")]
contract!(parking_lot_of_lock_api_04, qspinlock::Api04<parking_lot_012::RawMutex>);
#[cfg(feature = "peers")]
contract!(futex_lock, qspinlock::peers::FutexLock);
#[cfg(feature = "peers")]
contract!(pthread_mutex, qspinlock::peers::PthreadMutex);
#[cfg(feature = "peers")]
contract!(pthread_spin, qspinlock::peers::PthreadSpin);

#[test]
fn lock_is_made_in_a_constant() {
    static COUNT: qspinlock::TicketMutex<u32> = qspinlock::TicketMutex::new(1);
    *COUNT.lock() += 1;
    assert_eq!(*COUNT.lock(), 2);
}

#[test]
fn ticket_guard_is_released_by_another_thread() {
    fn is_send<T: Send>(_: &T) {}
    let mutex = qspinlock::TicketMutex::new(0);
    let held = mutex.lock();
    is_send(&held);
    thread::scope(|scope| scope.spawn(|| drop(held)).join().unwrap());
    assert!(!mutex.is_locked());
}
