//! A worker's engine in placement `completion`, whether or not the worker owns the real engine.
//!
//! not the owner: `push → staged → submit: ring, wake-up → … → completion ring → reap`
//! the owner: `push → engine → reap`; each `submit` also serves the others' ops
//!
//! - The owner may change at any `submit`. The worker's ops and their tokens stay the same.
//! - Dropping a participant cancels its ops without waiting for them: the owner keeps the ops and their memory until
//!   the kernel is done. Dropping the owner waits for the others' ops, and cancels those that take too long.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rtrb::{Consumer, Producer, RingBuffer};

use super::owner::Owner;
use super::registry::{Channel, Entry, Group, Registry};
use crate::engine::{Completion, Engine, Event, FileId, FileSpec, Op, OpError, Stats, WatchId, WatchToken};
use crate::placed::epoll_wait::{EpollWait, WorkerWaker};
use crate::placed::group::Registry as _;
use crate::placed::limits::{no_watches, share};
use crate::placed::routed_engine::{Outlet, unstarted};

/// How long a dropped owner waits for the others' ops before it cancels them, and again after that.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the owner may wait for its engine to become empty if no caller waits for the change. The disk's new
/// requests are delayed meanwhile.
const CHANGE_LIMIT: Duration = Duration::from_secs(5);

/// The id of a participant that has not joined.
const NOT_STARTED: u64 = u64::MAX;

pub(super) struct Participant {
    group: Arc<Group>,
    worker: u32,
    id: u64,
    /// The owner's ends of the rings, until the engine is started.
    ends: Option<(Consumer<Op>, Producer<Completion>)>,
    epoll_wait: EpollWait,
    /// Ops that were not yet handed over.
    staged: VecDeque<Op>,
    /// When the oldest staged op was pushed, if the policy has a time limit.
    oldest: Option<Instant>,
    /// An op was pushed since the last `submit`.
    fresh: bool,
    /// Number of ops in the ring whose wake-up was skipped, and the time of the first one.
    spared: Option<(usize, Instant)>,
    ops: Producer<Op>,
    done: Consumer<Completion>,
    /// Ops that ended before they were handed over.
    ended: VecDeque<Completion>,
    in_flight: usize,
    owner: Option<Box<Owner>>,
    owner_waker: Option<Arc<WorkerWaker>>,
    /// This participant is or will be the owner, and has others to serve.
    needed: bool,
    /// When this participant stops waiting to become the owner.
    give_up_at: Option<Instant>,
    seen_changes: u64,
    /// The worker's share of the depth at the last change that it applied: a caller that has seen room may still use
    /// it.
    share: usize,
}

impl Participant {
    pub fn new(group: Arc<Group>, worker: u32) -> io::Result<Self> {
        let depth = group.depth as usize;
        let epoll_wait = EpollWait::new()?;
        let (ops, ops_end) = RingBuffer::new(depth);
        let (done_end, done) = RingBuffer::new(depth);
        Ok(Self {
            group,
            worker,
            id: NOT_STARTED,
            ends: Some((ops_end, done_end)),
            epoll_wait,
            staged: VecDeque::with_capacity(depth),
            oldest: None,
            fresh: false,
            spared: None,
            ops,
            done,
            ended: VecDeque::with_capacity(depth),
            in_flight: 0,
            owner: None,
            owner_waker: None,
            needed: false,
            give_up_at: None,
            seen_changes: 0,
            share: 0,
        })
    }

    fn join(&mut self) -> io::Result<()> {
        let group = Arc::clone(&self.group);
        let mut registry = group.registry();
        share(group.depth as usize, registry.participants() + 1)?;
        let Some((ops, done)) = self.ends.take() else { unreachable!("an engine is started once") };
        self.id = registry.next_id;
        registry.next_id += 1;
        let waker = Arc::clone(&self.epoll_wait.waker);
        let channel = Channel::new(self.id, ops, Outlet::new(done, Arc::clone(&waker)));
        registry.list.push(Entry::new(self.id, self.worker, waker, channel));
        self.update(&mut registry)?;
        group.changed(&registry);
        self.share = group.share();
        Ok(())
    }

