//! Any raw lock made for `lock_api` 0.4 where 0.5 is asked for: parking_lot 0.12's, say.
//!
//! 0.4 has a marker per lock that says whether guards may be sent; 0.5 has a state per acquisition. The state here is
//! the marker and nothing else.
//!
//! Not here: locks with time limits, locks for readers and writers.

use core::fmt;
use core::marker::PhantomData;

/// A `lock_api` 0.4 raw lock as one of 0.5.
pub struct Api04<R>(R);

/// Nothing to see: users of the lock do not look inside.
impl<R> fmt::Debug for Api04<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api04").finish_non_exhaustive()
    }
}

// SAFETY: 1. 0.4 asks the same of an implementation: exclusion, with acquire and release; 2. `unlock` may be called
// only by who has the lock, there as here; 3. guards go to other threads only if 0.4's marker says that they may;
// 4. 0.4's own `Mutex` lets safe code forget a guard and move or drop the mutex, so its raw locks survive that.
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
        // SAFETY: the caller promises that this context holds the lock, and has it again when this returns.
        unsafe { self.0.bump() };
    }
}
