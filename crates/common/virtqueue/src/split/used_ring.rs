//! Device side of the used ring: passes completions, and the request for kicks, to the driver.
//!
//! `push → publish (used.idx) → owner calls needs_notification`
//!
//! - The device keeps its own `next_used`: it writes the index to the ring and never reads it back, because
//!   the driver is untrusted.
//! - `used.idx` moves once per batch, after the batch's entries are stored (Release).
//!
//! Spec: virtio 1.3 §2.7.8, §2.7.10.

use std::sync::atomic::Ordering::{Relaxed, Release};

use guest_mem::SharedSlice;

use super::layout::{FLAGS, IDX};
use crate::notify::{USED_NO_NOTIFY, Undecided};

#[derive(Debug)]
pub(super) struct UsedRing {
    pub words: SharedSlice<u16>,
    pub entries: SharedSlice<u32>,
    /// `queue_size - 1`.
    mask: u16,
    /// Index of the next used entry.
    next_used: u16,
    /// `used.idx` as the driver sees it.
    published: u16,
    undecided: Undecided,
}

impl UsedRing {
    /// Resumes at the position that the last device left in the ring.
    pub fn resume(words: SharedSlice<u16>, entries: SharedSlice<u32>, queue_size: u16) -> Self {
        let used_idx = words.load(IDX, Relaxed);
        let undecided = Undecided::default();
        Self { words, entries, mask: queue_size - 1, next_used: used_idx, published: used_idx, undecided }
    }

    #[inline]
    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    #[inline]
    pub fn push(&mut self, tag: u16, written_bytes: u32) {
        let slot = 2 * usize::from(self.next_used & self.mask);
        self.entries.store_pair(slot, [u32::from(tag), written_bytes], Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Whether [`UsedRing::publish`] has anything to publish.
    #[inline]
    pub fn has_pushed(&self) -> bool {
        self.next_used != self.published
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        let pushed = self.next_used.wrapping_sub(self.published);
        if pushed == 0 {
            return false;
        }
        // Release: pairs with the driver's acquire of `used.idx`; entries, status and data become visible
        // first.
        self.words.store(IDX, self.next_used, Release);
        self.published = self.next_used;
        self.undecided.add(u32::from(pushed));
        true
    }

    /// Returns the entries published since the last call, and resets the count.
    #[inline]
    pub fn take_undecided(&mut self) -> (Undecided, u16) {
        (std::mem::take(&mut self.undecided), self.published)
    }

    /// Tells a driver without `VIRTIO_F_EVENT_IDX` whether kicks are wanted.
    #[inline]
    pub fn set_kicks_wanted(&self, wanted: bool) {
        self.words.store(FLAGS, if wanted { 0 } else { USED_NO_NOTIFY }, Relaxed);
    }
}
