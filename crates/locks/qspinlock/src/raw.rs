//! The queued locks behind `lock_api` 0.5.
//!
//! See also: `lock_api` 0.4 (`api_04.rs`), how the locks work (`queue.rs`).

#[cfg(feature = "std")]
use std::time::{Duration, Instant};

#[cfg(feature = "std")]
use crate::Linux;
use crate::{Platform, Policy, QueueLock};

// SAFETY: 1. `queue.rs` has the argument for mutual exclusion; 2. moving or dropping a locked lock touches only its own
// memory and nodes, which are never freed; 3. no operation unwinds.
unsafe impl<P: Policy, S: Platform> lock_api::RawMutex for QueueLock<P, S> {
    const INIT: Self = Self::new();

    type Guard = ();

    #[inline]
    fn lock(&self) {
        self.acquire();
    }

    #[inline]
    fn try_lock(&self) -> Option<()> {
        self.try_acquire().then_some(())
    }

    #[inline]
    unsafe fn unlock(&self, (): ()) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.release() }
    }

    fn is_locked(&self) -> bool {
        self.is_held()
    }
}

// SAFETY: 1. as above; 2. `release_fairly` hands over to the oldest waiter; 3. `bump` does not unwind.
unsafe impl<P: Policy, S: Platform> lock_api::RawMutexFair for QueueLock<P, S> {
    unsafe fn unlock_fair(&self, (): ()) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.release_fairly() }
    }
}

// SAFETY: as for `RawMutex`; a caller that gets `None` does not hold the lock.
#[cfg(feature = "std")]
unsafe impl<P: Policy> lock_api::RawMutexTimed for QueueLock<P, Linux> {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_for(&self, timeout: Duration) -> Option<()> {
        if self.try_acquire() {
            return Some(());
        }
        match crate::linux::deadline_in(timeout) {
            Some(deadline) => self.acquire_before(deadline).then_some(()),
            None => {
                self.acquire();
                Some(())
            }
        }
    }

    fn try_lock_until(&self, timeout: Instant) -> Option<()> {
        self.try_lock_for(timeout.saturating_duration_since(Instant::now()))
    }
}
