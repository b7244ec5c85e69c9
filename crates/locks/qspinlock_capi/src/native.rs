//! `qspin_native_t`: first in, first out, spinning only.
//!
//! Elsewhere: what the calls do (`calls.rs`).

use std::ffi::c_int;
use std::mem::{align_of, size_of};

use libc::timespec;
use qspinlock::{Linux, QueueLock};

use crate::{calls, deadline};

type Kind = qspinlock::Native;

/// A lock that goes to waiters first in, first out. Waiters only spin: for threads that have a core each.
#[repr(C)]
#[derive(Debug, Default)]
pub struct qspin_native_t {
    /// Private to this library.
    pub opaque: u32,
}

const _: () = assert!(size_of::<qspin_native_t>() == size_of::<QueueLock<Kind, Linux>>());
const _: () = assert!(align_of::<qspin_native_t>() == align_of::<QueueLock<Kind, Linux>>());

// SAFETY: by the assertions above.
unsafe impl calls::Spin for qspin_native_t {
    type Policy = Kind;
}

/// Initialises a free lock in memory that no thread uses. EINVAL (of all calls): NULL, or not aligned to 4 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_native_init(lock: *mut qspin_native_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::init(lock) }
}

/// Takes the lock; waits without limit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_native_lock(lock: *mut qspin_native_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::lock(lock) }
}

/// Takes the lock if it is free and no waiter must have it first. Never waits. EBUSY: not taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_native_trylock(lock: *mut qspin_native_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::try_lock(lock) }
}

/// Takes the lock; waits until CLOCK_MONOTONIC shows `deadline_ns` nanoseconds (see qspin_deadline_in). Takes a free
/// lock even if the deadline has passed. ETIMEDOUT: not taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_native_timedlock(lock: *mut qspin_native_t, deadline_ns: u64) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::lock_before(lock, Ok(deadline::monotonic(deadline_ns))) }
}

/// As timedlock, with CLOCK_MONOTONIC or CLOCK_REALTIME and a time of that clock. EINVAL: another clock, no deadline,
/// or nanoseconds of a second or more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_native_clocklock(
    lock: *mut qspin_native_t,
    clock: c_int,
    deadline: *const timespec,
) -> c_int {
    // SAFETY: the caller's promise.
    let deadline = unsafe { deadline::of_clock(clock, deadline) };
    // SAFETY: the caller's promise.
    unsafe { calls::lock_before(lock, deadline) }
}

/// Releases the lock. EPERM: the lock was free; nothing has changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_native_unlock(lock: *mut qspin_native_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::unlock(lock) }
}

/// Hands the lock to the oldest waiter, for any type of lock. EPERM: the lock was free; nothing has changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_native_unlock_fair(lock: *mut qspin_native_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::unlock_fair(lock) }
}

/// Returns 1 if a thread holds the lock at this moment; 0 if not, or if `lock` is NULL or not aligned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_native_is_locked(lock: *const qspin_native_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::is_locked(lock) }
}

/// Checks that the memory can be freed: EBUSY if a thread holds the lock or waits for it. Frees the nodes of waiters
/// that gave up at a deadline; a lock without such waiters needs no destroy. The lock is free afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_native_destroy(lock: *mut qspin_native_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::destroy(lock) }
}
