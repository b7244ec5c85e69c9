//! The C library's asynchronous I/O: `aio_read`, `aio_write`, `aio_fsync`, with several descriptors per file.
//!
//! `queue → pieces, each with a control block and a descriptor → aio_read … → (waiter) → aio_error → pop`
//!
//! - glibc serves the requests of one descriptor in order, one after the other. This limits a file's throughput, so
//!   `posix_aio/fd_pool.rs` spreads requests over duplicates. It also means that the engine need only check the oldest
//!   request of each descriptor for a result. Other C libraries do not guarantee this order, so the engine refuses
//!   them.
//! - The library has no vectored requests: each piece of a call is a separate request (`posix_aio/requests.rs`).
//! - The library has no flag for a durable write, so the core adds a sync.
//! - The library has no `fallocate`, and `aio_fsync` refuses files that are open for reading only. Threads of the pool
//!   make these calls.
//!
//! Requests use `SIGEV_NONE`. While the worker sleeps, one waiter thread per busy descriptor blocks in `aio_suspend` on
//! the oldest request (`posix_aio/waiters.rs` explains why). The engine sends, blocks and handles no signals.

mod fd_pool;

mod requests;

mod waiters;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl};

use self::fd_pool::PoolFile;
use self::requests::Requests;
use self::waiters::Waiters;
use crate::backend::{Call, IoBackend, QueueFull, RawResult, Target, Verb};
use crate::config::EngineConfig;
use crate::core::Core;
use crate::engine::{Event, FileId, FileSpec, WatchId, WatchToken};
use crate::engines::epoll::EpollWatcher;
use crate::engines::threads::pool::{Job, Pool};

/// Passes between two checks of the watched fds, for a worker that never sleeps.
const LOOK_EVERY: u32 = 256;
/// Maximum number of descriptors per file. More are useless: glibc has 20 threads for all descriptors of the process.
pub const MAX_FD_POOL: u32 = 64;
/// Longest sleep if no thread can be started to wait for a request.
const BLIND_SLEEP: Duration = Duration::from_millis(1);

/// The options of `posix-aio`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PosixAioOptions {
    /// Number of descriptors per file. With 1, only the file's own.
    pub fd_pool: u32,
}

impl Default for PosixAioOptions {
    fn default() -> Self {
        Self { fd_pool: 4 }
    }
}

/// The engine, not yet started.
pub type PosixAioEngine = Core<PosixAio>;

impl PosixAioEngine {
    /// Makes the engine.
    ///
    /// # Errors
    /// As for [`PosixAioEngine::with`].
    pub fn new(config: EngineConfig) -> io::Result<Self> {
        Self::with(&PosixAioOptions::default(), &config)
    }

    /// Makes the engine with these options.
    ///
    /// # Errors
    /// Errors of the kernel, [`io::ErrorKind::InvalidInput`] if `fd_pool` is 0 or too large, and
    /// [`io::ErrorKind::Unsupported`] with a C library other than glibc.
    pub fn with(options: &PosixAioOptions, config: &EngineConfig) -> io::Result<Self> {
        if !cfg!(target_env = "gnu") {
            let error = "posix-aio needs a C library that serves a descriptor's requests in order, as only glibc does";
            return Err(io::Error::new(io::ErrorKind::Unsupported, error));
        }
        let fd_pool = options.fd_pool;
        if !(1..=MAX_FD_POOL).contains(&fd_pool) {
            let error = format!("posix-aio: fd-pool is {fd_pool}, but must be from 1 to {MAX_FD_POOL}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, error));
        }
        Ok(Self::over(PosixAio::new(options, config)?, config))
    }
}

/// A request that has a control block and a descriptor, and waits for `submit`.
#[derive(Clone, Copy, Debug)]
struct Staged {
    slot: u32,
    file: u32,
    descriptor: usize,
}

/// The backend.
#[derive(Debug)]
pub struct PosixAio {
    fd_pool: usize,
    files: Vec<Option<PoolFile>>,
    requests: Requests,
    staged: VecDeque<Staged>,
    /// Number of requests that the C library has accepted.
    started: usize,
    waiters: Waiters,
    pool: Pool,
    /// Jobs that the next `submit` gives to the pool.
    jobs: VecDeque<Job>,
    /// Number of jobs in the pool.
    pool_calls: usize,
    watcher: EpollWatcher,
    /// Number of results that `pop` may still return in this pass.
    budget: usize,
    passes: u32,
    /// A call found no free control block.
    starved: bool,
    /// Requests were cancelled, so requests behind a descriptor's oldest may also have ended.
    cancelled: bool,
}

impl PosixAio {
    fn new(options: &PosixAioOptions, config: &EngineConfig) -> io::Result<Self> {
        let queue = config.depth as usize;
        let requests = Requests::new(config.depth);
        let waiters = Waiters::new(Arc::clone(requests.blocks()))?;
        let pool = Pool::new(config.threads, config.depth)?;
        let mut watcher = EpollWatcher::new()?;
        watcher.add_waker(waiters.wake_fd())?;
        watcher.add_waker(pool.wake_fd())?;
        Ok(Self {
            fd_pool: options.fd_pool as usize,
            files: Vec::new(),
            staged: VecDeque::with_capacity(requests.capacity()),
            requests,
            started: 0,
            waiters,
            pool,
            jobs: VecDeque::with_capacity(queue),
            pool_calls: 0,
            watcher,
            budget: 0,
            passes: 0,
            starved: false,
            cancelled: false,
        })
    }

