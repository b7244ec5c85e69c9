//! The device half compared with the `virtio-queue` crate (the oracle) on the same bytes: well-formed and malformed
//! rings.
//!
//! If we take a chain, the oracle yields the same buffers. Chains that only one of the two takes:
//!
//! - we refuse the chain and the oracle continues: a readable descriptor after a writable one; a table without the
//!   feature; INDIRECT with NEXT; a table larger than the queue; direct and indirect descriptors that together exceed
//!   the queue size; a head outside the table (the oracle yields an empty chain);
//! - the oracle stops and we take the chain: chains of more than 2^32 bytes (our sums are 64 bits wide, and the
//!   capacity check refuses such a chain).
#![cfg(not(miri))] // the oracle maps the files itself
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::fs::File;
use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, MemoryView, Region};
use proptest::prelude::*;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use virtqueue::split::{RawDescriptor, RawRing};
use virtqueue::{Chain, ChainFault, DeviceQueue, IndirectFault, PopError, RingFault, RingFeatures};
use vm_memory::{FileOffset, GuestMemoryMmap};

use crate::rig::tables::tables;
use crate::rig::*;

/// One memory, mapped by both devices.
struct Shared {
    ours: MemoryView,
    theirs: GuestMemoryMmap<()>,
}

fn shared() -> Shared {
    let regions: Vec<Arc<Region>> = [(0, SECOND_REGION), (SECOND_REGION, END - SECOND_REGION)]
        .map(|(addr, size)| Arc::new(Region::from_memfd(GuestAddress(addr), size).unwrap()))
        .into();
    let mapped = |region: &Arc<Region>| {
        let file = File::from(region.fd().try_clone().unwrap());
        let spec = region.spec();
        (vm_memory::GuestAddress(spec.guest_addr.0), spec.size_bytes as usize, Some(FileOffset::new(file, 0)))
    };
    let files: Vec<_> = regions.iter().map(mapped).collect();
    let theirs = GuestMemoryMmap::from_ranges_with_files(files).unwrap();
    Shared { ours: MemoryView::new(Arc::new(GuestMemory::new(regions).unwrap())), theirs }
}

fn oracle(queue_size: u16, position: u16, event_idx: bool) -> Queue {
    let at = layout(queue_size);
    let mut queue = Queue::new(queue_size).unwrap();
    queue.try_set_desc_table_address(vm_memory::GuestAddress(at.descriptors.0)).unwrap();
    queue.try_set_avail_ring_address(vm_memory::GuestAddress(at.avail.0)).unwrap();
    queue.try_set_used_ring_address(vm_memory::GuestAddress(at.used.0)).unwrap();
    queue.set_next_avail(position);
    queue.set_next_used(position);
    queue.set_event_idx(event_idx);
    queue.set_ready(true);
    queue
}

/// What the oracle reads from a chain.
#[derive(Debug)]
struct Walked {
    /// Address, length, and whether the descriptor is writable.
    descriptors: Vec<(u64, u32, bool)>,
    /// Whether the last descriptor had no successor: then the oracle saw no fault.
    complete: bool,
}

impl Walked {
    fn not_empty(&self, writable: bool) -> Vec<(u64, u32)> {
        let kept = self.descriptors.iter().filter(|d| d.1 != 0 && d.2 == writable);
        kept.map(|d| (d.0, d.1)).collect()
    }

    fn is_readable_after_writable(&self) -> bool {
        self.descriptors.windows(2).any(|pair| pair[0].2 && !pair[1].2)
    }
}

fn walk(chain: virtio_queue::DescriptorChain<&GuestMemoryMmap<()>>) -> Walked {
    let all: Vec<_> = chain.collect();
    let complete = all.last().is_some_and(|last| last.flags() & NEXT == 0);
    let descriptors = all.iter().map(|d| (d.addr().0, d.len(), d.flags() & WRITE != 0)).collect();
    Walked { descriptors, complete }
}

