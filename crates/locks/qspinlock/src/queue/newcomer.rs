//! A newcomer: overtakes the queue if the policy allows it, or queues at the end.
//!
//! See also: waiting in the queue (`waiter.rs`).

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::QueueLock;
use crate::node::{NODES_PER_THREAD, Node, set_link, state};
use crate::word::{NodeNumber, Word};
use crate::{Clock, Deadline, Event, Platform, Policy};

/// A node that belongs to this wait alone.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) number: NodeNumber,
    pub(super) node: &'static Node,
}

/// The unit of `Node::met_queue_at`.
const MET_UNIT_NS: u64 = 64;
/// The shortest and the longest sleep between two attempts of a thread without a node.
const SHORTEST_SLEEP_NS: u64 = 1_000;
const LONGEST_SLEEP_NS: u64 = 1_000_000;

impl<P: Policy, S: Platform> QueueLock<P, S> {
    /// The word after a newcomer has taken the lock; `None` if it may not take it.
    #[inline]
    fn taken_by_newcomer(word: Word) -> Option<Word> {
        match word.tail() {
            _ if word.is_locked() => None,
            None => Some(word.locked()),
            Some(tail) if Self::is_left_behind(tail) => Some(Word::HELD),
            Some(_) if Self::newcomers_are_stopped(word) => None,
            Some(_) => Some(word.locked()),
        }
    }

    /// Takes the lock if it is free, overtaking a queue if allowed. Never waits.
    pub(super) fn take_in_passing(&self, mut word: Word) -> bool {
        while let Some(taken) = Self::taken_by_newcomer(word) {
            // Acquire pairs with the releases in `queue.rs` and `holder.rs`.
            match self.word.compare_exchange(word.0, taken.0, Acquire, Relaxed) {
                Ok(_) => {
                    if word.tail().is_some() {
                        S::note(Event::Stole);
                    }
                    return true;
                }
                Err(now) => word = Word(now), // another thread took the lock or queued: progress was made
            }
        }
        false
    }

    /// Polls the lock for a while before queueing. If other threads already queue, only a thread that rarely finds the
    /// lock held polls: the fewer threads contend for the lock's cache line, the less it moves between processors. But
    /// a queue that all threads join would never become empty, even if the lock is mostly free.
    pub(super) fn look_and_take(&self) -> bool {
        let mut may_poll_beside_queue = None;
        for look in 0..P::NEWCOMER_LOOKS {
            let word = Word(self.word.load(Relaxed));
            if self.take_in_passing(word) {
                return true;
            }
            if word.tail().is_some() && !*may_poll_beside_queue.get_or_insert_with(Self::rarely_meets_a_queue)
            {
                return false;
            }
            for _ in 0..P::newcomer_pause(look) {
                S::relax();
            }
        }
        false
    }

    /// Whether this thread last met a queue at least [`Policy::RARELY_NS`] ago. Records that it has met one now.
    fn rarely_meets_a_queue() -> bool {
        if P::RARELY_NS == 0 {
            return false;
        }
        let Some(first) = S::own_nodes() else { return false };
        #[allow(clippy::cast_possible_truncation)] // wraps after minutes; a wrong answer costs a few polls
        let now = (S::after_ns(Clock::Monotonic, 0).at_ns / MET_UNIT_NS) as u32;
        // Relaxed: only this thread uses it.
        let met = &Self::node(NodeNumber(first)).met_queue_at;
        let last = met.load(Relaxed);
        met.store(now, Relaxed);
        u64::from(now.wrapping_sub(last)) * MET_UNIT_NS >= P::RARELY_NS
    }

    /// Claims a node: one of the thread's own, or a shared one. A timed wait uses no shared node if the thread has own
    /// nodes.
    pub(super) fn claim_place(&self, is_timed: bool) -> Option<Place> {
        let own = S::own_nodes();
        let own_place = own.and_then(|first| claim_one_of::<S>(first, NODES_PER_THREAD));
        let place = own_place.or_else(|| {
            S::note(Event::NoNode);
            // Timed waits leave nodes behind; they must not use up the nodes that other threads depend on.
            let may_borrow = !is_timed || own.is_none();
            may_borrow.then(|| claim_one_of::<S>(0, S::common_nodes())).flatten()
        })?;
        place.node.prepare(S::epoch(), core::ptr::from_ref(self).addr());
        Some(place)
    }

    /// Appends the node to the queue; returns false if the lock was taken instead.
    pub(super) fn join(&self, place: Place) -> bool {
        let mut word = Word(self.word.load(Relaxed));
        loop {
            if let Some(taken) = Self::taken_by_newcomer(word) {
                // Acquire pairs with the releases in `queue.rs` and `holder.rs`.
                match self.word.compare_exchange(word.0, taken.0, Acquire, Relaxed) {
                    Ok(_) => return false,
                    Err(now) => word = Word(now),
                }
                continue;
            }
            let queue = Self::without_those_left_behind(word);
            set_link(&place.node.older, queue.tail());
            // Release pairs with the acquires of the holders, which read the node.
            match self.word.compare_exchange(word.0, queue.with_tail(place.number).0, Release, Relaxed) {
                Ok(_) => return true,
                Err(now) => word = Word(now),
            }
        }
    }

    /// In a forked child: drops a queue whose waiters exist only in the parent.
    fn without_those_left_behind(word: Word) -> Word {
        match word.tail() {
            Some(tail) if Self::is_left_behind(tail) => word.with_empty_queue(),
            _ => word,
        }
    }

    /// Waits without a node, because more threads wait than there are nodes, or this thread has left too many nodes in
    /// queues. It periodically tries to take the lock or a free node, so that it eventually gets into the queue.
    #[cold]
    pub(super) fn acquire_without_node(&self, deadline: Option<Deadline>) -> bool {
        let mut sleep_ns = SHORTEST_SLEEP_NS;
        loop {
            if self.take_in_passing(Word(self.word.load(Relaxed))) {
                return true;
            }
            if deadline.is_some_and(S::is_past) {
                S::note(Event::TimedOut);
                return false;
            }
            if let Some(place) = self.claim_place(deadline.is_some()) {
                return self.acquire_from(place, deadline);
            }
            S::sleep_ns(sleep_ns, deadline);
            sleep_ns = (sleep_ns * 2).min(LONGEST_SLEEP_NS);
        }
    }
}

fn claim_one_of<S: Platform>(first: u32, count: u32) -> Option<Place> {
    let nodes = S::nodes().get(first as usize..(first + count) as usize)?;
    let (number, node) = (first..).zip(nodes).find(|(_, node)| node.claim())?;
    Some(Place { number: NodeNumber(number), node })
}

impl Place {
    /// Frees the node after the wait, once it is out of the queue.
    pub(super) fn give_back(self) {
        debug_assert_ne!(self.node.state.load(Relaxed), state::ABANDONED, "the queue owns an abandoned node");
        self.node.free();
    }
}
