//! `rate=` and `rate_iops=`: when the next request of a direction may start.
//!
//! - Each direction gets the full rate, as in fio; each clone is paced separately.
//! - Request n may start n intervals after the beginning: the thread catches up after delays, so that the mean is the
//!   requested rate.

use std::time::{Duration, Instant};

use super::offsets::Direction;
use crate::job::Rate;

/// The pace of one thread. Without a rate, the thread never waits.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// Time between two requests of a direction; zero if unlimited.
    interval_ns: u64,
    begin: Option<Instant>,
    started: [u64; 2],
}

impl Pace {
    pub fn new(rate: Rate, block_bytes: u32) -> Self {
        let of_bytes = u64::from(block_bytes).saturating_mul(1_000_000_000).checked_div(rate.bytes);
        let of_iops = 1_000_000_000_u64.checked_div(rate.iops);
        Self { interval_ns: of_bytes.max(of_iops).unwrap_or(0), ..Self::default() }
    }

    pub fn begin(&mut self, at: Instant) {
        self.begin = Some(at);
    }

    /// Allows one request to start now, or returns the time at which it may.
    #[inline]
    pub fn take(&mut self, direction: Direction, now: Instant) -> Result<(), Instant> {
        if self.interval_ns == 0 {
            return Ok(());
        }
        let started = &mut self.started[direction.index()];
        let due =
            *self.begin.get_or_insert(now) + Duration::from_nanos(started.saturating_mul(self.interval_ns));
        if due > now {
            return Err(due);
        }
        *started += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_n_may_start_n_intervals_after_the_beginning() {
        let begin = Instant::now();
        let mut pace = Pace::new(Rate { bytes: 8192, iops: 0 }, 4096);
        pace.begin(begin);
        assert_eq!(pace.take(Direction::Read, begin), Ok(()));
        let due = begin + Duration::from_millis(500);
        assert_eq!(pace.take(Direction::Read, begin), Err(due));
        assert_eq!(pace.take(Direction::Write, begin), Ok(()));
        assert_eq!(pace.take(Direction::Read, due), Ok(()));
    }

    #[test]
    fn stricter_of_two_rates_counts() {
        let begin = Instant::now();
        let mut pace = Pace::new(Rate { bytes: 1 << 30, iops: 10 }, 4096);
        pace.begin(begin);
        assert_eq!(pace.take(Direction::Write, begin), Ok(()));
        assert_eq!(pace.take(Direction::Write, begin), Err(begin + Duration::from_millis(100)));
    }

    #[test]
    fn without_a_rate_everything_may_start() {
        let mut pace = Pace::new(Rate::default(), 4096);
        let now = Instant::now();
        assert!((0..1000).all(|_| pace.take(Direction::Read, now) == Ok(())));
    }
}
