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

use super::{Channel, Entry, Group, Registry, SharedEngine, share};
use crate::engine::{Completion, Engine, Event, FileId, FileSpec, Op, OpError, Stats, WatchId, WatchToken};
use crate::placed::completion::owner::unstarted;
use crate::placed::epoll_wait::{EpollWait, WorkerWaker};
use crate::placed::no_watches;
use crate::placed::routes::Route;

/// How long a worker that leaves waits for the engine to run dry.
const PATIENCE: Duration = Duration::from_secs(5);
/// Looks meanwhile: whoever reaps does not tell.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// The number of no entry.
const NOT_STARTED: u64 = u64::MAX;

pub(super) struct Participant {
    group: Arc<Group>,
    worker: u32,
    id: u64,
    channel: u32,
    /// The other end of `done`, until the engine is started.
    done_end: Option<Producer<Completion>>,
    epoll_wait: EpollWait,
    is_owner: bool,
    staged: VecDeque<Op>,
    done: Consumer<Completion>,
    /// Ops that ended before they came into the engine.
    ended: VecDeque<Completion>,
    in_flight: usize,
    /// Its files, and nobody else's.
    files: Vec<FileId>,
    /// Scratch: whom to ring.
    wakers: Vec<Arc<WorkerWaker>>,
    seen_changes: u64,
    served: usize,
}

impl Participant {
    pub fn new(group: Arc<Group>, worker: u32) -> io::Result<Self> {
        let depth = group.depth as usize;
        let epoll_wait = EpollWait::new()?;
        let (done_end, done) = RingBuffer::new(depth);
        Ok(Self {
            group,
            worker,
            id: NOT_STARTED,
            channel: 0,
            done_end: Some(done_end),
            epoll_wait,
            is_owner: false,
            staged: VecDeque::with_capacity(depth),
            done,
            ended: VecDeque::with_capacity(depth),
            in_flight: 0,
            files: Vec::new(),
            wakers: Vec::with_capacity(16),
            seen_changes: 0,
            served: 0,
        })
    }

    fn join(&mut self) -> io::Result<()> {
        let group = Arc::clone(&self.group);
        let mut registry = group.registry();
        share(group.depth as usize, registry.list.len() + 1)?;
        let mut shared = group.lock();
        let shared = match &mut *shared {
            Some(shared) => shared,
            none => none.insert(SharedEngine::open(&group)?),
        };
        let Some(done) = self.done_end.take() else { unreachable!("an engine is started once") };
        let waker = Arc::clone(&self.epoll_wait.waker);
        let channel = Channel { done, waker: Arc::clone(&waker), inside: 0, touched: false, gone: false };
        self.channel = shared.add(channel);
        self.id = registry.next_id;
        registry.next_id += 1;
        registry.list.push(Entry { id: self.id, worker: self.worker, waker });
        group.changed(&registry);
        Ok(())
    }

    /// Acts on the engine with the lock held; then rings whom that concerns.
    #[inline]
    fn with<R>(
        &mut self,
        act: impl FnOnce(&mut SharedEngine, &Group, &mut VecDeque<Op>) -> R,
    ) -> io::Result<R> {
        let group = Arc::clone(&self.group);
        let mut guard = group.lock();
        let Some(shared) = guard.as_mut() else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let result = act(shared, &group, &mut self.staged);
        shared.take_touched(self.channel, &mut self.wakers);
        self.served += shared.engine.take_unseen_work();
        drop(guard);
        let mut woken = 0;
        for waker in self.wakers.drain(..) {
            woken += u64::from(waker.wake());
            self.served += 1;
        }
        group.counters.participant_wake_ups.add(woken);
        Ok(result)
    }

    #[cold]
    fn look_around(&mut self) -> io::Result<()> {
        self.seen_changes = self.group.changes();
        let is_owner = self.group.registry().owner().is_some_and(|owner| owner.id == self.id);
        if is_owner && !self.is_owner {
            let fd = self.with(|shared, _, _| shared.engine.descriptor())??;
            self.epoll_wait.watch_inner(fd)?;
        } else if !is_owner {
            self.epoll_wait.forget_inner();
        }
        self.is_owner = is_owner;
        Ok(())
    }

    #[inline]
    fn work(&mut self) -> io::Result<()> {
        self.epoll_wait.end_sleep();
        if self.group.changes() != self.seen_changes {
            self.look_around()?;
        }
        if self.staged.is_empty() || self.must_wait() { Ok(()) } else { self.submit_staged() }
    }

    /// A worker leaves. Acquire: pairs with its Release, so that what it waits for is in the engine by now.
    fn must_wait(&self) -> bool {
        self.group.leaving.load(Ordering::Acquire) > 0
    }

    fn submit_staged(&mut self) -> io::Result<()> {
        let channel = self.channel;
        let reaps = self.group.reap_on_submit;
        self.with(|shared, group, staged| {
            let mut count = 0;
            while shared.routes.room() > 0 && shared.engine.room() > 0 {
                let Some(mut op) = staged.pop_front() else { break };
                let Some(place) = shared.routes.take(Route { channel, token: op.token }) else { break };
                op.token = place;
                let pushed = shared.engine.push(op);
                debug_assert!(pushed.is_ok(), "there was room");
                count += 1;
            }
            if let Some(Some(channel)) = shared.channels.get_mut(channel as usize) {
                channel.inside += count;
            }
            group.counters.hand_overs.add(1);
            group.counters.ops.add(count as u64);
            let submitted = shared.engine.submit();
            // Relaxed: a hint, see `SharedEngine::reap`.
            group.inside.store(shared.engine.in_flight(), Ordering::Relaxed);
            if reaps {
                reap_and_go_on(shared, group)?;
            }
            submitted
        })?
    }

