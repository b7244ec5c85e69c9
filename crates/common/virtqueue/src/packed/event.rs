//! Event suppression of packed rings: one word per side shows for which descriptors that side wants events.
//!
//! - A side that wants no events, or all of them, stores its position in the offset field, which the other
//!   side then ignores. `resume.rs` reads the device's position.
//!
//! Spec: virtio 1.3 §2.8.10, §2.8.14.

use super::cursor::Cursor;
use crate::notify::Undecided;

/// `RING_EVENT_FLAGS_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventFlags {
    Enable = 0,
    Disable = 1,
    /// Requests an event when the descriptor at the position is written.
    Desc = 2,
}

/// The word as stored in memory.
#[inline]
pub(super) fn event(flags: EventFlags, position: Cursor) -> u32 {
    u32::from(position.to_bits()) | (flags as u32) << 16
}

/// Slot and wrap counter of an event word.
#[inline]
#[allow(clippy::cast_possible_truncation)] // extracts fields
pub(super) fn position_bits(event: u32) -> u16 {
    event as u16
}

/// The flags of an event word; the reserved bits around them are ignored.
#[inline]
pub(super) fn flags(event: u32) -> u32 {
    event >> 16 & 3
}

/// Whether the side that wrote `event` wants an event for `undecided` descriptors that end before `end`.
///
/// A value that the standard does not allow counts as a request for every event: a superfluous event does no
/// harm.
#[inline]
pub(super) fn is_wanted(
    event: u32,
    undecided: Undecided,
    end: Cursor,
    queue_size: u16,
    by_idx: bool,
) -> bool {
    match flags(event) {
        1 => false,
        2 if by_idx => Cursor::from_bits(position_bits(event), queue_size)
            .is_none_or(|at| end.behind(at) <= undecided.entries()),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether, in a ring of 4 slots, the side that wants an event at `at` gets one for the `count` descriptors
    /// before `end`.
    fn wanted(at: Cursor, count: u32, end: Cursor) -> bool {
        let mut undecided = Undecided::default();
        undecided.add(count);
        is_wanted(event(EventFlags::Desc, at), undecided, end, 4, true)
    }

    fn position(at: u16) -> Cursor {
        Cursor::start(4).forward(at)
    }

    #[test]
    fn event_at_either_end_of_the_batch_is_wanted() {
        assert!(wanted(position(5), 2, position(7)));
        assert!(wanted(position(6), 2, position(7)));
    }

    #[test]
    fn event_before_or_behind_the_batch_is_not_wanted() {
        assert!(!wanted(position(4), 2, position(7)));
        assert!(!wanted(position(7), 2, position(7)));
        assert!(!wanted(position(8), 2, position(7)));
    }

    #[test]
    fn batch_across_the_end_of_the_ring_finds_its_event_on_both_sides() {
        assert!(wanted(position(3), 2, position(5)));
        assert!(wanted(position(4), 2, position(5)));
        assert!(!wanted(position(2), 2, position(5)));
    }

    #[test]
    fn same_slot_one_lap_off_is_another_event() {
        assert!(!wanted(position(2), 1, position(7)));
        assert!(wanted(position(2), 5, position(7)));
    }

    #[test]
    fn two_laps_undecided_contain_every_event() {
        assert!(!wanted(position(7), 7, position(7)));
        assert!(wanted(position(7), 8, position(7)));
        assert!(wanted(position(7), u32::MAX, position(7)));
    }

    #[test]
    fn every_event_none_and_a_position_without_the_feature() {
        let mut undecided = Undecided::default();
        undecided.add(1);
        let far = position(3);
        let is_wanted = |word, by_idx| is_wanted(word, undecided, position(1), 4, by_idx);
        assert!(is_wanted(event(EventFlags::Enable, far), true));
        assert!(!is_wanted(event(EventFlags::Disable, far), true));
        assert!(!is_wanted(event(EventFlags::Desc, far), true));
        assert!(is_wanted(event(EventFlags::Desc, far), false));
    }

    #[test]
    fn reserved_flags_and_a_slot_outside_the_ring_count_as_every_event() {
        let mut undecided = Undecided::default();
        undecided.add(1);
        assert!(is_wanted(3 << 16, undecided, position(1), 4, true));
        assert!(is_wanted(2 << 16 | 4, undecided, position(1), 4, true));
    }
}
