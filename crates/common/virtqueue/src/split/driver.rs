//! Driver half of a split virtqueue: makes buffers available and takes used ones back.
//!
//! `add … publish → kick_needed? … pop_used … arm_interrupts`
//!
//! - The driver does not trust the device either: it keeps the free list, chain lengths and tokens in private memory
//!   and checks the used ring against them.
//!
//! Spec: virtio 1.3 §2.7.13, §2.7.14.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use guest_mem::{Address, GuestAddress, GuestRange, MemoryView};

use super::layout::{AVAIL_ENTRIES, FLAGS, IDX, Parts};
use crate::buffers::{self, Buffers};
use crate::chain::{DESCRIPTOR_BYTES, Descriptor, INDIRECT, NEXT};
use crate::fault::{RingFault, RingPart};
use crate::layout::{RingLayout, zero};
use crate::notify::{AVAIL_NO_INTERRUPT, USED_NO_NOTIFY, Undecided};
use crate::{AddError, DriverFault, RingFeatures, Used};

#[derive(Clone, Copy, Debug)]
struct InFlight {
    token: u64,
    /// Descriptors in the ring's table: 1 for an indirect chain.
    descriptors: u16,
    writable_bytes: u64,
}

/// One queue as a driver sees it.
#[derive(Debug)]
pub struct DriverQueue {
    layout: RingLayout,
    features: RingFeatures,
    view: MemoryView,
    /// Maximum number of buffers in a chain with an indirect table.
    indirect_limit: u16,
    parts: Parts,
    /// Chains in flight, indexed by head.
    in_flight: Box<[Option<InFlight>]>,
    /// For each descriptor, the next one in its chain or in the free list.
    links: Box<[u16]>,
    first_free: u16,
    free: u16,
    /// Index of the next available entry.
    next_avail: u16,
    /// `avail.idx` as the device sees it.
    published: u16,
    undecided: Undecided,
    /// The next used entry to take.
    next_used: u16,
    /// `used.idx` when it was last read.
    used_idx: u16,
}

impl DriverQueue {
    /// Creates a new ring at `layout` and zeroes all of it.
    ///
    /// # Errors
    /// [`RingFault::BadQueueSize`], [`RingFault::Part`].
    pub fn new(view: &MemoryView, layout: RingLayout, features: RingFeatures) -> Result<Self, RingFault> {
        let parts = layout.map(view.memory(), features)?;
        zero(view, RingPart::Descriptors, layout.descriptors, parts.descriptors.len() * 8)?;
        zero(view, RingPart::Avail, layout.avail, parts.avail.len() * 2)?;
        zero(view, RingPart::Used, layout.used, parts.used.len() * 2)?;
        let queue_size = layout.queue_size;
        Ok(Self {
            layout,
            features,
            view: view.clone(),
            indirect_limit: layout.queue_size,
            parts,
            in_flight: vec![None; usize::from(queue_size)].into(),
            links: (1..=queue_size).collect(),
            first_free: 0,
            free: queue_size,
            next_avail: 0,
            published: 0,
            undecided: Undecided::default(),
            next_used: 0,
            used_idx: 0,
        })
    }

    /// See [`crate::DriverQueue::with_indirect_limit`].
    #[must_use]
    pub fn with_indirect_limit(mut self, limit: u16) -> Self {
        self.indirect_limit = limit.max(self.layout.queue_size);
        self
    }

    /// Free descriptors.
    #[must_use]
    pub fn free_descriptors(&self) -> u16 {
        self.free
    }

