//! A simple model of a ring, written from the standard: decodes buffers from bytes or refuses the chain.
//!
//! - It reads the guest's memory on each call, any number of times, and shares no code with the device.
//! - A chain is no longer than the queue (virtio 1.3 §2.7.5.3.1), or than the device's limit for tables.
//!
//! Spec: virtio 1.3 §2.7, §2.8.

use crate::guest::Guest;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// Addresses of the ring's parts.
pub(super) const DESCRIPTORS: u64 = 0;
pub(super) const AVAIL_RING: u64 = 0x200;
pub(super) const USED_RING: u64 = 0x400;

/// The result of reading a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// Nothing is available.
    Nothing,
    /// The ring is broken.
    Stop,
    /// A chain.
    Taken { tag: u16, buffers: Result<Buffers, Refusal> },
}

/// Why a chain is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The chain's buffers cannot be determined.
    Structure,
    /// A readable buffer follows a writable one; the writable ones are known.
    Order { writable: Vec<(u64, u32)> },
}

/// Addresses and lengths; none is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Buffers {
    pub readable: Vec<(u64, u32)>,
    pub writable: Vec<(u64, u32)>,
}

/// One descriptor. `other`: the next descriptor in a split ring, the buffer id in a packed one.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    addr: u64,
    len: u32,
    flags: u16,
    other: u16,
}

/// The buffers found so far.
#[derive(Default)]
struct Found {
    buffers: Buffers,
    seen_writable: bool,
    disorder: bool,
}

impl Found {
    fn add(&mut self, descriptor: Descriptor) {
        let Descriptor { addr, len, flags, .. } = descriptor;
        let is_writable = flags & WRITE != 0;
        self.disorder |= self.seen_writable && !is_writable;
        self.seen_writable |= is_writable;
        let list = if is_writable { &mut self.buffers.writable } else { &mut self.buffers.readable };
        if len != 0 {
            list.push((addr, len));
        }
    }

    fn end(self) -> Result<Buffers, Refusal> {
        if self.disorder { Err(Refusal::Order { writable: self.buffers.writable }) } else { Ok(self.buffers) }
    }
}

/// The negotiated features, and the limit of chains with a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub size: u16,
    pub indirect: bool,
    pub limit: u16,
}

/// Decodes length, flags and `other` in the format's order.
fn descriptor(guest: &Guest, at: u64, packed: bool) -> Option<Descriptor> {
    let bytes: [u8; 16] = guest.read(at)?;
    let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let addr = u64::from_le_bytes(bytes[..8].try_into().ok()?);
    let len = u32::from_le_bytes(bytes[8..12].try_into().ok()?);
    let (flags, other) = if packed { (word(14), word(12)) } else { (word(12), word(14)) };
    Some(Descriptor { addr, len, flags, other })
}

/// Number of entries of the table that the descriptor refers to; `None` if such a table is not allowed.
fn table_entries(rules: Rules, named_by: Descriptor) -> Option<u16> {
    let whole = named_by.len != 0 && named_by.len.is_multiple_of(16);
    let inside = named_by.addr.checked_add(u64::from(named_by.len)).is_some();
    let entries = u16::try_from(named_by.len / 16).ok().filter(|&entries| entries <= rules.limit)?;
    (rules.indirect && named_by.flags & NEXT == 0 && whole && inside).then_some(entries)
}

/// The split ring's side of the model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    pub rules: Rules,
    /// The index of the next entry of the available ring.
    pub next: u16,
    /// The available index as the device last saw it.
    pub known: u16,
}

impl Split {
    pub fn avail_idx(guest: &Guest) -> u16 {
        u16::from_le_bytes(guest.read(AVAIL_RING + 2).expect("inside the memory"))
    }

    pub fn pop(&mut self, guest: &Guest) -> Said {
        if self.next == self.known {
            let idx = Self::avail_idx(guest);
            if idx.wrapping_sub(self.next) > self.rules.size {
                return Said::Stop;
            }
            self.known = idx;
            if idx == self.next {
                return Said::Nothing;
            }
        }
        let slot = u64::from(self.next % self.rules.size);
        let head = u16::from_le_bytes(guest.read(AVAIL_RING + 4 + 2 * slot).expect("inside the memory"));
        if head >= self.rules.size {
            return Said::Stop;
        }
        self.next = self.next.wrapping_add(1);
        Said::Taken { tag: head, buffers: self.walk(guest, head) }
    }

