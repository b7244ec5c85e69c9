//! Medians and their confidence intervals, without assuming a distribution.
//!
//! The median's interval is a pair of order statistics. Of n samples, the i-th smallest and the i-th largest enclose
//! the true median unless fewer than i samples fell on one side, and that number is binomial with p = 1/2. The interval
//! is the narrowest pair that covers at least 95%. Fewer than six samples have no such pair; their interval is the
//! smallest and the largest sample, with the coverage of that pair.

use serde::{Deserialize, Serialize};

/// The target coverage of intervals.
pub const COVERAGE: f64 = 0.95;

/// A median and its confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The samples' median.
    pub median: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// Probability that the interval contains the true median.
    pub coverage: f64,
}

impl Summary {
    /// Summarises `samples`, which must be finite. `None` if `samples` is empty.
    #[must_use]
    pub fn of(samples: &[f64]) -> Option<Self> {
        let sorted = sorted(samples);
        let median = median_of_sorted(&sorted)?;
        let (cut, coverage) = cut(sorted.len());
        Some(Self { median, low: sorted[cut], high: sorted[sorted.len() - 1 - cut], coverage })
    }

    /// Half of the interval's width.
    #[must_use]
    pub fn half_width(&self) -> f64 {
        (self.high - self.low) / 2.0
    }

    /// Whether there were enough samples for an interval of 95 %.
    #[must_use]
    pub fn is_sure(&self) -> bool {
        self.coverage >= COVERAGE
    }
}

/// The middle value; `None` without samples.
#[must_use]
pub fn median(samples: &[f64]) -> Option<f64> {
    median_of_sorted(&sorted(samples))
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

fn median_of_sorted(sorted: &[f64]) -> Option<f64> {
    let upper = *sorted.get(sorted.len() / 2)?;
    Some(if sorted.len() % 2 == 1 { upper } else { f64::midpoint(sorted[sorted.len() / 2 - 1], upper) })
}

/// The number of samples to omit at each end, and the coverage of the remaining interval.
fn cut(count: usize) -> (usize, f64) {
    // P(fewer than i of n on one side) = sum of C(n, k) / 2^n for k < i, and as much on the other side. Computed in
    // logarithms, because 2^-n underflows for more than 1074 samples.
    #[allow(clippy::cast_precision_loss)] // counts of rounds
    let mut term_ln = -(count as f64) * std::f64::consts::LN_2;
    let mut tail = term_ln.exp();
    let (mut cut, mut coverage) = (0, 2.0_f64.mul_add(-tail, 1.0).max(0.0));
    for k in 1..count / 2 {
        #[allow(clippy::cast_precision_loss)]
        let factor = (count - k + 1) as f64 / k as f64;
        term_ln += factor.ln();
        tail += term_ln.exp();
        let covered = 2.0_f64.mul_add(-tail, 1.0);
        if covered < COVERAGE {
            break;
        }
        (cut, coverage) = (k, covered);
    }
    (cut, coverage)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_numbers(count: u32) -> Vec<f64> {
        (1..=count).map(f64::from).collect()
    }

    #[test]
    fn median_of_an_even_number_of_samples_is_between_the_middle_two() {
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn interval_of_thirty_samples_is_the_tenth_smallest_and_tenth_largest() {
        // Tables of the sign test: n = 30, 95 % → order statistics 10 and 21, which cover 95.72 %.
        let summary = Summary::of(&first_numbers(30)).unwrap();
        assert_eq!((summary.low, summary.median, summary.high), (10.0, 15.5, 21.0));
        assert!((summary.coverage - 0.957_226).abs() < 1e-5, "{summary:?}");
        assert!((summary.half_width() - 5.5).abs() < 1e-12);
    }

    #[test]
    fn interval_of_ten_samples_is_the_second_of_each_end() {
        // n = 10 → order statistics 2 and 9, which cover 97.85 %.
        let summary = Summary::of(&first_numbers(10)).unwrap();
        assert_eq!((summary.low, summary.high), (2.0, 9.0));
        assert!((summary.coverage - 0.978_516).abs() < 1e-5, "{summary:?}");
    }

    #[test]
    fn six_samples_are_the_fewest_that_are_sure() {
        // 1 - 2 / 2^6 = 96.875 %; 1 - 2 / 2^5 = 93.75 %.
        assert!(Summary::of(&first_numbers(6)).unwrap().is_sure());
        let five = Summary::of(&first_numbers(5)).unwrap();
        assert!(!five.is_sure());
        assert_eq!((five.low, five.high, five.coverage), (1.0, 5.0, 0.9375));
    }

    #[test]
    fn single_sample_covers_nothing() {
        let one = Summary::of(&[7.0]).unwrap();
        assert_eq!(one, Summary { median: 7.0, low: 7.0, high: 7.0, coverage: 0.0 });
    }

    #[test]
    fn thousands_of_samples_have_a_narrow_interval() {
        let summary = Summary::of(&first_numbers(4000)).unwrap();
        // About 0.98 · √n to either side.
        assert!(summary.is_sure() && (60.0..65.0).contains(&summary.half_width()), "{summary:?}");
    }
}
