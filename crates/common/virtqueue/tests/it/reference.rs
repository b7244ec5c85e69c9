//! The device half compared with a simple reader that follows the specification, on the same bytes, in both formats:
//! well-formed and malformed chains.
//!
//! - Both take the same chains, with the same buffers, and refuse the other chains with the same fault and the same
//!   values.
//! - The capacity with which a [`Chain`] was made does not change its buffers.
//! - A new device that opens the in-flight log pops the same chains again.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::sync::Arc;

use guest_mem::{AccessError, GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use proptest::prelude::*;
use virtqueue::packed::{FRESH_BASE, RawPacked};
use virtqueue::split::{RawDescriptor, RawRing};
use virtqueue::{Chain, ChainFault, DeviceQueue, IndirectFault, LogArea, PopError, RingFault, RingFeatures};

use crate::rig::tables::tables;
use crate::rig::*;

/// What a call of `pop` yields: the result, and the readable and the writable buffers.
type Popped = (Result<Option<u16>, PopError>, [Vec<GuestRange>; 2]);

/// A ring and tables, all made available at once.
#[derive(Clone, Debug)]
struct Ring {
    features: RingFeatures,
    queue_size: u16,
    indirect_limit: u16,
    /// The size with which the test makes the chain.
    capacity: u16,
    /// The first slot of a packed ring.
    first_slot: u16,
    descriptors: Vec<RawDescriptor>,
    indirect: Vec<RawDescriptor>,
    /// The available ring of a split ring: each head once, and perhaps one head outside the ring.
    heads: Vec<u16>,
}

fn rings() -> impl Strategy<Value = Ring> {
    let size = prop_oneof![Just(2_u16), Just(4), Just(8), Just(16)];
    (size, any::<bool>(), prop::bool::weighted(0.9)).prop_flat_map(|(queue_size, packed, indirect)| {
        let heads = Just((0..queue_size).collect::<Vec<_>>()).prop_shuffle();
        let no_head = prop::option::weighted(0.1, (0..usize::from(queue_size), queue_size..=u16::MAX));
        let limit = prop_oneof![Just(queue_size), queue_size..20];
        let capacity = prop_oneof![Just(queue_size), 1..20_u16];
        (tables(queue_size), heads, no_head, limit, capacity, 0..queue_size).prop_map(
            move |((descriptors, table), mut heads, no_head, indirect_limit, capacity, first_slot)| {
                if let Some((at, head)) = no_head {
                    heads[at] = head;
                }
                let features = RingFeatures { event_idx: false, indirect, packed };
                let indirect = table;
                Ring {
                    features,
                    queue_size,
                    indirect_limit,
                    capacity,
                    first_slot,
                    descriptors,
                    indirect,
                    heads,
                }
            },
        )
    })
}

impl Ring {
    /// Moves a packed ring and its device to the first slot, and makes everything available.
    fn write(&self, view: &MemoryView, device: &mut DeviceQueue) {
        for (index, &descriptor) in (0..).zip(&self.indirect) {
            let packed = self.features.packed;
            let entry = if packed { as_packed(descriptor).to_bytes() } else { descriptor.to_bytes() };
            view.store(TABLE + 16 * index, &entry).unwrap();
            view.store(SECOND_REGION - 24 + 16 * index, &entry).unwrap();
        }
        if !self.features.packed {
            let raw = RawRing::new(view, layout(self.queue_size)).unwrap();
            (0..).zip(&self.descriptors).for_each(|(index, &d)| raw.set_descriptor(index, d));
            self.heads.iter().for_each(|&head| raw.offer(head));
            return;
        }
        let mut raw = RawPacked::new(view, layout(self.queue_size)).unwrap();
        for _ in 0..self.first_slot {
            raw.offer(&[packed_desc(1, 16, 0, 0)]);
            assert_eq!(device.pop(&mut Chain::with_capacity(1)), Ok(Some(0)));
            device.push_used(0, 0);
            device.publish();
        }
        raw.offer(&self.descriptors.iter().map(|&d| as_packed(d)).collect::<Vec<_>>());
    }
}

/// The descriptor in the packed format, with an id instead of `next`.
fn as_packed(d: RawDescriptor) -> virtqueue::packed::RawDescriptor {
    packed_desc(d.addr, d.len_bytes, d.next, d.flags)
}

/// Reads the ring as written, one descriptor at a time.
struct Reader<'r> {
    ring: &'r Ring,
    view: &'r MemoryView,
    /// Number of heads, or of descriptors of a packed ring, that were taken.
    taken: u16,
    /// Whether a chain is in flight, by buffer id of a packed ring.
    is_in_flight: Vec<bool>,
}

