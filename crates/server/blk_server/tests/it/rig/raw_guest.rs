//! A split-ring guest that breaks any rule, and helpers for engine faults and large requests.

use std::sync::Mutex;
use std::time::Instant;

use guest_mem::{GuestAddress, GuestRange};
use io_engine::{Engine, EngineConfig, FakeEngine, FakeHandle};
use virtqueue::split::{AddError, RawDescriptor, RawRing};
use virtqueue::{DriverQueue, RingLayout};

use super::{Answer, FrontEnd, Guest, Options, PATIENCE, Rig, feature, header_bytes, kind, wait_readable};

/// Features without EVENT_IDX: the device signals each used chain.
pub const PLAIN: u64 = feature::USUAL & !feature::EVENT_IDX;

/// The first descriptor of a raw guest's valid request, which uses the ring's last three.
const NORMAL_HEAD: u16 = 253;

pub fn range(addr: u64, len_bytes: u32) -> GuestRange {
    GuestRange { addr, len_bytes }
}

pub fn readable(addr: u64, len_bytes: u32, next: u16) -> RawDescriptor {
    RawDescriptor { addr, len_bytes, flags: RawDescriptor::NEXT, next }
}

pub fn writable(addr: u64, len_bytes: u32, next: u16) -> RawDescriptor {
    RawDescriptor { addr, len_bytes, flags: RawDescriptor::NEXT | RawDescriptor::WRITE, next }
}

/// The end of a chain: one writable descriptor.
pub fn last(addr: u64, len_bytes: u32) -> RawDescriptor {
    RawDescriptor { addr, len_bytes, flags: RawDescriptor::WRITE, next: 0 }
}

pub fn table(addr: u64, len_bytes: u32) -> RawDescriptor {
    RawDescriptor { addr, len_bytes, flags: RawDescriptor::INDIRECT, next: 0 }
}

/// One queue of 256 entries, written byte by byte.
pub struct RawGuest {
    pub guest: Guest,
    pub ring: RawRing,
    /// Number of used entries taken so far.
    taken: u16,
}

impl RawGuest {
    /// Starts queue `index` of a front-end that has negotiated [`PLAIN`] and shared its memory.
    pub fn start(front_end: &FrontEnd, index: u16) -> Self {
        Self::over(front_end.start_queue(index, 256, PLAIN))
    }

    pub fn over(guest: Guest) -> Self {
        let ring = RawRing::new(&guest.view, guest.layout).unwrap();
        Self { guest, ring, taken: 0 }
    }

    /// The address of the guest's header; status at +0x800, data from +0x1000 on.
    pub fn area(&self) -> u64 {
        self.guest.area()
    }

    pub fn store(&self, addr: u64, bytes: &[u8]) {
        self.guest.view.store(addr, bytes).unwrap();
    }

    pub fn byte(&self, addr: u64) -> u8 {
        let mut byte = [0];
        self.guest.view.read(addr, &mut byte).unwrap();
        byte[0]
    }

    /// Writes descriptors from the ring's first on.
    pub fn set(&self, descriptors: &[RawDescriptor]) {
        (0..).zip(descriptors).for_each(|(index, descriptor)| self.ring.set_descriptor(index, *descriptor));
    }

    pub fn set_table(&self, addr: u64, descriptors: &[RawDescriptor]) {
        for (index, descriptor) in (0..=u16::MAX).zip(descriptors) {
            self.ring.set_table_descriptor(addr, index, *descriptor).unwrap();
        }
    }

    /// Writes the header of a read of sector 0, and an unset status.
    pub fn prepare_read(&self) {
        self.store(self.area(), &header_bytes(kind::IN, 0));
        self.store(self.area() + 0x800, &[0xff]);
    }

    pub fn offer(&self, head: u16) {
        self.ring.offer(head);
        self.guest.kick();
    }

    /// Waits on the call fd for the next used entry.
    pub fn next_used(&mut self) -> Option<(u32, u32)> {
        let deadline = Instant::now() + PATIENCE;
        while self.ring.used_idx() == self.taken {
            if !wait_readable(&self.guest.call, deadline) {
                return None;
            }
            let _ = rustix::io::read(&self.guest.call, &mut [0u8; 8]);
        }
        self.taken = self.taken.wrapping_add(1);
        Some(self.ring.used_entry(self.taken.wrapping_sub(1)))
    }

