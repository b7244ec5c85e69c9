//! What a client got, millisecond by millisecond, and how far it is from a rate in any window of time.

use std::time::Instant;

/// Distance between the starts of two windows that are compared, in milliseconds.
const STEP_MS: usize = 10;

/// Counts per millisecond since one moment. All queues of a sample use the same moment.
#[derive(Clone, Debug)]
pub(crate) struct Course {
    began: Instant,
    counts: Vec<u64>,
}

impl Course {
    /// A course of `milliseconds` from `began` on, without counts.
    pub fn new(began: Instant, milliseconds: usize) -> Self {
        Self { began, counts: vec![0; milliseconds] }
    }

    /// Adds `count` at `now`. Counts after the course's end are dropped.
    pub fn add(&mut self, now: Instant, count: u64) {
        let elapsed = now.saturating_duration_since(self.began).as_millis();
        let slot = usize::try_from(elapsed).ok().and_then(|at| self.counts.get_mut(at));
        if let Some(slot) = slot {
            *slot += count;
        }
    }

    /// Adds another course that began at the same moment.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
    }

    pub fn sum(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The counts from `from` on, for `length_ms` milliseconds.
    pub fn from(&self, from: Instant, length_ms: usize) -> u64 {
        let elapsed = from.saturating_duration_since(self.began).as_millis();
        let skipped = usize::try_from(elapsed).unwrap_or(usize::MAX);
        self.counts.iter().skip(skipped).take(length_ms).sum()
    }

    /// The largest deviation of a window of `window_ms` from `per_second`, in %; `None` if the course is shorter than a
    /// window. Windows overlap: one starts every 10 ms.
    #[allow(clippy::cast_precision_loss)] // counts and times of one sample
    pub fn worst_percent(&self, window_ms: usize, per_second: f64) -> Option<f64> {
        let expected = per_second * window_ms as f64 / 1000.0;
        let windows = self.counts.windows(window_ms).step_by(STEP_MS);
        let deviation = |counts: &[u64]| 100.0 * (counts.iter().sum::<u64>() as f64 / expected - 1.0).abs();
        windows.map(deviation).max_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn worst_window_is_found_wherever_it_starts() {
        let began = Instant::now();
        let mut course = Course::new(began, 300);
        (0..300).for_each(|ms| course.add(began + Duration::from_millis(ms), 10));
        assert_eq!(course.worst_percent(100, 10_000.0), Some(0.0));
        // The window that starts after 150 ms has 50 of 1,000 more.
        course.add(began + Duration::from_millis(150), 25);
        course.add(began + Duration::from_millis(249), 25);
        let worst = course.worst_percent(100, 10_000.0).unwrap();
        assert!((worst - 5.0).abs() < 1e-9, "{worst}");
        assert_eq!(course.worst_percent(301, 10_000.0), None);
    }

    #[test]
    fn counts_outside_of_the_course_are_dropped() {
        let began = Instant::now();
        let mut course = Course::new(began, 10);
        course.add(began + Duration::from_millis(10), 1);
        course.add(began + Duration::from_millis(9), 2);
        let mut all = Course::new(began, 10);
        all.merge(&course);
        all.merge(&course);
        assert_eq!((course.sum(), all.sum()), (2, 4));
        assert_eq!(all.from(began + Duration::from_millis(9), 5), 4);
        assert_eq!((all.from(began, 9), all.from(began + Duration::from_secs(1), 5)), (0, 0));
    }
}
