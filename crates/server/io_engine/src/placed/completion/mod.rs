//! `completion`: the ops of all workers are carried out by one of them, the one that handles the completions.
//!
//! Not here: a worker's side (`participant.rs`), the engine (`owner.rs`).

mod files;
pub(in crate::placed) mod owner;
mod participant;
mod policy;
mod registry;

use std::io;
use std::sync::Arc;

pub use self::policy::{HandOver, ParseHandOverError};

use self::participant::Participant;
use self::registry::Group;
use crate::engine::Engine;
use crate::placed::{EngineMaker, PlacementCounters};

/// See the file's head. Clones are the same placement.
#[derive(Clone, Debug)]
pub struct CompletionPlacement(Arc<Group>);

impl CompletionPlacement {
    /// With engines of `depth` from `make`; `owner`: the worker to be completion worker as soon as it takes part.
    pub fn new(make: EngineMaker, depth: u32, policy: HandOver, owner: Option<u32>) -> Self {
        Self(Arc::new(Group::new(make, depth, policy, owner)))
    }

    /// The engine of a worker, which takes part once it has started it.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn engine(&self, worker: u32) -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(Participant::new(Arc::clone(&self.0), worker)?))
    }

    /// Asks for another completion worker; `None`: whoever is it. It changes once the ops in the engine are done, and as
    /// soon as that worker takes part.
    pub fn set_completion_worker(&self, worker: Option<u32>) {
        let mut registry = self.0.lock();
        registry.wanted = worker;
        registry.limited = None;
        registry.forgive();
        self.0.changed(&registry);
    }

    /// Limits how long the change to the completion worker that was asked for may take. After that the present one
    /// stays, and an error line names `disk`.
    pub fn limit_change(&self, disk: &str) {
        let mut registry = self.0.lock();
        registry.limited = Some(disk.into());
        if registry.owner.is_some() && registry.owner != registry.wanted_owner() {
            self.0.changed(&registry);
        }
    }

    /// The completion worker that was asked for.
    pub fn wanted(&self) -> Option<u32> {
        self.0.lock().wanted
    }

    /// The completion worker now.
    pub fn completion_worker(&self) -> Option<u32> {
        let mut registry = self.0.lock();
        let owner = registry.owner?;
        registry.entry(owner).map(|entry| entry.worker)
    }

    /// When ops are handed over.
    pub fn policy(&self) -> HandOver {
        self.0.policy
    }

    /// What was done so far.
    pub fn counters(&self) -> PlacementCounters {
        self.0.counters.read()
    }
}

#[cfg(test)]
mod tests;
