//! `qspin_rwlock_t`: many readers or one writer, first in, first out.
//!
//! Elsewhere: locks for one (`fair.rs` and the other kinds' files).

use std::ffi::c_int;
use std::mem::{align_of, size_of};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use libc::{EBUSY, EPERM, ETIMEDOUT, timespec};
use qspinlock::{Deadline, QRwLock};

use crate::calls::{OK, at, ended, had_or, init_words, released};
use crate::deadline;

/// A lock for many readers or one writer, first in, first out. Waiters spin for a while, then sleep.
#[repr(C)]
#[derive(Debug, Default)]
pub struct qspin_rwlock_t {
    /// Private to this library.
    pub opaque: [u32; 2],
}

const WORDS: usize = 2;
const _: () = assert!(size_of::<qspin_rwlock_t>() == size_of::<QRwLock>());
const _: () = assert!(align_of::<qspin_rwlock_t>() == align_of::<QRwLock>());

/// The lock at `lock`: [`at`] with the type that lies there.
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
    // SAFETY: the caller's promise.
    let lock = unsafe { rw(lock) };
    ended(lock.and_then(|lock| had_or(take(lock, deadline?), ETIMEDOUT)))
}

/// Initialises a free lock in memory that no thread uses. EINVAL (of all calls): NULL, or not aligned to 4 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_init(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller's promise; it is so many words.
    unsafe { init_words(lock.cast::<AtomicU32>(), WORDS) }
}

/// Takes the lock together with other readers; waits without limit. A thread that has the lock already, for reading or
/// writing, must not call it: it may wait for a writer that waits for this thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_rdlock(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller's promise.
    ended(unsafe { rw(lock) }.map(QRwLock::read))
}

/// As rdlock, for a thread that may have the lock for reading already: waits for the writer that has the lock, but not
/// for writers in the queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_rdlock_recursive(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller's promise.
    ended(unsafe { rw(lock) }.map(QRwLock::read_recursive))
}

/// Takes the lock alone; waits without limit. A thread that has the lock already must not call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_wrlock(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller's promise.
    ended(unsafe { rw(lock) }.map(QRwLock::write))
}

/// Takes the lock together with other readers if no writer has it or must have it first. Never waits. EBUSY: not
/// taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_tryrdlock(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller's promise.
    ended(unsafe { rw(lock) }.and_then(|lock| had_or(lock.try_read(), EBUSY)))
}

/// Takes the lock together with other readers if no writer has it. Never waits. EBUSY: not taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_tryrdlock_recursive(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller's promise.
    ended(unsafe { rw(lock) }.and_then(|lock| had_or(lock.try_read_recursive(), EBUSY)))
}

/// Takes the lock alone if it is free and no waiter must have it first. Never waits. EBUSY: not taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_trywrlock(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller's promise.
    ended(unsafe { rw(lock) }.and_then(|lock| had_or(lock.try_write(), EBUSY)))
}

/// As qspin_rwlock_rdlock, but waits only until CLOCK_MONOTONIC shows `deadline_ns` nanoseconds (see
/// qspin_deadline_in). ETIMEDOUT: not taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_timedrdlock(lock: *mut qspin_rwlock_t, deadline_ns: u64) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { lock_before(lock, Ok(deadline::monotonic(deadline_ns)), QRwLock::read_before) }
}

/// As qspin_rwlock_rdlock_recursive, with a deadline as in qspin_rwlock_timedrdlock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_timedrdlock_recursive(
    lock: *mut qspin_rwlock_t,
    deadline_ns: u64,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { lock_before(lock, Ok(deadline::monotonic(deadline_ns)), QRwLock::read_recursive_before) }
}

/// As qspin_rwlock_wrlock, with a deadline as in qspin_rwlock_timedrdlock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_timedwrlock(lock: *mut qspin_rwlock_t, deadline_ns: u64) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { lock_before(lock, Ok(deadline::monotonic(deadline_ns)), QRwLock::write_before) }
}

