//! A worker's engine in placement `shared`.
//!
//! Dropping the participant cancels the worker's ops in flight and waits until the engine is empty. An op that takes
//! too long stays in the engine, and its completion is dropped.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rtrb::{Consumer, Producer, RingBuffer};

use super::shared_engine::{Entry, Group, Registry, SharedEngine};
use crate::engine::{Completion, Engine, Event, FileId, FileSpec, Op, OpError, Stats, WatchId, WatchToken};
use crate::placed::epoll_wait::{EpollWait, WorkerWaker};
use crate::placed::group::Registry as _;
use crate::placed::limits::{no_watches, share};
use crate::placed::routed_engine::{Outlet, put, unstarted};

/// How long a leaving worker waits for the engine to become empty.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the leaving worker checks: the worker that reaps does not notify it.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The id of a participant that has not joined.
const NOT_STARTED: u64 = u64::MAX;

pub(super) struct Participant {
    group: Arc<Group>,
    worker: u32,
    id: u64,
    /// The index of this participant's outlet.
    channel: u32,
    /// The producer of `done`, until the engine is started.
    done_end: Option<Producer<Completion>>,
    epoll_wait: EpollWait,
    is_owner: bool,
    staged: VecDeque<Op>,
    done: Consumer<Completion>,
    /// Ops that ended before they reached the engine.
    ended: VecDeque<Completion>,
    in_flight: usize,
    /// This worker's files.
    files: Vec<FileId>,
    /// Scratch buffer for the workers to wake.
    wakers: Vec<Arc<WorkerWaker>>,
    seen_changes: u64,
    /// The worker's share of the depth at the last change that it applied: a caller that has seen room may still use
    /// it.
    share: usize,
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
            share: 0,
            served: 0,
        })
    }

    fn join(&mut self) -> io::Result<()> {
        let group = Arc::clone(&self.group);
        let mut registry = group.registry();
        share(group.depth as usize, registry.participants() + 1)?;
        let mut engine = group.lock();
        let engine = match &mut *engine {
            Some(engine) => engine,
            none => none.insert(SharedEngine::start(&group)?),
        };
        let Some(done) = self.done_end.take() else { unreachable!("an engine is started once") };
        let waker = Arc::clone(&self.epoll_wait.waker);
        let index = put(&mut engine.outlets, Outlet::new(done, Arc::clone(&waker)));
        #[allow(clippy::cast_possible_truncation)] // at most depth / LEAST_SHARE
        let channel = index as u32;
        self.channel = channel;
        self.id = registry.next_id;
        registry.next_id += 1;
        registry.list.push(Entry { id: self.id, worker: self.worker, waker });
        group.changed(&registry);
        self.share = group.share();
        Ok(())
    }

    /// Uses the engine under the lock, then wakes the workers that got completions.
    #[inline]
    fn with<R>(
        &mut self,
        act: impl FnOnce(&mut SharedEngine, &Group, &mut VecDeque<Op>) -> R,
    ) -> io::Result<R> {
        let group = Arc::clone(&self.group);
        let mut guard = group.lock();
        let Some(engine) = guard.as_mut() else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let result = act(engine, &group, &mut self.staged);
        engine.take_touched(self.channel, &mut self.wakers);
        self.served += engine.routed.inner.take_unseen_work();
        drop(guard);
        let mut woken = 0;
        for waker in self.wakers.drain(..) {
            woken += u64::from(waker.wake());
            self.served += 1;
        }
        group.counters.participant_wake_ups.add(woken);
        Ok(result)
    }

    /// Applies a change of the registry.
    #[cold]
    fn update(&mut self) -> io::Result<()> {
        self.seen_changes = self.group.changes();
        self.share = self.group.share();
        let is_owner = self.group.registry().owner().is_some_and(|owner| owner.id == self.id);
        if is_owner && !self.is_owner {
            let fd = self.with(|engine, _, _| engine.routed.inner.descriptor())??;
            self.epoll_wait.watch_inner(fd)?;
        } else if !is_owner {
            self.epoll_wait.forget_inner();
        }
        self.is_owner = is_owner;
        Ok(())
    }

    /// Whether a worker is leaving. Acquire pairs with the Release in `drain`: all ops that the worker waits for are in
    /// the engine.
    fn must_wait(&self) -> bool {
        self.group.own.leaving.load(Ordering::Acquire) > 0
    }

    fn submit_staged(&mut self) -> io::Result<()> {
        let channel = self.channel;
        let reaps = self.group.own.reap_on_submit;
        self.with(|engine, group, staged| {
            let mut count = 0;
            while engine.routed.has_room() {
                let Some(op) = staged.pop_front() else { break };
                let pushed = engine.routed.push(op, channel);
                debug_assert!(pushed.is_ok(), "there was room");
                count += 1;
            }
            if let Some(Some(outlet)) = engine.outlets.get_mut(channel as usize) {
                outlet.inside += count;
            }
            group.counters.hand_overs.add(1);
            group.counters.ops.add(count as u64);
            let submitted = engine.routed.inner.submit();
            // Relaxed: a hint, see `SharedEngine::reap`.
            group.own.inside.store(engine.routed.inner.in_flight(), Ordering::Relaxed);
            if reaps {
                engine.reap_and_submit(group)?;
            }
            submitted
        })?
    }

    fn has_work(&self) -> bool {
        let staged = !self.staged.is_empty() && !self.must_wait();
        let ended = !self.done.is_empty() || !self.ended.is_empty();
        staged || ended || self.group.changes() != self.seen_changes
    }

    fn cancel(&mut self, files: &[FileId]) {
        let mut ended = VecDeque::new();
        let _ = self.with(|engine, _, staged| {
            staged.retain_mut(|op| {
                let is_cancelled = files.contains(&op.file);
                if is_cancelled {
                    let buffers = guest_mem::IoVecs::with_capacity(0);
                    let taken = Op { buffers: std::mem::replace(&mut op.buffers, buffers), ..*op };
                    ended.push_back(unstarted(taken, OpError::Cancelled));
                }
                !is_cancelled
            });
            files.iter().for_each(|file| engine.routed.inner.cancel_file(*file));
        });
        self.ended.extend(ended);
    }

    /// Waits until the engine is empty, because the kernel cancels this thread's calls when the thread ends.
    fn drain(&mut self) -> bool {
        // Release: pairs with `must_wait`.
        self.group.own.leaving.fetch_add(1, Ordering::Release);
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        let is_empty = loop {
            let left = self.with(|engine, group, _| {
                let _ = engine.reap_and_submit(group);
                engine.routed.inner.in_flight()
            });
            match left {
                Ok(0) | Err(_) => break true,
                Ok(_) if Instant::now() >= deadline => break false,
                Ok(_) => std::thread::sleep(CHECK_INTERVAL),
            }
        };
        self.group.own.leaving.fetch_sub(1, Ordering::Release);
        is_empty
    }

    /// Returns the engine if this was the last participant.
    fn leave(&mut self, registry: &mut Registry) -> Option<SharedEngine> {
        registry.list.retain(|entry| entry.id != self.id);
        let mut guard = self.group.lock();
        let engine = guard.as_mut()?;
        let place = &mut engine.outlets[self.channel as usize];
        let is_idle = place.as_ref().is_none_or(|outlet| outlet.inside == 0);
        for file in self.files.drain(..).filter(|_| is_idle) {
            engine.routed.inner.detach_file(file);
        }
        if let Some(outlet) = place {
            outlet.gone = true;
        }
        place.take_if(|outlet| outlet.inside == 0);
        if registry.list.is_empty() { guard.take() } else { None }
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        if self.id == NOT_STARTED {
            return;
        }
        self.cancel_all();
        // The last participant drops the engine, which waits for its ops.
        let is_last = self.group.registry().list.len() == 1;
        if !is_last && !self.drain() {
            tracing::warn!("a worker leaves a shared engine although I/O in it has not ended");
        }
        self.epoll_wait.forget_inner();
        let group = Arc::clone(&self.group);
        let mut registry = group.registry();
        let last = self.leave(&mut registry);
        group.changed(&registry);
        drop(registry);
        // Dropped without holding the locks, because it waits for the ops in flight.
        drop(last);
    }
}

