//! Decides when ops are handed over. Immediate hand-over costs a wake-up per batch; a delay costs latency.
//!
//! | policy | ops wait until |
//! |---|---|
//! | `count:N` | N ops are staged, or a pass of their worker added none |
//! | `time:US` | the oldest op has waited for US microseconds |
//! | `adaptive` | nothing: they enter the ring at once. A completion worker that sleeps with I/O in flight is not woken unless many ops wait or the oldest is too old |
//!
//! Before a worker sleeps, it hands over all its ops, and wakes the completion worker if it had skipped that wake-up.

use std::str::FromStr;
use std::time::Duration;

/// The hand-over policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandOver {
    /// Number of staged ops that are handed over at once.
    pub batch: u32,
    /// Longest time that an op may be staged. `None`: hand over once a pass adds no op.
    pub max_delay: Option<Duration>,
    /// Hands ops over at once, but delays wake-ups.
    pub adaptive: bool,
}

/// Largest batch. No ring is longer.
const MAX_BATCH: u32 = 32768;
/// Longest delay, more than any disk takes for a request.
const MAX_DELAY_US: u64 = 100_000;

impl HandOver {
    /// Hands over every `batch` ops.
    #[must_use]
    pub const fn by_count(batch: u32) -> Self {
        Self { batch, max_delay: None, adaptive: false }
    }

    /// Hands over when the oldest op has waited for `max_delay`.
    #[must_use]
    pub const fn by_time(max_delay: Duration) -> Self {
        Self { batch: MAX_BATCH, max_delay: Some(max_delay), adaptive: false }
    }

    /// Hands over at once, with few wake-ups.
    #[must_use]
    pub const fn adaptive() -> Self {
        Self { batch: 32, max_delay: Some(Duration::from_micros(50)), adaptive: true }
    }

    /// Whether to hand `waiting` ops over now. `quiet`: no op was added since the last call.
    #[inline]
    pub(super) fn is_due(&self, waiting: usize, quiet: bool, age: impl FnOnce() -> Duration) -> bool {
        waiting >= self.batch as usize
            || match self.max_delay {
                None => quiet,
                Some(most) => age() >= most,
            }
    }
}

impl Default for HandOver {
    fn default() -> Self {
        Self::adaptive()
    }
}

/// The text is not a valid policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "hand-over '{value}' is unknown: use count:N (1 to {MAX_BATCH}), time:MICROSECONDS (0 to {MAX_DELAY_US}) or adaptive"
)]
pub struct ParseHandOverError {
    /** The invalid word. */
    pub value: String,
}

impl FromStr for HandOver {
    type Err = ParseHandOverError;

    fn from_str(value: &str) -> Result<Self, Self::Err> {
        let error = || ParseHandOverError { value: value.to_owned() };
        match value.split_once(':') {
            None if value == "adaptive" => Ok(Self::adaptive()),
            Some(("count", count)) => {
                let count = count.parse().ok().filter(|count| (1..=MAX_BATCH).contains(count));
                count.map(Self::by_count).ok_or_else(error)
            }
            Some(("time", us)) => {
                let us = us.parse().ok().filter(|us| *us <= MAX_DELAY_US);
                us.map(|us| Self::by_time(Duration::from_micros(us))).ok_or_else(error)
            }
            _ => Err(error()),
        }
    }
}

impl std::fmt::Display for HandOver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.adaptive, self.max_delay) {
            (true, _) => f.write_str("adaptive"),
            (false, None) => write!(f, "count:{}", self.batch),
            (false, Some(delay)) => write!(f, "time:{}", delay.as_micros()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_policy_is_written_as_it_is_read() {
        for text in ["count:1", "count:32768", "time:0", "time:250", "adaptive"] {
            assert_eq!(text.parse::<HandOver>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn policy_that_is_none_says_what_there_is() {
        for text in ["", "count", "count:0", "count:32769", "time:100001", "time:-1", "eager", "adaptive:1"] {
            let error = text.parse::<HandOver>().unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "hand-over '{text}' is unknown: use count:N (1 to 32768), time:MICROSECONDS (0 to 100000) or adaptive"
                )
            );
        }
    }

    #[test]
    fn by_count_waits_for_that_many_but_not_when_no_more_come() {
        let policy = HandOver::by_count(8);
        let long = || Duration::from_secs(9);
        assert!(!policy.is_due(7, false, long));
        assert!(policy.is_due(8, false, long));
        assert!(policy.is_due(1, true, long));
    }

    #[test]
    fn by_time_waits_for_that_long_also_when_no_more_come() {
        let policy = HandOver::by_time(Duration::from_micros(20));
        assert!(!policy.is_due(100, true, || Duration::from_micros(19)));
        assert!(policy.is_due(1, false, || Duration::from_micros(20)));
    }
}
