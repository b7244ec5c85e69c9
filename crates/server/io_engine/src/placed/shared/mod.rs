//! Placement `shared`: one engine for all workers of a disk, behind a lock. For comparison with a ring per worker.
//!
//! `push → staged → submit: lock, engine → … → the worker that reaps → completion ring → reap`
//!
//! - The completion worker sleeps on the engine and reaps. With `reap_on_submit` a worker that submits also reaps, under
//!   the same lock. Another worker's completions go through that worker's ring, with one wake-up per batch.
//! - A worker takes the lock once per pass in which it has ops. The completion worker takes it when ops are in the engine.
//! - io_uring runs the rest of a call in the thread that submitted it (task work). The kernel wakes that thread if it
//!   sleeps, even if another thread reaps. Linux AIO needs no thread for this.
//! - When a thread ends, the kernel cancels the calls that it submitted, which may be other workers' continued calls. A
//!   worker that leaves therefore waits until the engine is empty. The other workers stage their ops meanwhile.

mod participant;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use qspinlock::PvQSpinLock;

use self::participant::Participant;
use crate::engine::Engine;
use crate::placed::epoll_wait::WorkerWaker;
use crate::placed::group;
use crate::placed::routed_engine::{Outlet, RoutedEngine};
use crate::placed::{EngineMaker, PlacementCounters};

/// What the lock protects.
struct SharedEngine {
    routed: RoutedEngine,
    /// One for each participant.
    outlets: Vec<Option<Outlet>>,
}

impl SharedEngine {
    fn start(group: &Group) -> io::Result<Self> {
        Ok(Self { routed: RoutedEngine::start(&group.make, group.depth, true)?, outlets: Vec::new() })
    }

    /// Puts all completions into the participants' rings.
    fn reap(&mut self, group: &Group) {
        let Self { routed, outlets } = self;
        let mut passed = 0;
        routed.reap(|channel, completion| {
            let Some(place) = outlets.get_mut(channel as usize) else { return };
            let Some(outlet) = place else { return };
            passed += 1;
            outlet.inside -= 1;
            outlet.pass_on(completion);
            place.take_if(|outlet| outlet.gone && outlet.inside == 0);
        });
        group.counters.passed.add(passed);
        // Relaxed: a hint for a completion worker that is awake. Before it sleeps it looks under the lock.
        group.own.inside.store(routed.inner.in_flight(), Ordering::Relaxed);
    }

    /// Takes the completions, and starts the calls that follow from them.
    fn reap_and_submit(&mut self, group: &Group) -> io::Result<()> {
        self.reap(group);
        self.routed.inner.submit()
    }

    /// The wakers of participants with new completions, except for `own`. The caller wakes them after it unlocks.
    fn take_touched(&mut self, own: u32, wakers: &mut Vec<Arc<WorkerWaker>>) {
        for (index, outlet) in (0..).zip(&mut self.outlets) {
            if let Some(outlet) = outlet
                && std::mem::take(&mut outlet.touched)
                && index != own
            {
                wakers.push(Arc::clone(&outlet.waker));
            }
        }
    }
}

#[derive(Default)]
struct Registry {
    /// The completion worker that was asked for.
    wanted: Option<u32>,
    list: Vec<Entry>,
    next_id: u64,
}

/// A participant.
struct Entry {
    id: u64,
    worker: u32,
    waker: Arc<WorkerWaker>,
}

impl Registry {
    /// The completion worker's entry: the worker that was asked for, or the first.
    fn owner(&self) -> Option<&Entry> {
        let asked_for = self.list.iter().find(|entry| Some(entry.worker) == self.wanted);
        asked_for.or_else(|| self.list.first())
    }
}

impl group::Registry for Registry {
    fn participants(&self) -> usize {
        self.list.len()
    }

    fn wakers(&self) -> impl Iterator<Item = &Arc<WorkerWaker>> {
        self.list.iter().map(|entry| &entry.waker)
    }
}

/// What `shared` has beside the registry.
struct Own {
    reap_on_submit: bool,
    engine: lock_api::Mutex<PvQSpinLock, Option<SharedEngine>>,
    /// Workers that leave and wait until the engine is empty. No op goes into the engine meanwhile.
    leaving: AtomicUsize,
    /// Ops in the engine: a hint.
    inside: AtomicUsize,
}

type Group = group::Group<Registry, Own>;
type EngineGuard<'a> = lock_api::MutexGuard<'a, PvQSpinLock, Option<SharedEngine>>;

impl Group {
    /// Takes the lock, and counts the time that it waits for it.
    #[inline]
    fn lock(&self) -> EngineGuard<'_> {
        self.counters.locked.add(1);
        match self.own.engine.try_lock() {
            Some(engine) => engine,
            None => self.lock_contended(),
        }
    }

    #[cold]
    fn lock_contended(&self) -> EngineGuard<'_> {
        let asked = Instant::now();
        let engine = self.own.engine.lock();
        self.counters.contended.add(1);
        self.counters.lock_wait_ns.add(u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX));
        engine
    }
}

/// The placement. Clones are the same placement.
#[derive(Clone, Debug)]
pub struct SharedPlacement(Arc<Group>);

impl SharedPlacement {
    /// `wanted` becomes completion worker as soon as it takes part.
    pub fn new(make: EngineMaker, depth: u32, reap_on_submit: bool, wanted: Option<u32>) -> Self {
        let own = Own {
            reap_on_submit,
            engine: lock_api::Mutex::new(None),
            leaving: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
        };
        Self(Arc::new(Group::new(make, depth, Registry { wanted, ..Registry::default() }, own)))
    }

    /// The engine of a worker, which takes part as soon as it has started the engine.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn engine(&self, worker: u32) -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(Participant::new(Arc::clone(&self.0), worker)?))
    }

    /// Asks for another completion worker; `None`: the first worker. The change takes place at once, or as soon as that
    /// worker takes part.
    pub fn set_completion_worker(&self, worker: Option<u32>) {
        let mut registry = self.0.registry();
        let before = registry.owner().map(|entry| entry.id);
        registry.wanted = worker;
        self.0.counters.moves.add(u64::from(registry.owner().map(|entry| entry.id) != before));
        self.0.changed(&registry);
    }

    /// The completion worker that was asked for.
    pub fn wanted(&self) -> Option<u32> {
        self.0.registry().wanted
    }

    /// The completion worker now.
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