impl Engine for Participant {
    fn describe(&self) -> String {
        let reaping = if self.group.own.reap_on_submit {
            "the worker that submits also reaps"
        } else {
            "one worker reaps"
        };
        format!("shared behind a lock, {reaping}")
    }

    /// Registers the worker as a participant.
    fn start(&mut self) -> io::Result<()> {
        self.join()
    }

    fn room(&self) -> usize {
        self.share.saturating_sub(self.in_flight)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn push(&mut self, op: Op) -> Result<(), Op> {
        if self.room() == 0 {
            return Err(op);
        }
        assert!(self.files.contains(&op.file), "{:?} is not attached", op.file);
        self.in_flight += 1;
        self.staged.push_back(op);
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.epoll_wait.end_sleep();
        if self.group.changes() != self.seen_changes {
            self.update()?;
        }
        if self.staged.is_empty() || self.must_wait() { Ok(()) } else { self.submit_staged() }
    }

    fn reap(&mut self, events: &mut Vec<Event>) {
        self.epoll_wait.end_sleep();
        if self.is_owner && self.group.own.inside.load(Ordering::Relaxed) > 0 {
            // If the engine is broken, the next `submit` reports it.
            let _ = self.with(|engine, group, _| engine.reap_and_submit(group));
        }
        let before = events.len();
        events.extend(self.ended.drain(..).map(Event::Completed));
        while let Ok(completion) = self.done.pop() {
            events.push(Event::Completed(completion));
        }
        self.in_flight -= events.len() - before;
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let slept = if self.arm()? { self.epoll_wait.sleep(timeout) } else { Ok(()) };
        self.disarm()?;
        slept
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.submit()?;
        let mut may_sleep = true;
        if self.is_owner {
            may_sleep = self.with(|engine, group, _| {
                engine.reap_and_submit(group)?;
                engine.routed.inner.arm()
            })??;
        }
        self.epoll_wait.begin_sleep();
        Ok(may_sleep && !self.has_work())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.epoll_wait.end_sleep();
        if self.is_owner {
            return self.with(|engine, _, _| engine.routed.inner.disarm())?;
        }
        Ok(())
    }

    fn descriptor(&mut self) -> io::Result<OwnedFd> {
        self.epoll_wait.descriptor()
    }

    /// The worker's base engine watches kicks instead.
    fn watch(&mut self, _fd: Arc<OwnedFd>, _token: WatchToken) -> io::Result<WatchId> {
        Err(no_watches())
    }

    fn unwatch(&mut self, _id: WatchId) {}

    fn cancel_all(&mut self) {
        let files = self.files.clone();
        self.cancel(&files);
    }

    fn cancel_file(&mut self, file: FileId) {
        self.cancel(&[file]);
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        let file = self.with(|engine, _, _| engine.routed.inner.attach_file(spec))??;
        self.files.push(file);
        Ok(file)
    }

    fn detach_file(&mut self, file: FileId) {
        assert!(self.files.contains(&file), "{file:?} is not attached");
        self.files.retain(|other| *other != file);
        let _ = self.with(|engine, _, _| engine.routed.inner.detach_file(file));
    }

    /// The completion worker reports the counters of all workers together.
    fn stats(&self) -> Stats {
        let guard = if self.is_owner { Some(self.group.lock()) } else { None };
        guard.and_then(|engine| engine.as_ref().map(|engine| engine.routed.inner.stats())).unwrap_or_default()
    }

    fn keeps_running(&self) -> bool {
        self.is_owner && self.group.share() < self.group.depth as usize
    }

    /// Other participants may wake this worker.
    fn wakes_when_idle(&self) -> bool {
        true
    }

    fn take_unseen_work(&mut self) -> usize {
        std::mem::take(&mut self.served)
    }
}
