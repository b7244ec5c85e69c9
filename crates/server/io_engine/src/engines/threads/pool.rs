//! A bounded pool of threads that make blocking calls. It grows while calls wait, and shrinks to zero when idle.
//!
//! `push_batch → schedule → thread: plain::execute → results → take_results` (plus an eventfd if the worker sleeps)
//!
//! - The worker takes one lock per batch, and none to see that there are no results. A thread takes one lock per call,
//!   to store its result and take its next job.
//! - The pool wakes the thread that went to sleep last, because its stack is warm. The others end after [`IDLE`] even
//!   while that one has work.
//! - A job holds its file until its call has ended. A call that starts late therefore never uses a reused descriptor
//!   number, and once a result is available the pool has released the file.
//! - Dropping the pool waits for no thread. A thread in a call continues. It owns all its data except the op's memory,
//!   which the core keeps until the call ends, or leaks (`core/lifetime.rs`).

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use sandbox::{Entry, Role};

use super::schedule::{Class, Help, Limits, Schedule};
use crate::backend::{Call, RawResult, Verb};
use crate::engine::FileId;
use crate::engines::plain;

/// How long a thread waits for work before it ends.
const IDLE: Duration = Duration::from_secs(10);
/// A thread's stack holds one call and one log line.
const STACK_BYTES: usize = 128 << 10;
/// Delay before the next attempt to start a thread after the host refused one.
const START_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Initial capacity of a file's list of waiting jobs.
const USUAL_JOBS: usize = 64;

/// One call for a thread.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub user_data: u64,
    /// The file whose share of threads the job uses.
    pub owner: FileId,
    pub file: Arc<File>,
    pub call: Call,
}

// SAFETY: 1. the call points to memory of an op that the engine keeps in place and unused until it has the result,
// whichever thread makes the call.
unsafe impl Send for Job {}

impl Job {
    fn class(&self) -> Class {
        match self.call.verb {
            Verb::Read | Verb::Write => Class::Transfer,
            Verb::Sync | Verb::Allocate | Verb::Discard => Class::Long,
        }
    }
}

#[derive(Debug)]
struct State {
    schedule: Schedule<Job>,
    /// Sleeping threads. The last element went to sleep last.
    sleepers: Vec<Thread>,
    results: VecDeque<RawResult>,
    /// The worker sleeps or is about to, and needs a write to `wake`.
    armed: bool,
    ending: bool,
    start_again_at: Option<Instant>,
}

impl State {
    #[inline]
    fn call_help(&mut self) -> Called {
        match self.schedule.call_help(!self.sleepers.is_empty()) {
            Help::Enough => Called::Nobody,
            Help::Wake => self.sleepers.pop().map_or(Called::Nobody, Called::Sleeper),
            Help::Start if self.start_again_at.is_some_and(|at| Instant::now() < at) => {
                self.schedule.not_started();
                Called::Nobody
            }
            Help::Start => Called::NewOne,
        }
    }
}

/// The thread to wake or start once the lock is released.
#[derive(Debug)]
enum Called {
    Nobody,
    Sleeper(Thread),
    NewOne,
}

type Start = fn(Arc<Shared>) -> io::Result<()>;

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// A hint: a worker that polls takes the lock only if there are results.
    has_results: AtomicBool,
    wake: OwnedFd,
    idle: Duration,
    start: Start,
}

