//! Where a packed ring goes on: what a front-end claims, and what the ring says to that.
//!
//! Unlike a split ring's `used.idx`, nothing that the standard puts in memory tells the position: both sides
//! keep theirs in private. A front-end whose back-end is gone says an older one (QEMU: that of a new ring),
//! and requests would run twice. So:
//!
//! 1. Where the last device left the ring with nothing in flight counts, if it said so ([`farewell`]) and nothing
//!    contradicts it. What contradicts is a descriptor that was used later: from that slot on, one that is used in
//!    that lap; before it, one used in the next lap. Or that none was used before it: a new ring in the old one's place.
//! 2. Otherwise, what is claimed, if nothing contradicts that and the last device is not one of ours that died at work
//!    ([`at_work`]). The start of a lap is contradicted by anything not zero (virtio 1.3 §2.8.13) beyond what a driver
//!    has made available, too.
//! 3. Otherwise, a ring in which nothing was ever used starts at its beginning: some front-ends say 0 for it.
//! 4. Otherwise nobody knows.
//!
//! Spec: virtio 1.3 §2.8.1, §2.8.14. Not here: the format of split rings' positions (`split/device.rs`).

use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::cursor::Cursor;
use super::event::{Wish, event, position_bits, wish};
use super::ring::{AVAIL, Ring, USED};
use crate::fault::RingFault;

/// The ring base of a new packed ring: both positions at slot 0, both wrap counters 1 (virtio 1.3 §2.8.1).
pub const FRESH_BASE: u32 = 0x8000_8000;

/// How many descriptors a running driver may just be writing: the first of a chain or batch, whose flags
/// come last, and the one where it is.
const MOST_BEING_WRITTEN: usize = 2;

/// No slot of any ring.
const NOWHERE: u32 = 0x7fff;

/// Bits that no slot has: queue sizes are at most 2^10.
const NO_SLOT: u16 = 0x7c00;
const _: () = assert!(crate::MAX_QUEUE_SIZE <= 1 << 10);

/// Slot and wrap counter of the next descriptor to take, and of the next one to use, as vhost-user tells
/// them.
#[inline]
pub(super) fn base(next_avail: Cursor, next_used: Cursor) -> u32 {
    u32::from(next_avail.to_bits()) | u32::from(next_used.to_bits()) << 16
}

/// What a device that is about to sleep, or to leave, stores as its event word: a wish for kicks, and the position
/// if it can be told from that that nothing is in flight.
///
/// A driver looks at the position only if the wish is [`Wish::At`]; with any other it is ours to use.
#[inline]
pub(super) fn farewell(next_avail: Cursor, is_drained: bool, event_idx: bool) -> u32 {
    match (is_drained, event_idx) {
        (true, _) => event(Wish::Every, next_avail),
        (false, true) => event(Wish::At, next_avail),
        (false, false) => (Wish::Every as u32) << 16 | NOWHERE,
    }
}

/// What a device that needs no kicks stores: drivers ignore the position. It is marked as ours, because a foreign
/// device that polled stopped where its front-end says.
#[inline]
pub(super) fn at_work(next_avail: Cursor) -> u32 {
    event(Wish::None, next_avail) | u32::from(NO_SLOT)
}

/// Where a ring is opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opened {
    pub at: Cursor,
    /// Nothing was ever used in it.
    pub is_new: bool,
}

