//! The bits of a reader/writer lock's word.
//!
//! ```text
//!  31      30        4      3          2        1         0
//! | full |  readers   | queued | asleep | waiting | writer |      all zero: free, no writer first in line
//! ```
//!
//! - `writer`: a writer is inside.
//! - `waiting`: a writer is first in line, so newcomers stand in line as well.
//! - `asleep`: the thread first in line sleeps on this word. The thread that lets it in wakes it.
//! - `queued`: the writer inside came through the queue and still holds the queue's lock. Its unlock lets the
//!   next thread come forward; any earlier, the next thread would only have to wait.
//! - `readers`: how many readers are inside, or counted and waiting only for the writer inside to leave. `full` is
//!   the bit that a count of [`MAX_READERS`] sets. Counts above it leave room for readers that find the lock full
//!   and uncount themselves.
//!
//! Every change is a read-modify-write of the whole word, so an acquire that reads any of them is ordered
//! after all earlier releases.
//!
//! See also: which thread may change which bit (`rwlock.rs`).

pub(super) const WRITER: u32 = 1;
pub(super) const WAITING: u32 = 1 << 1;
pub(super) const ASLEEP: u32 = 1 << 2;
pub(super) const QUEUED: u32 = 1 << 3;
/// One reader.
pub(super) const READER: u32 = 1 << 4;
pub(super) const FULL: u32 = 1 << 31;

/// Limit of readers that a lock admits at the same time. Further readers are refused or wait, even those that already
/// hold the lock.
pub const MAX_READERS: u32 = FULL / READER;

pub(super) const fn readers(word: u32) -> u32 {
    word / READER
}

/// Whether the lock is empty; a thread may be first in line.
pub(super) const fn is_empty(word: u32) -> bool {
    word & !(WAITING | ASLEEP) == 0
}

/// Whether the thread first in line sleeps although it no longer has to wait.
pub(super) const fn lets_a_sleeper_in(word: u32) -> bool {
    word & ASLEEP != 0 && is_empty(word)
}
