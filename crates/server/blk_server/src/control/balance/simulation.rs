//! A small deterministic simulation of CPUs, workers and queues, for tests of the rule. Each step takes 100 ms.
//!
//! A worker divides its time as a real one does: a queue with little demand gets all that it demands, and the others
//! share the rest evenly. Queues may demand more than is available.
#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss
)]

use std::time::Duration;

use super::interval::{Interval, QueueLoad, WorkerLoad};
use super::{Decider, Move};
use crate::data_path::assignment::balanced::QueueName;
use crate::data_path::worker::worker_options::WorkerId;

pub(super) const STEP: Duration = Duration::from_millis(100);

#[derive(Clone, Debug)]
pub(super) struct SimWorker {
    pub(super) id: WorkerId,
    /// Index of the CPU to which the worker is pinned.
    pub(super) cpu: usize,
    /// The last-level cache of this CPU, if it is known.
    pub(super) cache: Option<usize>,
    /// The CPU quota of the worker's control group, as a fraction of one CPU (1.0: a whole CPU).
    pub(super) quota: f64,
}

#[derive(Clone, Debug)]
pub(super) struct SimQueue {
    pub(super) worker: WorkerId,
    /// The load of the queue if it had a worker to itself, in shares of a CPU.
    pub(super) demand: f64,
    pub(super) requests_per_s: f64,
    /// The part of the demand that its worker served in the last step.
    pub(super) served: f64,
    pub(super) attached: bool,
}

pub(super) struct World {
    /// The share of each CPU that other programs do not use.
    pub(super) cpus: Vec<f64>,
    pub(super) workers: Vec<SimWorker>,
    pub(super) queues: Vec<SimQueue>,
    /// The worker that handles the completions of all queues, and the cost of completions divided by that of
    /// submissions.
    pub(super) completions: Option<(WorkerId, f64)>,
    /// Maximum number of workers of the simulated disk.
    pub(super) most_workers: Option<usize>,
    /// Measured times are wrong by up to this fraction.
    pub(super) noise: f64,
    pub(super) random: fastrand::Rng,
    pub(super) decider: Decider,
    pub(super) now: Duration,
}

impl World {
    /// Creates a world in which each worker has a CPU of its own and all queues are on the first worker.
    pub(super) fn new(workers: u32, demands: &[f64]) -> Self {
        let worker = |id: u32| SimWorker { id: WorkerId(id), cpu: id as usize, cache: None, quota: 1.0 };
        let queue = |demand: &f64| SimQueue {
            worker: WorkerId(0),
            demand: *demand,
            requests_per_s: demand * 500_000.0,
            served: 0.0,
            attached: false,
        };
        Self {
            cpus: vec![1.0; workers as usize],
            workers: (0..workers).map(worker).collect(),
            queues: demands.iter().map(queue).collect(),
            completions: None,
            most_workers: None,
            noise: 0.0,
            random: fastrand::Rng::with_seed(1),
            decider: Decider::default(),
            now: Duration::ZERO,
        }
    }

    /// Places queue `i` on worker `places[i]`.
    pub(super) fn placed(mut self, places: &[u32]) -> Self {
        self.queues.iter_mut().zip(places).for_each(|(queue, place)| queue.worker = WorkerId(*place));
        self
    }

    /// Runs worker `i` on a CPU with the last-level cache `caches[i]`.
    pub(super) fn cached(mut self, caches: &[usize]) -> Self {
        self.workers.iter_mut().zip(caches).for_each(|(worker, cache)| worker.cache = Some(*cache));
        self
    }

    /// Simulates one interval, decides, and makes all moves.
    pub(super) fn step(&mut self) -> Vec<Move> {
        let interval = self.measure();
        let moves = self.decider.decide(&interval);
        for made in &moves {
            assert_eq!(self.queues[usize::from(made.queue.queue)].worker, made.from, "{made:?}");
            self.queues[usize::from(made.queue.queue)].worker = made.to;
        }
        moves
    }

    /// Runs this many steps, and returns all moves.
    pub(super) fn run(&mut self, steps: usize) -> Vec<Move> {
        (0..steps).flat_map(|_| self.step()).collect()
    }

    /// Returns the worker of each queue.
    pub(super) fn places(&self) -> Vec<u32> {
        self.queues.iter().map(|queue| queue.worker.0).collect()
    }

    /// The demand on each worker.
    pub(super) fn demands(&self) -> Vec<f64> {
        let on = |id| self.queues.iter().filter(move |queue| queue.worker == id).map(|queue| queue.demand);
        self.workers.iter().map(|worker| on(worker.id).sum()).collect()
    }

