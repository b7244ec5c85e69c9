//! Telling the device that there is something in a queue: a value that owns what it rings.
//!
//! `Queue::prepare_kick (under the owner's lock: published, and does the device want to know?) → Kick →
//! Kick::notify (no lock)`
//!
//! - A [`Kick`] holds its own share of the doorbell: the queue may be reset, reconnected or dropped between the
//!   two steps, and the descriptor that is written to is still the one that was meant.
//! - A reconnected queue has a new doorbell: an old notification reaches nobody, and a back-end that is gone
//!   cannot swallow a new one.
//! - `kick_model.rs` tries all interleavings; docs/decisions/0017 argues.
//!
//! Spec: virtio 1.3 §2.7.13.4 (spurious notifications are allowed). Not here: whether one is needed (`virtqueue`).

use std::fmt;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read};

use super::Arc; // std's; in `kick_model.rs`, which takes this file in again, loom's

/// Something that wakes a device.
pub trait Doorbell: Send + Sync + fmt::Debug {
    /// Rings. Never blocks; may be called when nobody listens any more.
    fn ring(&self);
}

/// An eventfd that a vhost-user back-end polls.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new one, non-blocking.
    ///
    /// # Errors
    /// The kernel's: out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Takes the signal off, if there is one. Never blocks.
    pub fn clear(&self) {
        let mut count = [0; 8];
        // Not by O_NONBLOCK, which is a flag of the eventfd and not of our descriptor: a back-end can take it off.
        // -1: there is no position.
        let slices = &mut [IoSliceMut::new(&mut count)];
        if preadv2(&self.0, slices, u64::MAX, ReadWriteFlags::NOWAIT) == Err(Errno::OPNOTSUPP) {
            // Linux before 5.8. Nothing to read: somebody else has.
            let _ = read(&self.0, &mut count);
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Doorbell for EventFd {
    fn ring(&self) {
        // The counter is full: it has been rung, and nobody has looked yet.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// A notification that the device asked for and has not had yet. Whoever drops it notifies too: as long as it is not
/// given, the device sleeps, and others who push meanwhile are told that no notification is needed.
#[must_use = "the device sleeps until it is notified"]
#[derive(Debug)]
pub struct Kick(Arc<dyn Doorbell>);

impl Kick {
    /// For a queue that decided to ring.
    pub(crate) fn new(bell: Arc<dyn Doorbell>) -> Self {
        Self(bell)
    }

    /// Notifies the device. Needs no lock.
    #[inline]
    pub fn notify(self) {
        drop(self);
    }
}

/// Here, so that a thread that unwinds between the two steps does not take the notification with it.
impl Drop for Kick {
    #[inline]
    fn drop(&mut self) {
        self.0.ring();
    }
}
