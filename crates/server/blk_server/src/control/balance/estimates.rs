//! Estimates each queue's load, and each worker's load and capacity, smoothed over intervals.
//!
//! - A queue's load is the share of a CPU that its requests use on their worker.
//! - A worker's *fixed* load belongs to none of its queues and stays when they move: completions of requests that other
//!   workers submitted. It reduces the worker's capacity for submissions.
//! - A worker's capacity is the share of a CPU that it gets when it needs one. It is less than 1 if other threads use
//!   the same CPU, or if its control group has a small share. An idle worker does not reveal its capacity, so the
//!   estimate slowly returns to 1.

use std::collections::HashMap;
use std::time::Duration;

use super::interval::{Interval, QueueLoad, WorkerLoad};
use super::tuning::{FORGETTING, SMOOTHING};
use crate::data_path::assignment::balanced::QueueName;
use crate::data_path::worker::worker_options::WorkerId;

/// A worker that needed a CPU for less than this share of the interval does not reveal its capacity.
const TELLING: f64 = 0.1;
/// Lower limit of the estimated capacity.
const LEAST_CAPACITY: f64 = 0.02;

/// Estimates of a worker, in shares of a CPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerEstimate {
    pub(super) capacity: f64,
    pub(super) fixed: f64,
    /// The share of the worker's work that consists of completions.
    pub(super) completion_share: f64,
}

/// Estimates of a queue.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QueueEstimate {
    /// The load, in shares of a CPU.
    pub(super) load: f64,
    pub(super) requests_per_s: f64,
}

/// Estimates of all workers and queues.
#[derive(Debug, Default)]
pub(super) struct Estimates {
    pub(super) workers: HashMap<WorkerId, WorkerEstimate>,
    pub(super) queues: HashMap<QueueName, QueueEstimate>,
}

impl Estimates {
    /// Adds one interval. Forgets workers and queues that are not in the interval.
    pub(super) fn learn(&mut self, interval: &Interval) {
        let queue_times = times_by_worker(&interval.queues);
        let mut scales = HashMap::new();
        for worker in &interval.workers {
            let work = Work::of(worker, queue_times.get(&worker.id).copied().unwrap_or_default());
            scales.insert(worker.id, work.queue_scale);
            let known = self.workers.get(&worker.id).copied();
            self.workers.insert(worker.id, learn_worker(known, worker, &work, interval.length));
        }
        self.workers.retain(|id, _| interval.workers.iter().any(|worker| worker.id == *id));
        self.learn_queues(interval, &scales);
    }

    /// Forgets all loads, but keeps the workers' capacities, which do not depend on the load.
    pub(super) fn forget_loads(&mut self) {
        self.queues.clear();
        self.workers.values_mut().for_each(|worker| worker.fixed = 0.0);
    }

    fn learn_queues(&mut self, interval: &Interval, scales: &HashMap<WorkerId, f64>) {
        let mut queues = HashMap::with_capacity(interval.queues.len());
        for queue in &interval.queues {
            let scale = scales.get(&queue.worker).copied().unwrap_or(1.0);
            let load = part(queue.worker_time, interval.length) * scale;
            #[allow(clippy::cast_precision_loss)] // a rate, not a count
            let requests_per_s = queue.requests as f64 / interval.length.as_secs_f64();
            let known = self.queues.get(&queue.name);
            let (old_load, old_rate) =
                known.map_or((load, requests_per_s), |old| (old.load, old.requests_per_s));
            let estimate = QueueEstimate {
                load: smooth(old_load, load, interval.length, SMOOTHING),
                requests_per_s: smooth(old_rate, requests_per_s, interval.length, SMOOTHING),
            };
            queues.insert(queue.name.clone(), estimate);
        }
        self.queues = queues;
    }
}

/// A worker's work in an interval, corrected by the processor time that it used.
struct Work {
    /// The correction factor for the times that the worker counted for its queues.
    queue_scale: f64,
    fixed: Duration,
    completion_share: f64,
}

impl Work {
    /// The counted times are estimated from wall-clock samples: they miss work between requests, and include times
    /// when the thread was preempted. The processor time is exact, but includes polling. If all polls of a worker
    /// found work, its processor time equals its work. Otherwise the processor time is an upper limit of its work.
    fn of(worker: &WorkerLoad, queue_time: Duration) -> Self {
        let counted = worker.submission_time + worker.completion_time;
        let work = if worker.never_idle { worker.cpu_time } else { counted.min(worker.cpu_time) };
        let scale = if counted.is_zero() { 1.0 } else { part(work, counted) };
        let own = queue_time.mul_f64(scale).min(work);
        let queue_scale = if queue_time.is_zero() { scale } else { part(own, queue_time) };
        let completion_share = if counted.is_zero() { 0.0 } else { part(worker.completion_time, counted) };
        let fixed = if counted.is_zero() { Duration::ZERO } else { work - own };
        Self { queue_scale, fixed, completion_share }
    }
}

fn learn_worker(
    known: Option<WorkerEstimate>,
    worker: &WorkerLoad,
    work: &Work,
    length: Duration,
) -> WorkerEstimate {
    let fixed = part(work.fixed, length);
    let completion_share = work.completion_share;
    let known = known.unwrap_or(WorkerEstimate { capacity: 1.0, fixed, completion_share });
    let wanted = worker.cpu_time + worker.wait_time;
    let capacity = if part(wanted, length) < TELLING {
        smooth(known.capacity, 1.0, length, FORGETTING)
    } else {
        let seen = part(worker.cpu_time, wanted).clamp(LEAST_CAPACITY, 1.0);
        smooth(known.capacity, seen, length, SMOOTHING)
    };
    WorkerEstimate {
        capacity,
        fixed: smooth(known.fixed, fixed, length, SMOOTHING),
        completion_share: smooth(known.completion_share, completion_share, length, SMOOTHING),
    }
}

fn times_by_worker(queues: &[QueueLoad]) -> HashMap<WorkerId, Duration> {
    let mut times = HashMap::new();
    for queue in queues {
        *times.entry(queue.worker).or_default() += queue.worker_time;
    }
    times
}

/// Exponential smoothing over unequal intervals.
fn smooth(old: f64, new: f64, length: Duration, within: Duration) -> f64 {
    let keep = (-part(length, within)).exp();
    old * keep + new * (1.0 - keep)
}

fn part(of: Duration, whole: Duration) -> f64 {
    if whole.is_zero() { 0.0 } else { of.as_secs_f64() / whole.as_secs_f64() }
}
