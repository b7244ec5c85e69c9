//! Snapshots of a server's counters, taken while its workers run.
//!
//! `Worker (single writer, relaxed stores) → counters → Server::report → ctl, balancer, tests`

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use io_engine::PlacementReport;

use crate::data_path::counters::{QueueCounters, WorkerCounters};
use crate::data_path::disk::totals::DiskTotals;
use crate::data_path::queue::parked::ParkPolicy;
use crate::data_path::throttle::disk_throttle::LimitReport;
use crate::data_path::throttle::limits::{DiskLimits, LimitSettings};
use crate::data_path::worker::worker_options::{WorkerId, WorkerOptions};

/// A snapshot of a whole server.
#[derive(Clone, Debug, Default)]
pub struct ServerReport {
    /// Sorted by id.
    pub workers: Vec<WorkerReport>,
    /// The disks, in the order in which they were added.
    pub disks: Vec<DiskReport>,
    /// Groups of disks that share limits, by name.
    pub groups: Vec<GroupReport>,
    /// `None`: queues are not balanced.
    pub balance: Option<BalanceReport>,
}

/// One worker.
#[derive(Clone, Debug)]
pub struct WorkerReport {
    /// The worker's number.
    pub id: WorkerId,
    /// The worker's options.
    pub options: WorkerOptions,
    /// NUMA node of the worker's CPUs and memory. `None`: several nodes, or unknown.
    pub node: Option<u32>,
    /// Number of queues that the worker serves.
    pub queues: usize,
    /// The worker's counters.
    pub counters: WorkerCounters,
}

/// One disk.
#[derive(Clone, Debug)]
pub struct DiskReport {
    /// The disk's name.
    pub name: String,
    /// The path of the disk's image.
    pub image: PathBuf,
    /// The path of the disk's socket.
    pub socket: PathBuf,
    /// Capacity, in sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// The number of the image's layers, if it is mapped through tables (qcow2); `None`: it is raw.
    pub layers: Option<usize>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether the disk refuses all writes: a sync failed, or its storage refuses this server.
    pub failed: bool,
    /// Whether the disk's storage refuses this server for good, because another client has taken the disk over.
    pub refused: bool,
    /// Which failed requests are parked; `None`: no failed request is parked.
    pub park: Option<ParkPolicy>,
    /// Name of the disk's engine source.
    pub engine: String,
    /// The disk's placement, with its counters.
    pub placement: PlacementReport,
    /// The disk's limits and their use.
    pub throttling: DiskThrottling,
    /// Number of connected front-ends.
    pub sessions: usize,
    /// Number of queues offered.
    pub queues_offered: u16,
    /// The totals of all its queues since the disk was added, including those from servers before a live upgrade.
    pub totals: DiskTotals,
    /// How long a request must take to count as slow; `None`: no request does.
    pub slow_limit: Option<Duration>,
    /// Running queues.
    pub queues: Vec<QueueReport>,
}

/// The limits of a disk.
#[derive(Clone, Debug, Default)]
pub struct DiskThrottling {
    /// As the operator set them.
    pub limits: DiskLimits,
    /// The disk's own limits in effect.
    pub rates: Vec<LimitReport>,
    /// Requests that waited for the limits of the disk or its group, at the head of their queue.
    pub throttled_requests: u64,
    /// Total time for which queues waited.
    pub throttled_time: Duration,
}

/// A group of disks that share limits.
#[derive(Clone, Debug)]
pub struct GroupReport {
    /// The group's name.
    pub name: String,
    /// As the operator set them.
    pub limits: LimitSettings,
    /// The limits in effect.
    pub rates: Vec<LimitReport>,
    /// The names of the group's disks.
    pub disks: Vec<String>,
}

/// One running queue.
#[derive(Clone, Debug)]
pub struct QueueReport {
    /// The queue's number on the disk.
    pub index: u16,
    /// The worker that serves the queue.
    pub worker: WorkerId,
    /// Number of descriptors.
    pub size: u16,
    /// The queue's counters.
    pub counters: QueueCounters,
}

/// The balancer's activity.
#[derive(Clone, Debug, Default)]
pub struct BalanceReport {
    /// Number of readings taken. The balancer takes none while no worker is busy.
    pub readings: u64,
    /// Queues moved.
    pub moves: u64,
    /// Moves that failed.
    pub failed: u64,
    /// The last 64 decisions, oldest first.
    pub decisions: Vec<BalanceDecision>,
}

/// A queue that the balancer moved or tried to move.
#[derive(Clone, Debug)]
pub struct BalanceDecision {
    /// The time of the decision.
    pub at: SystemTime,
    /// The disk's name.
    pub disk: String,
    /// The queue's number.
    pub queue: u16,
    /// The worker that served it.
    pub from: WorkerId,
    /// The worker that should serve it.
    pub to: WorkerId,
    /// The reason, with figures, for the operator.
    pub why: String,
    /// The result.
    pub outcome: MoveOutcome,
}

/// The result of a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveOutcome {
    /// The queue was moved.
    Moved {
        /// Time from the decision until the new worker served it.
        took: Duration,
    },
    /// The queue stays on its worker.
    Failed {
        /// Why the queue could not be moved.
        error: String,
    },
}
