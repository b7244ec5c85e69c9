//! Driver half of a virtqueue in either format: makes buffers available and takes used ones back.
//!
//! `add … publish → kick_needed? … pop_used … arm_interrupts`

use guest_mem::{GuestAddress, GuestRange, MemoryView};

use crate::chain::Used;
use crate::driver_fault::{AddError, DriverFault};
use crate::fault::RingFault;
use crate::{RingFeatures, RingLayout, packed, split};

/// One queue as a driver sees it.
#[derive(Debug)]
pub enum DriverQueue {
    /// virtio 1.3 §2.7.
    Split(split::DriverQueue),
    /// virtio 1.3 §2.8.
    Packed(packed::DriverQueue),
}

/// Makes the call on the half that `$queue` holds, split or packed.
macro_rules! either {
    ($queue:expr, $half:ident => $call:expr) => {
        match $queue {
            DriverQueue::Split($half) => $call,
            DriverQueue::Packed($half) => $call,
        }
    };
}

impl DriverQueue {
    /// Creates a new ring at `layout` and zeroes all of it.
    ///
    /// # Errors
    /// [`RingFault::BadQueueSize`], [`RingFault::Part`].
    pub fn new(view: &MemoryView, layout: RingLayout, features: RingFeatures) -> Result<Self, RingFault> {
        if features.packed {
            Ok(Self::Packed(packed::DriverQueue::new(view, layout, features)?))
        } else {
            Ok(Self::Split(split::DriverQueue::new(view, layout, features)?))
        }
    }

    /// Allows up to `limit` buffers in a chain with an indirect table, even if the queue is smaller. For devices
    /// that announce a segment limit per request.
    ///
    /// virtio 1.3 §2.7.5.3.1 limits a driver to the queue size. Linux uses the announced limit instead, so devices
    /// accept longer tables. With the limit of the standard, a queue of two entries could not carry any data.
    #[must_use]
    pub fn with_indirect_limit(self, limit: u16) -> Self {
        match self {
            Self::Split(half) => Self::Split(half.with_indirect_limit(limit)),
            Self::Packed(half) => Self::Packed(half.with_indirect_limit(limit)),
        }
    }

    /// The ring base at which a device starts on a new ring; a front-end sends it to its back-end.
    #[must_use]
    pub fn initial_base(&self) -> u32 {
        match self {
            Self::Split(_) => 0,
            Self::Packed(_) => packed::FRESH_BASE,
        }
    }

    /// Free descriptors.
    #[inline]
    #[must_use]
    pub fn free_descriptors(&self) -> u16 {
        either!(self, half => half.free_descriptors())
    }

    /// Chains added and not yet returned.
    #[inline]
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        either!(self, half => half.in_flight())
    }

    /// Adds a chain that uses the ring's own descriptors; the device sees it after [`DriverQueue::publish`].
    /// Returns the tag, which stays unique until this chain is returned.
    ///
    /// # Errors
    /// [`AddError`]; nothing was added.
    #[inline]
    pub fn add(
        &mut self,
        readable: &[GuestRange],
        writable: &[GuestRange],
        token: u64,
    ) -> Result<u16, AddError> {
        either!(self, half => half.add(readable, writable, token))
    }

    /// Adds a chain through an indirect table at `table`, which takes 16 bytes per buffer. The device may
    /// read the table until it returns the chain.
    ///
    /// # Errors
    /// [`AddError`]; nothing was added.
    #[inline]
    pub fn add_indirect(
        &mut self,
        readable: &[GuestRange],
        writable: &[GuestRange],
        table: GuestAddress,
        token: u64,
    ) -> Result<u16, AddError> {
        either!(self, half => half.add_indirect(readable, writable, table, token))
    }

    /// Makes all added chains visible to the device; returns whether there were any.
    #[inline]
    pub fn publish(&mut self) -> bool {
        either!(self, half => half.publish())
    }

    /// Whether the device wants a kick for the chains published since the last call.
    ///
    /// Spec: virtio 1.3 §2.7.10.1, §2.8.10.
    #[inline]
    #[must_use]
    pub fn kick_needed(&mut self) -> bool {
        either!(self, half => half.kick_needed())
    }

    /// Takes the next chain that the device has used, if there is one.
    ///
    /// # Errors
    /// [`DriverFault`]: the ring cannot be used any more.
    #[inline]
    pub fn pop_used(&mut self) -> Result<Option<Used>, DriverFault> {
        either!(self, half => half.pop_used())
    }

    /// Tells the device that the driver polls. This is a hint: interrupts may still arrive.
    #[inline]
    pub fn disable_interrupts(&mut self) {
        either!(self, half => half.disable_interrupts());
    }

    /// Requests an interrupt for the next used chain, then checks the ring again. Returns `true` if a chain is
    /// already used; an interrupt for that chain is not guaranteed.
    ///
    /// # Errors
    /// [`DriverFault::UsedIndexJump`] (split only).
    #[inline]
    pub fn arm_interrupts(&mut self) -> Result<bool, DriverFault> {
        either!(self, half => half.arm_interrupts())
    }
}
