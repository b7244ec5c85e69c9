//! When to notify the other side: the arithmetic of `VIRTIO_F_EVENT_IDX`, for both halves.
//!
//! A side that publishes entries `old..new` has to notify the other side if that side's event index is among
//! them. A side that publishes in batches decides once per batch, for all entries since its last decision.
//!
//! Spec: virtio 1.3 §2.7.7 (used buffers), §2.7.10 (available buffers).

/// `VIRTQ_AVAIL_F_NO_INTERRUPT`, only without `VIRTIO_F_EVENT_IDX` (virtio 1.3 §2.7.6).
pub const AVAIL_NO_INTERRUPT: u16 = 1;

/// `VIRTQ_USED_F_NO_NOTIFY`, only without `VIRTIO_F_EVENT_IDX` (virtio 1.3 §2.7.8).
pub const USED_NO_NOTIFY: u16 = 1;

/// Whether entry `event` is among the entries `old..new` of a 16-bit index that wraps.
#[inline]
#[must_use]
pub fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Entries of a split ring, or descriptors of a packed one, published since the last decision.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Undecided {
    /// Wider than the index, so that the count does not wrap around to 0 if the side never decides.
    entries: u32,
}

impl Undecided {
    #[inline]
    pub fn add(&mut self, entries: u32) {
        self.entries = self.entries.saturating_add(entries);
    }

    #[inline]
    pub fn is_empty(self) -> bool {
        self.entries == 0
    }

    #[inline]
    pub fn entries(self) -> u32 {
        self.entries
    }

    /// Whether `event` is among the entries that end before `new`.
    #[inline]
    pub fn contains(self, event: u16, new: u16) -> bool {
        // Every 16-bit value is among 65,536 entries.
        u16::try_from(self.entries).map_or(true, |entries| need_event(event, new, new.wrapping_sub(entries)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_inside_the_batch_needs_a_notification() {
        assert!(need_event(5, 7, 5));
        assert!(need_event(6, 7, 5));
    }

    #[test]
    fn event_before_or_after_the_batch_needs_none() {
        assert!(!need_event(4, 7, 5));
        assert!(!need_event(7, 7, 5));
    }

    #[test]
    fn batch_across_the_wrap_of_the_index_finds_its_event() {
        assert!(need_event(u16::MAX, 1, u16::MAX - 1));
        assert!(!need_event(1, 1, u16::MAX - 1));
    }

    #[test]
    fn more_entries_than_an_index_can_count_contain_every_event() {
        let mut undecided = Undecided::default();
        undecided.add(u32::from(u16::MAX));
        undecided.add(2);
        assert!(undecided.contains(123, 7));
    }

    #[test]
    fn count_of_nothing_contains_no_event() {
        let undecided = Undecided::default();
        assert!(undecided.is_empty());
        assert!(!undecided.contains(2, 3));
    }
}
