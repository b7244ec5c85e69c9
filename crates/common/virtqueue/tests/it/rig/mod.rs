//! Shared by the tests of both halves: a small memory with a ring in it, and descriptors.
#![allow(dead_code)] // each test binary uses only a part

pub mod tables;

use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use virtqueue::packed::{FRESH_BASE, RawPacked};
use virtqueue::split::{RawDescriptor, RawRing};
use virtqueue::{Chain, DeviceQueue, RingFeatures, RingLayout, packed};

pub const NEXT: u16 = RawDescriptor::NEXT;
pub const WRITE: u16 = RawDescriptor::WRITE;
pub const INDIRECT: u16 = RawDescriptor::INDIRECT;

/// The memory has 1 MiB at address 0, followed directly by a second region of 64 KiB.
pub const SECOND_REGION: u64 = 1 << 20;
pub const END: u64 = SECOND_REGION + (64 << 10);
/// Where tests put indirect tables.
pub const TABLE: u64 = 0x2_0000;

pub const PLAIN: RingFeatures = RingFeatures { event_idx: false, indirect: false, packed: false };
pub const EVENT_IDX: RingFeatures = RingFeatures { event_idx: true, indirect: false, packed: false };
pub const INDIRECT_DESC: RingFeatures = RingFeatures { event_idx: false, indirect: true, packed: false };

pub const PACKED: RingFeatures = RingFeatures { event_idx: false, indirect: false, packed: true };

pub fn memory() -> Arc<GuestMemory> {
    let region = |addr, size| Arc::new(Region::from_memfd(GuestAddress(addr), size).unwrap());
    let regions = vec![region(0, SECOND_REGION), region(SECOND_REGION, END - SECOND_REGION)];
    Arc::new(GuestMemory::new(regions).unwrap())
}

pub fn view() -> MemoryView {
    MemoryView::new(memory())
}

pub fn layout(queue_size: u16) -> RingLayout {
    RingLayout {
        queue_size,
        descriptors: GuestAddress(0x1000),
        avail: GuestAddress(0x8000),
        used: GuestAddress(0xc000),
    }
}

/// A device and the rule-breaking driver on the same ring.
pub struct Rig {
    pub view: MemoryView,
    pub driver: RawRing,
    pub device: DeviceQueue,
    pub chain: Chain,
}

pub fn rig(queue_size: u16, features: RingFeatures) -> Rig {
    let view = view();
    let driver = RawRing::new(&view, layout(queue_size)).unwrap();
    let device = DeviceQueue::new(&view, layout(queue_size), features, 0).unwrap();
    Rig { view, driver, device, chain: Chain::with_capacity(queue_size) }
}

/// A rig whose indices start shortly before they wrap.
pub fn rig_at(position: u16, queue_size: u16, features: RingFeatures) -> Rig {
    let view = view();
    let driver = RawRing::new(&view, layout(queue_size)).unwrap();
    driver.set_used_idx(position);
    driver.set_avail_idx(position);
    let device = DeviceQueue::new(&view, layout(queue_size), features, 0).unwrap();
    Rig { view, driver, device, chain: Chain::with_capacity(queue_size) }
}

/// A packed device and the rule-breaking driver on the same ring.
pub struct PackedRig {
    pub view: MemoryView,
    pub driver: RawPacked,
    pub device: DeviceQueue,
    pub chain: Chain,
}

pub fn packed_rig(queue_size: u16, features: RingFeatures) -> PackedRig {
    let (view, features) = (view(), RingFeatures { packed: true, ..features });
    let driver = RawPacked::new(&view, layout(queue_size)).unwrap();
    let device = DeviceQueue::new(&view, layout(queue_size), features, FRESH_BASE).unwrap();
    PackedRig { view, driver, device, chain: Chain::with_capacity(queue_size) }
}

impl PackedRig {
    /// Sends `count` chains of one descriptor each through the ring, one after another, with id 0.
    pub fn go_round(&mut self, count: u16) {
        for _ in 0..count {
            self.driver.offer(&[packed_desc(0x1, 16, 0, 0)]);
            assert_eq!(self.device.pop(&mut self.chain), Ok(Some(0)));
            self.device.push_used(0, 0);
            self.device.publish();
            let _ = self.device.needs_notification();
        }
    }

    pub fn fill_table(&self, table_addr: u64, entries: &[packed::RawDescriptor]) {
        for (index, &entry) in (0..).zip(entries) {
            self.driver.set_table_descriptor(table_addr, index, entry).unwrap();
        }
    }
}

pub fn packed_desc(addr: u64, len_bytes: u32, id: u16, flags: u16) -> packed::RawDescriptor {
    packed::RawDescriptor { addr, len_bytes, id, flags }
}

pub fn desc(addr: u64, len_bytes: u32, flags: u16, next: u16) -> RawDescriptor {
    RawDescriptor { addr, len_bytes, flags, next }
}

pub fn range(addr: u64, len_bytes: u32) -> GuestRange {
    GuestRange { addr, len_bytes }
}

impl Rig {
    /// Writes `descriptors` to the ring's table from entry 0 on and offers head 0.
    pub fn offer_direct(&self, descriptors: &[RawDescriptor]) {
        for (index, &descriptor) in (0..).zip(descriptors) {
            self.driver.set_descriptor(index, descriptor);
        }
        self.driver.offer(0);
    }

    /// Writes `entries` to a table at [`TABLE`] and offers head 0, which refers to it.
    pub fn offer_table(&self, entries: &[RawDescriptor]) {
        self.fill_table(TABLE, entries);
        self.driver.set_descriptor(0, desc(TABLE, 16 * entries.len() as u32, INDIRECT, 0));
        self.driver.offer(0);
    }

    pub fn fill_table(&self, table_addr: u64, entries: &[RawDescriptor]) {
        for (index, &entry) in (0..).zip(entries) {
            self.driver.set_table_descriptor(table_addr, index, entry).unwrap();
        }
    }
}
