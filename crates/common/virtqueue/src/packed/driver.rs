//! Driver half of a packed virtqueue: makes buffers available and takes used ones back.
//!
//! `add … publish → kick_needed? … pop_used … arm_interrupts`
//!
//! - The driver does not trust the device either: it keeps ids, chain lengths and tokens in private memory
//!   and checks used descriptors against them.
//! - The driver holds back the first descriptor of a batch until [`DriverQueue::publish`]. The device takes
//!   descriptors in order, so it cannot see the later ones until then.
//!
//! Spec: virtio 1.3 §2.8.17, §2.8.18.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use guest_mem::{Address, GuestAddress, GuestRange, MemoryView};

use super::cursor::Cursor;
use super::event::{EventFlags, event, is_wanted};
use super::ring::{Meta, Ring};
use crate::buffers::{self, Buffers};
use crate::chain::{DESCRIPTOR_BYTES, INDIRECT, WRITE};
use crate::fault::{RingFault, RingPart};
use crate::layout::zero;
use crate::notify::Undecided;
use crate::{AddError, DriverFault, RingFeatures, RingLayout, Used};

#[derive(Clone, Copy, Debug)]
struct InFlight {
    token: u64,
    /// Number of chains that were added before this one.
    number: u64,
    writable_bytes: u64,
    /// Descriptors in the ring: 1 for an indirect chain.
    descriptors: u16,
}

/// One packed queue as a driver sees it.
#[derive(Debug)]
pub struct DriverQueue {
    layout: RingLayout,
    features: RingFeatures,
    view: MemoryView,
    /// Maximum number of buffers in a chain with an indirect table.
    indirect_limit: u16,
    ring: Ring,
    /// Chains in flight, by buffer id.
    in_flight: Box<[Option<InFlight>]>,
    /// For each free buffer id, the next free one.
    free_ids: Box<[u16]>,
    first_free_id: u16,
    /// Free descriptors.
    free: u16,
    /// Chains added since the ring was created.
    added: u64,
    /// How many of these chains the device can see.
    visible: u64,
    /// Chains that the device returned since the ring was created.
    returned: u64,
    /// The position of the next descriptor.
    next_avail: Cursor,
    /// The position where the device expects the next available descriptor.
    published: Cursor,
    /// Flags, id and length of the first available descriptor of the batch; [`DriverQueue::publish`] stores them at
    /// `published`.
    unpublished_first: Option<Meta>,
    undecided: Undecided,
    /// The position where the device stores the next used descriptor.
    next_used: Cursor,
    /// The device was told not to send interrupts.
    interrupts_disabled: bool,
}

