//! The reader/writer locks behind `lock_api` 0.5.
//!
//! See also: `lock_api` 0.4 (`raw_04.rs`), recursive readers (`recursive.rs`), how the lock works
//! (`rwlock.rs`).

#[cfg(feature = "std")]
use std::time::{Duration, Instant};

use super::QueueRwLock;
use crate::Platform;
#[cfg(feature = "std")]
use crate::{Deadline, Linux};

// SAFETY: 1. `rwlock.rs` has the argument for mutual exclusion, with acquire and release; 2. moving or dropping a held
// lock touches only its own memory; 3. no operation unwinds if its contract is kept.
unsafe impl<S: Platform> lock_api::RawRwLock for QueueRwLock<S> {
    const INIT: Self = Self::new();

    type SharedGuard = ();

    type ExclusiveGuard = ();

    #[inline]
    fn lock_shared(&self) {
        self.read();
    }

    #[inline]
    fn try_lock_shared(&self) -> Option<()> {
        self.try_read().then_some(())
    }

    #[inline]
    unsafe fn unlock_shared(&self, (): ()) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.release_read() }
    }

    #[inline]
    fn lock_exclusive(&self) {
        self.write();
    }

    #[inline]
    fn try_lock_exclusive(&self) -> Option<()> {
        self.try_write().then_some(())
    }

    #[inline]
    unsafe fn unlock_exclusive(&self, (): ()) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.release_write() }
    }

    fn is_locked(&self) -> bool {
        self.is_held()
    }

    fn is_locked_exclusive(&self) -> bool {
        self.is_held_exclusively()
    }
}

// SAFETY: as above; after a fair release newcomers queue behind the threads that already wait.
unsafe impl<S: Platform> lock_api::RawRwLockFair for QueueRwLock<S> {
    unsafe fn unlock_shared_fair(&self, (): ()) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.release_read_fairly() }
    }

    unsafe fn unlock_exclusive_fair(&self, (): ()) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.release_write_fairly() }
    }

    unsafe fn bump_shared(&self, (): &mut ()) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.bump_read() }
    }

    unsafe fn bump_exclusive(&self, (): &mut ()) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.bump_write() }
    }
}

// SAFETY: as above; `downgrade` lets no writer in between.
unsafe impl<S: Platform> lock_api::RawRwLockDowngrade for QueueRwLock<S> {
    #[inline]
    unsafe fn downgrade(&self, (): ()) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.downgrade() }
    }
}

// SAFETY: as above; a caller that gets `None` does not hold the lock.
#[cfg(feature = "std")]
unsafe impl lock_api::RawRwLockTimed for QueueRwLock<Linux> {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_shared_for(&self, timeout: Duration) -> Option<()> {
        within(timeout, || self.try_read(), |deadline| self.read_before(deadline), || self.read())
    }

    fn try_lock_shared_until(&self, timeout: Instant) -> Option<()> {
        self.try_lock_shared_for(timeout.saturating_duration_since(Instant::now()))
    }

    fn try_lock_exclusive_for(&self, timeout: Duration) -> Option<()> {
        within(timeout, || self.try_write(), |deadline| self.write_before(deadline), || self.write())
    }

    fn try_lock_exclusive_until(&self, timeout: Instant) -> Option<()> {
        self.try_lock_exclusive_for(timeout.saturating_duration_since(Instant::now()))
    }
}

/// Reads the clock only if the lock is not available at once. A timeout beyond the clock's range never ends.
#[cfg(feature = "std")]
pub(super) fn within(
    timeout: Duration,
    try_now: impl FnOnce() -> bool,
    before: impl FnOnce(Deadline) -> bool,
    however_long: impl FnOnce(),
) -> Option<()> {
    if try_now() {
        return Some(());
    }
    match crate::linux::deadline_in(timeout) {
        Some(deadline) => before(deadline).then_some(()),
        None => {
            however_long();
            Some(())
        }
    }
}
