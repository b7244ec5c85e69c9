//! A queue shared by many threads, behind a lock of the user's choice.
//!
//! `submit: lock → push, publish, check for kick → unlock → notify` (or notify, then unlock: [`KickPolicy::Locked`])
//! `wait: lock → take → none: request a signal, check again → unlock → sleep → …`
//!
//! - The lock is held only for work in memory, never for a system call, unless the policy demands it.
//! - One thread at a time, *the sleeper*, sleeps on the device's signal; the others wait to become the sleeper
//!   (`turn.rs`).
//!
//! Why no thread sleeps through a completion, although any thread may take any completion:
//! 1. The sleeper takes completions, requests a signal and checks again, all while it holds the lock. The device
//!    signals every later completion, and the signal stays on the descriptor until it is cleared. Only the sleeper
//!    clears the signal, and it takes completions afterwards, so a cleared signal never hides a completion.
//! 2. Another thread that takes completions thereby withdraws the request for a signal. It renews the request before it
//!    unlocks. If there are more completions already, it wakes the sleeper itself ([`Guarded::must_wake_sleeper`]).
//! 3. A thread also wakes the sleeper for requests that end without the device (cancelled, completed at once, or lost
//!    with a broken ring), and for a deadline earlier than the sleeper's wake-up time. The session writes its mail
//!    first and then wakes the sleeper through the same descriptor.
//! 4. A thread that gets the turn checks for completions before it sleeps. A sleeper that leaves completions untaken,
//!    or whose time is up, still releases the turn, and one of the waiting threads checks next.
//!
//! Why a notification without the lock is correct: docs/decisions/0017. See also: the locks (`qspinlock`, or
//! any lock with `lock_api`).

mod turn;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_api::{MutexGuard, RawMutex};

use self::turn::{MyTurn, Turn};
use crate::error::{PushError, QueueError};
use crate::kick::{Doorbell, EventFd, Kick};
use crate::queue::wait::sleep_until;
use crate::queue::{Queue, QueueStats};
use crate::request::{Completion, Request};

/// When to notify the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KickPolicy {
    /// While the lock is held: other threads wait for the notification too.
    Locked,
    /// After the lock is released.
    Unlocked,
}

/// See the module documentation.
#[derive(Debug)]
pub struct SharedQueue<L: RawMutex> {
    guarded: lock_api::Mutex<L, Guarded>,
    policy: KickPolicy,
    /// The queue's completion signal, for use without the lock.
    signal: Arc<EventFd>,
    turn: Turn,
}

/// The state that the lock protects.
#[derive(Debug)]
struct Guarded {
    queue: Queue,
    sleeper: Option<Sleeper>,
}

/// A thread that sleeps or is about to. Without events, it wakes at `wake_up`.
#[derive(Clone, Copy, Debug)]
struct Sleeper {
    wake_up: Option<Instant>,
}

/// The notifications to send when a call ends.
#[derive(Debug, Default)]
struct Notifications {
    device: Option<Kick>,
    sleeper: bool,
}

impl<L: RawMutex> SharedQueue<L> {
    /// Shares `queue`.
    #[must_use]
    pub fn new(queue: Queue, policy: KickPolicy) -> Self {
        let signal = Arc::clone(queue.link().call());
        let guarded = lock_api::Mutex::new(Guarded { queue, sleeper: None });
        Self { guarded, policy, signal, turn: Turn::default() }
    }

    /// Takes requests in order until one is refused, makes them visible to the device and notifies it; returns how many
    /// it took. Never waits for room.
    ///
    /// # Errors
    /// Why the first request was refused. `Ok(n)` with n < len means that a later one was refused: the queue
    /// is full, or submitting the rest returns the reason.
    pub fn submit(&self, requests: &[Request<'_>]) -> Result<usize, PushError> {
        let mut guarded = self.guarded.lock();
        let taken = guarded.push_all(requests);
        let device = if matches!(taken, Ok(1..)) { guarded.queue.prepare_kick() } else { None };
        let notifications = Notifications { device, sleeper: guarded.sleeper_has_work() };
        self.unlock_and_notify(guarded, notifications);
        taken
    }

    /// Takes completions, whichever thread submitted the requests; never waits.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn completions(&self, out: &mut [Completion]) -> Result<usize, QueueError> {
        let mut guarded = self.guarded.lock();
        let (taken, device) = guarded.queue.completions_and_kick(out);
        let notifications = Notifications { device, sleeper: guarded.must_wake_sleeper() };
        self.unlock_and_notify(guarded, notifications);
        taken
    }

