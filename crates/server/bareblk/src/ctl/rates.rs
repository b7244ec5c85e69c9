//! Turns the difference of two readings into rates per second and per request.

use std::time::Duration;

use blk_server::{LatencyHistogram, QueueCounters};

use crate::control::answers::reports::{DiskStats, Queue, StatsAnswer, WorkerStats};

/// The rates of one disk, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DiskRates {
    /// Reads.
    pub reads_per_s: f64,
    /// In 10^6 bytes.
    pub read_mb_per_s: f64,
    /// Writes.
    pub writes_per_s: f64,
    /// In 10^6 bytes.
    pub written_mb_per_s: f64,
    /// Flushes.
    pub flushes_per_s: f64,
    /// Requests answered with an error.
    pub errors_per_s: f64,
    /// Requests of any kind.
    pub requests_per_s: f64,
    /// Worker time per request, estimated from samples.
    pub worker_us_per_request: Option<f64>,
}

/// The rates of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkerRates {
    /// Share of one CPU, in percent.
    pub cpu_percent: f64,
    /// Share of the time during which the worker was ready to run but waited for a CPU, in percent.
    pub wait_percent: f64,
    /// Share of the time spent on submitting, in percent.
    pub submission_percent: f64,
    /// Share of the time spent on completing, in percent.
    pub completion_percent: f64,
    /// How often the worker slept.
    pub sleeps_per_s: f64,
}

/// Seconds between two readings; never 0.
pub fn seconds(before: &StatsAnswer, now: &StatsAnswer) -> f64 {
    (float(now.at_ns.saturating_sub(before.at_ns)) / 1e9).max(1e-9)
}

/// The rates of a disk, over all its queues.
pub fn of_disk(before: Option<&DiskStats>, now: &DiskStats, seconds: f64) -> DiskRates {
    if let Some(totals) = now.totals {
        return rates(&[totals.since(&before.and_then(|before| before.totals).unwrap_or_default())], seconds);
    }
    // An older server sends no totals.
    let old = |queue: &Queue| before?.queues.iter().find(|old| old.queue == queue.queue);
    let done: Vec<_> = now.queues.iter().map(|queue| difference(old(queue), queue)).collect();
    rates(&done, seconds)
}

/// The latencies of all requests between the readings.
pub fn latency(before: Option<&DiskStats>, now: &DiskStats) -> LatencyHistogram {
    now.latency.all().since(&before.map(|before| before.latency.all()).unwrap_or_default())
}

/// The rates of one queue.
pub fn of_queue(before: Option<&Queue>, now: &Queue, seconds: f64) -> DiskRates {
    rates(&[difference(before, now)], seconds)
}

fn rates(done: &[QueueCounters], seconds: f64) -> DiskRates {
    let sum = |field: fn(&QueueCounters) -> u64| float(done.iter().map(field).fold(0, u64::saturating_add));
    let per_s = |field: fn(&QueueCounters) -> u64| sum(field) / seconds;
    let requests = sum(QueueCounters::requests);
    let worker_time: Duration = done.iter().map(|queue| queue.worker_time).sum();
    DiskRates {
        reads_per_s: per_s(|queue| queue.reads),
        read_mb_per_s: per_s(|queue| queue.read_bytes) / 1e6,
        writes_per_s: per_s(|queue| queue.writes),
        written_mb_per_s: per_s(|queue| queue.written_bytes) / 1e6,
        flushes_per_s: per_s(|queue| queue.flushes),
        errors_per_s: per_s(|queue| queue.errors),
        requests_per_s: requests / seconds,
        worker_us_per_request: (requests > 0.0).then(|| worker_time.as_secs_f64() * 1e6 / requests),
    }
}

/// The queue's work between the readings. A queue whose counters fell was restarted: all its requests are new.
fn difference(before: Option<&Queue>, now: &Queue) -> QueueCounters {
    let now = now.counters;
    let before = before.map(|queue| queue.counters).unwrap_or_default();
    let restarted = now.requests() < before.requests() || now.kicks < before.kicks;
    now.since(&if restarted { QueueCounters::default() } else { before })
}

/// The rates of a worker.
pub fn of_worker(before: Option<&WorkerStats>, now: &WorkerStats, seconds: f64) -> WorkerRates {
    let did = now.counters.since(&before.map(|worker| worker.counters).unwrap_or_default());
    let percent = |time: Duration| time.as_secs_f64() * 100.0 / seconds;
    WorkerRates {
        cpu_percent: percent(did.cpu_time),
        wait_percent: percent(did.wait_time),
        submission_percent: percent(did.submission_time),
        completion_percent: percent(did.completion_time),
        sleeps_per_s: float(did.sleeps) / seconds,
    }
}

/// The whole process's processor time per request; `None` without requests.
pub fn cpu_us_per_request(before: &StatsAnswer, now: &StatsAnswer, requests_per_s: f64) -> Option<f64> {
    let cpu_us_per_s =
        float(now.process_cpu_ns.saturating_sub(before.process_cpu_ns)) / 1e3 / seconds(before, now);
    (requests_per_s > 0.0).then(|| cpu_us_per_s / requests_per_s)
}

/// Exact up to 2^53 ns, which is three months. Differences are smaller.
#[allow(clippy::cast_precision_loss)]
pub fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(counters: QueueCounters) -> DiskStats {
        DiskStats { queues: vec![Queue { counters, ..Queue::default() }], ..DiskStats::default() }
    }

    #[test]
    fn rates_are_differences_over_the_time_between() {
        let before = disk(QueueCounters { reads: 100, read_bytes: 1_000_000, ..QueueCounters::default() });
        let worker_time = Duration::from_micros(400);
        let after =
            QueueCounters { reads: 300, read_bytes: 9_000_000, worker_time, ..QueueCounters::default() };
        let rates = of_disk(Some(&before), &disk(after), 2.0);
        assert_eq!((rates.reads_per_s, rates.read_mb_per_s), (100.0, 4.0));
        assert_eq!(rates.worker_us_per_request, Some(2.0));
    }

    #[test]
    fn rates_come_from_the_totals_which_outlive_queues() {
        let totals = |writes| DiskStats {
            totals: Some(QueueCounters { writes, ..QueueCounters::default() }),
            ..DiskStats::default()
        };
        assert_eq!(of_disk(Some(&totals(1000)), &totals(1300), 3.0).writes_per_s, 100.0);
    }

    #[test]
    fn queue_that_was_restarted_counts_what_it_did_since() {
        let before = disk(QueueCounters { writes: 1000, ..QueueCounters::default() });
        let rates =
            of_disk(Some(&before), &disk(QueueCounters { writes: 10, ..QueueCounters::default() }), 1.0);
        assert_eq!(rates.writes_per_s, 10.0);
    }

    #[test]
    fn disk_without_requests_has_no_time_per_request() {
        let rates = of_disk(None, &disk(QueueCounters::default()), 1.0);
        assert_eq!((rates.requests_per_s, rates.worker_us_per_request), (0.0, None));
    }

    #[test]
    fn processor_time_is_shared_among_all_requests() {
        let before = StatsAnswer { at_ns: 0, process_cpu_ns: 0, ..StatsAnswer::default() };
        let now =
            StatsAnswer { at_ns: 2_000_000_000, process_cpu_ns: 1_000_000_000, ..StatsAnswer::default() };
        assert_eq!(cpu_us_per_request(&before, &now, 100_000.0), Some(5.0));
    }
}
