//! The difference of two readings of a server: what happened in the interval, as rates.

use std::time::Duration;

use bareblk::client::{self, DiskRates, Queue, WorkerRates, WorkerStats};
use serde::Serialize;

use super::answer::{Disk, Reading, Throttling};
use super::latency::{Latencies, Percentiles};
use super::units::float;
use crate::limit::Limit;

/// One interval of a server.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Sample {
    /// Length of the interval.
    pub seconds: f64,
    /// Processor time of the whole process per request; `None` without requests.
    pub cpu_us_per_request: Option<f64>,
    /// The disks, in the server's order.
    pub disks: Vec<DiskSample>,
    /// The workers.
    pub workers: Vec<WorkerSample>,
    /// The limits of groups and disks.
    pub limits: Vec<LimitSample>,
}

/// One disk.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DiskSample {
    /// The disk's name, without characters that a terminal would interpret.
    pub name: String,
    /// What the operator most needs to know about the disk.
    pub state: State,
    /// Requests per second.
    pub iops: f64,
    pub reads_per_s: f64,
    pub writes_per_s: f64,
    pub flushes_per_s: f64,
    pub errors_per_s: f64,
    pub read_mb_per_s: f64,
    pub written_mb_per_s: f64,
    /// Worker time per request.
    pub worker_us_per_request: Option<f64>,
    /// Latencies of all requests; missing without requests, and from older servers.
    pub latency: Option<Percentiles>,
    /// Latencies by kind of request.
    pub latencies: Vec<(String, Percentiles)>,
    /// Requests of each power of two of nanoseconds.
    #[serde(skip)]
    pub octaves: Vec<(u8, u64)>,
    /// Requests in flight now.
    pub in_flight: u64,
    /// How many of the requests in flight are parked.
    pub held: u64,
    /// Share of the interval during which the running queues waited for limits. Missing without limits.
    pub throttled_percent: Option<f64>,
    /// The credit of the scarcest limit, as a share of its capacity. Missing without limits.
    pub credit_percent: Option<f64>,
    pub group: Option<String>,
    pub image: String,
    pub socket: String,
    pub engine: String,
    pub size_bytes: u64,
    pub sessions: usize,
    pub queues_offered: u16,
    /// The running queues.
    pub queues: Vec<QueueSample>,
}

/// What an operator must know about a disk, the most urgent first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// A sync failed, or the storage refuses the server: the disk accepts no more writes.
    Failed,
    /// Requests that failed on the host are parked.
    Holding,
    /// Requests waited for limits.
    Throttled,
    /// A front-end is connected, and the disk serves it.
    #[default]
    Ok,
    /// A front-end is connected, and the read-only disk serves it.
    ReadOnly,
    /// No front-end is connected.
    NoGuest,
}

impl State {
    /// The state in a table.
    pub fn word(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Holding => "holding",
            Self::Throttled => "throttled",
            Self::Ok => "ok",
            Self::ReadOnly => "read-only",
            Self::NoGuest => "no guest",
        }
    }
}

/// One running queue.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct QueueSample {
    pub queue: u16,
    pub worker: u32,
    pub size: u16,
    pub iops: f64,
    pub mb_per_s: f64,
    pub worker_us_per_request: Option<f64>,
    pub in_flight: u64,
    pub held: u64,
    /// Notifications from the guest per second.
    pub kicks_per_s: f64,
    /// Interrupts to the guest per second.
    pub calls_per_s: f64,
}

/// One worker.
#[derive(Clone, Debug, Default, Serialize)]
pub struct WorkerSample {
    pub worker: u32,
    pub queues: usize,
    pub cpus: Vec<u32>,
    /// Share of one CPU.
    pub cpu_percent: f64,
    /// Share of the interval during which the worker was ready to run but other threads had its CPU.
    pub wait_percent: f64,
    pub submission_percent: f64,
    pub completion_percent: f64,
    pub sleeps_per_s: f64,
}

/// One limit of a group or of a disk.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LimitSample {
    /// `group` or `disk`.
    pub scope: &'static str,
    pub name: String,
    /// The key of the limit, such as `iops-read`.
    pub limit: String,
    pub rate: u64,
    pub used_per_s: f64,
    pub credit_percent: f64,
}