impl<'r> Reader<'r> {
    fn new(ring: &'r Ring, view: &'r MemoryView) -> Self {
        Self { ring, view, taken: 0, is_in_flight: vec![false; usize::from(ring.queue_size)] }
    }

    fn pop(&mut self) -> Popped {
        if self.taken == self.ring.queue_size {
            return (Ok(None), Default::default());
        }
        let chain = if self.ring.features.packed { self.packed_chain() } else { self.split_chain() };
        match chain {
            Err(fault) => (Err(fault.into()), Default::default()),
            Ok((tag, Err(fault))) => (Err(PopError::Chain { tag, fault }), Default::default()),
            Ok((tag, Ok(chain))) => {
                let (in_order, buffers) = sort_out(&chain);
                (in_order.map(|()| Some(tag)).map_err(|fault| PopError::Chain { tag, fault }), buffers)
            }
        }
    }

    /// An entry of a table in memory. For a packed ring, `next` has the entry's id.
    fn entry(&self, table: u64, index: u16) -> Result<RawDescriptor, AccessError> {
        let mut bytes = [0; 16];
        self.view.read(table + 16 * u64::from(index), &mut bytes)?;
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let (flags, next) =
            if self.ring.features.packed { (word(14), word(12)) } else { (word(12), word(14)) };
        let addr = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        Ok(desc(addr, u32::from_le_bytes(bytes[8..12].try_into().unwrap()), flags, next))
    }

    /// Number of entries of the table that the descriptor refers to.
    fn entries(&self, named_by: RawDescriptor) -> Result<u16, IndirectFault> {
        let RawDescriptor { addr, len_bytes, flags, .. } = named_by;
        let (entries, limit) = (len_bytes / 16, self.ring.indirect_limit);
        match len_bytes % 16 {
            _ if !self.ring.features.indirect => Err(IndirectFault::NotNegotiated),
            _ if flags & NEXT != 0 => Err(IndirectFault::WithNext),
            1.. => Err(IndirectFault::Length { len_bytes }),
            0 if entries == 0 => Err(IndirectFault::Empty),
            0 if addr.checked_add(len_bytes.into()).is_none() => {
                let len_bytes = len_bytes.into();
                Err(IndirectFault::Unmapped(AccessError::Unmapped { addr, len_bytes }))
            }
            0 if entries > limit.into() => Err(IndirectFault::TooLarge { entries, limit }),
            0 => Ok(entries as u16),
        }
    }

    /// Reads a chain of a split ring (virtio 1.3 §2.7.5, §2.7.5.3).
    fn split_chain(&mut self) -> Result<(u16, Result<Vec<RawDescriptor>, ChainFault>), RingFault> {
        let (head, queue_size) = (self.ring.heads[usize::from(self.taken)], self.ring.queue_size);
        if head >= queue_size {
            return Err(RingFault::HeadOutOfRange { head, queue_size });
        }
        self.taken += 1;
        Ok((head, self.split_descriptors(head)))
    }

    fn split_descriptors(&self, head: u16) -> Result<Vec<RawDescriptor>, ChainFault> {
        let mut chain: Vec<RawDescriptor> = Vec::new();
        let (mut next, mut is_table) = (head, false);
        let (mut table, mut table_entries) =
            (layout(self.ring.queue_size).descriptors.0, self.ring.queue_size);
        loop {
            let limit = if is_table { self.ring.indirect_limit } else { self.ring.queue_size };
            if next >= table_entries {
                return Err(ChainFault::NextOutOfRange { next, table_entries });
            }
            if chain.len() == usize::from(limit) {
                return Err(ChainFault::TooLong { limit });
            }
            let descriptor = self.entry(table, next).map_err(IndirectFault::Unmapped)?;
            if descriptor.flags & INDIRECT == 0 {
                chain.push(descriptor);
                if descriptor.flags & NEXT == 0 {
                    return Ok(chain);
                }
                next = descriptor.next;
            } else if is_table {
                return Err(IndirectFault::Nested.into());
            } else {
                table_entries = self.entries(descriptor)?;
                (table, next, is_table) = (descriptor.addr, 0, true);
            }
        }
    }

