//! Finds where to resume a packed ring: compares the front-end's claim with the ring's contents.
//!
//! A packed ring has no position in memory (unlike a split ring's `used.idx`): each side keeps its own private.
//! A front-end whose back-end has died may send an older position (QEMU sends a new ring's), and requests would
//! run twice. So:
//!
//! 1. If the last device stored its position when nothing was in flight ([`event_with_kicks`]), that position counts,
//!    unless the ring contradicts it. A descriptor that was used later contradicts it: from that slot on, one
//!    used in the same lap; before that slot, one used in the next lap. It is also contradicted if no descriptor
//!    before it was used: in this case, a new ring has replaced the old one.
//! 2. Otherwise the position that the front-end claims counts, unless the ring contradicts it, or the last device
//!    was this implementation and died while serving ([`event_without_kicks`]). Nonzero contents (virtio 1.3
//!    §2.8.13) beyond the descriptors that a driver has made available also contradict the start of a lap.
//! 3. Otherwise a ring that no device ever used starts at its beginning: some front-ends send 0 for a new ring.
//! 4. Otherwise the position is unknown, and the queue is refused.
//!
//! Spec: virtio 1.3 §2.8.1, §2.8.14.

use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::cursor::Cursor;
use super::event::{EventFlags, event, flags, position_bits};
use super::ring::{AVAIL, Ring, USED};
use crate::fault::RingFault;

/// The ring base of a new packed ring: both positions at slot 0, both wrap counters 1 (virtio 1.3 §2.8.1).
pub const FRESH_BASE: u32 = 0x8000_8000;

/// How many descriptors a running driver may be writing right now: the first of a chain or batch, whose flags
/// are stored last, and the current one.
const MOST_BEING_WRITTEN: usize = 2;

/// A value that is not a slot of any ring.
const NOWHERE: u32 = 0x7fff;

/// Bits that are zero in every slot number: queue sizes are at most 2^10.
const NO_SLOT: u16 = 0x7c00;
const _: () = assert!(crate::MAX_QUEUE_SIZE <= 1 << 10);

/// Slot and wrap counter of the next descriptor to take and of the next used descriptor, in vhost-user's format.
#[inline]
pub(super) fn base(next_avail: Cursor, next_used: Cursor) -> u32 {
    u32::from(next_avail.to_bits()) | u32::from(next_used.to_bits()) << 16
}

/// The event word of a device that is about to wait or to stop: a request for kicks. It includes the position if that
/// lets the next device see that nothing is in flight. A driver reads the position only with [`EventFlags::Desc`]; with
/// any other flags the device may use the field.
#[inline]
pub(super) fn event_with_kicks(next_avail: Cursor, is_drained: bool, event_idx: bool) -> u32 {
    match (is_drained, event_idx) {
        (true, _) => event(EventFlags::Enable, next_avail),
        (false, true) => event(EventFlags::Desc, next_avail),
        (false, false) => (EventFlags::Enable as u32) << 16 | NOWHERE,
    }
}

/// The event word of a device that needs no kicks; drivers ignore its position. The word identifies the device as
/// this implementation: if a foreign device polled, it stopped at the position that its front-end sends.
#[inline]
pub(super) fn event_without_kicks(next_avail: Cursor) -> u32 {
    event(EventFlags::Disable, next_avail) | u32::from(NO_SLOT)
}

/// The position at which a ring is opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opened {
    pub at: Cursor,
    /// No device ever used the ring.
    pub is_new: bool,
}

/// Applies the rules of the module documentation.
pub(super) fn open(ring: &Ring, base: u32, queue_size: u16) -> Result<Opened, RingFault> {
    let claimed = claimed(base, queue_size)?;
    let start = Cursor::start(queue_size);
    // Acquire: pairs with the release in `DeviceQueue::request_kicks`.
    let event = ring.device_event.load(0, Acquire);
    let used_slot = used_at_all(ring, queue_size);
    let stored = left_at(event, queue_size);
    let left = stored.filter(|&at| contradiction(ring, at, queue_size).is_none());
    // A stored position that the ring contradicts belongs to an earlier ring at this address. The exception is a
    // position in the middle of the first lap, which may be that of a full ring.
    let stored_new = stored
        .is_some_and(|at| at.slot() == 0 || !at.wrap_counter() || !is_full_of_first_lap(ring, queue_size));
    let is_new = used_slot.is_none() && (stored_new || is_at_work_from(event, start));
    let against = match contradiction(ring, claimed, queue_size) {
        // After a device died, front-ends send the base of a new ring again, and a ring at the end of a lap does
        // not contradict that base.
        None if (claimed.slot() == 0 || was_at_work(event, claimed)) && !is_new => {
            Some(used_slot.unwrap_or(0))
        }
        against => against,
    };
    let at = left.or(Some(claimed).filter(|_| against.is_none())).or(is_new.then_some(start));
    at.map(|at| Opened { at, is_new: is_new && at == start })
        .ok_or(RingFault::StaleBase { base, slot: against.unwrap_or(0) })
}

