//! The io_uring engine: one ring per worker, for all its disks and all its kicks.
//!
//! `queue → submission ring → one io_uring_enter per batch → completion ring → pop`
//!
//! - The ring is made disabled, maybe on another thread, and enabled by its worker: a single issuer.
//! - With deferred task-run, completions appear only inside `io_uring_enter`; the kernel sets a flag when
//!   there is something to be run, so `reap` needs no system call to look.
//! - A kick fd has a multishot poll and is never read: each write is an edge and posts one completion. A
//!   poll that the kernel ended (completion ring overflow) is armed again.
//! - Nothing here runs on a timer: an idle worker sleeps in `io_uring_enter` without a timeout.
//!
//! Not here: set-up and fallbacks (`io_uring/setup.rs`), op logic (`core.rs`).

mod setup;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fd, Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue};
use rustix::io::Errno;

pub use self::setup::{Features, FileTableKind, KernelAge};
use crate::contract::{Engine, EngineConfig, Event, FileSpec, Handles, WatchId, WatchToken};
use crate::core::{Core, handles};
use crate::kernel::{Buffers, Call, Kernel, QueueFull, RawResult, Target};
use crate::record::Verb;
use crate::watches::WatchTable;

/// Marks `user_data` of polls; the rest is the watch's index and generation.
const WATCH_BIT: u64 = 1 << 63;
/// `user_data` of calls whose result nobody needs.
const IGNORED: u64 = u64::MAX;
/// How long to sleep when the kernel has no memory for our calls, before it is asked again.
const RETRY_AFTER: Duration = Duration::from_millis(10);

/// One io_uring, not yet started.
#[derive(Debug)]
pub struct IoUringEngine {
    config: EngineConfig,
    ring: Uring,
}

impl IoUringEngine {
    /// Makes a ring with whatever this kernel has.
    ///
    /// # Errors
    /// The kernel's: `ENOSYS` without io_uring, `EPERM` where it is forbidden (`kernel.io_uring_disabled`,
    /// seccomp), [`io::ErrorKind::Unsupported`] where it is too old (before Linux 5.13).
    pub fn new(config: EngineConfig) -> io::Result<Self> {
        Self::as_if_on(KernelAge::Newest, config)
    }

    /// Makes a ring as if the kernel were no newer than `age`: to test the fallbacks.
    ///
    /// # Errors
    /// As [`IoUringEngine::new`].
    pub fn as_if_on(age: KernelAge, config: EngineConfig) -> io::Result<Self> {
        let (ring, features) = setup::make_ring(age, &config)?;
        Ok(Self { config, ring: Uring::new(ring, features) })
    }

    /// What the kernel has of what the engine would like.
    #[must_use]
    pub fn features(&self) -> Features {
        self.ring.features
    }
}

impl Engine for IoUringEngine {
    fn start(self: Box<Self>) -> io::Result<Handles> {
        let mut core = Core::new(self.ring, &self.config);
        core.kernel.enable()?;
        Ok(handles(core))
    }

    fn describe(&self) -> String {
        format!("io_uring: {}", self.ring.features)
    }
}

struct Uring {
    ring: IoUring,
    features: Features,
    /// Polls and cancellations that wait for room in the submission ring.
    control: VecDeque<squeue::Entry>,
    watches: WatchTable,
    /// Completions that `pop` still hands out in this pass: a peer that keeps writing to its kick fd must
    /// not keep a worker in `reap`.
    budget: usize,
    /// Calls whose results are outstanding, polls not counted.
    calls: usize,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("features", &self.features).finish_non_exhaustive()
    }
}

impl Uring {
    fn new(ring: IoUring, features: Features) -> Self {
        let control = VecDeque::with_capacity(64);
        Self { ring, features, control, watches: WatchTable::default(), budget: 0, calls: 0 }
    }

