//! A packed-ring guest that breaks any rule, and a trait that it shares with the split-ring guest.
//!
//! `Hostile` sends invalid chains in either format. `PackedGuest` writes the ring slot by slot.
//!
//! Spec: virtio 1.3 §2.8.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::fence;
use std::time::Instant;

use guest_mem::GuestAddress;
use virtqueue::split::RawDescriptor;

use super::format::Format;
use super::raw_guest::{RawGuest, connected, last, readable, writable};
use super::{FrontEnd, Guest, PATIENCE, Rig, header_bytes, kind, wait_readable};

const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// One queue whose chains are written byte by byte.
pub trait Hostile {
    fn guest(&self) -> &Guest;

    /// The used length of the chain that starts with the first descriptor, and its status byte.
    fn exchange(&mut self, descriptors: &[RawDescriptor]) -> (u32, u8);

    /// Makes an ordinary read available; its tag is 0 each time.
    fn offer_read(&mut self);

    /// The tag and used length of the next read that completes.
    fn next_used_read(&mut self) -> Option<(u32, u32)>;

    /// Whether the device completes an ordinary read on this queue correctly.
    fn works(&mut self) -> bool;

    /// The address of the header; status at +0x800, data from +0x1000 on.
    fn area(&self) -> u64 {
        self.guest().area()
    }

    fn store(&self, addr: u64, bytes: &[u8]) {
        self.guest().view.store(addr, bytes).unwrap();
    }

    fn byte(&self, addr: u64) -> u8 {
        self.guest().bytes(addr, 1)[0]
    }

    /// Writes an indirect table.
    fn set_table(&self, addr: u64, descriptors: &[RawDescriptor]);

    /// Writes the header of a read of sector 0, and an unset status.
    fn prepare_read(&self) {
        self.store(self.area(), &header_bytes(kind::IN, 0));
        self.store(self.area() + 0x800, &[0xff]);
    }
}

impl Hostile for RawGuest {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    fn exchange(&mut self, descriptors: &[RawDescriptor]) -> (u32, u8) {
        Self::exchange(self, descriptors)
    }

    fn set_table(&self, addr: u64, descriptors: &[RawDescriptor]) {
        Self::set_table(self, addr, descriptors);
    }

    fn offer_read(&mut self) {
        let at = self.area();
        self.prepare_read();
        self.set(&[readable(at, 16, 1), writable(at + 0x1000, 512, 2), last(at + 0x800, 1)]);
        self.offer(0);
    }

    fn next_used_read(&mut self) -> Option<(u32, u32)> {
        self.next_used()
    }

    fn works(&mut self) -> bool {
        Self::works(self)
    }
}

/// A server and a hostile guest on its first queue.
pub fn hostile_guest(rig: &Rig, ring: Format) -> (FrontEnd, Box<dyn Hostile>) {
    let front_end = connected(rig, ring.plain());
    let guest = front_end.start_queue(0, 256, ring.plain());
    (front_end, hostile_over(guest, ring))
}

/// Wraps a guest's queue.
pub fn hostile_over(guest: Guest, ring: Format) -> Box<dyn Hostile> {
    match ring {
        Format::Split => Box::new(RawGuest::over(guest)),
        Format::Packed => Box::new(PackedGuest::over(guest)),
    }
}

/// A position in the ring (virtio 1.3 §2.8.1).
#[derive(Clone, Copy, Debug)]
pub struct Position {
    pub slot: u16,
    pub wrap_counter: bool,
}

impl Position {
    fn advance(&mut self, descriptors: usize, queue_size: u16) {
        let ahead = usize::from(self.slot) + descriptors;
        self.wrap_counter ^= ahead >= usize::from(queue_size);
        self.slot = u16::try_from(ahead % usize::from(queue_size)).unwrap();
    }

    /// The flags that make a descriptor at this position available.
    pub fn available(self) -> u16 {
        if self.wrap_counter { AVAIL } else { USED }
    }
}

/// Writes a packed ring slot by slot.
pub struct PackedGuest {
    pub guest: Guest,
    pub next: Position,
    pub next_used: Position,
}

impl PackedGuest {
    pub fn over(guest: Guest) -> Self {
        let start = Position { slot: 0, wrap_counter: true };
        Self { guest, next: start, next_used: start }
    }

