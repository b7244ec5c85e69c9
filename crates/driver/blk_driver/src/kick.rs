//! Notifies the device of new requests: a [`Kick`] is a value that owns a reference to the doorbell.
//!
//! `Queue::prepare_kick (under the owner's lock: publishes, checks whether the device wants a notification) → Kick →
//! Kick::notify (no lock)`
//!
//! - A [`Kick`] holds its own reference to the doorbell. The queue may be reset, reconnected or dropped
//!   between the two steps, and the kick still writes to the intended descriptor.
//! - A reconnected queue has a new doorbell, so an old notification has no effect, and the old back-end cannot consume
//!   a new notification.
//! - `kick_model.rs` tests all interleavings; docs/decisions/0017 explains why the two steps are correct.
//!
//! Spec: virtio 1.3 §2.7.13.4 (spurious notifications are allowed).

use std::fmt;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read};

use super::Arc; // std's, or loom's where `kick_model.rs` includes this file

/// A way to wake a device.
pub trait Doorbell: Send + Sync + fmt::Debug {
    /// Rings the doorbell. Never blocks, and may be called even after the listener has closed its end.
    fn ring(&self);
}

/// An eventfd that a vhost-user back-end polls.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Makes a new, non-blocking eventfd.
    ///
    /// # Errors
    /// The kernel's error: no file descriptors are left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Clears the signal, if there is one. Never blocks.
    pub fn clear(&self) {
        let mut count = [0; 8];
        // Offset -1, because eventfds have no position. The call does not rely on O_NONBLOCK: that flag belongs to the
        // shared eventfd, so a back-end can clear it.
        let slices = &mut [IoSliceMut::new(&mut count)];
        if preadv2(&self.0, slices, u64::MAX, ReadWriteFlags::NOWAIT) == Err(Errno::OPNOTSUPP) {
            // Linux before 5.8 does not support this call. If there is nothing to read, another reader has already
            // cleared the signal.
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
        // A write fails only if the counter is full: then the reader has not yet handled earlier rings.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// A pending notification that the device requested. Dropping it also notifies: the device sleeps until it is notified,
/// and other threads that push meanwhile see that no further notification is needed.
#[must_use = "the device sleeps until it is notified"]
#[derive(Debug)]
pub struct Kick(Arc<dyn Doorbell>);

impl Kick {
    /// For a queue that has decided to notify its device.
    pub(crate) fn new(bell: Arc<dyn Doorbell>) -> Self {
        Self(bell)
    }

    /// Notifies the device. Needs no lock.
    #[inline]
    pub fn notify(self) {
        drop(self);
    }
}

/// Notifies in `drop`, so that a thread that unwinds between the two steps still notifies.
impl Drop for Kick {
    #[inline]
    fn drop(&mut self) {
        self.0.ring();
    }
}
