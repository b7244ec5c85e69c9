//! The reports of a run to its caller: progress and events, and the final outcome.

use std::time::Duration;

use super::worker::Failure;
use crate::job::Job;
use crate::measured::cpu::ProcessTime;
use crate::measured::{Measured, QueueCounts};
use crate::target::Target;

/// Receives a run's progress.
pub trait Watch {
    /// All threads are ready and start now.
    fn began(&mut self) {}

    /// All threads have ended; the target is still open.
    fn ended(&mut self) {}

    /// The run calls this periodically.
    fn tick(&mut self, progress: &Progress);

    /// The run reports an event of the target.
    fn event(&mut self, text: &str);
}

/// Ignores all progress.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet;

impl Watch for Quiet {
    fn tick(&mut self, _: &Progress) {}
    fn event(&mut self, _: &str) {}
}

/// A run's progress.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Time since the start.
    pub elapsed: Duration,
    /// Share of the time or of the work, whichever is greater; 0 to 1.
    pub share: f64,
    /// Bytes so far, summed over all threads, by direction.
    pub bytes: [u64; 2],
    /// Requests so far, summed over all threads, by direction.
    pub ios: [u64; 2],
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The job as requested.
    pub job: Job,
    /// The job's target.
    pub target: Target,
    /// Measurements per clone.
    pub clones: Vec<Measured>,
    /// Counts of a socket's queues.
    pub queues: QueueCounts,
    /// CPU time of a back-end in another process on this host.
    pub server: Option<ProcessTime>,
    /// Whether the user stopped the run.
    pub interrupted: bool,
    /// The failure that ended the run.
    pub failure: Option<Failure>,
}

impl Outcome {
    /// The measurements of all clones together.
    #[must_use]
    pub fn group(&self) -> Measured {
        let mut group = Measured::default();
        self.clones.iter().for_each(|clone| group.merge(clone));
        group
    }
}
