//! Layout of the three parts of a split virtqueue, and checked access to them.
//!
//! ```text
//! descriptors  16 bytes × queue_size                                  aligned to 16
//! avail        flags u16 | idx u16 | ring u16 × queue_size | used_event u16     to 2
//! used         flags u16 | idx u16 | {id u32, len u32} × queue_size | avail_event u16   to 4
//! ```
//!
//! The event fields exist only with `VIRTIO_F_EVENT_IDX`. Spec: virtio 1.3 §2.7, §2.7.6, §2.7.8.

use std::sync::Arc;

use guest_mem::{Address, GuestMemory, SharedSlice};

use crate::RingFeatures;
use crate::fault::{RingFault, RingPart};
use crate::layout::{RingLayout, slice};

/// Index of `flags` in either ring, in 16-bit words.
pub(super) const FLAGS: usize = 0;
/// Index of `idx` in either ring, in 16-bit words.
pub(super) const IDX: usize = 1;
/// Index of the first entry of the available ring, in 16-bit words.
pub(super) const AVAIL_ENTRIES: usize = 2;
/// Offset of the first entry of the used ring.
const USED_ENTRIES_BYTES: u64 = 4;
/// Size of a used entry in 16-bit words.
const USED_ENTRY_WORDS: usize = 4;

impl RingLayout {
    /// Index of `used_event` in the available ring, in 16-bit words.
    #[inline]
    pub(super) fn used_event(&self) -> usize {
        AVAIL_ENTRIES + usize::from(self.queue_size)
    }

    /// Index of `avail_event` in the used ring, in 16-bit words.
    #[inline]
    pub(super) fn avail_event(&self) -> usize {
        2 + USED_ENTRY_WORDS * usize::from(self.queue_size)
    }

    /// Maps the parts of the ring in `memory` and checks them.
    pub(super) fn map(&self, memory: &Arc<GuestMemory>, features: RingFeatures) -> Result<Parts, RingFault> {
        self.check_size()?;
        let (queue_size, event) = (usize::from(self.queue_size), usize::from(features.event_idx));
        let used_words = self.avail_event() + event;
        let descriptors = slice(memory, RingPart::Descriptors, self.descriptors, 16, 2 * queue_size)?;
        let avail = slice(memory, RingPart::Avail, self.avail, 2, self.used_event() + event)?;
        let used = slice(memory, RingPart::Used, self.used, 4, used_words)?;
        let entries_addr = self.used.unchecked_add(USED_ENTRIES_BYTES); // inside `used`, which is mapped
        let used_entries = slice(memory, RingPart::Used, entries_addr, 4, 2 * queue_size)?;
        Ok(Parts { descriptors, avail, used, used_entries })
    }
}

/// The parts of a ring in guest memory.
#[derive(Debug)]
pub(super) struct Parts {
    /// Two words per descriptor: address; length, flags and next.
    pub descriptors: SharedSlice<u64>,
    pub avail: SharedSlice<u16>,
    pub used: SharedSlice<u16>,
    /// Two words per entry, inside `used`: id, length.
    pub used_entries: SharedSlice<u32>,
}
