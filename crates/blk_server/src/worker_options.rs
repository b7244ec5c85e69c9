//! How a worker's thread runs: its CPUs, its share of them, its control group.
//!
//! `WorkerOptions → Applied on the worker's own thread, before it allocates anything → its engine, queues, buffers`
//!
//! Not here: what it does (`worker.rs`).

use std::path::PathBuf;

/// A worker's number: given once, in the order of their making, and never given again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u32);

impl std::fmt::Display for WorkerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The scheduling class of a worker's thread (sched(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulingClass {
    /// `SCHED_OTHER`.
    Other,
    /// `SCHED_BATCH`.
    Batch,
    /// `SCHED_IDLE`.
    Idle,
    /// `SCHED_FIFO` with this priority, 1 to 99.
    Fifo(u8),
    /// `SCHED_RR` with this priority, 1 to 99.
    RoundRobin(u8),
}

/// How a worker's thread runs; everything left out stays as the process has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerOptions {
    /// CPUs it may run on, ascending; empty: wherever the process may.
    pub cpus: Vec<u32>,
    /// -20 to 19.
    pub nice: Option<i8>,
    /// See there.
    pub class: Option<SchedulingClass>,
    /// A control group (version 2, threaded), as a folder below the mount of the hierarchy.
    pub cgroup: Option<PathBuf>,
}