    /// Reads a chain of a packed ring (virtio 1.3 §2.8.5 to §2.8.8).
    fn packed_chain(&mut self) -> Result<(u16, Result<Vec<RawDescriptor>, ChainFault>), RingFault> {
        let (queue_size, room) = (self.ring.queue_size, self.ring.queue_size - self.taken);
        let offered = &self.ring.descriptors[usize::from(self.taken)..];
        let Some(last) = offered.iter().position(|descriptor| descriptor.flags & NEXT == 0) else {
            return Err(RingFault::EndlessChain {
                slot: (self.ring.first_slot + self.taken) % queue_size,
                room,
            });
        };
        let (chain, id) = (&offered[..=last], offered[last].next);
        match self.is_in_flight.get(usize::from(id)) {
            None => return Err(RingFault::IdOutOfRange { id, queue_size }),
            Some(true) => return Err(RingFault::IdInFlight { id }),
            Some(false) => self.is_in_flight[usize::from(id)] = true,
        }
        self.taken += chain.len() as u16;
        Ok((id, self.packed_descriptors(chain)))
    }

    fn packed_descriptors(&self, chain: &[RawDescriptor]) -> Result<Vec<RawDescriptor>, ChainFault> {
        match chain {
            [one] if one.flags & INDIRECT != 0 => {
                let entries = 0..self.entries(*one)?;
                let table: Result<_, _> = entries.map(|index| self.entry(one.addr, index)).collect();
                Ok(table.map_err(IndirectFault::Unmapped)?)
            }
            _ if chain.iter().any(|descriptor| descriptor.flags & INDIRECT != 0) => {
                Err(IndirectFault::Mixed.into())
            }
            _ => Ok(chain.to_vec()),
        }
    }
}

/// The buffers that are not empty. A readable buffer after a writable one is a fault, and is left out (virtio 1.3
/// §2.7.4.2).
fn sort_out(chain: &[RawDescriptor]) -> (Result<(), ChainFault>, [Vec<GuestRange>; 2]) {
    let is_writable = |d: &&RawDescriptor| d.flags & WRITE != 0;
    let (before, after) = chain.split_at(chain.iter().take_while(|d| !is_writable(d)).count());
    let in_order = after.iter().all(|d| is_writable(&d));
    let buffers = |part: &mut dyn Iterator<Item = &RawDescriptor>| {
        part.filter(|d| d.len_bytes != 0).map(|d| range(d.addr, d.len_bytes)).collect()
    };
    let all = [buffers(&mut before.iter()), buffers(&mut after.iter().filter(is_writable))];
    (in_order.then_some(()).ok_or(ChainFault::ReadableAfterWritable), all)
}

fn pop(device: &mut DeviceQueue, chain: &mut Chain) -> Result<Popped, TestCaseError> {
    let result = device.pop(chain);
    let buffers = [chain.readable().to_vec(), chain.writable().to_vec()];
    let bytes = |part: &[GuestRange]| part.iter().map(|range| u64::from(range.len_bytes)).sum::<u64>();
    prop_assert_eq!(chain.readable_bytes(), bytes(&buffers[0]));
    prop_assert_eq!(chain.writable_bytes(), bytes(&buffers[1]));
    prop_assert_eq!(chain.count(), buffers[0].len() + buffers[1].len());
    Ok((result, buffers))
}

/// The position of a packed ring after this many descriptors, or of a split ring after this many heads.
fn position(ring: &Ring, taken: u16) -> u16 {
    let (at, queue_size) = (ring.first_slot + taken, ring.queue_size);
    match ring.features.packed {
        false => taken,
        true if at < queue_size => at | 0x8000,
        true => at - queue_size,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 4000 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn chains_are_read_as_the_specification_says(ring in rings()) {
        let (view, log) = (view(), Region::from_memfd(GuestAddress(0), 4096).unwrap());
        let log = LogArea::new(Arc::new(GuestMemory::new(vec![Arc::new(log)]).unwrap()), 0, ring.queue_size);
        let base = if ring.features.packed { FRESH_BASE } else { 0 };
        let start = || {
            let started = DeviceQueue::with_log(&view, layout(ring.queue_size), ring.features, base, &log);
            started.unwrap().with_indirect_limit(ring.indirect_limit)
        };
        let mut device = start();
        ring.write(&view, &mut device);
        let (mut reader, mut taken) = (Reader::new(&ring, &view), Vec::<Popped>::new());
        let mut chain = Chain::with_capacity(ring.capacity);
        loop {
            let expected = reader.pop();
            let popped = pop(&mut device, &mut chain)?;
            prop_assert_eq!(&popped.0, &expected.0);
            if matches!(popped.0, Ok(None) | Err(PopError::Ring(_))) {
                break;
            }
            prop_assert_eq!(&popped, &expected);
            prop_assert_eq!(device.position() as u16, position(&ring, reader.taken));
            taken.push(popped);
        }
        drop(device);
        let mut successor = start();
        prop_assert_eq!(usize::from(successor.to_redo()), taken.len());
        for before in taken {
            prop_assert_eq!(pop(&mut successor, &mut chain)?, before);
        }
    }
}
