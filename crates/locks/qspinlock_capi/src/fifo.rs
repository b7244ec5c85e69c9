//! `qspin_fifo_t`: first in, first out, without exception, with waiters that sleep.
//!
//! Not here: what the calls do (`calls.rs`).

use std::ffi::c_int;
use std::mem::{align_of, size_of};

use libc::timespec;
use qspinlock::{Linux, QueueLock};

use crate::{calls, deadline};

type Kind = qspinlock::Fifo;

/// A lock that is handed over first in, first out, to sleeping waiters too: it is idle while they wake up.
#[repr(C)]
#[derive(Debug, Default)]
pub struct qspin_fifo_t {
    /// Of this library.
    pub opaque: u32,
}

const _: () = assert!(size_of::<qspin_fifo_t>() == size_of::<QueueLock<Kind, Linux>>());
const _: () = assert!(align_of::<qspin_fifo_t>() == align_of::<QueueLock<Kind, Linux>>());

// SAFETY: by the assertions above.
unsafe impl calls::Spin for qspin_fifo_t {
    type Policy = Kind;
}

/// Makes a free lock of memory that nobody uses. EINVAL: NULL, or not aligned to 4 bytes; so for all calls.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_init(lock: *mut qspin_fifo_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::init(lock) }
}

/// Takes the lock, however long that takes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_lock(lock: *mut qspin_fifo_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::lock(lock) }
}

/// Takes the lock if it is free and nobody is to have it first. Never waits. EBUSY: it did not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_trylock(lock: *mut qspin_fifo_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::try_lock(lock) }
}

/// Takes the lock unless CLOCK_MONOTONIC shows `deadline_ns` nanoseconds first (see qspin_deadline_in). A lock that is
/// free is taken even if the deadline has passed. ETIMEDOUT: not taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_timedlock(lock: *mut qspin_fifo_t, deadline_ns: u64) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::lock_before(lock, Ok(deadline::monotonic(deadline_ns))) }
}

/// As above, with CLOCK_MONOTONIC or CLOCK_REALTIME and a reading of it. EINVAL: another clock, no deadline, or
/// nanoseconds that are not below a second.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_clocklock(
    lock: *mut qspin_fifo_t,
    clock: c_int,
    deadline: *const timespec,
) -> c_int {
    // SAFETY: the caller's promise.
    let deadline = unsafe { deadline::of_clock(clock, deadline) };
    // SAFETY: the caller's promise.
    unsafe { calls::lock_before(lock, deadline) }
}

/// Lets the lock go. EPERM: nobody held it, and nothing was done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_unlock(lock: *mut qspin_fifo_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::unlock(lock) }
}

/// Lets the lock go to the oldest waiter, whatever the kind of lock. EPERM: nobody held it, and nothing was done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_unlock_fair(lock: *mut qspin_fifo_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::unlock_fair(lock) }
}

/// 1 if somebody holds the lock at this moment, 0 if not, or if there is no lock at `lock`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_is_locked(lock: *const qspin_fifo_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::is_locked(lock) }
}

/// Says whether the memory may go: EBUSY if the lock is held or waited for. It collects what waiters left behind that
/// gave up at a deadline; a lock without such waiters needs no destroying. It is a free lock afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qspin_fifo_destroy(lock: *mut qspin_fifo_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { calls::destroy(lock) }
}
