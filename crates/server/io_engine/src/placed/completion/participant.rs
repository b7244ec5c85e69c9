//! A worker's side of a `completion` placement: its engine, whichever worker has the real one.
//!
//! not the host: `push → staged → submit: ring, wake-up → … → completion ring → reap`
//! the host: `push → real engine → reap`, and the others' ops with each `submit`
//!
//! - Who is host may change at any `submit`; the worker's ops and their names stay what they are.
//! - Dropping the engine gives up what the worker has in flight, but does not wait for it: the host owns those ops, and
//!   with them the memory, until the kernel is done. A host that is dropped waits for the others' ops, and gives them
//!   up when that takes too long.
//!
//! Not here: the host's work (`owner.rs`), when to hand over (`policy.rs`), sleeping itself (`epoll_wait.rs`).

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rtrb::{Consumer, Producer, RingBuffer};

use super::owner::{Host, unstarted};
use super::registry::{Line, Seat, Seats, Table};
use crate::engine::{Completion, Engine, Event, FileId, FileSpec, Op, OpError, Stats, WatchId, WatchToken};
use crate::placed::epoll_wait::{Doze, WorkerBell};
use crate::placed::{no_watches, share};

/// How long a host that is dropped waits for the others' ops before it gives them up, and once more after that.
const PATIENCE: Duration = Duration::from_secs(5);

/// The number of no seat.
const NOT_STARTED: u64 = u64::MAX;

pub(super) struct Member {
    table: Arc<Table>,
    worker: u32,
    seat: u64,
    /// The host's ends of the rings, until the engine is started.
    ends: Option<(Consumer<Op>, Producer<Completion>)>,
    doze: Doze,
    /// Not yet handed over.
    staged: VecDeque<Op>,
    /// When the oldest of them was pushed; of interest only where a policy goes by time.
    oldest: Option<Instant>,
    /// Something was pushed since the last `submit`.
    fresh: bool,
    /// Ops in the ring whose wake-up was spared, and since when.
    spared: Option<(usize, Instant)>,
    ops: Producer<Op>,
    done: Consumer<Completion>,
    /// Ops that ended before they were handed over.
    ended: VecDeque<Completion>,
    in_flight: usize,
    host: Option<Box<Host>>,
    host_bell: Option<Arc<WorkerBell>>,
    /// It has, or is to have, the engine, and others take part.
    needed: bool,
    seen_changes: u64,
}

impl Member {
    pub fn new(table: Arc<Table>, worker: u32) -> io::Result<Self> {
        let depth = table.depth as usize;
        let doze = Doze::new()?;
        let (ops, ops_end) = RingBuffer::new(depth);
        let (done_end, done) = RingBuffer::new(depth);
        Ok(Self {
            table,
            worker,
            seat: NOT_STARTED,
            ends: Some((ops_end, done_end)),
            doze,
            staged: VecDeque::with_capacity(depth),
            oldest: None,
            fresh: false,
            spared: None,
            ops,
            done,
            ended: VecDeque::with_capacity(depth),
            in_flight: 0,
            host: None,
            host_bell: None,
            needed: false,
            seen_changes: 0,
        })
    }

    fn join(&mut self) -> io::Result<()> {
        let table = Arc::clone(&self.table);
        let mut seats = table.lock();
        share(table.depth as usize, seats.members() + 1)?;
        let Some((ops, done)) = self.ends.take() else { unreachable!("an engine is started once") };
        self.seat = seats.next_id;
        seats.next_id += 1;
        let bell = Arc::clone(&self.doze.bell);
        let line = Line::new(self.seat, ops, done, Arc::clone(&bell));
        seats.list.push(Seat::new(self.seat, self.worker, bell, line));
        self.look_around(&mut seats)?;
        table.changed(&seats);
        Ok(())
    }

