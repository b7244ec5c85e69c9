//! The answers to `list`, `stats` and `workers`: the server's report in JSON. The client parses the same structures.
//!
//! - A field's name states its unit; times are nanoseconds, sizes are bytes. A rate is the difference of a counter in
//!   two answers over the difference of their `at_ns`.
//! - Within one version of the protocol, answers may gain fields but never lose one. `reports.golden.json` lists the
//!   fields on which clients may rely.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::time::Duration;

use blk_server::{
    AdminError, DiskReport, QueueCounters, QueueReport, ServerReport, WorkerCounters, WorkerId, WorkerReport,
};
use disk_image::SECTOR_BYTES;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::super::protocol::answer::{Fault, ns};
use super::super::protocol::verbs::{Stats, WorkerSettings};
use super::super::refused::Refused;
use super::super::worker_settings;
use super::balance::Balance;
use super::latency::DiskLatency;
use super::placement::Placement;
use super::slow::milliseconds;
use super::throttling::DiskThrottling;

/// What an overlay has changed.
#[derive(Debug)]
pub struct Overlaid {
    /// How long the disks were paused.
    pub paused: Duration,
    /// For each disk: the keys with which the next start must serve it.
    pub keys: Vec<String>,
}

/// The answer to `list`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ListAnswer {
    /// The disks, in the order in which they were added.
    pub disks: Vec<Disk>,
    /// Disks on other machines that are not served yet.
    pub waiting: Vec<Waiting>,
}

impl ListAnswer {
    pub fn new(report: &ServerReport, waiting: Vec<Waiting>) -> Self {
        Self { disks: report.disks.iter().map(Disk::new).collect(), waiting }
    }
}

/// A disk that is not served yet, because its server does not answer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Waiting {
    pub name: String,
    pub image: String,
    pub socket: String,
    /// The error of the latest attempt.
    pub error: String,
    pub waited_ns: u64,
}

/// The answer to `workers`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkersAnswer {
    /// The workers, in the order of their numbers.
    pub workers: Vec<Worker>,
}

impl WorkersAnswer {
    pub fn new(report: &ServerReport) -> Self {
        Self { workers: report.workers.iter().map(Worker::new).collect() }
    }
}

/// The answer to `stats`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StatsAnswer {
    /// The time of the reading, on the host's monotonic clock.
    pub at_ns: u64,
    pub pid: u32,
    /// Processor time of the whole process.
    pub process_cpu_ns: u64,
    pub workers: Vec<WorkerStats>,
    pub disks: Vec<DiskStats>,
    /// Null if the balancer is off.
    pub balance: Option<Balance>,
}

impl StatsAnswer {
    /// # Errors
    /// A wanted disk does not exist.
    pub fn new(report: &ServerReport, wanted: &Stats) -> Result<Self, Fault> {
        let names = wanted.disks.as_deref();
        let is_there = |name: &&String| report.disks.iter().any(|disk| disk.name == **name);
        if let Some(name) = names.unwrap_or_default().iter().find(|name| !is_there(name)) {
            return Err(Refused::from(AdminError::NoDisk { name: name.clone() }).into());
        }
        let names: Option<HashSet<&String>> = names.map(|names| names.iter().collect());
        let is_wanted = |disk: &&DiskReport| names.as_ref().is_none_or(|names| names.contains(&disk.name));
        let disks = report.disks.iter().filter(is_wanted);
        Ok(Self {
            at_ns: clock_ns(ClockId::Monotonic),
            pid: std::process::id(),
            process_cpu_ns: clock_ns(ClockId::ProcessCPUTime),
            workers: report.workers.iter().map(WorkerStats::new).collect(),
            disks: disks.map(|disk| DiskStats::new(disk, wanted)).collect(),
            balance: report.balance.as_ref().map(Balance::new),
        })
    }
}

/// The answer to `show`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ShowAnswer {
    #[serde(flatten)]
    pub disk: DiskStats,
    /// Keys of a `[[disk]]` table, with their values.
    pub settings: BTreeMap<String, String>,
}

