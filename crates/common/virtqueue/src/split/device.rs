//! Device half of a split virtqueue: takes available chains and returns them as used.
//!
//! `enable_kicks … pop → (owner) → push_used → publish → needs_notification`
//!
//! - `avail.idx` is read again only when all chains up to its last value have been taken.
//! - Indices are 16-bit and wrap; the queue size is a power of two, so `index & mask` is the slot.
//! - The owner knows which heads are in flight: it keeps a slot for each (`blk_server`).
//!
//! Spec: virtio 1.3 §2.7.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::fence;

use guest_mem::{GuestMemory, MemoryView, SharedSlice};

use super::layout::{AVAIL_ENTRIES, FLAGS, IDX, Parts};
use super::log::SplitLog;
use super::used_ring::UsedRing;
use crate::RingFeatures;
use crate::chain::{At, Chain, Descriptor, INDIRECT, Stopped, Walk};
use crate::fault::{ChainFault, IndirectFault, PopError, RingFault};
use crate::layout::RingLayout;
use crate::log::{LogArea, Recovery};
use crate::notify::AVAIL_NO_INTERRUPT;
use crate::step::may_die_here;
use crate::tables::{Table, Tables, check_indirect};

/// One queue as a device sees it.
#[derive(Debug)]
pub struct DeviceQueue {
    layout: RingLayout,
    features: RingFeatures,
    tables: Tables,
    descriptors: SharedSlice<u64>,
    avail: SharedSlice<u16>,
    used: UsedRing,
    /// `queue_size - 1`.
    mask: u16,
    /// Maximum number of descriptors in a chain that uses an indirect table.
    indirect_limit: u16,
    /// The next entry of the available ring to take.
    next_avail: u16,
    /// `avail.idx` when it was last read.
    avail_idx: u16,
    /// `used.idx` was 0 when the ring was mapped.
    was_fresh: bool,
    /// `NO_NOTIFY` is set (only without `VIRTIO_F_EVENT_IDX`).
    kicks_disabled: bool,
    log: Option<Box<SplitLog>>,
    /// Chains that the previous device had in flight; `None` once all are popped.
    redo: Option<Box<RedoList>>,
    recovery: Recovery,
}

/// Heads in the order in which they were taken, and the index of the next one to pop.
#[derive(Debug)]
struct RedoList {
    heads: Vec<u16>,
    at: usize,
}

impl DeviceQueue {
    /// Maps the ring and resumes at the position that the ring holds.
    ///
    /// `used.idx` is read once from the ring. A front-end's record of the position can be stale after a
    /// crash, and a device that stopped in good order had completed everything it took. A new ring starts at
    /// 0.
    ///
    /// # Errors
    /// [`RingFault::BadQueueSize`], [`RingFault::Part`].
    pub fn new(view: &MemoryView, layout: RingLayout, features: RingFeatures) -> Result<Self, RingFault> {
        let Parts { descriptors, avail, used, used_entries } = layout.map(view.memory(), features)?;
        let used = UsedRing::resume(used, used_entries, layout.queue_size);
        let position = used.next_used();
        Ok(Self {
            layout,
            features,
            tables: Tables::new(view.clone()),
            descriptors,
            avail,
            used,
            mask: layout.queue_size - 1,
            indirect_limit: layout.queue_size,
            next_avail: position,
            avail_idx: position,
            was_fresh: position == 0,
            kicks_disabled: false,
            log: None,
            redo: None,
            recovery: Recovery::default(),
        })
    }

    /// Like [`DeviceQueue::new`], with a log: see [`crate::DeviceQueue::with_log`].
    ///
    /// # Errors
    /// Those of [`DeviceQueue::new`], and [`RingFault::Log`].
    pub fn with_log(
        view: &MemoryView,
        layout: RingLayout,
        features: RingFeatures,
        area: &LogArea,
    ) -> Result<Self, RingFault> {
        let mut queue = Self::new(view, layout, features)?;
        let opened = SplitLog::open(area, layout.queue_size, queue.next_avail)?;
        #[allow(clippy::cast_possible_truncation)] // at most the queue size
        let redone = opened.redo.len() as u16;
        // The redone chains preceded the entries that are still in the available ring.
        queue.next_avail = queue.next_avail.wrapping_add(redone);
        queue.avail_idx = queue.next_avail;
        queue.log = Some(opened.log.into());
        queue.redo = (redone != 0).then(|| RedoList { heads: opened.redo, at: 0 }.into());
        queue.recovery = Recovery { redone, was_foreign: opened.was_foreign };
        Ok(queue)
    }