    /// Finds out who is host, and becomes it if nobody is and it should.
    #[cold]
    fn look_around(&mut self, seats: &mut Seats) -> io::Result<()> {
        self.seen_changes = self.table.changes();
        let wanted = seats.wanted_host().or_else(|| seats.forgive());
        if let Some(host) = &mut self.host {
            host.sync(seats);
            host.retiring = wanted != Some(self.seat);
        } else if seats.host.is_none() && wanted == Some(self.seat) {
            match self.make_host() {
                Ok(host) => self.become_host(host, seats),
                Err(error) => self.decline(error, seats)?,
            }
        }
        self.host_bell = seats.host_bell();
        // What was handed over while this worker took another one for the host, or nobody was it, woke nobody.
        if self.host.is_none() && self.ops.slots() < self.ops.buffer().capacity() {
            self.wake_host();
        }
        let has_role = self.host.is_some() || wanted == Some(self.seat);
        self.needed = has_role && seats.members() > 1;
        Ok(())
    }

    fn make_host(&mut self) -> io::Result<Host> {
        let mut host = Host::start(&self.table)?;
        self.doze.watch_inner(host.descriptor()?)?;
        Ok(host)
    }

    fn become_host(&mut self, mut host: Host, seats: &mut Seats) {
        host.sync(seats);
        self.host = Some(Box::new(host));
        seats.host = Some(self.seat);
        // Those who wait for a host are to wake it from now on.
        self.table.changed(seats);
    }

    /// No engine could be made here: somebody else is to be host, unless nobody is left.
    fn decline(&mut self, error: io::Error, seats: &mut Seats) -> io::Result<()> {
        let own = self.seat;
        if let Some(seat) = seats.seat(own) {
            seat.unable = true;
        }
        if seats.wanted_host().is_none() {
            return Err(error);
        }
        tracing::error!("this worker cannot be completion worker, another one is asked: {error}");
        self.table.changed(seats);
        Ok(())
    }

    /// Everything but sleeping; `last`: the worker has nothing else to do.
    #[inline]
    fn work(&mut self, last: bool) -> io::Result<()> {
        self.doze.rise();
        if self.table.changes() != self.seen_changes {
            let table = Arc::clone(&self.table);
            self.look_around(&mut table.lock())?;
        }
        if self.host.is_some() { self.work_as_host() } else { self.hand_over(last) }
    }

    #[inline]
    fn work_as_host(&mut self) -> io::Result<()> {
        let Some(host) = &mut self.host else { return Ok(()) };
        while host.takes() {
            let Some(op) = self.staged.pop_front() else { break };
            host.push_own(op, &self.table);
        }
        host.serve(&self.table)?;
        if host.has_leavers() {
            host.sync(&mut self.table.lock());
        }
        if host.retiring && host.in_flight() == 0 {
            self.resign();
            return self.hand_over(true);
        }
        Ok(())
    }

    /// Nothing is in the engine any more: the next one may have it.
    #[cold]
    fn resign(&mut self) {
        let Some(host) = self.host.take() else { return };
        self.doze.forget_inner();
        let (lines, ended) = host.end();
        self.ended.extend(ended);
        let table = Arc::clone(&self.table);
        let mut seats = table.lock();
        lay_down(lines, &mut seats);
        seats.host = None;
        table.counters.moves.add(1);
        table.changed(&seats);
    }

    #[inline]
    fn hand_over(&mut self, last: bool) -> io::Result<()> {
        let policy = self.table.policy;
        let quiet = !std::mem::take(&mut self.fresh);
        if !self.staged.is_empty() {
            let age = || self.oldest.map_or(Duration::ZERO, |oldest| oldest.elapsed());
            if last || policy.adaptive || policy.is_due(self.staged.len(), quiet, age) {
                self.publish();
            }
        }
        if self.spared.is_some() && self.ops.slots() == self.ops.buffer().capacity() {
            self.spared = None; // the host has been there
            self.table.counters.spared_wake_ups.add(1);
        }
        if let Some((count, since)) = self.spared
            && (last || policy.is_due(count, false, || since.elapsed()) || !self.may_spare())
        {
            self.wake_host();
        }
        Ok(())
    }

