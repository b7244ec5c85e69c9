//! The calls for an uncontended lock, and what they leave unchanged.
//!
//! See also: contended locks (`queued.rs`).
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::thread;

use qspinlock::{Hybrid, PvQSpinLock};

#[test]
fn free_lock_is_had_and_given_up() {
    let lock = PvQSpinLock::<Hybrid>::new();
    assert!(lock.try_acquire_unwanted());
    assert!(!lock.try_acquire_unwanted());
    // SAFETY: acquired above.
    assert!(unsafe { lock.try_release_unwanted() });
    assert!(!lock.is_held());
}

#[test]
fn lock_that_nobody_holds_stays_free() {
    let lock = PvQSpinLock::<Hybrid>::new();
    // SAFETY: not held; the call may be used to find that out.
    assert!(!unsafe { lock.try_release_unwanted() });
    assert!(!lock.is_held());
}

#[test]
fn lock_that_somebody_waits_for_is_not_given_up_this_way() {
    let lock = PvQSpinLock::<Hybrid>::new();
    lock.acquire();
    thread::scope(|scope| {
        scope.spawn(|| {
            lock.acquire();
            // SAFETY: acquired above.
            unsafe { lock.release() };
        });
        while !lock.is_wanted() {
            thread::yield_now();
        }
        // SAFETY: acquired above.
        assert!(!unsafe { lock.try_release_unwanted() });
        assert!(lock.is_held());
        // SAFETY: as above.
        unsafe { lock.release() };
    });
    assert!(lock.try_acquire_unwanted());
}
