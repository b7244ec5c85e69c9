//! State that the participants of placement `shared` share: the engine behind its lock, and the registry.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use qspinlock::PvQSpinLock;

use crate::placed::epoll_wait::WorkerWaker;
use crate::placed::group;
use crate::placed::routed_engine::{Outlet, RoutedEngine};

/// The data that the lock protects.
pub(super) struct SharedEngine {
    pub routed: RoutedEngine,
    /// One for each participant.
    pub outlets: Vec<Option<Outlet>>,
}

impl SharedEngine {
    pub fn start(group: &Group) -> io::Result<Self> {
        Ok(Self { routed: RoutedEngine::start(&group.make, group.depth, true)?, outlets: Vec::new() })
    }

    /// Puts all completions into the participants' rings.
    pub fn reap(&mut self, group: &Group) {
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
        // Relaxed: a hint for a completion worker that is awake. Before it sleeps, it checks under the lock.
        group.own.inside.store(routed.inner.in_flight(), Ordering::Relaxed);
    }

    /// Reaps completions, and starts the calls that follow from them.
    pub fn reap_and_submit(&mut self, group: &Group) -> io::Result<()> {
        self.reap(group);
        self.routed.inner.submit()
    }

    /// The wakers of participants with new completions, except for `own`. The caller wakes them after it unlocks.
    pub fn take_touched(&mut self, own: u32, wakers: &mut Vec<Arc<WorkerWaker>>) {
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
pub(super) struct Registry {
    /// The requested completion worker.
    pub wanted: Option<u32>,
    pub list: Vec<Entry>,
    pub next_id: u64,
}

/// A participant.
pub(super) struct Entry {
    pub id: u64,
    pub worker: u32,
    pub waker: Arc<WorkerWaker>,
}

impl Registry {
    /// The completion worker's entry: the requested worker, or the first.
    pub fn owner(&self) -> Option<&Entry> {
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

/// State that only `shared` has.
pub(super) struct Own {
    pub reap_on_submit: bool,
    pub engine: lock_api::Mutex<PvQSpinLock, Option<SharedEngine>>,
    /// Number of workers that are leaving and wait until the engine is empty. No op enters the engine meanwhile.
    pub leaving: AtomicUsize,
    /// Number of ops in the engine. A hint.
    pub inside: AtomicUsize,
}

pub(super) type Group = group::Group<Registry, Own>;
pub(super) type EngineGuard<'a> = lock_api::MutexGuard<'a, PvQSpinLock, Option<SharedEngine>>;

impl Group {
    /// Takes the lock, and counts the time spent waiting for it.
    #[inline]
    pub fn lock(&self) -> EngineGuard<'_> {
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
