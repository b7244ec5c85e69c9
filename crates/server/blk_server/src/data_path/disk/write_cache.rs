//! The write-cache mode of a disk's guest: the initial mode, the guest's choice, and how long the choice is valid.
//!
//! A disk starts in the mode of its `--cache`, and so does each driver that attaches. A choice of writethrough outlives
//! the session: a guest that disables the cache (`VIRTIO_BLK_F_CONFIG_WCE`, writeback = 0) sends no more flushes and
//! relies on durable writes. The front-end does not repeat the choice after a reboot or a reconnection, so the disk
//! keeps it until the guest chooses again.
//!
//! The guest of a ring that is already in use may have made its choice unseen by this process: before the process
//! started, or on another host. For a ring that this process has not opened, it therefore assumes writethrough
//! (docs/decisions/0011). A stop by the front-end (GET_VRING_BASE) makes the ring unknown again, unless a session that
//! was already connected continues at the same position: that front-end's own session, or another one of this server to
//! which the guest migrates.
//!
//! Spec: virtio 1.3 §5.2.5, §5.2.6.2.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use virtio_blk::{Negotiated, WriteCache, initial_write_cache};

/// Whether the guest may choose the write-cache mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wce {
    /// The guest may change the initial mode (`VIRTIO_BLK_F_CONFIG_WCE`).
    #[default]
    Guest,
    /// The initial mode is final.
    Fixed,
}

/// The file of a guest's memory, which identifies the VMM in which the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryFile {
    device: u64,
    inode: u64,
}

impl MemoryFile {
    /// Returns `None` if fstat fails.
    #[allow(clippy::unnecessary_cast)] // other widths on other machines
    pub(crate) fn of(fd: impl AsFd) -> Option<Self> {
        let stat = rustix::fs::fstat(fd).ok()?;
        Some(Self { device: stat.st_dev as u64, inode: stat.st_ino as u64 })
    }
}

/// A ring that a session is about to start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartingRing {
    pub(crate) queue: usize,
    pub(crate) session: u64,
    pub(crate) memory: Option<MemoryFile>,
    pub(crate) base: u32,
}

/// What this process knows about a queue's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Nothing,
    /// This process opened the ring in this memory.
    Opened(MemoryFile),
    /// The front-end stopped the ring at this position. `newest_session` was the latest session that had connected by
    /// then.
    Left {
        position: u32,
        newest_session: u64,
    },
}

/// The mode of one disk's guest. Only session threads write it, while they hold the disk's rings or because the guest
/// requested it. No other data depends on its values.
#[derive(Debug)]
pub(crate) struct GuestChoice {
    /// The initial mode of the disk.
    start: WriteCache,
    /// Whether the guest chose writethrough.
    writethrough: AtomicBool,
    queues: usize,
    /// For each queue: whether this process may have missed a choice of the ring's guest. The list ends with the last
    /// queue whose ring was ever known, so that an idle disk needs little memory.
    known: Mutex<Vec<Known>>,
    newest_session: AtomicU64,
}

impl GuestChoice {
    pub(crate) fn new(start: WriteCache, queues: u16) -> Self {
        Self {
            start,
            writethrough: AtomicBool::new(false),
            queues: queues.into(),
            known: Mutex::default(),
            newest_session: AtomicU64::new(0),
        }
    }

    /// The mode before a driver has accepted features.
    pub(crate) fn mode_at_first(&self) -> WriteCache {
        if self.writethrough.load(Relaxed) { WriteCache::Writethrough } else { self.start }
    }

    /// The initial mode of a driver that accepted these features.
    pub(crate) fn mode_for(&self, negotiated: Negotiated) -> WriteCache {
        initial_write_cache(self.mode_at_first(), negotiated)
    }

    /// Applies the guest's write of the configuration space's `writeback`.
    pub(crate) fn set(&self, cache: WriteCache) {
        self.writethrough.store(cache == WriteCache::Writethrough, Relaxed);
    }

    /// Whether the guest chose writethrough, to hand over to the next process.
    pub(crate) fn is_writethrough(&self) -> bool {
        self.writethrough.load(Relaxed)
    }

    /// Restores the choice that the previous process had recorded.
    pub(crate) fn restore(&self, writethrough: bool) {
        self.writethrough.store(writethrough, Relaxed);
    }

