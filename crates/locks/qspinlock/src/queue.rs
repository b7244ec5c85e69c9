//! The queued lock: four bytes, a queue of nodes that outlive every lock, and a choice of policies.
//!
//! ```text
//! lock:    free? take it (one exchange)                                                            this file
//!          → may newcomers pass? poll a few times                                                  queue/newcomer.rs
//!          → queue: put a node behind the tail, in the same word (one exchange)                    queue/newcomer.rs
//!          → poll the own node for a while → sleep on it                                           queue/waiter.rs
//! unlock:  no waiters? release (one exchange)                                                      this file
//!          → find the oldest waiter (only the holder walks the queue)                              queue/chain.rs
//!          → hand the lock over to it; or make it the heir and release                             queue/holder.rs
//!          → wake it if it sleeps: once, after it has the lock or the lock is free
//! ```
//!
//! Why the lock guarantees mutual exclusion, in terms of [`Word`](crate::word):
//! 1. A thread holds the lock if its exchange set `locked` in a word in which `locked` was clear. A waiter also
//!    holds the lock if a holder granted it the lock while `locked` stayed set. Only a holder grants the lock,
//!    to one waiter, and then no longer holds it.
//! 2. A queue changes at its newest end by exchanges of the word, and elsewhere only by the holder.
//! 3. While there is a queue, `locked` is clear only if there is an heir that is awake, or if a running thread is
//!    about to appoint one: if waiters sleep, some thread is responsible for waking them.
//!
//! See also: what policies choose (`policy.rs`), what a node is (`node.rs`), `lock_api` (`raw.rs`).

mod chain;
mod holder;
mod newcomer;
mod waiter;

use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::atomic::AtomicU32;
use crate::word::{LOCKED, MAX_PASSED, Word};
use crate::{Deadline, Event, Platform, Policy};

/// A queued lock of four bytes. See the module documentation, and [`Policy`] for its kinds.
#[repr(transparent)]
pub struct QueueLock<P, S> {
    word: AtomicU32,
    _kind: PhantomData<fn() -> (P, S)>,
}

impl<P, S> QueueLock<P, S> {
    /// An unlocked lock: four zero bytes.
    #[cfg(not(all(test, loom)))]
    #[must_use]
    pub const fn new() -> Self {
        Self { word: AtomicU32::new(0), _kind: PhantomData }
    }

    /// An unlocked lock.
    #[cfg(all(test, loom))]
    pub(crate) fn new() -> Self {
        Self { word: AtomicU32::new(0), _kind: PhantomData }
    }

    /// Whether a thread holds the lock; a snapshot.
    #[must_use]
    pub fn is_held(&self) -> bool {
        Word(self.word.load(Relaxed)).is_locked()
    }

    /// Whether a thread waits for the lock; a snapshot.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        Word(self.word.load(Relaxed)).tail().is_some()
    }
}

impl<P: Policy, S: Platform> QueueLock<P, S> {
    /// Whether newcomers may take the lock ahead of a queue.
    const MAY_PASS: bool = {
        assert!(P::PASS_LIMIT <= MAX_PASSED, "PASS_LIMIT exceeds MAX_PASSED");
        P::PASS_LIMIT > 0
    };

    const BY_POLICY: Next = match (P::PASS_LIMIT, P::SERVES_THE_AWAKE) {
        (0, _) => Next::Oldest,
        (_, true) => Next::OldestIfAwake,
        (_, false) => Next::Anybody,
    };

    /// Takes the lock; waits without a time limit. Never returns if the calling thread already holds the lock.
    #[inline]
    pub fn acquire(&self) {
        if !self.take_if_free() {
            self.acquire_slowly(None);
        }
    }

    /// Takes the lock if it is free and is not reserved for a waiter. Never waits.
    #[inline]
    #[must_use]
    pub fn try_acquire(&self) -> bool {
        self.take_at_once()
    }

    /// Takes the lock unless the deadline passes first; returns false in that case. A waiter that times out does not
    /// change the order of the others. The call may still succeed after the deadline if the lock became free at that
    /// moment.
    #[inline]
    #[must_use]
    pub fn acquire_before(&self, deadline: Deadline) -> bool {
        self.take_if_free() || self.acquire_slowly(Some(deadline))
    }

    /// Releases the lock. The policy decides who gets it next.
    ///
    /// # Safety
    /// The lock is held: it was acquired, by any thread, and has not been released since.
    #[inline]
    pub unsafe fn release(&self) {
        if !self.let_go_at_once() {
            self.release_slowly(Self::BY_POLICY);
        }
    }

    /// Releases the lock to the oldest waiter, if there is one, whatever the policy.
    ///
    /// # Safety
    /// The contract of [`release`](Self::release) applies.
    #[inline]
    pub unsafe fn release_fairly(&self) {
        if !self.let_go_at_once() {
            self.release_slowly(Next::Oldest);
        }
    }

