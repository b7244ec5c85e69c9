//! A position in a packed ring: slot and wrap counter in one value.
//!
//! A free-running 32-bit counter counts descriptors. Its low bits are the slot. The bit above them flips once
//! per lap; the wrap counter, which starts at 1 (virtio 1.3 §2.8.1), is its inverse. Queue sizes are powers
//! of two up to 2^10, so 2^32 descriptors are a whole number of double laps.

use super::ring::{AVAIL, USED};

/// Bit of the wrap counter in a 16-bit position (virtio 1.3 §2.8.14).
const WRAP_BIT: u16 = 1 << 15;

/// The next position of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cursor {
    at: u32,
    queue_size: u32,
}

impl Cursor {
    /// Slot 0 of the first lap.
    pub fn start(queue_size: u16) -> Self {
        Self { at: 0, queue_size: u32::from(queue_size) }
    }

    /// The position with this slot (bits 0–14) and wrap counter (bit 15), if the ring has that slot.
    #[inline]
    pub fn from_bits(bits: u16, queue_size: u16) -> Option<Self> {
        let (slot, lap) = (bits & !WRAP_BIT, if bits & WRAP_BIT == 0 { queue_size } else { 0 });
        (slot < queue_size).then_some(Self { at: u32::from(slot | lap), queue_size: u32::from(queue_size) })
    }

    /// Slot (bits 0–14) and wrap counter (bit 15).
    #[inline]
    pub fn to_bits(self) -> u16 {
        self.slot() | if self.wrap_counter() { WRAP_BIT } else { 0 }
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // queue sizes are 16-bit numbers
    pub fn slot(self) -> u16 {
        (self.at & (self.queue_size - 1)) as u16
    }

    #[inline]
    pub fn wrap_counter(self) -> bool {
        self.at & self.queue_size == 0
    }

    #[inline]
    #[must_use]
    pub fn forward(self, descriptors: u16) -> Self {
        Self { at: self.at.wrapping_add(u32::from(descriptors)), ..self }
    }

    #[inline]
    #[must_use]
    pub fn back(self, descriptors: u16) -> Self {
        Self { at: self.at.wrapping_sub(u32::from(descriptors)), ..self }
    }

    /// Number of descriptors from `earlier` to this position.
    #[inline]
    pub fn since(self, earlier: Self) -> u32 {
        self.at.wrapping_sub(earlier.at)
    }

    /// Number of descriptors from `event` to this position. Positions repeat every two laps, so the result is
    /// between 1 and twice the queue size.
    #[inline]
    pub fn behind(self, event: Self) -> u32 {
        let two_laps = 2 * self.queue_size;
        (self.at.wrapping_sub(event.at).wrapping_sub(1) & (two_laps - 1)) + 1
    }

    /// Flags with which a driver makes a descriptor available at this position (virtio 1.3 §2.8.1).
    #[inline]
    pub fn avail_flags(self) -> u16 {
        if self.wrap_counter() { AVAIL } else { USED }
    }

    /// Flags with which a device marks a descriptor as used at this position (virtio 1.3 §2.8.1).
    #[inline]
    pub fn used_flags(self) -> u16 {
        if self.wrap_counter() { AVAIL | USED } else { 0 }
    }

    #[inline]
    pub fn is_available(self, flags: u16) -> bool {
        flags & (AVAIL | USED) == self.avail_flags()
    }

    #[inline]
    pub fn is_used(self, flags: u16) -> bool {
        flags & (AVAIL | USED) == self.used_flags()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_position_is_slot_0_with_the_wrap_counter_set() {
        let start = Cursor::start(4);
        assert_eq!((start.slot(), start.wrap_counter(), start.to_bits()), (0, true, 0x8000));
        assert_eq!((start.avail_flags(), start.used_flags()), (AVAIL, AVAIL | USED));
    }

    #[test]
    fn wrap_counter_toggles_behind_the_last_slot_and_back_a_lap_later() {
        let second_lap = Cursor::start(4).forward(3).forward(1);
        assert_eq!((second_lap.slot(), second_lap.wrap_counter(), second_lap.to_bits()), (0, false, 0));
        assert_eq!((second_lap.avail_flags(), second_lap.used_flags()), (USED, 0));
        assert_eq!(second_lap.forward(5).to_bits(), 0x8001);
        assert_eq!(second_lap.back(1).to_bits(), 0x8003);
    }

    #[test]
    fn position_survives_the_way_through_its_bits_up_to_whole_double_laps() {
        let far = Cursor::start(1024).back(1);
        let read_back = Cursor::from_bits(far.to_bits(), 1024).unwrap();
        assert_eq!((read_back.slot(), read_back.wrap_counter()), (1023, false));
        assert_eq!(far.forward(1).to_bits(), 0x8000);
    }

    #[test]
    fn slot_outside_the_ring_is_no_position() {
        assert_eq!(Cursor::from_bits(0x8004, 4), None);
        assert_eq!(Cursor::from_bits(0x7fff, 1024), None);
    }
}
