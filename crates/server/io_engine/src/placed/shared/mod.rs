//! `shared`: one engine for all workers of a disk, behind a lock: what people did before they had a ring each.
//!
//! `push → staged → submit: lock, engine → … → whoever reaps → completion ring → reap`
//!
//! - The completion worker (the owner) sleeps on the engine and reaps. With `reap_on_submit` whoever submits reaps too,
//!   under the same lock; what is another worker's goes through that worker's ring, with one wake-up per batch.
//! - A worker takes the lock once per pass in which it has ops, and the owner when there is something in the engine.
//! - An io_uring runs what is left to do of a call in the thread that submitted it (task work): a submitter that sleeps
//!   is woken for that by the kernel, whoever then reaps. Linux AIO needs nobody.
//! - A thread that ends takes the calls it submitted with it, maybe other workers' continued ones: a worker that leaves
//!   first has the engine run dry, while the others keep what they have for it.
//!
//! Not here: the lock (`qspinlock`), a worker's side (`participant.rs`).

mod participant;

use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use qspinlock::PvQSpinLock;
use rtrb::Producer;

use self::participant::Participant;
use crate::engine::{Completion, Engine, Event};
use crate::placed::counters::Counters;
use crate::placed::epoll_wait::WorkerWaker;
use crate::placed::routes::{Route, Routes};
use crate::placed::{EngineMaker, PlacementCounters, share};

/// How completions find a worker.
struct Channel {
    done: Producer<Completion>,
    waker: Arc<WorkerWaker>,
    inside: usize,
    touched: bool,
    gone: bool,
}

/// What is behind the lock.
struct SharedEngine {
    engine: Box<dyn Engine>,
    routes: Routes,
    channels: Vec<Option<Channel>>,
    events: Vec<Event>,
}

impl SharedEngine {
    fn open(group: &Group) -> io::Result<Self> {
        let mut engine = (group.make)()?;
        engine.check_shareable()?;
        engine.start()?;
        engine.serve_one_disk();
        let events = Vec::with_capacity(group.depth as usize + 1);
        Ok(Self { engine, routes: Routes::new(group.depth), channels: Vec::new(), events })
    }

    fn add(&mut self, channel: Channel) -> u32 {
        let index = self.channels.iter().position(Option::is_none).unwrap_or(self.channels.len());
        if index == self.channels.len() {
            self.channels.push(None);
        }
        self.channels[index] = Some(channel);
        #[allow(clippy::cast_possible_truncation)] // a handful
        let number = index as u32;
        number
    }

    /// Everything that is complete, to the workers' rings.
    fn reap(&mut self, group: &Group) {
        self.engine.reap(&mut self.events);
        let mut passed = 0;
        for event in self.events.drain(..) {
            let Event::Completed(mut completion) = event else { continue };
            let Route { channel, token } = self.routes.give_back(completion.token);
            let Some(place) = self.channels.get_mut(channel as usize) else { continue };
            let Some(channel) = place else { continue };
            completion.token = token;
            passed += 1;
            channel.inside -= 1;
            if channel.gone {
                if channel.inside == 0 {
                    *place = None;
                }
                continue;
            }
            let pushed = channel.done.push(completion);
            debug_assert!(pushed.is_ok(), "the ring is as long as a worker's ops in flight may be many");
            channel.touched = true;
        }
        group.counters.passed.add(passed);
        // Relaxed: a hint for a owner that is awake; before it sleeps it looks under the lock.
        group.inside.store(self.engine.in_flight(), Ordering::Relaxed);
    }

    /// Those who were passed something, but for the worker on channel `own`: to be signalled when the lock is free again.
    fn take_touched(&mut self, own: u32, wakers: &mut Vec<Arc<WorkerWaker>>) {
        for (index, channel) in (0..).zip(&mut self.channels) {
            if let Some(channel) = channel
                && std::mem::take(&mut channel.touched)
                && index != own
            {
                wakers.push(Arc::clone(&channel.waker));
            }
        }
    }
}

