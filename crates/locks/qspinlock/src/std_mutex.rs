//! std's mutex behind `lock_api`, as a baseline; it sleeps when it has to wait.
//!
//! - `std::sync::Mutex` unlocks only when its guard is dropped, and the guard borrows the mutex. Here the
//!   guard is kept in `lock_api`'s acquisition state with its lifetime erased, and only `unlock` touches it
//!   again.
//! - Poisoning is ignored; use `std::sync::Mutex` directly if you need it.
//!
//! This lock is not fair: std promises no fairness.

use core::mem::{self, MaybeUninit};
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// std's mutex as a `lock_api` lock.
#[derive(Debug, Default)]
pub struct StdMutex(Mutex<()>);

/// One acquisition of a [`StdMutex`]. It stays with the thread that acquired it. Dropping it leaves the mutex
/// locked.
#[derive(Debug)]
pub struct StdGuard {
    /// `MaybeUninit`, because the reference in the guard may dangle: a caller need not keep the mutex alive that long.
    guard: MaybeUninit<MutexGuard<'static, ()>>,
    /// The mutex's address when it was locked.
    mutex_addr: usize,
}

impl StdMutex {
    fn addr(&self) -> usize {
        (&raw const self.0).addr()
    }

    fn keep(&self, guard: MutexGuard<'_, ()>) -> StdGuard {
        // SAFETY: 1. only the lifetime changes; 2. while the guard is outside `MaybeUninit`, in this
        // function, `self` is borrowed, so the guard's reference is valid; 3. afterwards only `unlock` uses
        // the guard, which has its own SAFETY argument.
        let guard = unsafe { mem::transmute::<MutexGuard<'_, ()>, MutexGuard<'static, ()>>(guard) };
        StdGuard { guard: MaybeUninit::new(guard), mutex_addr: self.addr() }
    }
}

// SAFETY: 1. exclusion, acquire and release are those of std's mutex: a state exists only for one of its
// guards, and only `unlock` drops that guard; 2. guards are not `Send`, as std requires; 3. a state that is
// dropped or forgotten does nothing, and the mutex stays locked, wherever it is moved; 4. `lock` unwinds only
// if std's does (it relocks on the same thread), and then there is no acquisition.
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
            // Locked, moved, then unlocked: std's guard can unlock only at the mutex's old address.
            process::abort();
        }
        // SAFETY: 1. initialised: `keep` creates every state; 2. alive: the caller promises that the state
        // belongs to this mutex, and the mutex has not moved, so the guard's reference points to `self.0`; 3.
        // once: the state is consumed.
        drop(unsafe { state.guard.assume_init() });
    }

    /// Tries to take the lock to find out, so another thread's `try_lock` may fail because of this call.
    fn is_locked(&self) -> bool {
        matches!(self.0.try_lock(), Err(TryLockError::WouldBlock))
    }
}
