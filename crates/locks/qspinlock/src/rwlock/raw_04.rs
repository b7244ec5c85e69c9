//! The reader/writer lock behind `lock_api` 0.4, which has separate traits for recursive readers.
//!
//! See also: `lock_api` 0.5 (`raw.rs`), 0.4 locks used as 0.5 locks (`api_04.rs`).

use lock_api_04::{
    GuardSend, RawRwLock, RawRwLockDowngrade, RawRwLockFair, RawRwLockRecursive, RawRwLockRecursiveTimed,
    RawRwLockTimed,
};
use std::time::{Duration, Instant};

use super::QueueRwLock;
use super::raw::within;
use crate::{Linux, Platform};

// SAFETY: as in `raw.rs`: 0.4 has the same requirements for an implementation.
unsafe impl<S: Platform> RawRwLock for QueueRwLock<S> {
    const INIT: Self = Self::new();

    type GuardMarker = GuardSend;

    #[inline]
    fn lock_shared(&self) {
        self.read();
    }

    #[inline]
    fn try_lock_shared(&self) -> bool {
        self.try_read()
    }

    #[inline]
    unsafe fn unlock_shared(&self) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.release_read() }
    }

    #[inline]
    fn lock_exclusive(&self) {
        self.write();
    }

    #[inline]
    fn try_lock_exclusive(&self) -> bool {
        self.try_write()
    }

    #[inline]
    unsafe fn unlock_exclusive(&self) {
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

// SAFETY: as above.
unsafe impl<S: Platform> RawRwLockFair for QueueRwLock<S> {
    unsafe fn unlock_shared_fair(&self) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.release_read_fairly() }
    }

    unsafe fn unlock_exclusive_fair(&self) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.release_write_fairly() }
    }

    unsafe fn bump_shared(&self) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.bump_read() }
    }

    unsafe fn bump_exclusive(&self) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.bump_write() }
    }
}

// SAFETY: as above.
unsafe impl<S: Platform> RawRwLockDowngrade for QueueRwLock<S> {
    unsafe fn downgrade(&self) {
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        unsafe { self.downgrade() }
    }
}

// SAFETY: as above; recursive readers exclude writers as others do, but do not wait for waiting writers.
unsafe impl<S: Platform> RawRwLockRecursive for QueueRwLock<S> {
    fn lock_shared_recursive(&self) {
        self.read_recursive();
    }

    fn try_lock_shared_recursive(&self) -> bool {
        self.try_read_recursive()
    }
}

// SAFETY: as above; a caller that gets false does not hold the lock.
unsafe impl RawRwLockTimed for QueueRwLock<Linux> {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_shared_for(&self, timeout: Duration) -> bool {
        within(timeout, || self.try_read(), |deadline| self.read_before(deadline), || self.read()).is_some()
    }

    fn try_lock_shared_until(&self, timeout: Instant) -> bool {
        RawRwLockTimed::try_lock_shared_for(self, timeout.saturating_duration_since(Instant::now()))
    }

    fn try_lock_exclusive_for(&self, timeout: Duration) -> bool {
        within(timeout, || self.try_write(), |deadline| self.write_before(deadline), || self.write())
            .is_some()
    }

    fn try_lock_exclusive_until(&self, timeout: Instant) -> bool {
        RawRwLockTimed::try_lock_exclusive_for(self, timeout.saturating_duration_since(Instant::now()))
    }
}

// SAFETY: as above.
unsafe impl RawRwLockRecursiveTimed for QueueRwLock<Linux> {
    fn try_lock_shared_recursive_for(&self, timeout: Duration) -> bool {
        let entered = within(
            timeout,
            || self.try_read_recursive(),
            |deadline| self.read_recursive_before(deadline),
            || self.read_recursive(),
        );
        entered.is_some()
    }

    fn try_lock_shared_recursive_until(&self, timeout: Instant) -> bool {
        self.try_lock_shared_recursive_for(timeout.saturating_duration_since(Instant::now()))
    }
}
