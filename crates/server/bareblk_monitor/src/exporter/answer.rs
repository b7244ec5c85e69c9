//! What the exporter reads of a server's answers: only the fields that become metrics, because answers are long.
//!
//! An answer may lack any of them: the server may have another version.

use serde::Deserialize;

use crate::limit::Limit;

/// The answer to `stats`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Processor time of the whole process.
    pub process_cpu_ns: u64,
    pub workers: Vec<Worker>,
    pub disks: Vec<Disk>,
    /// Null if the balancer is off.
    pub balance: Option<Balance>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Worker {
    pub worker: u32,
    pub queues: u64,
    pub busy_passes: u64,
    pub idle_passes: u64,
    pub sleeps: u64,
    pub cpu_ns: u64,
    pub wait_ns: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Disk {
    pub name: String,
    pub image: String,
    pub socket: String,
    pub engine: String,
    pub size_bytes: u64,
    pub read_only: bool,
    pub failed: bool,
    pub sessions: u64,
    pub queues_running: u64,
    pub totals: Totals,
    pub latency: Latency,
    pub throttling: Throttling,
}

/// The counters of a disk, which outlive its queues.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Totals {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub written_bytes: u64,
    pub flushes: u64,
    pub other: u64,
    pub errors: u64,
    pub in_flight: u64,
    pub held: u64,
    pub retries: u64,
    pub held_ns: u64,
    pub slow: u64,
    pub calls: u64,
    pub kicks: u64,
    pub moves: u64,
    pub worker_ns: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Latency {
    pub read: Times,
    pub write: Times,
    pub flush: Times,
    pub other: Times,
}

impl Latency {
    pub fn kinds(&self) -> [(&'static str, &Times); 4] {
        [("read", &self.read), ("write", &self.write), ("flush", &self.flush), ("other", &self.other)]
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Times {
    pub sum_ns: u64,
    /// A bucket: the upper bound of its requests' times, and the number of these requests.
    pub buckets: Vec<(u64, u64)>,
}

/// The limits of a disk, and how long requests waited for them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Throttling {
    pub limits: Vec<Limit>,
    /// The group whose limits the disk shares.
    pub group: Option<String>,
    pub throttled_requests: u64,
    pub throttled_ns: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Balance {
    pub moves: u64,
    pub failed: u64,
}

/// The answer to `limit`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Limits {
    pub groups: Vec<Group>,
}

/// Disks that share limits.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Group {
    pub group: String,
    pub limits: Vec<Limit>,
}
