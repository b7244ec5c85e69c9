//! Lock statistics per source line that takes a lock: how often, how contended, how long waited for and held.
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
//! - Bounds: [`SITES`] source locations per thread; all others share one row. 4096 threads alive at a time;
//!   the rest share one table, and lose counts that two of them make at the same moment. That is 98 MiB of
//!   address space; memory is used only for rows in use.
//! - If a signal handler counts while it interrupts counting code, a count may be too low by one.
//! - A forked child starts with its parent's counts; call [`reset`] to clear them.
//!
//! Not here: totals for all of a thread's acquisitions (`metered.rs`).

mod profile;
mod profiled;
mod table;

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

pub use profile::{EventCounts, Profile, SiteCounts, reset, snapshot, totals};
pub use profiled::{Attributed, Profiled};
pub use table::SITES;
pub(crate) use table::note;

/// What is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Nothing.
    #[default]
    Off,
    /// Counts, no times.
    Counters,
    /// Counts, and the times of one acquisition in `one_in`, per line and thread; 0 counts as 1.
    Sampled {
        /// Preferably a prime, so that it does not match the rhythm of a loop that takes the lock.
        one_in: u32,
    },
    /// Counts, and the times of every acquisition.
    Full,
}

impl Mode {
    /// Times of one acquisition in 127. Timing one costs three readings of the clock, 25 to 60 ns each.
    pub const SAMPLED: Self = Self::Sampled { one_in: 127 };
}

/// See [`Recording`].
static SWITCH: AtomicU32 = AtomicU32::new(Recording::NOTHING.0);

/// [`Mode`] as one number: 0 for off, `u32::MAX` for no times, any other n for times of one in n.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Recording(u32);

impl Recording {
    const NOTHING: Self = Self(0);
    const NO_TIMES: Self = Self(u32::MAX);

    /// Relaxed: the switch publishes nothing; threads notice it soon enough.
    #[inline]
    fn now() -> Self {
        Self(SWITCH.load(Relaxed))
    }

    #[inline]
    fn is_off(self) -> bool {
        self == Self::NOTHING
    }

    /// One acquisition in this many is timed.
    #[inline]
    fn stride(self) -> Option<u32> {
        (self != Self::NO_TIMES).then_some(self.0)
    }
}

/// Sets the mode for all threads of the process. Earlier counts stay.
pub fn set_mode(mode: Mode) {
    let recording = match mode {
        Mode::Off => Recording::NOTHING,
        Mode::Counters => Recording::NO_TIMES,
        Mode::Sampled { one_in } => Recording(one_in.clamp(1, u32::MAX - 1)),
        Mode::Full => Recording(1),
    };
    SWITCH.store(recording.0, Relaxed);
}

/// The current mode.
#[must_use]
pub fn mode() -> Mode {
    match Recording::now() {
        Recording::NOTHING => Mode::Off,
        Recording::NO_TIMES => Mode::Counters,
        Recording(1) => Mode::Full,
        Recording(one_in) => Mode::Sampled { one_in },
    }
}
