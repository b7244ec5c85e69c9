//! The implementation of the calls, shared by all kinds of locks.
//!
//! See also: the exported functions and their descriptions (`native.rs` and the other kinds' files).

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use libc::{EBUSY, EINVAL, EPERM, ETIMEDOUT};
use qspinlock::{Deadline, Linux, Policy, QueueLock};

pub(crate) const OK: c_int = 0;

/// A type of the header that is a lock with the policy [`Self::Policy`].
///
/// # Safety
/// The type has the size and alignment of an `AtomicU32`, like every lock, and zero is a free lock.
pub(crate) unsafe trait Spin {
    type Policy: Policy;
}

type LockOf<T> = QueueLock<<T as Spin>::Policy, Linux>;

/// The lock at `lock`.
///
/// # Safety
/// `lock` is NULL or misaligned, or points to a lock that is not moved or freed during `'a`. Any bits are a valid `L`.
#[inline]
pub(crate) unsafe fn at<'a, L>(lock: *const L) -> Result<&'a L, c_int> {
    if !lock.is_aligned() {
        return Err(EINVAL); // in a packed structure, for example: accesses would not be atomic
    }
    // SAFETY: 1. `lock` is aligned, as checked above; 2. the caller's promise: it is NULL, or its lock is alive for
    // `'a`, and valid; 3. threads share the lock only through atomics.
    unsafe { lock.as_ref() }.ok_or(EINVAL)
}

/// Like [`at`], for a lock type of the header.
#[inline]
unsafe fn spin<'a, T: Spin>(lock: *const T) -> Result<&'a LockOf<T>, c_int> {
    // SAFETY: 1. the caller's promise; 2. one atomic word (`Spin`), valid with any bits.
    unsafe { at(lock.cast::<LockOf<T>>()) }
}

/// Converts a result to an error number; 0 for success.
#[inline]
pub(crate) fn ended(result: Result<(), c_int>) -> c_int {
    result.map_or_else(|errno| errno, |()| OK)
}

/// Returns the error `errno` if `succeeded` is false.
#[inline]
pub(crate) fn check(succeeded: bool, errno: c_int) -> Result<(), c_int> {
    if succeeded { Ok(()) } else { Err(errno) }
}

/// Initialises a free lock; the memory may contain any bytes.
pub(crate) unsafe fn init<T: Spin>(lock: *mut T) -> c_int {
    // SAFETY: the caller's promise; a lock is one `AtomicU32`.
    unsafe { init_words(lock.cast::<AtomicU32>(), 1) }
}

/// Initialises a free lock of `count` words.
pub(crate) unsafe fn init_words(words: *mut AtomicU32, count: usize) -> c_int {
    if words.is_null() || !words.is_aligned() {
        return EINVAL;
    }
    // SAFETY: the caller's promise; aligned and not NULL, as checked above.
    let words = unsafe { std::slice::from_raw_parts(words, count) };
    // Relaxed: no other thread uses the lock yet, and publishing it to other threads orders these stores before their
    // use.
    words.iter().for_each(|word| word.store(0, Relaxed));
    OK
}

#[inline]
pub(crate) unsafe fn lock<T: Spin>(lock: *mut T) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    ended(unsafe { spin(lock) }.map(|lock| lock.acquire()))
}

#[inline]
pub(crate) unsafe fn try_lock<T: Spin>(lock: *mut T) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    ended(unsafe { spin(lock) }.and_then(|lock| check(lock.try_acquire(), EBUSY)))
}

#[inline]
pub(crate) unsafe fn lock_before<T: Spin>(lock: *mut T, deadline: Result<Deadline, c_int>) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    let lock = unsafe { spin(lock) };
    ended(lock.and_then(|lock| check(lock.acquire_before(deadline?), ETIMEDOUT)))
}

#[inline]
pub(crate) unsafe fn unlock<T: Spin>(lock: *mut T) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    let held = unsafe { held_at(lock) };
    // SAFETY: it is held; the caller promises that it may release it.
    released(held, |lock| unsafe { lock.release() })
}

pub(crate) unsafe fn unlock_fair<T: Spin>(lock: *mut T) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    let held = unsafe { held_at(lock) };
    // SAFETY: it is held; the caller promises that it may release it.
    released(held, |lock| unsafe { lock.release_fairly() })
}

/// Releases the lock, unless `held` is an error. A free lock that a waiter is about to take looks held here, and debug
/// builds panic when it is released; the panic must not unwind into C.
#[inline]
pub(crate) fn released<L>(held: Result<&L, c_int>, release: impl Fn(&L)) -> c_int {
    let release = |lock: &L| {
        if !cfg!(debug_assertions) {
            release(lock);
            return Ok(());
        }
        catch_unwind(AssertUnwindSafe(|| release(lock))).map_err(|_| EPERM)
    };
    ended(held.and_then(release))
}

/// The lock at `lock`, unless it is free.
#[inline]
unsafe fn held_at<'a, T: Spin>(lock: *mut T) -> Result<&'a LockOf<T>, c_int> {
    // SAFETY: the caller upholds the contract of the C header.
    let lock = unsafe { spin(lock) }?;
    check(lock.is_held(), EPERM).map(|()| lock)
}

pub(crate) unsafe fn is_locked<T: Spin>(lock: *const T) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { spin(lock) }.map_or(0, |lock| c_int::from(lock.is_held()))
}

/// Takes the lock and releases it, which also frees the nodes of waiters that gave up.
pub(crate) unsafe fn destroy<T: Spin>(lock: *mut T) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    let errno = unsafe { try_lock(lock) };
    if errno != OK {
        return errno;
    }
    // SAFETY: the caller's promise; `try_lock` has taken the lock.
    unsafe { unlock(lock) };
    // SAFETY: the caller's promise; aligned, as `try_lock` has checked, and a lock is one `AtomicU32`.
    let word = unsafe { lock.cast::<AtomicU32>().as_ref() };
    // A snapshot: it misses a thread that uses the lock after this, which is the caller's mistake.
    if word.is_some_and(|word| word.load(Relaxed) == 0) { OK } else { EBUSY }
}
