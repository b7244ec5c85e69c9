//! How long a worker polls before it sleeps: long enough to catch the next request, not longer.
//!
//! A sleep and its wake-up cost both sides microseconds. After work, the worker polls for a window that
//! adapts to the gaps between one piece of work and the next: a gap that was shorter than the limit could have
//! been polled through, so the window grows; a longer one could not, and the polling was for nothing, so it
//! shrinks, down to none. An idle worker therefore does not poll at all, and neither does one whose requests
//! come more slowly than polling can bridge.
//!
//! - With [`BUSY_POLL`] it polls for ever once a queue runs: for who gives it a processor of its own.
//! - Never gives up the processor voluntarily while polling: with `sched_yield` a client that sleeps
//!   falls to a tenth of its speed as soon as other threads compete.
//!
//! Not here: what is polled (`worker/mod.rs`).

use std::time::{Duration, Instant};

/// The longest window unless the user says otherwise: about twice a wake-up between two threads.
pub const DEFAULT_POLL: Duration = Duration::from_micros(50);
/// As the longest window: a worker with a queue never sleeps, and its guests need not kick.
pub const BUSY_POLL: Duration = Duration::MAX;
/// Windows below this are not worth a look at the clock.
const SMALLEST_WINDOW: Duration = Duration::from_micros(4);

/// One worker's polling window.
#[derive(Debug)]
pub(crate) struct Poller {
    limit: Duration,
    window: Duration,
    last_progress: Instant,
}

impl Poller {
    /// `limit`: the longest window; zero never polls.
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, window: limit, last_progress: Instant::now() }
    }

    /// Whether a worker that has a queue never sleeps.
    pub(crate) fn is_busy(&self) -> bool {
        self.limit == BUSY_POLL
    }

    pub(crate) fn progressed(&mut self, now: Instant) {
        self.last_progress = now;
    }

    /// Whether to look again instead of going to sleep.
    pub(crate) fn keeps_polling(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_progress) < self.window
    }

    /// Learns from a sleep that an event ended `now`: the whole gap counts, polling and sleep.
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

    /// Work, then nothing for `gap`, ten times.
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
