//! Copies between guest memory and a mapping of the file, for files in memory (tmpfs, memfd, hugetlbfs) and on DAX.
//!
//! `queue → batch → (submit) copy each, prefetching ahead → judge each file → results → pop`
//!
//! - The engine judges each file once per batch, after the copies (`mapped_file.rs`). This detects truncation: the rest
//!   of the page with the new end reads as zeroes, and writes there are lost.
//! - A system call handles what a copy cannot: a range beyond the mapping, a batch during which the mapping was
//!   poisoned (`guest_mem::FileMapping`), and a write to a file opened for reading. Short reads, a full file system and
//!   broken memory therefore give the same results as in every other engine.
//! - A copy through a mapping would fill the holes of a file on tmpfs. System calls serve the parts that have holes
//!   (`presence.rs`). On hugetlbfs, and if the file is open for reading only, the kernel does not tell which pages are
//!   missing, and reading a hole fills it.
//! - A page fault stops the worker. In memory this is short, unless the page was swapped out. On DAX, a write to a hole
//!   waits until the file system has allocated blocks.
//! - `fdatasync` writes back data that was stored through mappings, so a sync follows each durable write.

mod copy;
mod mapped_file;
mod presence;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use self::mapped_file::MappedFile;
use crate::backend::{Call, IoBackend, QueueFull, RawResult, Target, Verb};
use crate::config::EngineConfig;
use crate::core::Core;
use crate::engine::{Event, FileId, FileSpec, WatchId, WatchToken};
use crate::engines::epoll::EpollWatcher;
use crate::engines::threads::pool::{Job, Pool};

/// How many requests ahead of the current copy to prefetch. Two and eight work equally well (docs/decisions/0014).
const PREFETCH_AHEAD: usize = 4;
/// Work between two checks of the watched fds: each pass counts one, plus one per [`BYTES_PER_WORK`]. A worker that
/// never sleeps thus sees kicks after at most 4 MiB of copies, for one system call.
const LOOK_EVERY: u64 = 256;
const BYTES_PER_WORK: u64 = 16 << 10;
/// Longest `fallocate` in the worker. Freeing pages takes time, so longer ranges go to the pool.
const MAX_INLINE_ALLOCATE_BYTES: u64 = 1 << 20;

/// The engine, not yet started.
pub type MmapEngine = Core<MmapBackend>;

impl MmapEngine {
    /// Makes the engine.
    ///
    /// # Errors
    /// Errors of the epoll set and the eventfd.
    pub fn new(config: EngineConfig) -> io::Result<Self> {
        Ok(Self::over(MmapBackend::new(&config)?, &config))
    }
}

/// A call that waits for `submit`.
#[derive(Clone, Copy, Debug)]
struct Queued {
    user_data: u64,
    file: u32,
    call: Call,
    /// Bytes that were copied. They are not trusted before the batch is judged.
    copied_bytes: Option<u32>,
}

/// The backend.
#[derive(Debug)]
pub struct MmapBackend {
    batch: Vec<Queued>,
    depth: usize,
    files: Vec<Option<MappedFile>>,
    /// Files with copies in this batch, without duplicates.
    touched: Vec<u32>,
    results: VecDeque<RawResult>,
    /// Number of results that `pop` may still return in this pass.
    budget: usize,
    pool: Pool,
    jobs: VecDeque<Job>,
    /// Jobs whose results are outstanding.
    jobs_in_pool: usize,
    watcher: EpollWatcher,
    work_since_look: u64,
}

// SAFETY: 1. the pointers in queued calls belong to ops that the engine's core owns; the core moves between threads
// together with this value and only before it is started, when there are no ops.
unsafe impl Send for MmapBackend {}

impl MmapBackend {
    fn new(config: &EngineConfig) -> io::Result<Self> {
        let depth = config.depth as usize;
        let pool = Pool::new(config.threads, config.depth)?;
        let mut watcher = EpollWatcher::new()?;
        watcher.add_waker(pool.wake_fd())?;
        Ok(Self {
            batch: Vec::with_capacity(depth),
            depth,
            files: Vec::new(),
            touched: Vec::new(),
            results: VecDeque::with_capacity(depth),
            budget: 0,
            pool,
            jobs: VecDeque::with_capacity(depth),
            jobs_in_pool: 0,
            watcher,
            work_since_look: 0,
        })
    }

    fn run_batch(&mut self) {
        let before = self.results.len();
        let all_copied = self.copy_batch();
        if self.judge_files() && all_copied {
            self.batch.clear();
            return;
        }
        self.results.truncate(before);
        let mut batch = std::mem::take(&mut self.batch);
        for queued in batch.drain(..) {
            self.conclude(&queued);
        }
        self.batch = batch;
    }

    /// Copies what can be copied, and sets the results as if all copies were trusted. Returns whether every call was
    /// copied.
    fn copy_batch(&mut self) -> bool {
        let mut all_copied = true;
        for at in 0..self.batch.len() {
            if let Some(next) = self.batch.get(at + PREFETCH_AHEAD) {
                prefetch(&self.files, next);
            }
            let queued = &mut self.batch[at];
            let Some(Some(file)) = self.files.get_mut(queued.file as usize) else { continue };
            // SAFETY: 1. the contract of `queue`: the buffers stay valid until the result was popped.
            queued.copied_bytes = unsafe { file.copy(&queued.call) };
            let Some(bytes) = queued.copied_bytes else {
                all_copied = false;
                continue;
            };
            #[allow(clippy::cast_possible_wrap)] // at most `MAX_COPY_BYTES`
            let result = bytes as i32;
            self.results.push_back(RawResult { user_data: queued.user_data, result });
            self.work_since_look += u64::from(bytes) / BYTES_PER_WORK;
            if file.note_touched() {
                self.touched.push(queued.file);
            }
        }
        all_copied
    }

