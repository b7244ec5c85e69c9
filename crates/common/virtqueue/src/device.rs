//! Device half of a virtqueue in either format: takes available chains and returns them as used.
//!
//! `enable_kicks … pop → (owner) → push_used → publish → needs_notification`
//!
//! [`DeviceQueue::new`] picks the format once. Each later call costs one branch, which always takes the same
//! direction.

use std::sync::Arc;

use guest_mem::{GuestMemory, MemoryView};

use crate::fault::{PopError, RingFault};
use crate::log::{LogArea, Recovery};
use crate::{Chain, RingFeatures, RingLayout, packed, split};

/// One queue as a device sees it.
#[derive(Debug)]
pub enum DeviceQueue {
    /// virtio 1.3 §2.7.
    Split(split::DeviceQueue),
    /// virtio 1.3 §2.8.
    Packed(packed::DeviceQueue),
}

/// Makes the call on the half that `$queue` holds, split or packed.
macro_rules! either {
    ($queue:expr, $half:ident => $call:expr) => {
        match $queue {
            DeviceQueue::Split($half) => $call,
            DeviceQueue::Packed($half) => $call,
        }
    };
}

impl DeviceQueue {
    /// Maps the ring and resumes where the last device stopped.
    ///
    /// `base` is the ring base of vhost-user (`SET_VRING_BASE`). A split ring holds its own position (see
    /// [`split::DeviceQueue::new`]), so `base` is ignored. A packed ring holds its position only if the last
    /// device was this implementation and stopped with nothing in flight. Otherwise the queue starts at `base`, in
    /// the format of [`DeviceQueue::position`], unless the ring contradicts it (`packed/resume.rs`).
    ///
    /// # Errors
    /// [`RingFault::BadQueueSize`], [`RingFault::Part`]; packed only: [`RingFault::BadBase`],
    /// [`RingFault::StaleBase`].
    pub fn new(
        view: &MemoryView,
        layout: RingLayout,
        features: RingFeatures,
        base: u32,
    ) -> Result<Self, RingFault> {
        if features.packed {
            Ok(Self::Packed(packed::DeviceQueue::new(view, layout, features, base)?))
        } else {
            Ok(Self::Split(split::DeviceQueue::new(view, layout, features)?))
        }
    }

    /// Like `new`, with an in-flight log that outlives this device. The queue first pops the chains that its
    /// predecessor took and did not publish, in their original order, and then continues with the ring.
    ///
    /// `base` is used only for a packed ring that was never used with this log: a split ring and a log hold
    /// the position themselves.
    ///
    /// # Errors
    /// Those of [`DeviceQueue::new`], and [`RingFault::Log`].
    pub fn with_log(
        view: &MemoryView,
        layout: RingLayout,
        features: RingFeatures,
        base: u32,
        log: &LogArea,
    ) -> Result<Self, RingFault> {
        if features.packed {
            Ok(Self::Packed(packed::DeviceQueue::with_log(view, layout, features, base, log)?))
        } else {
            Ok(Self::Split(split::DeviceQueue::with_log(view, layout, features, log)?))
        }
    }

    /// Checks that `memory` maps every part of the ring completely, as [`DeviceQueue::new`] and
    /// [`DeviceQueue::rebind`] require.
    ///
    /// # Errors
    /// [`RingFault::BadQueueSize`], [`RingFault::Part`].
    pub fn check_place(
        layout: &RingLayout,
        memory: &Arc<GuestMemory>,
        features: RingFeatures,
    ) -> Result<(), RingFault> {
        if features.packed {
            packed::DeviceQueue::check_place(layout, memory)
        } else {
            split::DeviceQueue::check_place(layout, memory, features)
        }
    }

    /// How many requests [`DeviceQueue::with_log`] found in the log, and whether the log was that of another ring.
    #[must_use]
    pub fn recovery(&self) -> Recovery {
        either!(self, half => half.recovery())
    }

    /// How many of the predecessor's chains are still to be popped. They stay in the log until they are used.
    #[inline]
    #[must_use]
    pub fn to_redo(&self) -> u16 {
        either!(self, half => half.to_redo())
    }

