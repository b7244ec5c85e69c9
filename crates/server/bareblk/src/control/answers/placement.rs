//! A disk's placement as `stats` and `placement` report it.

use blk_server::{AdminError, PlacementReport, ServerReport};
use serde::{Deserialize, Serialize};

use super::super::protocol::answer::{Fault, ns};
use super::super::refused::Refused;

/// A disk's placement; null in a report if every worker completes the requests that it submits.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Placement {
    /// The placement as configured, for example `completion, adaptive`.
    pub placement: String,
    /// The current completion worker; null while no queue runs.
    pub completion_worker: Option<u32>,
    /// The configured completion worker; null: the workers choose.
    pub wanted_completion_worker: Option<u32>,
    /// The number of batches handed over; `ops` counts the operations in them.
    pub hand_overs: u64,
    pub ops: u64,
    pub completion_worker_wake_ups: u64,
    pub spared_wake_ups: u64,
    /// Completions passed to other workers.
    pub passed: u64,
    pub worker_wake_ups: u64,
    /// Changes of the completion worker.
    pub moves: u64,
    pub locked: u64,
    pub contended: u64,
    pub lock_wait_ns: u64,
}

impl Placement {
    pub fn new(report: &PlacementReport) -> Option<Self> {
        let counters = &report.counters;
        (report.placement != blk_server::Placement::Queue).then(|| Self {
            placement: report.placement.to_string(),
            completion_worker: report.completion_worker.map(|worker| worker.0),
            wanted_completion_worker: report.placement.completion_worker().map(|worker| worker.0),
            hand_overs: counters.hand_overs,
            ops: counters.ops,
            completion_worker_wake_ups: counters.owner_wake_ups,
            spared_wake_ups: counters.spared_wake_ups,
            passed: counters.passed,
            worker_wake_ups: counters.participant_wake_ups,
            moves: counters.moves,
            locked: counters.locked,
            contended: counters.contended,
            lock_wait_ns: ns(counters.lock_wait),
        })
    }
}

/// The answer to a `placement` request that changes nothing.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PlacementAnswer {
    /// Null for placement `queue`.
    pub placement: Option<Placement>,
}

impl PlacementAnswer {
    pub fn of(disk: &str, report: &ServerReport) -> Result<Self, Fault> {
        let known = report.disks.iter().find(|known| known.name == disk);
        let known = known.ok_or_else(|| Refused::Server(AdminError::NoDisk { name: disk.to_owned() }))?;
        Ok(Self { placement: Placement::new(&known.placement) })
    }
}