/// As qspin_rwlock_timedrdlock, with CLOCK_MONOTONIC or CLOCK_REALTIME and a time of that clock. EINVAL: another
/// clock, no deadline, or nanoseconds of a second or more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_clockrdlock(
    lock: *mut qspin_rwlock_t,
    clock: c_int,
    deadline: *const timespec,
) -> c_int {
    // SAFETY: the caller's promise.
    let deadline = unsafe { deadline::of_clock(clock, deadline) };
    // SAFETY: the caller's promise.
    unsafe { lock_before(lock, deadline, QRwLock::read_before) }
}

/// As qspin_rwlock_timedrdlock_recursive, with a clock and a deadline as in qspin_rwlock_clockrdlock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_clockrdlock_recursive(
    lock: *mut qspin_rwlock_t,
    clock: c_int,
    deadline: *const timespec,
) -> c_int {
    // SAFETY: the caller's promise.
    let deadline = unsafe { deadline::of_clock(clock, deadline) };
    // SAFETY: the caller's promise.
    unsafe { lock_before(lock, deadline, QRwLock::read_recursive_before) }
}

/// As qspin_rwlock_timedwrlock, with a clock and a deadline as in qspin_rwlock_clockrdlock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_clockwrlock(
    lock: *mut qspin_rwlock_t,
    clock: c_int,
    deadline: *const timespec,
) -> c_int {
    // SAFETY: the caller's promise.
    let deadline = unsafe { deadline::of_clock(clock, deadline) };
    // SAFETY: the caller's promise.
    unsafe { lock_before(lock, deadline, QRwLock::write_before) }
}

/// Ends one reader's access. EPERM: no reader had the lock; nothing has changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_rdunlock(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller's promise.
    let lock = unsafe { rw(lock) };
    let read =
        lock.and_then(|lock| had_or(lock.is_held() && !lock.is_held_exclusively(), EPERM).map(|()| lock));
    // SAFETY: readers have it; that the caller is one of them is the caller's promise.
    released(read, |lock| unsafe { lock.release_read() })
}

/// Ends the writer's access. EPERM: no writer had the lock; nothing has changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_wrunlock(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller's promise.
    let lock = unsafe { rw(lock) };
    let written = lock.and_then(|lock| had_or(lock.is_held_exclusively(), EPERM).map(|()| lock));
    // SAFETY: a writer has it; that the caller is it is the caller's promise.
    released(written, |lock| unsafe { lock.release_write() })
}

/// Returns 2 if a writer has the lock at this moment, 1 if readers have it; 0 if it is free, or if `lock` is NULL or
/// not aligned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_is_locked(lock: *const qspin_rwlock_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { rw(lock) }.map_or(
        0,
        |lock| {
            if lock.is_held_exclusively() { 2 } else { c_int::from(lock.is_held()) }
        },
    )
}

/// Checks that the memory can be freed: EBUSY if a thread has the lock or waits for it. Frees the nodes of waiters
/// that gave up at a deadline; a lock without such waiters needs no destroy. The lock is free afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_rwlock_destroy(lock: *mut qspin_rwlock_t) -> c_int {
    // SAFETY: the caller's promise.
    let errno = unsafe { qspin_rwlock_trywrlock(lock) };
    if errno != OK {
        return errno;
    }
    // SAFETY: the caller's promise, and taken above.
    unsafe { qspin_rwlock_wrunlock(lock) };
    // SAFETY: the caller's promise; aligned, or `trywrlock` would have said so, and it is two atomic words.
    let words = unsafe { lock.cast::<[AtomicU32; WORDS]>().as_ref() };
    // A snapshot: if a thread comes now, the caller's mistake stays undetected.
    let is_free = words.is_some_and(|words| words.iter().all(|word| word.load(Relaxed) == 0));
    if is_free { OK } else { EBUSY }
}
