//! The placement of a disk, and the engines that it makes for each worker.
//!
//! `Placement → PlacedEngines → one Engine per worker → the engine that does the work`

use std::io;

use crate::engine::Engine;
use crate::placed::completion::{CompletionPlacement, HandOver};
use crate::placed::counters::PlacementCounters;
use crate::placed::limits::{EngineMaker, LEAST_SHARE};
use crate::placed::shared::SharedPlacement;

/// A worker's number. The server numbers workers in the order in which it starts them, and never reuses a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u32);

impl std::fmt::Display for WorkerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Which workers submit and complete a disk's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Each queue's own worker does both, with its own engine.
    #[default]
    Queue,
    /// Each queue's own worker submits, to one engine that all workers share behind a lock.
    Shared {
        /// A worker that submits also reaps the completions of all workers. If false, only the completion worker reaps.
        reap_on_submit: bool,
        /// The worker that sleeps on the engine; `None`: the first worker that served the disk.
        completion_worker: Option<WorkerId>,
    },
    /// One worker does both. The other workers hand their requests over to it.
    Completion {
        /// When workers hand their requests over.
        hand_over: HandOver,
        /// The worker that owns the engine; `None`: the first worker that served the disk.
        completion_worker: Option<WorkerId>,
    },
}

impl Placement {
    /// The completion worker that the operator requested.
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

/// A disk's placement and its counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlacementReport {
    /// The placement that the operator requested.
    pub placement: Placement,
    /// The current completion worker; `None` with [`Placement::Queue`], and while no queue runs.
    pub completion_worker: Option<WorkerId>,
    /// Counters since the placement was made.
    pub counters: PlacementCounters,
}

/// The engines of one placement: one for each worker that serves the disk.
#[derive(Debug)]
pub struct PlacedEngines {
    depth: u32,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Shared(SharedPlacement),
    Completion(CompletionPlacement),
}

impl PlacedEngines {
    /// `make` makes the engines of `depth` that do the work. For [`Placement::Shared`], they must be shareable
    /// ([`Engine::check_shareable`]).
    ///
    /// # Errors
    /// Returns `make` for [`Placement::Queue`], where each worker makes its own engine.
    pub fn new(placement: Placement, depth: u32, make: EngineMaker) -> Result<Self, EngineMaker> {
        let wanted = placement.completion_worker().map(|worker| worker.0);
        let kind = match placement {
            Placement::Queue => return Err(make),
            Placement::Shared { reap_on_submit, .. } => {
                Kind::Shared(SharedPlacement::new(make, depth, reap_on_submit, wanted))
            }
            Placement::Completion { hand_over, .. } => {
                Kind::Completion(CompletionPlacement::new(make, depth, hand_over, wanted))
            }
        };
        Ok(Self { depth, kind })
    }

    /// Makes the engine of one worker. The worker participates once it has started the engine.
    ///
    /// # Errors
    /// No free descriptor.
    pub fn engine(&self, worker: WorkerId) -> io::Result<Box<dyn Engine>> {
        match &self.kind {
            Kind::Shared(placement) => placement.engine(worker.0),
            Kind::Completion(placement) => placement.engine(worker.0),
        }
    }

    /// The placement, with the most recently requested completion worker.
    #[must_use]
    pub fn placement(&self) -> Placement {
        match &self.kind {
            Kind::Shared(placement) => Placement::Shared {
                reap_on_submit: placement.reap_on_submit(),
                completion_worker: placement.wanted().map(WorkerId),
            },
            Kind::Completion(placement) => Placement::Completion {
                hand_over: placement.policy(),
                completion_worker: placement.wanted().map(WorkerId),
            },
        }
    }

    /// The current completion worker.
    #[must_use]
    pub fn completion_worker(&self) -> Option<WorkerId> {
        let worker = match &self.kind {
            Kind::Shared(placement) => placement.completion_worker(),
            Kind::Completion(placement) => placement.completion_worker(),
        };
        worker.map(WorkerId)
    }

    /// Requests another completion worker; `None`: the workers choose. The change has no time limit.
    pub fn set_completion_worker(&self, worker: Option<WorkerId>) {
        let worker = worker.map(|worker| worker.0);
        match &self.kind {
            Kind::Shared(placement) => placement.set_completion_worker(worker),
            Kind::Completion(placement) => placement.set_completion_worker(worker),
        }
    }

    /// Limits how long the pending change of the completion worker may take, because no caller waits for it. After the
    /// limit the current completion worker keeps the role, and an error in the log names `disk`.
    pub fn limit_change(&self, disk: &str) {
        // `shared` changes its completion worker at once.
        if let Kind::Completion(placement) = &self.kind {
            placement.limit_change(disk);
        }
    }

    /// Maximum number of workers that may serve the disk's queues. Each needs its share of the depth, and so does a
    /// completion worker without such a queue.
    #[must_use]
    pub fn most_workers(&self) -> usize {
        let shares = usize::try_from(self.depth).unwrap_or(usize::MAX) / LEAST_SHARE;
        let reserved = usize::from(self.placement().completion_worker().is_some());
        shares.saturating_sub(reserved).max(1)
    }

    /// The placement and its counters.
    #[must_use]
    pub fn report(&self) -> PlacementReport {
        let counters = match &self.kind {
            Kind::Shared(placement) => placement.counters(),
            Kind::Completion(placement) => placement.counters(),
        };
        PlacementReport { placement: self.placement(), completion_worker: self.completion_worker(), counters }
    }
}
