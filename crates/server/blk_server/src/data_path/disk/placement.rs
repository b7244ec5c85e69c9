//! Placements: where the requests of a disk are submitted and completed, among its workers.
//!
//! `DiskConfig::engine = EngineSource::placed(…) → each worker's engine of that source → io_engine's placements → the
//! real engine`
//!
//! - A placed source is one disk's (or that of several disks which are to share a completion worker); without one, each
//!   worker has an engine of its own, and nothing is shared.
//! - A completion worker that is asked for by number hosts the engine also without a queue of the disk, from the
//!   disk's first running queue on until its last one stops.
//!
//! Not here: how ops go from worker to worker (`io_engine`), which worker serves which queue (`assignment/mod.rs`).

use std::io;

use io_engine::{CompletionPlacement, Engine, EngineMaker, HandOver, PlacementCounters, SharedPlacement};

use crate::data_path::worker::worker_options::WorkerId;

/// Where a disk's requests are carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// By the worker of their queue, with an engine of its own.
    #[default]
    Queue,
    /// By the worker of their queue, with one engine for all, behind a lock.
    Shared {
        /// Whoever submits also takes completions, everybody's; otherwise only the completion worker does.
        reap_on_submit: bool,
        /// Who sleeps on the engine; `None`: whoever serves the disk first.
        completion_worker: Option<WorkerId>,
    },
    /// By one worker, to which the others hand theirs over.
    Completion {
        /// When.
        hand_over: HandOver,
        /// Which; `None`: whoever serves the disk first.
        completion_worker: Option<WorkerId>,
    },
}

impl Placement {
    /// The completion worker that is asked for.
    #[must_use]
    pub fn completion_worker(&self) -> Option<WorkerId> {
        match *self {
            Self::Queue => None,
            Self::Shared { completion_worker, .. } | Self::Completion { completion_worker, .. } => {
                completion_worker
            }
        }
    }
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Queue => f.write_str("queue"),
            Self::Shared { reap_on_submit: true, .. } => f.write_str("shared"),
            Self::Shared { reap_on_submit: false, .. } => f.write_str("shared, no reap on submit"),
            Self::Completion { hand_over, .. } => write!(f, "completion, {hand_over}"),
        }
    }
}

/// What a disk's placement is, and what it did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlacementReport {
    /// As it was asked for.
    pub placement: Placement,
    /// The completion worker now; `None` without one, and while no queue runs.
    pub completion_worker: Option<WorkerId>,
    /// Since its start.
    pub counters: PlacementCounters,
}

/// A placement at work.
#[derive(Debug)]
pub(crate) enum Placed {
    Shared(SharedPlacement),
    Completion(CompletionPlacement),
}

impl Placed {
    /// `None` for [`Placement::Queue`].
    pub(crate) fn new(placement: &Placement, depth: u32, make: EngineMaker) -> Result<Self, EngineMaker> {
        let host = placement.completion_worker().map(|worker| worker.0);
        match *placement {
            Placement::Queue => Err(make),
            Placement::Shared { reap_on_submit, .. } => {
                Ok(Self::Shared(SharedPlacement::new(make, depth, reap_on_submit, host)))
            }
            Placement::Completion { hand_over, .. } => {
                Ok(Self::Completion(CompletionPlacement::new(make, depth, hand_over, host)))
            }
        }
    }

    pub(crate) fn engine(&self, worker: WorkerId) -> io::Result<Box<dyn Engine>> {
        match self {
            Self::Shared(placed) => placed.engine(worker.0),
            Self::Completion(placed) => placed.engine(worker.0),
        }
    }

    pub(crate) fn set_completion_worker(&self, worker: Option<WorkerId>) {
        let worker = worker.map(|worker| worker.0);
        match self {
            Self::Shared(placed) => placed.set_completion_worker(worker),
            Self::Completion(placed) => placed.set_completion_worker(worker),
        }
    }

    pub(crate) fn completion_worker(&self) -> Option<WorkerId> {
        let worker = match self {
            Self::Shared(placed) => placed.completion_worker(),
            Self::Completion(placed) => placed.completion_worker(),
        };
        worker.map(WorkerId)
    }

    pub(crate) fn counters(&self) -> PlacementCounters {
        match self {
            Self::Shared(placed) => placed.counters(),
            Self::Completion(placed) => placed.counters(),
        }
    }
}

/// Why there is nothing to bind.
pub(crate) fn not_placed() -> io::Error {
    let text = "its placement is queue, where every worker completes what it submits: serve it with --placement \
                completion or shared";
    io::Error::new(io::ErrorKind::Unsupported, text)
}
