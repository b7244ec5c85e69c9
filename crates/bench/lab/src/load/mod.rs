//! Loads: a test file, and the ways to write to it (through a virtqueue, directly through an engine, or by fio).
//!
//! - Every load sends the same kind of requests to the same file, keeps the same number of them in flight, and starts
//!   with an uncounted [`WARM_UP`].
//!
//! See also: which variant uses which load (`experiments/`).

pub(crate) mod disk;

pub(crate) mod server;

pub(crate) mod remote;

pub(crate) mod hostile;

pub(crate) mod limited;

pub(crate) mod shared_queue;

pub(crate) mod locks;

pub(crate) mod users;

pub(crate) mod cores;

pub(crate) mod cpu;

pub(crate) mod neighbours;

pub(crate) mod wake_up;

use std::collections::BTreeMap;
use std::time::Duration;

use disk_image::SECTOR_BYTES;

use crate::runner::Xorshift;

/// Length of the uncounted warm-up, as a share of the sample.
pub(crate) const WARM_UP: f64 = 0.1;

/// The order of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// Any block, possibly repeatedly (fio: `--rw=randwrite --norandommap`).
    Random,
    /// From the start to the end, then again (fio: `--rw=write`).
    Sequential,
}

/// A job that writes to a test file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub pattern: Pattern,
    pub block_bytes: u32,
    /// Requests in flight.
    pub depth: u16,
    pub file_bytes: u64,
    /// Length of the counted part.
    pub seconds: f64,
    pub seed: u64,
}

/// Jobs that run at the same time and send random requests, either reads or writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockJob {
    pub writes: bool,
    pub block_bytes: u32,
    /// Requests in flight, per job.
    pub depth: u32,
    /// Number of jobs. With queues, each job has its own.
    pub jobs: u16,
    pub file_bytes: u64,
    /// Length of the counted part.
    pub seconds: f64,
    pub seed: u64,
}

/// A sample's figures, by column id.
pub(crate) type Figures = BTreeMap<&'static str, f64>;

/// The sectors of a job's requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sectors {
    pattern: Pattern,
    blocks: u64,
    sectors_per_block: u64,
    next: u64,
    random: Xorshift,
}

impl Sectors {
    pub fn of(job: &Job) -> Self {
        let block_bytes = u64::from(job.block_bytes);
        Self {
            pattern: job.pattern,
            blocks: (job.file_bytes / block_bytes).max(1),
            sectors_per_block: block_bytes / SECTOR_BYTES,
            next: 0,
            random: Xorshift::new(job.seed),
        }
    }

    /// First sector of the next request.
    #[inline]
    pub fn next(&mut self) -> u64 {
        let block = match self.pattern {
            Pattern::Random => self.random.below(self.blocks),
            Pattern::Sequential => {
                let block = self.next;
                self.next = if block + 1 == self.blocks { 0 } else { block + 1 };
                block
            }
        };
        block * self.sectors_per_block
    }
}

/// The result of one sample; `None` for figures that the load cannot measure.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Measured {
    pub requests: u64,
    pub seconds: f64,
    /// Mean time from the start of a submission until the kernel accepts it, for loads that can measure it.
    pub submit_us: Option<f64>,
    /// Mean time of a submission in the sending thread.
    pub client_submit_us: Option<f64>,
    /// Mean time from sending to completion.
    pub complete_ms: Option<f64>,
    /// CPU time of everything but the client.
    pub cpu_us_per_io: Option<f64>,
}

/// The duration in nanoseconds; `u64` holds 584 years.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[allow(clippy::cast_precision_loss)] // sums of one sample
pub(crate) fn mean_us(total_ns: u64, count: u64) -> Option<f64> {
    (count > 0).then(|| total_ns as f64 / count as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(pattern: Pattern) -> Job {
        Job { pattern, block_bytes: 16 << 10, depth: 74, file_bytes: 64 << 10, seconds: 1.0, seed: 3 }
    }

    #[test]
    fn sequential_requests_start_again_at_the_end() {
        let mut sectors = Sectors::of(&job(Pattern::Sequential));
        let found: Vec<_> = (0..5).map(|_| sectors.next()).collect();
        assert_eq!(found, [0, 32, 64, 96, 0]);
    }

    #[test]
    fn random_requests_reach_every_block_and_nothing_else() {
        let mut sectors = Sectors::of(&job(Pattern::Random));
        let found: std::collections::BTreeSet<_> = (0..200).map(|_| sectors.next()).collect();
        assert_eq!(found, [0, 32, 64, 96].into());
    }
}
