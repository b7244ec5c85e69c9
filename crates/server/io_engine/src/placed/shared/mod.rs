//! Placement `shared`: all workers of a disk use one engine behind a lock. It exists for comparison with a ring per
//! worker.
//!
//! `push → staged → submit: lock, engine → … → the worker that reaps → completion ring → reap`
//!
//! - The completion worker sleeps on the engine and reaps. With `reap_on_submit`, a worker that submits also reaps
//!   under the same lock. Completions of other workers go through those workers' rings, with one wake-up per batch.
//! - A worker takes the lock once per pass in which it has ops. The completion worker takes it while ops are in the
//!   engine.
//! - io_uring finishes a call in the thread that submitted it (task work). The kernel wakes that thread if it sleeps,
//!   even if another thread reaps. Linux AIO has no such dependency.
//! - When a thread ends, the kernel cancels the calls that it submitted, and these may belong to other workers' ops. A
//!   worker that leaves therefore waits until the engine is empty. The other workers stage their ops meanwhile.

mod participant;
mod shared_engine;

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use self::participant::Participant;
use self::shared_engine::{Group, Own, Registry};
use crate::engine::Engine;
use crate::placed::counters::PlacementCounters;
use crate::placed::limits::EngineMaker;

/// The placement. Clones refer to the same placement.
#[derive(Clone, Debug)]
pub struct SharedPlacement(Arc<Group>);

impl SharedPlacement {
    /// `wanted` becomes the completion worker once it participates.
    pub fn new(make: EngineMaker, depth: u32, reap_on_submit: bool, wanted: Option<u32>) -> Self {
        let own = Own {
            reap_on_submit,
            engine: lock_api::Mutex::new(None),
            leaving: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
        };
        Self(Arc::new(Group::new(make, depth, Registry { wanted, ..Registry::default() }, own)))
    }

    /// Makes a worker's engine. The worker participates once it has started the engine.
    ///
    /// # Errors
    /// No free descriptor.
    pub fn engine(&self, worker: u32) -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(Participant::new(Arc::clone(&self.0), worker)?))
    }

    /// Requests another completion worker; `None`: the first worker. The change takes place at once, or once that
    /// worker participates.
    pub fn set_completion_worker(&self, worker: Option<u32>) {
        let mut registry = self.0.registry();
        let before = registry.owner().map(|entry| entry.id);
        registry.wanted = worker;
        self.0.counters.moves.add(u64::from(registry.owner().map(|entry| entry.id) != before));
        self.0.changed(&registry);
    }

    /// The requested completion worker.
    pub fn wanted(&self) -> Option<u32> {
        self.0.registry().wanted
    }

    /// The current completion worker.
    pub fn completion_worker(&self) -> Option<u32> {
        self.0.registry().owner().map(|entry| entry.worker)
    }

    pub fn reap_on_submit(&self) -> bool {
        self.0.own.reap_on_submit
    }

    pub fn counters(&self) -> PlacementCounters {
        self.0.counters.read()
    }
}

#[cfg(test)]
mod tests;
