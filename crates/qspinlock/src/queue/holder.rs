//! The holder of the lock: finds the oldest waiter and hands over to it, or makes it the heir and lets go.
//!
//! Not here: finding it (`chain.rs`).

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::{Next, QueueLock};
use crate::atomic::AtomicU32;
use crate::node::state;
use crate::word::{HEIR, NodeNumber, Word};
use crate::{Event, Platform, Policy};

impl<P: Policy, S: Platform> QueueLock<P, S> {
    /// There is a queue, or there was one when we looked.
    #[cold]
    pub(super) fn release_slowly(&self, next: Next) {
        // Acquire pairs with the release of each newcomer's exchange: its node can be read.
        let word = Word(self.word.load(Acquire));
        if !word.is_locked() {
            debug_assert!(false, "a lock that nobody holds was unlocked");
            return;
        }
        match next {
            Next::Oldest => self.hand_over(word),
            Next::OldestIfAwake if self.is_oldest_awake(word) => self.hand_over(word),
            Next::OldestIfAwake | Next::Anybody => self.appoint(word),
        }
    }

    /// Whether the next in the queue looks at its node, or at the lock.
    fn is_oldest_awake(&self, word: Word) -> bool {
        let Some(tail) = word.tail() else { return false };
        if word.has_heir() || Self::is_left_behind(tail) {
            return false; // an heir has shut the door itself, if it is awake
        }
        Self::node(Self::find_oldest(tail)).state.load(Relaxed) == state::WAITING
    }

    /// First in, first out: the lock stays locked, for the oldest waiter.
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
            // Release pairs with the acquire in `wait_for_turn`: what we did under the lock, and to the queue. Acquire
            // pairs with `give_up`, before the node is freed.
            match node.state.swap(state::GRANTED, AcqRel) {
                state::ABANDONED => node.free(),
                was => return wake_if_halted::<S>(was, &node.state),
            }
            word = Word(self.word.load(Acquire)); // as in `release_slowly`
        }
    }

    /// Everybody may take the lock, and the oldest waiter is awake to do so.
    fn appoint(&self, mut word: Word) {
        let mut halted = None;
        let mut has_chosen = false;
        loop {
            // An heir that naps is woken early if nobody else may have the lock.
            let has_heir = word.has_heir() && (has_chosen || !Self::is_door_shut(word));
            if word.tail().is_none() || has_heir {
                match self.let_go(word) {
                    Ok(()) => break,
                    Err(now) => word = now,
                }
                continue;
            }
            halted = self.choose(word).or(halted);
            has_chosen = true;
            // re-check: who was chosen may have stepped down already, and sleep again.
            word = Word(self.word.load(Acquire)); // as in `release_slowly`
        }
        if let Some(sleeper) = halted {
            wake_if_halted::<S>(state::HALTED, sleeper);
        }
    }

    /// Whether nobody but the heir may take the lock.
    pub(super) fn is_door_shut(word: Word) -> bool {
        word.passed() >= P::PASS_LIMIT
    }

    /// Makes the oldest waiter the heir, or takes it out if it has given up. Returns where it sleeps, if it does.
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
        // Before the state, so that who is chosen finds it set when it steps down again. Ordered by the swap.
        self.word.fetch_or(HEIR, Relaxed);
        // Release pairs with the acquire in `wait_for_turn`; acquire with `give_up`.
        match node.state.swap(state::CHOSEN, AcqRel) {
            state::HALTED | state::NAPPING => return Some(&node.state),
            state::ABANDONED => {
                // It gave up just now, and is taken out when looked at again.
                node.state.store(state::ABANDONED, Relaxed);
                self.word.fetch_and(!HEIR, Relaxed);
            }
            _ => {}
        }
        None
    }

    /// Takes the oldest waiter out of the queue as seen in `word`; none if the queue has changed so much that it
    /// must be looked at again.
    fn take_out_oldest(&self, word: Word, tail: NodeNumber) -> Option<NodeNumber> {
        if Self::is_left_behind(tail) {
            self.forget_queue(word);
            return None;
        }
        let oldest = if word.is_alone() { tail } else { Self::find_oldest(tail) };
        if oldest == tail {
            // Nothing is published by this: the swap of the node's state does that.
            self.word.compare_exchange(word.0, Word::HELD.0, Relaxed, Relaxed).ok()?;
            return Some(oldest);
        }
        Self::unlink_oldest(tail, oldest);
        if Self::MAY_PASS {
            // The next in the queue has not been passed yet. Ours to change: we hold the lock, and it stays locked.
            self.word.fetch_and(Word(u32::MAX).without_heir().0, Relaxed);
        }
        Some(oldest)
    }

    /// The lock is free, and nobody waits for it or the heir is awake, if the word is still `word`.
    fn let_go(&self, word: Word) -> Result<(), Word> {
        let free = if word.tail().is_none() { Word::FREE } else { word.unlocked() };
        // Release pairs with the acquires of all that take the lock; acquire as in `release_slowly`.
        self.word.compare_exchange(word.0, free.0, Release, Acquire).map(drop).map_err(Word)
    }

    /// In a forked child: all waiters exist in the parent only. The word is to be looked at again.
    fn forget_queue(&self, word: Word) {
        // Failure: somebody of this process has queued, and done the same.
        let _ = self.word.compare_exchange(word.0, word.with_empty_queue().0, Relaxed, Relaxed);
    }

    /// The experiment: the next waiter is woken while we hold the lock, to spin until its turn.
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

/// Wakes the thread that slept on `state`, if it did. By now it may hold the lock, or have freed it together with the
/// data, and wait for another: the node is still there, and wakes without a reason are expected.
fn wake_if_halted<S: Platform>(was: u32, state: &'static AtomicU32) {
    if matches!(was, state::HALTED | state::NAPPING) {
        S::note(Event::Kicked);
        S::wake_one(state);
    }
}
