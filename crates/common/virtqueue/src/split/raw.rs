//! A driver that follows no rules: writes any value anywhere in a ring. For tests and fuzzing.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use guest_mem::{AccessError, GuestRange, MemoryView};

use super::layout::{AVAIL_ENTRIES, FLAGS, IDX, Parts};
use crate::RingFeatures;
use crate::chain::{self, DESCRIPTOR_BYTES, Descriptor};
use crate::fault::RingFault;
use crate::layout::RingLayout;

/// An unchecked descriptor (virtio 1.3 §2.7.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawDescriptor {
    /// Guest-physical address.
    pub addr: u64,
    /// Length.
    pub len_bytes: u32,
    /// [`RawDescriptor::NEXT`], [`RawDescriptor::WRITE`], [`RawDescriptor::INDIRECT`], or any other value.
    pub flags: u16,
    /// Index of the next descriptor.
    pub next: u16,
}

impl RawDescriptor {
    /// `VIRTQ_DESC_F_NEXT`.
    pub const NEXT: u16 = chain::NEXT;
    /// `VIRTQ_DESC_F_WRITE`.
    pub const WRITE: u16 = chain::WRITE;
    /// `VIRTQ_DESC_F_INDIRECT`.
    pub const INDIRECT: u16 = chain::INDIRECT;

    /// The bytes as stored in memory.
    #[must_use]
    pub fn to_bytes(self) -> [u8; DESCRIPTOR_BYTES as usize] {
        let (addr, meta) = self.to_words();
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..].copy_from_slice(&meta.to_le_bytes());
        bytes
    }

    pub(super) fn to_words(self) -> (u64, u64) {
        let range = GuestRange { addr: self.addr, len_bytes: self.len_bytes };
        Descriptor { range, flags: self.flags, next: self.next }.to_words()
    }
}

/// The driver's side of a ring, field by field. The caller must keep indices inside the ring; otherwise the
/// methods panic.
#[derive(Debug)]
pub struct RawRing {
    layout: RingLayout,
    view: MemoryView,
    parts: Parts,
}

impl RawRing {
    /// Maps a ring with room for the event fields; writes nothing.
    ///
    /// # Errors
    /// [`RingFault`] if the ring is not inside guest memory.
    pub fn new(view: &MemoryView, layout: RingLayout) -> Result<Self, RingFault> {
        let features = RingFeatures { event_idx: true, indirect: true, packed: false };
        let parts = layout.map(view.memory(), features)?;
        Ok(Self { layout, view: view.clone(), parts })
    }

    /// Writes a descriptor of the ring's own table.
    pub fn set_descriptor(&self, index: u16, descriptor: RawDescriptor) {
        let (slot, (addr, meta)) = (2 * usize::from(index), descriptor.to_words());
        self.parts.descriptors.store(slot, addr, Relaxed);
        self.parts.descriptors.store(slot + 1, meta, Relaxed);
    }

    /// Writes a descriptor of an indirect table at `table_addr`.
    ///
    /// # Errors
    /// [`AccessError`] if the address is not in guest memory.
    pub fn set_table_descriptor(
        &self,
        table_addr: u64,
        index: u16,
        descriptor: RawDescriptor,
    ) -> Result<(), AccessError> {
        let offset_bytes = u64::from(index) * u64::from(DESCRIPTOR_BYTES);
        self.view.store(table_addr.wrapping_add(offset_bytes), &descriptor.to_bytes())
    }

    /// Stores `head` in the entry with free-running index `at`.
    pub fn set_avail_entry(&self, at: u16, head: u16) {
        let slot = usize::from(at & (self.layout.queue_size - 1));
        self.parts.avail.store(AVAIL_ENTRIES + slot, head, Relaxed);
    }

    /// Stores `avail.idx`.
    pub fn set_avail_idx(&self, avail_idx: u16) {
        self.parts.avail.store(IDX, avail_idx, Release);
    }

    /// `avail.idx` as last stored by either side.
    #[must_use]
    pub fn avail_idx(&self) -> u16 {
        self.parts.avail.load(IDX, Relaxed)
    }

    /// Makes `head` available, after all heads that are already available.
    pub fn offer(&self, head: u16) {
        let at = self.avail_idx();
        self.set_avail_entry(at, head);
        self.set_avail_idx(at.wrapping_add(1));
    }

    /// Stores `avail.flags`.
    pub fn set_avail_flags(&self, flags: u16) {
        self.parts.avail.store(FLAGS, flags, Relaxed);
    }

    /// Stores `used_event`.
    pub fn set_used_event(&self, used_event: u16) {
        self.parts.avail.store(self.layout.used_event(), used_event, Relaxed);
    }

    /// Stores `used.idx`, which belongs to the device.
    pub fn set_used_idx(&self, used_idx: u16) {
        self.parts.used.store(IDX, used_idx, Release);
    }

    /// Stores a used entry, which belongs to the device.
    pub fn set_used_entry(&self, at: u16, id: u32, len_bytes: u32) {
        let slot = 2 * usize::from(at & (self.layout.queue_size - 1));
        self.parts.used_entries.store(slot, id, Relaxed);
        self.parts.used_entries.store(slot + 1, len_bytes, Relaxed);
    }

    /// `used.idx`.
    #[must_use]
    pub fn used_idx(&self) -> u16 {
        self.parts.used.load(IDX, Acquire)
    }

    /// Id and length of the used entry with free-running index `at`.
    #[must_use]
    pub fn used_entry(&self, at: u16) -> (u32, u32) {
        let slot = 2 * usize::from(at & (self.layout.queue_size - 1));
        (self.parts.used_entries.load(slot, Relaxed), self.parts.used_entries.load(slot + 1, Relaxed))
    }

    /// `used.flags`.
    #[must_use]
    pub fn used_flags(&self) -> u16 {
        self.parts.used.load(FLAGS, Relaxed)
    }

    /// `avail_event`.
    #[must_use]
    pub fn avail_event(&self) -> u16 {
        self.parts.used.load(self.layout.avail_event(), Relaxed)
    }
}
