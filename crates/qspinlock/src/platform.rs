//! What the queued locks ask of an operating system: nodes to wait on, sleep and wake, a clock.
//!
//! `Linux` (with feature `std`) is the one that is shipped; the models bring their own. A kernel or a runtime without
//! `std` implements [`Platform`].
//!
//! Not here: the algorithm.

use crate::atomic::AtomicU32;
use crate::{Node, events::Event};

/// Until when a timed lock waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    /// Which clock.
    pub clock: Clock,
    /// Its reading, in nanoseconds.
    pub at_ns: u64,
}

impl Deadline {
    /// The earlier of two deadlines on the same clock; this one if there is no other, or on another clock.
    pub(crate) fn or_earlier(self, other: Option<Self>) -> Self {
        other.filter(|other| other.clock == self.clock && other.at_ns < self.at_ns).unwrap_or(self)
    }
}

/// A clock of the system's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// Counts on, whatever the date is set to. What `Instant` shows on Linux.
    Monotonic,
    /// The date. A sleep until a reading of it ends earlier or later when the date is set.
    Realtime,
}

/// How a sleep ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slept {
    /// Woken, or without a reason, or not slept at all because the word had another value.
    Woken,
    /// The deadline has passed.
    TimedOut,
}

/// An operating system, as the queued locks see it.
///
/// # Safety
/// [`nodes`](Self::nodes) gives the same nodes to all threads of the process at all times, and
/// [`own_nodes`](Self::own_nodes) never gives one number to two threads that are alive at the same time.
pub unsafe trait Platform: 'static {
    /// All nodes there can be, at most [`MAX_NODES`](crate::MAX_NODES). They stay where they are for ever.
    fn nodes() -> &'static [Node];

    /// The first of this thread's nodes, which are [`NODES_PER_THREAD`](crate::NODES_PER_THREAD) in a row;
    /// none if there are more threads than numbers.
    fn own_nodes() -> Option<u32>;

    /// How many nodes, from 0 on, belong to nobody: each is borrowed for one wait by a thread that has no free node.
    fn common_nodes() -> u32;

    /// Changes with each fork, in the child: waiters of an older epoch are threads that do not exist here.
    fn epoch() -> u32;

    /// Sleeps while `word` is `expected`, at the longest until the deadline. May return early without a reason.
    fn wait(word: &AtomicU32, expected: u32, deadline: Option<Deadline>) -> Slept;

    /// Wakes one thread that sleeps on `word`. The word's lock may be gone by then, its node never.
    fn wake_one(word: &AtomicU32);

    /// The deadline that is `ns` nanoseconds from now.
    fn after_ns(clock: Clock, ns: u64) -> Deadline;

    /// Whether the deadline has passed.
    fn is_past(deadline: Deadline) -> bool;

    /// A look is over and the next is to come: tells the processor, waits a moment.
    fn relax();

    /// Sleeps for about so many nanoseconds, but not beyond the deadline.
    fn sleep_ns(ns: u64, deadline: Option<Deadline>);

    /// Something worth counting happened in a slow path of this thread.
    fn note(_event: Event) {}
}