    #[inline]
    fn reap(&mut self, events: &mut Vec<Event>) {
        self.epoll_wait.end_sleep();
        if self.is_owner && self.group.inside.load(Ordering::Relaxed) > 0 {
            // An error of the engine as a whole comes again with the next `submit`.
            let _ = self.with(|shared, group, _| reap_and_go_on(shared, group));
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
        if self.is_owner {
            may_sleep = self.with(|shared, group, _| {
                reap_and_go_on(shared, group)?;
                shared.engine.arm()
            })??;
        }
        self.epoll_wait.begin_sleep();
        Ok(may_sleep && !self.has_work())
    }

    fn has_work(&self) -> bool {
        let staged = !self.staged.is_empty() && !self.must_wait();
        let ended = !self.done.is_empty() || !self.ended.is_empty();
        staged || ended || self.group.changes() != self.seen_changes
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.epoll_wait.end_sleep();
        if self.is_owner {
            return self.with(|shared, _, _| shared.engine.disarm())?;
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let slept = if self.arm()? { self.epoll_wait.sleep(timeout) } else { Ok(()) };
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
        self.group.share.load(Ordering::Relaxed).saturating_sub(self.in_flight)
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        let file = self.with(|shared, _, _| shared.engine.attach_file(spec))??;
        self.files.push(file);
        Ok(file)
    }

    fn detach_file(&mut self, file: FileId) {
        assert!(self.files.contains(&file), "{file:?} is not attached");
        self.files.retain(|other| *other != file);
        let _ = self.with(|shared, _, _| shared.engine.detach_file(file));
    }

    fn cancel(&mut self, files: &[FileId]) {
        let mut ended = VecDeque::new();
        let _ = self.with(|shared, _, staged| {
            staged.retain_mut(|op| {
                let given_up = files.contains(&op.file);
                if given_up {
                    let buffers = guest_mem::IoVecs::with_capacity(0);
                    let taken = Op { buffers: std::mem::replace(&mut op.buffers, buffers), ..*op };
                    ended.push_back(unstarted(taken, OpError::Cancelled));
                }
                !given_up
            });
            files.iter().for_each(|file| shared.engine.cancel_file(*file));
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
        self.group.leaving.fetch_add(1, Ordering::Release);
        let deadline = Instant::now() + PATIENCE;
        let dry = loop {
            let left = self.with(|shared, group, _| {
                let _ = reap_and_go_on(shared, group);
                shared.engine.in_flight()
            });
            match left {
                Ok(0) | Err(_) => break true,
                Ok(_) if Instant::now() >= deadline => break false,
                Ok(_) => std::thread::sleep(LOOK_AGAIN),
            }
        };
        self.group.leaving.fetch_sub(1, Ordering::Release);
        dry
    }

    fn leave(&mut self, registry: &mut Registry) -> Option<SharedEngine> {
        registry.list.retain(|entry| entry.id != self.id);
        let mut guard = self.group.lock();
        let shared = guard.as_mut()?;
        for file in self.files.drain(..) {
            let is_idle =
                shared.channels[self.channel as usize].as_ref().is_none_or(|channel| channel.inside == 0);
            if is_idle {
                shared.engine.detach_file(file);
            }
        }
        let place = &mut shared.channels[self.channel as usize];
        if let Some(channel) = place {
            channel.gone = true;
        }
        place.take_if(|channel| channel.inside == 0);
        if registry.list.is_empty() { guard.take() } else { None }
    }
}

/// What is complete, and what follows from it.
fn reap_and_go_on(shared: &mut SharedEngine, group: &Group) -> io::Result<()> {
    shared.reap(group);
    shared.engine.submit()
}

impl Drop for Participant {
    fn drop(&mut self) {
        if self.id == NOT_STARTED {
            return;
        }
        self.cancel_all();
        // The last one lets the engine end, which waits for what is in it.
        let is_last = self.group.registry().list.len() == 1;
        if !is_last && !self.let_run_dry() {
            tracing::warn!("I/O does not end while a worker leaves the engine it shares");
        }
        self.epoll_wait.forget_inner();
        let group = Arc::clone(&self.group);
        let mut registry = group.registry();
        let last = self.leave(&mut registry);
        group.changed(&registry);
        drop(registry);
        // Outside the locks: it waits for what is still in flight.
        drop(last);
    }
}

impl Engine for Participant {
    fn describe(&self) -> String {
        let reaping = if self.group.reap_on_submit { "who submits reaps too" } else { "one worker reaps" };
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
        self.epoll_wait.descriptor()
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
        let guard = if self.is_owner { Some(self.group.lock()) } else { None };
        guard.and_then(|shared| shared.as_ref().map(|shared| shared.engine.stats())).unwrap_or_default()
    }

    fn wakes_when_idle(&self) -> bool {
        true
    }

    fn keeps_running(&self) -> bool {
        self.is_owner && self.group.share.load(Ordering::Relaxed) < self.group.depth as usize
    }

    fn take_unseen_work(&mut self) -> usize {
        std::mem::take(&mut self.served)
    }
}