    /// What is staged goes to the host.
    #[inline]
    fn publish(&mut self) {
        let count = self.staged.len();
        for op in self.staged.drain(..) {
            let pushed = self.ops.push(op);
            debug_assert!(pushed.is_ok(), "the ring is as long as ops in flight may be many");
        }
        self.oldest = None;
        self.table.counters.hand_overs.add(1);
        self.table.counters.ops.add(count as u64);
        let before = self.spared.take();
        if self.table.policy.adaptive && self.may_spare() {
            let (waiting, since) = before.unwrap_or_else(|| (0, Instant::now()));
            self.spared = Some((waiting + count, since));
        } else {
            self.wake_host();
        }
    }

    /// Whether a sleeping host has I/O in flight, and so wakes up by itself. Only a hint: what is spared is looked at
    /// again with every `submit`, and before sleeping.
    #[inline]
    fn may_spare(&self) -> bool {
        self.table.busy.load(Relaxed) > 0 && self.host_bell.as_ref().is_some_and(|bell| bell.seems_dozing())
    }

    #[inline]
    fn wake_host(&mut self) {
        self.spared = None;
        // Out of date while the host changes: `look_around` makes up for it.
        let rang = self.host_bell.as_ref().is_some_and(|bell| bell.ring());
        self.table.counters.host_wake_ups.add(u64::from(rang));
    }

    #[inline]
    #[allow(clippy::result_large_err)] // an op that is refused goes back whole
    fn push(&mut self, op: Op) -> Result<(), Op> {
        if self.room() == 0 {
            return Err(op);
        }
        let len_bytes = op.kind.range().map_or(0, |range| range.len_bytes());
        assert!(
            !op.kind.moves_data() || op.buffers.remaining_bytes() == len_bytes,
            "buffers differ from the range"
        );
        self.in_flight += 1;
        match &mut self.host {
            Some(host) if self.staged.is_empty() && host.takes() => host.push_own(op, &self.table),
            _ => self.stage(op),
        }
        Ok(())
    }

    #[inline]
    fn stage(&mut self, op: Op) {
        if self.staged.is_empty() && self.table.policy.max_delay.is_some() {
            self.oldest = Some(Instant::now());
        }
        self.fresh = true;
        self.staged.push_back(op);
    }

    #[inline]
    fn room(&self) -> usize {
        self.table.share.load(Relaxed).saturating_sub(self.in_flight)
    }

    #[inline]
    fn reap(&mut self, events: &mut Vec<Event>) {
        self.doze.rise();
        let before = events.len();
        events.extend(self.ended.drain(..).map(Event::Completed));
        if let Some(host) = &mut self.host {
            host.reap(events, &self.table);
        }
        while let Ok(completion) = self.done.pop() {
            events.push(Event::Completed(completion));
        }
        self.in_flight -= events.len() - before;
    }

    /// Whether to sleep; from now on everybody rings who has something for this worker.
    fn arm(&mut self) -> io::Result<bool> {
        self.work(true)?;
        let inner_may_sleep = match &mut self.host {
            Some(host) => {
                // Others spare a wake-up if this says that one comes anyway: before they may see it doze.
                self.table.busy.store(host.in_flight(), Relaxed);
                host.inner().arm()?
            }
            None => true,
        };
        self.doze.doze();
        Ok(inner_may_sleep && !self.has_work())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.doze.rise();
        self.host.as_mut().map_or(Ok(()), |host| host.inner().disarm())
    }

    fn has_work(&self) -> bool {
        // With a host here, what is left in `staged` waits for room in the engine, which reports that itself.
        let staged = !self.staged.is_empty() && self.host.as_ref().is_none_or(|host| host.takes());
        let ended = !self.done.is_empty() || !self.ended.is_empty();
        let handed_over = self.host.as_ref().is_some_and(|host| host.has_work());
        staged || ended || handed_over || self.table.changes() != self.seen_changes
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let slept = if self.arm()? { self.doze.sleep(timeout) } else { Ok(()) };
        self.disarm()?;
        slept
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        let table = Arc::clone(&self.table);
        let mut seats = table.lock();
        let file = seats.files.add(self.seat, spec.clone())?;
        let attached = self.host.as_mut().map_or(Ok(()), |host| host.attach_own(file, spec));
        if attached.is_err() {
            seats.files.release(file);
            seats.files.free_released(|_| ());
        }
        attached.map(|()| file)
    }

