//! Chooses at random which busy passes of a worker are measured for the counters: one in [`MEAN_GAP`] on average.
//!
//! With a fixed gap, if the passes of a load alternate between taking a request and completing it, only passes of one
//! kind would be measured.

use fastrand::Rng;

use crate::data_path::worker::worker_options::WorkerId;

/// The mean number of busy passes from one measured pass to the next; also the weight of a measured time.
pub(crate) const MEAN_GAP: u32 = 16;

/// Decides which busy passes are measured.
#[derive(Debug)]
pub(crate) struct TimedPasses {
    /// The number of the next measured pass; the first busy pass has number 0.
    next: u64,
    random: Rng,
}

impl TimedPasses {
    pub(crate) fn new(worker: WorkerId) -> Self {
        let mut random = Rng::with_seed(u64::from(worker.0));
        Self { next: gap(&mut random) - 1, random }
    }

    /// Whether to measure the next busy pass, after `busy_passes` others.
    #[inline]
    pub(crate) fn is_due(&self, busy_passes: u64) -> bool {
        busy_passes >= self.next
    }

    /// Chooses the next pass to measure. `busy_passes` includes the pass that was just measured.
    pub(crate) fn timed(&mut self, busy_passes: u64) {
        self.next = busy_passes - 1 + gap(&mut self.random);
    }
}

fn gap(random: &mut Rng) -> u64 {
    random.u64(1..u64::from(2 * MEAN_GAP))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of the measured passes among the first `count`.
    fn measured(worker: u32, count: u64) -> Vec<u64> {
        let mut passes = TimedPasses::new(WorkerId(worker));
        let mut measured = Vec::new();
        for number in 0..count {
            if passes.is_due(number) {
                measured.push(number);
                passes.timed(number + 1);
            }
        }
        measured
    }

    /// Whether `part` is a fraction `1 / of` of `whole`, to within a twentieth.
    fn is_share(part: usize, whole: usize, of: u64) -> bool {
        let (part, whole) = (part as u64, whole as u64);
        (part * of).abs_diff(whole) * 20 < whole
    }

    #[test]
    fn one_pass_in_sixteen_is_measured() {
        let count = 1_000_000;
        assert!(is_share(measured(1, count as u64).len(), count, u64::from(MEAN_GAP)));
    }

    #[test]
    fn passes_of_each_kind_of_a_load_with_any_period_are_measured_equally_often() {
        let measured = measured(2, 4_000_000);
        for period in [2, 3, 4, 8, 16] {
            for phase in 0..period {
                let of_phase = measured.iter().filter(|number| *number % period == phase).count();
                assert!(
                    is_share(of_phase, measured.len(), period),
                    "{of_phase} of {} at {phase} of {period}",
                    measured.len()
                );
            }
        }
    }

    #[test]
    fn two_measured_passes_are_at_most_31_apart() {
        let measured = measured(3, 100_000);
        let gaps: Vec<u64> = measured.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!((gaps.iter().min(), gaps.iter().max()), (Some(&1), Some(&31)));
    }
}
