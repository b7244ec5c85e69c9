//! A limit on log lines that a guest or a front-end can cause: a few, then a count of the rest.
//!
//! Not here: lines that only the operator can cause; those are never held back.

use std::time::{Duration, Instant};

/// Lines per [`PERIOD`] and queue.
const LINES: u32 = 5;
const PERIOD: Duration = Duration::from_secs(10);

/// The line may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// How many like it were left out since the last one, if any.
    pub suppressed: Option<u64>,
}

/// One queue's allowance.
#[derive(Debug)]
pub struct LogLimit {
    period_start: Instant,
    lines: u32,
    suppressed: u64,
}

impl LogLimit {
    /// Nothing written yet.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { period_start: now, lines: 0, suppressed: 0 }
    }

    /// `None`: leave the line out.
    pub fn allow(&mut self, now: Instant) -> Option<Allowed> {
        if now.saturating_duration_since(self.period_start) >= PERIOD {
            self.period_start = now;
            self.lines = 0;
        }
        if self.lines == LINES {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        let suppressed = std::mem::take(&mut self.suppressed);
        Some(Allowed { suppressed: (suppressed > 0).then_some(suppressed) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_counted_and_reported_with_the_next() {
        let start = Instant::now();
        let mut limit = LogLimit::new(start);
        let allowed = (0..100).filter(|_| limit.allow(start).is_some()).count();
        let later = limit.allow(start + PERIOD);
        assert_eq!((allowed, later), (5, Some(Allowed { suppressed: Some(95) })));
    }
}