    /// Applies a change of the registry. Becomes the owner if there is none and this participant should take that role.
    #[cold]
    fn update(&mut self, registry: &mut Registry) -> io::Result<()> {
        self.seen_changes = self.group.changes();
        self.share = self.group.share();
        let wanted = registry.wanted_owner().or_else(|| registry.retry_all());
        if let Some(owner) = &mut self.owner {
            owner.sync(registry);
            owner.retiring = wanted != Some(self.id);
        } else if registry.owner.is_none() && wanted == Some(self.id) {
            match self.make_owner() {
                Ok(owner) => self.become_owner(owner, registry),
                Err(error) => self.decline(error, registry)?,
            }
        }
        self.owner_waker = registry.owner_waker();
        // Ops handed over to no owner, or to the previous one, did not wake the current owner.
        if self.owner.is_none() && self.ops.slots() < self.ops.buffer().capacity() {
            self.wake_owner();
        }
        let has_role = self.owner.is_some() || wanted == Some(self.id);
        self.needed = has_role && registry.participants() > 1;
        let is_limited = registry.limited_by_owner(self.id, self.worker).is_some();
        let give_up_at = || self.give_up_at.unwrap_or_else(|| Instant::now() + CHANGE_LIMIT);
        self.give_up_at = is_limited.then(give_up_at);
        Ok(())
    }

    /// Lets the current owner continue, which had stopped taking new ops because this participant was to replace it.
    #[cold]
    fn give_up(&mut self) -> io::Result<()> {
        let group = Arc::clone(&self.group);
        let mut registry = group.registry();
        self.update(&mut registry)?;
        let (Some(_), Some(other)) = (self.give_up_at, registry.limited_by_owner(self.id, self.worker))
        else {
            return Ok(());
        };
        registry.wanted = None;
        let (worker, disk) = (self.worker, registry.limited.take().unwrap_or_default());
        tracing::error!(
            disk = &*disk,
            "worker {worker} cannot become the completion worker: requests in worker {other}'s engine have not ended \
             after {} s; worker {other} keeps the role; to try again: \
             `bareblk ctl placement {disk} --completion-worker {worker}`",
            CHANGE_LIMIT.as_secs()
        );
        group.changed(&registry);
        Ok(())
    }

    fn make_owner(&mut self) -> io::Result<Owner> {
        let mut owner = Owner::start(&self.group)?;
        self.epoll_wait.watch_inner(owner.inner_mut().descriptor()?)?;
        Ok(owner)
    }

    fn become_owner(&mut self, mut owner: Owner, registry: &mut Registry) {
        owner.sync(registry);
        self.owner = Some(Box::new(owner));
        registry.owner = Some(self.id);
        // The others must wake this worker from now on.
        self.group.changed(registry);
    }

    /// Handles a failure to make the engine. Another participant becomes the owner if one can.
    fn decline(&mut self, error: io::Error, registry: &mut Registry) -> io::Result<()> {
        if let Some(entry) = registry.entry(self.id) {
            entry.unable = true;
        }
        if registry.wanted_owner().is_none() {
            return Err(error);
        }
        tracing::error!("this worker cannot be the completion worker, so another worker is tried: {error}");
        self.group.changed(registry);
        Ok(())
    }

    /// One pass without the sleep. `last`: the worker sleeps after this pass.
    #[inline]
    fn work(&mut self, last: bool) -> io::Result<()> {
        self.epoll_wait.end_sleep();
        if self.group.changes() != self.seen_changes {
            let group = Arc::clone(&self.group);
            self.update(&mut group.registry())?;
        }
        if self.give_up_at.is_some_and(|at| Instant::now() >= at) {
            self.give_up()?;
        }
        if self.owner.is_some() { self.work_as_owner() } else { self.hand_over(last) }
    }

    #[inline]
    fn work_as_owner(&mut self) -> io::Result<()> {
        let Some(owner) = &mut self.owner else { return Ok(()) };
        while owner.has_room() {
            let Some(op) = self.staged.pop_front() else { break };
            owner.push_own(op, &self.group);
        }
        owner.serve(&self.group)?;
        if owner.has_leavers() {
            owner.sync(&mut self.group.registry());
        }
        if owner.retiring && owner.inner().in_flight() == 0 {
            self.give_up_ownership();
            return self.hand_over(true);
        }
        Ok(())
    }