    /// The used length of the chain that starts with the ring's first descriptor, and its status byte.
    pub fn exchange(&mut self, descriptors: &[RawDescriptor]) -> (u32, u8) {
        self.prepare_read();
        self.set(descriptors);
        self.offer(0);
        let (id, used_bytes) = self.next_used().expect("the chain was not given back");
        assert_eq!(id, 0);
        (used_bytes, self.byte(self.area() + 0x800))
    }

    /// Whether the device completes an ordinary read on this queue correctly.
    pub fn works(&mut self) -> bool {
        let area = self.area();
        self.prepare_read();
        self.ring.set_descriptor(NORMAL_HEAD, readable(area, 16, NORMAL_HEAD + 1));
        self.ring.set_descriptor(NORMAL_HEAD + 1, writable(area + 0x1000, 512, NORMAL_HEAD + 2));
        self.ring.set_descriptor(NORMAL_HEAD + 2, last(area + 0x800, 1));
        self.offer(NORMAL_HEAD);
        self.next_used() == Some((u32::from(NORMAL_HEAD), 513)) && self.byte(area + 0x800) == 0
    }
}

/// A server and a raw guest on its first queue.
pub fn raw_guest(rig: &Rig) -> (FrontEnd, RawGuest) {
    let front_end = connected(rig, PLAIN);
    let raw = RawGuest::start(&front_end, 0);
    (front_end, raw)
}

/// A front-end with 16 MiB of memory and no queue yet.
pub fn connected(rig: &Rig, features: u64) -> FrontEnd {
    let mut front_end = rig.connect();
    front_end.negotiate(features);
    front_end.share_memory(16 * super::MIB);
    front_end
}

impl FrontEnd {
    /// Starts a queue whose ring is at `base`; the requests of [`Guest::request`] stay at low addresses.
    pub fn start_queue_at(&self, base: u64, index: u16, queue_size: u16, features: u64) -> Guest {
        let layout = RingLayout {
            queue_size,
            descriptors: GuestAddress(base),
            avail: GuestAddress(base + 0x8000),
            used: GuestAddress(base + 0xa000),
        };
        let guest = self.new_guest(index, queue_size, features);
        let ring = DriverQueue::new(&guest.view, layout, guest.features).unwrap();
        let guest = Guest { layout, ring, ..guest };
        self.announce_queue(&guest);
        self.ok(super::code::SET_VRING_ENABLE, &super::vring_state(index, 1), &[]);
        guest
    }
}

impl Guest {
    /// Like [`Guest::exchange`], with the descriptors in a table at `table`.
    pub fn exchange_indirect(
        &mut self,
        table: u64,
        readable: &[GuestRange],
        writable: &[GuestRange],
    ) -> Answer {
        self.next_token += 1;
        let token = self.next_token;
        self.ring.add_indirect(readable, writable, GuestAddress(table), token).unwrap();
        self.submit();
        let used_bytes = self.wait_for(token);
        self.answer(writable, used_bytes)
    }

    /// A read or write of `sector` with data in `pieces`, header and status at `head` and `head + 0x800`.
    pub fn scattered(
        &mut self,
        kind: u32,
        sector: u64,
        head: u64,
        pieces: &[GuestRange],
    ) -> Result<u64, AddError> {
        self.view.store(head, &header_bytes(kind, sector)).unwrap();
        self.view.store(head + 0x800, &[0xff]).unwrap();
        let (header, status) = (range(head, 16), range(head + 0x800, 1));
        self.next_token += 1;
        let token = self.next_token;
        if kind == super::kind::OUT {
            self.ring.add(&[&[header], pieces].concat(), &[status], token)?;
        } else {
            self.ring.add(&[header], &[pieces, &[status]].concat(), token)?;
        }
        Ok(token)
    }

    pub fn bytes(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.view.read(addr, &mut bytes).unwrap();
        bytes
    }
}

/// Options with an engine that fails on request; for a server with one worker.
pub fn faulty(mut options: Options) -> (Options, FakeHandle) {
    let config = EngineConfig { recorder: options.recorder.clone(), ..EngineConfig::default() };
    let (engine, handle) = FakeEngine::new(config).unwrap();
    let engine = Mutex::new(Some(engine));
    options.engine = Some(Box::new(move || {
        let engine = engine.lock().unwrap().take().expect("one worker");
        Ok(Box::new(engine) as Box<dyn Engine>)
    }));
    (options, handle)
}
