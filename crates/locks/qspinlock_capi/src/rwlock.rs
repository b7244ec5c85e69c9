//! `qspin_rwlock_t`: many readers or one writer, first in, first out.
//!
//! See also: exclusive locks (`fair.rs` and the other kinds' files).

use std::ffi::c_int;
use std::mem::{align_of, size_of};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use libc::{EBUSY, EPERM, ETIMEDOUT, timespec};
use qspinlock::{Deadline, QRwLock};

use crate::calls::{OK, at, check, ended, init_words, released};
use crate::deadline;

/// A lock for many readers or one writer. Readers and writers wait in one queue, first in, first out. They spin, then
/// sleep.
#[repr(C)]
#[derive(Debug, Default)]
pub struct qspin_rwlock_t {
    /// Private to this library.
    pub opaque: [u32; 2],
}

const WORDS: usize = 2;
const _: () = assert!(size_of::<qspin_rwlock_t>() == size_of::<QRwLock>());
const _: () = assert!(align_of::<qspin_rwlock_t>() == align_of::<QRwLock>());

/// Like [`at`], for a reader-writer lock.
#[inline]
unsafe fn rw<'a>(lock: *const qspin_rwlock_t) -> Result<&'a QRwLock, c_int> {
    // SAFETY: 1. the caller's promise; 2. a `QRwLock` is two atomic words (the assertions above), valid with any bits.
    unsafe { at(lock.cast::<QRwLock>()) }
}

unsafe fn lock_before(
    lock: *mut qspin_rwlock_t,
    deadline: Result<Deadline, c_int>,
    take: fn(&QRwLock, Deadline) -> bool,
) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    let lock = unsafe { rw(lock) };
    ended(lock.and_then(|lock| check(take(lock, deadline?), ETIMEDOUT)))
}

/// Initialises `lock` as unlocked. No other thread may use the memory during the call.
///
/// Returns 0 or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_init(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller's promise; the lock has this many words.
    unsafe { init_words(lock.cast::<AtomicU32>(), WORDS) }
}

/// Locks `lock` for reading, together with other readers; waits without a time limit. A thread that already holds the
/// lock, for reading or for writing, must not call this function: it could wait for a writer that waits for this
/// thread.
///
/// Returns 0 or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_rdlock(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    ended(unsafe { rw(lock) }.map(QRwLock::read))
}

/// Like qspin_rwlock_rdlock, for a thread that may already hold the lock for reading: waits for a writer that holds the
/// lock, but not for writers in the queue. Each successful call needs its own qspin_rwlock_rdunlock.
///
/// Returns 0 or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_rdlock_recursive(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    ended(unsafe { rw(lock) }.map(QRwLock::read_recursive))
}

/// Locks `lock` exclusively, for writing; waits without a time limit. A thread that already holds the lock must not
/// call this function.
///
/// Returns 0 or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_wrlock(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    ended(unsafe { rw(lock) }.map(QRwLock::write))
}

/// Locks `lock` for reading, unless a writer holds it or it is reserved for a waiter. Never waits.
///
/// Returns 0, EBUSY (not locked) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_tryrdlock(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    ended(unsafe { rw(lock) }.and_then(|lock| check(lock.try_read(), EBUSY)))
}

/// Locks `lock` for reading, unless a writer holds it. Never waits.
///
/// Returns 0, EBUSY (not locked) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_tryrdlock_recursive(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    ended(unsafe { rw(lock) }.and_then(|lock| check(lock.try_read_recursive(), EBUSY)))
}

/// Locks `lock` for writing if it is free and is not reserved for a waiter. Never waits.
///
/// Returns 0, EBUSY (not locked) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_trywrlock(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    ended(unsafe { rw(lock) }.and_then(|lock| check(lock.try_write(), EBUSY)))
}

/// Like qspin_rwlock_rdlock, but waits only until CLOCK_MONOTONIC reaches `deadline_ns`, in nanoseconds (see
/// qspin_deadline_in).
///
/// Returns 0, ETIMEDOUT (not locked) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_timedrdlock(lock: *mut qspin_rwlock_t, deadline_ns: u64) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { lock_before(lock, Ok(deadline::monotonic(deadline_ns)), QRwLock::read_before) }
}

/// Like qspin_rwlock_rdlock_recursive, with a deadline as in qspin_rwlock_timedrdlock.
///
/// Returns 0, ETIMEDOUT (not locked) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_timedrdlock_recursive(
    lock: *mut qspin_rwlock_t,
    deadline_ns: u64,
) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { lock_before(lock, Ok(deadline::monotonic(deadline_ns)), QRwLock::read_recursive_before) }
}

