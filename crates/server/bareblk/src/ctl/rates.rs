//! Rates: what the difference of two readings comes to per second, and per request.
//!
//! Not here: reading (`ctl.rs`), printing (`tables.rs`).

use crate::control::reports::{DiskStats, Queue, StatsAnswer, WorkerStats};

/// Of one disk, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DiskRates {
    pub reads_per_s: f64,
    pub read_mb_per_s: f64,
    pub writes_per_s: f64,
    pub written_mb_per_s: f64,
    pub flushes_per_s: f64,
    pub errors_per_s: f64,
    /// Requests of any kind.
    pub requests_per_s: f64,
    /// On the workers, estimated from samples.
    pub worker_us_per_request: Option<f64>,
}

/// Of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkerRates {
    /// Of one CPU, in percent.
    pub cpu_percent: f64,
    pub submission_percent: f64,
    pub completion_percent: f64,
    pub sleeps_per_s: f64,
}

/// Seconds between two readings; never 0.
pub fn seconds(before: &StatsAnswer, now: &StatsAnswer) -> f64 {
    (float(now.at_ns.saturating_sub(before.at_ns)) / 1e9).max(1e-9)
}

pub fn of_disk(before: Option<&DiskStats>, now: &DiskStats, seconds: f64) -> DiskRates {
    let old = |queue: &Queue| before?.queues.iter().find(|old| old.queue == queue.queue).copied();
    let done: Vec<_> = now.queues.iter().map(|queue| difference(old(queue), queue)).collect();
    rates(&done, seconds)
}

fn rates(done: &[Queue], seconds: f64) -> DiskRates {
    let sum = |field: fn(&Queue) -> u64| float(done.iter().map(field).fold(0, u64::saturating_add));
    let per_s = |field: fn(&Queue) -> u64| sum(field) / seconds;
    let requests = sum(Queue::requests);
    DiskRates {
        reads_per_s: per_s(|queue| queue.reads),
        read_mb_per_s: per_s(|queue| queue.read_bytes) / 1e6,
        writes_per_s: per_s(|queue| queue.writes),
        written_mb_per_s: per_s(|queue| queue.written_bytes) / 1e6,
        flushes_per_s: per_s(|queue| queue.flushes),
        errors_per_s: per_s(|queue| queue.errors),
        requests_per_s: requests / seconds,
        worker_us_per_request: (requests > 0.0).then(|| sum(|queue| queue.worker_ns) / 1e3 / requests),
    }
}

/// What the queue did in between. One that counts fewer than before was stopped and started: all it has is new.
fn difference(before: Option<Queue>, now: &Queue) -> Queue {
    let restarted = |before: &Queue| now.requests() < before.requests() || now.kicks < before.kicks;
    let before = before.filter(|before| !restarted(before)).unwrap_or_default();
    Queue {
        reads: now.reads.saturating_sub(before.reads),
        read_bytes: now.read_bytes.saturating_sub(before.read_bytes),
        writes: now.writes.saturating_sub(before.writes),
        written_bytes: now.written_bytes.saturating_sub(before.written_bytes),
        flushes: now.flushes.saturating_sub(before.flushes),
        other: now.other.saturating_sub(before.other),
        errors: now.errors.saturating_sub(before.errors),
        worker_ns: now.worker_ns.saturating_sub(before.worker_ns),
        ..*now
    }
}

pub fn of_worker(before: Option<&WorkerStats>, now: &WorkerStats, seconds: f64) -> WorkerRates {
    let per_s =
        |field: fn(&WorkerStats) -> u64| float(field(now).saturating_sub(before.map_or(0, field))) / seconds;
    WorkerRates {
        cpu_percent: per_s(|worker| worker.cpu_ns) / 1e7,
        submission_percent: per_s(|worker| worker.submission_ns) / 1e7,
        completion_percent: per_s(|worker| worker.completion_ns) / 1e7,
        sleeps_per_s: per_s(|worker| worker.sleeps),
    }
}

/// The whole process's processor time per request; `None` without requests.
pub fn cpu_us_per_request(before: &StatsAnswer, now: &StatsAnswer, requests_per_s: f64) -> Option<f64> {
    let cpu_us_per_s =
        float(now.process_cpu_ns.saturating_sub(before.process_cpu_ns)) / 1e3 / seconds(before, now);
    (requests_per_s > 0.0).then(|| cpu_us_per_s / requests_per_s)
}

/// Exact up to 2^53, which is three months in nanoseconds; differences are smaller.
#[allow(clippy::cast_precision_loss)]
pub fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(queues: Vec<Queue>) -> DiskStats {
        DiskStats { queues, ..DiskStats::default() }
    }

    #[test]
    fn rates_are_differences_over_the_time_between() {
        let before = disk(vec![Queue { reads: 100, read_bytes: 1_000_000, ..Queue::default() }]);
        let after = Queue { reads: 300, read_bytes: 9_000_000, worker_ns: 400_000, ..Queue::default() };
        let rates = of_disk(Some(&before), &disk(vec![after]), 2.0);
        assert_eq!((rates.reads_per_s, rates.read_mb_per_s), (100.0, 4.0));
        assert_eq!(rates.worker_us_per_request, Some(2.0));
    }

    #[test]
    fn queue_that_was_restarted_counts_what_it_did_since() {
        let before = disk(vec![Queue { writes: 1000, ..Queue::default() }]);
        let rates = of_disk(Some(&before), &disk(vec![Queue { writes: 10, ..Queue::default() }]), 1.0);
        assert_eq!(rates.writes_per_s, 10.0);
    }

    #[test]
    fn disk_without_requests_has_no_time_per_request() {
        let rates = of_disk(None, &disk(vec![Queue::default()]), 1.0);
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
