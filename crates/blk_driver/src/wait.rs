//! Sleeping until something has ended: the device's signal, and the two steps before it.
//!
//! `completions → arm (ask, look again) → poll(2) up to the limit or the next deadline → completions`
//!
//! - The signal is an eventfd that is the queue's for life: back-ends come and go, and whatever the session has to
//!   say wakes by it too.
//! - A device that signals for nothing costs wake-ups, and no more time than the limit.
//!
//! Spec: virtio 1.3 §2.7.7, §2.8.10. Not here: several sleepers (`shared.rs`).

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::error::QueueError;
use crate::kick::EventFd;
use crate::queue::Queue;
use crate::request::Completion;

impl Queue {
    /// Like [`Queue::completions`], but sleeps up to `limit` if there is nothing; 0 when the time is up.
    ///
    /// # Errors
    /// As [`Queue::completions`].
    pub fn wait(&mut self, out: &mut [Completion], limit: Duration) -> Result<usize, QueueError> {
        let mut taken = self.completions(out)?;
        if taken > 0 || out.is_empty() {
            return Ok(taken);
        }
        // No end if it is beyond what the clock can say.
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

    /// Asks the device to signal [`Queue::completion_fd`] at the next completion; `true` if there is one already,
    /// for which no signal may come. The owner reads the descriptor empty ([`Queue::clear_signal`]) when it woke.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn arm(&mut self) -> Result<bool, QueueError> {
        self.read_mail();
        if self.dead.is_some() || self.slots.untold() > 0 {
            return Ok(true); // `completions` says what
        }
        self.armed = true;
        // Mail that comes from now on signals the descriptor.
        self.ring.arm_interrupts().or_else(|fault| {
            self.die(QueueError::Device { queue: self.index, fault });
            Ok(true)
        })
    }

    /// The descriptor to poll (or epoll) for completions, after [`Queue::arm`]. It stays the same for the queue's life.
    #[must_use]
    pub fn completion_fd(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    /// Takes the signal off [`Queue::completion_fd`].
    pub fn clear_signal(&mut self) {
        self.call.clear();
    }
}

/// Sleeps until `signal` is there or `until` is over; returns whether it is there.
///
/// # Errors
/// The kernel's.
pub(crate) fn sleep_until(signal: &EventFd, until: Option<Instant>) -> Result<bool, Errno> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    // A time that the kernel cannot express is for ever.
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    let mut fds = [PollFd::new(signal, PollFlags::IN)];
    match poll(&mut fds, left.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno),
    }
}