/// The position that `base` claims.
#[allow(clippy::cast_possible_truncation)] // splits the value into its halves
fn claimed(base: u32, queue_size: u16) -> Result<Cursor, RingFault> {
    let (next_avail, next_used) = (base as u16, (base >> 16) as u16);
    // A device that stopped in order had used everything it took. If it had not, its requests in flight cannot be
    // found. Some front-ends (DPDK's) keep only the lower half.
    let is_drained = next_used == next_avail || next_used == 0;
    let claimed = Cursor::from_bits(next_avail, queue_size).filter(|_| is_drained);
    claimed.ok_or(RingFault::BadBase { base, queue_size })
}

/// Whether the last device was this implementation and did not stop in order. Its chains may have completed out of
/// order: used descriptors may overwrite some that are still available, and some used chains may look available.
fn was_at_work(event: u32, claimed: Cursor) -> bool {
    let at = position_bits(event);
    match flags(event) {
        0 => u32::from(at) == NOWHERE,
        1 => at & NO_SLOT == NO_SLOT,
        // Foreign devices store these flags too, with the position where they stopped.
        2 => at != claimed.to_bits(),
        _ => false,
    }
}

/// Whether a device started serving, or stored a request for kicks, at `start`.
fn is_at_work_from(event: u32, start: Cursor) -> bool {
    event == event_without_kicks(start) || position_bits(event) == start.to_bits()
}

/// The position that the last device stored when nothing was in flight.
fn left_at(event: u32, queue_size: u16) -> Option<Cursor> {
    Cursor::from_bits(position_bits(event), queue_size).filter(|_| flags(event) == EventFlags::Enable as u32)
}

/// A slot that a device has used since it was at `claimed`, or 0 if it never reached `claimed`.
fn contradiction(ring: &Ring, claimed: Cursor, queue_size: u16) -> Option<u16> {
    let has_used = |at: Cursor| at.is_used(ring.meta(at.slot(), Relaxed).flags());
    let later = (0..queue_size).map(|distance| claimed.forward(distance)).find(|&at| has_used(at));
    later.map(Cursor::slot).or_else(|| never_got_there(ring, claimed, queue_size).then_some(0))
}

/// Whether the ring lacks the traces of a device that has reached `claimed`. Drivers overwrite these traces only in a
/// later lap. Without this check, a new ring that a driver has filled may match a position of the previous ring.
fn never_got_there(ring: &Ring, claimed: Cursor, queue_size: u16) -> bool {
    let never_used = |mut slots: Range<u16>| !slots.any(|slot| ring.meta(slot, Relaxed).flags() & USED != 0);
    let first_lap = (0..queue_size).any(|slot| is_zero(ring, slot));
    if claimed.wrap_counter() {
        (first_lap || is_full_of_first_lap(ring, queue_size))
            && claimed.slot() != 0
            && never_used(0..claimed.slot())
    } else {
        // The previous lap left USED set somewhere; only used descriptors of this lap clear it, and AVAIL with it.
        first_lap || never_used(0..queue_size) && all_available(ring, claimed.slot())
    }
}

/// Whether the ring certainly cannot be at `used`, which a log may have kept from a previous ring at this
/// address. Only conclusive signs count: a full lap leaves no slot empty, and a part of the first lap leaves a
/// USED flag.
pub(super) fn belongs_to_previous_ring(ring: &Ring, used: Cursor, queue_size: u16) -> bool {
    let never_used = |mut slots: Range<u16>| !slots.any(|slot| ring.meta(slot, Relaxed).flags() & USED != 0);
    (0..queue_size).any(|slot| is_zero(ring, slot))
        && (!used.wrap_counter() || used.slot() != 0 && never_used(0..used.slot()))
}

/// Either a full new ring, or one where a chain that began in the last slot was used and all descriptors
/// after it are available.
fn is_full_of_first_lap(ring: &Ring, queue_size: u16) -> bool {
    (0..queue_size).all(|slot| ring.meta(slot, Relaxed).flags() & (AVAIL | USED) == AVAIL)
}

fn all_available(ring: &Ring, slots: u16) -> bool {
    (0..slots).all(|slot| ring.meta(slot, Relaxed).flags() & AVAIL != 0)
}

/// A slot whose contents show that the ring is not new. Searches from the end, because a driver may be filling
/// the ring.
fn used_at_all(ring: &Ring, queue_size: u16) -> Option<u16> {
    let (mut any_above, mut clear) = (false, 0);
    (0..queue_size).rev().find(|&slot| {
        // Acquire: after reading a driver's store here, this thread also sees the driver's stores to the
        // slots before it.
        let avail_used = ring.meta(slot, Acquire).flags() & (AVAIL | USED);
        any_above |= !is_zero(ring, slot);
        clear += usize::from(any_above && avail_used == 0);
        avail_used & USED != 0 || clear > MOST_BEING_WRITTEN
    })
}

fn is_zero(ring: &Ring, slot: u16) -> bool {
    ring.meta(slot, Relaxed).word() == 0 && ring.addr(slot) == 0
}
