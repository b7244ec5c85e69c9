//! What the calls do, for every kind of lock.
//!
//! Elsewhere: their names and their descriptions for C programmers (`native.rs` and the other kinds' files).

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use libc::{EBUSY, EINVAL, EPERM, ETIMEDOUT};
use qspinlock::{Deadline, Linux, Policy, QueueLock};

pub(crate) const OK: c_int = 0;

/// A type of the header's that is a lock of policy [`Self::Policy`].
///
/// # Safety
/// It has the size and alignment of an `AtomicU32`, of which every lock is made, and zero is a free one.
pub(crate) unsafe trait Spin {
    type Policy: Policy;
}

type LockOf<T> = QueueLock<<T as Spin>::Policy, Linux>;

/// The lock at `lock`.
///
/// # Safety
/// It is NULL, or points to a lock that stays where it is during `'a`, of a type that is valid with any bits.
#[inline]
pub(crate) unsafe fn at<'a, L>(lock: *const L) -> Result<&'a L, c_int> {
    if !lock.is_aligned() {
        return Err(EINVAL); // a structure that was packed: the processor may tear its words
    }
    // SAFETY: 1. aligned, as looked at above; 2. NULL or alive for `'a`, and valid, says the caller; 3. shared: threads
    // use it through atomics only.
    unsafe { lock.as_ref() }.ok_or(EINVAL)
}

/// [`at`], for a type of the header's.
#[inline]
unsafe fn spin<'a, T: Spin>(lock: *const T) -> Result<&'a LockOf<T>, c_int> {
    // SAFETY: 1. the caller's promise; 2. one atomic word (`Spin`), valid with any bits.
    unsafe { at(lock.cast::<LockOf<T>>()) }
}

#[inline]
pub(crate) fn ended(result: Result<(), c_int>) -> c_int {
    result.map_or_else(|errno| errno, |()| OK)
}

#[inline]
pub(crate) fn had_or(had: bool, errno: c_int) -> Result<(), c_int> {
    if had { Ok(()) } else { Err(errno) }
}

/// Makes a free lock of whatever bytes there are.
pub(crate) unsafe fn init<T: Spin>(lock: *mut T) -> c_int {
    // SAFETY: the caller's promise; an `AtomicU32` is what a lock is made of.
    unsafe { init_words(lock.cast::<AtomicU32>(), 1) }
}

/// Makes a free lock of so many words.
pub(crate) unsafe fn init_words(words: *mut AtomicU32, count: usize) -> c_int {
    if words.is_null() || !words.is_aligned() {
        return EINVAL;
    }
    // SAFETY: the caller's promise; aligned and not NULL, as looked at above.
    let words = unsafe { std::slice::from_raw_parts(words, count) };
    // No thread uses it yet: code that passes it to other threads orders this before their use.
    words.iter().for_each(|word| word.store(0, Relaxed));
    OK
}

#[inline]
pub(crate) unsafe fn lock<T: Spin>(lock: *mut T) -> c_int {
    // SAFETY: the caller's promise.
    ended(unsafe { spin(lock) }.map(|lock| lock.acquire()))
}

#[inline]
pub(crate) unsafe fn try_lock<T: Spin>(lock: *mut T) -> c_int {
    // SAFETY: the caller's promise.
    ended(unsafe { spin(lock) }.and_then(|lock| had_or(lock.try_acquire(), EBUSY)))
}

#[inline]
pub(crate) unsafe fn lock_before<T: Spin>(lock: *mut T, deadline: Result<Deadline, c_int>) -> c_int {
    // SAFETY: the caller's promise.
    let lock = unsafe { spin(lock) };
    ended(lock.and_then(|lock| had_or(lock.acquire_before(deadline?), ETIMEDOUT)))
}

#[inline]
pub(crate) unsafe fn unlock<T: Spin>(lock: *mut T) -> c_int {
    // SAFETY: the caller's promise.
    let held = unsafe { held_at(lock) };
    // SAFETY: it is held; that it is by the caller is the caller's promise.
    released(held, |lock| unsafe { lock.release() })
}

pub(crate) unsafe fn unlock_fair<T: Spin>(lock: *mut T) -> c_int {
    // SAFETY: the caller's promise.
    let held = unsafe { held_at(lock) };
    // SAFETY: it is held; that it is by the caller is the caller's promise.
    released(held, |lock| unsafe { lock.release_fairly() })
}

/// Releases the lock, if it is one. Where waiters are on their way to a free lock, it looks held to us, and builds for
/// debugging panic when it is released: that must not unwind into C.
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
    // SAFETY: the caller's promise.
    let lock = unsafe { spin(lock) }?;
    had_or(lock.is_held(), EPERM).map(|()| lock)
}

pub(crate) unsafe fn is_locked<T: Spin>(lock: *const T) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { spin(lock) }.map_or(0, |lock| c_int::from(lock.is_held()))
}

/// Takes the lock and releases it, which also frees the nodes of waiters that gave up.
pub(crate) unsafe fn destroy<T: Spin>(lock: *mut T) -> c_int {
    // SAFETY: the caller's promise.
    let errno = unsafe { try_lock(lock) };
    if errno != OK {
        return errno;
    }
    // SAFETY: the caller's promise, and held since above.
    unsafe { unlock(lock) };
    // SAFETY: the caller's promise; aligned, or `try_lock` would have said so, and a lock is one `AtomicU32`.
    let word = unsafe { lock.cast::<AtomicU32>().as_ref() };
    // A snapshot: if a thread comes now, the caller's mistake stays undetected.
    if word.is_some_and(|word| word.load(Relaxed) == 0) { OK } else { EBUSY }
}
