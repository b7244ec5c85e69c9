//! Measurements of a thread or of a group of threads.
//!
//! - `slat`: from the start of a request to the end of the submission that accepted it; `clat`: from there to its
//!   completion; `lat`: the sum. As in fio.
//! - A flush (`fsync=`) counts neither as a read nor as a write.
//!
//! See also: layouts (`report/json.rs`, `report/text.rs`).

pub(crate) mod cpu;

pub(crate) mod latency;

use std::time::Duration;

use self::cpu::CpuTime;
use self::latency::{Latency, Spread};

/// Number of fio's steps: 1, 2, 4, 8, 16, 32, and 64 or more.
pub const DEPTH_STEPS: usize = 7;

/// Measurements of one direction.
#[derive(Clone, Debug, Default)]
pub struct DirectionMeasured {
    /// Bytes completed.
    pub bytes: u64,
    /// Requests completed.
    pub ios: u64,
    /// Submission latency.
    pub slat: Latency,
    /// Completion latency.
    pub clat: Spread,
    /// Total latency.
    pub lat: Latency,
    /// One sample per half second.
    pub samples: Vec<Sample>,
}

/// Completions of one interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Length of the interval.
    pub seconds: f64,
    /// Bytes completed in the interval.
    pub bytes: u64,
    /// Requests completed in the interval.
    pub ios: u64,
}

/// A queue's notifications and sleeps; zero for files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCounts {
    /// Notifications sent.
    pub kicks: u64,
    /// Sleeps while waiting for a completion.
    pub sleeps: u64,
    /// Batches published.
    pub publications: u64,
}

impl QueueCounts {
    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.kicks += other.kicks;
        self.sleeps += other.sleeps;
        self.publications += other.publications;
    }

    /// Returns the increase of each count since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            kicks: self.kicks.saturating_sub(earlier.kicks),
            sleeps: self.sleeps.saturating_sub(earlier.sleeps),
            publications: self.publications.saturating_sub(earlier.publications),
        }
    }
}

/// Measurements of one thread, or the sum of several.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Reads and writes.
    pub directions: [DirectionMeasured; 2],
    /// Flushes.
    pub sync: Spread,
    /// How many requests were in flight when one was added, by step.
    pub depths: [u64; DEPTH_STEPS],
    /// Requests per submission, by step.
    pub submits: [u64; DEPTH_STEPS],
    /// Completions per poll, by step.
    pub completes: [u64; DEPTH_STEPS],
    /// The longest runtime of the threads.
    pub runtime: Duration,
    /// The sum of the threads' runtimes.
    pub job_runtime: Duration,
    /// CPU time of all threads together.
    pub cpu: CpuTime,
    /// Blocks that the verify pass read and found correct.
    pub verified_blocks: u64,
}

impl Measured {
    /// Adds a thread that ran at the same time.
    pub fn merge(&mut self, other: &Self) {
        for (ours, theirs) in self.directions.iter_mut().zip(&other.directions) {
            ours.merge(theirs);
        }
        self.sync.merge(&other.sync);
        add_each(&mut self.depths, &other.depths);
        add_each(&mut self.submits, &other.submits);
        add_each(&mut self.completes, &other.completes);
        self.runtime = self.runtime.max(other.runtime);
        self.job_runtime += other.job_runtime;
        self.cpu.merge(&other.cpu);
        self.verified_blocks += other.verified_blocks;
    }

    /// Sum of reads and writes.
    #[must_use]
    pub fn ios(&self) -> u64 {
        self.directions.iter().map(|direction| direction.ios).sum()
    }

    /// Requests per second, both directions together.
    #[must_use]
    pub fn iops(&self) -> f64 {
        per_second(self.ios(), self.runtime)
    }

    /// Mean total latency, both directions together.
    #[must_use]
    pub fn mean_lat_ns(&self) -> f64 {
        let mut both = self.directions[0].lat;
        both.merge(&self.directions[1].lat);
        both.mean_ns()
    }
}

impl DirectionMeasured {
    fn merge(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.ios += other.ios;
        self.slat.merge(&other.slat);
        self.clat.merge(&other.clat);
        self.lat.merge(&other.lat);
        for (place, sample) in other.samples.iter().enumerate() {
            match self.samples.get_mut(place) {
                Some(ours) => {
                    ours.bytes += sample.bytes;
                    ours.ios += sample.ios;
                }
                None => self.samples.push(*sample),
            }
        }
    }
}

fn add_each(ours: &mut [u64; DEPTH_STEPS], theirs: &[u64; DEPTH_STEPS]) {
    ours.iter_mut().zip(theirs).for_each(|(ours, theirs)| *ours += theirs);
}

/// Returns the histogram step for `depth` requests in flight. The steps are 1, 2–3, 4–7, …, 64 and more.
#[inline]
#[must_use]
pub fn depth_step(depth: usize) -> usize {
    (depth.max(1).ilog2() as usize).min(DEPTH_STEPS - 1)
}

/// Returns the histogram step for a batch of `count` requests. The steps are 0, 1–4, 5–8, …, 33–64, more.
#[inline]
#[must_use]
pub fn batch_step(count: usize) -> usize {
    match count {
        0 => 0,
        1..=4 => 1,
        more => ((more - 1).ilog2() as usize).min(DEPTH_STEPS - 1),
    }
}

/// The rate per second; 0 if no time has passed.
#[must_use]
#[allow(clippy::cast_precision_loss)] // shown to people
pub fn per_second(count: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_fall_into_fios_steps() {
        assert_eq!(
            [1, 2, 3, 4, 7, 8, 31, 32, 63, 64, 5000].map(depth_step),
            [0, 1, 1, 2, 2, 3, 4, 5, 5, 6, 6]
        );
    }

    #[test]
    fn batches_fall_into_fios_steps() {
        assert_eq!([0, 1, 4, 5, 8, 9, 16, 17, 33, 64, 65].map(batch_step), [0, 1, 1, 2, 2, 3, 3, 4, 5, 5, 6]);
    }

    #[test]
    fn threads_together_run_as_long_as_the_longest_and_count_all() {
        let thread = |ios, ms| {
            let mut measured = Measured {
                runtime: Duration::from_millis(ms),
                job_runtime: Duration::from_millis(ms),
                ..Measured::default()
            };
            measured.directions[0].ios = ios;
            measured.directions[0].samples = vec![Sample { seconds: 0.5, bytes: ios * 512, ios }];
            measured
        };
        let mut both = thread(100, 1000);
        both.merge(&thread(300, 2000));
        assert_eq!((both.ios(), both.runtime.as_millis(), both.job_runtime.as_millis()), (400, 2000, 3000));
        assert_eq!(both.directions[0].samples, [Sample { seconds: 0.5, bytes: 400 * 512, ios: 400 }]);
        assert!((both.iops() - 200.0).abs() < 1e-9);
    }
}
