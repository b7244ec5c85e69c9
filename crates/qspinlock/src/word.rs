//! The lock's one word, and what its bits mean.
//!
//! ```text
//!  31                    14 13             3   2        1        0
//! |  tail: node number + 1 |    passed      | alone |  heir  | locked |        all zero: free, nobody waits
//! ```
//!
//! - `locked`: somebody holds the lock.
//! - `heir`: the oldest waiter has been told that the lock is its own as soon as it is free; it is awake. Who unlocks
//!   has nobody to wake.
//! - `alone`: the queue has one node, the tail's, so that it need not be read to find out.
//! - `passed`: how often a newcomer took the lock since there has been an heir. Policies bound it.
//! - `tail`: the newest waiter's node. Each waiter knows the one before it; zero is an empty queue.
//! - A tail of ones only ([`FOREIGN`]) is no node's, so no lock's word ever looks like that. What shares the four bytes
//!   with locks and has to be told apart from them (process-shared spin locks of pthreads) is marked by it.
//!
//! One `AtomicU32`, and operations on the whole of it: access in mixed sizes is undefined behaviour in Rust.
//! Every change is a read-modify-write, so an acquire that reads any of them is ordered after all releases before.
//!
//! Not here: who may change what when (`queue.rs`).

/// A value of the lock's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(pub(crate) u32);

const LOCKED: u32 = 1;
pub(crate) const HEIR: u32 = 1 << 1;
const ALONE: u32 = 1 << 2;
const PASSED_SHIFT: u32 = 3;
const TAIL_SHIFT: u32 = 14;
pub(crate) const PASSED: u32 = (1 << TAIL_SHIFT) - (1 << PASSED_SHIFT);

/// What `passed` can count to, the limit of [`Policy::PASS_LIMIT`](crate::Policy::PASS_LIMIT).
pub const MAX_PASSED: u32 = PASSED >> PASSED_SHIFT;
/// Nodes that a word can tell apart, but for the one with the tail that is [`FOREIGN`].
pub const MAX_NODES: u32 = (1 << (32 - TAIL_SHIFT)) - 2;
/// Words from this one on are never a lock's.
pub const FOREIGN: u32 = (MAX_NODES + 1) << TAIL_SHIFT;

const _: () = assert!(FOREIGN == !(LOCKED | HEIR | ALONE | PASSED), "all bits of the tail, and no others");

/// One node of the platform's, by its place in [`Platform::nodes`](crate::Platform::nodes).
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

    /// The queue is the tail, and nothing else.
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

    /// Without an heir; nobody has been passed over yet.
    pub(crate) const fn without_heir(self) -> Self {
        Self(self.0 & !(HEIR | PASSED))
    }

    /// As above, but what the heir has been passed over so far still counts.
    pub(crate) const fn with_heir_asleep(self) -> Self {
        Self(self.0 & !HEIR)
    }

    /// A newcomer passed the heir once more. Only below [`MAX_PASSED`].
    pub(crate) const fn passed_once_more(self) -> Self {
        Self(self.0 + (1 << PASSED_SHIFT))
    }

    /// `node` is the newest waiter, behind the present tail.
    pub(crate) const fn with_tail(self, node: NodeNumber) -> Self {
        let alone = if self.tail().is_none() { ALONE } else { 0 };
        Self((self.0 & (LOCKED | HEIR | PASSED)) | alone | (node.0 + 1) << TAIL_SHIFT)
    }

    /// Nobody waits.
    pub(crate) const fn with_empty_queue(self) -> Self {
        Self(self.0 & LOCKED)
    }
}