/// See the file's head.
pub(super) fn open(ring: &Ring, base: u32, queue_size: u16) -> Result<Opened, RingFault> {
    let claimed = claimed(base, queue_size)?;
    let start = Cursor::start(queue_size);
    // Acquire: pairs with the release of a farewell.
    let event = ring.device_event.load(0, Acquire);
    let used_slot = used_at_all(ring, queue_size);
    let said = left_at(event, queue_size);
    let left = said.filter(|&at| contradiction(ring, at, queue_size).is_none());
    // A farewell that is contradicted was said of the ring that lay here before.
    // One that starts nowhere in a full ring may be true, too.
    let said_new = said
        .is_some_and(|at| at.slot() == 0 || !at.wrap_counter() || !is_full_of_first_lap(ring, queue_size));
    let is_new = used_slot.is_none() && (said_new || is_at_work_from(event, start));
    let against = match contradiction(ring, claimed, queue_size) {
        // What is said of a new ring is said again of one whose device died, and the end of a lap looks like it.
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
#[allow(clippy::cast_possible_truncation)] // takes the two halves apart
fn claimed(base: u32, queue_size: u16) -> Result<Cursor, RingFault> {
    let (next_avail, next_used) = (base as u16, (base >> 16) as u16);
    // Whoever stopped in order had used all it took; what else was in flight is not known here. Some front-ends
    // know of the lower half only (DPDK's).
    let is_drained = next_used == next_avail || next_used == 0;
    let claimed = Cursor::from_bits(next_avail, queue_size).filter(|_| is_drained);
    claimed.ok_or(RingFault::BadBase { base, queue_size })
}

/// Whether the last device left no farewell although it was one of ours. What it had in flight may have completed in
/// another order: used descriptors lie over some that are still available, and some that are used seem available.
fn was_at_work(event: u32, claimed: Cursor) -> bool {
    let at = position_bits(event);
    match wish(event) {
        0 => u32::from(at) == NOWHERE,
        1 => at & NO_SLOT == NO_SLOT,
        // Foreign devices store it too, where they stopped.
        2 => at != claimed.to_bits(),
        _ => false,
    }
}

/// Whether a device went to work, or meant to sleep, at `start`.
fn is_at_work_from(event: u32, start: Cursor) -> bool {
    event == at_work(start) || position_bits(event) == start.to_bits()
}

/// The position in a farewell.
fn left_at(event: u32, queue_size: u16) -> Option<Cursor> {
    Cursor::from_bits(position_bits(event), queue_size).filter(|_| wish(event) == Wish::Every as u32)
}

/// A slot that a device has used since it was at `claimed`.
fn contradiction(ring: &Ring, claimed: Cursor, queue_size: u16) -> Option<u16> {
    let has_used = |at: Cursor| at.is_used(ring.meta(at.slot(), Relaxed).flags());
    let later = (0..queue_size).map(|distance| claimed.forward(distance)).find(|&at| has_used(at));
    later.map(Cursor::slot).or_else(|| never_got_there(ring, claimed, queue_size).then_some(0))
}

/// Whether the ring lacks what a device on its way to `claimed` leaves, and drivers only write over in a later lap:
/// what a driver does to a new ring may agree with a position of the ring before.
fn never_got_there(ring: &Ring, claimed: Cursor, queue_size: u16) -> bool {
    let never_used = |mut slots: Range<u16>| !slots.any(|slot| ring.meta(slot, Relaxed).flags() & USED != 0);
    let first_lap = (0..queue_size).any(|slot| is_zero(ring, slot));
    if claimed.wrap_counter() {
        (first_lap || is_full_of_first_lap(ring, queue_size))
            && claimed.slot() != 0
            && never_used(0..claimed.slot())
    } else {
        // The lap before left USED somewhere; only this one clears it, and AVAIL with it.
        first_lap || never_used(0..queue_size) && all_available(ring, claimed.slot())
    }
}

/// Whether a ring that has room for doubt cannot be at `used`: a position that a log has kept of the ring that lay here
/// before. Only what cannot be mistaken counts: a full lap leaves no slot empty, and a part of the first one a mark.
pub(super) fn is_of_a_ring_before(ring: &Ring, used: Cursor, queue_size: u16) -> bool {
    let never_used = |mut slots: Range<u16>| !slots.any(|slot| ring.meta(slot, Relaxed).flags() & USED != 0);
    (0..queue_size).any(|slot| is_zero(ring, slot))
        && (!used.wrap_counter() || used.slot() != 0 && never_used(0..used.slot()))
}

/// Either a new ring that is full, or one where a chain from the last slot on was used, and all behind it is
/// available.
fn is_full_of_first_lap(ring: &Ring, queue_size: u16) -> bool {
    (0..queue_size).all(|slot| ring.meta(slot, Relaxed).flags() & (AVAIL | USED) == AVAIL)
}

fn all_available(ring: &Ring, slots: u16) -> bool {
    (0..slots).all(|slot| ring.meta(slot, Relaxed).flags() & AVAIL != 0)
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
