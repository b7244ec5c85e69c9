//! What locks did, by the line that took them: how often, how contended, how long waited for and held.
//!
//! ```text
//! Profiled::lock ─▶ this thread's row for the caller's line ◀─ Linux::note(event) of the slow path it is in
//!                                   │ all threads' rows, merged by line when somebody asks
//!                                   ▼
//!                        snapshot() ─▶ Profile ─▶ a table
//! ```
//!
//! - [`Profiled`] goes around any `lock_api` 0.5 lock. Acquisitions, contention and times it sees itself; what happens
//!   in slow paths, the queued locks tell it. Events outside of any `Profiled` (C interface, locks without it) are
//!   counted too, only without a line: [`totals`].
//! - A [switch](set_mode) for the whole process, [off](Mode::Off) at first. Off, an acquisition costs one load and a
//!   branch, and a release a branch. What the others cost: `docs/qspinlock-statistics.md`, `benches/stats.rs`.
//! - Each thread counts in memory of its own, which is static: nothing is allocated, no cache line is shared. A thread's
//!   first use claims its number. Numbers, with their counts, go to new threads once their owners have ended.
//! - Bounds: [`SITES`] places per thread, then one row for all others; 4096 threads alive at a time, then the rest count
//!   in one table together, and lose what two of them count in the same moment. That is 98 MiB of addresses; memory is
//!   used for the rows that are.
//! - A signal handler that counts while the code it interrupted does may make a count too low by one.
//! - A forked child begins with what its parent had counted; [`reset`] if that is not wanted.
//!
//! Not here: one figure for all of a thread's acquisitions (`metered.rs`).

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
    /// Counts, and the times of one acquisition in so many, line by line and thread by thread; 0 counts as 1.
    Sampled {
        /// At best a prime: loops that take a lock in a rhythm have other ones.
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

    /// Relaxed: nothing is published by the switch; threads notice it soon enough.
    #[inline]
    fn now() -> Self {
        Self(SWITCH.load(Relaxed))
    }

    #[inline]
    fn is_off(self) -> bool {
        self == Self::NOTHING
    }

    /// One in how many is timed.
    #[inline]
    fn stride(self) -> Option<u32> {
        (self != Self::NO_TIMES).then_some(self.0)
    }
}

/// Switches for all threads of the process. What was counted before stays.
pub fn set_mode(mode: Mode) {
    let recording = match mode {
        Mode::Off => Recording::NOTHING,
        Mode::Counters => Recording::NO_TIMES,
        Mode::Sampled { one_in } => Recording(one_in.clamp(1, u32::MAX - 1)),
        Mode::Full => Recording(1),
    };
    SWITCH.store(recording.0, Relaxed);
}

/// What is recorded at present.
#[must_use]
pub fn mode() -> Mode {
    match Recording::now() {
        Recording::NOTHING => Mode::Off,
        Recording::NO_TIMES => Mode::Counters,
        Recording(1) => Mode::Full,
        Recording(one_in) => Mode::Sampled { one_in },
    }
}
