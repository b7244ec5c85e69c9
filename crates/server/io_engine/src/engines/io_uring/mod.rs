//! The io_uring engine: one ring per worker, for all its disks and all its kicks.
//!
//! `queue → submission ring → one io_uring_enter per batch → completion ring → pop`
//!
//! - The ring is created disabled, possibly on another thread. Its worker enables it and is its single issuer.
//! - With deferred task-run, completions appear only inside `io_uring_enter`. The kernel sets a flag when such work is
//!   pending, so `reap` needs no system call to check.
//! - A kick fd has a multishot poll and is never read: each write is an edge and posts one completion. If the kernel
//!   ends a poll (completion ring overflow), the engine arms it again.
//! - The engine has no timer: an idle worker sleeps in `io_uring_enter` without a timeout.
//! - Three options change this: a kernel thread that submits for the first ring (`sqpoll.rs`), a second ring that the
//!   engine polls (`iopoll.rs`), and registered, hence pinned, guest memory (`pinned.rs`).

mod setup;

mod entries;

mod sqpoll;

mod iopoll;
mod iopoll_probe;

mod pinned;

mod workers;

mod capabilities;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_mem::GuestMemory;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, Submitter, cqueue, opcode, squeue};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

pub use self::capabilities::io_uring_capabilities;
use self::entries::entry;
use self::iopoll::{FileCheck, PolledRing};
use self::pinned::Pinned;
pub use self::setup::{Features, FileTableKind, IoUringOptions, KernelAge};
use self::setup::{Kind, Rings};
use self::workers::KernelWorkers;
use crate::backend::{Call, IoBackend, QueueFull, RawResult, Target};
use crate::config::EngineConfig;
use crate::core::Core;
use crate::engine::{Event, FileSpec, WatchId, WatchToken};
use crate::engines::watches::WatchTable;

/// Marks `user_data` of polls. The other bits are the watch's index and generation.
const WATCH_BIT: u64 = 1 << 63;
/// `user_data` of calls whose result the engine ignores.
const IGNORED: u64 = u64::MAX;
/// Delay before the engine tries again when the kernel has no memory for a call.
const RETRY_AFTER: Duration = Duration::from_millis(10);

/// An engine with one ring or two, not yet started.
pub type IoUringEngine = Core<Uring>;

impl IoUringEngine {
    /// Makes an engine with the newest features that this kernel has.
    ///
    /// # Errors
    /// Those of [`IoUringEngine::with`].
    pub fn new(config: EngineConfig) -> io::Result<Self> {
        Self::with(&IoUringOptions::default(), &config)
    }

    /// Makes an engine with these options, with a second ring for `iopoll`.
    ///
    /// # Errors
    /// The kernel's error with a text that says what to do: [`io::ErrorKind::Unsupported`] if the kernel has no
    /// io_uring or is older than Linux 5.13, [`io::ErrorKind::PermissionDenied`] if io_uring or only `sqpoll_idle` is
    /// forbidden (`kernel.io_uring_disabled`, seccomp).
    pub fn with(options: &IoUringOptions, config: &EngineConfig) -> io::Result<Self> {
        Ok(Self::over(Uring::make(KernelAge::Newest, options, config)?, config))
    }

    /// Makes an engine as if the kernel were no newer than `age`, to test the fallbacks.
    ///
    /// # Errors
    /// Those of [`IoUringEngine::with`].
    pub fn as_if_on(age: KernelAge, config: EngineConfig) -> io::Result<Self> {
        Ok(Self::over(Uring::make(age, &IoUringOptions::default(), &config)?, &config))
    }

    /// Makes an engine as if every file could be polled (`iopoll`): the second ring accepts all reads and writes, but
    /// completes them by interrupt. For tests of two rings without a device that supports polling.
    ///
    /// # Errors
    /// Those of [`IoUringEngine::with`].
    pub fn as_if_polled(options: &IoUringOptions, config: EngineConfig) -> io::Result<Self> {
        Ok(Self::over(Uring::make_polled(options, &config)?, &config))
    }