    pub(super) fn served(&self) -> f64 {
        self.queues.iter().map(|queue| queue.served).sum()
    }

    pub(super) fn measure(&mut self) -> Interval {
        let fixed = self.completion_load();
        let wanted: Vec<f64> = self
            .workers
            .iter()
            .zip(self.demands())
            .map(|(worker, demand)| demand + self.fixed_of(worker.id, fixed))
            .collect();
        let given = self.share_cpus(&wanted);
        let loads = (0..self.workers.len()).map(|at| self.serve(at, &given, fixed));
        let workers = loads.collect::<Vec<_>>();
        let queues = (0..self.queues.len()).map(|at| self.measure_queue(at)).collect();
        self.now += STEP;
        Interval { at: self.now, length: STEP, cpus: self.cpus.len(), workers, queues, ..Interval::default() }
    }

    fn completion_load(&self) -> f64 {
        self.completions.map_or(0.0, |(_, cost)| self.served() * cost)
    }

    fn fixed_of(&self, id: WorkerId, fixed: f64) -> f64 {
        if self.completions.is_some_and(|(completer, _)| completer == id) { fixed } else { 0.0 }
    }

    /// The largest share that each worker could have, given the other workers on its CPU.
    fn share_cpus(&self, wanted: &[f64]) -> Vec<f64> {
        let mut given = vec![0.0; wanted.len()];
        for (cpu, capacity) in self.cpus.iter().enumerate() {
            let here: Vec<usize> = (0..wanted.len()).filter(|&at| self.workers[at].cpu == cpu).collect();
            for &at in &here {
                let others = here.iter().filter(|&&other| other != at);
                let others: f64 = others.map(|&other| wanted[other].min(capacity / here.len() as f64)).sum();
                given[at] = (capacity - others).min(self.workers[at].quota);
            }
        }
        given
    }

    fn serve(&mut self, at: usize, given: &[f64], fixed: f64) -> WorkerLoad {
        let worker = self.workers[at].clone();
        let fixed = self.fixed_of(worker.id, fixed).min(given[at]);
        let mut mine: Vec<usize> =
            (0..self.queues.len()).filter(|&queue| self.queues[queue].worker == worker.id).collect();
        mine.sort_by(|&a, &b| self.queues[a].demand.total_cmp(&self.queues[b].demand));
        let mut left = given[at] - fixed;
        for (done, &queue) in mine.iter().enumerate() {
            let fair = left / (mine.len() - done) as f64;
            self.queues[queue].served = self.queues[queue].demand.min(fair);
            left -= self.queues[queue].served;
        }
        let own: f64 = mine.iter().map(|&queue| self.queues[queue].served).sum();
        let cpu_time = STEP.mul_f64(own + fixed);
        let kept_waiting = (own + fixed) * (1.0 / given[at].max(0.01) - 1.0);
        WorkerLoad {
            id: worker.id,
            cpus: vec![worker.cpu as u32],
            cache: worker.cache,
            cpu_time,
            wait_time: STEP.mul_f64(kept_waiting.clamp(0.0, 1.0 - (own + fixed).min(1.0))),
            submission_time: STEP.mul_f64(own),
            completion_time: STEP.mul_f64(fixed),
            never_idle: false,
        }
    }

    fn measure_queue(&mut self, at: usize) -> QueueLoad {
        let wrong = 1.0 + self.noise * (2.0 * self.random.f64() - 1.0);
        let queue = &self.queues[at];
        let got = if queue.demand > 0.0 { queue.served / queue.demand } else { 0.0 };
        QueueLoad {
            name: QueueName { disk: "disk".into(), queue: at as u16 },
            worker: queue.worker,
            worker_time: STEP.mul_f64(queue.served * wrong),
            requests: (queue.requests_per_s * got * STEP.as_secs_f64()) as u64,
            attached: queue.attached,
            most_workers: self.most_workers,
        }
    }
}

/// The lowest maximum of the workers' demands over all assignments.
pub(super) fn best_maximum(workers: u32, demands: &[f64]) -> f64 {
    let all = u64::from(workers).pow(demands.len() as u32);
    let maximum = |assignment: u64| {
        let mut sums = vec![0.0; workers as usize];
        let mut rest = assignment;
        for demand in demands {
            sums[(rest % u64::from(workers)) as usize] += demand;
            rest /= u64::from(workers);
        }
        sums.into_iter().fold(0.0, f64::max)
    };
    (0..all).map(maximum).fold(f64::INFINITY, f64::min)
}
