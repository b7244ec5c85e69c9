//! Who takes part in a `completion` placement, and who of them has the engine: the host.
//!
//! - Everything behind the mutex is looked at only when `changes` has moved: when a worker comes or goes, a file does, or
//!   the host changes. Whoever changes something counts it and rings everybody.
//! - The host is the worker that was asked for, if it takes part; otherwise whoever was first. A host that is to change
//!   first lets the ops in its engine end, passes by passes, while new ones wait in their rings; then it lays the ends
//!   of the rings down here, and the next one takes them up.
//!
//! Not here: what the host does (`owner.rs`), what the others do (`participant.rs`).

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rtrb::{Consumer, Producer};

use super::HandOver;
use super::files::Files;
use crate::engine::{Completion, FileId, Op};
use crate::placed::EngineMaker;
use crate::placed::counters::Counters;
use crate::placed::epoll_wait::WorkerBell;

/// The host's ends of the two rings between it and a worker.
pub(super) struct Line {
    pub seat: u64,
    pub ops: Consumer<Op>,
    pub done: Producer<Completion>,
    pub bell: Arc<WorkerBell>,
    /// Its ops in the real engine.
    pub inside: usize,
    /// It was passed completions since it was last rung.
    pub touched: bool,
    /// The worker is gone: what it left is given up.
    pub gone: bool,
    /// Ops at the ring's front to be looked at for `cancelled` files.
    pub to_check: usize,
    pub cancelled: Vec<FileId>,
}

impl Line {
    pub fn new(seat: u64, ops: Consumer<Op>, done: Producer<Completion>, bell: Arc<WorkerBell>) -> Self {
        let cancelled = Vec::new();
        Self { seat, ops, done, bell, inside: 0, touched: false, gone: false, to_check: 0, cancelled }
    }
}

/// A worker that takes part.
pub(super) struct Seat {
    pub id: u64,
    pub worker: u32,
    pub bell: Arc<WorkerBell>,
    /// While no host has it.
    pub line: Option<Line>,
    pub gone: bool,
    /// No engine could be made on it: it is not asked again before somebody is chosen anew.
    pub unable: bool,
    /// Files whose ops are to be given up.
    pub cancelled: Vec<FileId>,
}

impl Seat {
    pub fn new(id: u64, worker: u32, bell: Arc<WorkerBell>, line: Line) -> Self {
        Self { id, worker, bell, line: Some(line), gone: false, unable: false, cancelled: Vec::new() }
    }
}

#[derive(Default)]
pub(super) struct Seats {
    pub wanted: Option<u32>,
    /// Who has the engine.
    pub host: Option<u64>,
    pub list: Vec<Seat>,
    pub files: Files,
    pub next_id: u64,
}

impl Seats {
    pub fn members(&self) -> usize {
        self.list.iter().filter(|seat| !seat.gone).count()
    }

    pub fn seat(&mut self, id: u64) -> Option<&mut Seat> {
        self.list.iter_mut().find(|seat| seat.id == id)
    }

    /// Who should have the engine.
    pub fn wanted_host(&self) -> Option<u64> {
        let here = || self.list.iter().filter(|seat| !seat.gone && !seat.unable);
        let asked_for = here().find(|seat| Some(seat.worker) == self.wanted);
        let as_is = || here().find(|seat| Some(seat.id) == self.host);
        asked_for.or_else(as_is).or_else(|| here().next()).map(|seat| seat.id)
    }

    /// Everybody may try again.
    pub fn forgive(&mut self) -> Option<u64> {
        self.list.iter_mut().for_each(|seat| seat.unable = false);
        self.wanted_host()
    }

    pub fn host_bell(&mut self) -> Option<Arc<WorkerBell>> {
        let host = self.host?;
        self.seat(host).map(|seat| Arc::clone(&seat.bell))
    }
}

/// What all workers of a placement share.
pub(super) struct Table {
    pub make: EngineMaker,
    pub depth: u32,
    pub policy: HandOver,
    seats: Mutex<Seats>,
    changes: AtomicU64,
    /// What each worker may have in flight.
    pub share: AtomicUsize,
    /// Ops that the host had in its engine when it went to sleep: a hint.
    pub busy: AtomicUsize,
    pub counters: Counters,
}

impl Table {
    pub fn new(make: EngineMaker, depth: u32, policy: HandOver, wanted: Option<u32>) -> Self {
        Self {
            make,
            depth,
            policy,
            seats: Mutex::new(Seats { wanted, ..Seats::default() }),
            changes: AtomicU64::new(1),
            share: AtomicUsize::new(depth as usize),
            busy: AtomicUsize::new(0),
            counters: Counters::default(),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub fn changes(&self) -> u64 {
        // Acquire: pairs with `changed`; the mutex orders what is behind it anyway.
        self.changes.load(Ordering::Acquire)
    }

    /// Lets everybody have a look. With the lock held, so that nobody misses what it stands for.
    pub fn changed(&self, seats: &Seats) {
        let share = self.depth as usize / seats.members().max(1);
        // Relaxed: a limit; those who are over it for a moment take no more.
        self.share.store(share, Ordering::Relaxed);
        // Release: pairs with `changes`.
        self.changes.fetch_add(1, Ordering::Release);
        for seat in &seats.list {
            seat.bell.ring();
        }
    }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { depth, policy, .. } = self;
        f.debug_struct("Table").field("depth", depth).field("policy", policy).finish_non_exhaustive()
    }
}