    /// Allows up to `limit` descriptors in a chain with an indirect table, even if the queue is smaller.
    ///
    /// A device announces its segment limit before it learns the queue's size, and Linux relies on the announced
    /// limit. If the device accepted only `queue_size` descriptors, large requests on a small queue would fail.
    /// (virtio 1.3 §2.7.5.3.1 limits the driver to the queue size.)
    #[must_use]
    pub fn with_indirect_limit(self, limit: u16) -> Self {
        match self {
            Self::Split(half) => Self::Split(half.with_indirect_limit(limit)),
            Self::Packed(half) => Self::Packed(half.with_indirect_limit(limit)),
        }
    }

    /// Moves the queue to a new memory table at the same addresses; positions are kept.
    ///
    /// # Errors
    /// [`RingFault::Part`] if the new table does not hold the ring; the queue is unchanged then.
    pub fn rebind(&mut self, view: &MemoryView) -> Result<(), RingFault> {
        either!(self, half => half.rebind(view))
    }

    /// Number of entries.
    #[inline]
    #[must_use]
    pub fn queue_size(&self) -> u16 {
        either!(self, half => half.queue_size())
    }

    /// The ring's addresses and size.
    #[must_use]
    pub fn layout(&self) -> &RingLayout {
        either!(self, half => half.layout())
    }

    /// The ring's current position: the answer to `GET_VRING_BASE`.
    ///
    /// Split: the index of the next available entry. Packed: the slot of the next descriptor to take (bits 0–14)
    /// and its wrap counter (bit 15); the slot of the next used descriptor (16–30) and its wrap counter (31).
    #[inline]
    #[must_use]
    pub fn position(&self) -> u32 {
        either!(self, half => half.position())
    }

    /// Whether the ring was unused by any device when it was opened.
    #[must_use]
    pub fn was_fresh(&self) -> bool {
        either!(self, half => half.was_fresh())
    }

    /// A lower bound on the number of available chains; 0 only if there are none.
    ///
    /// A split ring counts its chains; a packed one would have to walk them, so it returns 1.
    ///
    /// # Errors
    /// [`RingFault::AvailIndexJump`] (split only).
    #[inline]
    pub fn available(&self) -> Result<u16, RingFault> {
        either!(self, half => half.available())
    }

    /// Takes the next available chain into `chain` and returns its tag, if there is one. The tag is the head
    /// of a split ring's chain, or the buffer id of a packed one's; either is less than the queue size.
    ///
    /// # Errors
    /// [`PopError::Ring`]: the queue must stop. [`PopError::Chain`]: this chain is taken but unusable; the
    /// caller returns it with `push_used`. `chain` is then empty, unless the fault is
    /// [`crate::ChainFault::ReadableAfterWritable`].
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<u16>, PopError> {
        either!(self, half => half.pop(chain))
    }

    /// Puts the last popped chain back, so that it is popped again. For an owner that has no room to start the
    /// request. No other pop or push may come between the pop and this call.
    #[inline]
    pub fn unpop(&mut self) {
        either!(self, half => half.unpop());
    }

    /// Stores one completed chain; the driver sees it after the next [`DeviceQueue::publish`].
    ///
    /// `written_bytes`: bytes stored from the start of the chain's device-writable part; 0 if unknown.
    #[inline]
    pub fn push_used(&mut self, tag: u16, written_bytes: u32) {
        either!(self, half => half.push_used(tag, written_bytes));
    }

    /// Makes all pushed chains visible to the driver, once per pass; returns whether there were any.
    #[inline]
    pub fn publish(&mut self) -> bool {
        either!(self, half => half.publish())
    }

    /// Whether the driver wants a notification for the chains published since the last call.
    ///
    /// Spec: virtio 1.3 §2.7.7.2, §2.8.10.
    #[inline]
    #[must_use]
    pub fn needs_notification(&mut self) -> bool {
        either!(self, half => half.needs_notification())
    }

    /// Tells the driver that it need not kick, because the device polls. This is a hint: kicks may still
    /// arrive.
    #[inline]
    pub fn disable_kicks(&mut self) {
        either!(self, half => half.disable_kicks());
    }

    /// Requests a kick for the next available chain, then checks the ring again. Returns `true` if a chain is
    /// already available; a kick for that chain is not guaranteed.
    ///
    /// # Errors
    /// [`RingFault::AvailIndexJump`] (split only).
    #[inline]
    pub fn enable_kicks(&mut self) -> Result<bool, RingFault> {
        either!(self, half => half.enable_kicks())
    }
}
