//! Where a packed ring goes on, and what shows that it does not go on there.
//!
//! Unlike a split ring's `used.idx`, nothing in memory tells the position: both sides keep theirs in
//! private. A front-end whose back-end died sends an older one, and requests would run twice. What can be
//! seen is a descriptor that was used later than the position that is claimed:
//!
//! - from the claimed slot on, one that is used in the claimed lap; before it, one used in the next lap;
//! - for the position of a new ring, anything not zero (virtio 1.3 §2.8.13) beyond what a driver has made
//!   available, unless the device area says that a device left the ring exactly here.
//!
//! Spec: virtio 1.3 §2.8.1. Not here: the format of split rings' positions (`split/device.rs`).

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::cursor::Cursor;
use super::event::position_bits;
use super::ring::{AVAIL, Ring, USED};
use crate::fault::RingFault;

/// The ring base of a new packed ring: both positions at slot 0, both wrap counters 1 (virtio 1.3 §2.8.1).
pub const FRESH_BASE: u32 = 0x8000_8000;

/// How many descriptors a running driver may just be writing: the first of a chain or batch, whose flags
/// come last, and the one where it is.
const MOST_BEING_WRITTEN: usize = 2;

/// Slot and wrap counter of the next descriptor to take, and of the next one to use, as vhost-user tells
/// them.
#[inline]
pub(super) fn base(next_avail: Cursor, next_used: Cursor) -> u32 {
    u32::from(next_avail.to_bits()) | u32::from(next_used.to_bits()) << 16
}

/// The position that `base` claims, if nothing in the ring contradicts it.
#[allow(clippy::cast_possible_truncation)] // takes the two halves apart
pub(super) fn position(ring: &Ring, base: u32, queue_size: u16) -> Result<Cursor, RingFault> {
    let bad = RingFault::BadBase { base, queue_size };
    // Whoever stopped in order had used all it took; what else was in flight is not known here.
    if base as u16 != (base >> 16) as u16 {
        return Err(bad);
    }
    let claimed = Cursor::from_bits(base as u16, queue_size).ok_or(bad.clone())?;
    if base != FRESH_BASE && (0..queue_size).all(|slot| is_zero(ring, slot)) {
        return Err(bad);
    }
    let stale = |slot| RingFault::StaleBase { base, slot };
    if let Some(slot) = used_later(ring, claimed, queue_size) {
        return Err(stale(slot));
    }
    // A ring that was used for whole double laps is back at the position of a new one. Whoever left it in
    // order left its position in the device area too.
    let left_here = position_bits(ring.device_event.load(0, Relaxed)) == claimed.to_bits();
    match used_at_all(ring, queue_size) {
        Some(slot) if base == FRESH_BASE && !left_here => Err(stale(slot)),
        _ => Ok(claimed),
    }
}

/// A slot that a device has used since it was at `claimed`.
fn used_later(ring: &Ring, claimed: Cursor, queue_size: u16) -> Option<u16> {
    let here = |distance: u16| {
        let at = claimed.forward(distance);
        at.is_used(ring.meta(at.slot(), Relaxed).flags()).then_some(at.slot())
    };
    (0..queue_size).find_map(here)
}

/// A slot that shows that the ring is not new. From the end, because a driver may be filling it.
fn used_at_all(ring: &Ring, queue_size: u16) -> Option<u16> {
    let (mut any_above, mut clear) = (false, 0);
    (0..queue_size).rev().find(|&slot| {
        // Acquire: who sees what a driver wrote here sees what it wrote in the slots before.
        let avail_used = ring.meta(slot, Acquire).flags() & (AVAIL | USED);
        any_above |= !is_zero(ring, slot);
        clear += usize::from(any_above && avail_used == 0);
        avail_used & USED != 0 || clear > MOST_BEING_WRITTEN
    })
}

fn is_zero(ring: &Ring, slot: u16) -> bool {
    ring.meta(slot, Relaxed).word() == 0 && ring.addr(slot) == 0
}
