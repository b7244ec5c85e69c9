//! The reader/writer lock with recursive readers, for `lock_api` 0.5, which has no separate trait for them.
//!
//! See also: how the lock works (`rwlock.rs`).

#[cfg(feature = "std")]
use std::time::{Duration, Instant};

use super::QueueRwLock;
#[cfg(feature = "std")]
use super::raw::within;
#[cfg(feature = "std")]
use crate::Linux;
use crate::Platform;

/// A [`QueueRwLock`] whose readers wait for a writer that holds it, but not for waiting writers. So a thread that
/// holds a read lock may take it again. The drawback: a stream of readers keeps writers out.
#[derive(Debug)]
#[repr(transparent)]
pub struct RecursiveQueueRwLock<S>(QueueRwLock<S>);

impl<S> RecursiveQueueRwLock<S> {
    /// An unlocked lock.
    #[must_use]
    pub const fn new() -> Self {
        Self(QueueRwLock::new())
    }
}

impl<S> Default for RecursiveQueueRwLock<S> {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: the inner lock's arguments hold; its recursive readers exclude writers as its other readers do.
unsafe impl<S: Platform> lock_api::RawRwLock for RecursiveQueueRwLock<S> {
    const INIT: Self = Self::new();

    type SharedGuard = ();

    type ExclusiveGuard = ();

    #[inline]
    fn lock_shared(&self) {
        self.0.read_recursive();
    }

    #[inline]
    fn try_lock_shared(&self) -> Option<()> {
        self.0.try_read_recursive().then_some(())
    }

    #[inline]
    unsafe fn unlock_shared(&self, (): ()) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.0.release_read() }
    }

    #[inline]
    fn lock_exclusive(&self) {
        self.0.write();
    }

    #[inline]
    fn try_lock_exclusive(&self) -> Option<()> {
        self.0.try_write().then_some(())
    }

    #[inline]
    unsafe fn unlock_exclusive(&self, (): ()) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.0.release_write() }
    }

    fn is_locked(&self) -> bool {
        self.0.is_held()
    }

    fn is_locked_exclusive(&self) -> bool {
        self.0.is_held_exclusively()
    }
}

// SAFETY: as above; `downgrade` lets no writer in between.
unsafe impl<S: Platform> lock_api::RawRwLockDowngrade for RecursiveQueueRwLock<S> {
    #[inline]
    unsafe fn downgrade(&self, (): ()) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.0.downgrade() }
    }
}

// SAFETY: as above; a caller that gets `None` does not hold the lock.
#[cfg(feature = "std")]
unsafe impl lock_api::RawRwLockTimed for RecursiveQueueRwLock<Linux> {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_shared_for(&self, timeout: Duration) -> Option<()> {
        let lock = &self.0;
        within(
            timeout,
            || lock.try_read_recursive(),
            |deadline| lock.read_recursive_before(deadline),
            || lock.read_recursive(),
        )
    }

    fn try_lock_shared_until(&self, timeout: Instant) -> Option<()> {
        self.try_lock_shared_for(timeout.saturating_duration_since(Instant::now()))
    }

    fn try_lock_exclusive_for(&self, timeout: Duration) -> Option<()> {
        lock_api::RawRwLockTimed::try_lock_exclusive_for(&self.0, timeout)
    }

    fn try_lock_exclusive_until(&self, timeout: Instant) -> Option<()> {
        lock_api::RawRwLockTimed::try_lock_exclusive_until(&self.0, timeout)
    }
}