    /// Takes the lock if it is free and has no waiters, in one exchange. For callers that use a slow path of their
    /// own instead of [`acquire`](Self::acquire) in all other cases.
    #[inline]
    #[must_use]
    pub fn try_acquire_unwanted(&self) -> bool {
        // Acquire pairs with the releases in `let_go_at_once` and `holder.rs`.
        self.word.compare_exchange(Word::FREE.0, Word::HELD.0, Acquire, Relaxed).is_ok()
    }

    /// Releases the lock if it has no waiters, in one exchange. Does nothing if a thread waits, or if no
    /// thread holds the lock.
    ///
    /// # Safety
    /// If the lock is held at all, the contract of [`release`](Self::release) applies.
    #[inline]
    #[must_use]
    pub unsafe fn try_release_unwanted(&self) -> bool {
        // Release pairs with the acquires of all threads that take the lock.
        self.word.compare_exchange(Word::HELD.0, Word::FREE.0, Release, Relaxed).is_ok()
    }

    /// Takes the lock with one read-modify-write if it is free, even if other threads wait. Keeps it if this thread may
    /// overtake them, and otherwise hands it over to the oldest.
    #[inline]
    fn take_if_free(&self) -> bool {
        // Acquire pairs with the releases in `let_go_at_once` and `holder.rs`.
        if Word(self.word.fetch_or(LOCKED, Acquire)).is_locked() {
            return false;
        }
        if !Self::MAY_PASS {
            return true; // a lock that is always handed over is free only without waiters
        }
        // Relaxed: the exchange acquired. While we hold the lock, the word can only get a longer queue, or an heir that
        // stops newcomers.
        let word = Word(self.word.load(Relaxed));
        word.tail().is_none() || self.keep_if_allowed(word)
    }

    /// Called after this thread took a lock that has waiters. Hands the lock over if this thread may not pass
    /// them.
    #[inline]
    fn keep_if_allowed(&self, word: Word) -> bool {
        if Self::newcomers_are_stopped(word) {
            self.release_slowly(Next::Oldest);
            return false;
        }
        S::note(Event::Stole);
        true
    }

    /// Takes the lock if it is free and this thread may take it. Changes nothing otherwise.
    #[inline]
    fn take_at_once(&self) -> bool {
        // Acquire pairs with the releases in `let_go_at_once` and `holder.rs`.
        match self.word.compare_exchange(Word::FREE.0, Word::HELD.0, Acquire, Relaxed) {
            Ok(_) => true,
            Err(now) => Self::MAY_PASS && self.take_in_passing(Word(now)),
        }
    }

    /// Releases the lock if there is no thread to wake or to hand the lock to.
    #[inline]
    fn let_go_at_once(&self) -> bool {
        if Self::MAY_PASS {
            // Relaxed: only tells which exchange to try. The holder has usually just written the word, so that reading
            // it costs less than an exchange that fails.
            let word = Word(self.word.load(Relaxed));
            if word != Word::HELD {
                return self.leave_to_heir(word);
            }
        }
        // Release pairs with the acquires of all threads that take the lock.
        match self.word.compare_exchange(Word::HELD.0, Word::FREE.0, Release, Relaxed) {
            Ok(_) => true,
            Err(now) => Self::MAY_PASS && self.leave_to_heir(Word(now)),
        }
    }

    /// Releases the lock if there is an heir, and newcomers may take the lock before the heir notices.
    #[inline]
    fn leave_to_heir(&self, word: Word) -> bool {
        word.is_locked()
            && word.has_heir()
            && !Self::newcomers_are_stopped(word)
            // Release pairs with the acquires of all threads that take the lock.
            && self.word.compare_exchange(word.0, word.unlocked().passable_once_more().0, Release, Relaxed).is_ok()
    }

    #[cold]
    fn acquire_slowly(&self, deadline: Option<Deadline>) -> bool {
        if Self::MAY_PASS && self.look_and_take() {
            S::note(Event::Spun);
            return true;
        }
        if deadline.is_some_and(S::is_past) {
            S::note(Event::TimedOut); // leaves no node in the queue
            return false;
        }
        match self.claim_place(deadline.is_some()) {
            Some(place) => self.acquire_from(place, deadline),
            None => self.acquire_without_node(deadline),
        }
    }
}

/// Which thread gets a lock with a queue when it is unlocked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    /// The oldest waiter, even if it sleeps.
    Oldest,
    /// The oldest waiter if it is awake; any thread while the oldest waiter sleeps.
    OldestIfAwake,
    /// Any thread; the holder wakes the oldest waiter to compete.
    Anybody,
}

impl<P, S> Default for QueueLock<P, S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P, S> fmt::Debug for QueueLock<P, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Word(self.word.load(Relaxed));
        f.debug_struct("QueueLock")
            .field("held", &word.is_locked())
            .field("wanted", &word.tail().is_some())
            .finish()
    }
}