    /// Moves what waits into the submission ring, as far as it has room.
    #[inline]
    fn move_control(&mut self) {
        while let Some(entry) = self.control.front() {
            // SAFETY: 1. polls and cancellations point to no memory; the fd of a poll is held by
            // its watch until the kernel has let go of it.
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
        // SAFETY: 1. queued entries: `queue` and `move_control` vouched for them; 2. the argument has the
        // layout that EXT_ARG asks for, and lives until the call returns, with what it points to.
        unsafe { self.ring.submitter().enter(to_submit, min_complete, flags, Some(&args)) }
    }

    /// Entries in the submission ring that the kernel has not taken.
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

    /// Waiting for nothing but kicks is no I/O wait, and should not look like one in `top`.
    fn wait_flags(&self) -> EnterFlags {
        let idle = self.calls == 0 && self.features.no_iowait;
        EnterFlags::GETEVENTS | if idle { EnterFlags::NO_IOWAIT } else { EnterFlags::empty() }
    }
}

fn watch_name(id: WatchId) -> u64 {
    WATCH_BIT | u64::from(id.generation) << 32 | u64::from(id.index)
}

/// `None`: the result of a cancellation.
fn watch_of(user_data: u64) -> Option<WatchId> {
    #[allow(clippy::cast_possible_truncation)] // the halves of a 64-bit number
    let (generation, index) = (((user_data & !WATCH_BIT) >> 32) as u32, user_data as u32);
    (user_data != IGNORED).then_some(WatchId { index, generation })
}

/// The submission entry for `call`. A macro, because `io-uring` seals the trait that its two ways to name a
/// file have in common.
macro_rules! entry {
    ($file:expr, $call:expr) => {{
        let Call { verb, flags, offset_bytes, len_bytes, buffers } = *$call;
        match (verb, buffers) {
            (Verb::Read, Buffers::One { base, len_bytes }) => {
                opcode::Read::new($file, base, len_bytes).offset(offset_bytes).rw_flags(flags).build()
            }
            (Verb::Read, Buffers::Many { first, count }) => {
                opcode::Readv::new($file, first, count).offset(offset_bytes).rw_flags(flags).build()
            }
            (Verb::Write, Buffers::One { base, len_bytes }) => {
                opcode::Write::new($file, base, len_bytes).offset(offset_bytes).rw_flags(flags).build()
            }
            (Verb::Write, Buffers::Many { first, count }) => {
                opcode::Writev::new($file, first, count).offset(offset_bytes).rw_flags(flags).build()
            }
            (Verb::Allocate, _) => {
                opcode::Fallocate::new($file, len_bytes).offset(offset_bytes).mode(flags).build()
            }
            (Verb::Sync, _) => opcode::Fsync::new($file).flags(FsyncFlags::DATASYNC).build(),
            (Verb::Read | Verb::Write, Buffers::None) => unreachable!("a transfer has buffers"),
        }
    }};
}

impl Kernel for Uring {
    fn enable(&mut self) -> io::Result<()> {
        self.ring.submitter().register_enable_rings()
    }

    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target> {
        let fd = spec.file.as_raw_fd();
        if index >= self.features.registered_files {
            return Ok(Target::Fd(fd));
        }
        Ok(match self.ring.submitter().register_files_update(index, &[fd]) {
            Ok(_) => Target::Registered(index),
            Err(error) => {
                tracing::debug!(%error, "file not registered with io_uring: used by its number");
                Target::Fd(fd)
            }
        })
    }

    fn unregister_file(&mut self, _index: u32, target: Target) {
        let Target::Registered(index) = target else { return };
        if let Err(error) = self.ring.submitter().register_files_update(index, &[-1]) {
            tracing::warn!(%error, "io_uring keeps a file that was detached");
        }
    }

    #[inline]
    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull> {
        let entry = match target {
            Target::Registered(index) => entry!(Fixed(index), call),
            Target::Fd(fd) => entry!(Fd(fd), call),
        };
        let entry = entry.user_data(user_data);
        // SAFETY: 1. the caller keeps buffers and file until it has the result.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| QueueFull)?;
        self.calls += 1;
        Ok(())
    }

    #[inline]
    fn submit(&mut self) -> io::Result<()> {
        loop {
            self.move_control();
            if self.queued() == 0 {
                return Ok(());
            }
            match self.ring.submitter().submit() {
                // The rest of `control`, or of a batch that a kernel before 5.18 broke off at an error.
                Ok(taken) if taken > 0 => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // No memory for calls, or completions to be reaped first: later, from `wait` at the latest.
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
        if self.ring.completion().is_empty() {
            let queue = self.ring.submission();
            let has_work = queue.taskrun() || queue.cq_overflow();
            drop(queue);
            if has_work {
                // An error (a signal) leaves the flag set: the next pass tries again.
                let _ = self.enter(0, 0, EnterFlags::GETEVENTS, None);
            }
        }
        self.budget = self.ring.completion().len();
    }

    #[inline]
    fn pop(&mut self) -> Option<RawResult> {
        while self.budget > 0 {
            self.budget -= 1;
            let cqe = self.ring.completion().next()?;
            if cqe.user_data() & WATCH_BIT == 0 {
                self.calls -= 1;
                return Some(RawResult { user_data: cqe.user_data(), result: cqe.result() });
            }
            self.on_poll(&cqe);
        }
        None
    }

    #[inline]
    fn take_ready(&mut self, events: &mut Vec<Event>) {
        if self.watches.has_ready() {
            self.watches.take_ready(events);
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.move_control();
        if !self.control.is_empty() {
            self.submit()?; // the ring is full: make room first
        }
        if self.has_results() || timeout == Some(Duration::ZERO) {
            return self.submit();
        }
        let waited = self.enter(self.queued(), 1, self.wait_flags(), timeout);
        match waited.as_ref().map_err(io::Error::raw_os_error) {
            // Interrupted, timed out, or results to be reaped first.
            Ok(_) | Err(Some(libc::EINTR | libc::ETIME | libc::EBUSY)) => Ok(()),
            Err(Some(libc::EAGAIN)) => {
                let timeout = timeout.unwrap_or(RETRY_AFTER).min(RETRY_AFTER);
                let _ = self.enter(0, 1, self.wait_flags(), Some(timeout));
                Ok(())
            }
            Err(_) => waited.map(drop),
        }
    }

    fn cancel(&mut self, user_data: u64) {
        self.control.push_back(opcode::AsyncCancel::new(user_data).build().user_data(IGNORED));
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        let id = self.watches.insert(Arc::clone(&fd), token);
        self.arm(id, &fd);
        Ok(id)
    }

    fn unwatch(&mut self, id: WatchId) {
        if self.watches.stop(id) {
            // Not POLL_REMOVE: that one gives up (EALREADY) when a kick is just being delivered.
            self.cancel(watch_name(id));
        }
    }
}

#[cfg(test)]
#[path = "io_uring/tests.rs"]
mod tests;
