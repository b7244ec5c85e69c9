//! A queue that several threads share. One thread at a time takes all completions and distributes them.
//!
//! `reap: own mailbox → lead? (take completions, deliver, stop leading) → sleep until mail or promotion`
//!
//! - Only the leading thread takes completions and sleeps on the device. It delivers to the other threads' mailboxes
//!   and stops leading. Then it wakes the threads that got mail, and one follower that leads next.
//! - No wake is lost. A follower enters the list, tries once more to lead, and sleeps only if another thread leads. A
//!   leader checks the list after it stops leading. A follower that is promoted but does not lead promotes the next.
//! - Each mailbox has its own lock, and leading uses a `try_lock`: threads contend only for the queue's lock, which is
//!   the one being measured.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use blk_driver::{Completion, PushError, QueueError, Request, SharedQueue, Work};
use lock_api::RawMutex;

use super::port::{Done, Io, Port, PortError};
use super::queue::{Blocks, counts};
use crate::measured::QueueCounts;

/// Completions per poll.
const LOOK: usize = 64;
/// Requests per acquisition of the queue's lock.
const TURN: usize = 16;
/// How long a thread without a request in flight waits for room; no other thread wakes it.
const ROOM_LOOK: Duration = Duration::from_millis(1);

/// A [`SharedQueue`] with any lock.
pub(crate) trait AnyShared: Send + Sync {
    fn submit(&self, requests: &[Request<'_>]) -> Result<usize, PushError>;
    fn completions(&self, out: &mut [Completion]) -> Result<usize, QueueError>;
    fn wait(&self, out: &mut [Completion], limit: Duration) -> Result<usize, QueueError>;
    fn counts(&self) -> QueueCounts;
}

impl<L: RawMutex + Send + Sync> AnyShared for SharedQueue<L> {
    fn submit(&self, requests: &[Request<'_>]) -> Result<usize, PushError> {
        Self::submit(self, requests)
    }
    fn completions(&self, out: &mut [Completion]) -> Result<usize, QueueError> {
        Self::completions(self, out)
    }
    fn wait(&self, out: &mut [Completion], limit: Duration) -> Result<usize, QueueError> {
        Self::wait(self, out, limit)
    }
    fn counts(&self) -> QueueCounts {
        counts(&self.stats())
    }
}

/// One thread's mailbox.
#[derive(Debug, Default)]
struct Mail {
    done: Vec<Done>,
    promoted: bool,
}

#[derive(Debug, Default)]
struct Mailbox {
    mail: Mutex<Mail>,
    bell: Condvar,
}

/// A queue and the threads that share it.
pub(crate) struct Ring {
    queue: Box<dyn AnyShared>,
    lead: Mutex<Vec<Completion>>,
    mailboxes: Vec<Mailbox>,
    followers: Mutex<VecDeque<usize>>,
}

/// Ignores poison: a panic elsewhere ends the run anyway, and this code leaves no inconsistent state.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ring {
    /// Makes a ring for `threads` threads.
    pub fn new(queue: Box<dyn AnyShared>, threads: usize) -> Self {
        Self {
            queue,
            lead: Mutex::new(vec![Completion::default(); LOOK]),
            mailboxes: (0..threads).map(|_| Mailbox::default()).collect(),
            followers: Mutex::default(),
        }
    }

    pub fn counts(&self) -> QueueCounts {
        self.queue.counts()
    }

    /// Appends `me`'s completions. If there are none and a limit is given, sleeps for up to the limit.
    fn reap(&self, me: usize, done: &mut Vec<Done>, limit: Option<Duration>) -> Result<(), PortError> {
        let end = limit.map(|limit| Instant::now() + limit);
        loop {
            if self.take_mail(me, done) {
                return Ok(());
            }
            if let Some(led) = self.try_lead(me, done, end) {
                return led;
            }
            let Some(end) = end else { return Ok(()) };
            lock(&self.followers).push_back(me);
            // The leader may have stopped leading before this thread was in the list.
            if let Some(led) = self.try_lead(me, done, Some(end)) {
                self.leave(me);
                return led;
            }
            self.sleep(me, end);
            if self.leave(me) && self.take_mail(me, done) {
                // This thread was promoted, but leaves with its mail instead of leading.
                self.promote();
                return Ok(());
            }
            if Instant::now() >= end {
                self.promote();
                return Ok(());
            }
        }
    }

    fn take_mail(&self, me: usize, done: &mut Vec<Done>) -> bool {
        let Some(mailbox) = self.mailboxes.get(me) else { return false };
        let mut mail = lock(&mailbox.mail);
        let has_mail = !mail.done.is_empty();
        done.append(&mut mail.done);
        has_mail
    }

    /// Leaves the list. Returns whether another thread had already removed this one, which must then lead.
    fn leave(&self, me: usize) -> bool {
        let mut followers = lock(&self.followers);
        let before = followers.len();
        followers.retain(|&follower| follower != me);
        let promoted = followers.len() == before;
        drop(followers);
        if let Some(mailbox) = self.mailboxes.get(me) {
            lock(&mailbox.mail).promoted = false;
        }
        promoted
    }

    /// Returns `None` if another thread leads.
    fn try_lead(
        &self,
        me: usize,
        done: &mut Vec<Done>,
        end: Option<Instant>,
    ) -> Option<Result<(), PortError>> {
        let mut completions = match self.lead.try_lock() {
            Ok(completions) => completions,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        // Takes mail that was delivered since the last check of the mailbox. From here on, only this thread delivers.
        let has_mail = self.take_mail(me, done);
        let taken = match end.filter(|_| !has_mail) {
            Some(end) => self.queue.wait(&mut completions, end.saturating_duration_since(Instant::now())),
            None => self.queue.completions(&mut completions),
        };
        let taken = taken.map_err(|error| PortError::because("the back-end", &error));
        let result = taken.map(|taken| {
            completions.iter().take(taken).for_each(|completion| self.deliver(me, completion, done));
        });
        drop(completions);
        self.promote();
        Some(result)
    }

    fn deliver(&self, me: usize, completion: &Completion, own: &mut Vec<Done>) {
        #[allow(clippy::cast_possible_truncation)] // the two parts of the token
        let (owner, slot) = ((completion.token >> 32) as usize, completion.token as u32);
        let done = Done { slot, result: completion.result.map_err(|error| error.to_string()) };
        if owner == me {
            own.push(done);
        } else if let Some(mailbox) = self.mailboxes.get(owner) {
            lock(&mailbox.mail).done.push(done);
            mailbox.bell.notify_one();
        }
    }

    /// Promotes the follower that has waited longest to be the leader, and wakes it.
    fn promote(&self) {
        let next = lock(&self.followers).pop_front();
        if let Some(mailbox) = next.and_then(|next| self.mailboxes.get(next)) {
            lock(&mailbox.mail).promoted = true;
            mailbox.bell.notify_one();
        }
    }

    fn sleep(&self, me: usize, end: Instant) {
        let Some(mailbox) = self.mailboxes.get(me) else { return };
        let left = end.saturating_duration_since(Instant::now());
        let idle = |mail: &mut Mail| mail.done.is_empty() && !mail.promoted;
        let woken = mailbox.bell.wait_timeout_while(lock(&mailbox.mail), left, idle);
        drop(woken);
    }
}

pub(crate) struct SharedPort {
    ring: Arc<Ring>,
    me: usize,
    blocks: Blocks,
    waiting: VecDeque<Io>,
    in_flight: usize,
}

impl SharedPort {
    pub fn new(ring: Arc<Ring>, me: usize, blocks: Blocks) -> Self {
        Self { ring, me, blocks, waiting: VecDeque::new(), in_flight: 0 }
    }

    /// Submits the first few waiting requests under one acquisition of the lock. Returns how many were submitted.
    fn turn(&mut self) -> Result<usize, PortError> {
        let mut requests = [Request::new(Work::Flush, 0); TURN];
        let count = self.waiting.len().min(TURN);
        for (place, io) in requests.iter_mut().zip(&self.waiting) {
            *place = self.blocks.request(io, (self.me as u64) << 32 | u64::from(io.slot));
        }
        let taken = match self.ring.queue.submit(requests.get(..count).unwrap_or_default()) {
            Ok(taken) => taken,
            Err(PushError::Full { .. }) => 0,
            Err(error) => return Err(PortError::because("queue", &error)),
        };
        self.waiting.drain(..taken);
        self.in_flight += taken;
        Ok(taken)
    }
}

impl Port for SharedPort {
    fn push(&mut self, io: Io) -> Result<(), PortError> {
        self.waiting.push_back(io);
        Ok(())
    }

    fn submit(&mut self) -> Result<usize, PortError> {
        let mut started = 0;
        while !self.waiting.is_empty() {
            let wanted = self.waiting.len().min(TURN);
            let taken = self.turn()?;
            started += taken;
            if taken < wanted {
                break;
            }
        }
        Ok(started)
    }

    fn reap(&mut self, done: &mut Vec<Done>, limit: Option<Duration>) -> Result<(), PortError> {
        let limit = limit.map(|limit| if self.in_flight == 0 { limit.min(ROOM_LOOK) } else { limit });
        let before = done.len();
        self.ring.reap(self.me, done, limit)?;
        self.in_flight = self.in_flight.saturating_sub(done.len() - before);
        Ok(())
    }

    fn fill(&mut self, slot: u32, block: &[u8]) -> Result<(), PortError> {
        self.blocks.fill(slot, block)
    }

    fn read(&self, slot: u32, block: &mut [u8]) -> Result<(), PortError> {
        self.blocks.read(slot, block)
    }
}
