//! How long a worker polls before it sleeps: long enough to catch the next request, if it comes soon.
//!
//! A sleep and its wake-up cost both sides microseconds. After work the worker therefore polls for a time window that
//! adapts to the gaps between events. After a gap that polling could have bridged, the window grows. After a longer gap
//! it shrinks, down to zero, so a worker that is idle or has rare requests does not poll.
//!
//! - With [`BUSY_POLL`] the worker always polls while it has queues. Such a worker needs a processor of its own.
//! - The worker never yields while it polls: with `sched_yield`, a client that sleeps would slow down to a tenth as
//!   soon as other threads compete.

use std::time::{Duration, Instant};

/// Default for the longest window: about twice the time that waking a thread takes.
pub const DEFAULT_POLL: Duration = Duration::from_micros(50);
/// As the longest window, this value means that a worker with queues never sleeps and that guests need not kick.
pub const BUSY_POLL: Duration = Duration::MAX;
/// The smallest window that is worth reading the clock.
const SMALLEST_WINDOW: Duration = Duration::from_micros(4);

/// One worker's polling window.
#[derive(Debug)]
pub(crate) struct Poller {
    limit: Duration,
    window: Duration,
    last_progress: Instant,
}

impl Poller {
    /// `limit`: the longest window. With zero, the worker never polls.
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, window: limit, last_progress: Instant::now() }
    }

    /// Whether the worker never sleeps while it has queues.
    pub(crate) fn is_busy(&self) -> bool {
        self.limit == BUSY_POLL
    }

    pub(crate) fn progressed(&mut self, now: Instant) {
        self.last_progress = now;
    }

    /// Whether to poll again instead of sleeping.
    pub(crate) fn keeps_polling(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_progress) < self.window
    }

    /// Adapts the window after a sleep that ended at `now`. The gap is the time spent polling and sleeping.
    pub(crate) fn woke(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(self.last_progress);
        self.window = if self.is_busy() {
            self.limit
        } else if gap < self.limit {
            (self.window * 2).max(SMALLEST_WINDOW).min(self.limit)
        } else {
            let half = self.window / 2;
            if half < SMALLEST_WINDOW { Duration::ZERO } else { half }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Repeats ten times: work, then nothing for `gap`.
    fn live(poller: &mut Poller, gap: Duration) {
        for _ in 0..10 {
            let now = poller.last_progress + gap;
            poller.woke(now);
            poller.progressed(now);
        }
    }

    #[test]
    fn long_gaps_shrink_the_window_to_nothing() {
        let mut poller = Poller::new(DEFAULT_POLL);
        live(&mut poller, Duration::from_secs(1));
        assert!(!poller.keeps_polling(poller.last_progress));
    }

    #[test]
    fn gaps_a_little_longer_than_the_limit_are_not_polled_for() {
        let mut poller = Poller::new(DEFAULT_POLL);
        live(&mut poller, DEFAULT_POLL + Duration::from_micros(5));
        assert_eq!(poller.window, Duration::ZERO);
    }

    #[test]
    fn short_gaps_grow_the_window_up_to_the_limit() {
        let mut poller = Poller::new(DEFAULT_POLL);
        live(&mut poller, Duration::from_secs(1));
        live(&mut poller, Duration::from_micros(30));
        assert_eq!(poller.window, DEFAULT_POLL);
    }

    #[test]
    fn busy_polling_goes_on_after_any_gap() {
        let mut poller = Poller::new(BUSY_POLL);
        live(&mut poller, Duration::from_secs(3600));
        assert!(poller.keeps_polling(poller.last_progress + Duration::from_secs(3600)));
    }

    #[test]
    fn limit_of_zero_never_polls() {
        let mut poller = Poller::new(Duration::ZERO);
        live(&mut poller, Duration::ZERO);
        assert!(!poller.keeps_polling(poller.last_progress));
    }
}
