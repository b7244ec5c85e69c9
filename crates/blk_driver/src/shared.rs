//! One queue used by many threads, behind a lock of the user's choice.
//!
//! `submit: lock → push, publish, ask → unlock → notify` (or notify, then unlock: [`KickPolicy::Locked`])
//!
//! Not here: the locks (`qspinlock`, or anything with `lock_api`).

use std::time::Duration;

use lock_api::RawMutex;

use crate::error::{PushError, QueueError};
use crate::queue::{Queue, QueueStats};
use crate::request::{Completion, Request};

/// When the device is notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KickPolicy {
    /// While the lock is held: others wait for the notification too.
    Locked,
    /// After the lock is released.
    Unlocked,
}

/// See the file's head.
#[derive(Debug)]
pub struct SharedQueue<L: RawMutex> {
    queue: lock_api::Mutex<L, Queue>,
    policy: KickPolicy,
}

impl<L: RawMutex> SharedQueue<L> {
    /// Shares `queue`.
    #[must_use]
    pub fn new(queue: Queue, policy: KickPolicy) -> Self {
        Self { queue: lock_api::Mutex::new(queue), policy }
    }
    /// Takes requests in order until one is refused, makes them visible and notifies; returns how many were taken.
    /// Never waits for room.
    ///
    /// # Errors
    /// Why the first one was refused; later ones are the caller's business (`Ok(n)` with n < len: the queue is full).
    pub fn submit(&self, _requests: &[Request<'_>]) -> Result<usize, PushError> {
        let _ = (&self.queue, self.policy);
        todo!()
    }
    /// Takes what has ended, whoever asked for it; never waits.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn completions(&self, _out: &mut [Completion]) -> Result<usize, QueueError> {
        todo!()
    }
    /// Like [`SharedQueue::completions`], sleeping up to `limit` if there is nothing. One thread at a time sleeps on
    /// the device's signal and the others behind it; the lock is not held meanwhile.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn wait(&self, _out: &mut [Completion], _limit: Duration) -> Result<usize, QueueError> {
        todo!()
    }
    /// Counters of the queue.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        todo!()
    }
    /// The queue, when nobody shares it any more.
    #[must_use]
    pub fn into_inner(self) -> Queue {
        self.queue.into_inner()
    }
}