/// The answer to `health`.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HealthAnswer {
    /// True if all workers responded, and no disk has failed or waits for its server.
    pub healthy: bool,
    pub workers: usize,
    pub disks: usize,
    /// The numbers of the workers that did not respond in time.
    pub silent_workers: Vec<u32>,
    /// Disks that accept no more writes, because a sync failed or their storage refuses this server.
    pub failed_disks: Vec<String>,
    /// Those of them whose storage refuses this server.
    pub refused_disks: Vec<String>,
    /// Disks that are not served yet, because their servers do not answer.
    pub waiting_disks: Vec<String>,
    /// Disks with parked requests. They count as healthy, because their guests only wait.
    pub holding_disks: Vec<String>,
}

impl HealthAnswer {
    pub fn new(report: &ServerReport, waiting: &[Waiting], silent: &[WorkerId]) -> Self {
        let disks: Vec<Disk> = report.disks.iter().map(Disk::new).collect();
        let named = |which: fn(&Disk) -> bool| {
            disks.iter().filter(|disk| which(disk)).map(|disk| disk.name.clone()).collect::<Vec<_>>()
        };
        let (failed_disks, holding_disks) = (named(|disk| disk.failed), named(|disk| disk.held > 0));
        Self {
            healthy: silent.is_empty() && failed_disks.is_empty() && waiting.is_empty(),
            workers: report.workers.len(),
            disks: disks.len(),
            silent_workers: silent.iter().map(|worker| worker.0).collect(),
            failed_disks,
            refused_disks: named(|disk| disk.refused),
            waiting_disks: waiting.iter().map(|waiting| waiting.name.clone()).collect(),
            holding_disks,
        }
    }
}

/// The answer to `reload`. Most lists contain the names of disks.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ReloadAnswer {
    pub added: Vec<String>,
    pub removed: Vec<String>,
    /// Removed and added again.
    pub replaced: Vec<String>,
    pub changed: Vec<String>,
    pub refused: Vec<NotChanged>,
    /// Keys of the process that take effect at the next start.
    pub needs_restart: Vec<String>,
}

/// A disk that stays unchanged, and why.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NotChanged {
    pub disk: String,
    pub why: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Disk {
    pub name: String,
    pub image: String,
    pub socket: String,
    pub size_bytes: u64,
    /// `raw` or `qcow2`. Older servers do not send this field.
    pub format: String,
    /// The number of images of which the disk consists: its own and its backing files.
    pub layers: usize,
    pub read_only: bool,
    /// The disk accepts no more writes: a sync failed, or its storage refuses this server.
    pub failed: bool,
    /// The disk's storage refuses this server for good, because another client has taken the disk over.
    pub refused: bool,
    /// `report`, `hold` or `hold-on-enospc`.
    pub on_error: String,
    /// Time between retries of parked requests; null: only `resume` retries them, or the disk parks no requests.
    pub retry_after_ns: Option<u64>,
    /// The number of requests parked now.
    pub held: u64,
    pub engine: String,
    /// The number of connected front-ends.
    pub sessions: usize,
    pub queues_offered: u16,
    /// The number of queues that a guest uses.
    pub queues_running: usize,
}

