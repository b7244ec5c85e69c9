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
//! opened, not one that somebody tried to start; and the front-end's stop (GET_VRING_BASE) ends what is known of it for
//! all sessions but its own.
//!
//! Spec: virtio 1.3 §5.2.5, §5.2.6.2. Not here: what durable means for an operation (`io_engine`).

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
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

/// One disk's. Written by session threads, which change it only while they hold the disk's rings or are
/// told by the guest; each value stands for itself, so nothing is ordered by it.
#[derive(Debug)]
pub(crate) struct GuestChoice {
    /// What the disk starts with.
    start: WriteCache,
    /// The guest's choice, if it was this one.
    writethrough: AtomicBool,
    /// By queue: whose ring this process opened last, and may meet again without having missed a choice.
    opened: Mutex<Box<[Option<MemoryFile>]>>,
}

impl GuestChoice {
    /// Of a disk that starts with `start`.
    pub(crate) fn new(start: WriteCache, queues: u16) -> Self {
        let opened = Mutex::new(vec![None; usize::from(queues)].into());
        Self { start, writethrough: AtomicBool::new(false), opened }
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

    /// The queue's ring runs, in this memory.
    pub(crate) fn ring_opened(&self, queue: usize, memory: Option<MemoryFile>) {
        self.note(queue, memory);
    }

    /// The front-end stopped the queue: the guest may go elsewhere, choose there, and come back.
    pub(crate) fn ring_left(&self, queue: usize) {
        self.note(queue, None);
    }

    fn note(&self, queue: usize, memory: Option<MemoryFile>) {
        if let Some(opened) = self.opened().get_mut(queue) {
            *opened = memory;
        }
    }

    /// Whether the ring of this queue, in this memory, was opened here and not left since.
    pub(crate) fn has_opened(&self, queue: usize, memory: Option<MemoryFile>) -> bool {
        memory.is_some() && self.opened().get(queue).is_some_and(|&opened| opened == memory)
    }

    fn opened(&self) -> MutexGuard<'_, Box<[Option<MemoryFile>]>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
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

    #[test]
    fn ring_is_known_where_it_was_opened_until_it_is_left() {
        let (choice, file) = (choice(), std::fs::File::open("/").unwrap());
        let (here, elsewhere) = (MemoryFile::of(&file), Some(MemoryFile { device: 0, inode: 0 }));
        choice.ring_opened(1, here);
        let known = [(0, here), (1, here), (1, elsewhere), (1, None), (2, here)];
        assert_eq!(
            known.map(|(queue, memory)| choice.has_opened(queue, memory)),
            [false, true, false, false, false]
        );
        choice.ring_left(1);
        assert!(!choice.has_opened(1, here));
    }
}