impl Sample {
    /// What happened between two readings of the same server.
    pub fn between(before: &Reading, now: &Reading) -> Self {
        let seconds = (float(now.at_ns.saturating_sub(before.at_ns)) / 1e9).max(1e-9);
        let old_disk = |name: &str| before.disks.iter().find(|old| old.stats.disk.name == name);
        let disks: Vec<_> = now
            .disks
            .iter()
            .map(|disk| DiskSample::between(old_disk(&disk.stats.disk.name), disk, seconds))
            .collect();
        let requests = disks.iter().map(|disk| disk.iops).sum::<f64>() * seconds;
        let cpu_us = float(now.process_cpu_ns.saturating_sub(before.process_cpu_ns)) / 1e3;
        let old_worker = |worker: u32| before.workers.iter().find(|old| old.worker.worker == worker);
        let workers = now.workers.iter();
        Self {
            seconds,
            cpu_us_per_request: (requests >= 1.0).then_some(cpu_us / requests),
            disks,
            workers: workers
                .map(|worker| WorkerSample::between(old_worker(worker.worker.worker), worker, seconds))
                .collect(),
            limits: limits(before, now, seconds),
        }
    }

    /// Requests per second of all disks.
    pub fn iops(&self) -> f64 {
        self.disks.iter().map(|disk| disk.iops).sum()
    }
}

impl DiskSample {
    fn between(before: Option<&Disk>, now: &Disk, seconds: f64) -> Self {
        let disk = &now.stats.disk;
        let rates: DiskRates = client::of_disk(before.map(|before| &before.stats), &now.stats, seconds);
        let (all, latencies) = latencies(before, now);
        let throttled_percent = throttled_percent(before, now, seconds);
        let in_flight = now.stats.queues.iter().map(|queue| queue.counters.in_flight);
        Self {
            name: disk.name.clone(),
            state: state(now, throttled_percent),
            iops: rates.requests_per_s,
            reads_per_s: rates.reads_per_s,
            writes_per_s: rates.writes_per_s,
            flushes_per_s: rates.flushes_per_s,
            errors_per_s: rates.errors_per_s,
            read_mb_per_s: rates.read_mb_per_s,
            written_mb_per_s: rates.written_mb_per_s,
            worker_us_per_request: rates.worker_us_per_request,
            latency: all.percentiles(),
            latencies,
            octaves: all.octaves(),
            in_flight: in_flight.fold(0, u64::saturating_add),
            held: disk.held,
            throttled_percent,
            credit_percent: now.throttling.as_ref().and_then(scarcest),
            group: now.throttling.as_ref().and_then(|throttling| throttling.group.clone()),
            image: disk.image.clone(),
            socket: disk.socket.clone(),
            engine: disk.engine.clone(),
            size_bytes: disk.size_bytes,
            sessions: disk.sessions,
            queues_offered: disk.queues_offered,
            queues: queues(before, now, seconds),
        }
    }

    /// Bytes read and written, added up.
    pub fn mb_per_s(&self) -> f64 {
        self.read_mb_per_s + self.written_mb_per_s
    }
}

fn state(now: &Disk, throttled_percent: Option<f64>) -> State {
    let disk = &now.stats.disk;
    match () {
        () if disk.failed => State::Failed,
        () if disk.held > 0 => State::Holding,
        // A smaller share may only reflect the granularity of a limit's bucket.
        () if throttled_percent.is_some_and(|percent| percent >= 1.0) => State::Throttled,
        () if disk.sessions == 0 => State::NoGuest,
        () if disk.read_only => State::ReadOnly,
        () => State::Ok,
    }
}

/// The latencies of all requests together, and those of each kind.
fn latencies(before: Option<&Disk>, now: &Disk) -> (Latencies, Vec<(String, Percentiles)>) {
    let (mut all, mut by_kind) = (Latencies::default(), Vec::new());
    for (kind, counted) in now.latency.iter().flatten() {
        let old = before.and_then(|before| before.latency.as_ref()?.get(kind));
        let Some(latencies) = counted.since(old) else { continue };
        by_kind.extend(latencies.percentiles().map(|percentiles| (client::plain(kind), percentiles)));
        all.add(&latencies);
    }
    (all, by_kind)
}