    /// The result of reading the log.
    #[must_use]
    pub fn recovery(&self) -> Recovery {
        self.recovery
    }

    /// Chains that the previous device had in flight and that are still to be popped.
    #[inline]
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // at most the queue size
    pub fn to_redo(&self) -> u16 {
        self.redo.as_ref().map_or(0, |redo| (redo.heads.len() - redo.at) as u16)
    }

    /// See [`crate::DeviceQueue::with_indirect_limit`].
    #[must_use]
    pub fn with_indirect_limit(mut self, limit: u16) -> Self {
        self.indirect_limit = limit.max(self.layout.queue_size);
        self
    }

    /// See [`crate::DeviceQueue::check_place`].
    pub(crate) fn check_place(
        layout: &RingLayout,
        memory: &Arc<GuestMemory>,
        features: RingFeatures,
    ) -> Result<(), RingFault> {
        layout.map(memory, features).map(drop)
    }

    /// Moves the queue to a new memory table at the same addresses; positions are kept.
    ///
    /// # Errors
    /// [`RingFault::Part`] if the new table does not hold the ring; the queue is unchanged then.
    pub fn rebind(&mut self, view: &MemoryView) -> Result<(), RingFault> {
        let Parts { descriptors, avail, used, used_entries } =
            self.layout.map(view.memory(), self.features)?;
        (self.used.words, self.used.entries) = (used, used_entries);
        (self.descriptors, self.avail, self.tables) = (descriptors, avail, Tables::new(view.clone()));
        Ok(())
    }

    /// Number of entries.
    #[inline]
    #[must_use]
    pub fn queue_size(&self) -> u16 {
        self.layout.queue_size
    }

    /// The ring's addresses and size.
    #[must_use]
    pub fn layout(&self) -> &RingLayout {
        &self.layout
    }

    /// Index of the next available entry to take: the answer to `GET_VRING_BASE`.
    #[inline]
    #[must_use]
    pub fn position(&self) -> u32 {
        u32::from(self.next_avail)
    }

    /// Whether the ring was unused by any device when it was mapped. One in 65,536 used rings looks unused, too.
    #[must_use]
    pub fn was_fresh(&self) -> bool {
        self.was_fresh
    }

    /// How many chains are available right now.
    ///
    /// # Errors
    /// [`RingFault::AvailIndexJump`].
    #[inline]
    pub fn available(&self) -> Result<u16, RingFault> {
        // Relaxed: this is only a count. `pop` reads the index again, with the acquire that the entries need.
        Ok(self.checked_count(self.avail.load(IDX, Relaxed))?.saturating_add(self.to_redo()))
    }

    #[inline]
    fn checked_count(&self, avail_idx: u16) -> Result<u16, RingFault> {
        let (next_avail, queue_size) = (self.next_avail, self.layout.queue_size);
        let count = avail_idx.wrapping_sub(next_avail);
        if count > queue_size {
            return Err(RingFault::AvailIndexJump { avail_idx, next_avail, queue_size });
        }
        Ok(count)
    }