    /// Drops the engine, which is empty, so that the next owner can start one.
    #[cold]
    fn give_up_ownership(&mut self) {
        let Some(owner) = self.owner.take() else { return };
        self.epoll_wait.forget_inner();
        let (channels, ended) = owner.end();
        self.ended.extend(ended);
        let group = Arc::clone(&self.group);
        let mut registry = group.registry();
        registry.take_back(channels);
        registry.owner = None;
        group.counters.moves.add(1);
        group.changed(&registry);
    }

    #[inline]
    fn hand_over(&mut self, last: bool) -> io::Result<()> {
        let policy = self.group.own.policy;
        let quiet = !std::mem::take(&mut self.fresh);
        if !self.staged.is_empty() {
            let age = || self.oldest.map_or(Duration::ZERO, |oldest| oldest.elapsed());
            if last || policy.adaptive || policy.is_due(self.staged.len(), quiet, age) {
                self.publish();
            }
        }
        if self.spared.is_some() && self.ops.slots() == self.ops.buffer().capacity() {
            self.spared = None; // the owner has taken the ops
            self.group.counters.spared_wake_ups.add(1);
        }
        if let Some((count, since)) = self.spared
            && (last || policy.is_due(count, false, || since.elapsed()) || !self.may_spare())
        {
            self.wake_owner();
        }
        Ok(())
    }

    /// Moves the staged ops into the ring.
    #[inline]
    fn publish(&mut self) {
        let count = self.staged.len();
        for op in self.staged.drain(..) {
            let pushed = self.ops.push(op);
            debug_assert!(pushed.is_ok(), "the ring has room for all ops that may be in flight");
        }
        self.oldest = None;
        self.group.counters.hand_overs.add(1);
        self.group.counters.ops.add(count as u64);
        let before = self.spared.take();
        if self.group.own.policy.adaptive && self.may_spare() {
            let (waiting, since) = before.unwrap_or_else(|| (0, Instant::now()));
            self.spared = Some((waiting + count, since));
        } else {
            self.wake_owner();
        }
    }

    /// Whether the owner sleeps with I/O in flight that will wake it. A hint: `submit` and `arm` check again.
    #[inline]
    fn may_spare(&self) -> bool {
        self.group.own.busy.load(Relaxed) > 0
            && self.owner_waker.as_ref().is_some_and(|waker| waker.seems_asleep())
    }

    #[inline]
    fn wake_owner(&mut self) {
        self.spared = None;
        // If the owner has just changed, `update` wakes the new one.
        let woken = self.owner_waker.as_ref().is_some_and(|waker| waker.wake());
        self.group.counters.owner_wake_ups.add(u64::from(woken));
    }

    #[inline]
    fn stage(&mut self, op: Op) {
        if self.staged.is_empty() && self.group.own.policy.max_delay.is_some() {
            self.oldest = Some(Instant::now());
        }
        self.fresh = true;
        self.staged.push_back(op);
    }

    fn has_work(&self) -> bool {
        // An owner's staged ops wait for room in the engine. The completion that frees room also wakes the worker.
        let staged = !self.staged.is_empty() && self.owner.as_ref().is_none_or(|owner| owner.has_room());
        let ended = !self.done.is_empty() || !self.ended.is_empty();
        let handed_over = self.owner.as_ref().is_some_and(|owner| owner.has_work());
        staged || ended || handed_over || self.group.changes() != self.seen_changes
    }

    /// Cancels the ops on `files`: staged ops here, the others through the owner.
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
        let group = Arc::clone(&self.group);
        let mut registry = group.registry();
        if let Some(entry) = registry.entry(self.id) {
            entry.cancelled.extend(files);
        }
        if let Some(owner) = &mut self.owner {
            owner.sync(&mut registry);
        }
        group.changed(&registry);
    }

    /// Waits for the other participants' ops in the engine, and passes their completions on.
    fn finish_others(&mut self) {
        let Some(owner) = &mut self.owner else { return };
        owner.retiring = true;
        let mut own = Vec::new();
        for cancels in [false, true] {
            if cancels && owner.inside_of_others() > 0 {
                tracing::warn!(
                    "I/O of other workers has not ended in time: the completion worker stops waiting for it and ends"
                );
                owner.inner_mut().cancel_all();
            }
            let deadline = Instant::now() + DRAIN_TIMEOUT;
            while owner.inside_of_others() > 0 {
                let left = deadline.saturating_duration_since(Instant::now());
                let waited = owner.inner_mut().wait(Some(left));
                owner.reap(&mut own, &self.group);
                own.clear();
                if left.is_zero() || waited.is_err() {
                    break;
                }
            }
        }
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        if self.id == NOT_STARTED {
            return;
        }
        self.cancel_all();
        self.finish_others();
        self.give_up_ownership();
        let group = Arc::clone(&self.group);
        let mut registry = group.registry();
        if let Some(entry) = registry.entry(self.id) {
            entry.gone = true;
        }
        if registry.owner.is_none() {
            registry.remove(self.id);
            registry.files.free_released(|_| ());
        }
        group.changed(&registry);
    }
}

