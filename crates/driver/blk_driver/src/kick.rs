//! Notifies the device of new requests: a [`Kick`] is a value that owns a reference to the doorbell.
//!
//! `Queue::prepare_kick (under the owner's lock: publishes, checks whether the device wants a notification) → Kick →
//! Kick::notify (no lock)`
//!
//! - A [`Kick`] holds its own reference to the doorbell. The queue may be reset, reconnected or dropped
//!   between the two steps, and the kick still writes to the intended descriptor.
//! - A reconnected queue has a new doorbell, so an old notification has no effect, and a back-end that is
//!   gone cannot consume a new one.
//! - `kick_model.rs` tests all interleavings; docs/decisions/0017 has the argument.
//!
//! Spec: virtio 1.3 §2.7.13.4 (spurious notifications are allowed).

use std::fmt;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read};

use super::Arc; // std's; in `kick_model.rs`, which includes this file again, loom's

/// A way to wake a device.
pub trait Doorbell: Send + Sync + fmt::Debug {
    /// Rings the doorbell. Never blocks, and may be called after the listener is gone.
    fn ring(&self);
}

/// An eventfd that a vhost-user back-end polls.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Makes a new, non-blocking eventfd.
    ///
    /// # Errors
    /// The kernel's: out of descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Clears the signal, if there is one. Never blocks.
    pub fn clear(&self) {
        let mut count = [0; 8];
        // `-1`, because eventfds have no position. Does not rely on O_NONBLOCK: that flag belongs to the shared
        // eventfd, so a back-end can clear it.
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
        // A full counter means that the doorbell was rung and the reader has not read it yet.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// A pending notification that the device requested. Dropping it also notifies: the device sleeps until it is notified,
/// and other threads that push meanwhile see that no further notification is needed.
#[must_use = "the device sleeps until it is notified"]
#[derive(Debug)]
pub struct Kick(Arc<dyn Doorbell>);

impl Kick {
    /// A queue that has decided to notify makes the kick.
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
