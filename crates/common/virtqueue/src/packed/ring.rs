//! Layout of the three parts of a packed virtqueue, and one descriptor as two words.
//!
//! ```text
//! ring          {addr u64 | len u32 | id u16 | flags u16} × queue_size     aligned to 16
//! driver event  {offset 15, wrap 1} | {flags 2, reserved 14}                       to 4
//! device event  the same                                                           to 4
//! ```
//!
//! - The second word of a descriptor is loaded and stored whole. On the supported machines, an aligned load
//!   reads the whole word at once, even if the peer writes it in pieces with the flags last.
//!
//! Spec: virtio 1.3 §2.8.10.1, §2.8.13, §2.8.14.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_mem::{GuestMemory, GuestRange, SharedSlice};

use crate::chain::Descriptor;
use crate::fault::{RingFault, RingPart};
use crate::layout::{RingLayout, slice};

/// `VIRTQ_DESC_F_AVAIL`.
pub(super) const AVAIL: u16 = 1 << 7;
/// `VIRTQ_DESC_F_USED`.
pub(super) const USED: u16 = 1 << 15;

/// Length, buffer id and flags of a descriptor, as they lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Meta(u64);

impl Meta {
    #[inline]
    pub fn new(len_bytes: u32, id: u16, flags: u16) -> Self {
        Self(u64::from(len_bytes) | u64::from(id) << 32 | u64::from(flags) << 48)
    }

    #[inline]
    pub fn from_word(word: u64) -> Self {
        Self(word)
    }

    #[inline]
    pub fn word(self) -> u64 {
        self.0
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // extracts fields
    pub fn len_bytes(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // extracts fields
    pub fn id(self) -> u16 {
        (self.0 >> 32) as u16
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // extracts fields
    pub fn flags(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// Length, flags and the index of the next descriptor, in the layout of a split ring's descriptor.
    #[inline]
    pub fn linked(self, flags: u16, next: u16) -> u64 {
        u64::from(self.len_bytes()) | u64::from(flags) << 32 | u64::from(next) << 48
    }

    /// The descriptor at `addr`; a packed one has no `next`.
    #[inline]
    pub fn at(self, addr: u64) -> Descriptor {
        let range = GuestRange { addr, len_bytes: self.len_bytes() };
        Descriptor { range, flags: self.flags(), next: 0 }
    }
}

/// The parts of a ring in guest memory.
#[derive(Debug)]
pub(super) struct Ring {
    /// Two words per descriptor: address; length, id and flags.
    words: SharedSlice<u64>,
    /// One word each: see `event.rs`.
    pub driver_event: SharedSlice<u32>,
    pub device_event: SharedSlice<u32>,
}

impl Ring {
    /// Maps the parts in `memory` and checks them.
    pub fn map(layout: &RingLayout, memory: &Arc<GuestMemory>) -> Result<Self, RingFault> {
        layout.check_size()?;
        let words = 2 * usize::from(layout.queue_size);
        Ok(Self {
            words: slice(memory, RingPart::PackedRing, layout.descriptors, 16, words)?,
            driver_event: slice(memory, RingPart::DriverEvent, layout.avail, 4, 1)?,
            device_event: slice(memory, RingPart::DeviceEvent, layout.used, 4, 1)?,
        })
    }

    #[inline]
    pub fn addr(&self, slot: u16) -> u64 {
        self.words.load(2 * usize::from(slot), Ordering::Relaxed)
    }

    #[inline]
    pub fn set_addr(&self, slot: u16, addr: u64) {
        self.words.store(2 * usize::from(slot), addr, Ordering::Relaxed);
    }

    #[inline]
    pub fn meta(&self, slot: u16, order: Ordering) -> Meta {
        Meta::from_word(self.words.load(2 * usize::from(slot) + 1, order))
    }

    #[inline]
    pub fn set_meta(&self, slot: u16, meta: Meta, order: Ordering) {
        self.words.store(2 * usize::from(slot) + 1, meta.word(), order);
    }
}
