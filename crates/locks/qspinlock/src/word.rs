//! The bits of the queued lock's word.
//!
//! ```text
//!  31                    16 15             3   2        1        0
//! |  tail: node number + 1 |    passed      | alone |  heir  | locked |        all zero: free, no waiters
//! ```
//!
//! - `locked`: a thread holds the lock.
//! - `heir`: the oldest waiter is awake and will take the lock as soon as it is free. Unlocking then has no
//!   thread to wake.
//! - `alone`: the queue has only one node, the tail's. The bit shows this without a read of the node.
//! - `passed`: how often the lock was released to any thread while the oldest waiter waited. Policies limit it.
//! - `tail`: the newest waiter's node; zero means an empty queue. Each waiter knows the one before it.
//! - A tail with all bits set ([`FOREIGN`]) is not a node, so no lock's word ever has that value. It marks
//!   other data that shares the four bytes with locks and must be told apart from them (process-shared
//!   pthread spin locks).
//!
//! The lock uses one `AtomicU32` and whole-word operations only: mixed-size atomic accesses are undefined
//! behaviour in Rust. Every change is a read-modify-write, so an acquire that reads any of them is ordered
//! after all earlier releases.
//!
//! See also: which thread may change which bit (`queue.rs`).

/// A value of the lock's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(pub(crate) u32);

pub(crate) const LOCKED: u32 = 1;
pub(crate) const HEIR: u32 = 1 << 1;
const ALONE: u32 = 1 << 2;
const PASSED_SHIFT: u32 = 3;
const TAIL_SHIFT: u32 = 16;
pub(crate) const PASSED: u32 = (1 << TAIL_SHIFT) - (1 << PASSED_SHIFT);

/// The limit of [`Policy::PASS_LIMIT`](crate::Policy::PASS_LIMIT). `passed` can be one more: then no newcomer may pass.
pub const MAX_PASSED: u32 = (PASSED >> PASSED_SHIFT) - 1;
/// Nodes that a word can tell apart; the tail value [`FOREIGN`] is not one of them.
pub const MAX_NODES: u32 = (1 << (32 - TAIL_SHIFT)) - 2;
/// A lock's word never has this value or a greater one.
pub const FOREIGN: u32 = (MAX_NODES + 1) << TAIL_SHIFT;

const _: () = assert!(FOREIGN == !(LOCKED | HEIR | ALONE | PASSED), "all bits of the tail, and no others");

/// A node's index in [`Platform::nodes`](crate::Platform::nodes).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeNumber(pub(crate) u32);

impl Word {
    pub(crate) const FREE: Self = Self(0);
    pub(crate) const HELD: Self = Self(LOCKED);

    pub(crate) const fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    pub(crate) const fn has_heir(self) -> bool {
        self.0 & HEIR != 0
    }

    /// Whether the queue has only the tail.
    pub(crate) const fn is_alone(self) -> bool {
        self.0 & ALONE != 0
    }

    pub(crate) const fn passed(self) -> u32 {
        (self.0 & PASSED) >> PASSED_SHIFT
    }

    pub(crate) const fn tail(self) -> Option<NodeNumber> {
        match self.0 >> TAIL_SHIFT {
            0 => None,
            number => Some(NodeNumber(number - 1)),
        }
    }

    pub(crate) const fn locked(self) -> Self {
        Self(self.0 | LOCKED)
    }

    pub(crate) const fn unlocked(self) -> Self {
        Self(self.0 & !LOCKED)
    }

    /// Without an heir, and with a pass count of zero.
    pub(crate) const fn without_heir(self) -> Self {
        Self(self.0 & !(HEIR | PASSED))
    }

    /// Without an heir; the pass count stays.
    pub(crate) const fn with_heir_asleep(self) -> Self {
        Self(self.0 & !HEIR)
    }

    /// With `passed` incremented: the lock is released once more to any thread while there are waiters. `passed` must
    /// be at most [`MAX_PASSED`] before.
    pub(crate) const fn passable_once_more(self) -> Self {
        Self(self.0 + (1 << PASSED_SHIFT))
    }

    /// With `node` as the newest waiter, behind the present tail.
    pub(crate) const fn with_tail(self, node: NodeNumber) -> Self {
        let alone = if self.tail().is_none() { ALONE } else { 0 };
        Self((self.0 & (LOCKED | HEIR | PASSED)) | alone | (node.0 + 1) << TAIL_SHIFT)
    }

    /// Without waiters.
    pub(crate) const fn with_empty_queue(self) -> Self {
        Self(self.0 & LOCKED)
    }
}
