//! A waiter's place in a queue: one cache line that it spins or sleeps on.
//!
//! ```text
//!  word.tail ──▶ newest ──older──▶ … ──older──▶ oldest         the holder of the lock adds the way back (`newer`),
//!                                                              and where the oldest is (`oldest`, in the newest)
//! ```
//!
//! Not here: how queues are walked (`queue/chain.rs`), where nodes come from (the platform).

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::atomic::{AtomicU32, AtomicUsize};
use crate::word::NodeNumber;

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
    /// The address of the lock that is waited for, for diagnoses only.
    pub(crate) lock: AtomicUsize,
}

/// What a node's `state` says. The waiter and the holder of the lock both change it, always by read-modify-write
/// (but for the two that nobody else can be changing): each sees what the other did last.
///
/// ```text
/// FREE ─▶ CLAIMED ─▶ WAITING ◀──▶ HALTED        the waiter: has a node, queued and spins, sleeps
///                       │ ▲          │
///                       ▼ │          ▼
///            GRANTED   CHOSEN   ABANDONED        the holder: it is yours; you are the heir
///                                                the waiter: gave up; a holder takes the node out, FREE
/// ```
pub(crate) mod state {
    /// Nobody's.
    pub(crate) const FREE: u32 = 0;
    /// Being prepared, in no queue.
    pub(crate) const CLAIMED: u32 = 1;
    /// In a queue; its thread looks at it.
    pub(crate) const WAITING: u32 = 2;
    /// In a queue; its thread sleeps on it, or is about to, or has been woken for nothing.
    pub(crate) const HALTED: u32 = 3;
    /// In a queue, the oldest, and awake: it takes the lock as soon as it is free.
    pub(crate) const CHOSEN: u32 = 4;
    /// As above, but sleeps for a moment; a timer ends it if nobody does.
    pub(crate) const NAPPING: u32 = 7;
    /// Out of the queue; its thread holds the lock.
    pub(crate) const GRANTED: u32 = 5;
    /// In a queue; its thread has gone.
    pub(crate) const ABANDONED: u32 = 6;
}

impl Node {
    /// Takes the node if it is nobody's. Also against a signal handler of the same thread.
    pub(crate) fn claim(&self) -> bool {
        // Acquire pairs with `free`.
        self.state.load(Relaxed) == state::FREE
            && self.state.compare_exchange(state::FREE, state::CLAIMED, Acquire, Relaxed).is_ok()
    }

    /// Gives the node back: by its waiter, or by a holder of the lock who took it out of the queue.
    pub(crate) fn free(&self) {
        // Release pairs with `claim`.
        self.state.store(state::FREE, Release);
    }

    /// Makes it ready to be queued. Becomes visible to others with the exchange that publishes it in the lock's word.
    pub(crate) fn prepare(&self, epoch: u32, lock: usize) {
        self.newer.store(0, Relaxed);
        self.oldest.store(0, Relaxed);
        self.epoch.store(epoch, Relaxed);
        self.lock.store(lock, Relaxed);
        self.state.store(state::WAITING, Relaxed);
    }
}

/// A link between nodes: a number, or none.
pub(crate) fn link(to: &AtomicU32) -> Option<NodeNumber> {
    // Links are written before their node is published, or by holders of the lock: ordered by the lock's word.
    to.load(Relaxed).checked_sub(1).map(NodeNumber)
}

/// Sets a link.
pub(crate) fn set_link(from: &AtomicU32, to: Option<NodeNumber>) {
    from.store(to.map_or(0, |number| number.0 + 1), Relaxed);
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
