//! A driver or device that follows no rules: writes any value anywhere in a packed ring. For tests and fuzzing.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use guest_mem::{AccessError, MemoryView};

use super::cursor::Cursor;
use super::ring::{AVAIL, Meta, Ring, USED};
use crate::RingLayout;
use crate::chain::{self, DESCRIPTOR_BYTES};
use crate::fault::RingFault;

/// An unchecked descriptor (virtio 1.3 §2.8.13).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawDescriptor {
    /// Guest-physical address.
    pub addr: u64,
    /// Length.
    pub len_bytes: u32,
    /// Buffer id.
    pub id: u16,
    /// [`RawDescriptor::NEXT`], one of the other flags, or any other value.
    pub flags: u16,
}

impl RawDescriptor {
    /// `VIRTQ_DESC_F_NEXT`.
    pub const NEXT: u16 = chain::NEXT;
    /// `VIRTQ_DESC_F_WRITE`.
    pub const WRITE: u16 = chain::WRITE;
    /// `VIRTQ_DESC_F_INDIRECT`.
    pub const INDIRECT: u16 = chain::INDIRECT;
    /// `VIRTQ_DESC_F_AVAIL`.
    pub const AVAIL: u16 = AVAIL;
    /// `VIRTQ_DESC_F_USED`.
    pub const USED: u16 = USED;

    /// The bytes as stored in memory.
    #[must_use]
    pub fn to_bytes(self) -> [u8; DESCRIPTOR_BYTES as usize] {
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..].copy_from_slice(&self.meta().word().to_le_bytes());
        bytes
    }

    fn meta(self) -> Meta {
        Meta::new(self.len_bytes, self.id, self.flags)
    }
}

/// Descriptors and event fields. The caller must keep slots inside the ring; otherwise the methods panic.
#[derive(Debug)]
pub struct RawPacked {
    view: MemoryView,
    ring: Ring,
    /// Where [`RawPacked::offer`] continues.
    next_avail: Cursor,
}

impl RawPacked {
    /// Maps a ring at its first position; writes nothing.
    ///
    /// # Errors
    /// [`RingFault`] if the ring is not inside guest memory.
    pub fn new(view: &MemoryView, layout: RingLayout) -> Result<Self, RingFault> {
        let ring = Ring::map(&layout, view.memory())?;
        Ok(Self { view: view.clone(), ring, next_avail: Cursor::start(layout.queue_size) })
    }

    /// Makes descriptors available in the next slots. Sets AVAIL and USED as required and stores the flags of
    /// the first one last. There may be more descriptors than the ring has slots.
    pub fn offer(&mut self, descriptors: &[RawDescriptor]) {
        let first = self.next_avail;
        let end = first.forward(u16::try_from(descriptors.len()).unwrap_or(u16::MAX));
        let mut at = end;
        for descriptor in descriptors.iter().rev() {
            at = at.back(1);
            let flags = descriptor.flags | at.avail_flags();
            self.set_descriptor(at.slot(), RawDescriptor { flags, ..*descriptor });
        }
        self.next_avail = end;
    }

    /// Moves the position where [`RawPacked::offer`] continues.
    pub fn skip(&mut self, descriptors: u16) {
        self.next_avail = self.next_avail.forward(descriptors);
    }

    /// Writes a descriptor unchanged.
    pub fn set_descriptor(&self, slot: u16, descriptor: RawDescriptor) {
        self.ring.set_addr(slot, descriptor.addr);
        self.ring.set_meta(slot, descriptor.meta(), Release);
    }

    /// The descriptor as last stored by either side.
    #[must_use]
    pub fn descriptor(&self, slot: u16) -> RawDescriptor {
        let meta = self.ring.meta(slot, Acquire);
        let (len_bytes, id, flags) = (meta.len_bytes(), meta.id(), meta.flags());
        RawDescriptor { addr: self.ring.addr(slot), len_bytes, id, flags }
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

    /// Stores the driver's event suppression: slot and wrap counter (bit 15); flags.
    pub fn set_driver_event(&self, position: u16, flags: u16) {
        self.ring.driver_event.store(0, u32::from(position) | u32::from(flags) << 16, Relaxed);
    }

    /// Stores the device's event suppression.
    pub fn set_device_event(&self, position: u16, flags: u16) {
        self.ring.device_event.store(0, u32::from(position) | u32::from(flags) << 16, Relaxed);
    }

    /// The driver's event suppression: slot and wrap counter (bit 15); flags.
    #[must_use]
    pub fn driver_event(&self) -> (u16, u16) {
        halves(self.ring.driver_event.load(0, Relaxed))
    }

    /// The device's event suppression.
    #[must_use]
    pub fn device_event(&self) -> (u16, u16) {
        halves(self.ring.device_event.load(0, Relaxed))
    }
}

#[allow(clippy::cast_possible_truncation)] // splits the word into its halves
fn halves(word: u32) -> (u16, u16) {
    (word as u16, (word >> 16) as u16)
}
