//! The difference between two readings of the counters.

use std::collections::HashMap;
use std::time::Duration;

use crate::data_path::assignment::balanced::{QueueName, QueueReading, Reading};
use crate::data_path::report::WorkerReport;
use crate::data_path::worker::worker_options::WorkerId;

/// What the workers and queues did between two readings.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interval {
    /// The end of the interval, on a monotonic clock.
    pub(crate) at: Duration,
    pub(crate) length: Duration,
    /// The part of the interval that the balancer itself used. The interval cannot be shorter than this.
    pub(crate) own_time: Duration,
    /// Number of CPUs that the process may use.
    pub(crate) cpus: usize,
    pub(crate) workers: Vec<WorkerLoad>,
    pub(crate) queues: Vec<QueueLoad>,
}

/// A worker's counters over the interval.
#[derive(Clone, Debug)]
pub(crate) struct WorkerLoad {
    pub(crate) id: WorkerId,
    /// CPUs on which the worker may run; empty: all CPUs of the process.
    pub(crate) cpus: Vec<u32>,
    /// Identifies the last-level cache that these CPUs share. `None`: several caches, or unknown.
    pub(crate) cache: Option<usize>,
    pub(crate) cpu_time: Duration,
    /// Time for which the thread was runnable but had no CPU: other threads ran, or its control group had used up its
    /// quota.
    pub(crate) wait_time: Duration,
    pub(crate) submission_time: Duration,
    pub(crate) completion_time: Duration,
    /// Whether nearly all its polls found work.
    pub(crate) never_idle: bool,
}

/// A queue's counters over the interval.
#[derive(Clone, Debug)]
pub(crate) struct QueueLoad {
    pub(crate) name: QueueName,
    pub(crate) worker: WorkerId,
    pub(crate) worker_time: Duration,
    pub(crate) requests: u64,
    /// See [`QueueReading`].
    pub(crate) attached: bool,
    /// See [`QueueReading`].
    pub(crate) most_workers: Option<usize>,
}

impl Reading {
    /// The changes since `before`. Omits new workers and queues, which have no earlier reading.
    pub(crate) fn since(&self, before: &Self, length: Duration) -> Interval {
        let old: HashMap<_, _> = before.workers.iter().map(|worker| (worker.id, worker)).collect();
        let workers = self.workers.iter().filter_map(|new| Some(worker_load(old.get(&new.id)?, new)));
        let old: HashMap<_, _> = before.queues.iter().map(|queue| (&queue.name, queue)).collect();
        let queues = self.queues.iter().filter_map(|new| Some(queue_load(old.get(&new.name)?, new)));
        let (workers, queues) = (workers.collect(), queues.collect());
        Interval { length, workers, queues, ..Interval::default() }
    }
}

fn worker_load(before: &WorkerReport, after: &WorkerReport) -> WorkerLoad {
    let did = after.counters.since(&before.counters);
    WorkerLoad {
        id: after.id,
        cpus: after.options.cpus.clone(),
        cache: None,
        cpu_time: did.cpu_time,
        wait_time: did.wait_time,
        submission_time: did.submission_time,
        completion_time: did.completion_time,
        never_idle: did.busy_passes > 0 && did.idle_passes.saturating_add(did.sleeps) <= did.busy_passes / 20,
    }
}

fn queue_load(before: &QueueReading, after: &QueueReading) -> QueueLoad {
    let did = after.counters.since(&before.counters);
    QueueLoad {
        name: after.name.clone(),
        worker: after.worker,
        worker_time: did.worker_time,
        requests: did.requests(),
        attached: after.attached,
        most_workers: after.most_workers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data_path::counters::{QueueCounters, WorkerCounters};
    use crate::data_path::worker::worker_options::WorkerOptions;

    fn reading(counters: WorkerCounters, queue: QueueCounters) -> Reading {
        let worker = WorkerReport {
            id: WorkerId(3),
            options: WorkerOptions::default(),
            node: None,
            queues: 1,
            counters,
        };
        let name = QueueName { disk: "a".into(), queue: 1 };
        let (attached, most_workers) = (true, Some(2));
        let queue = QueueReading { name, worker: WorkerId(3), counters: queue, attached, most_workers };
        Reading { workers: vec![worker], queues: vec![queue] }
    }

    fn passes(busy_passes: u64, idle_passes: u64, sleeps: u64) -> Reading {
        let counters = WorkerCounters { busy_passes, idle_passes, sleeps, ..WorkerCounters::default() };
        reading(counters, QueueCounters::default())
    }

    #[test]
    fn interval_has_what_was_added_and_nothing_of_what_is_new() {
        let ms = Duration::from_millis;
        let worker = |of: u64| WorkerCounters {
            cpu_time: ms(10 * of),
            wait_time: ms(7 * of),
            submission_time: ms(5 * of),
            completion_time: ms(3 * of),
            ..WorkerCounters::default()
        };
        let queue = |of: u64| QueueCounters {
            reads: of,
            writes: 10 * of,
            flushes: 100 * of,
            other: 1_000 * of,
            errors: 10_000 * of,
            worker_time: ms(of),
            ..QueueCounters::default()
        };
        let before = reading(worker(1), queue(1));
        let mut after = reading(worker(3), queue(3));
        after.workers.push(WorkerReport { id: WorkerId(4), ..after.workers[0].clone() });
        let other = QueueName { disk: "b".into(), queue: 1 };
        after.queues.push(QueueReading { name: other, ..after.queues[0].clone() });
        let interval = after.since(&before, ms(100));
        let [did] = interval.workers.as_slice() else { panic!("{interval:?}") };
        let times = (did.cpu_time, did.wait_time, did.submission_time, did.completion_time);
        assert_eq!((did.id, times), (WorkerId(3), (ms(20), ms(14), ms(10), ms(6))));
        let [took] = interval.queues.as_slice() else { panic!("{interval:?}") };
        assert_eq!((took.worker_time, took.requests), (ms(2), 2_222));
        assert_eq!((took.attached, took.most_workers), (true, Some(2)));
    }

    #[test]
    fn queue_that_was_started_again_in_between_has_done_nothing() {
        let many =
            QueueCounters { reads: 1_000, worker_time: Duration::from_secs(1), ..QueueCounters::default() };
        let before = reading(WorkerCounters::default(), many);
        let after = reading(WorkerCounters::default(), QueueCounters::default());
        let interval = after.since(&before, Duration::from_millis(100));
        assert_eq!((interval.queues[0].requests, interval.queues[0].worker_time), (0, Duration::ZERO));
    }

    #[test]
    fn worker_is_never_idle_only_if_nearly_no_look_was_in_vain() {
        let since = |reading: Reading| reading.since(&passes(0, 0, 0), Duration::from_millis(100));
        let never_idle = |busy, idle, sleeps| since(passes(busy, idle, sleeps)).workers[0].never_idle;
        assert!(never_idle(1_000, 30, 20));
        assert!(!never_idle(1_000, 51, 0));
        assert!(!never_idle(1_000, 0, 51));
        assert!(!never_idle(0, 0, 0));
    }
}