    /// Like [`SharedQueue::completions`], but sleeps up to `limit` if there are none. One thread at a time sleeps on
    /// the device's signal, and the others wait for their turn; the lock is not held meanwhile.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn wait(&self, out: &mut [Completion], limit: Duration) -> Result<usize, QueueError> {
        let taken = self.completions(out)?;
        if taken > 0 || out.is_empty() {
            return Ok(taken);
        }
        // No time limit if the end is beyond the clock's range.
        let until = Instant::now().checked_add(limit);
        match self.turn.take(until) {
            Some(turn) => self.wait_in_turn(&turn, out, until),
            None => self.completions(out),
        }
    }

    fn wait_in_turn(
        &self,
        _turn: &MyTurn<'_>,
        out: &mut [Completion],
        until: Option<Instant>,
    ) -> Result<usize, QueueError> {
        loop {
            match self.take_or_fall_asleep(out, until) {
                ControlFlow::Break(taken) => return taken,
                ControlFlow::Continue(None) => {}
                ControlFlow::Continue(Some(sleeper)) => self.sleep(sleeper)?,
            }
        }
    }

    /// One check by the sleeper. Breaks with completions or at the time limit; otherwise returns whether to sleep or to
    /// check again.
    fn take_or_fall_asleep(
        &self,
        out: &mut [Completion],
        until: Option<Instant>,
    ) -> ControlFlow<Result<usize, QueueError>, Option<Sleeper>> {
        let mut guarded = self.guarded.lock();
        guarded.sleeper = None;
        let (taken, device) = guarded.queue.completions_and_kick(out);
        let next = match taken {
            Ok(0) if until.is_none_or(|until| Instant::now() < until) => guarded.fall_asleep(until),
            taken => ControlFlow::Break(taken),
        };
        self.unlock_and_notify(guarded, Notifications { device, sleeper: false });
        next
    }

    /// Sleeps without the lock.
    fn sleep(&self, sleeper: Sleeper) -> Result<(), QueueError> {
        match sleep_until(&self.signal, sleeper.wake_up) {
            Ok(true) => self.signal.clear(),
            Ok(false) => {}
            Err(errno) => {
                let mut guarded = self.guarded.lock();
                guarded.sleeper = None;
                return Err(QueueError::Wait { queue: guarded.queue.index(), errno });
            }
        }
        Ok(())
    }

    /// Ends the request(s) with this token, like [`Queue::cancel`]; a thread that takes completions gets the
    /// result.
    pub fn cancel(&self, token: u64) -> bool {
        let mut guarded = self.guarded.lock();
        let found = guarded.queue.cancel(token);
        let notifications = Notifications { device: None, sleeper: guarded.sleeper_has_work() };
        self.unlock_and_notify(guarded, notifications);
        found
    }

    /// Requests taken and not yet ended. (A request that ended but is still with the device counts too.)
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.guarded.lock().queue.in_flight()
    }

    /// Counters of the queue.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.guarded.lock().queue.stats()
    }

    /// Ends the sharing and returns the queue.
    #[must_use]
    pub fn into_inner(self) -> Queue {
        self.guarded.into_inner().queue
    }

    /// The only function in which the two policies differ. The kick owns a reference to its doorbell: whatever other
    /// threads do to the queue after the unlock, the doorbell stays open and belongs to the intended session.
    #[inline]
    fn unlock_and_notify(&self, guarded: MutexGuard<'_, L, Guarded>, notifications: Notifications) {
        match self.policy {
            KickPolicy::Locked => {
                notifications.device.into_iter().for_each(Kick::notify);
                drop(guarded);
            }
            KickPolicy::Unlocked => {
                drop(guarded);
                notifications.device.into_iter().for_each(Kick::notify);
            }
        }
        if notifications.sleeper {
            self.signal.ring();
        }
    }
}

impl Guarded {
    fn push_all(&mut self, requests: &[Request<'_>]) -> Result<usize, PushError> {
        for (taken, request) in requests.iter().enumerate() {
            match self.queue.push(request) {
                Ok(()) => {}
                Err(refusal) if taken == 0 => return Err(refusal),
                Err(_) => return Ok(taken),
            }
        }
        Ok(requests.len())
    }

    /// Requests a signal and checks again.
    fn fall_asleep(
        &mut self,
        until: Option<Instant>,
    ) -> ControlFlow<Result<usize, QueueError>, Option<Sleeper>> {
        match self.queue.arm() {
            Err(error) => ControlFlow::Break(Err(error)),
            Ok(true) => ControlFlow::Continue(None),
            Ok(false) => {
                let wake_up = [until, self.queue.next_deadline()].into_iter().flatten().min();
                self.sleeper = Some(Sleeper { wake_up });
                self.queue.stats.sleeps += 1;
                ControlFlow::Continue(self.sleeper)
            }
        }
    }

    /// Whether the sleeper must be woken, because another thread took completions and thereby withdrew its request for
    /// a signal.
    #[inline]
    fn must_wake_sleeper(&mut self) -> bool {
        self.sleeper.is_some() && (self.queue.arm() != Ok(false) || self.sleeper_has_work())
    }

    /// Whether the sleeper must handle something that the device will not signal: an unreported end, or an earlier
    /// deadline.
    #[inline]
    fn sleeper_has_work(&self) -> bool {
        let Some(sleeper) = self.sleeper else { return false };
        let earlier = |deadline| sleeper.wake_up.is_none_or(|wake_up| deadline < wake_up);
        self.queue.slots.unreported() > 0 || self.queue.next_deadline().is_some_and(earlier)
    }
}
