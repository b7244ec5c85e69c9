//! Placement `completion`: one worker, the completion worker, carries out the ops of all workers.
//!
//! `owner.rs`: the completion worker's side, with the engine. `participant.rs`: the engine that each worker uses.

mod files;
mod owner;
mod participant;
mod policy;
mod registry;

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

pub use self::policy::{HandOver, ParseHandOverError};

use self::participant::Participant;
use self::registry::{Group, Own, Registry};
use crate::engine::Engine;
use crate::placed::counters::PlacementCounters;
use crate::placed::limits::EngineMaker;

/// The placement. Clones refer to the same placement.
#[derive(Clone, Debug)]
pub struct CompletionPlacement(Arc<Group>);

impl CompletionPlacement {
    /// `wanted` becomes the completion worker once it participates.
    pub fn new(make: EngineMaker, depth: u32, policy: HandOver, wanted: Option<u32>) -> Self {
        let registry = Registry { wanted, ..Registry::default() };
        Self(Arc::new(Group::new(make, depth, registry, Own { policy, busy: AtomicUsize::new(0) })))
    }

    /// Makes a worker's engine. The worker participates once it has started the engine.
    ///
    /// # Errors
    /// No free descriptor.
    pub fn engine(&self, worker: u32) -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(Participant::new(Arc::clone(&self.0), worker)?))
    }

    /// Requests another completion worker; `None`: the current one. The change takes place once the ops in the engine
    /// have ended and that worker participates.
    pub fn set_completion_worker(&self, worker: Option<u32>) {
        let mut registry = self.0.registry();
        registry.wanted = worker;
        registry.limited = None;
        registry.retry_all();
        self.0.changed(&registry);
    }

    /// Limits how long the pending change of the completion worker may take. After that the current one keeps the role,
    /// and an error in the log names `disk`.
    pub fn limit_change(&self, disk: &str) {
        let mut registry = self.0.registry();
        registry.limited = Some(disk.into());
        if registry.owner.is_some() && registry.owner != registry.wanted_owner() {
            self.0.changed(&registry);
        }
    }

    /// The requested completion worker.
    pub fn wanted(&self) -> Option<u32> {
        self.0.registry().wanted
    }

    /// The current completion worker.
    pub fn completion_worker(&self) -> Option<u32> {
        let mut registry = self.0.registry();
        let owner = registry.owner?;
        registry.entry(owner).map(|entry| entry.worker)
    }

    pub fn policy(&self) -> HandOver {
        self.0.own.policy
    }

    pub fn counters(&self) -> PlacementCounters {
        self.0.counters.read()
    }
}

#[cfg(test)]
mod tests;
