//! Where the three areas of a virtqueue lie, split or packed, and the checked way into memory.
//!
//! Not here: what lies where inside an area (`split/layout.rs`, `packed/layout.rs`).

use std::sync::Arc;

use guest_mem::{AccessError, Address, GuestAddress, GuestMemory, MemoryView, Shared, SharedSlice};

use crate::fault::{RingFault, RingPart};
use crate::{MAX_QUEUE_SIZE, MIN_QUEUE_SIZE};

/// Size and addresses of a virtqueue, as the front-end announced them: not yet checked.
///
/// Both formats have three areas (virtio 1.3 §2.6); the fields have the names of the split ring's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// In entries; a power of two. (A packed ring's need not be by virtio 1.3 §2.8.10.1; every driver we
    /// know asks for one, and slots stay a mask away from positions.)
    pub queue_size: u16,
    /// Descriptor area: the descriptor table, or the packed ring itself.
    pub descriptors: GuestAddress,
    /// Driver area: the available ring, or the driver's event suppression structure.
    pub avail: GuestAddress,
    /// Device area: the used ring, or the device's event suppression structure.
    pub used: GuestAddress,
}

impl RingLayout {
    pub(crate) fn check_size(&self) -> Result<(), RingFault> {
        let (queue_size, min, max) = (self.queue_size, MIN_QUEUE_SIZE, MAX_QUEUE_SIZE);
        let good = queue_size.is_power_of_two() && (min..=max).contains(&queue_size);
        if good { Ok(()) } else { Err(RingFault::BadQueueSize { queue_size, min, max }) }
    }
}

/// `len` values of one part of a ring, aligned as the standard wants it.
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
