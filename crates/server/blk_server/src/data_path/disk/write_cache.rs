//! The write-cache mode of a disk's guest: what it starts with, what it chose, and for how long that counts.
//!
//! A disk starts with what its `--cache` says; each driver that attaches starts there again, unless the guest's
//! choice was writethrough: that one is remembered longer than a session. A guest that switches the cache off
//! (`VIRTIO_BLK_F_CONFIG_WCE`, writeback = 0) stops sending flushes and counts on each write being durable. The
//! front-end keeps that choice and never repeats it: not after a guest's reboot, not after it reconnected. So it is
//! kept here until the guest chooses again.
//!
//! A ring in use that this process has not opened before belongs to a guest that may have chosen elsewhere: before this
//! process, or on another host. It is taken for the careful one (docs/decisions/0011). What counts is a ring that was
//! opened, not one that somebody tried to start. The front-end's stop (GET_VRING_BASE) ends what is known of it, but for
//! its own session and for one that was connected then and goes on exactly there: a migration from one VMM to another
//! behind this server.
//!
//! Spec: virtio 1.3 §5.2.5, §5.2.6.2. Not here: what durable means for an operation (`io_engine`).

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

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

/// The file behind a guest's memory: that of one VMM, for as long as the guest lives there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryFile {
    device: u64,
    inode: u64,
}

impl MemoryFile {
    /// `None`: the kernel does not say.
    #[allow(clippy::unnecessary_cast)] // other widths on other machines
    pub(crate) fn of(fd: impl AsFd) -> Option<Self> {
        let stat = rustix::fs::fstat(fd).ok()?;
        Some(Self { device: stat.st_dev as u64, inode: stat.st_ino as u64 })
    }
}

/// A ring, as a session shows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown {
    pub(crate) queue: usize,
    pub(crate) session: u64,
    pub(crate) memory: Option<MemoryFile>,
    /// As the front-end sent it.
    pub(crate) base: u32,
}

/// What is known of a queue's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Nothing,
    /// It was opened in this memory.
    Opened(MemoryFile),
    /// Its front-end stopped it at this position, with this session the last to have connected.
    Left {
        position: u32,
        newest_session: u64,
    },
}

/// One disk's. Written by session threads, which change it only while they hold the disk's rings or are
/// told by the guest; each value stands for itself, so nothing is ordered by it.
#[derive(Debug)]
pub(crate) struct GuestChoice {
    /// What the disk starts with.
    start: WriteCache,
    /// The guest's choice, if it was this one.
    writethrough: AtomicBool,
    /// By queue: which ring this process may meet again without having missed a choice.
    known: Mutex<Box<[Known]>>,
    newest_session: AtomicU64,
}

impl GuestChoice {
    /// Of a disk that starts with `start`.
    pub(crate) fn new(start: WriteCache, queues: u16) -> Self {
        let known = Mutex::new(vec![Known::Nothing; usize::from(queues)].into());
        Self { start, writethrough: AtomicBool::new(false), known, newest_session: AtomicU64::new(0) }
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
        self.writethrough.store(cache == WriteCache::Writethrough, Relaxed);
    }

    /// What another process has to be told to go on: whether the choice is writethrough.
    pub(crate) fn is_writethrough(&self) -> bool {
        self.writethrough.load(Relaxed)
    }

    /// As another process had it.
    pub(crate) fn restore(&self, writethrough: bool) {
        self.writethrough.store(writethrough, Relaxed);
    }

    /// A front-end has connected; sessions count upwards.
    pub(crate) fn session_begins(&self, session: u64) {
        self.newest_session.fetch_max(session, Relaxed);
    }

    /// The queue's ring runs, in this memory.
    pub(crate) fn ring_opened(&self, queue: usize, memory: Option<MemoryFile>) {
        self.note(queue, memory.map_or(Known::Nothing, Known::Opened));
    }

    /// The front-end stopped the queue at this position: the guest may go elsewhere, choose there, and come back.
    pub(crate) fn ring_left(&self, queue: usize, position: u32) {
        self.note(queue, Known::Left { position, newest_session: self.newest_session.load(Relaxed) });
    }

    /// The device was reset: the next ring is another one.
    pub(crate) fn ring_forgotten(&self, queue: usize) {
        self.note(queue, Known::Nothing);
    }

    fn note(&self, queue: usize, what: Known) {
        if let Some(known) = self.known().get_mut(queue) {
            *known = what;
        }
    }

    /// Whether the guest of this ring cannot have chosen since this process served it.
    pub(crate) fn knows(&self, ring: &Shown) -> bool {
        match self.known().get(ring.queue) {
            Some(Known::Opened(memory)) => ring.memory == Some(*memory),
            // One that connects later may bring a guest that was elsewhere in between.
            Some(Known::Left { position, newest_session }) => {
                ring.session <= *newest_session && ring.base == *position
            }
            Some(Known::Nothing) | None => false,
        }
    }

    fn known(&self) -> MutexGuard<'_, Box<[Known]>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the guest for one that switched its cache off. Returns whether that is news.
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

    fn shown(queue: usize, session: u64, inode: u64, base: u32) -> Shown {
        Shown { queue, session, memory: Some(MemoryFile { device: 0, inode }), base }
    }

    #[test]
    fn opened_ring_is_known_in_its_memory_to_all_sessions() {
        let choice = choice();
        choice.ring_opened(1, shown(1, 1, 7, 0).memory);
        assert!(choice.knows(&shown(1, 9, 7, 3)));
        let others = [shown(0, 1, 7, 0), shown(1, 1, 8, 0), shown(2, 1, 7, 0)];
        assert!(!others.iter().any(|ring| choice.knows(ring)));
        assert!(!choice.knows(&Shown { memory: None, ..shown(1, 9, 7, 3) }));
        choice.ring_forgotten(1);
        assert!(!choice.knows(&shown(1, 9, 7, 3)));
    }

    #[test]
    fn ring_that_was_left_is_known_to_sessions_of_that_time_that_go_on_where_it_stopped() {
        let choice = choice();
        choice.session_begins(4);
        choice.session_begins(5);
        choice.ring_opened(0, shown(0, 4, 7, 0).memory);
        choice.ring_left(0, 17);
        choice.session_begins(6);
        assert!(choice.knows(&shown(0, 5, 8, 17)));
        assert!(!choice.knows(&shown(0, 5, 7, 16)) && !choice.knows(&shown(0, 6, 7, 17)));
    }
}