    /// Which optional features the kernel has.
    #[must_use]
    pub fn features(&self) -> Features {
        self.backend.features
    }
}

/// The backend.
pub struct Uring {
    // The rings are declared first, so that they are closed before the memory that they may point to is freed.
    ring: IoUring,
    polled: Option<Box<PolledRing>>,
    pinned: Option<Box<Pinned>>,
    features: Features,
    workers: KernelWorkers,
    /// Polls and cancellations that wait for space in the submission ring.
    control: VecDeque<squeue::Entry>,
    watches: WatchTable,
    /// Number of completions that `pop` may still return in this pass. Limited, so that a peer that keeps writing to
    /// its kick fd cannot keep the worker in `reap`.
    budget: usize,
    /// Calls in flight, excluding polls and calls on the second ring.
    calls: usize,
    /// An eventfd that every result signals, for a worker that sleeps on several engines. Created on first use.
    signal: Option<OwnedFd>,
    /// Files that calls refer to by descriptor. Used only with a kernel thread that submits, see `Drop`.
    numbered: HashMap<u32, Arc<File>>,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("features", &self.features).finish_non_exhaustive()
    }
}

impl Uring {
    fn make(age: KernelAge, options: &IoUringOptions, config: &EngineConfig) -> io::Result<Self> {
        let second = options.iopoll.then_some(Kind::CompletionPolled);
        Self::with_second(age, options, config, second, FileCheck::Probe)
    }

    /// See [`IoUringEngine::as_if_polled`].
    fn make_polled(options: &IoUringOptions, config: &EngineConfig) -> io::Result<Self> {
        Self::with_second(KernelAge::Newest, options, config, Some(Kind::Pretended), FileCheck::TakeAll)
    }

    fn with_second(
        age: KernelAge,
        options: &IoUringOptions,
        config: &EngineConfig,
        second: Option<Kind>,
        check: FileCheck,
    ) -> io::Result<Self> {
        // Deferred task-run needs a single issuer. With cooperative task-run, a thread that polls would not run the
        // task work of the calls that it started.
        let age = if config.several_threads { age.max(KernelAge::Before5_19) } else { age };
        let rings = setup::make_rings(age, options, config, second);
        let Rings { first, second, features } = rings.map_err(|error| setup::explain(&error, options))?;
        let polled = second
            .map(|ring| Box::new(PolledRing::new(ring, check, config.depth, features.registered_files)));
        Ok(Self::new(first, polled, features))
    }

    fn new(ring: IoUring, polled: Option<Box<PolledRing>>, features: Features) -> Self {
        Self {
            ring,
            polled,
            pinned: features.pinned.then(|| Box::new(Pinned::new())),
            features,
            workers: KernelWorkers::default(),
            control: VecDeque::with_capacity(64),
            watches: WatchTable::default(),
            budget: 0,
            calls: 0,
            signal: None,
            numbered: HashMap::new(),
        }
    }

    /// Moves waiting entries into the submission ring until it is full.
    #[inline]
    fn move_control(&mut self) {
        while let Some(entry) = self.control.front() {
            // SAFETY: 1. polls and cancellations point to no memory; a watch holds the fd of its poll until the kernel
            // has released it.
            if unsafe { self.ring.submission().push(entry) }.is_err() {
                return;
            }
            self.control.pop_front();
        }
    }

    fn arm(&mut self, id: WatchId, fd: &OwnedFd) {
        #[allow(clippy::cast_sign_loss)] // a bit mask
        let events = libc::POLLIN as u32;
        let poll = opcode::PollAdd::new(Fd(fd.as_raw_fd()), events).multi(true).build();
        self.control.push_back(poll.user_data(watch_name(id)));
    }

