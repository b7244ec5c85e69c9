//! Adapts any `lock_api` 0.4 raw lock (parking_lot 0.12's, for example) to `lock_api` 0.5.
//!
//! 0.4 marks for each lock type whether guards are `Send`; 0.5 keeps a state for each acquisition. This adapter's
//! state is only the 0.4 marker.
//!
//! Does not adapt locks with time limits or reader/writer locks.

use core::fmt;
use core::marker::PhantomData;

/// A `lock_api` 0.4 raw lock as a 0.5 raw lock.
pub struct Api04<R>(R);

/// Prints only the type's name.
impl<R> fmt::Debug for Api04<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api04").finish_non_exhaustive()
    }
}

// SAFETY: 1. 0.4 has the same requirements for an implementation: exclusion, with acquire and release; 2. in
// both versions only the context that holds the lock may call `unlock`; 3. guards move to other threads only
// if 0.4's marker allows it; 4. 0.4's own `Mutex` lets safe code forget a guard and move or drop the mutex,
// so its raw locks survive that.
unsafe impl<R: lock_api_04::RawMutex> lock_api::RawMutex for Api04<R> {
    const INIT: Self = Self(R::INIT);

    type Guard = PhantomData<R::GuardMarker>;

    #[inline]
    fn lock(&self) -> Self::Guard {
        self.0.lock();
        PhantomData
    }

    #[inline]
    fn try_lock(&self) -> Option<Self::Guard> {
        self.0.try_lock().then_some(PhantomData)
    }

    #[inline]
    unsafe fn unlock(&self, _state: Self::Guard) {
        // SAFETY: the caller promises that this context holds the lock.
        unsafe { self.0.unlock() };
    }

    fn is_locked(&self) -> bool {
        self.0.is_locked()
    }
}

// SAFETY: as above; 0.4's fair unlock has the same contract.
unsafe impl<R: lock_api_04::RawMutexFair> lock_api::RawMutexFair for Api04<R> {
    #[inline]
    unsafe fn unlock_fair(&self, _state: Self::Guard) {
        // SAFETY: the caller promises that this context holds the lock.
        unsafe { self.0.unlock_fair() };
    }

    #[inline]
    unsafe fn bump(&self, _state: &mut Self::Guard) {
        // SAFETY: the caller promises that this context holds the lock, and this context holds it again on return.
        unsafe { self.0.bump() };
    }
}
