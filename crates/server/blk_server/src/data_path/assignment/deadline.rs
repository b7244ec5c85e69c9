//! One deadline for all steps of a change to workers and queues. If the server stops, the change ends early.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Pause between two attempts to take a lock.
const LOCK_PAUSE: Duration = Duration::from_millis(1);
/// Pause between two checks of whether the server is stopping.
const STOP_PAUSE: Duration = Duration::from_millis(10);

/// A time limit that is longer than any wait, and small enough to add to an `Instant`.
const FAR_AWAY: Duration = Duration::from_secs(365 * 24 * 3600);

/// The deadline `timeout` from now; `timeout` may have any value.
pub(crate) fn deadline_in(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(FAR_AWAY)
}

/// The deadline of one change.
#[derive(Debug)]
pub(crate) struct Deadline<'a> {
    timeout: Duration,
    deadline: Instant,
    stopping: &'a AtomicBool,
}

impl<'a> Deadline<'a> {
    /// The server sets `stopping` when it stops.
    pub(crate) fn new(timeout: Duration, stopping: &'a AtomicBool) -> Self {
        Self { timeout, deadline: deadline_in(timeout), stopping }
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether the change must end early because the server is stopping.
    pub(crate) fn is_cut_short(&self) -> bool {
        // Relaxed: no other data depends on the flag; a thread that sees it late only waits a moment longer.
        self.stopping.load(Relaxed)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_cut_short() || Instant::now() >= self.deadline
    }

    /// Returns `None` if another thread held the lock until the deadline.
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

    /// Returns `None` if no answer arrives in time or the sender was dropped. Checks at least once, even after the
    /// deadline.
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
