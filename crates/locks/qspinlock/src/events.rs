//! Names of slow-path events, for statistics.

/// Something that happened to one thread in a slow path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Acquired the lock after spinning on it, without queueing ("pending").
    Spun,
    /// Queued ("slow path").
    Queued,
    /// Took the lock ahead of a queue ("steal").
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
