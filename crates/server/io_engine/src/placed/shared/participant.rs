//! A worker's side of a `shared` placement.
//!
//! Dropping the engine gives up what the worker has in flight, and waits until nothing that its thread started is in
//! the kernel any more; when that takes too long, the op stays with the engine, and its completion is dropped.
//!
//! Not here: the engine and its lock (`shared/mod.rs`), sleeping itself (`epoll_wait.rs`).

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rtrb::{Consumer, Producer, RingBuffer};

use super::{Line, Seat, Seats, Shop, Table, share};
use crate::engine::{Completion, Engine, Event, FileId, FileSpec, Op, OpError, Stats, WatchId, WatchToken};
use crate::placed::completion::owner::unstarted;
use crate::placed::epoll_wait::{Doze, WorkerBell};
use crate::placed::no_watches;
use crate::placed::routes::Route;

/// How long a worker that leaves waits for the engine to run dry.
const PATIENCE: Duration = Duration::from_secs(5);
/// Looks meanwhile: whoever reaps does not tell.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// The number of no seat.
const NOT_STARTED: u64 = u64::MAX;

pub(super) struct Member {
    table: Arc<Table>,
    worker: u32,
    seat: u64,
    line: u32,
    /// The other end of `done`, until the engine is started.
    done_end: Option<Producer<Completion>>,
    doze: Doze,
    is_host: bool,
    staged: VecDeque<Op>,
    done: Consumer<Completion>,
    /// Ops that ended before they came into the engine.
    ended: VecDeque<Completion>,
    in_flight: usize,
    /// Its files, and nobody else's.
    files: Vec<FileId>,
    /// Scratch: whom to ring.
    bells: Vec<Arc<WorkerBell>>,
    seen_changes: u64,
    served: usize,
}

impl Member {
    pub fn new(table: Arc<Table>, worker: u32) -> io::Result<Self> {
        let depth = table.depth as usize;
        let doze = Doze::new()?;
        let (done_end, done) = RingBuffer::new(depth);
        Ok(Self {
            table,
            worker,
            seat: NOT_STARTED,
            line: 0,
            done_end: Some(done_end),
            doze,
            is_host: false,
            staged: VecDeque::with_capacity(depth),
            done,
            ended: VecDeque::with_capacity(depth),
            in_flight: 0,
            files: Vec::new(),
            bells: Vec::with_capacity(16),
            seen_changes: 0,
            served: 0,
        })
    }

    fn join(&mut self) -> io::Result<()> {
        let table = Arc::clone(&self.table);
        let mut seats = table.seats();
        share(table.depth as usize, seats.list.len() + 1)?;
        let mut shop = table.lock();
        let shop = match &mut *shop {
            Some(shop) => shop,
            none => none.insert(Shop::open(&table)?),
        };
        let Some(done) = self.done_end.take() else { unreachable!("an engine is started once") };
        let bell = Arc::clone(&self.doze.bell);
        let line = Line { done, bell: Arc::clone(&bell), inside: 0, touched: false, gone: false };
        self.line = shop.add(line);
        self.seat = seats.next_id;
        seats.next_id += 1;
        seats.list.push(Seat { id: self.seat, worker: self.worker, bell });
        table.changed(&seats);
        Ok(())
    }

    /// Acts on the engine with the lock held; then rings whom that concerns.
    #[inline]
    fn with<R>(&mut self, act: impl FnOnce(&mut Shop, &Table, &mut VecDeque<Op>) -> R) -> io::Result<R> {
        let table = Arc::clone(&self.table);
        let mut guard = table.lock();
        let Some(shop) = guard.as_mut() else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let result = act(shop, &table, &mut self.staged);
        shop.take_touched(self.line, &mut self.bells);
        self.served += shop.engine.take_unseen_work();
        drop(guard);
        let mut woken = 0;
        for bell in self.bells.drain(..) {
            woken += u64::from(bell.ring());
            self.served += 1;
        }
        table.counters.member_wake_ups.add(woken);
        Ok(result)
    }

    #[cold]
    fn look_around(&mut self) -> io::Result<()> {
        self.seen_changes = self.table.changes();
        let is_host = self.table.seats().host().is_some_and(|host| host.id == self.seat);
        if is_host && !self.is_host {
            let fd = self.with(|shop, _, _| shop.engine.descriptor())??;
            self.doze.watch_inner(fd)?;
        } else if !is_host {
            self.doze.forget_inner();
        }
        self.is_host = is_host;
        Ok(())
    }

