//! Computes each worker's pressure, now and after a possible move.
//!
//! A worker's pressure is its demand divided by its capacity. If the load of all workers on the same CPUs, divided by
//! the number of these CPUs, is higher, that value counts instead: a queue gains nothing from another worker on the
//! same CPU.
//!
//! Demand is load, except on a fully busy worker. On such a worker, a queue that uses about as much as the largest
//! queue is *hungry*: it uses all the time that it gets, so its demand cannot be measured. The model assumes that all
//! hungry queues are alike, and counts each with the largest share that any of them gets on any worker. This
//! distinguishes ten queues on one full worker from ninety on another.

use std::collections::HashMap;

use super::estimates::{Estimates, WorkerEstimate};
use super::interval::{Interval, QueueLoad, WorkerLoad};

/// A worker with at least this load is fully busy: measurements miss the rest of its time.
const FULL: f64 = 0.95;
/// A queue on a full worker is hungry if it uses at least this fraction of the largest queue's share.
const HUNGRY: f64 = 0.5;

#[derive(Debug)]
pub(super) struct Model<'a> {
    pub(super) workers: Vec<Worker<'a>>,
    pub(super) queues: Vec<Queue<'a>>,
    /// Load and number of CPUs, for each set of CPUs on which workers run.
    groups: Vec<(f64, f64)>,
    /// For disks with a limit of workers: the number of queues on each worker.
    spread: HashMap<&'a str, Vec<usize>>,
}

#[derive(Debug)]
pub(super) struct Worker<'a> {
    pub(super) reading: &'a WorkerLoad,
    pub(super) estimate: WorkerEstimate,
    demand: f64,
    group: usize,
}

#[derive(Debug)]
pub(super) struct Queue<'a> {
    pub(super) reading: &'a QueueLoad,
    /// Index into the model's workers.
    pub(super) worker: usize,
    pub(super) load: f64,
    pub(super) requests_per_s: f64,
    pub(super) demand: f64,
}

impl<'a> Model<'a> {
    pub(super) fn new(interval: &'a Interval, estimates: &Estimates) -> Self {
        let workers = interval.workers.iter().filter_map(|reading| {
            let estimate = *estimates.workers.get(&reading.id)?;
            Some(Worker { reading, estimate, demand: 0.0, group: 0 })
        });
        let mut model = Self {
            workers: workers.collect(),
            queues: Vec::new(),
            groups: Vec::new(),
            spread: HashMap::new(),
        };
        let numbers: HashMap<_, _> =
            model.workers.iter().enumerate().map(|(at, worker)| (worker.reading.id, at)).collect();
        model.queues.extend(interval.queues.iter().filter_map(|queue| {
            let estimate = estimates.queues.get(&queue.name)?;
            let worker = *numbers.get(&queue.worker)?;
            let (load, requests_per_s) = (estimate.load, estimate.requests_per_s);
            Some(Queue { reading: queue, worker, load, requests_per_s, demand: load })
        }));
        model.guess_demands();
        model.form_groups(interval.cpus);
        model.count_spread();
        model
    }

    fn guess_demands(&mut self) {
        let mut loads: Vec<f64> = self.workers.iter().map(|worker| worker.estimate.fixed).collect();
        let mut most = vec![0.0_f64; self.workers.len()];
        for queue in &self.queues {
            loads[queue.worker] += queue.load;
            most[queue.worker] = most[queue.worker].max(queue.load);
        }
        let full: Vec<bool> = self
            .workers
            .iter()
            .zip(&loads)
            .map(|(worker, load)| *load >= FULL * worker.estimate.capacity)
            .collect();
        let wanted = most.iter().zip(&full).filter(|(_, full)| **full).map(|(most, _)| *most);
        let wanted = wanted.fold(0.0, f64::max);
        for queue in &mut self.queues {
            if full[queue.worker] && queue.load > 0.0 && queue.load >= HUNGRY * most[queue.worker] {
                queue.demand = wanted.max(queue.load);
            }
        }
        for worker in &mut self.workers {
            worker.demand = worker.estimate.fixed;
        }
        for queue in &self.queues {
            self.workers[queue.worker].demand += queue.demand;
        }
    }

    fn form_groups(&mut self, cpus: usize) {
        let mut known: HashMap<&[u32], usize> = HashMap::new();
        for worker in &mut self.workers {
            let set = worker.reading.cpus.as_slice();
            let count = if set.is_empty() { cpus.max(1) } else { set.len() };
            worker.group = *known.entry(set).or_insert_with(|| {
                #[allow(clippy::cast_precision_loss)] // CPUs
                self.groups.push((0.0, count as f64));
                self.groups.len() - 1
            });
            self.groups[worker.group].0 += worker.estimate.fixed;
        }
        for queue in &self.queues {
            self.groups[self.workers[queue.worker].group].0 += queue.load;
        }
    }

    fn count_spread(&mut self) {
        for queue in self.queues.iter().filter(|queue| queue.reading.most_workers.is_some()) {
            let spread = self.spread.entry(&queue.reading.name.disk);
            spread.or_insert_with(|| vec![0; self.workers.len()])[queue.worker] += 1;
        }
    }

    /// Whether the disk's limit of workers allows the move.
    pub(super) fn may_go(&self, queue: &Queue<'_>, to: usize) -> bool {
        let Some(most) = queue.reading.most_workers else { return true };
        let Some(spread) = self.spread.get(queue.reading.name.disk.as_str()) else { return true };
        let serving = spread.iter().filter(|&&queues| queues > 0).count();
        let leaves_alone = usize::from(spread[queue.worker] == 1);
        spread[to] > 0 || serving - leaves_alone < most
    }

    /// Whether both workers use the same last-level cache, as far as is known. An unbound worker uses all caches.
    pub(super) fn shares_cache(&self, one: usize, other: usize) -> bool {
        match (self.workers[one].reading.cache, self.workers[other].reading.cache) {
            (Some(one), Some(other)) => one == other,
            _ => true,
        }
    }

    /// The current pressure of the worker with this index.
    pub(super) fn pressure(&self, worker: usize) -> f64 {
        self.pressure_with(worker, 0.0, 0.0)
    }

    /// The pressures of both workers if the queue moved to `to`.
    pub(super) fn pressures_after(&self, queue: &Queue<'_>, to: usize) -> (f64, f64) {
        let mates = self.workers[queue.worker].group == self.workers[to].group;
        let load = if mates { 0.0 } else { queue.load };
        (self.pressure_with(queue.worker, -queue.demand, -load), self.pressure_with(to, queue.demand, load))
    }

    fn pressure_with(&self, worker: usize, demand: f64, group_load: f64) -> f64 {
        let worker = &self.workers[worker];
        let (load, cpus) = self.groups[worker.group];
        ((worker.demand + demand) / worker.estimate.capacity).max((load + group_load) / cpus)
    }

    /// Changes the model to the state expected after the move.
    pub(super) fn apply(&mut self, queue: usize, to: usize) {
        let queue = &mut self.queues[queue];
        let from = std::mem::replace(&mut queue.worker, to);
        if let Some(spread) = self.spread.get_mut(queue.reading.name.disk.as_str()) {
            spread[from] -= 1;
            spread[to] += 1;
        }
        self.workers[from].demand -= queue.demand;
        self.workers[to].demand += queue.demand;
        self.groups[self.workers[from].group].0 -= queue.load;
        self.groups[self.workers[to].group].0 += queue.load;
    }
}
