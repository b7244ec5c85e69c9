//! Lock statistics for each source line that takes a lock: acquisitions, contention, waiting times and holding
//! times.
//!
//! ```text
//! Profiled::lock ─▶ this thread's row for the caller's line ◀─ Linux::note(event) from the slow path
//!                                   │ a reader merges all threads' rows by line
//!                                   ▼
//!                        snapshot() ─▶ Profile ─▶ a table
//! ```
//!
//! - [`Profiled`] wraps any `lock_api` 0.5 lock. It sees acquisitions, contention and times itself; the
//!   queued locks report events in their slow paths. Events outside any `Profiled` (the C interface,
//!   unwrapped locks) are counted too, but without a line: [`totals`].
//! - One [switch](set_mode) for the whole process, initially [off](Mode::Off). When off, an acquisition costs
//!   one load and a branch, and a release a branch. For the cost of the other modes see
//!   `docs/how-to/qspinlock-statistics.md` and `benches/stats.rs`.
//! - Each thread counts in its own static memory: nothing is allocated, no cache line is shared. A thread's
//!   first use claims its number. After a thread ends, a new thread takes over its number, with the counts.
//! - Bounds: each thread has [`SITES`] rows for source locations; further locations share one row. Of the threads
//!   alive, 4096 have a table; further threads share one table, and lose counts that two of them make at the same
//!   moment. The tables take 98 MiB of address space, but memory only for rows in use.
//! - If a signal handler counts while it interrupts counting code, a count may be too low by one.
//! - A forked child starts with its parent's counts; call [`reset`] to clear them.
//!
//! See also: totals for all of a thread's acquisitions (`metered.rs`).

mod mode;
mod profile;
mod profiled;
mod table;

pub use mode::{Mode, mode, set_mode};
pub use profile::{EventCounts, Profile, SiteCounts, reset, snapshot, totals};
pub use profiled::{Attributed, Profiled};
pub use table::SITES;
pub(crate) use table::note;