impl Engine for Participant {
    fn describe(&self) -> String {
        format!("on the completion worker, handed over by {}", self.group.own.policy)
    }

    /// Registers the worker as a participant.
    fn start(&mut self) -> io::Result<()> {
        self.join()
    }

    #[inline]
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
        let len_bytes = op.kind.range().map_or(0, |range| range.len_bytes());
        assert!(
            !op.kind.moves_data() || op.buffers.remaining_bytes() == len_bytes,
            "buffers differ from the range"
        );
        self.in_flight += 1;
        match &mut self.owner {
            Some(owner) if self.staged.is_empty() && owner.has_room() => owner.push_own(op, &self.group),
            _ => self.stage(op),
        }
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.work(false)
    }

    fn reap(&mut self, events: &mut Vec<Event>) {
        self.epoll_wait.end_sleep();
        let before = events.len();
        events.extend(self.ended.drain(..).map(Event::Completed));
        if let Some(owner) = &mut self.owner {
            owner.reap(events, &self.group);
        }
        while let Ok(completion) = self.done.pop() {
            events.push(Event::Completed(completion));
        }
        self.in_flight -= events.len() - before;
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let may_sleep = self.arm()?;
        let due = self.give_up_at.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.into_iter().chain(due).min();
        let slept = if may_sleep { self.epoll_wait.sleep(timeout) } else { Ok(()) };
        self.disarm()?;
        slept
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.work(true)?;
        let inner_may_sleep = match &mut self.owner {
            Some(owner) => {
                // Must happen before others see this worker asleep: they do not wake it if I/O in flight will.
                self.group.own.busy.store(owner.inner().in_flight(), Relaxed);
                owner.inner_mut().arm()?
            }
            None => true,
        };
        self.epoll_wait.begin_sleep();
        Ok(inner_may_sleep && !self.has_work())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.epoll_wait.end_sleep();
        self.owner.as_mut().map_or(Ok(()), |owner| owner.inner_mut().disarm())
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
        let files = self.group.registry().files.of(self.id);
        self.cancel(&files);
    }

    fn cancel_file(&mut self, file: FileId) {
        self.cancel(&[file]);
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        let group = Arc::clone(&self.group);
        let mut registry = group.registry();
        let file = registry.files.add(self.id, spec.clone())?;
        let attached = self.owner.as_mut().map_or(Ok(()), |owner| owner.attach_own(file, spec));
        if attached.is_err() {
            registry.files.release(file);
            registry.files.free_released(|_| ());
        }
        attached.map(|()| file)
    }

    fn detach_file(&mut self, file: FileId) {
        let group = Arc::clone(&self.group);
        let mut registry = group.registry();
        assert!(registry.files.release(file), "{file:?} is not attached");
        match (&mut self.owner, registry.owner) {
            (Some(owner), _) => owner.sync(&mut registry),
            (None, None) => registry.files.free_released(|_| ()),
            (None, Some(_)) => group.changed(&registry),
        }
    }

    fn stats(&self) -> Stats {
        self.owner.as_ref().map_or_else(Stats::default, |owner| owner.inner().stats())
    }

    fn keeps_running(&self) -> bool {
        self.needed
    }

    /// Other participants may wake this worker.
    fn wakes_when_idle(&self) -> bool {
        true
    }

    fn due(&self) -> Option<Instant> {
        self.give_up_at
    }

    fn take_unseen_work(&mut self) -> usize {
        self.owner.as_mut().map_or(0, |owner| owner.take_unseen_work())
    }
}