    /// virtio 1.3 §2.7.5, §2.7.5.3.
    pub fn walk(&self, guest: &Guest, head: u16) -> Result<Buffers, Refusal> {
        let (mut found, mut count) = (Found::default(), 0);
        // The table, its number of entries, the next entry, and the limit of the chain's length.
        let (mut table, mut entries, mut at, mut longest) =
            (DESCRIPTORS, self.rules.size, head, self.rules.size);
        let mut is_inner = false;
        loop {
            if at >= entries || count >= longest {
                return Err(Refusal::Structure);
            }
            let read = descriptor(guest, table.wrapping_add(16 * u64::from(at)), false);
            let this = read.ok_or(Refusal::Structure)?;
            if this.flags & INDIRECT != 0 {
                if is_inner {
                    return Err(Refusal::Structure);
                }
                entries = table_entries(self.rules, this).ok_or(Refusal::Structure)?;
                (table, at, longest, is_inner) = (this.addr, 0, self.rules.limit, true);
                continue;
            }
            count += 1;
            found.add(this);
            if this.flags & NEXT == 0 {
                return found.end();
            }
            at = this.other;
        }
    }
}

/// A position in a packed ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub slot: u16,
    pub wrap: bool,
}

impl Place {
    /// From vhost-user's encoding: slot, and the wrap counter in bit 15.
    pub fn of_bits(bits: u16) -> Self {
        Self { slot: bits & 0x7fff, wrap: bits & 0x8000 != 0 }
    }

    pub fn forward(self, by: u16, size: u16) -> Self {
        let (slot, wraps) = ((self.slot + by) % size, (self.slot + by) / size);
        Self { slot, wrap: self.wrap ^ (wraps % 2 == 1) }
    }

    /// Number of descriptors from `from` to this place, at most one lap.
    pub fn since(self, from: Self, size: u16) -> u16 {
        let lap = if self.wrap == from.wrap { 0 } else { size };
        (self.slot + lap).wrapping_sub(from.slot)
    }

    pub fn used_flags(self) -> u16 {
        if self.wrap { AVAIL | USED } else { 0 }
    }
}

/// The packed ring's side of the model.
#[derive(Clone, Debug)]
pub(super) struct Packed {
    pub rules: Rules,
    pub next: Place,
    /// Number of descriptors that may be taken.
    pub room: u16,
    /// Free entries of the log, if there is one.
    pub log_room: Option<u16>,
    /// For each buffer id: the number of descriptors.
    pub counts: [u16; 16],
    /// For each buffer id: whether an earlier device took it, so that only the log has its length.
    pub again: [bool; 16],
}

impl Packed {
    fn at(&self, guest: &Guest, place: Place) -> Descriptor {
        descriptor(guest, DESCRIPTORS + 16 * u64::from(place.slot), true).expect("inside the memory")
    }

    pub fn is_available(&self, guest: &Guest) -> bool {
        let flags = self.at(guest, self.next).flags;
        (flags & AVAIL != 0) == self.next.wrap && (flags & USED != 0) != self.next.wrap
    }

    /// virtio 1.3 §2.8.5 to §2.8.8.
    pub fn pop(&mut self, guest: &Guest) -> Said {
        if !self.is_available(guest) {
            return Said::Nothing;
        }
        let room = self.log_room.map_or(self.room, |left| left.min(self.room));
        let (mut found, mut mixed, mut place, mut count) = (Found::default(), false, self.next, 0);
        let (id, buffers) = loop {
            if count == room {
                return Said::Stop;
            }
            let this = self.at(guest, place);
            count += 1;
            let is_table = this.flags & INDIRECT != 0;
            if is_table && count == 1 && this.flags & NEXT == 0 {
                break (this.other, self.table(guest, this));
            }
            mixed |= is_table;
            if !is_table {
                found.add(this);
            }
            if this.flags & NEXT == 0 {
                break (this.other, if mixed { Err(Refusal::Structure) } else { found.end() });
            }
            place = place.forward(1, self.rules.size);
        };
        let is_taken = |id: usize| self.counts[id] != 0 || self.again[id];
        if id >= self.rules.size || is_taken(usize::from(id)) {
            return Said::Stop;
        }
        self.counts[usize::from(id)] = count;
        self.next = self.next.forward(count, self.rules.size);
        self.room -= count;
        self.log_room = self.log_room.map(|left| left - count);
        Said::Taken { tag: id, buffers }
    }

    /// virtio 1.3 §2.8.7: entries follow each other, regardless of their flags.
    fn table(&self, guest: &Guest, named_by: Descriptor) -> Result<Buffers, Refusal> {
        let entries = table_entries(self.rules, named_by).ok_or(Refusal::Structure)?;
        let mut found = Found::default();
        for entry in 0..entries {
            let at = named_by.addr.wrapping_add(16 * u64::from(entry));
            found.add(descriptor(guest, at, true).ok_or(Refusal::Structure)?);
        }
        found.end()
    }
}