impl DriverQueue {
    /// Creates a new ring at `layout` and zeroes all of it.
    ///
    /// # Errors
    /// [`RingFault::BadQueueSize`], [`RingFault::Part`].
    pub fn new(view: &MemoryView, layout: RingLayout, features: RingFeatures) -> Result<Self, RingFault> {
        let ring = Ring::map(&layout, view.memory())?;
        let queue_size = layout.queue_size;
        zero(view, RingPart::PackedRing, layout.descriptors, usize::from(queue_size) * 16)?;
        zero(view, RingPart::DriverEvent, layout.avail, 4)?;
        zero(view, RingPart::DeviceEvent, layout.used, 4)?;
        let start = Cursor::start(queue_size);
        Ok(Self {
            layout,
            features,
            view: view.clone(),
            indirect_limit: layout.queue_size,
            ring,
            in_flight: vec![None; usize::from(queue_size)].into(),
            free_ids: (1..=queue_size).collect(),
            first_free_id: 0,
            free: queue_size,
            added: 0,
            visible: 0,
            returned: 0,
            next_avail: start,
            published: start,
            unpublished_first: None,
            undecided: Undecided::default(),
            next_used: start,
            interrupts_disabled: false,
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
    #[allow(clippy::cast_possible_truncation)] // each has a descriptor of the ring
    pub fn in_flight(&self) -> u16 {
        (self.added - self.returned) as u16
    }

    /// Adds a chain that uses the ring's own descriptors; the device sees it after [`DriverQueue::publish`].
    /// Returns the tag, which is the chain's buffer id.
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
        let id = self.first_free_id;
        for (range, flags) in buffers.with_flags() {
            self.store_descriptor(range, id, flags);
        }
        self.take_id(token, buffers.count, buffers.writable_bytes());
        Ok(id)
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
        // In a table only the WRITE flag has a meaning (virtio 1.3 §2.8.7).
        let entries = buffers
            .with_flags()
            .map(|(range, flags)| (range.addr, Meta::new(range.len_bytes, 0, flags & WRITE).word()));
        buffers::store_table(&self.view, table.raw_value(), entries)?;
        let id = self.first_free_id;
        let len_bytes = u32::from(buffers.count) * DESCRIPTOR_BYTES;
        self.store_descriptor(GuestRange { addr: table.raw_value(), len_bytes }, id, INDIRECT);
        self.take_id(token, 1, buffers.writable_bytes());
        Ok(id)
    }

    fn check_free(&self, needed: u16) -> Result<(), AddError> {
        let free = self.free;
        if needed <= free { Ok(()) } else { Err(AddError::Full { needed: usize::from(needed), free }) }
    }

    fn store_descriptor(&mut self, range: GuestRange, id: u16, flags: u16) {
        let slot = self.next_avail.slot();
        let meta = Meta::new(range.len_bytes, id, flags | self.next_avail.avail_flags());
        self.ring.set_addr(slot, range.addr);
        if self.unpublished_first.is_some() {
            self.ring.set_meta(slot, meta, Relaxed);
        } else {
            self.unpublished_first = Some(meta);
        }
        self.next_avail = self.next_avail.forward(1);
    }

    /// Takes the first free id. An id is always free: each chain in flight holds at least one descriptor, and a
    /// descriptor is free.
    fn take_id(&mut self, token: u64, descriptors: u16, writable_bytes: u64) {
        let at = usize::from(self.first_free_id);
        self.first_free_id = self.free_ids[at];
        self.in_flight[at] = Some(InFlight { token, number: self.added, writable_bytes, descriptors });
        self.free -= descriptors;
        self.added += 1;
    }

    /// Makes all added chains visible to the device; returns whether there were any.
    pub fn publish(&mut self) -> bool {
        let Some(first) = self.unpublished_first.take() else { return false };
        // Release: pairs with the device's acquire of these flags; all other descriptors become visible
        // first.
        self.ring.set_meta(self.published.slot(), first, Release);
        self.undecided.add(self.next_avail.since(self.published));
        self.published = self.next_avail;
        self.visible = self.added;
        true
    }

    /// Whether the device wants a kick for the chains published since the last call.
    ///
    /// Spec: virtio 1.3 §2.8.10.
    #[must_use]
    pub fn kick_needed(&mut self) -> bool {
        let undecided = std::mem::take(&mut self.undecided);
        if undecided.is_empty() {
            return false;
        }
        // SeqCst: the flags must be visible before the device's event setting is read. Pairs with the fence
        // in `DeviceQueue::enable_kicks`.
        fence(SeqCst);
        let event = self.ring.device_event.load(0, Relaxed);
        is_wanted(event, undecided, self.published, self.layout.queue_size, self.features.event_idx)
    }

    /// Takes the next chain that the device has used, if there is one.
    ///
    /// # Errors
    /// [`DriverFault`]: the ring cannot be used any more.
    pub fn pop_used(&mut self) -> Result<Option<Used>, DriverFault> {
        // Acquire: pairs with the device's release of these flags, which follows the stores of status and
        // data.
        let meta = self.ring.meta(self.next_used.slot(), Acquire);
        if !self.next_used.is_used(meta.flags()) {
            return Ok(None);
        }
        let tag = meta.id();
        let in_flight = self.checked_id(tag)?;
        let written_bytes = checked_length(meta, in_flight.writable_bytes)?;
        self.in_flight[usize::from(tag)] = None;
        self.free_ids[usize::from(tag)] = self.first_free_id;
        self.first_free_id = tag;
        self.free += in_flight.descriptors;
        self.returned += 1;
        self.next_used = self.next_used.forward(in_flight.descriptors);
        Ok(Some(Used { token: in_flight.token, tag, written_bytes }))
    }

    fn checked_id(&self, id: u16) -> Result<InFlight, DriverFault> {
        let queue_size = self.layout.queue_size;
        let out_of_range = DriverFault::IdOutOfRange { id: u32::from(id), queue_size };
        let in_flight = self.in_flight.get(usize::from(id)).ok_or(out_of_range)?;
        // A chain that was added but not published does not belong to the device yet.
        in_flight.filter(|chain| chain.number < self.visible).ok_or(DriverFault::NotInFlight { id })
    }

    /// Tells the device that the driver polls. This is a hint: interrupts may still arrive.
    pub fn disable_interrupts(&mut self) {
        if !self.interrupts_disabled {
            self.ring.driver_event.store(0, event(EventFlags::Disable, self.next_used), Relaxed);
            self.interrupts_disabled = true;
        }
    }

    /// Requests an interrupt for the next used chain, then checks the ring again. Returns `true` if a chain is
    /// already used; an interrupt for that chain is not guaranteed.
    ///
    /// # Errors
    /// Never; the signature matches [`crate::DriverQueue::arm_interrupts`].
    pub fn arm_interrupts(&mut self) -> Result<bool, DriverFault> {
        let flags = if self.features.event_idx { EventFlags::Desc } else { EventFlags::Enable };
        self.ring.driver_event.store(0, event(flags, self.next_used), Relaxed);
        self.interrupts_disabled = false;
        // SeqCst: the request for interrupts must be visible before the flags are read. Pairs with the fence
        // in `DeviceQueue::needs_notification`.
        fence(SeqCst);
        Ok(self.next_used.is_used(self.ring.meta(self.next_used.slot(), Relaxed).flags()))
    }
}

/// The length that the device claims to have stored. Without WRITE the length has no meaning (virtio 1.3
/// §2.8.4), but QEMU's devices store a valid length without WRITE, so a length that fits the buffers is accepted.
fn checked_length(meta: Meta, writable_bytes: u64) -> Result<u32, DriverFault> {
    let written_bytes = meta.len_bytes();
    match u64::from(written_bytes) <= writable_bytes {
        true => Ok(written_bytes),
        false if meta.flags() & WRITE == 0 => Ok(0),
        false => Err(DriverFault::WrittenTooMuch { written_bytes, writable_bytes }),
    }
}
