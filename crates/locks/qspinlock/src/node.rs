//! A waiter's entry in a queue: one cache line that it spins or sleeps on.
//!
//! ```text
//!  word.tail ──▶ newest ──older──▶ … ──older──▶ oldest         the holder adds the links back (`newer`), and
//!                                                              the oldest (`oldest`, in the newest node)
//! ```
//!
//! See also: how queues are walked (`queue/chain.rs`), where nodes come from (the platform).

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::atomic::{AtomicU32, AtomicUsize};
use crate::word::NodeNumber;

/// Number of nodes of one thread: one for its current wait, the others for signal handlers that interrupt that
/// wait, and for waits that timed out but whose nodes are still in their queues.
pub const NODES_PER_THREAD: u32 = 4;

/// A queue node. Platforms store the nodes; only the locks use them.
#[derive(Debug)]
#[repr(align(64))]
pub struct Node {
    pub(crate) state: AtomicU32,
    /// The waiter before this one, as its node number + 1; 0 for none.
    pub(crate) older: AtomicU32,
    /// The waiter after this one, if a holder of the lock has walked past it.
    pub(crate) newer: AtomicU32,
    /// The oldest waiter of the queue, if a holder has found it.
    pub(crate) oldest: AtomicU32,
    /// The [epoch](crate::Platform::epoch) in which the waiter queued.
    pub(crate) epoch: AtomicU32,
    /// The time at which the thread last found a held lock with a queue ([`Clock::Monotonic`], in units of 64 ns,
    /// wrapping). Used only in a thread's first node.
    ///
    /// [`Clock::Monotonic`]: crate::Clock::Monotonic
    pub(crate) met_queue_at: AtomicU32,
    /// The address of the lock that the thread waits for; for diagnosis only.
    pub(crate) lock: AtomicUsize,
}

/// The values of a node's `state`. The waiter and the holder of the lock both change the state. Each change is a
/// read-modify-write, so each thread sees the other's last change. The exceptions are two changes during which no other
/// thread can change the state.
///
/// ```text
/// FREE ─▶ CLAIMED ─▶ WAITING ◀──▶ HALTED        the waiter: claims a node, queues and spins, sleeps
///                       │ ▲          │
///                       ▼ │          ▼
///            GRANTED   CHOSEN   ABANDONED        the holder: the lock is yours; you are the heir
///                                                the waiter: timed out; a holder removes the node, FREE
/// ```
pub(crate) mod state {
    /// Unused.
    pub(crate) const FREE: u32 = 0;
    /// Being prepared, in no queue.
    pub(crate) const CLAIMED: u32 = 1;
    /// In a queue; its thread polls it.
    pub(crate) const WAITING: u32 = 2;
    /// The node is in a queue; its thread sleeps on it, is about to sleep, or was woken for no reason.
    pub(crate) const HALTED: u32 = 3;
    /// The oldest in its queue, and awake: its thread takes the lock as soon as the lock is free.
    pub(crate) const CHOSEN: u32 = 4;
    /// Like `CHOSEN`, but the thread sleeps briefly; a timer wakes it if no thread does.
    pub(crate) const NAPPING: u32 = 7;
    /// Out of the queue; its thread holds the lock.
    pub(crate) const GRANTED: u32 = 5;
    /// In a queue, but its thread has given up waiting.
    pub(crate) const ABANDONED: u32 = 6;
}

impl Node {
    /// Claims the node if it is free. Safe against a signal handler of the same thread.
    pub(crate) fn claim(&self) -> bool {
        // Acquire pairs with `free`.
        self.state.load(Relaxed) == state::FREE
            && self.state.compare_exchange(state::FREE, state::CLAIMED, Acquire, Relaxed).is_ok()
    }

    /// Frees the node: called by its waiter, or by a holder of the lock that removed it from the queue.
    pub(crate) fn free(&self) {
        // Release pairs with `claim`.
        self.state.store(state::FREE, Release);
    }

    /// Prepares the node for queueing. Other threads see this after the exchange that publishes the node in
    /// the lock's word.
    pub(crate) fn prepare(&self, epoch: u32, lock: usize) {
        self.newer.store(0, Relaxed);
        self.oldest.store(0, Relaxed);
        self.epoch.store(epoch, Relaxed);
        self.lock.store(lock, Relaxed);
        self.state.store(state::WAITING, Relaxed);
    }
}

/// Reads a link between nodes: a node's number, or none.
pub(crate) fn link(to: &AtomicU32) -> Option<NodeNumber> {
    // Links are written before their node is published, or by the lock's holder: the lock's word orders them.
    to.load(Relaxed).checked_sub(1).map(NodeNumber)
}

/// Sets a link.
pub(crate) fn set_link(from: &AtomicU32, to: Option<NodeNumber>) {
    from.store(to.map_or(0, |number| number.0 + 1), Relaxed);
}

impl Node {
    /// An unused node.
    #[cfg(not(all(test, loom)))]
    #[must_use]
    pub const fn new() -> Self {
        Self {
            state: AtomicU32::new(0),
            older: AtomicU32::new(0),
            newer: AtomicU32::new(0),
            oldest: AtomicU32::new(0),
            epoch: AtomicU32::new(0),
            met_queue_at: AtomicU32::new(0),
            lock: AtomicUsize::new(0),
        }
    }

    /// An unused node.
    #[cfg(all(test, loom))]
    pub(crate) fn new() -> Self {
        Self {
            state: AtomicU32::new(0),
            older: AtomicU32::new(0),
            newer: AtomicU32::new(0),
            oldest: AtomicU32::new(0),
            epoch: AtomicU32::new(0),
            met_queue_at: AtomicU32::new(0),
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
