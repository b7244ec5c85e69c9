//! Sleeps until a request has ended: the device's signal, and the two steps before the sleep.
//!
//! `completions → arm (request a signal, check again) → poll(2) up to the limit or the next deadline → completions`
//!
//! - The signal is an eventfd that belongs to the queue for life: it survives changes of the back-end, and the session
//!   uses it too, to announce its mail.
//! - A device that signals needlessly costs wake-ups, but a call does not take longer than its limit.
//!
//! Spec: virtio 1.3 §2.7.7, §2.8.10.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Queue;
use crate::error::QueueError;
use crate::kick::EventFd;
use crate::request::Completion;

impl Queue {
    /// Like [`Queue::completions`], but sleeps up to `limit` if there are none; returns 0 when the time is up.
    ///
    /// # Errors
    /// Those of [`Queue::completions`].
    pub fn wait(&mut self, out: &mut [Completion], limit: Duration) -> Result<usize, QueueError> {
        let mut taken = self.completions(out)?;
        if taken > 0 || out.is_empty() {
            return Ok(taken);
        }
        // There is no time limit if the end is beyond the clock's range.
        let until = Instant::now().checked_add(limit);
        loop {
            let more = self.arm()?;
            if !more {
                self.sleep(until)?;
            }
            taken = self.completions(out)?;
            if taken > 0 || until.is_some_and(|until| Instant::now() >= until) {
                return Ok(taken);
            }
        }
    }

    fn sleep(&mut self, until: Option<Instant>) -> Result<(), QueueError> {
        let wake_up = [until, self.next_deadline()].into_iter().flatten().min();
        self.stats.sleeps += 1;
        let signalled = sleep_until(&self.call, wake_up);
        let signalled = signalled.map_err(|errno| QueueError::Wait { queue: self.index(), errno })?;
        if signalled {
            self.clear_signal();
        }
        Ok(())
    }

    /// Makes the device signal [`Queue::completion_fd`] at the next completion. Returns `true` if there is a completion
    /// already; there may be no signal for that one. After waking up, the owner clears the descriptor
    /// ([`Queue::clear_signal`]).
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn arm(&mut self) -> Result<bool, QueueError> {
        self.read_mail();
        if self.dead.is_some() || self.slots.unreported() > 0 {
            return Ok(true); // `completions` reports the reason
        }
        self.armed = true;
        // Any later mail signals the descriptor.
        self.ring.arm_interrupts().or_else(|fault| {
            self.die(QueueError::Device { queue: self.index, fault });
            Ok(true)
        })
    }

    /// The descriptor to poll (or epoll) for completions, after [`Queue::arm`]. It stays the same for the
    /// queue's lifetime.
    #[must_use]
    pub fn completion_fd(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    /// Clears the signal on [`Queue::completion_fd`].
    pub fn clear_signal(&mut self) {
        self.call.clear();
    }
}

/// Sleeps until `signal` is set or `until` has passed; returns whether it is set.
///
/// # Errors
/// The kernel's error.
pub(crate) fn sleep_until(signal: &EventFd, until: Option<Instant>) -> Result<bool, Errno> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    // A time that the kernel cannot express means no limit.
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    let mut fds = [PollFd::new(signal, PollFlags::IN)];
    match poll(&mut fds, left.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno),
    }
}
