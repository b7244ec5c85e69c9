//! A waiter's place in a queue: one cache line that it spins or sleeps on.
//!
//! ```text
//!  word.tail ──▶ newest ──older──▶ … ──older──▶ oldest         the holder of the lock adds the way back (`newer`),
//!                                                              and where the oldest is (`oldest`, in the newest)
//! ```
//!
//! Not here: how queues are walked (`queue/chain.rs`), where nodes come from (the platform).

#[cfg(not(all(test, loom)))]
use core::sync::atomic::{AtomicU32, AtomicUsize};
#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU32, AtomicUsize};

/// Nodes of one thread: one for what it waits for now, and more for handlers of signals that arrive meanwhile, and
/// for waits that ended at a deadline and whose node has not yet come out of its queue.
pub const NODES_PER_THREAD: u32 = 4;

/// See the file's head. Platforms keep them; only the locks use them.
#[derive(Debug)]
#[repr(align(64))]
pub struct Node {
    pub(crate) state: AtomicU32,
    /// The waiter before this one, as number + 1; 0 for none.
    pub(crate) older: AtomicU32,
    /// The waiter after this one, as far as a holder of the lock has come by.
    pub(crate) newer: AtomicU32,
    /// If a holder has found out: the oldest waiter of the queue.
    pub(crate) oldest: AtomicU32,
    /// The [epoch](crate::Platform::epoch) in which the waiter queued.
    pub(crate) epoch: AtomicU32,
    /// Looks that the thread spends before it sleeps, learned from how its last waits ended.
    pub(crate) patience: AtomicU32,
    /// The address of the lock that is waited for, for diagnoses only.
    pub(crate) lock: AtomicUsize,
}

impl Node {
    /// A node that nobody uses.
    #[cfg(not(all(test, loom)))]
    #[must_use]
    pub const fn new() -> Self {
        Self {
            state: AtomicU32::new(0),
            older: AtomicU32::new(0),
            newer: AtomicU32::new(0),
            oldest: AtomicU32::new(0),
            epoch: AtomicU32::new(0),
            patience: AtomicU32::new(0),
            lock: AtomicUsize::new(0),
        }
    }

    /// A node that nobody uses.
    #[cfg(all(test, loom))]
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU32::new(0),
            older: AtomicU32::new(0),
            newer: AtomicU32::new(0),
            oldest: AtomicU32::new(0),
            epoch: AtomicU32::new(0),
            patience: AtomicU32::new(0),
            lock: AtomicUsize::new(0),
        }
    }
}

#[cfg(not(all(test, loom)))]
impl Default for Node {
    fn default() -> Self {
        Self::new()
    }
}