    #[inline]
    fn work(&mut self) -> io::Result<()> {
        self.doze.rise();
        if self.table.changes() != self.seen_changes {
            self.look_around()?;
        }
        if self.staged.is_empty() || self.must_wait() { Ok(()) } else { self.submit_staged() }
    }

    /// A worker leaves. Acquire: pairs with its Release, so that what it waits for is in the engine by now.
    fn must_wait(&self) -> bool {
        self.table.leaving.load(Ordering::Acquire) > 0
    }

    fn submit_staged(&mut self) -> io::Result<()> {
        let line = self.line;
        let reaps = self.table.reap_on_submit;
        self.with(|shop, table, staged| {
            let mut count = 0;
            while shop.routes.room() > 0 && shop.engine.room() > 0 {
                let Some(mut op) = staged.pop_front() else { break };
                let Some(place) = shop.routes.take(Route { line, token: op.token }) else { break };
                op.token = place;
                let pushed = shop.engine.push(op);
                debug_assert!(pushed.is_ok(), "there was room");
                count += 1;
            }
            if let Some(Some(line)) = shop.lines.get_mut(line as usize) {
                line.inside += count;
            }
            table.counters.hand_overs.add(1);
            table.counters.ops.add(count as u64);
            let submitted = shop.engine.submit();
            // Relaxed: a hint, see `Shop::reap`.
            table.inside.store(shop.engine.in_flight(), Ordering::Relaxed);
            if reaps {
                reap_and_go_on(shop, table)?;
            }
            submitted
        })?
    }

    #[inline]
    fn reap(&mut self, events: &mut Vec<Event>) {
        self.doze.rise();
        if self.is_host && self.table.inside.load(Ordering::Relaxed) > 0 {
            // An error of the engine as a whole comes again with the next `submit`.
            let _ = self.with(|shop, table, _| reap_and_go_on(shop, table));
        }
        let before = events.len();
        events.extend(self.ended.drain(..).map(Event::Completed));
        while let Ok(completion) = self.done.pop() {
            events.push(Event::Completed(completion));
        }
        self.in_flight -= events.len() - before;
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.work()?;
        let mut may_sleep = true;
        if self.is_host {
            may_sleep = self.with(|shop, table, _| {
                reap_and_go_on(shop, table)?;
                shop.engine.arm()
            })??;
        }
        self.doze.doze();
        Ok(may_sleep && !self.has_work())
    }

