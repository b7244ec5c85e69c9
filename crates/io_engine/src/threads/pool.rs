//! A bounded pool of threads that make plain calls: it grows when calls wait, and shrinks to nothing.
//!
//! `push_batch → queue → thread: plain::execute → results → take_results` (and an eventfd, if the worker sleeps)
//!
//! - One lock per batch on the worker's side, one per call on a thread's.
//! - A thread that had nothing to do for [`IDLE`] ends: an idle pool has no threads and makes no wake-ups.
//! - A job holds its file: one that starts late never meets a number that means another file by then.
//!
//! Not here: which calls come here (`threads.rs`, `sync.rs`, `linux_aio.rs`).

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::kernel::{Call, RawResult};
use crate::plain;

/// How long a thread waits for work before it ends.
const IDLE: Duration = Duration::from_secs(10);
/// A thread's stack holds one call.
const STACK_BYTES: usize = 64 << 10;

/// One call to be made by some thread.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub user_data: u64,
    pub file: Arc<File>,
    pub call: Call,
}

// SAFETY: 1. what the call points to belongs to an op that the engine keeps, unmoved and untouched, until it
// has the result, on whatever thread the call is made.
unsafe impl Send for Job {}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Job>,
    threads: u32,
    idle: u32,
    ending: bool,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    results: Mutex<VecDeque<RawResult>>,
    /// The worker sleeps, or is about to, and wants a write to `wake`.
    sleeping: AtomicBool,
    wake: OwnedFd,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn results(&self) -> MutexGuard<'_, VecDeque<RawResult>> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job; `None`: the thread ends.
    fn next(&self) -> Option<Job> {
        let mut state = self.state();
        loop {
            if let Some(job) = state.queue.pop_front() {
                return Some(job);
            }
            if state.ending {
                state.threads -= 1;
                return None;
            }
            state.idle += 1;
            let waited = self.work.wait_timeout(state, IDLE);
            let timeout;
            (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
            if timeout.timed_out() && state.queue.is_empty() {
                state.threads -= 1;
                return None;
            }
        }
    }

    fn run(&self) {
        while let Some(job) = self.next() {
            self.finish(&job);
        }
    }

    fn finish(&self, job: &Job) {
        // SAFETY: 1. whoever pushed the job keeps its buffers until the result was taken.
        let result = unsafe { plain::execute(job.file.as_raw_fd(), &job.call, 0) };
        self.results().push_back(RawResult { user_data: job.user_data, result });
        // After the result is there: pairs with `arm`, which looks for results after it said that it sleeps.
        if self.sleeping.swap(false, Ordering::SeqCst) {
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }
}

/// See the file's head. Dropping it does not wait for calls in flight: its owner does that, or gives them up.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    max_threads: u32,
}

impl Pool {
    /// At most `max_threads` (at least one) threads, started when needed; `depth`: most jobs at once.
    pub fn new(max_threads: u32, depth: u32) -> io::Result<Self> {
        let state = State { queue: VecDeque::with_capacity(depth as usize), ..State::default() };
        let shared = Shared {
            state: Mutex::new(state),
            work: Condvar::new(),
            results: Mutex::new(VecDeque::with_capacity(depth as usize)),
            sleeping: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        Ok(Self { shared: Arc::new(shared), max_threads: max_threads.max(1) })
    }

    /// Written to when a result is there and the worker said that it sleeps; never read.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    /// Takes all of `jobs`, and starts threads as there is need.
    pub fn push_batch(&self, jobs: &mut VecDeque<Job>) {
        let count = jobs.len();
        let mut state = self.shared.state();
        state.queue.extend(jobs.drain(..));
        let waiting = u32::try_from(state.queue.len()).unwrap_or(u32::MAX);
        let wanted = waiting.saturating_sub(state.idle).min(self.max_threads - state.threads);
        state.threads += wanted;
        drop(state);
        (0..count).for_each(|_| self.shared.work.notify_one());
        (0..wanted).for_each(|_| self.start_thread());
    }

    fn start_thread(&self) {
        let shared = Arc::clone(&self.shared);
        let builder = std::thread::Builder::new().name("bareblk-io".into()).stack_size(STACK_BYTES);
        if let Err(error) = builder.spawn(move || shared.run()) {
            tracing::warn!(%error, "no further thread for I/O");
            let alone = {
                let mut state = self.shared.state();
                state.threads -= 1;
                state.threads == 0
            };
            if alone {
                self.run_here();
            }
        }
    }

    /// With no thread to be had, calls are made by the worker itself.
    #[cold]
    fn run_here(&self) {
        loop {
            let Some(job) = self.shared.state().queue.pop_front() else { return };
            self.shared.finish(&job);
        }
    }

    /// Appends what is finished.
    pub fn take_results(&self, results: &mut VecDeque<RawResult>) {
        results.append(&mut self.shared.results());
    }

    /// Forgets a job that no thread has taken yet. Returns whether it was there: it has no result then.
    pub fn cancel(&self, user_data: u64) -> bool {
        let mut state = self.shared.state();
        let place = state.queue.iter().position(|job| job.user_data == user_data);
        place.is_some_and(|place| state.queue.remove(place).is_some())
    }

    /// Asks for a write to the eventfd with the next result. Returns false if one is there already.
    pub fn arm(&self) -> bool {
        self.shared.sleeping.store(true, Ordering::SeqCst);
        let nothing_yet = self.shared.results().is_empty();
        if !nothing_yet {
            self.disarm();
        }
        nothing_yet
    }

    /// The worker is awake again.
    pub fn disarm(&self) {
        self.shared.sleeping.store(false, Ordering::SeqCst);
    }

    #[cfg(test)]
    pub fn threads(&self) -> u32 {
        self.shared.state().threads
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.ending = true;
        state.queue.clear();
        drop(state);
        self.shared.work.notify_all();
    }
}
