//! Limits the log lines that a guest or a front-end can cause: after a few lines, further ones are omitted and counted.
//! A line that would repeat an earlier one appears once an hour.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

/// Maximum number of lines per [`PERIOD`].
const LINES: u32 = 5;
const PERIOD: Duration = Duration::from_secs(10);
/// How long an identical line is omitted.
const SAME_WORDS: Duration = Duration::from_secs(3600);
/// Maximum number of remembered lines.
const REMEMBERED: usize = 16;

/// Permission to write the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// Number of lines omitted since the last one that was written.
    pub suppressed: Option<u64>,
}

/// The limit of one disk's lines.
#[derive(Debug)]
pub struct LogLimit {
    period_start: Instant,
    lines: u32,
    suppressed: u64,
    /// Oldest first.
    written: VecDeque<Written>,
}

/// A line that was written.
#[derive(Debug)]
struct Written {
    words_hash: u64,
    at: Instant,
    /// How often the line has been omitted since `at`.
    suppressed: u64,
}

impl LogLimit {
    /// Creates a limit that has counted no lines yet.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { period_start: now, lines: 0, suppressed: 0, written: VecDeque::new() }
    }

    /// Returns `None` if the line must be omitted.
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

    /// Like `allow`, but allows identical lines only once an hour. The next one reports how many were omitted.
    pub fn allow_once(&mut self, words: &str, now: Instant) -> Option<Allowed> {
        let mut hasher = DefaultHasher::new();
        words.hash(&mut hasher);
        let words_hash = hasher.finish();
        let known = self.written.iter().position(|line| line.words_hash == words_hash);
        if let Some(line) = known.and_then(|at| self.written.get_mut(at))
            && now.saturating_duration_since(line.at) < SAME_WORDS
        {
            line.suppressed += 1;
            return None;
        }
        let others = self.allow(now)?.suppressed.unwrap_or(0);
        let same = known.and_then(|at| self.written.remove(at)).map_or(0, |line| line.suppressed);
        if self.written.len() == REMEMBERED {
            self.written.pop_front();
        }
        self.written.push_back(Written { words_hash, at: now, suppressed: 0 });
        let suppressed = others + same;
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

    #[test]
    fn same_words_are_written_once_an_hour_and_their_repeats_counted() {
        let start = Instant::now();
        let mut limit = LogLimit::new(start);
        // The line is due three times a second for an hour.
        let times = (0..3 * 3600).map(|third| start + third * Duration::from_millis(333));
        let allowed = times.filter(|&now| limit.allow_once("no VERSION_1", now).is_some()).count();
        let again = limit.allow_once("no VERSION_1", start + SAME_WORDS);
        assert_eq!((allowed, again), (1, Some(Allowed { suppressed: Some(3 * 3600 - 1) })));
        assert!(limit.allow_once("something else", start + SAME_WORDS).is_some());
    }

    #[test]
    fn other_words_each_time_are_limited_like_all_lines_and_remembered_in_bounded_memory() {
        let start = Instant::now();
        let mut limit = LogLimit::new(start);
        let allowed = (0..1000).filter(|number: &u32| limit.allow_once(&number.to_string(), start).is_some());
        assert_eq!(allowed.count(), 5);
        for number in 0..100 {
            limit.allow_once(&number.to_string(), start + number * PERIOD);
        }
        assert!(limit.written.len() <= REMEMBERED);
    }
}