    /// Records that a front-end has connected. Session numbers increase.
    pub(crate) fn session_begins(&self, session: u64) {
        self.newest_session.fetch_max(session, Relaxed);
    }

    /// Records that the queue's ring runs in this memory.
    pub(crate) fn ring_opened(&self, queue: usize, memory: Option<MemoryFile>) {
        self.note(queue, memory.map_or(Known::Nothing, Known::Opened));
    }

    /// Records that the front-end stopped the queue at this position. The guest may then choose a mode on another
    /// server, and return.
    pub(crate) fn ring_left(&self, queue: usize, position: u32) {
        self.note(queue, Known::Left { position, newest_session: self.newest_session.load(Relaxed) });
    }

    /// Records that the device was reset. The next ring is a different one.
    pub(crate) fn ring_forgotten(&self, queue: usize) {
        self.note(queue, Known::Nothing);
    }

    fn note(&self, queue: usize, what: Known) {
        let mut known = self.known();
        if queue >= known.len() && queue < self.queues && what != Known::Nothing {
            known.resize(queue + 1, Known::Nothing);
        }
        if let Some(known) = known.get_mut(queue) {
            *known = what;
        }
    }

    /// Whether this process has seen every choice of the ring's guest.
    pub(crate) fn has_seen_all_choices(&self, ring: &StartingRing) -> bool {
        match self.known().get(ring.queue) {
            Some(Known::Opened(memory)) => ring.memory == Some(*memory),
            // A later session may belong to a guest that ran on another server in the meantime.
            Some(Known::Left { position, newest_session }) => {
                ring.session <= *newest_session && ring.base == *position
            }
            Some(Known::Nothing) | None => false,
        }
    }

    fn known(&self) -> MutexGuard<'_, Vec<Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Assumes that the guest disabled its cache. Returns whether this changes the mode.
    pub(crate) fn assume_writethrough(&self) -> bool {
        !self.writethrough.swap(true, Relaxed) && self.start == WriteCache::Writeback
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
        GuestChoice::new(WriteCache::Writeback, 2)
    }

    #[test]
    fn driver_that_never_chose_starts_with_its_features_mode() {
        assert_eq!(choice().mode_for(usual_driver()), WriteCache::Writeback);
    }

    #[test]
    fn writeback_chosen_on_a_disk_that_starts_writethrough_is_forgotten_with_the_driver() {
        let choice = GuestChoice::new(WriteCache::Writethrough, 2);
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

    fn starting_ring(queue: usize, session: u64, inode: u64, base: u32) -> StartingRing {
        StartingRing { queue, session, memory: Some(MemoryFile { device: 0, inode }), base }
    }

    #[test]
    fn opened_ring_is_known_in_its_memory_to_all_sessions() {
        let choice = choice();
        choice.ring_opened(1, starting_ring(1, 1, 7, 0).memory);
        assert!(choice.has_seen_all_choices(&starting_ring(1, 9, 7, 3)));
        let others = [starting_ring(0, 1, 7, 0), starting_ring(1, 1, 8, 0), starting_ring(2, 1, 7, 0)];
        assert!(!others.iter().any(|ring| choice.has_seen_all_choices(ring)));
        assert!(!choice.has_seen_all_choices(&StartingRing { memory: None, ..starting_ring(1, 9, 7, 3) }));
        choice.ring_forgotten(1);
        assert!(!choice.has_seen_all_choices(&starting_ring(1, 9, 7, 3)));
    }

    #[test]
    fn ring_of_a_queue_that_the_disk_does_not_have_stays_unknown() {
        let choice = choice();
        choice.ring_opened(2, starting_ring(2, 1, 7, 0).memory);
        assert!(!choice.has_seen_all_choices(&starting_ring(2, 1, 7, 0)));
    }

    #[test]
    fn ring_that_was_left_is_known_to_sessions_of_that_time_that_go_on_where_it_stopped() {
        let choice = choice();
        choice.session_begins(4);
        choice.session_begins(5);
        choice.ring_opened(0, starting_ring(0, 4, 7, 0).memory);
        choice.ring_left(0, 17);
        choice.session_begins(6);
        assert!(choice.has_seen_all_choices(&starting_ring(0, 5, 8, 17)));
        assert!(
            !choice.has_seen_all_choices(&starting_ring(0, 5, 7, 16))
                && !choice.has_seen_all_choices(&starting_ring(0, 6, 7, 17))
        );
    }
}
