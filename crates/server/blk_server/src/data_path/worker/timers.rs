//! Timers for a worker's tasks that no event triggers: one instant per kind of task.
//!
//! A pass compares the current time only with the earliest instant.

use std::time::{Duration, Instant};

/// The kinds of tasks, in the order in which a pass performs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timer {
    /// Calls drivers whose coalesced completions have waited long enough. Ends the worker's sleep.
    Call,
    /// Checks parked requests. Ends the worker's sleep.
    Retry,
    /// Activates queues whose gate opens. Ends the worker's sleep.
    Gate,
    /// Checks for stuck requests.
    StuckCheck,
    /// Wakes the balancer if the worker was busy.
    BusyCheck,
}

impl Timer {
    pub(crate) const ALL: [Self; 5] =
        [Self::Call, Self::Retry, Self::Gate, Self::StuckCheck, Self::BusyCheck];
}

/// One worker's timers.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    /// Indexed by kind.
    due: [Option<Instant>; Timer::ALL.len()],
    earliest: Option<Instant>,
}

impl Timers {
    /// Sets the timer, unless it is already set to an earlier instant or `due` is `None`.
    #[inline]
    pub(crate) fn set(&mut self, timer: Timer, due: Option<Instant>) {
        if let Some(due) = due {
            self.due[timer as usize] = earlier(self.due[timer as usize], due);
            self.earliest = earlier(self.earliest, due);
        }
    }

    /// Whether any timer is due.
    #[inline]
    pub(crate) fn is_any_due(&self, now: Instant) -> bool {
        self.earliest.is_some_and(|earliest| now >= earliest)
    }

    /// Whether this timer is due. If so, clears it.
    pub(crate) fn take_due(&mut self, timer: Timer, now: Instant) -> bool {
        let is_due = self.due[timer as usize].take_if(|due| now >= *due).is_some();
        if is_due {
            self.earliest = self.due.into_iter().flatten().min();
        }
        is_due
    }

    /// Time until the first timer that ends a sleep. `None`: no such timer is set.
    pub(crate) fn sleep_limit(&self) -> Option<Duration> {
        let wakes =
            [Timer::Call, Timer::Retry, Timer::Gate].into_iter().filter_map(|timer| self.due[timer as usize]);
        wakes.min().map(|due| due.saturating_duration_since(Instant::now()))
    }
}

#[inline]
fn earlier(known: Option<Instant>, new: Instant) -> Option<Instant> {
    Some(known.map_or(new, |known| known.min(new)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn timer_keeps_its_earliest_instant_and_is_due_from_then_on() {
        let (now, mut timers) = (Instant::now(), Timers::default());
        timers.set(Timer::Call, Some(now + 2 * SECOND));
        timers.set(Timer::Call, Some(now + SECOND));
        timers.set(Timer::Call, Some(now + 3 * SECOND));
        timers.set(Timer::Call, None);
        let before = now + Duration::from_millis(999);
        assert!(!timers.is_any_due(before) && !timers.take_due(Timer::Call, before));
        assert!(timers.is_any_due(now + SECOND) && timers.take_due(Timer::Call, now + SECOND));
    }

    #[test]
    fn timer_that_was_taken_leaves_the_others_as_they_were() {
        let (now, mut timers) = (Instant::now(), Timers::default());
        for (timer, seconds) in Timer::ALL.into_iter().zip(1..) {
            timers.set(timer, Some(now + seconds * SECOND));
        }
        for (timer, seconds) in Timer::ALL.into_iter().zip(1..) {
            let (due, before) = (now + seconds * SECOND, now + (seconds - 1) * SECOND);
            assert!(!timers.is_any_due(before), "{timer:?}");
            assert!(timers.is_any_due(due) && timers.take_due(timer, due), "{timer:?}");
            assert!(!timers.take_due(timer, due), "{timer:?}");
        }
        assert!(!timers.is_any_due(now + 3600 * SECOND));
    }

    #[test]
    fn only_calls_retries_and_gates_end_a_sleep() {
        let (now, mut timers) = (Instant::now(), Timers::default());
        timers.set(Timer::StuckCheck, Some(now));
        timers.set(Timer::BusyCheck, Some(now));
        assert_eq!(timers.sleep_limit(), None);
        timers.set(Timer::Retry, Some(now + 3600 * SECOND));
        assert!(timers.sleep_limit().is_some_and(|limit| !limit.is_zero() && limit <= 3600 * SECOND));
        timers.set(Timer::Gate, Some(now + 1800 * SECOND));
        assert!(timers.sleep_limit().is_some_and(|limit| limit <= 1800 * SECOND));
        timers.set(Timer::Call, Some(now));
        assert_eq!(timers.sleep_limit(), Some(Duration::ZERO));
    }
}
