//! The switch that selects what the statistics record.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The measurements that are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Records nothing.
    #[default]
    Off,
    /// Records counts, but no times.
    Counters,
    /// Records counts, and the times of one acquisition in `one_in`, per line and thread; 0 counts as 1.
    Sampled {
        /// Preferably a prime, so that it does not match the period of a loop that takes the lock.
        one_in: u32,
    },
    /// Records counts, and the times of every acquisition.
    Full,
}

impl Mode {
    /// Records the times of one acquisition in 127. Timing an acquisition takes three readings of the clock, of 25 to
    /// 60 ns each.
    pub const SAMPLED: Self = Self::Sampled { one_in: 127 };
}

/// See [`Recording`].
static SWITCH: AtomicU32 = AtomicU32::new(Recording::NOTHING.0);

/// [`Mode`] in one word: 0 for off, `u32::MAX` for counts without times, any other n for the times of one in n.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Recording(u32);

impl Recording {
    const NOTHING: Self = Self(0);
    const NO_TIMES: Self = Self(u32::MAX);

    /// Relaxed: the switch publishes nothing, and threads notice a change soon enough.
    #[inline]
    pub(super) fn now() -> Self {
        Self(SWITCH.load(Relaxed))
    }

    #[inline]
    pub(super) fn is_off(self) -> bool {
        self == Self::NOTHING
    }

    /// One acquisition in this many is timed.
    #[inline]
    pub(super) fn stride(self) -> Option<u32> {
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
