//! How long one change of workers and queues may take as a whole: one deadline for all its steps, and a stop of the
//! server cuts it short.
//!
//! Not here: what is changed (`assignment/mod.rs`), how long that may take (the caller).

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Between two looks at a lock that somebody has.
const LOCK_PAUSE: Duration = Duration::from_millis(1);
/// Between two looks whether the server stops, for who waits for an answer: nobody does but for a change.
const STOP_PAUSE: Duration = Duration::from_millis(10);

/// Further than anybody waits, and near enough to be counted with.
const FAR_AWAY: Duration = Duration::from_secs(365 * 24 * 3600);

/// When `timeout`, which may be any number, will be over.
pub(crate) fn deadline_in(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(FAR_AWAY)
}

/// See the file's head.
#[derive(Debug)]
pub(crate) struct Deadline<'a> {
    timeout: Duration,
    deadline: Instant,
    stopping: &'a AtomicBool,
}

impl<'a> Deadline<'a> {
    /// `stopping`: set once and for all when the server stops.
    pub(crate) fn new(timeout: Duration, stopping: &'a AtomicBool) -> Self {
        Self { timeout, deadline: deadline_in(timeout), stopping }
    }

    /// As it was given.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether it is over because the server stops.
    pub(crate) fn is_cut_short(&self) -> bool {
        // Relaxed: nothing else is read on the strength of it; who sees it late waits a moment longer.
        self.stopping.load(Relaxed)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_cut_short() || Instant::now() >= self.deadline
    }

    /// `None`: somebody else still has it.
    pub(crate) fn lock<'m, T>(&self, mutex: &'m Mutex<T>) -> Option<MutexGuard<'m, T>> {
        loop {
            match mutex.try_lock() {
                Ok(guard) => return Some(guard),
                Err(TryLockError::Poisoned(poisoned)) => return Some(PoisonError::into_inner(poisoned)),
                Err(TryLockError::WouldBlock) if self.is_over() => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            }
        }
    }

    /// `None`: no answer yet, or there will be none. Looks once even if it is over.
    pub(crate) fn receive<T>(&self, answers: &Receiver<T>) -> Option<T> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let left = if self.is_cut_short() { Duration::ZERO } else { left };
            match answers.recv_timeout(left.min(STOP_PAUSE)) {
                Ok(answer) => return Some(answer),
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
                Err(_) => return None,
            }
        }
    }
}
