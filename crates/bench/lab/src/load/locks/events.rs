//! Slow-path events of the queued locks, summed over all threads.

use qspinlock::stats::{Mode, set_mode, totals};

/// Counts since the process started, or between two readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LockEvents {
    /// Number of sleeps begun.
    pub halts: u64,
    /// Number of wakes of other threads.
    pub kicks: u64,
    /// Number of wakes without a reason.
    pub spurious: u64,
}

impl LockEvents {
    /// The counts so far.
    pub fn now() -> Self {
        let totals = totals();
        Self { halts: totals.halted, kicks: totals.kicked, spurious: totals.woken_for_nothing }
    }

    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            halts: self.halts.saturating_sub(earlier.halts),
            kicks: self.kicks.saturating_sub(earlier.kicks),
            spurious: self.spurious.saturating_sub(earlier.spurious),
        }
    }
}

/// Counts events while this value exists. Counting slows down only the slow paths.
#[derive(Debug)]
pub(crate) struct Counting(());

impl Counting {
    pub fn start() -> Self {
        set_mode(Mode::Counters);
        Self(())
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        set_mode(Mode::Off);
    }
}
