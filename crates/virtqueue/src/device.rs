//! Device half of a virtqueue in either format: takes available chains, gives back used ones.
//!
//! `enable_kicks … pop → (owner) → push_used → publish → needs_notification`
//!
//! Which format was negotiated is decided once, in [`DeviceQueue::new`]; each call is then one branch that
//! never changes its mind.
//!
//! Not here: the halves themselves (`split/device.rs`, `packed/device.rs`).

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

/// The same call on whichever half it is.
macro_rules! either {
    ($queue:expr, $half:ident => $call:expr) => {
        match $queue {
            DeviceQueue::Split($half) => $call,
            DeviceQueue::Packed($half) => $call,
        }
    };
}

impl DeviceQueue {
    /// Maps the ring and goes on where the last device stopped.
    ///
    /// `base` is the ring base of vhost-user (`SET_VRING_BASE`). A split ring says itself where to go on
    /// (see [`split::DeviceQueue::new`]), and `base` is ignored. A packed ring says it only if the last device
    /// was one of ours and left it with nothing in flight; otherwise `base` is taken, in the format of
    /// [`DeviceQueue::position`], unless the ring contradicts (`packed/resume.rs`).
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

    /// The same with a log of what is in flight, which outlives this device: what its predecessor had begun and not
    /// published is popped first, in the order in which it was popped then, and the ring goes on behind it.
    ///
    /// `base` counts only for a packed ring that was never used with this log: a split ring and a log know better.
    ///
    /// # Errors
    /// As [`DeviceQueue::new`], and [`RingFault::Log`].
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

    /// Whether `memory` holds a ring, each part of it as a whole: what [`DeviceQueue::new`] and
    /// [`DeviceQueue::rebind`] ask of it.
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

    /// What [`DeviceQueue::with_log`] found in the log.
    #[must_use]
    pub fn recovery(&self) -> Recovery {
        either!(self, half => half.recovery())
    }

    /// How many chains of the predecessor's were not popped yet. They stay in the log until they are used.
    #[inline]
    #[must_use]
    pub fn to_redo(&self) -> u16 {
        either!(self, half => half.to_redo())
    }

    /// Lets chains with an indirect table be as long as `limit`, even if the queue is smaller.
    ///
    /// A device announces how many segments it takes before it learns the queue's size, and Linux goes
    /// by the announcement: with a limit of `queue_size` alone, large requests of a small queue fail.
    /// (virtio 1.3 §2.7.5.3.1 binds the driver to the queue size.)
    #[must_use]
    pub fn with_indirect_limit(self, limit: u16) -> Self {
        match self {
            Self::Split(half) => Self::Split(half.with_indirect_limit(limit)),
            Self::Packed(half) => Self::Packed(half.with_indirect_limit(limit)),
        }
    }

    /// The same addresses in a new memory table; positions are kept.
    ///
    /// # Errors
    /// [`RingFault::Part`] if the new table does not hold the ring; the queue is unchanged then.
    pub fn rebind(&mut self, view: &MemoryView) -> Result<(), RingFault> {
        either!(self, half => half.rebind(view))
    }

    /// In entries.
    #[inline]
    #[must_use]
    pub fn queue_size(&self) -> u16 {
        either!(self, half => half.queue_size())
    }

    /// Where the ring lies.
    #[must_use]
    pub fn layout(&self) -> &RingLayout {
        either!(self, half => half.layout())
    }

    /// Where the ring goes on: what `GET_VRING_BASE` answers with.
    ///
    /// Split: the index of the next available entry. Packed: slot of the next descriptor to take (bits
    /// 0–14) and its wrap counter (15); slot of the next one to use (16–30) and its wrap counter (31).
    #[inline]
    #[must_use]
    pub fn position(&self) -> u32 {
        either!(self, half => half.position())
    }

    /// Whether no device had used anything in the ring when it was opened.
    #[must_use]
    pub fn was_fresh(&self) -> bool {
        either!(self, half => half.was_fresh())
    }

    /// Whether anything is available right now: 0 if not, else at least 1 and never more than there is.
    ///
    /// A split ring counts its chains; a packed one would have to walk them and says 1.
    ///
    /// # Errors
    /// [`RingFault::AvailIndexJump`] (split only).
    #[inline]
    pub fn available(&self) -> Result<u16, RingFault> {
        either!(self, half => half.available())
    }

    /// Takes the next available chain into `chain` and returns its tag, if there is one: the head of a
    /// split ring's chain, the buffer id of a packed one's, less than the queue size either way.
    ///
    /// # Errors
    /// [`PopError::Ring`]: the queue must stop. [`PopError::Chain`]: this chain is taken but unusable
    /// and goes back by `push_used`; `chain` is then empty, unless the fault is
    /// [`crate::ChainFault::ReadableAfterWritable`].
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<u16>, PopError> {
        either!(self, half => half.pop(chain))
    }

    /// Gives the chain popped last back: it will be popped again. For an owner without room to start it;
    /// nothing may have been popped or pushed since.
    #[inline]
    pub fn unpop(&mut self) {
        either!(self, half => half.unpop());
    }

    /// Stores one completed chain; the driver sees it after the next [`DeviceQueue::publish`].
    ///
    /// `written_bytes`: stored in the chain's device-writable part, from its start on; 0 if unknown.
    #[inline]
    pub fn push_used(&mut self, tag: u16, written_bytes: u32) {
        either!(self, half => half.push_used(tag, written_bytes));
    }

    /// Makes everything pushed so far visible to the driver, once per pass; returns whether there was any.
    #[inline]
    pub fn publish(&mut self) -> bool {
        either!(self, half => half.publish())
    }

    /// Whether the driver wants to hear about what was published since the last call.
    ///
    /// Spec: virtio 1.3 §2.7.7.2, §2.8.10.
    #[inline]
    #[must_use]
    pub fn needs_notification(&mut self) -> bool {
        either!(self, half => half.needs_notification())
    }

    /// Tells the driver that it need not kick: we look without being asked. A hint: spurious kicks happen.
    #[inline]
    pub fn disable_kicks(&mut self) {
        either!(self, half => half.disable_kicks());
    }

    /// Asks for a kick when the next chain becomes available, then looks once more: `true` if something
    /// is available already, for which no kick may come.
    ///
    /// # Errors
    /// [`RingFault::AvailIndexJump`] (split only).
    #[inline]
    pub fn enable_kicks(&mut self) -> Result<bool, RingFault> {
        either!(self, half => half.enable_kicks())
    }
}
