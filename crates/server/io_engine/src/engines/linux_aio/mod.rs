//! The linux-aio engine: one context per worker, one `io_submit` per batch, completions from a shared ring.
//!
//! `queue → control block → one io_submit per batch → completion ring in user memory → pop`
//!
//! - `O_DIRECT` only: through the page cache, `io_submit` would wait for each transfer.
//! - epoll watches the kicks, and one `IOCB_CMD_POLL` watches the epoll fd, so kicks arrive as completions. `reap`
//!   reads the ring without a system call, and calls epoll only after that poll has fired. The engine arms the poll
//!   again with the next batch. A kick in between makes it fire at once.
//! - The worker sleeps in `io_getevents`, which wakes for completions and kicks and cannot lose a wake-up. The engine
//!   uses a timer only after the kernel had no memory for calls.
//! - Linux AIO has no `fallocate`, and no `fdatasync` before 4.18, so threads make those calls. Threads also make calls
//!   that do not fit the context: with many files, more calls than the depth may be in flight.
//! - `io_submit` blocks if the file system is frozen or the device's queue is full. A disk that hangs in this way stops
//!   its worker.
//! - A call that the kernel has accepted cannot be cancelled.
//!
//! Interface: io_submit(2), linux/aio_abi.h (`IOCB_CMD_POLL`: Linux 4.18).

mod calls;

mod completions;

mod context;

pub(crate) mod signal;

mod user_ring;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;

use self::calls::Calls;
use self::completions::Completions;
use self::context::{Command, Context, Iocb};
use self::user_ring::UserRing;
use crate::backend::{Buffers, Call, IoBackend, QueueFull, RawResult, Target, Verb};
use crate::config::EngineConfig;
use crate::core::Core;
use crate::engine::{Event, FileId, FileSpec, WatchId, WatchToken};
use crate::engines::epoll::EpollWatcher;
use crate::engines::threads::pool::{Job, Pool};

/// `IOCB_FLAG_RESFD`.
const RESFD: u32 = 1;

/// `data` of the poll for kicks. No op has it: the top bit of an op's `user_data` is clear.
const KICKS: u64 = u64::MAX;
/// Delay before the engine tries again when the kernel has no memory for a call.
const RETRY_AFTER: Duration = Duration::from_millis(10);
/// Largest depth that `io_setup` accepts, far above any host's limit (`fs.aio-max-nr`).
const MAX_DEPTH: u32 = 0x0fff_ffff;

const NEEDS_DIRECT: &str = "linux-aio needs O_DIRECT (--cache none or directsync): through the page cache \
                            io_submit waits for each transfer";

/// Linux AIO, not yet started.
pub type LinuxAioEngine = Core<LinuxAio>;

impl LinuxAioEngine {
    /// Makes an engine with a context for `config.depth` calls.
    ///
    /// # Errors
    /// [`io::ErrorKind::QuotaExceeded`] if `fs.aio-max-nr` is exhausted; [`io::ErrorKind::Unsupported`] if the kernel
    /// has no Linux AIO or is older than 4.18; [`io::ErrorKind::PermissionDenied`] if it is forbidden; other errors of
    /// the kernel.
    pub fn new(config: EngineConfig) -> io::Result<Self> {
        Ok(Self::over(LinuxAio::make(&config)?, &config))
    }
}

/// The backend.
#[derive(Debug)]
pub struct LinuxAio {
    // Declared before the memory that calls point to, so that it is dropped first.
    context: Context,
    completions: Completions,
    depth: u32,
    calls: Calls,
    watcher: EpollWatcher,
    /// The poll for kicks is queued, or the kernel has it.
    kicks_armed: bool,
    /// False if the kernel does not support `IOCB_CMD_FDSYNC`.
    has_fdsync: bool,
    /// Jobs for threads. The next submit starts them.
    jobs: VecDeque<Job>,
    /// Jobs whose results the engine has not collected.
    jobs_out: usize,
    pool: Pool,
    /// Results that did not come from the context.
    finished: VecDeque<RawResult>,
    /// Number of results that `pop` may still return from `finished` in this pass.
    budget: usize,
    files: Vec<Option<Arc<File>>>,
    /// An eventfd that every result signals, for a worker that sleeps on several engines.
    signal: Option<OwnedFd>,
}

