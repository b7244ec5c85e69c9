//! The word of a reader/writer lock, and what its bits mean.
//!
//! ```text
//!  31      30        4      3          2        1         0
//! | full |  readers   | queued | asleep | waiting | writer |      all zero: free, nobody stands first in line
//! ```
//!
//! - `writer`: a writer is inside.
//! - `waiting`: a writer is first in line, so newcomers stand in line as well.
//! - `asleep`: who is first in line sleeps on this word. Who lets it in wakes it.
//! - `queued`: the writer inside came through the queue and still stands first in it. Its unlock lets the next one
//!   come forward, who would have nothing to do before.
//! - `readers`: how many are inside, or counted and waiting only for the writer inside to leave. `full` is the bit
//!   that a count of [`MAX_READERS`] sets. What is above is room for those who find that out and go away again.
//!
//! Every change is a read-modify-write of the whole word, so an acquire that reads any of them is ordered after all
//! releases before it.
//!
//! Not here: who may change what when (`rwlock.rs`).

pub(super) const WRITER: u32 = 1;
pub(super) const WAITING: u32 = 1 << 1;
pub(super) const ASLEEP: u32 = 1 << 2;
pub(super) const QUEUED: u32 = 1 << 3;
/// One reader.
pub(super) const READER: u32 = 1 << 4;
pub(super) const FULL: u32 = 1 << 31;

/// Readers that a lock admits at the same time. One more is refused or waits, also one that holds it already.
pub const MAX_READERS: u32 = FULL / READER;

pub(super) const fn readers(word: u32) -> u32 {
    word / READER
}

/// Nobody is inside; somebody may be first in line.
pub(super) const fn is_empty(word: u32) -> bool {
    word & !(WAITING | ASLEEP) == 0
}

/// Whether who is first in line sleeps, and has nothing to wait for any more.
pub(super) const fn lets_a_sleeper_in(word: u32) -> bool {
    word & ASLEEP != 0 && is_empty(word)
}
