//! The plain futex lock: four bytes, sleeps at once, unfair. What any other lock that sleeps must be measured against.
//!
//! `0 free → 1 held → 2 held, and somebody may sleep` ("Futexes are tricky", Drepper 2011, the second mutex)
//!
//! Not here: spinning, order.

use core::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};
use std::time::{Duration, Instant};

use crate::{Deadline, Linux, Platform, Slept};

const FREE: u32 = 0;
const HELD: u32 = 1;
const AWAITED: u32 = 2;

/// See the file's head.
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

    /// Whoever has slept takes the lock as awaited: others may still sleep.
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

// SAFETY: 1. exclusion: `FREE` becomes something else by one exchange, which gives the lock to whoever made it;
// 2. acquire and release are those of the exchanges above and below; 3. nothing refers to where the lock is but
// sleepers, and they borrow it; 4. nothing unwinds.
unsafe impl lock_api::RawMutex for FutexLock {
    #[allow(clippy::declare_interior_mutable_const)] // as the trait has it
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

// SAFETY: as above; who gets `None` does not hold the lock.
unsafe impl lock_api::RawMutexTimed for FutexLock {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_for(&self, timeout: Duration) -> Option<()> {
        // No deadline: further away than the clock counts.
        let deadline = crate::linux::deadline_in(timeout);
        (self.try_acquire() || self.acquire_slowly(deadline)).then_some(())
    }

    fn try_lock_until(&self, timeout: Instant) -> Option<()> {
        self.try_lock_for(timeout.saturating_duration_since(Instant::now()))
    }
}
