//! Interrupt coalescing: one interrupt for several completions, or after a time limit.
//!
//! `completions published → PendingInterrupt (count, since when) → due → call fd`
//!
//! - Off by default: coalescing saves the guest's processor time but adds latency.
//! - An interrupt never waits while the queue has nothing in flight, because no completion would then trigger it.

use std::str::FromStr;
use std::time::{Duration, Instant};

/// Upper limit of the count: no queue has more descriptors.
const MAX_COUNT: u32 = 1024;
/// Upper limit of the time, longer than any useful delay.
const MAX_TIME: Duration = Duration::from_millis(10);

/// Number of completions that trigger an interrupt, and the longest wait of the first of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coalescing {
    count: u32,
    time: Duration,
}

impl Coalescing {
    /// # Errors
    /// [`InvalidCoalescing`].
    pub fn new(count: u32, time: Duration) -> Result<Self, InvalidCoalescing> {
        let possible = (2..=MAX_COUNT).contains(&count) && !time.is_zero() && time <= MAX_TIME;
        possible.then_some(Self { count, time }).ok_or(InvalidCoalescing)
    }
}

impl std::fmt::Display for Coalescing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{},{}", self.count, self.time.as_micros())
    }
}

/// `16,50`: 16 completions, 50 microseconds.
impl FromStr for Coalescing {
    type Err = InvalidCoalescing;

    fn from_str(text: &str) -> Result<Self, InvalidCoalescing> {
        let (count, time_us) = text.split_once(',').ok_or(InvalidCoalescing)?;
        let count = count.trim().parse().map_err(|_| InvalidCoalescing)?;
        let time_us = time_us.trim().parse().map_err(|_| InvalidCoalescing)?;
        Self::new(count, Duration::from_micros(time_us))
    }
}

/// The text is not a count and a time within their limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "give COUNT,MICROSECONDS, such as 16,50: COUNT from 2 to {MAX_COUNT}, MICROSECONDS from 1 to {}",
    MAX_TIME.as_micros()
)]
pub struct InvalidCoalescing;

/// Completions that have not been signalled to the driver yet.
#[derive(Debug, Default)]
pub(crate) struct PendingInterrupt {
    coalescing: Option<Coalescing>,
    count: u32,
    since: Option<Instant>,
}

impl PendingInterrupt {
    pub(crate) fn new(coalescing: Option<Coalescing>) -> Self {
        Self { coalescing, count: 0, since: None }
    }

    /// Adds `completed` published requests; `in_flight` requests remain. Returns whether to call the driver now.
    #[inline]
    pub(crate) fn add(&mut self, completed: u32, in_flight: usize, now: Instant) -> bool {
        let Some(Coalescing { count, time }) = self.coalescing else { return true };
        // A request that was answered without the engine is published, but not in `completed`.
        self.count += completed.max(1);
        let since = *self.since.get_or_insert(now);
        in_flight == 0 || self.count >= count || now.saturating_duration_since(since) >= time
    }

    /// Resets the state after the driver was called.
    pub(crate) fn clear(&mut self) {
        (self.count, self.since) = (0, None);
    }

    /// The time by which the driver must be called. `None`: no interrupt is pending.
    #[inline]
    pub(crate) fn due(&self) -> Option<Instant> {
        let time = self.coalescing?.time;
        self.since?.checked_add(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_micros(50);

    fn pending() -> (PendingInterrupt, Instant) {
        (PendingInterrupt::new(Some(Coalescing::new(8, TIME).unwrap())), Instant::now())
    }

    #[test]
    fn driver_is_called_for_so_many_completions() {
        let (mut pending, now) = pending();
        assert!(!pending.add(3, 10, now) && !pending.add(4, 10, now));
        assert!(pending.add(1, 10, now));
    }

    #[test]
    fn driver_is_called_when_the_first_completion_has_waited_long_enough() {
        let (mut pending, now) = pending();
        assert!(!pending.add(1, 10, now));
        assert_eq!(pending.due(), Some(now + TIME));
        assert!(pending.add(1, 10, now + TIME));
        pending.clear();
        assert_eq!(pending.due(), None);
    }

    #[test]
    fn last_request_in_flight_is_not_kept_waiting() {
        let (mut pending, now) = pending();
        assert!(pending.add(1, 0, now));
    }

    #[test]
    fn queue_without_coalescing_calls_always_and_has_no_pending_interrupt() {
        let mut pending = PendingInterrupt::new(None);
        assert!(pending.add(1, 10, Instant::now()));
        assert_eq!(pending.due(), None);
    }

    #[test]
    fn text_is_a_count_and_microseconds_in_their_limits() {
        assert_eq!("16,50".parse(), Coalescing::new(16, TIME));
        assert_eq!(Coalescing::new(16, TIME).unwrap().to_string(), "16,50");
        for wrong in ["16", "1,50", "16,0", "1025,50", "16,10001", "16,5e1", ",", "-2,5", "99999999999,5"] {
            assert_eq!(wrong.parse::<Coalescing>(), Err(InvalidCoalescing), "{wrong}");
        }
    }
}
