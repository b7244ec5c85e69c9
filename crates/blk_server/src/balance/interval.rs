//! What happened between two readings of the counters.
//!
//! Not here: what it means (`estimates.rs`), who reads (`balancer.rs`).

use std::collections::HashMap;
use std::time::Duration;

use crate::report::{QueueCounters, ServerReport, WorkerReport};
use crate::worker_options::WorkerId;

/// Counters as they were at one time.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    /// On any clock that does not go back.
    pub(crate) at: Duration,
    /// CPUs that this process may use.
    pub(crate) cpus: usize,
    /// All that is counted.
    pub(crate) report: ServerReport,
    /// What the report does not tell about workers, in its order.
    pub(crate) workers: Vec<WorkerReading>,
}

/// What the kernel counts about a worker's thread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WorkerReading {
    /// Time that it wanted a CPU and got none: other threads were on it, or its control group had used up its share.
    pub(crate) waited: Duration,
}

/// A queue of a server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct QueueName {
    pub(crate) disk: String,
    pub(crate) queue: u16,
}

/// Two readings subtracted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interval {
    /// Its end.
    pub(crate) at: Duration,
    pub(crate) length: Duration,
    pub(crate) cpus: usize,
    pub(crate) workers: Vec<WorkerLoad>,
    pub(crate) queues: Vec<QueueLoad>,
}

/// What a worker did.
#[derive(Clone, Debug)]
pub(crate) struct WorkerLoad {
    pub(crate) id: WorkerId,
    /// Where it may run; empty: wherever the process may.
    pub(crate) cpus: Vec<u32>,
    pub(crate) cpu_time: Duration,
    pub(crate) waited: Duration,
    pub(crate) submission_time: Duration,
    pub(crate) completion_time: Duration,
    /// It found work whenever it looked.
    pub(crate) never_idle: bool,
}

/// What a queue took of its worker.
#[derive(Clone, Debug)]
pub(crate) struct QueueLoad {
    pub(crate) name: QueueName,
    pub(crate) worker: WorkerId,
    pub(crate) worker_time: Duration,
    pub(crate) requests: u64,
}

/// `None` if no time has passed. Workers and queues that are new have no past and are left out.
pub(crate) fn interval(before: &Reading, after: &Reading) -> Option<Interval> {
    let length = after.at.checked_sub(before.at).filter(|length| !length.is_zero())?;
    let old: HashMap<_, _> =
        numbered(before).map(|(worker, reading)| (worker.id, (worker, reading))).collect();
    let workers = numbered(after).filter_map(|(worker, reading)| {
        let (old_worker, old_reading) = old.get(&worker.id)?;
        Some(worker_load(old_worker, worker, reading.waited.saturating_sub(old_reading.waited)))
    });
    let old: HashMap<_, _> =
        queues(&before.report).map(|(disk, queue, _, counters)| ((disk, queue), counters)).collect();
    let queues = queues(&after.report).filter_map(|(disk, queue, worker, counters)| {
        let old = old.get(&(disk, queue))?;
        let name = QueueName { disk: disk.to_owned(), queue };
        let worker_time = counters.worker_time.saturating_sub(old.worker_time);
        Some(QueueLoad {
            name,
            worker,
            worker_time,
            requests: requests(counters).saturating_sub(requests(old)),
        })
    });
    Some(Interval {
        at: after.at,
        length,
        cpus: after.cpus,
        workers: workers.collect(),
        queues: queues.collect(),
    })
}

fn numbered(reading: &Reading) -> impl Iterator<Item = (&WorkerReport, WorkerReading)> {
    let more = reading.workers.iter().copied().chain(std::iter::repeat(WorkerReading::default()));
    reading.report.workers.iter().zip(more)
}

fn queues(report: &ServerReport) -> impl Iterator<Item = (&str, u16, WorkerId, &QueueCounters)> {
    report.disks.iter().flat_map(|disk| {
        disk.queues.iter().map(|queue| (disk.name.as_str(), queue.index, queue.worker, &queue.counters))
    })
}

fn requests(counters: &QueueCounters) -> u64 {
    let QueueCounters { reads, writes, flushes, other, errors, .. } = counters;
    [reads, writes, flushes, other, errors].into_iter().fold(0, |sum, part| sum.saturating_add(*part))
}

fn worker_load(before: &WorkerReport, after: &WorkerReport, waited: Duration) -> WorkerLoad {
    let (old, new) = (&before.counters, &after.counters);
    let busy = new.busy_passes.saturating_sub(old.busy_passes);
    let empty = new.idle_passes.saturating_sub(old.idle_passes);
    let sleeps = new.sleeps.saturating_sub(old.sleeps);
    WorkerLoad {
        id: after.id,
        cpus: after.options.cpus.clone(),
        cpu_time: new.cpu_time.saturating_sub(old.cpu_time),
        waited,
        submission_time: new.submission_time.saturating_sub(old.submission_time),
        completion_time: new.completion_time.saturating_sub(old.completion_time),
        never_idle: busy > 0 && empty.saturating_add(sleeps) <= busy / 20,
    }
}
