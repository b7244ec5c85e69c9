//! `shared`: one engine for all workers of a disk, behind a lock: what people did before they had a ring each.
//!
//! `push → staged → submit: lock, engine → … → whoever reaps → completion ring → reap`
//!
//! - The completion worker (the host) sleeps on the engine and reaps. With `reap_on_submit` whoever submits reaps too,
//!   under the same lock; what is another worker's goes through that worker's ring, with one wake-up per batch.
//! - A worker takes the lock once per pass in which it has ops, and the host when there is something in the engine.
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

use self::participant::Member;
use crate::engine::{Completion, Engine, Event};
use crate::placed::counters::Counters;
use crate::placed::epoll_wait::WorkerBell;
use crate::placed::routes::{Route, Routes};
use crate::placed::{EngineMaker, PlacementCounters, share};

/// How completions find a worker.
struct Line {
    done: Producer<Completion>,
    bell: Arc<WorkerBell>,
    inside: usize,
    touched: bool,
    gone: bool,
}

/// What is behind the lock.
struct Shop {
    engine: Box<dyn Engine>,
    routes: Routes,
    lines: Vec<Option<Line>>,
    events: Vec<Event>,
}

impl Shop {
    fn open(table: &Table) -> io::Result<Self> {
        let mut engine = (table.make)()?;
        engine.check_shareable()?;
        engine.start()?;
        engine.serve_one_disk();
        let events = Vec::with_capacity(table.depth as usize + 1);
        Ok(Self { engine, routes: Routes::new(table.depth), lines: Vec::new(), events })
    }

    fn add(&mut self, line: Line) -> u32 {
        let index = self.lines.iter().position(Option::is_none).unwrap_or(self.lines.len());
        if index == self.lines.len() {
            self.lines.push(None);
        }
        self.lines[index] = Some(line);
        #[allow(clippy::cast_possible_truncation)] // a handful
        let number = index as u32;
        number
    }

    /// Everything that is complete, to the workers' rings.
    fn reap(&mut self, table: &Table) {
        self.engine.reap(&mut self.events);
        let mut passed = 0;
        for event in self.events.drain(..) {
            let Event::Completed(mut completion) = event else { continue };
            let Route { line, token } = self.routes.give_back(completion.token);
            let Some(place) = self.lines.get_mut(line as usize) else { continue };
            let Some(line) = place else { continue };
            completion.token = token;
            passed += 1;
            line.inside -= 1;
            if line.gone {
                if line.inside == 0 {
                    *place = None;
                }
                continue;
            }
            let pushed = line.done.push(completion);
            debug_assert!(pushed.is_ok(), "the ring is as long as a worker's ops in flight may be many");
            line.touched = true;
        }
        table.counters.passed.add(passed);
        // Relaxed: a hint for a host that is awake; before it sleeps it looks under the lock.
        table.inside.store(self.engine.in_flight(), Ordering::Relaxed);
    }

    /// Those who were passed something, but for the worker on line `own`: to be rung when the lock is free again.
    fn take_touched(&mut self, own: u32, bells: &mut Vec<Arc<WorkerBell>>) {
        for (index, line) in (0..).zip(&mut self.lines) {
            if let Some(line) = line
                && std::mem::take(&mut line.touched)
                && index != own
            {
                bells.push(Arc::clone(&line.bell));
            }
        }
    }
}

/// Who takes part.
#[derive(Default)]
struct Seats {
    wanted: Option<u32>,
    list: Vec<Seat>,
    next_id: u64,
}

struct Seat {
    id: u64,
    worker: u32,
    bell: Arc<WorkerBell>,
}

impl Seats {
    /// Whoever was asked for, or was first.
    fn host(&self) -> Option<&Seat> {
        let asked_for = self.list.iter().find(|seat| Some(seat.worker) == self.wanted);
        asked_for.or_else(|| self.list.first())
    }
}

struct Table {
    make: EngineMaker,
    depth: u32,
    reap_on_submit: bool,
    shop: lock_api::Mutex<PvQSpinLock, Option<Shop>>,
    seats: Mutex<Seats>,
    changes: AtomicU64,
    share: AtomicUsize,
    /// Workers that leave and wait for the engine to run dry: nothing new goes in.
    leaving: AtomicUsize,
    /// Ops in the engine: a hint.
    inside: AtomicUsize,
    counters: Counters,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { depth, reap_on_submit, .. } = self;
        let mut shown = f.debug_struct("Table");
        shown.field("depth", depth).field("reap_on_submit", reap_on_submit).finish_non_exhaustive()
    }
}

type ShopGuard<'a> = lock_api::MutexGuard<'a, PvQSpinLock, Option<Shop>>;

impl Table {
    fn seats(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock. Waiting is timed where there is any.
    #[inline]
    fn lock(&self) -> ShopGuard<'_> {
        self.counters.locked.add(1);
        match self.shop.try_lock() {
            Some(shop) => shop,
            None => self.lock_contended(),
        }
    }

    #[cold]
    fn lock_contended(&self) -> ShopGuard<'_> {
        let asked = Instant::now();
        let shop = self.shop.lock();
        self.counters.contended.add(1);
        self.counters.lock_wait_ns.add(u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX));
        shop
    }

    fn changes(&self) -> u64 {
        // Acquire: pairs with `changed`.
        self.changes.load(Ordering::Acquire)
    }

    /// Lets everybody have a look.
    fn changed(&self, seats: &Seats) {
        // Relaxed: a limit; those who are over it for a moment take no more.
        self.share.store(self.depth as usize / seats.list.len().max(1), Ordering::Relaxed);
        // Release: pairs with `changes`.
        self.changes.fetch_add(1, Ordering::Release);
        for seat in &seats.list {
            seat.bell.ring();
        }
    }
}

/// See the file's head. Clones are the same placement.
#[derive(Clone, Debug)]
pub struct SharedPlacement(Arc<Table>);

impl SharedPlacement {
    /// With one engine of `depth` from `make`; `host`: the worker to be completion worker as soon as it takes part.
    #[must_use]
    pub fn new(make: EngineMaker, depth: u32, reap_on_submit: bool, host: Option<u32>) -> Self {
        Self(Arc::new(Table {
            make,
            depth,
            reap_on_submit,
            shop: lock_api::Mutex::new(None),
            seats: Mutex::new(Seats { wanted: host, ..Seats::default() }),
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
        Ok(Box::new(Member::new(Arc::clone(&self.0), worker)?))
    }

    /// Asks for another completion worker; `None`: whoever was first. It is that as soon as it takes part.
    pub fn set_host(&self, worker: Option<u32>) {
        let mut seats = self.0.seats();
        let before = seats.host().map(|seat| seat.id);
        seats.wanted = worker;
        self.0.counters.moves.add(u64::from(seats.host().map(|seat| seat.id) != before));
        self.0.changed(&seats);
    }

    /// The completion worker now.
    #[must_use]
    pub fn host(&self) -> Option<u32> {
        self.0.seats().host().map(|seat| seat.worker)
    }

    /// Whether whoever submits reaps too.
    #[must_use]
    pub fn reap_on_submit(&self) -> bool {
        self.0.reap_on_submit
    }

    /// What was done so far.
    #[must_use]
    pub fn counters(&self) -> PlacementCounters {
        self.0.counters.read()
    }
}

#[cfg(test)]
mod tests;
