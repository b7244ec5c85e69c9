//! How long a worker polls before it sleeps: long enough to catch the next request, not longer.
//!
//! A sleep and its wake-up cost both sides microseconds. After work, the worker polls for a window that
//! adapts to the gaps between one piece of work and the next: a gap that was shorter than the limit could have
//! been polled through, so the window is widened to bridge the next; a longer one could not, and the polling was for nothing, so it
//! shrinks, down to none. An idle worker therefore does not poll at all, and neither does one whose requests
//! come more slowly than polling can bridge.
//!
//! - Never gives up the processor voluntarily while polling: with `sched_yield` a client that sleeps
//!   falls to a tenth of its speed as soon as other threads compete.
//!
//! Not here: what is polled (`worker.rs`).

use std::time::{Duration, Instant};

/// The longest window unless the user says otherwise: about twice a wake-up between two threads.
pub const DEFAULT_POLL: Duration = Duration::from_micros(50);
/// A window is this many times the short gap that it was widened for: enough to be halved by a long gap (the
/// I/O of a guest that sends one request at a time) and still bridge the next short one.
const ROOM: u32 = 4;
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

    /// There was work: learns from the gap before it, whether it was polled through or slept through.
    pub(crate) fn progressed(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(self.last_progress);
        self.last_progress = now;
        self.window = if gap < self.limit {
            self.window.max(gap * ROOM).max(SMALLEST_WINDOW).min(self.limit)
        } else {
            let half = self.window / 2;
            if half < SMALLEST_WINDOW { Duration::ZERO } else { half }
        };
    }

    /// Whether to look again instead of going to sleep.
    pub(crate) fn keeps_polling(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_progress) < self.window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Work, then nothing for `gap`, ten times.
    fn live(poller: &mut Poller, gap: Duration) {
        for _ in 0..10 {
            poller.progressed(poller.last_progress + gap);
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

    /// A request, its I/O, the next request: as a guest does that sends one at a time.
    #[test]
    fn short_gaps_between_long_ones_are_still_polled_through() {
        let mut poller = Poller::new(DEFAULT_POLL);
        for _ in 0..10 {
            poller.progressed(poller.last_progress + Duration::from_micros(80));
            assert!(poller.window > Duration::from_micros(15));
            poller.progressed(poller.last_progress + Duration::from_micros(15));
        }
    }

    #[test]
    fn limit_of_zero_never_polls() {
        let mut poller = Poller::new(Duration::ZERO);
        live(&mut poller, Duration::ZERO);
        assert!(!poller.keeps_polling(poller.last_progress));
    }
}
