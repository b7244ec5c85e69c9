//! std's mutex behind `lock_api`: the one that everybody has, which sleeps when it has to wait.
//!
//! - `std::sync::Mutex` unlocks only by dropping its guard, and the guard borrows the mutex. The guard travels in
//!   `lock_api`'s state of the acquisition with its lifetime erased, and is touched again by `unlock` alone.
//! - Poison is ignored: whoever wants it has `std::sync::Mutex`.
//!
//! Not here: fairness; std promises none.

use core::mem::{self, MaybeUninit};
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// See the file's head.
#[derive(Debug, Default)]
pub struct StdMutex(Mutex<()>);

/// One acquisition of a [`StdMutex`]; stays with the thread that acquired it. Dropped, it leaves the mutex locked.
#[derive(Debug)]
pub struct StdGuard {
    /// `MaybeUninit`, because the reference in it may dangle: nothing forces a caller to keep the mutex that long.
    guard: MaybeUninit<MutexGuard<'static, ()>>,
    /// Where the mutex was when it was locked.
    mutex_addr: usize,
}

impl StdMutex {
    fn addr(&self) -> usize {
        (&raw const self.0).addr()
    }

    fn keep(&self, guard: MutexGuard<'_, ()>) -> StdGuard {
        // SAFETY: 1. only the lifetime changes; 2. while it is outside of `MaybeUninit`, in this function, `self` is
        // borrowed, so the reference in it is good; 3. afterwards only `unlock` uses it, which argues for itself.
        let guard = unsafe { mem::transmute::<MutexGuard<'_, ()>, MutexGuard<'static, ()>>(guard) };
        StdGuard { guard: MaybeUninit::new(guard), mutex_addr: self.addr() }
    }
}

// SAFETY: 1. exclusion, acquire and release are those of std's mutex: a state exists only for a guard of it, and that
// guard is dropped by `unlock` alone; 2. guards are not `Send`, as std requires; 3. a state that is dropped or
// forgotten does nothing, and the mutex stays locked, wherever it is moved; 4. `lock` unwinds only if std's does
// (it locks again on the same thread), without an acquisition then.
unsafe impl lock_api::RawMutex for StdMutex {
    const INIT: Self = Self(Mutex::new(()));

    type Guard = StdGuard;

    #[inline]
    fn lock(&self) -> StdGuard {
        self.keep(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[inline]
    fn try_lock(&self) -> Option<StdGuard> {
        match self.0.try_lock() {
            Ok(guard) => Some(self.keep(guard)),
            Err(TryLockError::Poisoned(poisoned)) => Some(self.keep(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    #[inline]
    unsafe fn unlock(&self, state: StdGuard) {
        if state.mutex_addr != self.addr() {
            // Locked, moved, then unlocked: std's guard can only unlock where the mutex was.
            process::abort();
        }
        // SAFETY: 1. initialised: `keep` makes every state; 2. alive: the caller promises that the state is of this
        // mutex, and it has not moved, so the guard's reference points to `self.0`; 3. once: the state is consumed.
        drop(unsafe { state.guard.assume_init() });
    }

    /// Takes the lock for a moment to find out, so that another thread's `try_lock` may fail because of it.
    fn is_locked(&self) -> bool {
        matches!(self.0.try_lock(), Err(TryLockError::WouldBlock))
    }
}
