//! `qspin_fifo_t`: first in, first out, without exception, with waiters that sleep.
//!
//! See also: the implementation of the calls (`calls.rs`).

use std::ffi::c_int;
use std::mem::{align_of, size_of};

use libc::timespec;
use qspinlock::{Linux, QueueLock};

use crate::{calls, deadline};

type Kind = qspinlock::Fifo;

/// A lock that waiters get strictly first in, first out. It stays idle while the next waiter wakes up.
#[repr(C)]
#[derive(Debug, Default)]
pub struct qspin_fifo_t {
    /// Private to this library.
    pub opaque: u32,
}

const _: () = assert!(size_of::<qspin_fifo_t>() == size_of::<QueueLock<Kind, Linux>>());
const _: () = assert!(align_of::<qspin_fifo_t>() == align_of::<QueueLock<Kind, Linux>>());

// SAFETY: by the assertions above.
unsafe impl calls::Spin for qspin_fifo_t {
    type Policy = Kind;
}

/// Initialises `lock` as unlocked. No other thread may use the memory during the call.
///
/// Returns 0 or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_init(lock: *mut qspin_fifo_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { calls::init(lock) }
}

/// Locks `lock`; waits without a time limit.
///
/// Returns 0 or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_lock(lock: *mut qspin_fifo_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { calls::lock(lock) }
}

/// Locks `lock` if it is free and is not reserved for a waiter. Never waits.
///
/// Returns 0, EBUSY (not locked) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_trylock(lock: *mut qspin_fifo_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { calls::try_lock(lock) }
}

/// Locks `lock`; waits until CLOCK_MONOTONIC reaches `deadline_ns`, in nanoseconds (see qspin_deadline_in). Locks a
/// free lock even if the deadline has passed.
///
/// Returns 0, ETIMEDOUT (not locked) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_timedlock(lock: *mut qspin_fifo_t, deadline_ns: u64) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { calls::lock_before(lock, Ok(deadline::monotonic(deadline_ns))) }
}

/// Like timedlock, but waits until the clock `clock` (CLOCK_MONOTONIC or CLOCK_REALTIME) reaches the absolute time
/// `deadline`.
///
/// Returns 0, ETIMEDOUT (not locked) or EINVAL. EINVAL also means that `clock` is another clock, `deadline` is NULL,
/// or its tv_nsec is not from 0 to 999999999.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_clocklock(
    lock: *mut qspin_fifo_t,
    clock: c_int,
    deadline: *const timespec,
) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    let deadline = unsafe { deadline::of_clock(clock, deadline) };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { calls::lock_before(lock, deadline) }
}

/// Unlocks `lock`. Any thread may call this function, not only the one that locked the lock.
///
/// Returns 0, EPERM (the lock was free and stays free) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_unlock(lock: *mut qspin_fifo_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { calls::unlock(lock) }
}

/// Unlocks `lock` and hands it to the thread that has waited longest, whatever the type of the lock. Without waiters,
/// this is the same as unlock.
///
/// Returns 0, EPERM (the lock was free and stays free) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_unlock_fair(lock: *mut qspin_fifo_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { calls::unlock_fair(lock) }
}

/// Returns 1 if a thread holds the lock, and 0 if not. The result may be outdated when the call returns. Returns 0 if
/// `lock` is NULL or not aligned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_is_locked(lock: *const qspin_fifo_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { calls::is_locked(lock) }
}

/// Checks that no thread holds the lock or waits for it, and frees the queue nodes of waiters that gave up at a
/// deadline. The lock is free afterwards: its memory may be freed, or the lock used again. Only a lock on which a
/// waiter gave up needs this call.
///
/// Returns 0, EBUSY (a thread holds the lock or waits for it) or EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_destroy(lock: *mut qspin_fifo_t) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { calls::destroy(lock) }
}
