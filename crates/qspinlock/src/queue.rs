//! The queued lock: four bytes, a queue of nodes that outlive every lock, and a choice of policies.
//!
//! ```text
//! lock:    free? take it (one exchange)                                                            this file
//!          → may newcomers pass? look a few times                                                  queue/newcomer.rs
//!          → queue: put a node behind the tail, in the same word (one exchange)                    queue/newcomer.rs
//!          → look at the own node for a while → sleep on it                                        queue/waiter.rs
//! unlock:  nobody waits? let go (one exchange)                                                     this file
//!          → find the oldest waiter (only the holder walks the queue)                              queue/chain.rs
//!          → hand the lock over to it; or make it the heir and let go                              queue/holder.rs
//!          → wake it if it sleeps: once, and after the lock is its own or free
//! ```
//!
//! Why it excludes, in the terms of [`Word`](crate::word):
//! 1. Who sets `locked` with an exchange from a word without it holds the lock; so does whom a holder has granted it
//!    to, `locked` staying set. Only a holder grants, to one waiter, and is no holder any more.
//! 2. Queues change at the newest end by exchanges of the word, and elsewhere only by the holder.
//! 3. `locked` is clear with a queue only if there is an heir, which is awake, or a thread that runs just now is about
//!    to make it so: nobody sleeps while nobody is responsible for waking it.
//!
//! Not here: what policies choose (`policy.rs`), what a node is (`node.rs`), `lock_api` (`raw.rs`).

mod chain;
mod holder;
mod newcomer;
mod waiter;

use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::atomic::AtomicU32;
use crate::word::{MAX_PASSED, Word};
use crate::{Deadline, Event, Platform, Policy};

/// A queued lock of four bytes. See the file's head, and [`Policy`] for its kinds.
#[repr(transparent)]
pub struct QueueLock<P, S> {
    word: AtomicU32,
    _kind: PhantomData<fn() -> (P, S)>,
}

impl<P, S> QueueLock<P, S> {
    /// A lock that nobody holds: four zero bytes.
    #[cfg(not(all(test, loom)))]
    #[must_use]
    pub const fn new() -> Self {
        Self { word: AtomicU32::new(0), _kind: PhantomData }
    }

    /// A lock that nobody holds.
    #[cfg(all(test, loom))]
    pub(crate) fn new() -> Self {
        Self { word: AtomicU32::new(0), _kind: PhantomData }
    }

    /// Whether somebody holds it: a snapshot.
    #[must_use]
    pub fn is_held(&self) -> bool {
        Word(self.word.load(Relaxed)).is_locked()
    }

    /// Whether somebody waits for it: a snapshot.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        Word(self.word.load(Relaxed)).tail().is_some()
    }
}

impl<P: Policy, S: Platform> QueueLock<P, S> {
    /// Newcomers may take the lock past a queue.
    const MAY_PASS: bool = {
        assert!(P::PASS_LIMIT <= MAX_PASSED, "the word cannot count so many");
        P::PASS_LIMIT > 0
    };

    const BY_POLICY: Next = match (P::PASS_LIMIT, P::SERVES_THE_AWAKE) {
        (0, _) => Next::Oldest,
        (_, true) => Next::OldestIfAwake,
        (_, false) => Next::Anybody,
    };

    /// Takes the lock, however long it takes. By a thread that holds it already: never returns.
    #[inline]
    pub fn acquire(&self) {
        if !self.take_at_once() {
            self.acquire_slowly(None);
        }
    }

    /// Takes the lock if it is free and nobody is to have it first. Never waits.
    #[inline]
    #[must_use]
    pub fn try_acquire(&self) -> bool {
        self.take_at_once()
    }

    /// Takes the lock unless the deadline passes first; false if it did. Who gives up leaves the others' order as it
    /// is. The lock may still be had after the deadline, if it became free just then.
    #[inline]
    #[must_use]
    pub fn acquire_before(&self, deadline: Deadline) -> bool {
        self.take_at_once() || self.acquire_slowly(Some(deadline))
    }

    /// Gives the lock up; to whom is the policy's choice.
    ///
    /// # Safety
    /// The lock is held: it was acquired, by whichever thread, and has not been released since.
    #[inline]
    pub unsafe fn release(&self) {
        if !self.let_go_at_once() {
            self.release_slowly(Self::BY_POLICY);
        }
    }

    /// Gives the lock to the oldest waiter, if there is one, whatever the policy.
    ///
    /// # Safety
    /// As for [`release`](Self::release).
    #[inline]
    pub unsafe fn release_fairly(&self) {
        if !self.let_go_at_once() {
            self.release_slowly(Next::Oldest);
        }
    }

    /// Takes the lock if it is free and nobody waits: one exchange and nothing else, for who has more to do in all other
    /// cases than [`acquire`](Self::acquire) does.
    #[inline]
    #[must_use]
    pub fn try_acquire_unwanted(&self) -> bool {
        // Acquire pairs with the releases in `let_go_at_once` and `holder.rs`.
        self.word.compare_exchange(Word::FREE.0, Word::HELD.0, Acquire, Relaxed).is_ok()
    }

    /// Gives the lock up if nobody waits: one exchange and nothing else. Nothing happens if somebody waits, or if nobody
    /// holds it.
    ///
    /// # Safety
    /// As for [`release`](Self::release), if it is held at all.
    #[inline]
    #[must_use]
    pub unsafe fn try_release_unwanted(&self) -> bool {
        // Release pairs with the acquires of all that take the lock.
        self.word.compare_exchange(Word::HELD.0, Word::FREE.0, Release, Relaxed).is_ok()
    }

    /// One exchange if nobody wants the lock; another one to pass a queue, if the policy lets newcomers.
    #[inline]
    fn take_at_once(&self) -> bool {
        // Acquire pairs with the releases in `let_go_at_once` and `holder.rs`.
        match self.word.compare_exchange(Word::FREE.0, Word::HELD.0, Acquire, Relaxed) {
            Ok(_) => true,
            Err(now) => Self::MAY_PASS && self.take_in_passing(Word(now)),
        }
    }

    /// Lets go if there is nobody to be woken or handed over to.
    #[inline]
    fn let_go_at_once(&self) -> bool {
        // Release pairs with the acquires of all that take the lock.
        match self.word.compare_exchange(Word::HELD.0, Word::FREE.0, Release, Relaxed) {
            Ok(_) => true,
            Err(now) => Self::MAY_PASS && self.leave_to_heir(Word(now)),
        }
    }

    /// Lets go if there is an heir, and others may have the lock before it has noticed.
    #[inline]
    fn leave_to_heir(&self, word: Word) -> bool {
        word.is_locked()
            && word.has_heir()
            && !Self::is_door_shut(word)
            // Release pairs with the acquires of all that take the lock.
            && self.word.compare_exchange(word.0, word.unlocked().0, Release, Relaxed).is_ok()
    }

    #[cold]
    fn acquire_slowly(&self, deadline: Option<Deadline>) -> bool {
        if Self::MAY_PASS && self.look_and_take() {
            S::note(Event::Spun);
            return true;
        }
        if deadline.is_some_and(S::is_past) {
            S::note(Event::TimedOut); // without a node left in the queue
            return false;
        }
        match self.claim_place(deadline.is_some()) {
            Some(place) => self.acquire_from(place, deadline),
            None => self.acquire_without_node(deadline),
        }
    }
}

/// Whom unlocking a lock with a queue is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    /// The oldest waiter, even if it sleeps.
    Oldest,
    /// The oldest waiter, but while it sleeps, whoever comes.
    OldestIfAwake,
    /// Whoever comes; the oldest waiter is made to come.
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
