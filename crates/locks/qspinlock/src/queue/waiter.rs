//! A waiter in the queue: polls its own node, sleeps on it, becomes the heir or the holder, or times out.
//!
//! See also: what the holder does to a waiter (`holder.rs`).

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::QueueLock;
use super::newcomer::Place;
use crate::node::{link, state};
use crate::word::{PASSED, Word};
use crate::{Clock, Deadline, Event, Platform, Policy, Slept};

/// Number of polls between two readings of the clock.
const LOOKS_PER_CLOCK: u32 = 64;

/// The result of one part of a wait.
enum Turn {
    /// We hold the lock, and the node is out of the queue.
    Ours,
    /// The node's state has changed: read it again.
    Look,
    /// The deadline has passed.
    Late,
}

impl<P: Policy, S: Platform> QueueLock<P, S> {
    /// Queues at `place`, and waits there.
    pub(super) fn acquire_from(&self, place: Place, deadline: Option<Deadline>) -> bool {
        if !self.join(place) {
            place.give_back();
            return true;
        }
        S::note(Event::Queued);
        if !self.wait_for_turn(place, deadline) {
            S::note(Event::TimedOut);
            return false;
        }
        place.give_back();
        if P::WAKE_AHEAD {
            self.wake_next();
        }
        true
    }

    /// Waits until this thread has the lock (true) or times out (false). After a timeout, the node is abandoned and
    /// belongs to the queue.
    fn wait_for_turn(&self, place: Place, deadline: Option<Deadline>) -> bool {
        loop {
            // Acquire pairs with the swaps in `holder.rs`, for what holders did under the lock and to the queue.
            let turn = match place.node.state.load(Acquire) {
                state::GRANTED => Turn::Ours,
                state::CHOSEN => self.wait_as_heir(place, deadline),
                state::HALTED => self.sleep(place, deadline),
                _ => self.look_then_halt(place, deadline),
            };
            match turn {
                Turn::Ours => return true,
                Turn::Late if self.give_up(place) => return false,
                Turn::Late | Turn::Look => {}
            }
        }
    }

    /// Polls the node until it changes. Sleeps after a while if the policy allows it.
    fn look_then_halt(&self, place: Place, deadline: Option<Deadline>) -> Turn {
        let own = &place.node.state;
        let looks = if stands_behind_a_sleeper::<S>(place) {
            P::WAITER_LOOKS_BEHIND_A_SLEEPER
        } else {
            P::WAITER_LOOKS
        };
        let mut look = 0;
        while !P::SLEEPS || look < looks {
            if own.load(Relaxed) != state::WAITING {
                return Turn::Look;
            }
            if look % LOOKS_PER_CLOCK == LOOKS_PER_CLOCK - 1 && deadline.is_some_and(S::is_past) {
                return Turn::Late;
            }
            S::relax();
            look = look.wrapping_add(1);
        }
        // This publishes nothing; a thread that changes the state later swaps it and so sees this value.
        if own.compare_exchange(state::WAITING, state::HALTED, Relaxed, Relaxed).is_ok() {
            S::note(Event::Halted);
        }
        Turn::Look
    }

    /// Sleeps until the node's state changes. The kernel compares the state again before it puts the thread
    /// to sleep.
    fn sleep(&self, place: Place, deadline: Option<Deadline>) -> Turn {
        let slept = S::wait(&place.node.state, state::HALTED, deadline);
        match place.node.state.load(Relaxed) {
            state::HALTED if slept == Slept::TimedOut => Turn::Late,
            state::HALTED => {
                S::note(Event::WokenForNothing);
                Turn::Look
            }
            _ => Turn::Look,
        }
    }

    /// Waits as the heir, the oldest waiter that is awake: takes the lock as soon as it is free or has been granted.
    /// After a while the heir sleeps again, and the next unlock chooses it again.
    fn wait_as_heir(&self, place: Place, deadline: Option<Deadline>) -> Turn {
        if P::HEIR_NAP_NS > 0 {
            match self.look_as_heir(place, deadline) {
                Some(turn) => return turn,
                None => self.nap(place, deadline),
            }
        }
        if P::SERVES_THE_AWAKE || P::HEIR_NAP_NS > 0 {
            self.stop_newcomers();
        }
        if let Some(turn) = self.look_as_heir(place, deadline) {
            return turn;
        }
        S::note(Event::Halted);
        self.step_down(place, state::HALTED, Turn::Look)
    }

    /// Stops newcomers: sets the pass count to its maximum. Does nothing if the lock has just been granted to us:
    /// then there is no heir, and the count is not ours to change.
    fn stop_newcomers(&self) {
        let mut word = Word(self.word.load(Relaxed));
        while word.has_heir() {
            // This publishes nothing.
            match self.word.compare_exchange(word.0, word.0 | PASSED, Relaxed, Relaxed) {
                Ok(_) => return,
                Err(now) => word = Word(now),
            }
        }
    }