fn throttled_percent(before: Option<&Disk>, now: &Disk, seconds: f64) -> Option<f64> {
    let throttling = now.throttling.as_ref()?;
    if throttling.limits.is_empty() && throttling.group.is_none() {
        return None;
    }
    let old = before.and_then(|before| before.throttling.as_ref()).map_or(0, |old| old.throttled_ns);
    let queues = u32::try_from(now.stats.queues.len().max(1)).unwrap_or(u32::MAX);
    let waited = Duration::from_nanos(throttling.throttled_ns.saturating_sub(old));
    Some((waited.as_secs_f64() * 100.0 / seconds / f64::from(queues)).min(100.0))
}

/// The lowest credit of the disk's limits.
fn scarcest(throttling: &Throttling) -> Option<f64> {
    throttling.limits.iter().map(Limit::credit_percent).reduce(f64::min)
}

impl Limit {
    fn credit_percent(&self) -> f64 {
        (float(self.credit) * 100.0 / float(self.capacity.max(1))).min(100.0)
    }
}

fn limits(before: &Reading, now: &Reading, seconds: f64) -> Vec<LimitSample> {
    let of_group = now.groups.iter().flat_map(|group| {
        let old = before.groups.iter().find(|old| old.group == group.group);
        samples("group", &group.group, old.map(|old| &old.limits), &group.limits, seconds)
    });
    let of_disk =
        now.disks.iter().filter_map(|disk| Some((&disk.stats.disk.name, disk.throttling.as_ref()?)));
    let of_disk = of_disk.flat_map(|(name, throttling)| {
        let old = before.disks.iter().find(|old| old.stats.disk.name == *name);
        let old = old.and_then(|old| old.throttling.as_ref()).map(|old| &old.limits);
        samples("disk", name, old, &throttling.limits, seconds)
    });
    of_group.chain(of_disk).collect()
}

fn samples(
    scope: &'static str,
    name: &str,
    before: Option<&Vec<Limit>>,
    now: &[Limit],
    seconds: f64,
) -> Vec<LimitSample> {
    let sample = |limit: &Limit| {
        let old = before.and_then(|before| before.iter().find(|old| old.limit == limit.limit));
        // When a limit is set again, its counter restarts at 0.
        let old = old.map_or(0, |old| old.used).min(limit.used);
        LimitSample {
            scope,
            name: name.to_owned(),
            limit: limit.limit.clone(),
            rate: limit.rate,
            used_per_s: float(limit.used - old) / seconds,
            credit_percent: limit.credit_percent(),
        }
    };
    now.iter().map(sample).collect()
}

fn queues(before: Option<&Disk>, now: &Disk, seconds: f64) -> Vec<QueueSample> {
    let sample = |queue: &Queue| {
        let old = before.and_then(|before| before.stats.queues.iter().find(|old| old.queue == queue.queue));
        let rates = client::of_queue(old, queue, seconds);
        let did = queue.counters.since(&old.map(|old| old.counters).unwrap_or_default());
        QueueSample {
            queue: queue.queue,
            worker: queue.worker,
            size: queue.size,
            iops: rates.requests_per_s,
            mb_per_s: rates.read_mb_per_s + rates.written_mb_per_s,
            worker_us_per_request: rates.worker_us_per_request,
            in_flight: queue.counters.in_flight,
            held: queue.counters.parked,
            kicks_per_s: float(did.kicks) / seconds,
            calls_per_s: float(did.calls) / seconds,
        }
    };
    now.stats.queues.iter().map(sample).collect()
}

impl WorkerSample {
    fn between(before: Option<&WorkerStats>, now: &WorkerStats, seconds: f64) -> Self {
        let WorkerRates { cpu_percent, wait_percent, submission_percent, completion_percent, sleeps_per_s } =
            client::of_worker(before, now, seconds);
        Self {
            worker: now.worker.worker,
            queues: now.worker.queues,
            cpus: now.worker.settings.cpus.clone(),
            cpu_percent,
            wait_percent,
            submission_percent,
            completion_percent,
            sleeps_per_s,
        }
    }
}
