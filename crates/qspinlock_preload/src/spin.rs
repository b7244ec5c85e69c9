//! `pthread_spin_*` in the four bytes of a `pthread_spinlock_t`.
//!
//! - A private one is a queued lock: zeros are a free lock, and its waiters sleep when it takes too long.
//! - One that was initialised as process-shared is marked by bits that no queued lock has ([`FOREIGN`]), and goes
//!   another way (`spin/shared.rs`). The mark stays as long as the lock does.
//! - glibc on x86-64 writes 1 for "free" and 0 for "held", and on aarch64 it is the other way round. So all calls are
//!   replaced together, and a lock that was initialised by a process without this library is no lock here: a 1 looks
//!   held. There is no static initialiser in POSIX; zeros are taken for a free private lock on both.
//! - Another thread than the one that locked it may unlock it.
//!
//! Not here: queues (`qspinlock`).

mod shared;

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use libc::EBUSY;
use qspinlock::FOREIGN;

use crate::patience::{Lock, Patience, let_go_slowly, take_slowly};
use shared::SharedSpin;

/// libc's name for the type, which its crate does not have on all targets.
#[allow(non_camel_case_types)]
type pthread_spinlock_t = c_int;

enum Spin<'a> {
    Private(&'a Lock),
    Shared(&'a SharedSpin),
}

/// # Safety
/// `lock` points to an initialised lock that lives as long as it is used.
unsafe fn spin<'a>(lock: *mut pthread_spinlock_t) -> Spin<'a> {
    // SAFETY: aligned and alive, as the caller says, and only accessed as atomics.
    let word = unsafe { &*lock.cast::<AtomicU32>() };
    // The mark never changes while the lock is used.
    if word.load(Relaxed) >= FOREIGN {
        // SAFETY: as above; it is nothing but such a word.
        Spin::Shared(unsafe { &*lock.cast::<SharedSpin>() })
    } else {
        // SAFETY: the caller's.
        Spin::Private(unsafe { private(lock) })
    }
}

/// The lock as if it were private, for exchanges that do nothing if it is not.
///
/// # Safety
/// As for [`spin`].
#[inline]
unsafe fn private<'a>(lock: *mut pthread_spinlock_t) -> &'a Lock {
    // SAFETY: aligned and alive, as the caller says, and only accessed as one atomic.
    unsafe { &*lock.cast::<Lock>() }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_spin_init(lock: *mut pthread_spinlock_t, shared: c_int) -> c_int {
    let free = if shared == libc::PTHREAD_PROCESS_SHARED { SharedSpin::FREE } else { 0 };
    // SAFETY: the caller's memory for a lock, aligned and writable; nobody else uses it yet.
    unsafe { lock.cast::<AtomicU32>().write(AtomicU32::new(free)) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_spin_destroy(lock: *mut pthread_spinlock_t) -> c_int {
    // SAFETY: the caller's.
    let held = match unsafe { spin(lock) } {
        Spin::Private(lock) => lock.is_held(),
        Spin::Shared(lock) => lock.is_held(),
    };
    if held { EBUSY } else { 0 }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_spin_lock(lock: *mut pthread_spinlock_t) -> c_int {
    // SAFETY: the caller's.
    unsafe { spin_lock(lock, Patience::Endless) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_spin_trylock(lock: *mut pthread_spinlock_t) -> c_int {
    // SAFETY: the caller's.
    unsafe { spin_lock(lock, Patience::None) }
}

/// # Safety
/// As for [`spin`].
#[inline]
unsafe fn spin_lock(lock: *mut pthread_spinlock_t, patience: Patience) -> c_int {
    // SAFETY: the caller's. Only a free private lock has the word that is exchanged, so there is no need to look first.
    if unsafe { private(lock) }.try_acquire_unwanted() {
        return 0;
    }
    // SAFETY: the caller's.
    match unsafe { spin(lock) } {
        Spin::Private(lock) => take_slowly(lock, patience),
        Spin::Shared(lock) => lock.lock(patience),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_spin_unlock(lock: *mut pthread_spinlock_t) -> c_int {
    // SAFETY: the caller's.
    let maybe_private = unsafe { private(lock) };
    // SAFETY: who calls this says that it holds the lock. Only a private lock that is held has the word exchanged here.
    if unsafe { maybe_private.try_release_unwanted() } {
        return 0;
    }
    // SAFETY: the caller's.
    match unsafe { spin(lock) } {
        // SAFETY: as above.
        Spin::Private(lock) => unsafe { let_go_slowly(lock) },
        Spin::Shared(lock) => lock.unlock(),
    }
}