    fn slot_addr(&self, slot: u16) -> u64 {
        self.guest.layout.descriptors.0 + u64::from(slot) * 16
    }

    /// Writes every field but the flags.
    fn set_at(&self, addr: u64, descriptor: RawDescriptor, id: u16) {
        self.store(addr, &descriptor.addr.to_le_bytes());
        self.store(addr + 8, &descriptor.len_bytes.to_le_bytes());
        self.store(addr + 12, &id.to_le_bytes());
    }

    /// Writes the flags in one store, as a driver does. If two bytes were stored in turn, the device could take the
    /// chain after the first, and the second would overwrite its answer.
    fn set_flags(&self, slot: u16, flags: u16) {
        let addr = GuestAddress(self.slot_addr(slot) + 14);
        // Release: pairs with the device's acquire of the flags.
        self.guest.view.memory().shared_slice::<u16>(addr, 1).unwrap().store(0, flags, Release);
    }

    /// Makes descriptors available, the first one last, and kicks.
    pub fn offer(&mut self, id: u16, descriptors: &[RawDescriptor]) {
        let mut placed = vec![];
        for descriptor in descriptors {
            placed.push((self.next, *descriptor));
            self.next.advance(1, self.guest.layout.queue_size);
        }
        for (at, descriptor) in placed.into_iter().rev() {
            self.set_at(self.slot_addr(at.slot), descriptor, id);
            self.set_flags(at.slot, descriptor.flags | at.available());
        }
        self.guest.kick();
    }

    /// The id and length of the next used descriptor, if there is one; `descriptors` is the chain's length.
    pub fn take_used(&mut self, descriptors: usize) -> Option<(u16, u32)> {
        let deadline = Instant::now() + PATIENCE;
        let addr = self.slot_addr(self.next_used.slot);
        let used = if self.next_used.wrap_counter { AVAIL | USED } else { 0 };
        let half = |at: u64| {
            let bytes = self.guest.bytes(addr + at, 2);
            u16::from_le_bytes([bytes[0], bytes[1]])
        };
        while half(14) & (AVAIL | USED) != used {
            if !wait_readable(&self.guest.call, deadline) {
                return None;
            }
            let _ = rustix::io::read(&self.guest.call, &mut [0u8; 8]);
        }
        // Acquire: pairs with the device's release of the flags.
        fence(Acquire);
        let (id, used_bytes) = (half(12), u32::from(half(8)) | u32::from(half(10)) << 16);
        self.next_used.advance(descriptors, self.guest.layout.queue_size);
        Some((id, used_bytes))
    }

    /// An ordinary read in three descriptors.
    pub fn normal_read(&self) -> [RawDescriptor; 3] {
        let at = self.area();
        [readable(at, 16, 1), writable(at + 0x1000, 512, 2), last(at + 0x800, 1)]
    }
}

impl Hostile for PackedGuest {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    fn exchange(&mut self, descriptors: &[RawDescriptor]) -> (u32, u8) {
        self.prepare_read();
        // Descriptors behind the chain's end would form another chain.
        let end = descriptors.iter().position(|descriptor| descriptor.flags & RawDescriptor::NEXT == 0);
        let descriptors = &descriptors[..=end.expect("a chain that ends")];
        self.offer(0, descriptors);
        let (id, used_bytes) = self.take_used(descriptors.len()).expect("the chain was not given back");
        assert_eq!(id, 0);
        (used_bytes, self.byte(self.area() + 0x800))
    }

    /// A packed table has no `next`, and another order of fields (virtio 1.3 §2.8.7).
    fn set_table(&self, addr: u64, descriptors: &[RawDescriptor]) {
        for (at, descriptor) in (addr..).step_by(16).zip(descriptors) {
            self.set_at(at, *descriptor, 0);
            self.store(at + 14, &descriptor.flags.to_le_bytes());
        }
    }

    fn offer_read(&mut self) {
        self.prepare_read();
        self.offer(0, &self.normal_read());
    }

    fn next_used_read(&mut self) -> Option<(u32, u32)> {
        self.take_used(3).map(|(id, used_bytes)| (u32::from(id), used_bytes))
    }

    fn works(&mut self) -> bool {
        self.prepare_read();
        self.offer(7, &self.normal_read());
        self.take_used(3) == Some((7, 513)) && self.byte(self.area() + 0x800) == 0
    }
}