    /// Returns whether all copies of the batch are trusted.
    fn judge_files(&mut self) -> bool {
        let mut all_trusted = true;
        for index in self.touched.drain(..) {
            if let Some(Some(file)) = self.files.get_mut(index as usize) {
                all_trusted &= file.judge();
            }
        }
        all_trusted
    }

    /// Sets a call's result, or hands the call to the pool.
    #[inline]
    fn conclude(&mut self, queued: &Queued) {
        let Queued { user_data, call, .. } = *queued;
        let Some(Some(file)) = self.files.get_mut(queued.file as usize) else { return };
        if call.verb == Verb::Allocate {
            file.note_allocate(&call);
        }
        let result = match queued.copied_bytes {
            #[allow(clippy::cast_possible_wrap)] // at most `MAX_COPY_BYTES`
            Some(bytes) if file.trusts(&call) => bytes as i32,
            None if goes_to_pool(file, &call) => {
                let owner = FileId(queued.file);
                self.jobs.push_back(Job { user_data, owner, file: Arc::clone(file.file()), call });
                return;
            }
            // SAFETY: 1. the contract of `queue`: the buffers stay valid until the result was popped.
            _ => unsafe { file.call_plainly(&call) },
        };
        self.results.push_back(RawResult { user_data, result });
    }

    fn take_from_pool(&mut self) {
        if self.jobs_in_pool > 0 {
            let before = self.results.len();
            self.pool.take_results(&mut self.results);
            self.jobs_in_pool -= self.results.len() - before;
        }
    }
}

#[inline]
fn prefetch(files: &[Option<MappedFile>], queued: &Queued) {
    let Some(Some(file)) = files.get(queued.file as usize) else { return };
    // SAFETY: 1. the contract of `queue`: the buffers stay valid until the result was popped.
    unsafe { file.prefetch(&queued.call) };
}

/// Whether a call may take long.
fn goes_to_pool(file: &MappedFile, call: &Call) -> bool {
    match call.verb {
        Verb::Read | Verb::Write | Verb::Discard => false,
        Verb::Sync => !file.is_memory(),
        Verb::Allocate => !file.is_memory() || call.len_bytes > MAX_INLINE_ALLOCATE_BYTES,
    }
}

impl MmapBackend {
    fn may_sleep(&mut self) -> bool {
        self.work_since_look = 0;
        self.results.is_empty() && (self.jobs_in_pool == 0 || self.pool.arm())
    }
}

impl IoBackend for MmapBackend {
    fn describe(&self) -> String {
        "mmap: copies between guest memory and a mapping of the file".to_owned()
    }

    fn has_durable_writes(&self, _target: Target) -> bool {
        false
    }

    fn serve_one_disk(&mut self) {
        self.pool.serve_one_disk();
    }

    fn register_file(&mut self, index: u32, spec: &FileSpec) -> io::Result<Target> {
        let file = MappedFile::new(spec.file()?)?;
        let place = index as usize;
        if place >= self.files.len() {
            self.files.resize_with(place + 1, || None);
            self.touched.reserve(place + 1);
        }
        self.files[place] = Some(file);
        self.pool.attach(FileId(index));
        Ok(Target::Registered(index))
    }

    fn unregister_file(&mut self, index: u32, _target: Target) {
        self.files[index as usize] = None;
        self.pool.detach(FileId(index));
    }

    #[inline]
    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull> {
        let Target::Registered(file) = target else { unreachable!("files are known by their index") };
        if self.batch.len() == self.depth {
            return Err(QueueFull);
        }
        self.batch.push(Queued { user_data, file, call: *call, copied_bytes: None });
        Ok(())
    }

    #[inline]
    fn submit(&mut self) -> io::Result<()> {
        if !self.batch.is_empty() {
            self.run_batch();
        }
        if !self.jobs.is_empty() {
            self.jobs_in_pool += self.jobs.len();
            self.pool.push_batch(&mut self.jobs);
        }
        Ok(())
    }

    #[inline]
    fn begin_reap(&mut self) {
        self.take_from_pool();
        self.work_since_look += 1;
        if self.work_since_look >= LOOK_EVERY {
            self.work_since_look = 0;
            if !self.watcher.is_idle() {
                // If the error persists, `wait` reports it.
                let _ = self.watcher.wait(Some(Duration::ZERO));
            }
        }
        self.budget = self.results.len();
    }

    #[inline]
    fn pop(&mut self) -> Option<RawResult> {
        self.budget = self.budget.checked_sub(1)?;
        self.results.pop_front()
    }

    #[inline]
    fn take_ready(&mut self, events: &mut Vec<Event>) {
        self.watcher.take_ready(events);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.submit()?;
        self.take_from_pool();
        let may_sleep = self.may_sleep();
        let waited = self.watcher.wait(if may_sleep { timeout } else { Some(Duration::ZERO) });
        self.pool.disarm();
        waited
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.submit()?;
        self.take_from_pool();
        Ok(self.may_sleep())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.pool.disarm();
        self.watcher.wait(Some(Duration::ZERO))
    }

    fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.watcher.fd())
    }

    fn cancel(&mut self, user_data: u64) {
        let queued = self.batch.iter().position(|queued| queued.user_data == user_data);
        if let Some(place) = queued {
            self.batch.remove(place);
        } else if self.jobs_in_pool > 0 && self.pool.cancel(user_data) {
            self.jobs_in_pool -= 1;
        } else {
            return;
        }
        self.results.push_back(RawResult { user_data, result: -libc::ECANCELED });
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.watcher.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.watcher.unwatch(id);
    }
}

#[cfg(test)]
mod tests;
