//! Names for what happens off the fast path, for statistics.
//!
//! Not here: the counters.

/// Something that happened to one thread in a slow path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Acquired after spinning on the lock itself, without a place in the queue ("pending").
    Spun,
    /// Took a place in the queue ("slow path").
    Queued,
    /// Took the lock past a queue ("steal").
    Stole,
    /// Went to sleep ("halt").
    Halted,
    /// As heir, slept briefly so that newcomers could pass ("nap": woken by a timer, not by a thread).
    Napped,
    /// Woke a sleeping waiter ("kick").
    Kicked,
    /// Was woken for no reason, and went back to sleep.
    WokenForNothing,
    /// Timed out.
    TimedOut,
    /// Had no node of its own to wait on.
    NoNode,
}