    fn detach_file(&mut self, file: FileId) {
        let table = Arc::clone(&self.table);
        let mut seats = table.lock();
        assert!(seats.files.release(file), "{file:?} is not attached");
        match (&mut self.host, seats.host) {
            (Some(host), _) => host.sync(&mut seats),
            (None, None) => seats.files.free_released(|_| ()),
            (None, Some(_)) => table.changed(&seats),
        }
    }

    /// Gives up ops on `files`: those here at once, the others by the host.
    fn cancel(&mut self, files: &[FileId]) {
        let ended = &mut self.ended;
        let mut kept = VecDeque::with_capacity(self.staged.capacity());
        for op in self.staged.drain(..) {
            if files.contains(&op.file) {
                ended.push_back(unstarted(op, OpError::Cancelled));
            } else {
                kept.push_back(op);
            }
        }
        self.staged = kept;
        let table = Arc::clone(&self.table);
        let mut seats = table.lock();
        let seat = self.seat;
        if let Some(seat) = seats.seat(seat) {
            seat.cancelled.extend(files);
        }
        if let Some(host) = &mut self.host {
            host.sync(&mut seats);
        }
        table.changed(&seats);
    }

    fn cancel_all(&mut self) {
        let files = self.table.lock().files.of(self.seat);
        self.cancel(&files);
    }

    /// As long as others' ops are in the engine, they are waited for and passed on.
    fn finish_others(&mut self) {
        let Some(host) = &mut self.host else { return };
        host.retiring = true;
        let mut own = Vec::new();
        for give_up in [false, true] {
            if give_up && host.inside_of_others() > 0 {
                tracing::warn!("I/O of other workers does not end: given up, as the completion worker goes");
                host.inner().cancel_all();
            }
            let deadline = Instant::now() + PATIENCE;
            while host.inside_of_others() > 0 {
                let left = deadline.saturating_duration_since(Instant::now());
                let waited = host.inner().wait(Some(left));
                host.reap(&mut own, &self.table);
                own.clear();
                if left.is_zero() || waited.is_err() {
                    break;
                }
            }
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if self.seat == NOT_STARTED {
            return;
        }
        self.cancel_all();
        self.finish_others();
        self.resign();
        let table = Arc::clone(&self.table);
        let mut seats = table.lock();
        if let Some(seat) = seats.seat(self.seat) {
            seat.gone = true;
        }
        if seats.host.is_none() {
            seats.files.release_all(self.seat);
            seats.files.free_released(|_| ());
            let gone = self.seat;
            seats.list.retain(|seat| seat.id != gone);
        }
        table.changed(&seats);
    }
}

/// For the next host.
fn lay_down(lines: Vec<Option<Line>>, seats: &mut Seats) {
    for line in lines.into_iter().flatten() {
        if line.gone {
            seats.files.release_all(line.seat);
            seats.list.retain(|seat| seat.id != line.seat);
        } else if let Some(seat) = seats.seat(line.seat) {
            // What is still inside was not to be had back from the kernel: it never ends.
            seat.line = Some(Line { inside: 0, ..line });
        }
    }
    // Members that left while this host still was one, but did not look at its lines any more.
    let gone: Vec<_> = seats.list.iter().filter(|seat| seat.gone).map(|seat| seat.id).collect();
    gone.into_iter().for_each(|seat| seats.files.release_all(seat));
    seats.list.retain(|seat| !seat.gone);
    seats.files.free_released(|_| ());
}

impl Engine for Member {
    fn describe(&self) -> String {
        format!("on the completion worker, handed over by {}", self.table.policy)
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
        self.work(false)
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

    fn stats(&self) -> Stats {
        self.host.as_ref().map_or_else(Stats::default, |host| host.stats())
    }

    fn serves_others(&self) -> bool {
        self.needed
    }

    fn take_unseen_work(&mut self) -> usize {
        self.host.as_mut().map_or(0, |host| host.take_unseen_work())
    }
}
