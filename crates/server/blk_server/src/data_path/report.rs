//! What a server reports about itself: a reading of its counters, taken while its workers go on.
//!
//! `Worker (single writer, relaxed stores) → counters → Server::report → ctl, balancer, tests`
//!
//! Not here: the counters (`counters.rs`), how the report is sent or printed (`bareblk`).

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use io_engine::PlacementReport;

use crate::data_path::counters::{QueueCounters, WorkerCounters};
use crate::data_path::queue::parked::ParkPolicy;
use crate::data_path::worker::worker_options::{WorkerId, WorkerOptions};

/// A whole server.
#[derive(Clone, Debug, Default)]
pub struct ServerReport {
    /// In the order of their numbers.
    pub workers: Vec<WorkerReport>,
    /// In the order in which they were added.
    pub disks: Vec<DiskReport>,
    /// `None`: queues are not balanced.
    pub balance: Option<BalanceReport>,
}

/// One worker.
#[derive(Clone, Debug)]
pub struct WorkerReport {
    /// Its number.
    pub id: WorkerId,
    /// As it was made.
    pub options: WorkerOptions,
    /// NUMA node of its CPUs, and so of its memory; `None`: bound to no single node, or unknown.
    pub node: Option<u32>,
    /// Queues that it serves now.
    pub queues: usize,
    /// What it has done.
    pub counters: WorkerCounters,
}

/// One disk.
#[derive(Clone, Debug)]
pub struct DiskReport {
    /// Its name.
    pub name: String,
    /// Its image.
    pub image: PathBuf,
    /// Where front-ends connect.
    pub socket: PathBuf,
    /// Capacity, in sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// A sync failed: nothing is written any more.
    pub failed: bool,
    /// Which requests that the host failed are parked.
    pub park: Option<ParkPolicy>,
    /// Name of its engine's source.
    pub engine: String,
    /// Where its requests are carried out, and what that came to.
    pub placement: PlacementReport,
    /// Front-ends connected.
    pub sessions: usize,
    /// Queues offered.
    pub queues_offered: u16,
    /// Queues that run now.
    pub queues: Vec<QueueReport>,
}

/// One running queue.
#[derive(Clone, Debug)]
pub struct QueueReport {
    /// Its number on the disk.
    pub index: u16,
    /// Who serves it.
    pub worker: WorkerId,
    /// Descriptors.
    pub size: u16,
    /// What it has done.
    pub counters: QueueCounters,
}

/// What the balancer has done.
#[derive(Clone, Debug, Default)]
pub struct BalanceReport {
    /// Readings that it took: none while no worker is busy.
    pub readings: u64,
    /// Queues moved.
    pub moves: u64,
    /// Moves that did not come about.
    pub failed: u64,
    /// The last 64, oldest first.
    pub decisions: Vec<BalanceDecision>,
}

/// A queue that the balancer moved, or wanted to.
#[derive(Clone, Debug)]
pub struct BalanceDecision {
    /// When.
    pub at: SystemTime,
    /// The disk's name.
    pub disk: String,
    /// The queue's number.
    pub queue: u16,
    /// Who served it.
    pub from: WorkerId,
    /// Who should.
    pub to: WorkerId,
    /// For people, with the figures.
    pub why: String,
    /// What came of it.
    pub outcome: MoveOutcome,
}

/// What came of a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveOutcome {
    /// It was moved.
    Moved {
        /// From the decision until the other worker had it.
        took: Duration,
    },
    /// It stays where it was.
    Failed {
        /// Why.
        error: String,
    },
}
