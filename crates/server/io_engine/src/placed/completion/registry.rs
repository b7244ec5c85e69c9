//! Who takes part in a `completion` placement, and who of them has the engine: the owner.
//!
//! - Everything behind the mutex is looked at only when `changes` has moved: when a worker comes or goes, a file does, or
//!   the owner changes. Whoever changes something counts it and rings everybody.
//! - The owner is the worker that was asked for, if it takes part; otherwise whoever was first. A owner that is to change
//!   first lets the ops in its engine end, passes by passes, while new ones wait in their rings; then it lays the ends
//!   of the rings down here, and the next one takes them up.
//!
//! Not here: what the owner does (`owner.rs`), what the others do (`participant.rs`).

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rtrb::{Consumer, Producer};

use super::HandOver;
use super::files::Files;
use crate::engine::{Completion, FileId, Op};
use crate::placed::EngineMaker;
use crate::placed::counters::Counters;
use crate::placed::epoll_wait::WorkerWaker;

/// The owner's ends of the two rings between it and a worker.
pub(super) struct Channel {
    pub participant: u64,
    pub ops: Consumer<Op>,
    pub done: Producer<Completion>,
    pub waker: Arc<WorkerWaker>,
    /// Its ops in the real engine.
    pub inside: usize,
    /// It was passed completions since it was last signalled.
    pub touched: bool,
    /// The worker is gone: what it left is given up.
    pub gone: bool,
    /// Ops at the ring's front to be looked at for `cancelled` files.
    pub to_check: usize,
    pub cancelled: Vec<FileId>,
}

impl Channel {
    pub fn new(
        participant: u64,
        ops: Consumer<Op>,
        done: Producer<Completion>,
        waker: Arc<WorkerWaker>,
    ) -> Self {
        let cancelled = Vec::new();
        Self { participant, ops, done, waker, inside: 0, touched: false, gone: false, to_check: 0, cancelled }
    }
}

/// A worker that takes part.
pub(super) struct Entry {
    pub id: u64,
    pub worker: u32,
    pub waker: Arc<WorkerWaker>,
    /// While no owner has it.
    pub channel: Option<Channel>,
    pub gone: bool,
    /// No engine could be made on it: it is not asked again before somebody is chosen anew.
    pub unable: bool,
    /// Files whose ops are to be given up.
    pub cancelled: Vec<FileId>,
}

impl Entry {
    pub fn new(id: u64, worker: u32, waker: Arc<WorkerWaker>, channel: Channel) -> Self {
        Self { id, worker, waker, channel: Some(channel), gone: false, unable: false, cancelled: Vec::new() }
    }
}

#[derive(Default)]
pub(super) struct Registry {
    /// The worker that the operator asked for.
    pub wanted: Option<u32>,
    /// The disk that the log names, if no caller waits for the change to `wanted`: it then has a time limit.
    pub limited: Option<Box<str>>,
    /// Who has the engine.
    pub owner: Option<u64>,
    pub list: Vec<Entry>,
    pub files: Files,
    pub next_id: u64,
}

impl Registry {
    pub fn participants(&self) -> usize {
        self.list.iter().filter(|entry| !entry.gone).count()
    }

    pub fn entry(&mut self, id: u64) -> Option<&mut Entry> {
        self.list.iter_mut().find(|entry| entry.id == id)
    }

    /// Who should have the engine.
    pub fn wanted_owner(&self) -> Option<u64> {
        let here = || self.list.iter().filter(|entry| !entry.gone && !entry.unable);
        let asked_for = here().find(|entry| Some(entry.worker) == self.wanted);
        let as_is = || here().find(|entry| Some(entry.id) == self.owner);
        asked_for.or_else(as_is).or_else(|| here().next()).map(|entry| entry.id)
    }

    /// The present owner's worker, if the participant `id` on `worker` is to become owner within a time limit.
    pub fn limited_by_owner(&self, id: u64, worker: u32) -> Option<u32> {
        let waits = self.limited.is_some() && self.wanted == Some(worker) && self.wanted_owner() == Some(id);
        let owner = self.list.iter().find(|entry| Some(entry.id) == self.owner);
        owner.filter(|owner| waits && owner.id != id).map(|owner| owner.worker)
    }

    /// Everybody may try again.
    pub fn forgive(&mut self) -> Option<u64> {
        self.list.iter_mut().for_each(|entry| entry.unable = false);
        self.wanted_owner()
    }

    pub fn owner_waker(&mut self) -> Option<Arc<WorkerWaker>> {
        let owner = self.owner?;
        self.entry(owner).map(|entry| Arc::clone(&entry.waker))
    }
}

/// What all workers of a placement share.
pub(super) struct Group {
    pub make: EngineMaker,
    pub depth: u32,
    pub policy: HandOver,
    registry: Mutex<Registry>,
    changes: AtomicU64,
    /// What each worker may have in flight.
    pub share: AtomicUsize,
    /// Ops that the owner had in its engine when it went to sleep: a hint.
    pub busy: AtomicUsize,
    pub counters: Counters,
}

impl Group {
    pub fn new(make: EngineMaker, depth: u32, policy: HandOver, wanted: Option<u32>) -> Self {
        Self {
            make,
            depth,
            policy,
            registry: Mutex::new(Registry { wanted, ..Registry::default() }),
            changes: AtomicU64::new(1),
            share: AtomicUsize::new(depth as usize),
            busy: AtomicUsize::new(0),
            counters: Counters::default(),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub fn changes(&self) -> u64 {
        // Acquire: pairs with `changed`; the mutex orders what is behind it anyway.
        self.changes.load(Ordering::Acquire)
    }

    /// Lets everybody have a look. With the lock held, so that nobody misses what it stands for.
    pub fn changed(&self, registry: &Registry) {
        let share = self.depth as usize / registry.participants().max(1);
        // Relaxed: a limit; those who are over it for a moment take no more.
        self.share.store(share, Ordering::Relaxed);
        // Release: pairs with `changes`.
        self.changes.fetch_add(1, Ordering::Release);
        for entry in &registry.list {
            entry.waker.wake();
        }
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { depth, policy, .. } = self;
        f.debug_struct("Group").field("depth", depth).field("policy", policy).finish_non_exhaustive()
    }
}