    #[cold]
    fn on_poll(&mut self, cqe: &cqueue::Entry) {
        let Some(id) = watch_of(cqe.user_data()) else { return };
        let ended = !cqueue::more(cqe.flags());
        let error = (cqe.result() < 0).then(|| Errno::from_raw_os_error(-cqe.result()));
        let Some(fd) = self.watches.active_fd(id) else {
            if ended {
                self.watches.released(id);
            }
            return;
        };
        let goes_on = error.is_none() && self.watches.may_go_on(id, ended);
        let what = if goes_on { Ok(()) } else { Err(error.unwrap_or(Errno::PERM)) };
        self.watches.fire(id, what);
        if goes_on && ended {
            self.arm(id, &fd);
        }
    }

    fn enter(
        &self,
        to_submit: u32,
        min_complete: u32,
        flags: EnterFlags,
        timeout: Option<Duration>,
    ) -> io::Result<usize> {
        let timespec = timeout.map(Timespec::from);
        let args = SubmitArgs::new();
        let args = timespec.as_ref().map_or(args, |timespec| args.timespec(timespec));
        let flags = (flags | EnterFlags::EXT_ARG).bits();
        // SAFETY: 1. queued entries: `queue` and `move_control` guarantee them; 2. the argument has the layout that
        // EXT_ARG requires, and it and the data it points to live until the call returns.
        unsafe { self.ring.submitter().enter(to_submit, min_complete, flags, Some(&args)) }
    }

    /// Entries in the submission ring that the kernel has not consumed.
    #[inline]
    fn queued(&self) -> u32 {
        // SAFETY: 1. no other `SubmissionQueue` exists: they live only inside methods that take
        // `&mut self`, and none of those calls this one while it holds one.
        let queue = unsafe { self.ring.submission_shared() };
        #[allow(clippy::cast_possible_truncation)] // the ring's size is 32 bits
        let queued = queue.len() as u32;
        queued
    }

    fn has_results(&mut self) -> bool {
        !self.ring.completion().is_empty() || self.watches.has_ready()
    }

    /// Whether the kernel has results that appear only after `io_uring_enter`.
    #[inline]
    fn has_work_inside(&mut self) -> bool {
        let queue = self.ring.submission();
        queue.taskrun() || queue.cq_overflow()
    }

