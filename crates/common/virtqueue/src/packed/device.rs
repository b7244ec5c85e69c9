//! Device half of a packed virtqueue: takes available chains and returns them as used.
//!
//! `enable_kicks … pop → (owner) → push_used → publish → needs_notification`
//!
//! - A chain is a run of descriptors; the last one holds the chain's buffer id, which is the tag.
//! - One used descriptor answers a whole chain and skips as many slots as the chain had. The device keeps
//!   that count in private memory, by id, and never reads it back.
//! - The device stores the first used descriptor of a batch only in [`DeviceQueue::publish`]. The driver reads only
//!   that slot, so it cannot see the later ones until then.
//!
//! Spec: virtio 1.3 §2.8.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use guest_mem::{GuestMemory, MemoryView};

use super::cursor::Cursor;
use super::event::is_wanted;
use super::log::PackedLog;
use super::recovery::{self, Recovered, RedoChain, RedoList};
use super::resume::{self, Opened};
use super::ring::{Meta, Ring};
use crate::chain::{At, Chain, Descriptor, INDIRECT, NEXT, Stopped, WRITE, Walk};
use crate::fault::{ChainFault, IndirectFault, PopError, RingFault};
use crate::log::{LogArea, Recovery};
use crate::notify::Undecided;
use crate::step::may_die_here;
use crate::tables::{Table, Tables, check_indirect};
use crate::{RingFeatures, RingLayout};

/// The chain in flight that has a given buffer id.
#[derive(Clone, Copy, Debug, Default)]
struct InFlight {
    /// Descriptors of the chain; 0 if none is in flight.
    count: u16,
    /// Head entry in the log, if there is a log.
    head: u16,
}

/// A chain taken from the ring: its size, its id, and any fault in its buffers.
type Taken = (InFlight, u16, Result<(), ChainFault>);

/// One packed queue as a device sees it.
#[derive(Debug)]
pub struct DeviceQueue {
    layout: RingLayout,
    features: RingFeatures,
    tables: Tables,
    ring: Ring,
    /// Maximum number of descriptors in a chain that uses an indirect table.
    indirect_limit: u16,
    /// The next descriptor to take.
    next_avail: Cursor,
    /// Number of descriptors that are not in flight, and so the longest possible next chain.
    room: u16,
    /// Chains in flight, by buffer id.
    in_flight: Box<[InFlight]>,
    /// Buffer id of the chain popped last.
    last_popped: u16,
    /// The position of the next used descriptor.
    next_used: Cursor,
    /// The position where the driver expects the next used descriptor.
    published: Cursor,
    /// Flags, id and length of the first used descriptor of the batch; [`DeviceQueue::publish`] stores them at
    /// `published`.
    unpublished_first: Option<Meta>,
    undecided: Undecided,
    /// The driver was told that it need not kick.
    kicks_disabled: bool,
    /// Nothing had been used in the ring when it was mapped.
    was_fresh: bool,
    log: Option<Box<PackedLog>>,
    /// Chains that the previous device had in flight; `None` once all are popped.
    redo: Option<Box<RedoList>>,
    recovery: Recovery,
}

