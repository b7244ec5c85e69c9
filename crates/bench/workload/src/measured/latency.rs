//! Request times: exact sums for mean and deviation, a histogram for percentiles.

use hdrhistogram::Histogram;

/// The histogram's upper bound: five minutes, far beyond the deadline of a request.
const MAX_NS: u64 = 300_000_000_000;
/// Three significant digits: finer than fio's percentiles, which are within 1.6 %.
const DIGITS: u8 = 3;

/// Count, extremes, mean and deviation of times in ns. The values are exact, because they are computed from integer
/// sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// Number of times.
    pub count: u64,
    /// The shortest time; 0 without times.
    pub min_ns: u64,
    /// The longest time.
    pub max_ns: u64,
    sum: u64,
    squares: u128,
}

impl Latency {
    /// Adds one time.
    #[inline]
    pub fn add(&mut self, ns: u64) {
        self.min_ns = if self.count == 0 { ns } else { self.min_ns.min(ns) };
        self.max_ns = self.max_ns.max(ns);
        self.count += 1;
        self.sum = self.sum.saturating_add(ns);
        self.squares += u128::from(ns) * u128::from(ns);
    }

    /// Adds another's times.
    pub fn merge(&mut self, other: &Self) {
        self.min_ns = match (self.count, other.count) {
            (_, 0) => self.min_ns,
            (0, _) => other.min_ns,
            _ => self.min_ns.min(other.min_ns),
        };
        self.max_ns = self.max_ns.max(other.max_ns);
        self.count += other.count;
        self.sum = self.sum.saturating_add(other.sum);
        self.squares += other.squares;
    }

    /// The mean; 0 without times.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // shown to people
    pub fn mean_ns(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// The sample standard deviation; 0 for fewer than two times.
    #[must_use]
    #[allow(clippy::cast_precision_loss)]
    pub fn stddev_ns(&self) -> f64 {
        if self.count < 2 {
            return 0.0;
        }
        let (n, sum) = (u128::from(self.count), u128::from(self.sum));
        // `n * squares` can exceed 128 bits only if the sum exceeds 64 bits.
        let spread = n.saturating_mul(self.squares).saturating_sub(sum.saturating_mul(sum));
        (spread as f64 / self.count as f64 / (self.count - 1) as f64).sqrt()
    }
}

/// A [`Latency`] and the distribution of its times.
#[derive(Clone, Debug)]
pub struct Spread {
    /// The exact sums.
    pub latency: Latency,
    /// Always `Some`, because the bounds are valid. Counters of 32 bits need half the cache, and suffice for weeks.
    histogram: Option<Histogram<u32>>,
}

impl Default for Spread {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, MAX_NS, DIGITS).ok();
        Self { latency: Latency::default(), histogram }
    }
}

impl Spread {
    /// Adds one time.
    #[inline]
    pub fn add(&mut self, ns: u64) {
        self.latency.add(ns);
        if let Some(histogram) = &mut self.histogram {
            histogram.saturating_record(ns);
        }
    }

    /// Adds another's times.
    pub fn merge(&mut self, other: &Self) {
        self.latency.merge(&other.latency);
        if let (Some(ours), Some(theirs)) = (&mut self.histogram, &other.histogram) {
            // Both have the same bounds, so no value is rejected.
            let _ = ours.add(theirs);
        }
    }

    /// The time within which `percent` of the requests completed; never more than the longest time.
    #[must_use]
    pub fn percentile_ns(&self, percent: f64) -> u64 {
        let value =
            self.histogram.as_ref().map_or(0, |histogram| histogram.value_at_quantile(percent / 100.0));
        value.min(self.latency.max_ns)
    }

    /// Number of requests that took at least `from_ns` and less than `to_ns`.
    #[must_use]
    pub fn between(&self, from_ns: u64, to_ns: u64) -> u64 {
        self.histogram
            .as_ref()
            .map_or(0, |histogram| histogram.count_between(from_ns, to_ns.saturating_sub(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(times: &[u64]) -> Latency {
        let mut latency = Latency::default();
        times.iter().for_each(|&ns| latency.add(ns));
        latency
    }

    #[test]
    fn mean_and_deviation_are_those_of_the_samples() {
        let latency = of(&[2, 4, 4, 4, 5, 5, 7, 9]);
        assert_eq!((latency.count, latency.min_ns, latency.max_ns), (8, 2, 9));
        assert!((latency.mean_ns() - 5.0).abs() < 1e-12);
        assert!((latency.stddev_ns() - (32.0_f64 / 7.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn parts_together_are_the_whole() {
        let mut first = of(&[3, 900]);
        first.merge(&of(&[]));
        first.merge(&of(&[1, 50, 7]));
        assert_eq!(first, of(&[3, 900, 1, 50, 7]));
        let mut none = Latency::default();
        none.merge(&first);
        assert_eq!(none, first);
    }

    #[test]
    fn nothing_measured_is_zero() {
        let latency = Latency::default();
        assert_eq!((latency.mean_ns(), latency.stddev_ns(), latency.min_ns), (0.0, 0.0, 0));
        assert_eq!(Spread::default().percentile_ns(99.0), 0);
    }

    #[test]
    fn percentiles_are_within_a_thousandth() {
        let mut spread = Spread::default();
        (1..=100_000).for_each(|us| spread.add(us * 1000));
        let median = spread.percentile_ns(50.0);
        assert!((49_950_000..=50_050_000).contains(&median), "{median}");
        assert_eq!(spread.percentile_ns(100.0), 100_000_000);
    }

    #[test]
    fn time_beyond_the_longest_is_counted_as_the_longest() {
        let mut spread = Spread::default();
        spread.add(u64::MAX);
        assert_eq!((spread.latency.max_ns, spread.between(1000, u64::MAX)), (u64::MAX, 1));
    }
}