/// Who takes part.
#[derive(Default)]
struct Registry {
    wanted: Option<u32>,
    list: Vec<Entry>,
    next_id: u64,
}

struct Entry {
    id: u64,
    worker: u32,
    waker: Arc<WorkerWaker>,
}

impl Registry {
    /// Whoever was asked for, or was first.
    fn owner(&self) -> Option<&Entry> {
        let asked_for = self.list.iter().find(|entry| Some(entry.worker) == self.wanted);
        asked_for.or_else(|| self.list.first())
    }
}

struct Group {
    make: EngineMaker,
    depth: u32,
    reap_on_submit: bool,
    shared: lock_api::Mutex<PvQSpinLock, Option<SharedEngine>>,
    registry: Mutex<Registry>,
    changes: AtomicU64,
    share: AtomicUsize,
    /// Workers that leave and wait for the engine to run dry: nothing new goes in.
    leaving: AtomicUsize,
    /// Ops in the engine: a hint.
    inside: AtomicUsize,
    counters: Counters,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { depth, reap_on_submit, .. } = self;
        let mut shown = f.debug_struct("Group");
        shown.field("depth", depth).field("reap_on_submit", reap_on_submit).finish_non_exhaustive()
    }
}

type EngineGuard<'a> = lock_api::MutexGuard<'a, PvQSpinLock, Option<SharedEngine>>;

impl Group {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock. Waiting is timed where there is any.
    #[inline]
    fn lock(&self) -> EngineGuard<'_> {
        self.counters.locked.add(1);
        match self.shared.try_lock() {
            Some(shared) => shared,
            None => self.lock_contended(),
        }
    }

    #[cold]
    fn lock_contended(&self) -> EngineGuard<'_> {
        let asked = Instant::now();
        let shared = self.shared.lock();
        self.counters.contended.add(1);
        self.counters.lock_wait_ns.add(u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX));
        shared
    }

    fn changes(&self) -> u64 {
        // Acquire: pairs with `changed`.
        self.changes.load(Ordering::Acquire)
    }

    /// Lets everybody have a look.
    fn changed(&self, registry: &Registry) {
        // Relaxed: a limit; those who are over it for a moment take no more.
        self.share.store(self.depth as usize / registry.list.len().max(1), Ordering::Relaxed);
        // Release: pairs with `changes`.
        self.changes.fetch_add(1, Ordering::Release);
        for entry in &registry.list {
            entry.waker.wake();
        }
    }
}

/// See the file's head. Clones are the same placement.
#[derive(Clone, Debug)]
pub struct SharedPlacement(Arc<Group>);

impl SharedPlacement {
    /// With one engine of `depth` from `make`; `owner`: the worker to be completion worker as soon as it takes part.
    pub fn new(make: EngineMaker, depth: u32, reap_on_submit: bool, owner: Option<u32>) -> Self {
        Self(Arc::new(Group {
            make,
            depth,
            reap_on_submit,
            shared: lock_api::Mutex::new(None),
            registry: Mutex::new(Registry { wanted: owner, ..Registry::default() }),
            changes: AtomicU64::new(1),
            share: AtomicUsize::new(depth as usize),
            leaving: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            counters: Counters::default(),
        }))
    }

    /// The engine of a worker, which takes part once it has started it.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn engine(&self, worker: u32) -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(Participant::new(Arc::clone(&self.0), worker)?))
    }

    /// Asks for another completion worker; `None`: whoever was first. It is that as soon as it takes part.
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

    /// Whether whoever submits reaps too.
    pub fn reap_on_submit(&self) -> bool {
        self.0.reap_on_submit
    }

    /// What was done so far.
    pub fn counters(&self) -> PlacementCounters {
        self.0.counters.read()
    }
}

#[cfg(test)]
mod tests;
