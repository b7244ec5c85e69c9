//! The lock's holder: finds the oldest waiter, and hands over to it or makes it the heir and releases.
//!
//! See also: finding the oldest waiter (`chain.rs`).

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::{Next, QueueLock};
use crate::atomic::AtomicU32;
use crate::node::state;
use crate::word::{HEIR, NodeNumber, Word};
use crate::{Event, Platform, Policy};

impl<P: Policy, S: Platform> QueueLock<P, S> {
    /// Releases a lock that has a queue, or had one at the last read.
    #[cold]
    pub(super) fn release_slowly(&self, next: Next) {
        // Acquire pairs with the release of each newcomer's exchange: the holder can read the newcomer's node.
        let word = Word(self.word.load(Acquire));
        if !word.is_locked() {
            debug_assert!(false, "a free lock was unlocked");
            return;
        }
        match next {
            Next::Oldest => self.hand_over(word),
            Next::OldestIfAwake if self.is_oldest_awake(word) => self.hand_over(word),
            Next::OldestIfAwake | Next::Anybody => self.appoint(word),
        }
    }

    /// Whether the oldest waiter is awake and polls its node.
    fn is_oldest_awake(&self, word: Word) -> bool {
        let Some(tail) = word.tail() else { return false };
        if word.has_heir() || Self::is_left_behind(tail) {
            return false; // an heir that is awake has stopped newcomers itself
        }
        Self::node(Self::find_oldest(tail)).state.load(Relaxed) == state::WAITING
    }

    /// First in, first out: the lock stays locked and passes to the oldest waiter.
    fn hand_over(&self, mut word: Word) {
        loop {
            let Some(tail) = word.tail() else {
                match self.let_go(word) {
                    Ok(()) => return,
                    Err(now) => word = now,
                }
                continue;
            };
            let Some(oldest) = self.take_out_oldest(word, tail) else {
                word = Word(self.word.load(Acquire)); // as in `release_slowly`
                continue;
            };
            let node = Self::node(oldest);
            // Release pairs with the acquire in `wait_for_turn`, for what we did under the lock and to the
            // queue. Acquire pairs with `give_up`, before the node is freed.
            match node.state.swap(state::GRANTED, AcqRel) {
                state::ABANDONED => node.free(),
                was => return wake_if_halted::<S>(was, &node.state),
            }
            word = Word(self.word.load(Acquire)); // as in `release_slowly`
        }
    }

    /// Releases the lock so that any thread may take it, with the oldest waiter awake to compete.
    fn appoint(&self, mut word: Word) {
        let mut halted = None;
        let mut has_chosen = false;
        loop {
            // A napping heir is woken early if no other thread may take the lock.
            let has_heir = word.has_heir() && (has_chosen || !Self::newcomers_are_stopped(word));
            if word.tail().is_none() || has_heir {
                match self.let_go(word) {
                    Ok(()) => break,
                    Err(now) => word = now,
                }
                continue;
            }
            halted = self.choose(word).or(halted);
            has_chosen = true;
            // re-check: the chosen waiter may have stepped down already and sleep again.
            word = Word(self.word.load(Acquire)); // as in `release_slowly`
        }
        if let Some(sleeper) = halted {
            wake_if_halted::<S>(state::HALTED, sleeper);
        }
    }

    /// Whether only the heir may take the lock.
    pub(super) fn newcomers_are_stopped(word: Word) -> bool {
        word.passed() > P::PASS_LIMIT
    }

    /// Makes the oldest waiter the heir, or removes it if it has timed out. Returns the word that it sleeps on, if any.
    fn choose(&self, word: Word) -> Option<&'static AtomicU32> {
        let tail = word.tail()?;
        if Self::is_left_behind(tail) {
            self.forget_queue(word);
            return None;
        }
        let node = Self::node(Self::find_oldest(tail));
        // Acquire pairs with `give_up`, before the node is freed.
        if node.state.load(Acquire) == state::ABANDONED {
            if self.take_out_oldest(word, tail).is_some() {
                node.free();
            }
            return None;
        }
        // Set before the state: the chosen waiter must find it set when it steps down. The swap orders them.
        self.word.fetch_or(HEIR, Relaxed);
        // Release pairs with the acquire in `wait_for_turn`; acquire with `give_up`.
        match node.state.swap(state::CHOSEN, AcqRel) {
            state::HALTED | state::NAPPING => return Some(&node.state),
            state::ABANDONED => {
                // The waiter has just timed out. The next walk of the queue removes it.
                node.state.store(state::ABANDONED, Relaxed);
                self.word.fetch_and(!HEIR, Relaxed);
            }
            _ => {}
        }
        None
    }

    /// Removes the oldest waiter from the queue as seen in `word`; `None` if the queue has changed so much that the
    /// caller must read the word again.
    fn take_out_oldest(&self, word: Word, tail: NodeNumber) -> Option<NodeNumber> {
        if Self::is_left_behind(tail) {
            self.forget_queue(word);
            return None;
        }
        let oldest = if word.is_alone() { tail } else { Self::find_oldest(tail) };
        if oldest == tail {
            // This exchange publishes nothing: the swap of the node's state does.
            self.word.compare_exchange(word.0, Word::HELD.0, Relaxed, Relaxed).ok()?;
            return Some(oldest);
        }
        Self::unlink_oldest(tail, oldest);
        if Self::MAY_PASS {
            // Newcomers have not passed the next waiter yet. We may change the count: we hold the lock throughout.
            self.word.fetch_and(Word(u32::MAX).without_heir().0, Relaxed);
        }
        Some(oldest)
    }

    /// Frees the lock if the word is still `word`. Only for a `word` without waiters, or with an heir that is awake.
    fn let_go(&self, word: Word) -> Result<(), Word> {
        let free = match word.tail() {
            None => Word::FREE,
            Some(_) if Self::newcomers_are_stopped(word) => word.unlocked(),
            Some(_) => word.unlocked().passable_once_more(),
        };
        // Release pairs with the acquires of all threads that take the lock; acquire as in `release_slowly`.
        self.word.compare_exchange(word.0, free.0, Release, Acquire).map(drop).map_err(Word)
    }

    /// In a forked child: removes the queue, whose waiters exist only in the parent. The caller must read the
    /// word again.
    fn forget_queue(&self, word: Word) {
        // Failure: a thread of this process has queued, and has removed the old queue itself.
        let _ = self.word.compare_exchange(word.0, word.with_empty_queue().0, Relaxed, Relaxed);
    }

    /// The `WAKE_AHEAD` experiment: while we hold the lock, wakes the next waiter, so that it spins until its turn.
    #[cold]
    pub(super) fn wake_next(&self) {
        let word = Word(self.word.load(Acquire)); // as in `release_slowly`
        let Some(tail) = word.tail() else { return };
        if Self::is_left_behind(tail) {
            return;
        }
        let node = Self::node(Self::find_oldest(tail));
        if node.state.compare_exchange(state::HALTED, state::WAITING, Relaxed, Relaxed).is_ok() {
            wake_if_halted::<S>(state::HALTED, &node.state);
        }
    }
}

/// Wakes the thread that slept on `state`, if it did. By now, that thread may hold the lock, or it may have freed the
/// lock with its data and wait for another. This is safe: the node still exists, and waiters tolerate spurious wakes.
fn wake_if_halted<S: Platform>(was: u32, state: &'static AtomicU32) {
    if matches!(was, state::HALTED | state::NAPPING) {
        S::note(Event::Kicked);
        S::wake_one(state);
    }
}
