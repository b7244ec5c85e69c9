//! The write-cache mode of a disk's guest: what it starts with, what it chose, and for how long that counts.
//!
//! A disk starts with what its `--cache` says; each driver that attaches starts there again, unless the guest's
//! choice was writethrough: that one is remembered longer than a session. A guest that switches the cache off (`VIRTIO_BLK_F_CONFIG_WCE`, writeback = 0) stops sending flushes
//! and counts on each write being durable. The front-end keeps that choice and never repeats it: not
//! after a guest's reboot, not after it reconnected. So it is kept here until the guest chooses again.
//!
//! A ring that another server ran before this process came from a guest whose choice nobody can tell
//! us: it is taken for the careful one (docs/decisions/0011).
//!
//! Spec: virtio 1.3 §5.2.5, §5.2.6.2. Not here: what durable means for an operation (`io_engine`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use virtio_blk::{Negotiated, WriteCache, initial_write_cache};

/// Who decides about a disk's write-cache mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wce {
    /// The guest may change what the disk starts with (`VIRTIO_BLK_F_CONFIG_WCE`).
    #[default]
    Guest,
    /// It stays what the disk starts with.
    Fixed,
}

/// No session has started rings yet; sessions count from 1.
const NONE: u64 = 0;

/// One disk's. Written by session threads, which change it only while they hold the disk's rings or are
/// told by the guest; each value stands for itself, so nothing is ordered by it.
#[derive(Debug)]
pub(crate) struct GuestChoice {
    /// What the disk starts with.
    start: WriteCache,
    /// The guest's choice, if it was this one.
    writethrough: AtomicBool,
    /// The guest has chosen since this process serves the disk.
    told: AtomicBool,
    /// The session that first started rings in this process.
    first_session: AtomicU64,
}

impl GuestChoice {
    /// Of a disk that starts with `start`.
    pub(crate) fn new(start: WriteCache) -> Self {
        let (writethrough, told) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { start, writethrough, told, first_session: AtomicU64::new(NONE) }
    }

    /// The mode shown to a front-end before a driver has accepted features.
    pub(crate) fn mode_at_first(&self) -> WriteCache {
        if self.writethrough.load(Relaxed) { WriteCache::Writethrough } else { self.start }
    }

    /// The mode in which a driver that accepted these features starts.
    pub(crate) fn mode_for(&self, negotiated: Negotiated) -> WriteCache {
        initial_write_cache(self.mode_at_first(), negotiated)
    }

    /// The guest wrote the configuration space's `writeback`.
    pub(crate) fn set(&self, cache: WriteCache) {
        self.told.store(true, Relaxed);
        self.writethrough.store(cache == WriteCache::Writethrough, Relaxed);
    }

    /// What another process has to be told to go on: whether the choice is writethrough, and whether it was a choice.
    pub(crate) fn reading(&self) -> (bool, bool) {
        (self.writethrough.load(Relaxed), self.told.load(Relaxed))
    }

    /// As another process had it.
    pub(crate) fn restore(&self, (writethrough, told): (bool, bool)) {
        self.writethrough.store(writethrough, Relaxed);
        self.told.store(told, Relaxed);
    }

    pub(crate) fn rings_started_by(&self, session: u64) {
        let _ = self.first_session.compare_exchange(NONE, session, Relaxed, Relaxed);
    }

    /// Whether a ring that `session` finds in use may belong to a guest that chose before this process.
    pub(crate) fn may_predate(&self, session: u64) -> bool {
        let chose = self.told.load(Relaxed) || self.writethrough.load(Relaxed);
        !chose && self.first_session.load(Relaxed) == session
    }

    /// Takes the guest for one that switched its cache off. Returns whether that is news.
    pub(crate) fn assume_writethrough(&self) -> bool {
        self.writethrough.store(true, Relaxed);
        self.start == WriteCache::Writeback
    }
}

#[cfg(test)]
mod tests {
    use virtio_blk::features::{CONFIG_WCE, FLUSH, VERSION_1};

    use super::*;

    fn usual_driver() -> Negotiated {
        let features = FLUSH | CONFIG_WCE | VERSION_1;
        Negotiated::accept(features, features).expect("offered")
    }

    fn choice() -> GuestChoice {
        GuestChoice::new(WriteCache::Writeback)
    }

    #[test]
    fn driver_that_never_chose_starts_with_its_features_mode() {
        assert_eq!(choice().mode_for(usual_driver()), WriteCache::Writeback);
    }

    #[test]
    fn writeback_chosen_on_a_disk_that_starts_writethrough_is_forgotten_with_the_driver() {
        let choice = GuestChoice::new(WriteCache::Writethrough);
        choice.set(WriteCache::Writeback);
        assert_eq!(choice.mode_at_first(), WriteCache::Writethrough);
        assert_eq!(choice.mode_for(usual_driver()), WriteCache::Writethrough);
    }

    #[test]
    fn choice_outlives_the_driver_until_it_chooses_again() {
        let choice = choice();
        choice.set(WriteCache::Writethrough);
        assert_eq!(choice.mode_at_first(), WriteCache::Writethrough);
        assert_eq!(choice.mode_for(usual_driver()), WriteCache::Writethrough);
        choice.set(WriteCache::Writeback);
        assert_eq!(choice.mode_for(usual_driver()), WriteCache::Writeback);
    }

    #[test]
    fn only_the_first_session_may_meet_a_guest_from_before() {
        let choice = choice();
        choice.rings_started_by(4);
        choice.rings_started_by(5);
        assert!(choice.may_predate(4) && !choice.may_predate(5));
        choice.set(WriteCache::Writeback);
        assert!(!choice.may_predate(4));
    }
}
