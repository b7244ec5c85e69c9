//! The addresses of a virtqueue's three areas, split or packed, and checked access to them.

use std::sync::Arc;

use guest_mem::{AccessError, Address, GuestAddress, GuestMemory, MemoryView, Shared, SharedSlice};

use crate::fault::{RingFault, RingPart};
use crate::{MAX_QUEUE_SIZE, MIN_QUEUE_SIZE, RingFeatures};

/// Size and addresses of a virtqueue as the front-end announced them; not yet checked.
///
/// Split and packed rings have three areas (virtio 1.3 §2.6); the fields are named after a split ring's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// Number of entries; a power of two. (virtio 1.3 §2.8.10.1 does not require this of a packed ring, but all known
    /// drivers use a power of two, and it allows the use of a mask to turn a position into a slot.)
    pub queue_size: u16,
    /// Descriptor area: the descriptor table, or the packed ring itself.
    pub descriptors: GuestAddress,
    /// Driver area: the available ring, or the driver's event suppression structure.
    pub avail: GuestAddress,
    /// Device area: the used ring, or the device's event suppression structure.
    pub used: GuestAddress,
}

impl RingLayout {
    /// A split ring's `used.idx`: the position that its device has reached. For a front-end that passes the ring to
    /// another back-end.
    ///
    /// # Errors
    /// [`AccessError`] if the index is not in guest memory.
    pub fn used_index(&self, view: &MemoryView) -> Result<u16, AccessError> {
        let mut bytes = [0; 2];
        view.read(self.used.raw_value().wrapping_add(2), &mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }

    pub(crate) fn check_size(&self) -> Result<(), RingFault> {
        let (queue_size, min, max) = (self.queue_size, MIN_QUEUE_SIZE, MAX_QUEUE_SIZE);
        let good = queue_size.is_power_of_two() && (min..=max).contains(&queue_size);
        if good { Ok(()) } else { Err(RingFault::BadQueueSize { queue_size, min, max }) }
    }

    /// Length of the device area (virtio 1.3 §2.7, §2.8.10.1).
    #[must_use]
    pub fn used_bytes(&self, features: RingFeatures) -> u64 {
        let entries_bytes = 8 * u64::from(self.queue_size);
        if features.packed { 4 } else { 4 + entries_bytes + 2 * u64::from(features.event_idx) }
    }

    /// Marks in the dirty log every part of the ring that a device may have written: the previous device may have
    /// died between a store and its mark.
    pub fn note_device_stores(&self, memory: &GuestMemory, features: RingFeatures) {
        memory.note_store(self.used.raw_value(), self.used_bytes(features));
        if features.packed {
            memory.note_store(self.descriptors.raw_value(), 16 * u64::from(self.queue_size));
        }
    }
}

/// Maps `len` values of one part of a ring, which must be aligned as the standard requires.
pub(crate) fn slice<T: Shared>(
    memory: &Arc<GuestMemory>,
    part: RingPart,
    addr: GuestAddress,
    align_bytes: usize,
    len: usize,
) -> Result<SharedSlice<T>, RingFault> {
    let misaligned = !addr.raw_value().is_multiple_of(align_bytes as u64);
    let checked = if misaligned {
        Err(AccessError::Misaligned { addr: addr.raw_value(), align_bytes })
    } else {
        memory.shared_slice(addr, len)
    };
    checked.map_err(|source| RingFault::Part { part, source })
}

/// Zeroes one part of a ring.
pub(crate) fn zero(
    view: &MemoryView,
    part: RingPart,
    addr: GuestAddress,
    len_bytes: usize,
) -> Result<(), RingFault> {
    view.store(addr.raw_value(), &vec![0; len_bytes]).map_err(|source| RingFault::Part { part, source })
}
