//! Folds a server's log-linear buckets, eight for each power of two, into the few that Prometheus gets.

use super::answer::Times;

/// The upper bounds of all buckets except the last, as powers of two of nanoseconds: 66 µs to 4.3 s.
const POWERS: [u32; 9] = [16, 18, 20, 22, 24, 26, 28, 30, 32];
/// The number of buckets, including the last one, which has no upper bound.
pub const BUCKETS: usize = POWERS.len() + 1;

/// A histogram in the form that Prometheus expects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Histogram {
    pub sum_seconds: f64,
    pub count: u64,
    /// The upper bound of each bucket in seconds, and its number of requests.
    pub buckets: [(f64, u64); BUCKETS],
}

impl Histogram {
    pub fn new(times: &Times) -> Self {
        let ends = POWERS.map(|power| 1_u64 << power);
        let mut buckets = [(f64::INFINITY, 0); BUCKETS];
        for (bucket, end) in buckets.iter_mut().zip(ends) {
            bucket.0 = seconds(end);
        }
        let mut count = 0_u64;
        for (below_ns, requests) in &times.buckets {
            let place = ends.iter().position(|end| below_ns <= end).unwrap_or(POWERS.len());
            if let Some((_, sum)) = buckets.get_mut(place) {
                let room = u64::MAX - count;
                *sum += requests.min(&room);
                count += requests.min(&room);
            }
        }
        Self { sum_seconds: seconds(times.sum_ns), count, buckets }
    }
}

/// The conversion keeps counters exact to a microsecond for 285 years.
#[allow(clippy::cast_precision_loss)]
pub fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(buckets: &[(u64, u64)]) -> ([u64; BUCKETS], u64) {
        let histogram = Histogram::new(&Times { sum_ns: 0, buckets: buckets.to_vec() });
        (histogram.buckets.map(|(_, count)| count), histogram.count)
    }

    #[test]
    fn requests_below_an_end_are_in_its_bucket_and_others_in_the_next() {
        let (end, next) = (1 << 16, (1 << 16) + (1 << 13));
        assert_eq!(counts(&[(100, 1), (end, 2), (next, 4)]), ([3, 4, 0, 0, 0, 0, 0, 0, 0, 0], 7));
        assert_eq!(counts(&[(1 << 32, 1), (u64::MAX, 2)]), ([0, 0, 0, 0, 0, 0, 0, 0, 1, 2], 3));
    }

    #[test]
    fn ends_are_in_seconds_and_the_last_bucket_has_none() {
        let histogram = Histogram::new(&Times { sum_ns: 1_500_000_000, buckets: Vec::new() });
        let ends = histogram.buckets.map(|(end, _)| end);
        assert_eq!((ends[0], ends[8], ends[9]), (0.000_065_536, 4.294_967_296, f64::INFINITY));
        assert!((histogram.sum_seconds - 1.5).abs() < 1e-9);
    }

    #[test]
    fn numbers_that_no_server_counts_overflow_nothing() {
        let (buckets, count) = counts(&[(0, u64::MAX), (5, u64::MAX), (u64::MAX, 3)]);
        assert_eq!((buckets[0], buckets[9], count), (u64::MAX, 0, u64::MAX));
    }
}
