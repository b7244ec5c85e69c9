//! Placement `completion`: one worker, the completion worker, carries out the ops of all workers.
//!
//! `owner.rs`: what the completion worker does, which owns the engine. `participant.rs`: the engine that each worker sees.

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

/// The placement. Clones are the same placement.
#[derive(Clone, Debug)]
pub struct CompletionPlacement(Arc<Group>);

impl CompletionPlacement {
    /// `wanted` becomes completion worker as soon as it takes part.
    pub fn new(make: EngineMaker, depth: u32, policy: HandOver, wanted: Option<u32>) -> Self {
        let registry = Registry { wanted, ..Registry::default() };
        Self(Arc::new(Group::new(make, depth, registry, Own { policy, busy: AtomicUsize::new(0) })))
    }

    /// The engine of a worker, which takes part as soon as it has started the engine.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn engine(&self, worker: u32) -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(Participant::new(Arc::clone(&self.0), worker)?))
    }

    /// Asks for another completion worker; `None`: the present one. The change takes place as soon as the ops in the engine
    /// have ended and that worker takes part.
    pub fn set_completion_worker(&self, worker: Option<u32>) {
        let mut registry = self.0.registry();
        registry.wanted = worker;
        registry.limited = None;
        registry.retry_all();
        self.0.changed(&registry);
    }

    /// Limits how long the change to the completion worker that was asked for may take. After that the present one
    /// stays, and an error line names `disk`.
    pub fn limit_change(&self, disk: &str) {
        let mut registry = self.0.registry();
        registry.limited = Some(disk.into());
        if registry.owner.is_some() && registry.owner != registry.wanted_owner() {
            self.0.changed(&registry);
        }
    }

    /// The completion worker that was asked for.
    pub fn wanted(&self) -> Option<u32> {
        self.0.registry().wanted
    }

    /// The completion worker now.
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