    /// Takes the next available chain into `chain` and returns its tag (the head), if there is one.
    ///
    /// # Errors
    /// [`PopError::Ring`]: the queue must stop. [`PopError::Chain`]: this chain is taken but unusable; the
    /// caller returns it with `push_used`. `chain` is then empty, unless the fault is
    /// [`ChainFault::ReadableAfterWritable`].
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<u16>, PopError> {
        if self.redo.is_some()
            && let Some(head) = self.next_again()
        {
            return self.walk_again(head, chain);
        }
        if self.next_avail == self.avail_idx && !self.refresh()? {
            return Ok(None);
        }
        // Relaxed: `refresh` acquired everything up to `avail_idx`.
        let head = self.avail.load(AVAIL_ENTRIES + usize::from(self.next_avail & self.mask), Relaxed);
        let queue_size = self.layout.queue_size;
        if head >= queue_size {
            return Err(RingFault::HeadOutOfRange { head, queue_size }.into());
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        if let Some(log) = &mut self.log {
            log.taken(head);
        }
        self.walk_from(head, chain)
    }

    /// The next head that the previous device had in flight; its descriptors are still in the table.
    #[cold]
    fn next_again(&mut self) -> Option<u16> {
        let redo = self.redo.as_mut()?;
        let head = redo.heads.get(redo.at).copied();
        redo.at += 1;
        if head.is_none() {
            self.redo = None;
        }
        head
    }

    #[cold]
    fn walk_again(&self, head: u16, chain: &mut Chain) -> Result<Option<u16>, PopError> {
        self.walk_from(head, chain)
    }

    #[inline(always)] // otherwise the compiler emits a call for each request
    fn walk_from(&self, head: u16, chain: &mut Chain) -> Result<Option<u16>, PopError> {
        let in_ring = |index| self.descriptors.get_pair(2 * usize::from(index), Relaxed);
        match chain.read_plain(head, self.layout.queue_size, in_ring) {
            Ok(()) => Ok(Some(head)),
            Err(stopped) => self.walk_rest(head, &stopped, chain),
        }
    }

    /// Reads the rest of a chain whose descriptors in the ring are not plain. Most such chains have an indirect
    /// table.
    #[inline(never)] // keeps the caller small
    fn walk_rest(&self, head: u16, stopped: &Stopped, chain: &mut Chain) -> Result<Option<u16>, PopError> {
        let walked = match stopped.at {
            At::Read(named_by) if named_by.has(INDIRECT) && stopped.taken() == 0 => {
                self.walk_indirect(&named_by, chain)
            }
            at => self.walk_both(at, stopped.taken(), Walk::resume(chain, stopped)),
        };
        match walked {
            Ok(()) => Ok(Some(head)),
            Err(fault) => Err(PopError::Chain { tag: head, fault }),
        }
    }

    /// Reads a chain that is nothing but an indirect table.
    fn walk_indirect(&self, named_by: &Descriptor, chain: &mut Chain) -> Result<(), ChainFault> {
        let entries = self.check_indirect(named_by)?;
        let table = self.tables.open(named_by.range);
        let mut stopped = Stopped::AT_START;
        if let Some((words, first)) = table.as_words() {
            let read = chain.read_plain(0, entries, |index| {
                let in_table = (index < entries).then_some(first + 2 * usize::from(index))?;
                words.get_pair(in_table, Relaxed)
            });
            match read {
                Ok(()) => return Ok(()),
                Err(at) => stopped = at,
            }
        }
        let walk = Walk::resume(chain, &stopped);
        self.walk_table(&table, entries, stopped.at, stopped.taken(), walk)
    }

    fn check_indirect(&self, named_by: &Descriptor) -> Result<u16, IndirectFault> {
        check_indirect(named_by, self.indirect_limit, self.features.indirect)
    }

    #[inline]
    fn descriptor(&self, index: u16) -> [u64; 2] {
        let slot = 2 * usize::from(index);
        [self.descriptors.load(slot, Relaxed), self.descriptors.load(slot + 1, Relaxed)]
    }

    /// Reads `avail.idx`; returns whether a chain is available.
    #[inline]
    fn refresh(&mut self) -> Result<bool, RingFault> {
        // Acquire: pairs with the driver's release of `avail.idx`, which follows the stores of entries and
        // descriptors.
        let avail_idx = self.avail.load(IDX, Acquire);
        let count = self.checked_count(avail_idx)?;
        self.avail_idx = avail_idx;
        Ok(count != 0)
    }

    /// Reads the rest of a chain from the ring, and then from an indirect table if the chain has one.
    #[cold]
    fn walk_both(&self, at: At, taken: u16, mut walk: Walk<'_>) -> Result<(), ChainFault> {
        let limit = self.layout.queue_size;
        match walk.follow(at, taken, (limit, limit), |index| Ok(self.descriptor(index)))? {
            None => walk.finish(),
            Some((named_by, taken)) => {
                let entries = self.check_indirect(&named_by)?;
                let table = self.tables.open(named_by.range);
                self.walk_table(&table, entries, At::Unread(0), taken, walk)
            }
        }
    }

    /// Reads the rest of an indirect table; the chain has `taken` descriptors before `at`.
    #[cold]
    fn walk_table(
        &self,
        table: &Table<'_>,
        entries: u16,
        at: At,
        taken: u16,
        mut walk: Walk<'_>,
    ) -> Result<(), ChainFault> {
        let read = |index| {
            let (addr, meta) = table.words(index).map_err(IndirectFault::Unmapped)?;
            Ok([addr, meta])
        };
        match walk.follow(at, taken, (entries, self.indirect_limit), read)? {
            None => walk.finish(),
            Some(_) => Err(IndirectFault::Nested.into()),
        }
    }

    /// Puts the last popped chain back, so that it is popped again. For an owner that has no room to start the
    /// request.
    #[inline]
    pub fn unpop(&mut self) {
        if let Some(redo) = &mut self.redo {
            redo.at -= 1;
            return;
        }
        if let Some(log) = &mut self.log {
            log.given_back();
        }
        self.next_avail = self.next_avail.wrapping_sub(1);
    }

    /// Stores one completed chain; the driver sees it after the next [`DeviceQueue::publish`].
    ///
    /// `written_bytes`: bytes stored from the start of the chain's device-writable part; 0 if unknown.
    #[inline(always)] // otherwise the compiler emits a call for each request
    pub fn push_used(&mut self, tag: u16, written_bytes: u32) {
        self.used.push(tag, written_bytes);
        if let Some(log) = &mut self.log {
            log.used(tag);
        }
    }

    /// Makes all pushed chains visible to the driver, once per pass; returns whether there were any.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let Some(log) = &mut self.log else { return self.used.publish() };
        if !self.used.has_pushed() {
            return false;
        }
        log.about_to_publish();
        self.used.publish();
        may_die_here();
        log.published(self.used.next_used());
        true
    }

