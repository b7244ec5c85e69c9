//! The balancer's part of `stats`: which queues it moved, and why.

use std::time::{Duration, SystemTime};

use blk_server::{BalanceDecision, BalanceReport, MoveOutcome};
use serde::{Deserialize, Serialize};

use super::super::protocol::answer::ns;

/// What the balancer has done; null in `stats` if queues are not balanced.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Balance {
    /// Number of readings of the load. The balancer takes no readings while no worker is busy.
    pub readings: u64,
    pub moves: u64,
    /// Moves that failed.
    pub failed: u64,
    /// The latest decisions, oldest first.
    pub decisions: Vec<Decision>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Decision {
    /// Milliseconds since 1970 (UTC).
    pub at_ms: u64,
    pub disk: String,
    pub queue: u16,
    pub from: u32,
    pub to: u32,
    /// The reason as a sentence with figures.
    pub why: String,
    /// Time from the decision until the new worker served the queue; null if the queue was not moved.
    pub took_ns: Option<u64>,
    /// The reason why the queue was not moved.
    pub error: Option<String>,
}

impl Balance {
    pub fn new(report: &BalanceReport) -> Self {
        let BalanceReport { readings, moves, failed, ref decisions } = *report;
        Self { readings, moves, failed, decisions: decisions.iter().map(Decision::new).collect() }
    }
}

impl Decision {
    fn new(decision: &BalanceDecision) -> Self {
        let since_1970 = decision.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let (took_ns, error) = match &decision.outcome {
            MoveOutcome::Moved { took } => (Some(ns(*took)), None),
            MoveOutcome::Failed { error } => (None, Some(error.clone())),
        };
        Self {
            at_ms: u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX),
            disk: decision.disk.clone(),
            queue: decision.queue,
            from: decision.from.0,
            to: decision.to.0,
            why: decision.why.clone(),
            took_ns,
            error,
        }
    }
}