fn start_thread(shared: Arc<Shared>) -> io::Result<()> {
    let builder = std::thread::Builder::new().name("bareblk-io".into()).stack_size(STACK_BYTES);
    let entry = Entry::of(Role::EngineThread);
    let body = move || {
        entry.enter_or_end();
        shared.run();
    };
    builder.spawn(body).map(drop)
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The body of a thread.
    fn run(self: Arc<Self>) {
        let mut state = self.state();
        state.schedule.arrived();
        loop {
            let Some((class, job)) = state.schedule.take() else {
                match self.sleep(state) {
                    Some(woken) => state = woken,
                    None => return,
                }
                continue;
            };
            let called = state.call_help();
            drop(state);
            self.bring(called);
            state = self.perform(class, job);
        }
    }

    /// Makes the call and stores its result.
    #[inline]
    fn perform(&self, class: Class, job: Job) -> MutexGuard<'_, State> {
        let Job { user_data, owner, file, call } = job;
        // SAFETY: 1. buffers: the core that pushed the job keeps them until it has taken the result.
        let result = unsafe { plain::execute(file.as_raw_fd(), &call, 0) };
        drop(file); // before the result is visible: the file may be detached from then on
        let mut state = self.state();
        state.schedule.ended(owner, class);
        state.results.push_back(RawResult { user_data, result });
        self.has_results.store(true, Ordering::Relaxed); // the lock orders it with the results
        if std::mem::take(&mut state.armed) {
            drop(state);
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
            state = self.state();
        }
        state
    }

    /// Returns when the pool wakes this thread; `None`: the thread ends.
    fn sleep<'a>(&'a self, mut state: MutexGuard<'a, State>) -> Option<MutexGuard<'a, State>> {
        let me = std::thread::current();
        let deadline = Instant::now() + self.idle;
        if state.ending {
            state.schedule.left();
            return None;
        }
        state.sleepers.push(me.clone());
        loop {
            drop(state);
            std::thread::park_timeout(deadline.saturating_duration_since(Instant::now()));
            state = self.state();
            let place = state.sleepers.iter().rposition(|sleeper| sleeper.id() == me.id());
            let Some(place) = place else {
                state.schedule.arrived();
                return Some(state);
            };
            if Instant::now() >= deadline {
                state.sleepers.remove(place);
                state.schedule.left();
                return None;
            }
        }
    }

    /// Returns false if a new thread was needed but could not start.
    #[inline]
    fn bring(self: &Arc<Self>, called: Called) -> bool {
        match called {
            Called::Nobody => true,
            Called::Sleeper(sleeper) => {
                sleeper.unpark();
                true
            }
            Called::NewOne => self.start_one(),
        }
    }

    #[cold]
    fn start_one(self: &Arc<Self>) -> bool {
        let started = (self.start)(Arc::clone(self));
        if let Err(error) = &started {
            let mut state = self.state();
            state.schedule.not_started();
            state.start_again_at = Some(Instant::now() + START_AGAIN_AFTER);
            let threads = state.schedule.threads();
            drop(state);
            tracing::warn!(%error, threads, "cannot start another thread for I/O");
        }
        started.is_ok()
    }

    /// If there are no threads at all, the worker makes the calls itself.
    #[cold]
    fn run_here_if_alone(&self) {
        let mut state = self.state();
        while state.schedule.threads() == 0 {
            let Some((class, job)) = state.schedule.take() else { return };
            drop(state);
            state = self.perform(class, job);
        }
    }
}

/// The pool. Dropping it does not wait for calls in flight.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
}

impl Pool {
    /// Makes a pool of at most `max_threads` threads (at least one), or more with many files (`shares.rs`). `depth`:
    /// the usual maximum number of jobs at once.
    pub fn new(max_threads: u32, depth: u32) -> io::Result<Self> {
        Self::with(max_threads, depth, IDLE, start_thread)
    }

    fn with(max_threads: u32, depth: u32, idle: Duration, start: Start) -> io::Result<Self> {
        let depth = depth as usize;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let state = State {
            schedule: Schedule::new(Limits::new(max_threads, processors)),
            sleepers: Vec::with_capacity(max_threads as usize),
            results: VecDeque::with_capacity(depth),
            armed: false,
            ending: false,
            start_again_at: None,
        };
        let shared = Shared {
            state: Mutex::new(state),
            has_results: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            idle,
            start,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// A thread with a result writes to this descriptor while the worker sleeps. The worker never reads it.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    /// Says that all files belong to one disk and need no reserves.
    pub fn serve_one_disk(&self) {
        self.shared.state().schedule.serve_one_disk();
    }

    /// Gives the file a share of the threads.
    pub fn attach(&self, file: FileId) {
        self.shared.state().schedule.attach(file, USUAL_JOBS);
    }

    /// Removes the share. No job of the file may be left.
    pub fn detach(&self, file: FileId) {
        self.shared.state().schedule.detach(file);
    }

    /// Takes all of `jobs`, and starts threads as needed.
    pub fn push_batch(&self, jobs: &mut VecDeque<Job>) {
        let mut state = self.shared.state();
        jobs.drain(..).for_each(|job| state.schedule.push(job.owner, job.class(), job));
        let called = state.call_help();
        let alone = state.schedule.threads() == 0;
        drop(state);
        if !self.shared.bring(called) || alone {
            self.shared.run_here_if_alone();
        }
    }

    /// Appends the available results.
    #[inline]
    pub fn take_results(&self, results: &mut VecDeque<RawResult>) {
        if !self.shared.has_results.load(Ordering::Relaxed) {
            return;
        }
        let mut state = self.shared.state();
        self.shared.has_results.store(false, Ordering::Relaxed);
        if results.is_empty() {
            std::mem::swap(results, &mut state.results);
        } else {
            results.append(&mut state.results);
        }
    }

    /// Removes a job that no thread has started. Returns whether the job was removed; a removed job gets no result.
    pub fn cancel(&self, user_data: u64) -> bool {
        self.shared.state().schedule.remove(|job| job.user_data == user_data).is_some()
    }

    /// Requests a write to the eventfd with the next result. Returns false if a result is already available.
    pub fn arm(&self) -> bool {
        let mut state = self.shared.state();
        state.armed = state.results.is_empty();
        state.armed
    }

    /// The worker is awake again.
    pub fn disarm(&self) {
        self.shared.state().armed = false;
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.ending = true;
        state.schedule.clear();
        let sleepers = std::mem::take(&mut state.sleepers);
        state.schedule.called(sleepers.len());
        drop(state);
        sleepers.iter().for_each(Thread::unpark);
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