impl LinuxAio {
    fn make(config: &EngineConfig) -> io::Result<Self> {
        if config.depth == 0 || config.depth >= MAX_DEPTH {
            let text = format!("linux-aio depth {} is not between 1 and {}", config.depth, MAX_DEPTH - 1);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        // One more than the depth, for the kicks.
        let context = Context::new(config.depth + 1)?;
        let ring = UserRing::of(&context);
        Self::new(context, ring, config)
    }

    fn new(context: Context, ring: Option<UserRing>, config: &EngineConfig) -> io::Result<Self> {
        let depth = config.depth as usize;
        let pool = Pool::new(config.threads, config.depth)?;
        let mut watcher = EpollWatcher::new()?;
        watcher.add_waker(pool.wake_fd())?;
        let mut aio = Self {
            context,
            completions: Completions::new(ring),
            depth: config.depth,
            calls: Calls::new(config.depth + 1),
            watcher,
            kicks_armed: false,
            has_fdsync: true,
            jobs: VecDeque::with_capacity(depth),
            jobs_out: 0,
            pool,
            finished: VecDeque::with_capacity(depth),
            budget: 0,
            files: Vec::new(),
            signal: None,
        };
        if config.pollable {
            aio.signal = Some(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        }
        aio.submit().map_err(cannot_poll)?;
        Ok(aio)
    }

    fn file(&self, target: Target) -> (FileId, &Arc<File>) {
        let Target::Registered(index) = target else { unreachable!("files are known by their index") };
        let file = self.files.get(index as usize).and_then(Option::as_ref);
        let file = file.unwrap_or_else(|| unreachable!("a call on a file that was unregistered"));
        (FileId(index), file)
    }

    /// Makes the ring report kicks from the next `io_submit` on.
    #[inline]
    fn arm_kicks(&mut self) {
        if !self.kicks_armed {
            let fd = self.watcher.fd().as_raw_fd();
            #[allow(clippy::cast_sign_loss)] // a bit mask
            let events = libc::POLLIN as u64;
            let poll = Iocb { buffer: events, ..iocb(KICKS, fd, Command::Poll) };
            // A block is free: `queue` reserves one.
            let poll = self.signalled(poll);
            self.kicks_armed = self.calls.push(poll);
        }
    }

    /// Handles a fired poll: a watch fired, or a thread has a result.
    #[cold]
    fn on_kicks(&mut self) {
        self.kicks_armed = false;
        // If the error persists, it recurs: the poll fires as soon as it is armed.
        let _ = self.watcher.wait(Some(Duration::ZERO));
    }

    #[inline]
    fn submit_calls(&mut self) -> io::Result<()> {
        while !self.calls.pending().is_empty() {
            // SAFETY: 1. the blocks belong to `calls`, which does not change them meanwhile; 2. the code that queued
            // the blocks guarantees the memory that they point to.
            match unsafe { self.context.submit(self.calls.pending()) } {
                Ok(0) => return Ok(()),
                Ok(taken) => self.calls.give(taken),
                // The ring is full, or the kernel has no memory. The next submission or `wait` tries again.
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                Err(errno) => self.refuse_first(errno)?,
            }
        }
        Ok(())
    }

    /// Completes the first pending call with the kernel's error.
    #[cold]
    fn refuse_first(&mut self, errno: Errno) -> io::Result<()> {
        let Some(call) = self.calls.take_first() else { return Ok(()) };
        if call.data == KICKS {
            self.kicks_armed = false;
            return Err(errno.into());
        }
        if call.command == Command::Fdsync as u16 && errno == Errno::INVAL && self.has_fdsync {
            self.has_fdsync = false;
            if let Some(job) = self.sync_job(&call) {
                self.jobs.push_back(job);
                return Ok(());
            }
        }
        self.finished.push_back(RawResult { user_data: call.data, result: -errno.raw_os_error() });
        Ok(())
    }

    fn sync_job(&self, call: &Iocb) -> Option<Job> {
        let is_its_file = |file: &Arc<File>| u32::try_from(file.as_raw_fd()) == Ok(call.fd);
        let mut files = (0..).zip(&self.files).filter_map(|(index, file)| Some((index, file.as_ref()?)));
        let (index, file) = files.find(|(_, file)| is_its_file(file))?;
        let (owner, file) = (FileId(index), Arc::clone(file));
        let sync = Call { verb: Verb::Sync, flags: 0, offset_bytes: 0, len_bytes: 0, buffers: Buffers::None };
        Some(Job { user_data: call.data, owner, file, call: sync })
    }

    #[inline]
    fn submit_jobs(&mut self) {
        if !self.jobs.is_empty() {
            self.jobs_out += self.jobs.len();
            self.pool.push_batch(&mut self.jobs);
        }
    }

    #[inline]
    fn take_job_results(&mut self) {
        if self.jobs_out > 0 {
            let before = self.finished.len();
            self.pool.take_results(&mut self.finished);
            self.jobs_out -= self.finished.len() - before;
        }
    }

    fn is_ready(&mut self) -> bool {
        !self.finished.is_empty() || self.completions.is_ready()
    }

    /// The call, extended to signal the eventfd if there is one.
    #[inline]
    fn signalled(&self, call: Iocb) -> Iocb {
        match &self.signal {
            #[allow(clippy::cast_sign_loss)] // an open file's number
            Some(signal) => Iocb { flags: RESFD, resfd: signal.as_raw_fd() as u32, ..call },
            None => call,
        }
    }

    /// Sleeps. The caller has armed the pool if necessary.
    fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.calls.pending().is_empty() {
            return Ok(self.completions.sleep(&self.context, timeout)?);
        }
        // The kernel had no memory for a call, possibly for the poll that reports kicks.
        let timeout = timeout.unwrap_or(RETRY_AFTER).min(RETRY_AFTER);
        self.completions.sleep(&self.context, Some(timeout))?;
        self.watcher.wait(Some(Duration::ZERO))
    }
}

/// A call without data.
#[inline]
fn iocb(data: u64, fd: RawFd, command: Command) -> Iocb {
    #[allow(clippy::cast_sign_loss)] // an open file's number
    let fd = fd as u32;
    Iocb { data, fd, command: command as u16, ..Iocb::default() }
}

/// Returns `None` for calls that Linux AIO does not have.
#[inline]
fn transfer(data: u64, fd: RawFd, call: &Call) -> Option<Iocb> {
    let Call { verb, flags, offset_bytes, buffers, .. } = *call;
    let (command, buffer, len) = match (verb, buffers) {
        (Verb::Read, Buffers::One { base, len_bytes }) => (Command::Pread, base.addr(), len_bytes),
        (Verb::Write, Buffers::One { base, len_bytes }) => (Command::Pwrite, base.addr(), len_bytes),
        (Verb::Read, Buffers::Many { first, count }) => (Command::Preadv, first.addr(), count),
        (Verb::Write, Buffers::Many { first, count }) => (Command::Pwritev, first.addr(), count),
        (Verb::Sync, _) => return Some(iocb(data, fd, Command::Fdsync)),
        (Verb::Allocate | Verb::Discard, _) => return None,
        (Verb::Read | Verb::Write, Buffers::None) => unreachable!("a transfer has buffers"),
    };
    #[allow(clippy::cast_possible_wrap)] // file offsets are below 2^63
    let offset_bytes = offset_bytes as i64;
    let (buffer, len) = (buffer as u64, len.into());
    Some(Iocb { rw_flags: flags, buffer, len, offset_bytes, ..iocb(data, fd, command) })
}

fn cannot_poll(error: io::Error) -> io::Error {
    if error.raw_os_error() != Some(libc::EINVAL) {
        return error;
    }
    let text = "this kernel's Linux AIO lacks IOCB_CMD_POLL (Linux 4.18): it is too old";
    io::Error::new(io::ErrorKind::Unsupported, text)
}

impl IoBackend for LinuxAio {
    fn describe(&self) -> String {
        let ring = if self.completions.has_ring() { "yes" } else { "no" };
        format!("linux-aio: {} calls at once, completions without a system call: {ring}", self.depth)
    }

