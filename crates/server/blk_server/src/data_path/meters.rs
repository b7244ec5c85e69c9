//! Counters of queues and workers: written by one worker, read by anybody, never waited for.
//!
//! `plain numbers on the request path → stored once per pass → Server::report`
//!
//! - Relaxed loads and stores throughout: each number stands for itself, and has one writer at a time. A queue that
//!   moves takes its numbers along; the channel that it moves through orders the two writers.
//!
//! Not here: what is counted when (`queue/mod.rs`, `worker/mod.rs`), how it is told (`report.rs`).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::data_path::report::{QueueCounters, WorkerCounters};

/// Of one queue.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct QueueMeter {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    flushes: AtomicU64,
    other: AtomicU64,
    errors: AtomicU64,
    in_flight: AtomicU64,
    parked: AtomicU64,
    retries: AtomicU64,
    calls: AtomicU64,
    kicks: AtomicU64,
    moves: AtomicU64,
    worker_ns: AtomicU64,
}

impl QueueMeter {
    #[inline]
    pub(crate) fn store(&self, counted: &QueueCounters) {
        self.reads.store(counted.reads, Relaxed);
        self.read_bytes.store(counted.read_bytes, Relaxed);
        self.writes.store(counted.writes, Relaxed);
        self.written_bytes.store(counted.written_bytes, Relaxed);
        self.flushes.store(counted.flushes, Relaxed);
        self.other.store(counted.other, Relaxed);
        self.errors.store(counted.errors, Relaxed);
        self.in_flight.store(counted.in_flight, Relaxed);
        self.parked.store(counted.parked, Relaxed);
        self.retries.store(counted.retries, Relaxed);
        self.calls.store(counted.calls, Relaxed);
        self.kicks.store(counted.kicks, Relaxed);
        self.moves.store(counted.moves, Relaxed);
        self.worker_ns.store(nanoseconds(counted.worker_time), Relaxed);
    }

    pub(crate) fn read(&self) -> QueueCounters {
        QueueCounters {
            reads: self.reads.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            writes: self.writes.load(Relaxed),
            written_bytes: self.written_bytes.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            other: self.other.load(Relaxed),
            errors: self.errors.load(Relaxed),
            in_flight: self.in_flight.load(Relaxed),
            parked: self.parked.load(Relaxed),
            retries: self.retries.load(Relaxed),
            calls: self.calls.load(Relaxed),
            kicks: self.kicks.load(Relaxed),
            moves: self.moves.load(Relaxed),
            worker_time: Duration::from_nanos(self.worker_ns.load(Relaxed)),
        }
    }
}

/// Of one worker.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct WorkerMeter {
    /// The kernel's number of its thread; 0 until it runs.
    thread: AtomicU32,
    busy_passes: AtomicU64,
    idle_passes: AtomicU64,
    sleeps: AtomicU64,
    submission_ns: AtomicU64,
    completion_ns: AtomicU64,
}

impl WorkerMeter {
    /// Called by the worker's thread when it starts.
    pub(crate) fn runs_here(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.thread.store(thread.unsigned_abs(), Relaxed);
    }

    /// The kernel's number of the thread.
    pub(crate) fn thread(&self) -> u32 {
        self.thread.load(Relaxed)
    }

    #[inline]
    pub(crate) fn store(&self, counted: &WorkerCounters) {
        self.busy_passes.store(counted.busy_passes, Relaxed);
        self.idle_passes.store(counted.idle_passes, Relaxed);
        self.sleeps.store(counted.sleeps, Relaxed);
        self.submission_ns.store(nanoseconds(counted.submission_time), Relaxed);
        self.completion_ns.store(nanoseconds(counted.completion_time), Relaxed);
    }

    pub(crate) fn read(&self) -> WorkerCounters {
        let (cpu_time, wait_time) = scheduled(self.thread());
        WorkerCounters {
            busy_passes: self.busy_passes.load(Relaxed),
            idle_passes: self.idle_passes.load(Relaxed),
            sleeps: self.sleeps.load(Relaxed),
            cpu_time,
            wait_time,
            submission_time: Duration::from_nanos(self.submission_ns.load(Relaxed)),
            completion_time: Duration::from_nanos(self.completion_ns.load(Relaxed)),
        }
    }
}

#[inline]
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// How long a thread of this process ran, and how long it was ready but had no processor; zero if unknown.
fn scheduled(thread: u32) -> (Duration, Duration) {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).unwrap_or_default();
    let mut numbers = text.split_whitespace().map(|number| number.parse().unwrap_or(0));
    let mut next = || Duration::from_nanos(numbers.next().unwrap_or(0));
    (next(), next())
}