    /// Starts the staged requests in order. Requests that the C library has no resources for stay staged.
    fn start_staged(&mut self) {
        while let Some(&staged) = self.staged.front() {
            let Staged { slot, file, descriptor } = staged;
            let result = self.requests.start(slot);
            let Some(pool) = self.files.get_mut(file as usize).and_then(Option::as_mut) else { return };
            match result {
                Ok(()) => {
                    pool.started(descriptor, slot);
                    self.started += 1;
                }
                // The worker tries again when a request has ended and thereby freed its resources.
                Err(libc::EAGAIN) if self.started > 0 => return,
                Err(errno) => {
                    pool.ended(descriptor);
                    self.requests.finish(slot, -errno);
                }
            }
            self.staged.pop_front();
        }
    }

    /// Collects available results. Usually checks only each descriptor's oldest request.
    fn collect(&mut self) {
        let cancelled = std::mem::take(&mut self.cancelled);
        if self.started == 0 {
            return;
        }
        let (requests, mut done) = (&mut self.requests, 0);
        for file in self.files.iter_mut().flatten() {
            file.collect(cancelled, |slot| {
                let result = requests.blocks().result(slot);
                if let Some(result) = result {
                    requests.finish(slot, result);
                    done += 1;
                }
                result.is_some()
            });
        }
        self.started -= done;
    }

    fn collect_from_pool(&mut self) {
        if self.pool_calls > 0 {
            let results = &mut self.requests.results;
            let before = results.len();
            self.pool.take_results(results);
            self.pool_calls -= results.len() - before;
        }
    }

    /// Makes the next result end the sleep. Returns false if a result is already available.
    fn arm_threads(&mut self) -> bool {
        if self.pool_calls > 0 && !self.pool.arm() {
            return false;
        }
        if self.started == 0 && !self.starved {
            return true;
        }
        self.waiters.say_sleeping();
        if self.starved && self.requests.reclaim() {
            self.starved = false;
            return false;
        }
        let (blocks, waiters) = (self.requests.blocks(), &mut self.waiters);
        let mut files = self.files.iter_mut().flatten().filter(|file| file.in_flight() > 0);
        files.all(|file| file.watch_oldest(blocks, waiters))
    }

    fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = if !self.arm_threads() {
            Some(Duration::ZERO)
        } else if self.waiters.start() {
            timeout
        } else {
            Some(timeout.unwrap_or(BLIND_SLEEP).min(BLIND_SLEEP))
        };
        let waited = self.watcher.wait(timeout);
        self.waiters.disarm();
        self.pool.disarm();
        waited
    }

    fn queue_job(&mut self, user_data: u64, index: u32, call: &Call) {
        if let Some(file) = self.files.get(index as usize).and_then(Option::as_ref) {
            self.jobs.push_back(Job { user_data, owner: FileId(index), file: file.own(), call: *call });
        }
    }

    fn goes_to_the_pool(&self, index: u32, verb: Verb) -> bool {
        let read_only =
            || self.files.get(index as usize).and_then(Option::as_ref).is_some_and(|f| f.read_only);
        verb == Verb::Allocate || verb == Verb::Sync && read_only()
    }
}

impl IoBackend for PosixAio {
    fn describe(&self) -> String {
        match self.fd_pool {
            1 => "posix-aio: 1 descriptor per file".to_owned(),
            most => format!("posix-aio: up to {most} descriptors per file"),
        }
    }

    fn has_durable_writes(&self, _target: Target) -> bool {
        false
    }

    fn serve_one_disk(&mut self) {
        self.requests.shares.do_not_split();
        self.pool.serve_one_disk();
    }

    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target> {
        let read_only = fcntl_getfl(spec.file()?)? & OFlags::RWMODE == OFlags::RDONLY;
        let file = PoolFile::new(Arc::clone(spec.file()?), self.fd_pool, read_only);
        let place = index as usize;
        if place >= self.files.len() {
            self.files.resize_with(place + 1, || None);
        }
        self.files[place] = Some(file);
        self.requests.shares.attach(FileId(index));
        self.pool.attach(FileId(index));
        Ok(Target::Registered(index))
    }