    /// Alternately polls the second ring and checks the first ring's completion queue.
    fn wait_polling(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            self.submit()?;
            let polled = self.polled.as_mut().is_some_and(|polled| polled.poll());
            if polled || self.has_results() || self.has_work_inside() {
                return Ok(());
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(());
            }
        }
    }

    /// Calls `act` with the table of registered memory and the rings that have one.
    fn with_pinned(&mut self, act: impl FnOnce(&mut Pinned, &[Submitter<'_>])) {
        let Some(pinned) = &mut self.pinned else { return };
        let rings = [&self.ring].into_iter().map(IoUring::submitter);
        let rings: Vec<_> = rings.chain(self.polled.as_ref().map(|polled| polled.submitter())).collect();
        act(pinned, &rings);
    }

    /// Flags that keep a worker without I/O in flight out of I/O wait, as shown by `top`.
    fn wait_flags(&self) -> EnterFlags {
        let idle = self.calls == 0 && self.features.no_iowait;
        EnterFlags::GETEVENTS | if idle { EnterFlags::NO_IOWAIT } else { EnterFlags::empty() }
    }
}

fn watch_name(id: WatchId) -> u64 {
    WATCH_BIT | u64::from(id.generation) << 32 | u64::from(id.index)
}

/// Returns `None` for the result of a cancellation.
fn watch_of(user_data: u64) -> Option<WatchId> {
    #[allow(clippy::cast_possible_truncation)] // the halves of a 64-bit number
    let (generation, index) = (((user_data & !WATCH_BIT) >> 32) as u32, user_data as u32);
    (user_data != IGNORED).then_some(WatchId { index, generation })
}

impl IoBackend for Uring {
    fn describe(&self) -> String {
        format!("io_uring: {}", self.features)
    }

    fn check_shareable(&self) -> io::Result<()> {
        if self.features.deferred_task_run || self.polled.is_some() {
            let text = "an io_uring engine for several threads needs `several_threads` and excludes `iopoll`";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(())
    }

    /// The kernel passes the requests of one system call to the device only after it has prepared all of them.
    fn batch(&self) -> usize {
        8
    }

    fn start(&mut self) -> io::Result<()> {
        // Must happen before the restrictions take effect.
        setup::bind_kernel_workers(&self.ring);
        self.ring.submitter().register_enable_rings()?;
        self.polled.as_ref().map_or(Ok(()), |polled| polled.enable())
    }

    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target> {
        let fd = spec.file()?.as_raw_fd();
        if index < self.features.registered_files {
            match self.ring.submitter().register_files_update(index, &[fd]) {
                Ok(_) => {
                    if let Some(polled) = &mut self.polled {
                        polled.register_file(index, spec);
                    }
                    return Ok(Target::Registered(index));
                }
                Err(error) => {
                    tracing::debug!(%error, "cannot register the file with io_uring, so calls use its descriptor")
                }
            }
        }
        if self.features.sqpoll {
            self.numbered.insert(index, Arc::clone(spec.file()?));
        }
        Ok(Target::Fd(fd))
    }

    fn unregister_file(&mut self, index: u32, target: Target) {
        self.numbered.remove(&index);
        let Target::Registered(index) = target else { return };
        if let Some(polled) = &mut self.polled {
            polled.unregister_file(index);
        }
        if let Err(error) = self.ring.submitter().register_files_update(index, &[-1]) {
            tracing::warn!(%error, "io_uring could not release a detached file, which stays open");
        }
        if self.features.sqpoll {
            self.wait_for_thread();
        }
    }

    fn expect(&mut self, disks: u32, calls: u32) {
        self.workers.expect(&self.ring, disks, calls, self.features.sqpoll);
        if let Some(polled) = &mut self.polled {
            polled.expect(calls);
        }
    }

    fn use_memory(&mut self, memory: &Arc<GuestMemory>) {
        self.with_pinned(|pinned, rings| pinned.use_memory(rings, memory));
    }

    fn forget_memory(&mut self, memory: &Arc<GuestMemory>) {
        self.with_pinned(|pinned, rings| pinned.forget_memory(rings, memory));
    }

    #[inline]
    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull> {
        let piece = self.pinned.as_ref().and_then(|pinned| pinned.piece_of(call));
        let entry = entry(target, call, piece).user_data(user_data);
        if let Some(polled) = &mut self.polled
            && polled.takes(target, call.verb)
        {
            // SAFETY: 1. the caller keeps buffers and file alive until it has the result.
            return unsafe { polled.queue(&entry, target) };
        }
        // SAFETY: 1. the caller keeps buffers and file alive until it has the result.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| QueueFull)?;
        self.calls += 1;
        Ok(())
    }

    #[inline]
    fn submit(&mut self) -> io::Result<()> {
        if let Some(polled) = &mut self.polled {
            polled.submit()?;
        }
        if self.features.sqpoll {
            return self.submit_to_thread();
        }
        loop {
            self.move_control();
            if self.queued() == 0 {
                return Ok(());
            }
            match self.ring.submitter().submit() {
                // The rest of `control`, or of a batch that a kernel before 5.18 ended at a failed entry.
                Ok(taken) if taken > 0 => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The kernel has no memory for calls, or the worker must reap first. The next submission or `wait`
                // tries again.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                    return Ok(());
                }
                Ok(_) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    #[inline]
    fn begin_reap(&mut self) {
        if self.ring.completion().is_empty() && self.has_work_inside() {
            // An error (a signal) leaves the flag set: the next pass tries again.
            let _ = self.enter(0, 0, EnterFlags::GETEVENTS, None);
        }
        self.budget = self.ring.completion().len();
        if let Some(polled) = &mut self.polled {
            polled.begin_reap();
        }
    }

    #[inline]
    fn pop(&mut self) -> Option<RawResult> {
        while self.budget > 0 {
            self.budget -= 1;
            let Some(cqe) = self.ring.completion().next() else { break };
            if cqe.user_data() & WATCH_BIT == 0 {
                self.calls -= 1;
                return Some(RawResult { user_data: cqe.user_data(), result: cqe.result() });
            }
            self.on_poll(&cqe);
        }
        self.polled.as_mut().and_then(|polled| polled.pop())
    }

    #[inline]
    fn take_ready(&mut self, events: &mut Vec<Event>) {
        if self.watches.has_ready() {
            self.watches.take_ready(events);
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.polled.as_ref().is_some_and(|polled| polled.is_busy()) {
            return self.wait_polling(timeout);
        }
        self.move_control();
        if !self.control.is_empty() {
            self.submit()?; // the ring is full: make room first
        }
        if self.has_results() || timeout == Some(Duration::ZERO) {
            return self.submit();
        }
        let wake = if self.features.sqpoll { self.wake_flag() } else { EnterFlags::empty() };
        let waited = self.enter(self.queued(), 1, self.wait_flags() | wake, timeout);
        match waited.as_ref().map_err(io::Error::raw_os_error) {
            // Interrupted, timed out, or results must be reaped first.
            Ok(_) | Err(Some(libc::EINTR | libc::ETIME | libc::EBUSY)) => Ok(()),
            Err(Some(libc::EAGAIN)) => {
                let timeout = timeout.unwrap_or(RETRY_AFTER).min(RETRY_AFTER);
                let _ = self.enter(0, 1, self.wait_flags(), Some(timeout));
                Ok(())
            }
            Err(_) => waited.map(drop),
        }
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.submit()?;
        let polls = self.polled.as_ref().is_some_and(|polled| polled.is_busy());
        Ok(!polls && self.control.is_empty() && !self.has_results() && !self.has_work_inside())
    }

    fn disarm(&mut self) -> io::Result<()> {
        if let Some(signal) = &self.signal {
            let _ = rustix::io::read(signal, &mut [0_u8; 8]); // empty if something else ended the sleep
        }
        Ok(())
    }

    /// Returns an eventfd instead of the ring's own descriptor. With `DEFER_TASKRUN`, work that is left for this thread
    /// signals an eventfd but does not wake a thread that polls the ring (seen with Linux 6.18). Kicks are different:
    /// an eventfd that is triggered by another eventfd is signalled only once, so the kicks are watched by the engine
    /// that the worker sleeps in.
    fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>> {
        if self.signal.is_none() {
            let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            self.ring.submitter().register_eventfd(signal.as_raw_fd())?;
            self.signal = Some(signal);
        }
        self.signal.as_ref().map(AsFd::as_fd).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// A call on the second ring cannot be cancelled: the first ring does not find it, and the engine ignores that
    /// result.
    fn cancel(&mut self, user_data: u64) {
        self.control.push_back(opcode::AsyncCancel::new(user_data).build().user_data(IGNORED));
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        let id = self.watches.insert(Arc::clone(&fd), token);
        self.arm(id, &fd);
        Ok(id)
    }

    fn watch_own(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        let id = self.watch(fd, token)?;
        self.watches.trust(id);
        Ok(id)
    }

    fn unwatch(&mut self, id: WatchId) {
        if self.watches.stop(id) {
            // POLL_REMOVE would fail (EALREADY) while a kick is being delivered.
            self.cancel(watch_name(id));
        }
    }
}

impl Drop for Uring {
    /// A kernel thread that is stuck in a batch may look up a descriptor after the ring is closed. That descriptor's
    /// number must not refer to another file by then. Without such a thread, queued calls end with the ring.
    fn drop(&mut self) {
        if self.features.sqpoll && self.queued() > 0 {
            std::mem::forget(std::mem::take(&mut self.numbered));
        }
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod options_tests;
