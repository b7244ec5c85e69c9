//! The plain futex lock: four bytes, sleeps at once, unfair. The baseline for every other sleeping lock.
//!
//! `0 free → 1 held → 2 held, and threads may sleep` ("Futexes are tricky", Drepper 2011, the second mutex)
//!
//! This lock never spins and is not fair.

use core::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};
use std::time::{Duration, Instant};

use crate::{Deadline, Linux, Platform, Slept};

const FREE: u32 = 0;
const HELD: u32 = 1;
const AWAITED: u32 = 2;

/// The plain futex lock.
#[derive(Debug, Default)]
pub struct FutexLock {
    word: AtomicU32,
}

impl FutexLock {
    #[inline]
    fn try_acquire(&self) -> bool {
        // Acquire pairs with the release in `unlock`.
        self.word.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok()
    }

    /// A thread that has slept takes the lock as `AWAITED`: others may still sleep.
    #[cold]
    fn acquire_slowly(&self, deadline: Option<Deadline>) -> bool {
        // Acquire pairs with the release in `unlock`.
        while self.word.swap(AWAITED, Acquire) != FREE {
            if Linux::wait(&self.word, AWAITED, deadline) == Slept::TimedOut {
                return false;
            }
        }
        true
    }
}

// SAFETY: 1. exclusion: one exchange changes `FREE` to another value, and the thread that made it has the
// lock; 2. acquire and release are those of the exchanges above and below; 3. only sleepers refer to the
// lock's address, and they borrow the lock; 4. nothing unwinds.
unsafe impl lock_api::RawMutex for FutexLock {
    #[allow(clippy::declare_interior_mutable_const)] // as in the trait
    const INIT: Self = Self { word: AtomicU32::new(FREE) };

    type Guard = ();

    #[inline]
    fn lock(&self) {
        if !self.try_acquire() {
            self.acquire_slowly(None);
        }
    }

    #[inline]
    fn try_lock(&self) -> Option<()> {
        self.try_acquire().then_some(())
    }

    #[inline]
    unsafe fn unlock(&self, (): ()) {
        // Release pairs with the acquires above.
        if self.word.swap(FREE, Release) == AWAITED {
            Linux::wake_one(&self.word);
        }
    }

    fn is_locked(&self) -> bool {
        self.word.load(Relaxed) != FREE
    }
}

// SAFETY: as above; a caller that gets `None` does not hold the lock.
unsafe impl lock_api::RawMutexTimed for FutexLock {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_for(&self, timeout: Duration) -> Option<()> {
        // `None` if the deadline is beyond the clock's range, and so never passes.
        let deadline = crate::linux::deadline_in(timeout);
        (self.try_acquire() || self.acquire_slowly(deadline)).then_some(())
    }

    fn try_lock_until(&self, timeout: Instant) -> Option<()> {
        self.try_lock_for(timeout.saturating_duration_since(Instant::now()))
    }
}
