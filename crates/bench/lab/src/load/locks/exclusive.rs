//! Two cache lines of data behind a lock with any interface: `lock_api` guards or closures.

use lock_api::{RawMutex, RawMutexTimed};
use mcslock::relax::Relax;
use std::time::Duration;

/// The data that the lock protects.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    pub first: Line,
    pub second: Line,
}

/// One cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Line(pub u64);

impl Lines {
    /// Makes `steps` steps of a linear congruential generator (Knuth's MMIX), half of them on each line. Each step
    /// depends on the previous one.
    #[inline]
    pub fn work(&mut self, steps: u32) {
        self.first.0 = generate(self.first.0, steps / 2);
        self.second.0 = generate(self.second.0 ^ self.first.0, steps - steps / 2);
    }
}

/// Makes the steps of [`Lines::work`] on one value, in about 1 ns per step.
#[inline]
pub(crate) fn generate(mut value: u64, steps: u32) -> u64 {
    // Hidden from the compiler, which would otherwise fold several steps into one.
    let factor = std::hint::black_box(6_364_136_223_846_793_005_u64);
    for _ in 0..steps {
        value = value.wrapping_mul(factor).wrapping_add(1_442_695_040_888_963_407);
    }
    value
}

/// Data that only one thread at a time may use.
pub(crate) trait Exclusive: Send + Sync {
    /// Creates unlocked data.
    fn new() -> Self;

    /// Waits for the lock, runs `work`, and unlocks.
    fn with<R>(&self, work: impl FnOnce(&mut Lines) -> R) -> R;
}

/// A lock that supports a limited wait.
pub(crate) trait Timed: Exclusive {
    /// Like [`Exclusive::with`]; returns `None` if the timeout passes first.
    fn with_within<R>(&self, timeout: Duration, work: impl FnOnce(&mut Lines) -> R) -> Option<R>;
}

impl<L: RawMutex + Send + Sync> Exclusive for lock_api::Mutex<L, Lines> {
    fn new() -> Self {
        Self::new(Lines::default())
    }

    #[inline]
    fn with<R>(&self, work: impl FnOnce(&mut Lines) -> R) -> R {
        work(&mut self.lock())
    }
}

impl<L> Timed for lock_api::Mutex<L, Lines>
where
    L: RawMutexTimed<Duration = Duration> + Send + Sync,
{
    #[inline]
    fn with_within<R>(&self, timeout: Duration, work: impl FnOnce(&mut Lines) -> R) -> Option<R> {
        self.try_lock_for(timeout).map(|mut lines| work(&mut lines))
    }
}

impl Exclusive for spin::mutex::TicketMutex<Lines> {
    fn new() -> Self {
        Self::new(Lines::default())
    }

    #[inline]
    fn with<R>(&self, work: impl FnOnce(&mut Lines) -> R) -> R {
        work(&mut self.lock())
    }
}

impl Exclusive for spin::mutex::SpinMutex<Lines> {
    fn new() -> Self {
        Self::new(Lines::default())
    }

    #[inline]
    fn with<R>(&self, work: impl FnOnce(&mut Lines) -> R) -> R {
        work(&mut self.lock())
    }
}

impl<W: Relax + Send + Sync> Exclusive for mcslock::raw::Mutex<Lines, W> {
    fn new() -> Self {
        Self::new(Lines::default())
    }

    #[inline]
    fn with<R>(&self, work: impl FnOnce(&mut Lines) -> R) -> R {
        self.lock_then(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_touches_both_lines_and_takes_all_of_its_steps() {
        let mut lines = Lines::default();
        lines.work(3);
        assert_eq!(lines.first.0, generate(0, 1));
        assert_eq!(lines.second.0, generate(lines.first.0, 2));
        assert_eq!(size_of::<Lines>(), 128);
    }
}