    /// Polls the lock for a while; returns `None` if the lock stayed held.
    fn look_as_heir(&self, place: Place, deadline: Option<Deadline>) -> Option<Turn> {
        let mut look = 0;
        while !P::SLEEPS || look < P::HEIR_LOOKS {
            if place.node.state.load(Relaxed) != state::CHOSEN {
                return Some(Turn::Look); // granted
            }
            if self.inherit_if_free(place) {
                return Some(Turn::Ours);
            }
            if look % LOOKS_PER_CLOCK == LOOKS_PER_CLOCK - 1 && deadline.is_some_and(S::is_past) {
                return Some(self.step_down(place, state::WAITING, Turn::Late));
            }
            S::relax();
            look = look.wrapping_add(1);
        }
        None
    }

    /// Sleeps briefly. The thread stays the heir: no other waiter is woken, and a timer wakes this one if no
    /// thread does.
    fn nap(&self, place: Place, deadline: Option<Deadline>) {
        let own = &place.node.state;
        let clock = deadline.map_or(Clock::Monotonic, |deadline| deadline.clock);
        let until = S::after_ns(clock, P::HEIR_NAP_NS).or_earlier(deadline);
        // Neither exchange publishes anything. Failure: a holder has granted us the lock, or woken us.
        if own.compare_exchange(state::CHOSEN, state::NAPPING, Relaxed, Relaxed).is_ok() {
            S::note(Event::Napped);
            S::wait(own, state::NAPPING, Some(until));
            let _ = own.compare_exchange(state::NAPPING, state::CHOSEN, Relaxed, Relaxed);
        }
    }

    /// Takes the free lock as its heir, and removes the node from the queue.
    fn inherit_if_free(&self, place: Place) -> bool {
        let mut word = Word(self.word.load(Relaxed));
        while !word.is_locked() {
            let is_last = word.tail() == Some(place.number);
            let taken = if is_last { Word::HELD } else { word.locked().without_heir() };
            // Acquire pairs with the release in `holder.rs`, and with the releases of the newcomers behind us in the
            // queue.
            match self.word.compare_exchange(word.0, taken.0, Acquire, Relaxed) {
                Ok(_) => {
                    if let (false, Some(tail)) = (is_last, word.tail()) {
                        let oldest = Self::find_oldest(tail);
                        debug_assert_eq!(oldest, place.number, "the heir is the oldest");
                        Self::unlink_oldest(tail, oldest);
                    }
                    return true;
                }
                Err(now) => word = Word(now),
            }
        }
        false
    }

    /// Changes from heir to `becomes`, unless the lock becomes free or is granted first. Returns `then` if
    /// neither happened.
    ///
    /// While `heir` is set, this thread is the heir: only holders set it, for the oldest waiter, and this thread is
    /// the oldest waiter until it holds the lock.
    fn step_down(&self, place: Place, becomes: u32, then: Turn) -> Turn {
        // Acquire pairs with the swap in `choose`, which may be a later swap than the one we have seen: the loop
        // below finds `heir` set. Failure: a holder has granted us the lock.
        if place.node.state.compare_exchange(state::CHOSEN, becomes, Acquire, Relaxed).is_err() {
            return Turn::Look;
        }
        let mut word = Word(self.word.load(Relaxed));
        // re-check: while `heir` is set, unlocking leaves the lock to us and wakes no thread.
        while word.has_heir() {
            if !word.is_locked() {
                if self.inherit_if_free(place) {
                    return Turn::Ours;
                }
                word = Word(self.word.load(Relaxed));
                continue;
            }
            // Release pairs with the acquire of the next holder that unlocks: it finds the state we left.
            match self.word.compare_exchange(word.0, word.with_heir_asleep().0, Release, Relaxed) {
                Ok(_) => return then,
                Err(now) => word = Word(now),
            }
        }
        Turn::Look // a holder is just granting us the lock
    }

    /// Abandons the node to the queue; returns false if a holder has chosen it or granted it the lock meanwhile.
    fn give_up(&self, place: Place) -> bool {
        let mut seen = place.node.state.load(Relaxed);
        while matches!(seen, state::WAITING | state::HALTED) {
            // Release pairs with the acquire in the swap of the holder that takes the node out of the queue.
            match place.node.state.compare_exchange(seen, state::ABANDONED, Release, Relaxed) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }
}

/// A hint that this waiter's turn is far away, because the waiter before it sleeps.
fn stands_behind_a_sleeper<S: Platform>(place: Place) -> bool {
    link(&place.node.older)
        .is_some_and(|older| S::nodes()[older.0 as usize].state.load(Relaxed) == state::HALTED)
}
