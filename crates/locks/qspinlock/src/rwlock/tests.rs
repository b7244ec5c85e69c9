//! Tests of counts at their limit, and of unlocking a lock that is not held.
//!
//! See also: threads (`tests/it/rwlock.rs`).
#![allow(clippy::unwrap_used)]

use core::sync::atomic::Ordering::Relaxed;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::counts::{ASLEEP, FULL, READER, WAITING, WRITER};
use super::{MAX_READERS, QueueRwLock};
use crate::{Clock, Deadline, Linux, now};

type Lock = QueueRwLock<Linux>;

fn with_word(word: u32) -> Lock {
    let lock = Lock::new();
    lock.counts.store(word, Relaxed);
    lock
}

fn word(lock: &Lock) -> u32 {
    lock.counts.load(Relaxed)
}

/// A deadline late enough for the waiter to fall asleep first.
fn soon() -> Deadline {
    let now = now(Clock::Monotonic);
    Deadline { at_ns: now.at_ns + 5_000_000, ..now }
}

/// Asserts that the mistake `unlock` panics in a build with debug assertions, and has no effect in other builds.
fn is_diagnosed(unlock: impl FnOnce()) {
    assert_eq!(catch_unwind(AssertUnwindSafe(unlock)).is_err(), cfg!(debug_assertions));
}

#[test]
fn last_reader_that_fits_gets_in_and_the_next_is_refused() {
    let lock = with_word((MAX_READERS - 1) * READER);
    assert!(lock.try_read());
    assert_eq!(word(&lock), FULL);
    assert!(!lock.try_read() && !lock.try_read_recursive() && !lock.try_write());
    assert_eq!(word(&lock), FULL);
}

#[test]
fn reader_beyond_the_last_gives_up_at_its_deadline_and_counts_nothing() {
    let lock = with_word(FULL);
    assert!(!lock.read_before(now(Clock::Monotonic)));
    assert!(!lock.read_recursive_before(now(Clock::Monotonic)));
    assert_eq!(word(&lock), FULL);
    assert!(!lock.queue.is_held());
}

#[test]
fn reader_beyond_the_last_gets_in_when_another_one_leaves() {
    let lock = with_word(FULL);
    std::thread::scope(|scope| {
        let beyond = scope.spawn(|| lock.read());
        // SAFETY: one of the readers that the lock was created with.
        unsafe { lock.release_read() };
        beyond.join().unwrap();
    });
    assert_eq!(word(&lock), FULL);
}

#[test]
fn reader_that_unlocks_a_free_lock_is_diagnosed_and_changes_nothing() {
    let lock = Lock::new();
    // SAFETY: none; this call is the mistake under test. The lock has no data.
    is_diagnosed(|| unsafe { lock.release_read() });
    assert_eq!(word(&lock), 0);
    assert!(lock.try_write());
}

#[test]
fn reader_that_unlocks_a_writers_lock_is_diagnosed_and_changes_nothing() {
    let lock = Lock::new();
    lock.write();
    // SAFETY: none; this call is the mistake under test. The lock has no data.
    is_diagnosed(|| unsafe { lock.release_read() });
    assert_eq!(word(&lock), WRITER);
}

#[test]
fn writer_that_unlocks_a_free_lock_is_diagnosed_and_changes_nothing() {
    let lock = Lock::new();
    // SAFETY: none; this call is the mistake under test. The lock has no data.
    is_diagnosed(|| unsafe { lock.release_write() });
    // SAFETY: as above.
    is_diagnosed(|| unsafe { lock.release_write_fairly() });
    assert_eq!(word(&lock), 0);
}

#[test]
fn writer_that_unlocks_or_downgrades_a_readers_lock_is_diagnosed_and_changes_nothing() {
    let lock = Lock::new();
    lock.read();
    // SAFETY: none; this call is the mistake under test. The lock has no data.
    is_diagnosed(|| unsafe { lock.release_write() });
    // SAFETY: as above.
    is_diagnosed(|| unsafe { lock.downgrade() });
    assert_eq!(word(&lock), READER);
}

#[test]
fn writer_that_gives_up_leaves_no_trace() {
    let lock = Lock::new();
    lock.read();
    assert!(!lock.write_before(soon()));
    assert_eq!(word(&lock), READER);
    assert!(!lock.queue.is_held());
}

#[test]
fn reader_that_gives_up_leaves_no_trace() {
    let lock = Lock::new();
    lock.write();
    assert!(!lock.read_before(soon()) && !lock.read_recursive_before(soon()));
    assert_eq!(word(&lock), WRITER);
    assert!(!lock.queue.is_held());
}

/// A fair unlock marks the lock for a waiter, which may have timed out meanwhile.
#[test]
fn mark_that_nobody_is_behind_keeps_nobody_out() {
    let lock = with_word(WAITING);
    assert!(lock.try_read());
    assert_eq!(word(&lock), READER);
    let lock = with_word(WAITING);
    assert!(lock.try_write());
    // SAFETY: acquired above.
    unsafe { lock.release_write() };
    assert_eq!(word(&lock), 0);
    assert!(!lock.queue.is_held());
}

#[test]
fn mark_that_nobody_is_behind_goes_when_trying_fails() {
    let lock = with_word(WAITING | READER);
    assert!(!lock.try_write());
    assert_eq!(word(&lock), READER);
    assert!(!lock.queue.is_held());
}

#[test]
fn recursive_reader_before_a_writer_that_was_woken_takes_the_flag_away() {
    let lock = with_word(WAITING | ASLEEP);
    lock.read_recursive();
    assert_eq!(word(&lock), WAITING | READER);
    let lock = with_word(WAITING | ASLEEP | READER);
    lock.read_recursive();
    assert_eq!(word(&lock), WAITING | ASLEEP | (2 * READER), "no thread has woken it yet");
}