impl Disk {
    fn new(disk: &DiskReport) -> Self {
        Self {
            name: disk.name.clone(),
            image: text(&disk.image),
            socket: text(&disk.socket),
            size_bytes: disk.capacity_sectors.saturating_mul(SECTOR_BYTES),
            format: if disk.layers.is_some() { "qcow2" } else { "raw" }.to_owned(),
            layers: disk.layers.unwrap_or(1),
            read_only: disk.read_only,
            failed: disk.failed,
            refused: disk.refused,
            on_error: disk.park.map_or_else(|| "report".to_owned(), |park| park.what.to_string()),
            retry_after_ns: disk.park.and_then(|park| park.retry_after).map(ns),
            held: disk.queues.iter().map(|queue| queue.counters.parked).sum(),
            engine: disk.engine.clone(),
            sessions: disk.sessions,
            queues_offered: disk.queues_offered,
            queues_running: disk.queues.len(),
        }
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Worker {
    pub worker: u32,
    /// The NUMA node of the worker's CPUs; null if there are several nodes, or the node is unknown.
    pub node: Option<u32>,
    /// The number of queues that the worker serves.
    pub queues: usize,
    /// The settings with which the worker was started.
    pub settings: WorkerSettings,
}

impl Worker {
    fn new(worker: &WorkerReport) -> Self {
        Self {
            worker: worker.id.0,
            node: worker.node,
            queues: worker.queues,
            settings: worker_settings::settings(&worker.options),
        }
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerStats {
    #[serde(flatten)]
    pub worker: Worker,
    #[serde(flatten)]
    pub counters: WorkerCounters,
}

impl WorkerStats {
    fn new(worker: &WorkerReport) -> Self {
        Self { worker: Worker::new(worker), counters: worker.counters }
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskStats {
    #[serde(flatten)]
    pub disk: Disk,
    /// Null: each worker completes the requests that it submits.
    pub placement: Option<Placement>,
    /// The counters of all queues since the disk was added; a live upgrade keeps them. Older servers do not send this
    /// field.
    pub totals: Option<QueueCounters>,
    /// The latencies since the disk was added, as for `totals`.
    pub latency: DiskLatency,
    /// Requests that take at least this long are slow; null: no request is.
    pub slow_ms: Option<u64>,
    /// The disk's limits, and how long requests waited for them.
    pub throttling: DiskThrottling,
    /// The running queues.
    pub queues: Vec<Queue>,
}

impl DiskStats {
    fn new(disk: &DiskReport, wanted: &Stats) -> Self {
        let queues = disk.queues.iter().filter(|_| wanted.queues);
        Self {
            disk: Disk::new(disk),
            placement: Placement::new(&disk.placement),
            throttling: DiskThrottling::new(disk),
            totals: Some(disk.totals.counters),
            latency: DiskLatency::new(&disk.totals.latency, wanted.histograms),
            slow_ms: disk.slow_limit.map(milliseconds),
            queues: queues.map(Queue::new).collect(),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Queue {
    pub queue: u16,
    pub worker: u32,
    /// The queue's size in descriptors.
    pub size: u16,
    #[serde(flatten)]
    pub counters: QueueCounters,
}

impl Queue {
    fn new(queue: &QueueReport) -> Self {
        Self { queue: queue.index, worker: queue.worker.0, size: queue.size, counters: queue.counters }
    }
}

/// The path as UTF-8, which JSON requires: replacement characters stand for all other bytes.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn clock_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    let (seconds, nanoseconds) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(nanoseconds.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use blk_server::{BalanceDecision, BalanceReport, DiskTotals, MoveOutcome, SlowRequest};
    use blk_server::{DiskLimits, GroupReport, LimitKind, LimitReport, LimitSettings, RateSettings};
    use blk_server::{ParkPolicy, ParkWhat, PlacementReport, SchedulingClass, WorkerOptions};
    use io_engine::{HandOver, PlacementCounters};
    use serde_json::Value;

    use super::super::slow::SlowAnswer;
    use super::super::throttling::LimitAnswer;
    use super::*;

    fn placement() -> PlacementReport {
        PlacementReport {
            placement: blk_server::Placement::Completion {
                hand_over: HandOver::by_count(4),
                completion_worker: Some(WorkerId(40)),
            },
            completion_worker: Some(WorkerId(18)),
            counters: PlacementCounters {
                hand_overs: 30,
                ops: 31,
                owner_wake_ups: 32,
                spared_wake_ups: 33,
                passed: 34,
                participant_wake_ups: 35,
                moves: 36,
                locked: 37,
                contended: 38,
                lock_wait: Duration::from_nanos(39),
            },
        }
    }

    fn throttling() -> blk_server::DiskThrottling {
        let settings = RateSettings { rate: Some(45), max: Some(46), max_length: Some(47) };
        let own = LimitSettings { iops_size: Some(44), ..LimitSettings::default() };
        blk_server::DiskThrottling {
            limits: DiskLimits { own, group: Some("acme".into()), weight: 48 },
            rates: vec![LimitReport {
                kind: LimitKind::IopsRead,
                settings,
                credit: 49,
                capacity: 50,
                used: 51,
            }],
            throttled_requests: 52,
            throttled_time: Duration::from_nanos(53),
        }
    }

    // New counters need not be listed here.
    #[allow(clippy::needless_update)]
    fn counters() -> (QueueCounters, WorkerCounters) {
        let queue = QueueCounters {
            reads: 1,
            read_bytes: 4096,
            writes: 2,
            written_bytes: 8192,
            flushes: 3,
            other: 4,
            errors: 5,
            in_flight: 6,
            parked: 41,
            retries: 42,
            parked_time: Duration::from_nanos(44),
            slow: 45,
            calls: 7,
            kicks: 8,
            moves: 9,
            worker_time: Duration::from_nanos(10),
            ..QueueCounters::default()
        };
        let worker = WorkerCounters {
            busy_passes: 11,
            idle_passes: 12,
            sleeps: 13,
            cpu_time: Duration::from_nanos(14),
            submission_time: Duration::from_nanos(15),
            completion_time: Duration::from_nanos(16),
            wait_time: Duration::from_nanos(22),
            ..WorkerCounters::default()
        };
        (queue, worker)
    }

    fn totals() -> DiskTotals {
        let mut totals = DiskTotals::default();
        totals.counters.reads = 47;
        totals.latency.read.note(48);
        totals
    }

    fn report() -> ServerReport {
        let (counters, worked) = counters();
        let options = WorkerOptions {
            cpus: vec![2, 3],
            nice: Some(-5),
            class: Some(SchedulingClass::RoundRobin(50)),
            cgroup: Some("storage/a".into()),
        };
        let disk = DiskReport {
            name: "root".into(),
            image: "/images/root.raw".into(),
            socket: "/run/root.sock".into(),
            capacity_sectors: 8,
            layers: Some(2),
            read_only: false,
            failed: false,
            refused: false,
            park: Some(ParkPolicy { what: ParkWhat::NoSpace, retry_after: Some(Duration::from_nanos(43)) }),
            engine: "io_uring".into(),
            placement: placement(),
            throttling: throttling(),
            sessions: 1,
            queues_offered: 64,
            totals: totals(),
            slow_limit: Some(Duration::from_millis(46)),
            queues: vec![QueueReport { index: 17, worker: WorkerId(18), size: 1024, counters }],
        };
        let worker = WorkerReport { id: WorkerId(18), options, node: Some(23), queues: 1, counters: worked };
        let decision = BalanceDecision {
            at: std::time::SystemTime::UNIX_EPOCH + Duration::from_millis(24),
            disk: "root".into(),
            queue: 17,
            from: WorkerId(18),
            to: WorkerId(25),
            why: "it was busy".into(),
            outcome: MoveOutcome::Moved { took: Duration::from_nanos(26) },
        };
        let balance = BalanceReport { readings: 27, moves: 28, failed: 29, decisions: vec![decision] };
        let group = GroupReport {
            name: "acme".into(),
            limits: LimitSettings { iops_size: Some(44), ..LimitSettings::default() },
            rates: throttling().rates,
            disks: vec!["root".into()],
        };
        let (workers, disks, groups) = (vec![worker], vec![disk], vec![group]);
        ServerReport { workers, disks, groups, balance: Some(balance) }
    }

    /// Collects in `lacks` the fields of `wanted` that `found` lacks, or has with another value.
    fn missing(wanted: &Value, found: &Value, path: &str, lacks: &mut Vec<String>) {
        match (wanted, found) {
            (Value::Object(wanted), Value::Object(found)) => wanted.iter().for_each(|(key, value)| {
                missing(value, found.get(key).unwrap_or(&Value::Null), &format!("{path}.{key}"), lacks);
            }),
            (Value::Array(wanted), Value::Array(found)) if wanted.len() == found.len() => {
                wanted.iter().zip(found).for_each(|(wanted, found)| missing(wanted, found, path, lacks));
            }
            _ if wanted == found => {}
            _ => lacks.push(format!("{path}: {found} instead of {wanted}")),
        }
    }

    /// A field that disappears or changes its meaning breaks clients: such a change needs a new version.
    #[test]
    fn answers_are_those_of_protocol_1() {
        let report = report();
        let wanted = Stats { histograms: true, ..Stats::default() };
        let mut stats = StatsAnswer::new(&report, &wanted).unwrap();
        assert!(stats.at_ns > 0 && stats.process_cpu_ns > 0 && stats.pid > 0);
        (stats.at_ns, stats.pid, stats.process_cpu_ns) = (19, 20, 21);
        let mut limit = LimitAnswer::of(None, None, &report).unwrap();
        limit.at_ns = 54;
        let refused = vec![NotChanged { disk: "e".into(), why: "in use".into() }];
        let [added, removed, replaced, changed, needs_restart] =
            ["a", "b", "c", "d", "poll-us"].map(|name| vec![name.into()]);
        let reload = ReloadAnswer { added, removed, replaced, changed, refused, needs_restart };
        let [name, image, socket, error] =
            ["far", "nbd://storage/far", "/run/far.sock", "refused"].map(str::to_owned);
        let waiting = Waiting { name, image, socket, error, waited_ns: 56 };
        let slow = SlowRequest {
            at: std::time::SystemTime::UNIX_EPOCH + Duration::from_millis(49),
            queue: 50,
            kind: "read",
            sector: 51,
            bytes: 52,
            took: Duration::from_nanos(53),
            tries: 54,
            failed: true,
        };
        let answers = serde_json::json!({
            "slow": SlowAnswer::new(Some(Duration::from_millis(46)), &[slow]),
            "list": ListAnswer::new(&report, vec![waiting]),
            "stats": stats,
            "workers": WorkersAnswer::new(&report),
            "limit": limit,
            "reload": reload,
        });
        let golden: Value = serde_json::from_str(include_str!("reports.golden.json")).unwrap();
        let mut lacks = Vec::new();
        missing(&golden, &answers, "", &mut lacks);
        assert!(lacks.is_empty(), "{lacks:#?}");
    }

    #[test]
    fn answer_is_read_again_as_it_was_written() {
        let stats = StatsAnswer::new(&report(), &Stats::default()).unwrap();
        let read: StatsAnswer = serde_json::from_str(&serde_json::to_string(&stats).unwrap()).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), serde_json::to_value(&stats).unwrap());
        assert_eq!(read.disks[0].queues, stats.disks[0].queues);
        assert_eq!(read.workers[0].counters, stats.workers[0].counters);
    }

    #[test]
    fn answer_has_only_the_disks_and_queues_that_were_asked_for() {
        let named = |name: &str| DiskReport { name: name.into(), ..report().disks.remove(0) };
        let report = ServerReport { disks: vec![named("a"), named("b")], ..ServerReport::default() };
        let wanted = Stats { disks: Some(vec!["b".into()]), queues: false, histograms: false };
        let answer = StatsAnswer::new(&report, &wanted).unwrap();
        let [disk] = answer.disks.as_slice() else { panic!("{answer:?}") };
        assert_eq!((disk.disk.name.as_str(), disk.queues.len()), ("b", 0));
        assert_eq!((disk.latency.read.count, &disk.latency.read.buckets), (1, &None));
        let unknown = Stats { disks: Some(vec!["b".into(), "c".into()]), ..Stats::default() };
        let fault = StatsAnswer::new(&report, &unknown).unwrap_err();
        assert_eq!(fault.message, "there is no disk `c`");
    }

    #[test]
    fn every_counter_is_documented() {
        let document = include_str!("../../../../../../docs/reference/control.md");
        let counters = QueueCounters::ALL.iter().chain(WorkerCounters::ALL);
        let undocumented: Vec<_> =
            counters.filter(|counter| !document.contains(&format!("`{}`", counter.key))).collect();
        assert!(undocumented.is_empty(), "{undocumented:?}");
    }

    #[test]
    fn answer_of_a_newer_server_is_read_without_what_is_new() {
        let line = r#"{"workers": [{"worker": 3, "mood": "good", "settings": {}}], "weather": 1}"#;
        let answer: WorkersAnswer = serde_json::from_str(line).unwrap();
        assert_eq!(answer.workers[0].worker, 3);
    }
}
