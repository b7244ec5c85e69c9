//! Watches a running job: progress, events, samples, and the threads' results when they end.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::opened::Opened;
use super::outcome::{Outcome, Progress, Watch};
use super::worker::{Failure, Live};
use crate::error::RunError;
use crate::job::Job;
use crate::measured::cpu::ProcessTime;
use crate::measured::{Measured, QueueCounts, Sample};
use crate::stop::Stop;
use crate::target::Target;
use crate::target::connection::Connection;

/// Time between two checks of progress and events.
const TICK: Duration = Duration::from_millis(100);
/// Time between two samples: fio's `bwavgtime`.
const SAMPLE: Duration = Duration::from_millis(500);

/// A thread's last message.
pub(super) struct Ended {
    pub(super) clone: usize,
    pub(super) measured: Measured,
    pub(super) counts: QueueCounts,
    pub(super) result: Result<(), Failure>,
}

/// Watches the threads of a run, on the thread that called `run`.
pub(super) struct Watcher<'r> {
    pub(super) job: &'r Job,
    pub(super) target: &'r Target,
    pub(super) opened: &'r Opened,
    pub(super) lives: &'r [Live],
    pub(super) server: Option<i32>,
    pub(super) stop: &'r Stop,
    pub(super) total: Option<u64>,
}

impl Watcher<'_> {
    /// Watches until all threads have ended.
    pub(super) fn collect(
        &self,
        ended: &Receiver<Ended>,
        watch: &mut dyn Watch,
    ) -> Result<Outcome, RunError> {
        let (start, before) = (Instant::now(), self.server.and_then(ProcessTime::of));
        let shared = self.opened.connection().map(Connection::counts).unwrap_or_default();
        let mut sampler = Sampler::new(self.lives, start);
        let mut server = None;
        let mut outcome = Outcome {
            job: self.job.clone(),
            target: self.target.clone(),
            clones: vec![Measured::default(); self.lives.len()],
            queues: QueueCounts::default(),
            server: None,
            interrupted: false,
            failure: None,
        };
        loop {
            match ended.recv_timeout(TICK.min(sampler.due())) {
                Ok(ended) => take(&mut outcome, ended),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            sampler.sample();
            self.news(watch);
            watch.tick(&self.progress(start));
            // If the server has exited, this keeps the last value.
            server = self.server.and_then(ProcessTime::of).or(server);
        }
        self.news(watch);
        sampler.give(&mut outcome.clones);
        if let Some(connection) = self.opened.connection() {
            outcome.queues.merge(&connection.counts().since(&shared));
        }
        outcome.server = before.and_then(|before| Some(server?.since(&before)));
        outcome.interrupted = self.stop.is_asked();
        Ok(outcome)
    }

    fn news(&self, watch: &mut dyn Watch) {
        while let Some(text) = self.opened.connection().and_then(Connection::news) {
            watch.event(&text);
        }
    }

    #[allow(clippy::cast_precision_loss)] // a share
    fn progress(&self, start: Instant) -> Progress {
        let elapsed = start.elapsed();
        let mut progress = Progress { elapsed, ..Progress::default() };
        for live in self.lives {
            for direction in 0..2 {
                progress.bytes[direction] += live.bytes[direction].load(Relaxed);
                progress.ios[direction] += live.ios[direction].load(Relaxed);
            }
        }
        let of_time = self.job.runtime.map_or(0.0, |runtime| elapsed.as_secs_f64() / runtime.as_secs_f64());
        let ios: u64 = progress.ios.iter().sum();
        let of_work = self.total.map_or(0.0, |total| ios as f64 / total.max(1) as f64);
        progress.share = of_time.max(of_work).clamp(0.0, 1.0);
        progress
    }
}

fn take(outcome: &mut Outcome, ended: Ended) {
    if let Some(place) = outcome.clones.get_mut(ended.clone) {
        *place = ended.measured;
    }
    outcome.queues.merge(&ended.counts);
    if outcome.failure.is_none() {
        outcome.failure = ended.result.err();
    }
}

/// Samples the threads' counters every half second.
struct Sampler<'r> {
    lives: &'r [Live],
    last: Instant,
    seen: Vec<[(u64, u64); 2]>,
    samples: Vec<[Vec<Sample>; 2]>,
}

impl<'r> Sampler<'r> {
    fn new(lives: &'r [Live], start: Instant) -> Self {
        let (seen, samples) = (vec![[(0, 0); 2]; lives.len()], vec![[const { Vec::new() }; 2]; lives.len()]);
        Self { lives, last: start, seen, samples }
    }

    fn due(&self) -> Duration {
        SAMPLE.saturating_sub(self.last.elapsed())
    }

    fn sample(&mut self) {
        let elapsed = self.last.elapsed();
        if elapsed < SAMPLE {
            return;
        }
        self.last += elapsed;
        let of_clone = self.lives.iter().zip(&mut self.seen).zip(&mut self.samples);
        for ((live, seen), samples) in of_clone {
            for (direction, (seen, samples)) in seen.iter_mut().zip(samples).enumerate() {
                let now = (live.bytes[direction].load(Relaxed), live.ios[direction].load(Relaxed));
                let (bytes, ios) = (now.0 - seen.0, now.1 - seen.1);
                samples.push(Sample { seconds: elapsed.as_secs_f64(), bytes, ios });
                *seen = now;
            }
        }
    }

    fn give(self, clones: &mut [Measured]) {
        for (clone, samples) in clones.iter_mut().zip(self.samples) {
            for (direction, samples) in clone.directions.iter_mut().zip(samples) {
                // A direction that was never used has no samples, as in fio.
                if direction.ios > 0 {
                    direction.samples = samples;
                }
            }
        }
    }
}