impl DeviceQueue {
    /// Maps the ring and resumes where the last device stopped, or at `base` (see [`DeviceQueue::position`]).
    /// The rules are in `resume.rs`.
    ///
    /// # Errors
    /// [`RingFault::BadQueueSize`], [`RingFault::Part`], [`RingFault::BadBase`], [`RingFault::StaleBase`].
    pub fn new(
        view: &MemoryView,
        layout: RingLayout,
        features: RingFeatures,
        base: u32,
    ) -> Result<Self, RingFault> {
        let ring = Ring::map(&layout, view.memory())?;
        let queue_size = layout.queue_size;
        let Opened { at: position, is_new: was_fresh } = resume::open(&ring, base, queue_size)?;
        Ok(Self {
            layout,
            features,
            tables: Tables::new(view.clone()),
            ring,
            indirect_limit: queue_size,
            next_avail: position,
            room: queue_size,
            in_flight: vec![InFlight::default(); usize::from(queue_size)].into(),
            last_popped: 0,
            next_used: position,
            published: position,
            unpublished_first: None,
            undecided: Undecided::default(),
            kicks_disabled: false,
            was_fresh,
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
        base: u32,
        area: &LogArea,
    ) -> Result<Self, RingFault> {
        let (ring, queue_size) = (Ring::map(&layout, view.memory())?, layout.queue_size);
        match recovery::recover(area, &ring, queue_size)? {
            Recovered::Both(both) => Ok(Self::recovered(view, layout, features, ring, *both)),
            Recovered::Neither { words, was_foreign } => {
                let mut queue = Self::new(view, layout, features, base)?;
                queue.log = Some(recovery::write_anew(words, area.entries(), queue.next_used).into());
                queue.recovery.was_foreign = was_foreign;
                Ok(queue)
            }
        }
    }

    fn recovered(
        view: &MemoryView,
        layout: RingLayout,
        features: RingFeatures,
        ring: Ring,
        (log, redo): (PackedLog, RedoList),
    ) -> Self {
        let (queue_size, position, taken) = (layout.queue_size, log.used, redo.descriptors());
        let mut in_flight: Box<[InFlight]> = vec![InFlight::default(); usize::from(queue_size)].into();
        for &RedoChain { id, head, count, .. } in &redo.chains {
            in_flight[usize::from(id)] = InFlight { count, head };
        }
        recovery::hide_unpublished(&ring, position, taken);
        Self {
            layout,
            features,
            tables: Tables::new(view.clone()),
            ring,
            indirect_limit: queue_size,
            next_avail: position.forward(taken),
            room: queue_size - taken,
            in_flight,
            last_popped: 0,
            next_used: position,
            published: position,
            unpublished_first: None,
            undecided: Undecided::default(),
            kicks_disabled: false,
            was_fresh: false,
            log: Some(log.into()),
            recovery: Recovery { redone: redo.left(), was_foreign: false },
            redo: Some(redo.into()),
        }
    }

    /// The result of reading the log.
    #[must_use]
    pub fn recovery(&self) -> Recovery {
        self.recovery
    }

    /// Chains that the previous device had in flight and that are still to be popped.
    #[inline]
    #[must_use]
    pub fn to_redo(&self) -> u16 {
        self.redo.as_ref().map_or(0, |redo| redo.left())
    }

    /// See [`crate::DeviceQueue::with_indirect_limit`].
    #[must_use]
    pub fn with_indirect_limit(mut self, limit: u16) -> Self {
        self.indirect_limit = limit.max(self.layout.queue_size);
        self
    }

    /// See [`crate::DeviceQueue::check_place`].
    pub(crate) fn check_place(layout: &RingLayout, memory: &Arc<GuestMemory>) -> Result<(), RingFault> {
        Ring::map(layout, memory).map(drop)
    }

    /// Moves the queue to a new memory table at the same addresses; positions are kept.
    ///
    /// # Errors
    /// [`RingFault::Part`] if the new table does not hold the ring; the queue is unchanged then.
    pub fn rebind(&mut self, view: &MemoryView) -> Result<(), RingFault> {
        self.ring = Ring::map(&self.layout, view.memory())?;
        self.tables = Tables::new(view.clone());
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

    /// Slot of the next descriptor to take (bits 0–14) and its wrap counter (bit 15); slot of the next used
    /// descriptor (16–30) and its wrap counter (31): the answer to `GET_VRING_BASE`.
    #[inline]
    #[must_use]
    pub fn position(&self) -> u32 {
        resume::base(self.next_avail, self.next_used)
    }

    /// Whether the ring was unused by any device when it was mapped.
    #[must_use]
    pub fn was_fresh(&self) -> bool {
        self.was_fresh
    }

    /// Whether a chain is available right now: 1 if so, otherwise 0.
    ///
    /// # Errors
    /// Never; the signature matches [`crate::DeviceQueue::available`].
    #[inline]
    pub fn available(&self) -> Result<u16, RingFault> {
        // Relaxed: this is only a hint. `pop` reads the descriptor again, with the acquire that the chain needs.
        let meta = self.ring.meta(self.next_avail.slot(), Relaxed);
        Ok(u16::from(self.next_avail.is_available(meta.flags()) || self.to_redo() != 0))
    }

    /// Takes the next available chain into `chain` and returns its tag (the buffer id), if there is one.
    ///
    /// # Errors
    /// See [`crate::DeviceQueue::pop`].
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<u16>, PopError> {
        if self.redo.is_some()
            && let Some((id, walked)) = self.pop_again(chain)
        {
            return finish_pop(id, walked);
        }
        let slot = self.next_avail.slot();
        // Acquire: pairs with the driver's release of the first descriptor's flags, which follows the stores
        // of the rest of the chain, the tables and the data.
        let first = self.ring.meta(slot, Acquire);
        if !self.next_avail.is_available(first.flags()) {
            return Ok(None);
        }
        let (in_flight, id, walked) = self.walk(first, chain)?;
        self.in_flight[usize::from(id)] = in_flight;
        self.room -= in_flight.count;
        self.next_avail = self.next_avail.forward(in_flight.count);
        self.last_popped = id;
        if !self.kicks_disabled {
            self.request_kicks(); // replaces the stored position, which says that nothing is in flight
        }
        finish_pop(id, walked)
    }

    /// The next chain that the previous device had in flight, as the log recorded it: the ring may no longer hold
    /// it.
    #[cold]
    fn pop_again(&mut self, chain: &mut Chain) -> Option<(u16, Result<(), ChainFault>)> {
        let redo = self.redo.as_mut()?;
        let Some(&again) = redo.chains.get(redo.at) else {
            self.redo = None;
            return None;
        };
        redo.at += 1;
        let descriptors = redo.descriptors.get(again.first..)?.get(..usize::from(again.count))?;
        chain.clear();
        let walked = match descriptors {
            [(addr, meta)] if meta.flags() & INDIRECT != 0 => {
                let named_by = meta.at(*addr);
                self.walk_table(&named_by, chain)
            }
            _ if descriptors.iter().any(|(_, meta)| meta.flags() & INDIRECT != 0) => {
                Err(IndirectFault::Mixed.into())
            }
            _ => push_all(descriptors, Walk::start(chain)),
        };
        Some((again.id, walked))
    }

    #[inline]
    fn check_id(&self, id: u16) -> Result<(), RingFault> {
        match self.in_flight.get(usize::from(id)) {
            None => Err(RingFault::IdOutOfRange { id, queue_size: self.layout.queue_size }),
            Some(InFlight { count: 0, .. }) => Ok(()),
            Some(_) => Err(RingFault::IdInFlight { id }),
        }
    }

    /// Takes the next chain and, if there is a log, records it there.
    #[inline]
    fn walk(&mut self, first: Meta, chain: &mut Chain) -> Result<Taken, RingFault> {
        let at = self.next_avail;
        let room = match &mut self.log {
            None => self.room,
            // Used entries return to the log's free list only when the batch is visible.
            Some(log) => self.room.min(log.room()),
        };
        if room == 0 {
            return Err(RingFault::EndlessChain { slot: at.slot(), room: 0 });
        }
        if first.flags() & (NEXT | INDIRECT) == INDIRECT {
            let (addr, id) = (self.ring.addr(at.slot()), first.id());
            self.check_id(id)?;
            let head = self.log.as_mut().map_or(0, |log| log.take_one(addr, first));
            let walked = self.walk_table(&first.at(addr), chain);
            return Ok((InFlight { count: 1, head }, id, walked));
        }
        let Self { ring, log, next_avail, .. } = self;
        if let Some(log) = log {
            log.begin();
        }
        let mut last = first;
        let read = chain.read_plain(0, room, |index| {
            let slot = (index < room).then(|| next_avail.forward(index).slot())?;
            let addr = ring.addr(slot);
            if index > 0 {
                // Relaxed: `pop` acquired the whole chain with its first descriptor.
                last = ring.meta(slot, Relaxed);
            }
            if let Some(log) = log {
                log.note(addr, last);
            }
            Some([addr, last.linked(last.flags(), index + 1)])
        });
        if let Err(stopped) = read {
            return self.walk_rest(last, &stopped, room, chain);
        }
        #[allow(clippy::cast_possible_truncation)] // at most `room`
        let count = chain.count() as u16;
        Ok((self.taken(count, last)?, last.id(), Ok(())))
    }

    /// Checks the id of a chain that was read from the ring, and marks the chain as taken in the log. `last` is the
    /// chain's last descriptor.
    #[inline]
    fn taken(&mut self, count: u16, last: Meta) -> Result<InFlight, RingFault> {
        self.check_id(last.id())?;
        let head = self.log.as_mut().map_or(0, |log| log.taken());
        Ok(InFlight { count, head })
    }

    /// Reads the rest of a chain that is not plain. Continues to its end even if the chain is unusable, because only
    /// the last descriptor holds the id. `last` is the descriptor read most recently.
    #[cold]
    fn walk_rest(
        &mut self,
        mut last: Meta,
        stopped: &Stopped,
        room: u16,
        chain: &mut Chain,
    ) -> Result<Taken, RingFault> {
        let (mut count, mut only_direct, mut walk) = (stopped.taken(), true, Walk::resume(chain, stopped));
        let mut read = match stopped.at {
            At::Read(descriptor) => Some(descriptor),
            At::Unread(_) => None,
        };
        while count < room {
            let descriptor = read.take().unwrap_or_else(|| {
                let slot = self.next_avail.forward(count).slot();
                // Relaxed: `pop` acquired the whole chain with its first descriptor.
                let (addr, meta) = (self.ring.addr(slot), self.ring.meta(slot, Relaxed));
                if let Some(log) = &mut self.log {
                    log.note(addr, meta);
                }
                last = meta;
                meta.at(addr)
            });
            count += 1;
            if descriptor.has(INDIRECT) {
                only_direct = false;
            } else {
                walk.push(&descriptor);
            }
            if !descriptor.has(NEXT) {
                let walked = if only_direct { walk.finish() } else { Err(IndirectFault::Mixed.into()) };
                return Ok((self.taken(count, last)?, last.id(), walked));
            }
        }
        Err(RingFault::EndlessChain { slot: self.next_avail.slot(), room })
    }

    /// Reads all entries of a table in order; only their WRITE flag counts (virtio 1.3 §2.8.7).
    fn walk_table(&self, named_by: &Descriptor, chain: &mut Chain) -> Result<(), ChainFault> {
        chain.clear();
        let entries = check_indirect(named_by, self.indirect_limit, self.features.indirect)?;
        let table = self.tables.open(named_by.range);
        let mut stopped = Stopped::AT_START;
        if let Some((words, first)) = table.as_words() {
            let read = chain.read_plain(0, entries, |index| {
                let in_table = (index < entries).then_some(first + 2 * usize::from(index))?;
                let [addr, meta] = words.get_pair(in_table, Relaxed)?;
                let (meta, next) = (Meta::from_word(meta), index + 1);
                let flags = meta.flags() & WRITE | if next < entries { NEXT } else { 0 };
                Some([addr, meta.linked(flags, next)])
            });
            match read {
                Ok(()) => return Ok(()),
                Err(at) => stopped = at,
            }
        }
        walk_table_from(&stopped, &table, entries, chain)
    }

    /// Puts the last popped chain back, so that it is popped again. For an owner that has no room to start the
    /// request. No other pop or push may come between the pop and this call.
    #[inline]
    pub fn unpop(&mut self) {
        if let Some(redo) = &mut self.redo {
            redo.at -= 1;
            return;
        }
        if let Some(log) = &mut self.log {
            log.given_back(self.in_flight[usize::from(self.last_popped)].head);
        }
        let in_flight = self.take_in_flight(self.last_popped);
        self.next_avail = self.next_avail.back(in_flight.count);
    }

    /// Removes a chain from those in flight.
    #[inline]
    fn take_in_flight(&mut self, id: u16) -> InFlight {
        let in_flight = std::mem::take(&mut self.in_flight[usize::from(id)]);
        assert!(in_flight.count != 0, "a popped chain may be pushed or put back only once");
        self.room += in_flight.count;
        in_flight
    }

    /// Stores one completed chain; the driver sees it after the next [`DeviceQueue::publish`].
    ///
    /// `written_bytes`: bytes stored from the start of the chain's device-writable part; 0 if unknown.
    #[inline]
    pub fn push_used(&mut self, tag: u16, written_bytes: u32) {
        let in_flight = self.take_in_flight(tag);
        // Without WRITE the length has no meaning (virtio 1.3 §2.8.4).
        let written = if written_bytes == 0 { 0 } else { WRITE };
        let used = Meta::new(written_bytes, tag, self.next_used.used_flags() | written);
        if self.unpublished_first.is_some() {
            self.ring.set_meta(self.next_used.slot(), used, Relaxed);
            may_die_here();
        } else {
            self.unpublished_first = Some(used);
        }
        self.next_used = self.next_used.forward(in_flight.count);
        if let Some(log) = &mut self.log {
            log.used(in_flight.head);
        }
    }

    /// Makes all pushed chains visible to the driver, once per pass; returns whether there were any.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let Some(first) = self.unpublished_first.take() else { return false };
        if let Some(log) = &mut self.log {
            log.about_to_publish(self.next_used);
        }
        // Release: pairs with the driver's acquire of these flags; later used descriptors, status and data
        // become visible first.
        self.ring.set_meta(self.published.slot(), first, Release);
        may_die_here();
        if let Some(log) = &mut self.log {
            log.published();
        }
        self.undecided.add(self.next_used.since(self.published));
        self.published = self.next_used;
        if !self.kicks_disabled && self.is_drained() {
            self.request_kicks(); // the device may already be waiting for a kick
        }
        true
    }

    /// Whether the driver wants a notification for the chains published since the last call.
    ///
    /// Spec: virtio 1.3 §2.8.10.
    #[inline]
    #[must_use]
    pub fn needs_notification(&mut self) -> bool {
        let undecided = std::mem::take(&mut self.undecided);
        if undecided.is_empty() {
            return false;
        }
        // SeqCst: the flags must be visible before the driver's event setting is read. Pairs with the
        // driver's barrier between storing that setting and reading the next used descriptor again.
        fence(SeqCst);
        let event = self.ring.driver_event.load(0, Relaxed);
        is_wanted(event, undecided, self.published, self.layout.queue_size, self.features.event_idx)
    }

    /// Tells the driver that it need not kick, because the device polls. This is a hint: kicks may still
    /// arrive.
    #[inline]
    pub fn disable_kicks(&mut self) {
        if !self.kicks_disabled {
            self.ring.device_event.store(0, resume::event_without_kicks(self.next_avail), Relaxed);
            self.kicks_disabled = true;
        }
    }

    /// Requests a kick for the next available chain, then checks the ring again. Returns `true` if a chain is
    /// already available; a kick for that chain is not guaranteed.
    ///
    /// If nothing is in flight, the device may stop in this state: the ring tells the next device where to resume.
    ///
    /// # Errors
    /// Never; the signature matches [`crate::DeviceQueue::enable_kicks`].
    #[inline]
    pub fn enable_kicks(&mut self) -> Result<bool, RingFault> {
        self.request_kicks();
        self.kicks_disabled = false;
        // SeqCst: the request for kicks must be visible before the flags are read. Pairs with the driver's
        // barrier between storing the flags and reading that request.
        fence(SeqCst);
        Ok(self.available()? != 0)
    }

    /// Whether nothing is in flight and the driver can see every used descriptor.
    #[inline]
    fn is_drained(&self) -> bool {
        self.next_avail == self.published
    }

    #[inline]
    fn request_kicks(&self) {
        let event = resume::event_with_kicks(self.next_avail, self.is_drained(), self.features.event_idx);
        // Release: pairs with the acquire in `resume::open`; the used descriptors before this position become
        // visible first.
        self.ring.device_event.store(0, event, Release);
    }
}

/// Reads the rest of a table.
#[cold]
fn walk_table_from(
    stopped: &Stopped,
    table: &Table<'_>,
    entries: u16,
    chain: &mut Chain,
) -> Result<(), ChainFault> {
    let (mut walk, mut next) = (Walk::resume(chain, stopped), stopped.taken());
    if let At::Read(descriptor) = &stopped.at {
        walk.push(descriptor);
        next += 1;
    }
    for index in next..entries {
        let (addr, meta) = table.words(index).map_err(IndirectFault::Unmapped)?;
        walk.push(&Meta::from_word(meta).at(addr));
    }
    walk.finish()
}

fn push_all(descriptors: &[(u64, Meta)], mut walk: Walk<'_>) -> Result<(), ChainFault> {
    for &(addr, meta) in descriptors {
        let descriptor = meta.at(addr);
        walk.push(&descriptor);
    }
    walk.finish()
}

/// Turns a taken chain into the result of [`DeviceQueue::pop`].
#[inline]
fn finish_pop(id: u16, walked: Result<(), ChainFault>) -> Result<Option<u16>, PopError> {
    match walked {
        Ok(()) => Ok(Some(id)),
        Err(fault) => Err(PopError::Chain { tag: id, fault }),
    }
}