    /// Chains added and not yet returned.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        self.next_avail.wrapping_sub(self.next_used)
    }

    /// Adds a chain that uses the ring's own descriptors; the device sees it after [`DriverQueue::publish`].
    /// Returns the tag, which is the chain's head.
    ///
    /// # Errors
    /// [`AddError`]; nothing was added.
    pub fn add(
        &mut self,
        readable: &[GuestRange],
        writable: &[GuestRange],
        token: u64,
    ) -> Result<u16, AddError> {
        let buffers = Buffers::new(readable, writable, self.layout.queue_size)?;
        self.check_free(buffers.count)?;
        let head = self.first_free;
        let mut index = head;
        for (range, flags) in buffers.with_flags() {
            let next = self.links[usize::from(index)];
            let next_in_chain = if flags & NEXT == 0 { 0 } else { next };
            self.store_descriptor(index, Descriptor { range, flags, next: next_in_chain });
            index = next;
        }
        self.first_free = index;
        let writable_bytes = buffers.writable_bytes();
        self.make_available(head, InFlight { token, descriptors: buffers.count, writable_bytes });
        Ok(head)
    }

    /// Adds a chain through an indirect table at `table`, which takes 16 bytes per buffer. The device may
    /// read the table until it returns the chain.
    ///
    /// # Errors
    /// [`AddError`]; nothing was added.
    pub fn add_indirect(
        &mut self,
        readable: &[GuestRange],
        writable: &[GuestRange],
        table: GuestAddress,
        token: u64,
    ) -> Result<u16, AddError> {
        if !self.features.indirect {
            return Err(AddError::IndirectNotNegotiated);
        }
        let buffers = Buffers::new(readable, writable, self.indirect_limit)?;
        self.check_free(1)?;
        let linked = buffers.with_flags().zip(1_u16..).map(|((range, flags), following)| {
            let next = if flags & NEXT == 0 { 0 } else { following };
            Descriptor { range, flags, next }.to_words()
        });
        buffers::store_table(&self.view, table.raw_value(), linked)?;
        let head = self.first_free;
        let len_bytes = u32::from(buffers.count) * DESCRIPTOR_BYTES;
        let range = GuestRange { addr: table.raw_value(), len_bytes };
        self.store_descriptor(head, Descriptor { range, flags: INDIRECT, next: 0 });
        self.first_free = self.links[usize::from(head)];
        let writable_bytes = buffers.writable_bytes();
        self.make_available(head, InFlight { token, descriptors: 1, writable_bytes });
        Ok(head)
    }

    fn check_free(&self, needed: u16) -> Result<(), AddError> {
        let free = self.free;
        if needed <= free { Ok(()) } else { Err(AddError::Full { needed: usize::from(needed), free }) }
    }

    fn store_descriptor(&self, index: u16, descriptor: Descriptor) {
        let (slot, (addr, meta)) = (2 * usize::from(index), descriptor.to_words());
        self.parts.descriptors.store(slot, addr, Relaxed);
        self.parts.descriptors.store(slot + 1, meta, Relaxed);
    }

    fn make_available(&mut self, head: u16, in_flight: InFlight) {
        self.free -= in_flight.descriptors;
        self.in_flight[usize::from(head)] = Some(in_flight);
        let slot = usize::from(self.next_avail & (self.layout.queue_size - 1));
        self.parts.avail.store(AVAIL_ENTRIES + slot, head, Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Makes all added chains visible to the device; returns whether there were any.
    pub fn publish(&mut self) -> bool {
        let added = self.next_avail.wrapping_sub(self.published);
        if added == 0 {
            return false;
        }
        // Release: pairs with the device's acquire of `avail.idx`; descriptors and entries become visible
        // first.
        self.parts.avail.store(IDX, self.next_avail, Release);
        self.published = self.next_avail;
        self.undecided.add(u32::from(added));
        true
    }

    /// Whether the device wants a kick for the chains published since the last call.
    ///
    /// Spec: virtio 1.3 §2.7.10.1.
    #[must_use]
    pub fn kick_needed(&mut self) -> bool {
        let undecided = std::mem::take(&mut self.undecided);
        if undecided.is_empty() {
            return false;
        }
        // SeqCst: `avail.idx` must be visible before the device's event setting is read. Pairs with the fence
        // in `DeviceQueue::enable_kicks`.
        fence(SeqCst);
        if self.features.event_idx {
            let avail_event = self.parts.used.load(self.layout.avail_event(), Relaxed);
            undecided.contains(avail_event, self.published)
        } else {
            self.parts.used.load(FLAGS, Relaxed) & USED_NO_NOTIFY == 0
        }
    }

    /// Takes the next chain that the device has used, if there is one.
    ///
    /// # Errors
    /// [`DriverFault`]: the ring cannot be used any more.
    pub fn pop_used(&mut self) -> Result<Option<Used>, DriverFault> {
        if self.next_used == self.used_idx && !self.refresh()? {
            return Ok(None);
        }
        let slot = 2 * usize::from(self.next_used & (self.layout.queue_size - 1));
        let id = self.parts.used_entries.load(slot, Relaxed);
        let written_bytes = self.parts.used_entries.load(slot + 1, Relaxed);
        let (tag, in_flight) = self.checked_used(id, written_bytes)?;
        self.in_flight[usize::from(tag)] = None;
        self.put_back(tag, in_flight.descriptors);
        self.next_used = self.next_used.wrapping_add(1);
        Ok(Some(Used { token: in_flight.token, tag, written_bytes }))
    }

    /// Reads `used.idx`; returns whether a chain was used.
    fn refresh(&mut self) -> Result<bool, DriverFault> {
        // Acquire: pairs with the device's release of `used.idx`, which follows the stores of entries, status
        // and data.
        let used_idx = self.checked_used_idx(self.parts.used.load(IDX, Acquire))?;
        self.used_idx = used_idx;
        Ok(used_idx != self.next_used)
    }

    fn checked_used_idx(&self, used_idx: u16) -> Result<u16, DriverFault> {
        let next_used = self.next_used;
        let in_flight = self.published.wrapping_sub(next_used);
        if used_idx.wrapping_sub(next_used) > in_flight {
            return Err(DriverFault::UsedIndexJump { used_idx, next_used, in_flight });
        }
        Ok(used_idx)
    }

    fn checked_used(&self, id: u32, written_bytes: u32) -> Result<(u16, InFlight), DriverFault> {
        let queue_size = self.layout.queue_size;
        let out_of_range = DriverFault::IdOutOfRange { id, queue_size };
        let tag = u16::try_from(id).ok().filter(|&tag| tag < queue_size).ok_or(out_of_range)?;
        let in_flight = self.in_flight[usize::from(tag)].ok_or(DriverFault::NotInFlight { id: tag })?;
        let writable_bytes = in_flight.writable_bytes;
        if u64::from(written_bytes) > writable_bytes {
            return Err(DriverFault::WrittenTooMuch { written_bytes, writable_bytes });
        }
        Ok((tag, in_flight))
    }

    fn put_back(&mut self, head: u16, descriptors: u16) {
        let last = (1..descriptors).fold(head, |index, _| self.links[usize::from(index)]);
        self.links[usize::from(last)] = self.first_free;
        self.first_free = head;
        self.free += descriptors;
    }

    /// Tells the device that the driver polls. This is a hint: interrupts may still arrive.
    pub fn disable_interrupts(&mut self) {
        // With `VIRTIO_F_EVENT_IDX` there is nothing to do: the device has already passed the event index.
        if !self.features.event_idx {
            self.parts.avail.store(FLAGS, AVAIL_NO_INTERRUPT, Relaxed);
        }
    }

    /// Requests an interrupt for the next used chain, then checks the ring again. Returns `true` if a chain is
    /// already used; an interrupt for that chain is not guaranteed.
    ///
    /// # Errors
    /// [`DriverFault::UsedIndexJump`].
    pub fn arm_interrupts(&mut self) -> Result<bool, DriverFault> {
        if self.features.event_idx {
            self.parts.avail.store(self.layout.used_event(), self.next_used, Relaxed);
        } else {
            self.parts.avail.store(FLAGS, 0, Relaxed);
        }
        // SeqCst: the request for interrupts must be visible before the index is read. Pairs with the fence
        // in `DeviceQueue::needs_notification`.
        fence(SeqCst);
        Ok(self.checked_used_idx(self.parts.used.load(IDX, Relaxed))? != self.next_used)
    }
}
