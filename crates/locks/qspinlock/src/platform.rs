//! The operating-system interface of the queued locks: nodes to wait on, sleep and wake, a clock.
//!
//! `Linux` (with feature `std`) is this crate's platform; the models have their own. For a kernel or a
//! runtime without `std`, implement [`Platform`].
//!
//! The lock algorithm is in `queue.rs`.

use crate::atomic::AtomicU32;
use crate::{Node, events::Event};

/// The time at which a timed wait ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    /// The clock that measures the deadline.
    pub clock: Clock,
    /// The clock's reading at the deadline, in nanoseconds.
    pub at_ns: u64,
}

impl Deadline {
    /// The earlier of two deadlines on the same clock; `self` if `other` is `None` or on another clock.
    pub(crate) fn or_earlier(self, other: Option<Self>) -> Self {
        other.filter(|other| other.clock == self.clock && other.at_ns < self.at_ns).unwrap_or(self)
    }
}

/// A system clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// Unaffected by changes of the date. `Instant` reads this clock on Linux.
    Monotonic,
    /// The date. A change of the date shortens or lengthens sleeps.
    Realtime,
}

/// How a sleep ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slept {
    /// The thread was woken, woke up for no reason, or did not sleep because the word had another value.
    Woken,
    /// The deadline has passed.
    TimedOut,
}

/// An operating system, as the queued locks see it.
///
/// # Safety
/// [`nodes`](Self::nodes) returns the same nodes to all threads of the process at all times, and
/// [`own_nodes`](Self::own_nodes) never returns one number to two threads that are alive at the same time.
pub unsafe trait Platform: 'static {
    /// All nodes that can exist, at most [`MAX_NODES`](crate::MAX_NODES). They are never moved or freed.
    fn nodes() -> &'static [Node];

    /// The first of this thread's [`NODES_PER_THREAD`](crate::NODES_PER_THREAD) consecutive nodes; `None` if
    /// there are more threads than slots.
    fn own_nodes() -> Option<u32>;

    /// The number of shared nodes, which start at 0: a thread that has no free node borrows one for one wait.
    fn common_nodes() -> u32;

    /// The process's epoch, which changes in the child at each fork: waiters of an older epoch are threads of a
    /// parent, and do not exist in this process.
    fn epoch() -> u32;

    /// Sleeps while `word` is `expected`, until the deadline at the latest. May return early for no reason.
    fn wait(word: &AtomicU32, expected: u32, deadline: Option<Deadline>) -> Slept;

    /// Wakes one thread that sleeps on `word`. If `word` is in a lock, the lock may no longer exist; a node always
    /// does.
    fn wake_one(word: &AtomicU32);

    /// The deadline `ns` nanoseconds from now.
    fn after_ns(clock: Clock, ns: u64) -> Deadline;

    /// Whether the deadline has passed.
    fn is_past(deadline: Deadline) -> bool;

    /// Called between two polls in a spin loop: gives the processor a spin hint.
    fn relax();

    /// Sleeps for about `ns` nanoseconds, but not beyond the deadline.
    fn sleep_ns(ns: u64, deadline: Option<Deadline>);

    /// Called when an event happens in a slow path of this thread, for statistics.
    fn note(_event: Event) {}
}