fn pairs(ranges: &[guest_mem::GuestRange]) -> Vec<(u64, u32)> {
    ranges.iter().map(|range| (range.addr, range.len_bytes)).collect()
}

/// Whether `fault` is one that the oracle does not check, or one that it reports as well.
fn explains(fault: &ChainFault, oracle: &Walked, queue_size: u16, features: RingFeatures) -> bool {
    match fault {
        ChainFault::ReadableAfterWritable => oracle.is_readable_after_writable() || !oracle.complete,
        ChainFault::Indirect(IndirectFault::NotNegotiated) => !features.indirect,
        ChainFault::Indirect(IndirectFault::WithNext | IndirectFault::TooLarge { .. }) => true,
        ChainFault::TooLong { limit } => {
            *limit == queue_size && (!oracle.complete || oracle.descriptors.len() > usize::from(queue_size))
        }
        ChainFault::NextOutOfRange { .. } | ChainFault::Indirect(_) => !oracle.complete,
    }
}

fn compare_chain(
    ours: &Result<Option<u16>, PopError>,
    chain: &Chain,
    oracle: &Walked,
    queue_size: u16,
    features: RingFeatures,
) -> Result<(), TestCaseError> {
    match ours {
        Ok(Some(_)) => {
            let total_bytes = chain.readable_bytes() + chain.writable_bytes();
            if total_bytes <= u64::from(u32::MAX) {
                prop_assert!(oracle.complete, "we took what the oracle did not: {:?}", oracle);
                prop_assert_eq!(pairs(chain.readable()), oracle.not_empty(false));
                prop_assert_eq!(pairs(chain.writable()), oracle.not_empty(true));
            }
            Ok(())
        }
        Err(PopError::Chain { fault, .. }) => {
            prop_assert!(explains(fault, oracle, queue_size, features), "{fault} next to {:?}", oracle);
            Ok(())
        }
        other => Err(TestCaseError::fail(format!("oracle popped a chain, we {other:?}"))),
    }
}

/// Sizes, tables and heads of a ring that is mostly valid and has some faults.
#[derive(Clone, Debug)]
struct Ring {
    queue_size: u16,
    position: u16,
    features: RingFeatures,
    table: Vec<RawDescriptor>,
    /// Tables at [`TABLE`], one after another. Descriptors may refer to the middle of a table.
    indirect: Vec<RawDescriptor>,
    heads: Vec<u16>,
    avail_idx: u16,
}

fn rings() -> impl Strategy<Value = Ring> {
    let size = prop_oneof![Just(2_u16), Just(4), Just(8), Just(16)];
    let position = prop_oneof![Just(0_u16), any::<u16>(), 65_520..=u16::MAX];
    (size, position, any::<bool>(), prop::bool::weighted(0.8)).prop_flat_map(
        |(queue_size, position, event_idx, indirect)| {
            let head = prop_oneof![20 => 0..queue_size, 1 => any::<u16>()];
            let heads = prop::collection::vec(head, usize::from(queue_size));
            let ahead = prop_oneof![8 => 0..=queue_size, 1 => any::<u16>()];
            (tables(queue_size), heads, ahead).prop_map(move |((table, indirect_table), heads, ahead)| Ring {
                queue_size,
                position,
                features: RingFeatures { event_idx, indirect, packed: false },
                table,
                indirect: indirect_table,
                heads,
                avail_idx: position.wrapping_add(ahead),
            })
        },
    )
}