    fn unregister_file(&mut self, index: u32, _target: Target) {
        if let Some(file) = self.files.get_mut(index as usize) {
            *file = None;
        }
        self.requests.shares.detach(FileId(index));
        self.pool.detach(FileId(index));
    }

    fn expect(&mut self, _disks: u32, calls: u32) {
        self.requests.expect(calls);
    }

    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull> {
        let Target::Registered(index) = target else { unreachable!("files are known by their index") };
        if self.goes_to_the_pool(index, call.verb) {
            self.queue_job(user_data, index, call);
            return Ok(());
        }
        let Some(file) = self.files.get_mut(index as usize).and_then(Option::as_mut) else {
            unreachable!("only calls on registered files are queued")
        };
        let staged = &mut self.staged;
        // SAFETY: 1. the caller keeps buffers and file alive until it has the result.
        let taken = unsafe {
            self.requests.take(user_data, FileId(index), call, |slot| {
                let (descriptor, fd) = file.pick();
                staged.push_back(Staged { slot, file: index, descriptor });
                fd
            })
        };
        // A file that has used up its share waits for its own requests, which end the sleep anyway.
        self.starved = !taken && self.requests.has_run_out();
        if taken { Ok(()) } else { Err(QueueFull) }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.start_staged();
        if !self.jobs.is_empty() {
            self.pool_calls += self.jobs.len();
            self.pool.push_batch(&mut self.jobs);
        }
        Ok(())
    }

    fn begin_reap(&mut self) {
        self.collect();
        self.collect_from_pool();
        self.passes = self.passes.wrapping_add(1);
        if self.passes.is_multiple_of(LOOK_EVERY) && !self.watcher.is_idle() {
            // If the error persists, `wait` reports it.
            let _ = self.watcher.wait(Some(Duration::ZERO));
        }
        self.budget = self.requests.results.len();
    }

    fn pop(&mut self) -> Option<RawResult> {
        self.budget = self.budget.checked_sub(1)?;
        self.requests.results.pop_front()
    }

    fn take_ready(&mut self, events: &mut Vec<Event>) {
        self.watcher.take_ready(events);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.submit()?;
        let has_results = self.cancelled || !self.requests.results.is_empty();
        if has_results || timeout == Some(Duration::ZERO) {
            return self.watcher.wait(Some(Duration::ZERO));
        }
        self.files.iter_mut().flatten().for_each(PoolFile::close_idle);
        self.sleep(timeout)
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.submit()?;
        let has_results = self.cancelled || !self.requests.results.is_empty();
        Ok(!has_results && self.arm_threads() && self.waiters.start())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.waiters.disarm();
        self.pool.disarm();
        self.watcher.wait(Some(Duration::ZERO))
    }

    fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.watcher.fd())
    }

    fn cancel(&mut self, user_data: u64) {
        let queued = self.jobs.iter().position(|job| job.user_data == user_data);
        if queued.is_some_and(|place| self.jobs.remove(place).is_some()) {
            self.requests.results.push_back(RawResult { user_data, result: -libc::ECANCELED });
        } else if self.pool_calls > 0 && self.pool.cancel(user_data) {
            self.pool_calls -= 1;
            self.requests.results.push_back(RawResult { user_data, result: -libc::ECANCELED });
        }
        let (requests, files) = (&mut self.requests, &mut self.files);
        for file in files.iter().flatten() {
            file.outstanding()
                .filter(|&slot| requests.user_data(slot) == user_data)
                .for_each(|slot| requests.cancel(slot));
        }
        self.staged.retain(|&Staged { slot, file, descriptor }| {
            let stays = requests.user_data(slot) != user_data;
            if let (false, Some(Some(file))) = (stays, files.get_mut(file as usize)) {
                file.ended(descriptor);
                requests.finish(slot, -libc::ECANCELED);
            }
            stays
        });
        self.cancelled = true;
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watcher.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.watcher.unwatch(id);
    }
}

impl Drop for PosixAio {
    /// While requests are outstanding, the C library's threads use the control blocks and the descriptor numbers. Both
    /// are then leaked, as is the core's memory.
    fn drop(&mut self) {
        if self.started > 0 {
            std::mem::forget(Arc::clone(self.requests.blocks()));
            std::mem::forget(std::mem::take(&mut self.files));
        }
    }
}

#[cfg(test)]
mod tests;
