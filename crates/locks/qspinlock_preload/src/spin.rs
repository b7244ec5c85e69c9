//! `pthread_spin_*` in the four bytes of a `pthread_spinlock_t`.
//!
//! - A private lock is a queued lock: all zeros is unlocked, and its waiters sleep if they wait too long.
//! - A process-shared lock is marked at initialisation by bits that no queued lock has ([`FOREIGN`]), and its
//!   calls go to `spin/shared.rs`. The mark stays as long as the lock exists.
//! - glibc on x86-64 writes 1 for "free" and 0 for "held"; on aarch64 it is the other way round. So all calls
//!   are replaced together, and a lock that a process without this library initialised does not work with it: a
//!   1 looks held. POSIX has no static initialiser; zeros count as a free private lock on both processors.
//! - Any thread may unlock a lock, not only the one that locked it.
//!
//! See also: queues (`qspinlock`).

mod shared;

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use libc::EBUSY;
use qspinlock::FOREIGN;

use crate::patience::{Lock, Patience, release_slowly, take_slowly};
use shared::SharedSpin;

/// libc's name for the type; the libc crate does not define it on all targets.
#[allow(non_camel_case_types)]
type pthread_spinlock_t = c_int;

enum Spin<'a> {
    Private(&'a Lock),
    Shared(&'a SharedSpin),
}

/// # Safety
/// `lock` points to an initialised lock that lives as long as the result is used.
unsafe fn spin<'a>(lock: *mut pthread_spinlock_t) -> Spin<'a> {
    // SAFETY: aligned and alive, as the caller guarantees, and accessed only as atomics.
    let word = unsafe { &*lock.cast::<AtomicU32>() };
    // The mark never changes while the lock is used.
    if word.load(Relaxed) >= FOREIGN {
        // SAFETY: as above; a `SharedSpin` is just such a word.
        Spin::Shared(unsafe { &*lock.cast::<SharedSpin>() })
    } else {
        // SAFETY: the caller keeps the POSIX contract of this call.
        Spin::Private(unsafe { private(lock) })
    }
}

/// The lock as if it were private, for exchanges that do nothing if it is process-shared.
///
/// # Safety
/// The contract of [`spin`] applies.
#[inline]
unsafe fn private<'a>(lock: *mut pthread_spinlock_t) -> &'a Lock {
    // SAFETY: aligned and alive, as the caller guarantees, and accessed only as one atomic.
    unsafe { &*lock.cast::<Lock>() }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_spin_init(lock: *mut pthread_spinlock_t, shared: c_int) -> c_int {
    let free = if shared == libc::PTHREAD_PROCESS_SHARED { SharedSpin::FREE } else { 0 };
    // SAFETY: the caller's memory for a lock, aligned and writable; no other thread uses it yet.
    unsafe { lock.cast::<AtomicU32>().write(AtomicU32::new(free)) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_spin_destroy(lock: *mut pthread_spinlock_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    let held = match unsafe { spin(lock) } {
        Spin::Private(lock) => lock.is_held(),
        Spin::Shared(lock) => lock.is_held(),
    };
    if held { EBUSY } else { 0 }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_spin_lock(lock: *mut pthread_spinlock_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { spin_lock(lock, Patience::Endless) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_spin_trylock(lock: *mut pthread_spinlock_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { spin_lock(lock, Patience::None) }
}

/// # Safety
/// The contract of [`spin`] applies.
#[inline]
unsafe fn spin_lock(lock: *mut pthread_spinlock_t, patience: Patience) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call. Only a free private lock has the exchanged value, so
    // the word need not be read first.
    if unsafe { private(lock) }.try_acquire_unwanted() {
        return 0;
    }
    // SAFETY: the caller keeps the POSIX contract of this call.
    match unsafe { spin(lock) } {
        Spin::Private(lock) => take_slowly(lock, patience),
        Spin::Shared(lock) => lock.lock(patience),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_spin_unlock(lock: *mut pthread_spinlock_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    let maybe_private = unsafe { private(lock) };
    // SAFETY: the caller guarantees that it holds the lock. Only a held private lock has the value exchanged here.
    if unsafe { maybe_private.try_release_unwanted() } {
        return 0;
    }
    // SAFETY: the caller keeps the POSIX contract of this call.
    match unsafe { spin(lock) } {
        // SAFETY: as above.
        Spin::Private(lock) => unsafe { release_slowly(lock) },
        Spin::Shared(lock) => lock.unlock(),
    }
}