impl Ring {
    fn write(&self, view: &MemoryView) {
        let raw = RawRing::new(view, layout(self.queue_size)).unwrap();
        (0..).zip(&self.table).for_each(|(index, &d)| raw.set_descriptor(index, d));
        for (index, &descriptor) in (0..).zip(&self.indirect) {
            raw.set_table_descriptor(TABLE, index, descriptor).unwrap();
            raw.set_table_descriptor(SECOND_REGION - 24, index, descriptor).unwrap();
        }
        (0..)
            .zip(&self.heads)
            .for_each(|(at, &head)| raw.set_avail_entry(self.position.wrapping_add(at), head));
        raw.set_avail_idx(self.avail_idx);
        raw.set_used_idx(self.position);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn ring_is_read_as_the_oracle_reads_it(ring in rings()) {
        let memory = shared();
        ring.write(&memory.ours);
        let mut ours = DeviceQueue::new(&memory.ours, layout(ring.queue_size), ring.features, 0).unwrap();
        let mut theirs = oracle(ring.queue_size, ring.position, ring.features.event_idx);
        let mut chain = Chain::with_capacity(ring.queue_size);
        loop {
            let popped = ours.pop(&mut chain);
            let Ok(mut iter) = theirs.iter(&memory.theirs) else {
                let jumped = matches!(popped, Err(PopError::Ring(RingFault::AvailIndexJump { .. })));
                prop_assert!(jumped, "oracle saw a jump, we {popped:?}");
                break;
            };
            let Some(their_chain) = iter.next() else {
                prop_assert_eq!(popped, Ok(None));
                break;
            };
            let their_head = their_chain.head_index();
            if their_head >= ring.queue_size {
                let (head, queue_size) = (their_head, ring.queue_size);
                prop_assert_eq!(popped, Err(RingFault::HeadOutOfRange { head, queue_size }.into()));
                break;
            }
            let our_head = match &popped {
                Ok(head) => *head,
                Err(PopError::Chain { tag, .. }) => Some(*tag),
                Err(PopError::Ring(_)) => None,
            };
            prop_assert_eq!(our_head, Some(their_head));
            compare_chain(&popped, &chain, &walk(their_chain), ring.queue_size, ring.features)?;
            prop_assert_eq!(ours.position(), u32::from(theirs.next_avail()));
        }
    }

    #[test]
    fn notifications_are_decided_as_the_oracle_decides(
        position in prop_oneof![any::<u16>(), 65_500..=u16::MAX],
        // Number of used entries, where the driver wants a notification, whether to compare `needs_notification`.
        steps in prop::collection::vec((0_u16..6, -8_i16..8, any::<bool>()), 1..40),
    ) {
        let memory = shared();
        let raw = RawRing::new(&memory.ours, layout(8)).unwrap();
        raw.set_used_idx(position);
        let mut ours = DeviceQueue::new(&memory.ours, layout(8), EVENT_IDX, 0).unwrap();
        let mut theirs = oracle(8, position, true);
        for (count, ahead, ask) in steps {
            for tag in 0..count {
                theirs.add_used(&memory.theirs, tag, 7).unwrap();
                ours.push_used(tag, 7);
            }
            ours.publish();
            prop_assert_eq!(raw.used_idx(), theirs.next_used());
            raw.set_used_event(theirs.next_used().wrapping_add_signed(ahead));
            if ask {
                prop_assert_eq!(ours.needs_notification(), theirs.needs_notification(&memory.theirs).unwrap());
            }
        }
    }

    #[test]
    fn kicks_are_asked_for_as_the_oracle_asks(
        position in any::<u16>(),
        available in 0_u16..=8,
        event_idx in any::<bool>(),
    ) {
        let memory = shared();
        let raw = RawRing::new(&memory.ours, layout(8)).unwrap();
        raw.set_used_idx(position);
        raw.set_avail_idx(position.wrapping_add(available));
        let features = RingFeatures { event_idx, indirect: false, packed: false };
        let mut ours = DeviceQueue::new(&memory.ours, layout(8), features, 0).unwrap();
        let mut theirs = oracle(8, position, event_idx);
        theirs.disable_notification(&memory.theirs).unwrap();
        let off = raw.used_flags();
        let their_answer = theirs.enable_notification(&memory.theirs).unwrap();
        let on = (raw.used_flags(), raw.avail_event());
        raw.set_used_idx(position);
        ours.disable_kicks();
        prop_assert_eq!(raw.used_flags(), off);
        prop_assert_eq!(ours.enable_kicks(), Ok(their_answer));
        prop_assert_eq!((raw.used_flags(), raw.avail_event()), on);
    }
}
