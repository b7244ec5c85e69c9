//! Count, mean, spread and extremes of latencies, as in fio's `clat` line, without storing the samples.

/// Moments of a number of samples, in the caller's unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Moments {
    count: u64,
    mean: f64,
    /// Sum of squared distances from the mean (Welford 1962).
    squares: f64,
    min: f64,
    max: f64,
}

impl Default for Moments {
    fn default() -> Self {
        Self { count: 0, mean: 0.0, squares: 0.0, min: f64::INFINITY, max: f64::NEG_INFINITY }
    }
}

#[allow(clippy::cast_precision_loss)] // counts of one sample
impl Moments {
    #[inline]
    pub fn note(&mut self, sample: f64) {
        self.count += 1;
        let distance = sample - self.mean;
        self.mean += distance / self.count as f64;
        self.squares += distance * (sample - self.mean);
        self.min = self.min.min(sample);
        self.max = self.max.max(sample);
    }

    /// Combines the moments of two sets of samples (Chan, Golub, LeVeque 1979).
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        if self.count == 0 || other.count == 0 {
            return if self.count == 0 { other } else { self };
        }
        let count = self.count + other.count;
        let (ours, theirs, all) = (self.count as f64, other.count as f64, count as f64);
        let distance = other.mean - self.mean;
        Self {
            count,
            mean: self.mean + distance * theirs / all,
            squares: self.squares + other.squares + distance * distance * ours * theirs / all,
            min: self.min.min(other.min),
            max: self.max.max(other.max),
        }
    }

    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then_some(self.mean)
    }

    /// The deviation of the samples, not of the distribution that they come from.
    pub fn deviation(&self) -> Option<f64> {
        (self.count > 0).then(|| (self.squares / self.count as f64).sqrt())
    }

    pub fn min(&self) -> Option<f64> {
        (self.count > 0).then_some(self.min)
    }

    pub fn max(&self) -> Option<f64> {
        (self.count > 0).then_some(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(samples: &[f64]) -> Moments {
        samples.iter().fold(Moments::default(), |mut moments, &sample| {
            moments.note(sample);
            moments
        })
    }

    #[test]
    fn samples_have_their_mean_deviation_and_extremes() {
        let moments = of(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        assert_eq!((moments.mean(), moments.deviation()), (Some(5.0), Some(2.0)));
        assert_eq!((moments.min(), moments.max()), (Some(2.0), Some(9.0)));
    }

    #[test]
    fn two_parts_together_are_as_one() {
        let (left, right) = (of(&[2.0, 4.0, 4.0]), of(&[4.0, 5.0, 5.0, 7.0, 9.0]));
        let both = left.and(right);
        assert!(
            (both.mean().unwrap() - 5.0).abs() < 1e-12 && (both.deviation().unwrap() - 2.0).abs() < 1e-12
        );
        assert_eq!(Moments::default().and(left), left);
    }

    #[test]
    fn nothing_has_no_figures() {
        assert_eq!((Moments::default().mean(), Moments::default().max()), (None, None));
    }
}