    /// Whether the driver wants a notification for the chains published since the last call.
    ///
    /// Spec: virtio 1.3 §2.7.7.2.
    #[inline]
    #[must_use]
    pub fn needs_notification(&mut self) -> bool {
        let (undecided, published) = self.used.take_undecided();
        if undecided.is_empty() {
            return false;
        }
        // SeqCst: `used.idx` must be visible before the driver's event setting is read. Pairs with the
        // driver's barrier between storing that setting and reading `used.idx` again.
        fence(SeqCst);
        if self.features.event_idx {
            undecided.contains(self.avail.load(self.layout.used_event(), Relaxed), published)
        } else {
            self.avail.load(FLAGS, Relaxed) & AVAIL_NO_INTERRUPT == 0
        }
    }

    /// Tells the driver that it need not kick, because the device polls.
    ///
    /// With `VIRTIO_F_EVENT_IDX` there is nothing to do: the driver has already passed the event index, which
    /// stays unchanged. With or without that feature this is a hint: kicks may still arrive.
    #[inline]
    pub fn disable_kicks(&mut self) {
        if !self.features.event_idx && !self.kicks_disabled {
            self.used.set_kicks_wanted(false);
            self.kicks_disabled = true;
        }
    }

    /// Requests a kick for the next available chain, then checks the ring again. Returns `true` if a chain is
    /// already available; a kick for that chain is not guaranteed.
    ///
    /// # Errors
    /// [`RingFault::AvailIndexJump`].
    #[inline]
    pub fn enable_kicks(&mut self) -> Result<bool, RingFault> {
        if self.features.event_idx {
            self.used.words.store(self.layout.avail_event(), self.next_avail, Relaxed);
        } else {
            self.used.set_kicks_wanted(true);
            self.kicks_disabled = false;
        }
        // SeqCst: the request for kicks must be visible before the index is read. Pairs with the driver's
        // barrier between storing `avail.idx` and reading that request.
        fence(SeqCst);
        Ok(self.available()? != 0)
    }
}