    fn has_work(&self) -> bool {
        let staged = !self.staged.is_empty() && !self.must_wait();
        let ended = !self.done.is_empty() || !self.ended.is_empty();
        staged || ended || self.table.changes() != self.seen_changes
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.doze.rise();
        if self.is_host {
            return self.with(|shop, _, _| shop.engine.disarm())?;
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let slept = if self.arm()? { self.doze.sleep(timeout) } else { Ok(()) };
        self.disarm()?;
        slept
    }

    #[inline]
    #[allow(clippy::result_large_err)] // an op that is refused goes back whole
    fn push(&mut self, op: Op) -> Result<(), Op> {
        if self.room() == 0 {
            return Err(op);
        }
        assert!(self.files.contains(&op.file), "{:?} is not attached", op.file);
        self.in_flight += 1;
        self.staged.push_back(op);
        Ok(())
    }

    #[inline]
    fn room(&self) -> usize {
        self.table.share.load(Ordering::Relaxed).saturating_sub(self.in_flight)
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        let file = self.with(|shop, _, _| shop.engine.attach_file(spec))??;
        self.files.push(file);
        Ok(file)
    }

    fn detach_file(&mut self, file: FileId) {
        assert!(self.files.contains(&file), "{file:?} is not attached");
        self.files.retain(|other| *other != file);
        let _ = self.with(|shop, _, _| shop.engine.detach_file(file));
    }

    fn cancel(&mut self, files: &[FileId]) {
        let mut ended = VecDeque::new();
        let _ = self.with(|shop, _, staged| {
            staged.retain_mut(|op| {
                let given_up = files.contains(&op.file);
                if given_up {
                    let buffers = guest_mem::IoVecs::with_capacity(0);
                    let taken = Op { buffers: std::mem::replace(&mut op.buffers, buffers), ..*op };
                    ended.push_back(unstarted(taken, OpError::Cancelled));
                }
                !given_up
            });
            files.iter().for_each(|file| shop.engine.cancel_file(*file));
        });
        self.ended.extend(ended);
    }

    fn cancel_all(&mut self) {
        let files = self.files.clone();
        self.cancel(&files);
    }

    /// Until nothing is in the engine: what this thread started ends with the thread.
    fn let_run_dry(&mut self) -> bool {
        // Release: pairs with `must_wait`.
        self.table.leaving.fetch_add(1, Ordering::Release);
        let deadline = Instant::now() + PATIENCE;
        let dry = loop {
            let left = self.with(|shop, table, _| {
                let _ = reap_and_go_on(shop, table);
                shop.engine.in_flight()
            });
            match left {
                Ok(0) | Err(_) => break true,
                Ok(_) if Instant::now() >= deadline => break false,
                Ok(_) => std::thread::sleep(LOOK_AGAIN),
            }
        };
        self.table.leaving.fetch_sub(1, Ordering::Release);
        dry
    }

    fn leave(&mut self, seats: &mut Seats) -> Option<Shop> {
        seats.list.retain(|seat| seat.id != self.seat);
        let mut guard = self.table.lock();
        let shop = guard.as_mut()?;
        for file in self.files.drain(..) {
            let is_idle = shop.lines[self.line as usize].as_ref().is_none_or(|line| line.inside == 0);
            if is_idle {
                shop.engine.detach_file(file);
            }
        }
        let place = &mut shop.lines[self.line as usize];
        if let Some(line) = place {
            line.gone = true;
        }
        place.take_if(|line| line.inside == 0);
        if seats.list.is_empty() { guard.take() } else { None }
    }
}

/// What is complete, and what follows from it.
fn reap_and_go_on(shop: &mut Shop, table: &Table) -> io::Result<()> {
    shop.reap(table);
    shop.engine.submit()
}

impl Drop for Member {
    fn drop(&mut self) {
        if self.seat == NOT_STARTED {
            return;
        }
        self.cancel_all();
        // The last one lets the engine end, which waits for what is in it.
        let is_last = self.table.seats().list.len() == 1;
        if !is_last && !self.let_run_dry() {
            tracing::warn!("I/O does not end while a worker leaves the engine it shares");
        }
        self.doze.forget_inner();
        let table = Arc::clone(&self.table);
        let mut seats = table.seats();
        let last = self.leave(&mut seats);
        table.changed(&seats);
        drop(seats);
        // Outside the locks: it waits for what is still in flight.
        drop(last);
    }
}

impl Engine for Member {
    fn describe(&self) -> String {
        let reaping = if self.table.reap_on_submit { "who submits reaps too" } else { "one worker reaps" };
        format!("shared behind a lock, {reaping}")
    }

    /// The worker takes part from now on.
    fn start(&mut self) -> io::Result<()> {
        self.join()
    }

    fn room(&self) -> usize {
        Self::room(self)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn push(&mut self, op: Op) -> Result<(), Op> {
        Self::push(self, op)
    }

    fn submit(&mut self) -> io::Result<()> {
        self.work()
    }

    fn reap(&mut self, events: &mut Vec<Event>) {
        Self::reap(self, events);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        Self::wait(self, timeout)
    }

    fn arm(&mut self) -> io::Result<bool> {
        Self::arm(self)
    }

    fn disarm(&mut self) -> io::Result<()> {
        Self::disarm(self)
    }

    fn descriptor(&mut self) -> io::Result<OwnedFd> {
        self.doze.descriptor()
    }

    /// The worker's own engine watches kicks.
    fn watch(&mut self, _fd: Arc<OwnedFd>, _token: WatchToken) -> io::Result<WatchId> {
        Err(no_watches())
    }

    fn unwatch(&mut self, _id: WatchId) {}

    fn cancel_all(&mut self) {
        Self::cancel_all(self);
    }

    fn cancel_file(&mut self, file: FileId) {
        self.cancel(&[file]);
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        Self::attach_file(self, spec)
    }

    fn detach_file(&mut self, file: FileId) {
        Self::detach_file(self, file);
    }

    /// Those of all workers together, told by the completion worker.
    fn stats(&self) -> Stats {
        let guard = if self.is_host { Some(self.table.lock()) } else { None };
        guard.and_then(|shop| shop.as_ref().map(|shop| shop.engine.stats())).unwrap_or_default()
    }

    fn serves_others(&self) -> bool {
        self.is_host && self.table.share.load(Ordering::Relaxed) < self.table.depth as usize
    }

    fn take_unseen_work(&mut self) -> usize {
        std::mem::take(&mut self.served)
    }
}
