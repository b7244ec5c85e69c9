//! A stand-in for the queued lock: word-sized, sleeps, unfair. To be replaced.

use core::marker::PhantomData;
use core::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use crate::{Deadline, Platform, Policy, Slept};

/// A queued lock of four bytes.
#[repr(transparent)]
pub struct QueueLock<P, S> {
    word: AtomicU32,
    _policy: PhantomData<fn() -> (P, S)>,
}

impl<P, S> core::fmt::Debug for QueueLock<P, S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("QueueLock").field("word", &self.word).finish()
    }
}

impl<P, S> Default for QueueLock<P, S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P, S> QueueLock<P, S> {
    /// A lock that nobody holds.
    #[must_use]
    pub const fn new() -> Self {
        Self { word: AtomicU32::new(0), _policy: PhantomData }
    }

    /// Whether somebody holds it: a snapshot.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.word.load(Relaxed) != 0
    }
}

impl<P: Policy, S: Platform> QueueLock<P, S> {
    /// Takes the lock, however long it takes.
    #[inline]
    pub fn acquire(&self) {
        if self.word.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            self.acquire_slowly(None);
        }
    }

    /// Takes the lock if it is free and nobody is to have it first.
    #[inline]
    #[must_use]
    pub fn try_acquire(&self) -> bool {
        self.word.compare_exchange(0, 1, Acquire, Relaxed).is_ok()
    }

    /// Takes the lock unless the deadline passes first; false if it did.
    #[inline]
    #[must_use]
    pub fn acquire_before(&self, deadline: Deadline) -> bool {
        self.try_acquire() || self.acquire_slowly(Some(deadline))
    }

    #[cold]
    fn acquire_slowly(&self, deadline: Option<Deadline>) -> bool {
        while self.word.swap(2, Acquire) != 0 {
            if S::wait(&self.word, 2, deadline) == Slept::TimedOut {
                return false;
            }
        }
        true
    }

    /// Gives the lock up; to whom is the policy's choice.
    ///
    /// # Safety
    /// The caller holds the lock: it was acquired, by whichever thread, and has not been released since.
    #[inline]
    pub unsafe fn release(&self) {
        if self.word.swap(0, Release) == 2 {
            S::wake_one(&self.word);
        }
    }

    /// Gives the lock to the oldest waiter, if there is one, whatever the policy.
    ///
    /// # Safety
    /// As for [`release`](Self::release).
    pub unsafe fn release_fairly(&self) {
        // SAFETY: the caller's.
        unsafe { self.release() }
    }
}