    fn check_shareable(&self) -> io::Result<()> {
        Ok(())
    }

    fn serve_one_disk(&mut self) {
        self.pool.serve_one_disk();
    }

    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target> {
        if !fcntl_getfl(spec.file()?)?.contains(OFlags::DIRECT) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, NEEDS_DIRECT));
        }
        let place = index as usize;
        if place >= self.files.len() {
            self.files.resize_with(place + 1, || None);
        }
        self.files[place] = Some(Arc::clone(spec.file()?));
        self.pool.attach(FileId(index));
        Ok(Target::Registered(index))
    }

    fn unregister_file(&mut self, index: u32, _target: Target) {
        if let Some(file) = self.files.get_mut(index as usize) {
            *file = None;
        }
        self.pool.detach(FileId(index));
    }

    #[inline]
    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull> {
        let (owner, file) = self.file(target);
        // The last block is reserved for the kicks.
        let has_room = self.calls.free() > usize::from(!self.kicks_armed);
        let known = has_room && (call.verb != Verb::Sync || self.has_fdsync);
        let block = known.then(|| transfer(user_data, file.as_raw_fd(), call)).flatten();
        let Some(block) = block else {
            let job = Job { user_data, owner, file: Arc::clone(file), call: *call };
            self.jobs.push_back(job);
            return Ok(());
        };
        let block = self.signalled(block);
        if self.calls.push(block) { Ok(()) } else { Err(QueueFull) }
    }

    #[inline]
    fn submit(&mut self) -> io::Result<()> {
        self.arm_kicks();
        let submitted = self.submit_calls();
        self.submit_jobs();
        submitted
    }

    #[inline]
    fn begin_reap(&mut self) {
        self.take_job_results();
        self.budget = self.finished.len();
        self.completions.look(&self.context);
    }

    #[inline]
    fn pop(&mut self) -> Option<RawResult> {
        if self.budget > 0 {
            self.budget -= 1;
            return self.finished.pop_front();
        }
        while let Some(event) = self.completions.next() {
            self.calls.release(event.iocb);
            if event.data != KICKS {
                let result = i32::try_from(event.result).unwrap_or(i32::MAX);
                return Some(RawResult { user_data: event.data, result });
            }
            self.on_kicks();
        }
        None
    }

    #[inline]
    fn take_ready(&mut self, events: &mut Vec<Event>) {
        self.watcher.take_ready(events);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.submit()?;
        if self.is_ready() || timeout == Some(Duration::ZERO) {
            return Ok(());
        }
        if self.jobs_out == 0 {
            return self.sleep(timeout);
        }
        if self.pool.arm() {
            let slept = self.sleep(timeout);
            self.pool.disarm();
            return slept;
        }
        Ok(())
    }

    /// Returns false without the eventfd, because the worker can then sleep only in this context.
    fn arm(&mut self) -> io::Result<bool> {
        self.submit()?;
        let pool_sleeps = self.jobs_out == 0 || self.pool.arm();
        let taken = self.calls.pending().is_empty();
        Ok(self.signal.is_some() && pool_sleeps && taken && !self.is_ready())
    }

    fn disarm(&mut self) -> io::Result<()> {
        if self.jobs_out > 0 {
            self.pool.disarm();
        }
        if let Some(signal) = &self.signal {
            let _ = rustix::io::read(signal, &mut [0_u8; 8]);
        }
        Ok(())
    }

    fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.signal.as_ref().map_or(self.watcher.fd(), AsFd::as_fd))
    }

    fn cancel(&mut self, user_data: u64) {
        let waiting = self.jobs.iter().position(|job| job.user_data == user_data);
        let dropped = if let Some(place) = waiting {
            self.jobs.remove(place).is_some()
        } else if self.jobs_out > 0 && self.pool.cancel(user_data) {
            self.jobs_out -= 1;
            true
        } else {
            self.calls.take_pending(user_data).is_some()
        };
        if dropped {
            self.finished.push_back(RawResult { user_data, result: -libc::ECANCELED });
        }
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watcher.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.watcher.unwatch(id);
    }
}

impl Drop for LinuxAio {
    /// The core has already waited for the calls that are still in flight, and `io_destroy` might wait forever.
    fn drop(&mut self) {
        let poll_is_out = self.kicks_armed && self.calls.take_pending(KICKS).is_none();
        if self.calls.in_kernel() > usize::from(poll_is_out) {
            self.context.abandon();
            self.calls.abandon();
        }
    }
}

#[cfg(test)]
mod tests;