/// Like qspin_rwlock_wrlock, with a deadline as in qspin_rwlock_timedrdlock.
///
/// Returns 0, ETIMEDOUT (not locked) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_timedwrlock(lock: *mut qspin_rwlock_t, deadline_ns: u64) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { lock_before(lock, Ok(deadline::monotonic(deadline_ns)), QRwLock::write_before) }
}

/// Like qspin_rwlock_timedrdlock, but waits until the clock `clock` (CLOCK_MONOTONIC or CLOCK_REALTIME) reaches the
/// absolute time `deadline`.
///
/// Returns 0, ETIMEDOUT (not locked) or EINVAL. EINVAL also means that `clock` is another clock, `deadline` is NULL,
/// or its tv_nsec is not from 0 to 999999999.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_clockrdlock(
    lock: *mut qspin_rwlock_t,
    clock: c_int,
    deadline: *const timespec,
) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    let deadline = unsafe { deadline::of_clock(clock, deadline) };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { lock_before(lock, deadline, QRwLock::read_before) }
}

/// Like qspin_rwlock_timedrdlock_recursive, with a clock and a deadline as in qspin_rwlock_clockrdlock.
///
/// Returns 0, ETIMEDOUT (not locked) or EINVAL. EINVAL also means that `clock` is another clock, `deadline` is NULL,
/// or its tv_nsec is not from 0 to 999999999.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_clockrdlock_recursive(
    lock: *mut qspin_rwlock_t,
    clock: c_int,
    deadline: *const timespec,
) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    let deadline = unsafe { deadline::of_clock(clock, deadline) };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { lock_before(lock, deadline, QRwLock::read_recursive_before) }
}

/// Like qspin_rwlock_timedwrlock, with a clock and a deadline as in qspin_rwlock_clockrdlock.
///
/// Returns 0, ETIMEDOUT (not locked) or EINVAL. EINVAL also means that `clock` is another clock, `deadline` is NULL,
/// or its tv_nsec is not from 0 to 999999999.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_clockwrlock(
    lock: *mut qspin_rwlock_t,
    clock: c_int,
    deadline: *const timespec,
) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    let deadline = unsafe { deadline::of_clock(clock, deadline) };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { lock_before(lock, deadline, QRwLock::write_before) }
}

/// Unlocks `lock` for one reader.
///
/// Returns 0, EPERM (no reader held the lock; nothing has changed) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_rdunlock(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    let lock = unsafe { rw(lock) };
    let read =
        lock.and_then(|lock| check(lock.is_held() && !lock.is_held_exclusively(), EPERM).map(|()| lock));
    // SAFETY: readers hold the lock; the caller promises that it is one of them.
    released(read, |lock| unsafe { lock.release_read() })
}

/// Unlocks `lock` for the writer.
///
/// Returns 0, EPERM (no writer held the lock; nothing has changed) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_wrunlock(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    let lock = unsafe { rw(lock) };
    let written = lock.and_then(|lock| check(lock.is_held_exclusively(), EPERM).map(|()| lock));
    // SAFETY: a writer holds the lock; the caller promises that it is this writer.
    released(written, |lock| unsafe { lock.release_write() })
}

/// Returns 2 if a writer holds the lock, 1 if readers hold it, and 0 if it is free. The result may be outdated when the
/// call returns. Returns 0 if `lock` is NULL or not aligned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_is_locked(lock: *const qspin_rwlock_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { rw(lock) }.map_or(
        0,
        |lock| {
            if lock.is_held_exclusively() { 2 } else { c_int::from(lock.is_held()) }
        },
    )
}

/// Checks that no thread holds the lock or waits for it, and frees the queue nodes of waiters that gave up at a
/// deadline. The lock is free afterwards: its memory may be freed, or the lock used again. Only a lock on which a
/// waiter gave up needs this call.
///
/// Returns 0, EBUSY (a thread holds the lock or waits for it) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_destroy(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    let errno = unsafe { qspin_rwlock_trywrlock(lock) };
    if errno != OK {
        return errno;
    }
    // SAFETY: the caller's promise; `trywrlock` has taken the lock.
    unsafe { qspin_rwlock_wrunlock(lock) };
    // SAFETY: the caller's promise; aligned, as `trywrlock` has checked, and the lock is two atomic words.
    let words = unsafe { lock.cast::<[AtomicU32; WORDS]>().as_ref() };
    // A snapshot: it misses a thread that uses the lock after this, which is the caller's mistake.
    let is_free = words.is_some_and(|words| words.iter().all(|word| word.load(Relaxed) == 0));
    if is_free { OK } else { EBUSY }
}
