//! The packed device half against a driver that may break any rule: which chains the device takes, refuses and answers.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::sync::Arc;

use guest_mem::{AccessError, GuestAddress, GuestMemory, MemoryView};
use virtqueue::packed::{FRESH_BASE, RawDescriptor};
use virtqueue::{ChainFault, DeviceQueue, IndirectFault, PopError, RingFault, RingLayout, RingPart};

use crate::rig::*;

const AVAIL: u16 = RawDescriptor::AVAIL;
const USED: u16 = RawDescriptor::USED;
/// `RING_EVENT_FLAGS_*` (virtio 1.3 §2.8.10).
const ENABLE: u16 = 0;
const DISABLE: u16 = 1;
const AT: u16 = 2;

/// The fault of a chain of these descriptors, the last of which has id 3.
fn fault_of(queue_size: u16, descriptors: &[RawDescriptor]) -> ChainFault {
    let mut rig = packed_rig(queue_size, INDIRECT_DESC);
    rig.driver.offer(descriptors);
    match rig.device.pop(&mut rig.chain) {
        Err(PopError::Chain { tag: 3, fault }) => fault,
        other => panic!("no chain fault but {other:?}"),
    }
}

fn ring_fault_of(rig: &mut PackedRig) -> RingFault {
    match rig.device.pop(&mut rig.chain) {
        Err(PopError::Ring(fault)) => fault,
        other => panic!("no ring fault but {other:?}"),
    }
}

#[test]
fn chain_of_three_descriptors_is_taken_with_the_id_of_the_last() {
    let mut rig = packed_rig(8, PLAIN);
    rig.driver.offer(&[
        packed_desc(0x10_000, 16, 9, NEXT),
        packed_desc(0x11_000, 4096, 9, NEXT | WRITE),
        packed_desc(0x12_000, 1, 5, WRITE),
    ]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(5)));
    assert_eq!(rig.chain.readable(), [range(0x10_000, 16)]);
    assert_eq!(rig.chain.writable(), [range(0x11_000, 4096), range(0x12_000, 1)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(None));
    assert_eq!(rig.device.position(), 0x8000_8003);
}

#[test]
fn chain_that_crosses_the_end_of_the_ring_is_taken_whole_and_toggles_the_wrap_counter() {
    let mut rig = packed_rig(4, PLAIN);
    rig.go_round(3);
    rig.driver.offer(&[packed_desc(0x1, 16, 1, NEXT), packed_desc(0x2, 1, 1, WRITE)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(1)));
    assert_eq!((rig.chain.readable(), rig.chain.writable()), (&[range(1, 16)][..], &[range(2, 1)][..]));
    assert_eq!(rig.device.position(), 0x8003_0001);
}

#[test]
fn descriptors_of_the_lap_before_are_not_taken_again() {
    let mut rig = packed_rig(2, PLAIN);
    rig.driver.offer(&[packed_desc(0x1, 16, 0, 0)]);
    rig.driver.offer(&[packed_desc(0x2, 16, 1, 0)]);
    let taken = [(); 3].map(|()| rig.device.pop(&mut rig.chain));
    assert_eq!(taken, [Ok(Some(0)), Ok(Some(1)), Ok(None)]);
}

#[test]
fn zero_length_descriptors_are_walked_but_not_kept() {
    let mut rig = packed_rig(8, PLAIN);
    rig.driver.offer(&[
        packed_desc(0x1, 0, 0, NEXT),
        packed_desc(0x2, 7, 0, NEXT),
        packed_desc(0, 0, 0, WRITE),
    ]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!((rig.chain.readable(), rig.chain.writable()), (&[range(2, 7)][..], &[][..]));
}

#[test]
fn indirect_table_is_walked_entry_by_entry_and_only_write_counts() {
    let mut rig = packed_rig(8, INDIRECT_DESC);
    rig.fill_table(
        TABLE,
        &[
            packed_desc(0x1, 16, 77, INDIRECT | USED),
            packed_desc(0x2, 512, 0, WRITE | NEXT | AVAIL),
            packed_desc(0x3, 1, 0, WRITE),
        ],
    );
    rig.driver.offer(&[packed_desc(TABLE, 48, 6, INDIRECT | WRITE)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(6)));
    assert_eq!(rig.chain.readable(), [range(1, 16)]);
    assert_eq!(rig.chain.writable(), [range(2, 512), range(3, 1)]);
}

#[test]
fn table_across_adjacent_regions_and_unaligned_is_walked() {
    let mut rig = packed_rig(8, INDIRECT_DESC);
    let table = SECOND_REGION - 19;
    rig.fill_table(table, &[packed_desc(0x1, 16, 0, 0), packed_desc(0x2, 512, 0, WRITE)]);
    rig.driver.offer(&[packed_desc(table, 32, 0, INDIRECT)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!((rig.chain.readable(), rig.chain.writable()), (&[range(1, 16)][..], &[range(2, 512)][..]));
}

#[test]
fn table_as_long_as_the_limit_is_taken_and_a_longer_one_refused() {
    let mut rig = packed_rig(2, INDIRECT_DESC);
    rig.device = rig.device.with_indirect_limit(5);
    rig.driver.offer(&[packed_desc(TABLE, 5 * 16, 0, INDIRECT)]);
    rig.driver.offer(&[packed_desc(TABLE, 6 * 16, 1, INDIRECT)]);
    let taken = rig.device.pop(&mut rig.chain);
    let refused = rig.device.pop(&mut rig.chain);
    let fault = IndirectFault::TooLarge { entries: 6, limit: 5 }.into();
    assert_eq!((taken, refused), (Ok(Some(0)), Err(PopError::Chain { tag: 1, fault })));
}

#[test]
fn table_longer_than_the_queue_is_refused() {
    let fault = fault_of(4, &[packed_desc(TABLE, 5 * 16, 3, INDIRECT)]);
    assert_eq!(fault, IndirectFault::TooLarge { entries: 5, limit: 4 }.into());
}

#[test]
fn tables_that_are_empty_broken_or_not_in_memory_are_refused() {
    let unmapped = |addr, len_bytes| IndirectFault::Unmapped(AccessError::Unmapped { addr, len_bytes });
    let of = |addr, len_bytes| fault_of(4, &[packed_desc(addr, len_bytes, 3, INDIRECT)]);
    assert_eq!(of(TABLE, 0), IndirectFault::Empty.into());
    assert_eq!(of(TABLE, 17), IndirectFault::Length { len_bytes: 17 }.into());
    assert_eq!(of(END, 16), unmapped(END, 16).into());
    assert_eq!(of(u64::MAX - 15, 32), unmapped(u64::MAX - 15, 32).into());
}

#[test]
fn table_without_the_feature_is_refused() {
    let mut rig = packed_rig(4, PLAIN);
    rig.driver.offer(&[packed_desc(TABLE, 16, 3, INDIRECT)]);
    let fault = IndirectFault::NotNegotiated.into();
    assert_eq!(rig.device.pop(&mut rig.chain), Err(PopError::Chain { tag: 3, fault }));
}

#[test]
fn table_in_one_chain_with_direct_descriptors_is_refused_and_the_whole_chain_skipped() {
    let (table, direct) = (packed_desc(TABLE, 16, 3, INDIRECT), packed_desc(0x1, 16, 3, 0));
    let next = |d: RawDescriptor| RawDescriptor { flags: d.flags | NEXT, ..d };
    assert_eq!(fault_of(4, &[next(table), direct]), IndirectFault::Mixed.into());
    assert_eq!(fault_of(4, &[next(direct), table]), IndirectFault::Mixed.into());
    let mut rig = packed_rig(4, INDIRECT_DESC);
    rig.driver.offer(&[next(table), next(direct), direct]);
    rig.driver.offer(&[packed_desc(0x9, 1, 0, 0)]);
    assert!(rig.device.pop(&mut rig.chain).is_err());
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!(rig.chain.readable(), [range(9, 1)]);
}

#[test]
fn readable_descriptor_after_a_writable_one_is_refused_with_its_buffers_known() {
    let mut rig = packed_rig(4, PLAIN);
    rig.driver.offer(&[packed_desc(0x1, 1, 0, NEXT | WRITE), packed_desc(0x2, 1, 2, 0)]);
    let fault = ChainFault::ReadableAfterWritable;
    assert_eq!(rig.device.pop(&mut rig.chain), Err(PopError::Chain { tag: 2, fault }));
    assert_eq!(rig.chain.writable(), [range(1, 1)]);
}

#[test]
fn chain_as_long_as_the_queue_is_taken() {
    let mut rig = packed_rig(4, PLAIN);
    let (next, last) = (packed_desc(0, 1, 0, NEXT), packed_desc(0, 1, 0, 0));
    rig.driver.offer(&[next, next, next, last]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!(rig.chain.readable().len(), 4);
    assert_eq!(rig.device.position(), 0x8000_0000);
}

#[test]
fn chain_without_an_end_is_a_ring_fault_and_is_not_taken() {
    let mut rig = packed_rig(4, PLAIN);
    rig.driver.offer(&[packed_desc(0, 1, 0, NEXT); 4]);
    assert_eq!(ring_fault_of(&mut rig), RingFault::EndlessChain { slot: 0, room: 4 });
    assert_eq!(rig.device.position(), FRESH_BASE);
}

#[test]
fn chain_that_runs_into_descriptors_in_flight_is_a_ring_fault() {
    let mut rig = packed_rig(4, PLAIN);
    let next = packed_desc(0, 1, 0, NEXT);
    rig.driver.offer(&[next, packed_desc(0, 1, 0, 0)]);
    rig.device.pop(&mut rig.chain).unwrap();
    rig.driver.offer(&[next, next, packed_desc(0, 1, 1, 0)]);
    assert_eq!(ring_fault_of(&mut rig), RingFault::EndlessChain { slot: 2, room: 2 });
}

#[test]
fn chain_offered_while_the_whole_ring_is_in_flight_is_a_ring_fault() {
    let mut rig = packed_rig(2, PLAIN);
    rig.driver.offer(&[packed_desc(0, 1, 0, NEXT), packed_desc(0, 1, 0, 0)]);
    rig.device.pop(&mut rig.chain).unwrap();
    rig.driver.offer(&[packed_desc(0, 1, 1, 0)]);
    assert_eq!(ring_fault_of(&mut rig), RingFault::EndlessChain { slot: 0, room: 0 });
}

#[test]
fn id_not_below_the_queue_size_is_a_ring_fault_and_is_not_taken() {
    let mut rig = packed_rig(4, PLAIN);
    rig.driver.offer(&[packed_desc(0, 1, 4, 0)]);
    assert_eq!(ring_fault_of(&mut rig), RingFault::IdOutOfRange { id: 4, queue_size: 4 });
    assert_eq!(rig.device.position(), FRESH_BASE);
}

#[test]
fn id_that_is_in_flight_already_is_a_ring_fault() {
    let mut rig = packed_rig(4, PLAIN);
    rig.driver.offer(&[packed_desc(0, 1, 2, 0)]);
    rig.driver.offer(&[packed_desc(0, 1, 2, 0)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(2)));
    assert_eq!(ring_fault_of(&mut rig), RingFault::IdInFlight { id: 2 });
}

#[test]
fn id_may_come_again_once_it_was_used() {
    let mut rig = packed_rig(2, PLAIN);
    rig.go_round(9);
    assert_eq!(rig.device.position(), 0x8001_8001);
}

#[test]
fn available_tells_whether_there_is_a_chain() {
    let mut rig = packed_rig(4, PLAIN);
    let before = rig.device.available();
    rig.driver.offer(&[packed_desc(0, 1, 0, 0)]);
    rig.driver.offer(&[packed_desc(0, 1, 1, 0)]);
    assert_eq!((before, rig.device.available()), (Ok(0), Ok(1)));
}

#[test]
fn chain_given_back_is_popped_again_whole() {
    let mut rig = packed_rig(4, PLAIN);
    rig.go_round(3);
    rig.driver.offer(&[packed_desc(0x1, 16, 1, NEXT), packed_desc(0x2, 1, 1, WRITE)]);
    let first = rig.device.pop(&mut rig.chain);
    rig.device.unpop();
    let position = rig.device.position();
    let again = rig.device.pop(&mut rig.chain);
    assert_eq!((first, position, again), (Ok(Some(1)), 0x8003_8003, Ok(Some(1))));
    assert_eq!((rig.chain.readable(), rig.device.position()), (&[range(1, 16)][..], 0x8003_0001));
}

#[test]
#[should_panic(expected = "a popped chain may be pushed or put back only once")]
fn owner_that_uses_a_chain_twice_is_stopped() {
    let mut rig = packed_rig(4, PLAIN);
    rig.driver.offer(&[packed_desc(0, 1, 2, 0)]);
    rig.device.pop(&mut rig.chain).unwrap();
    rig.device.push_used(2, 0);
    rig.device.push_used(2, 0);
}

#[test]
fn used_descriptor_goes_where_the_driver_looks_and_skips_the_chain() {
    let mut rig = packed_rig(8, PLAIN);
    rig.driver.offer(&[packed_desc(0xa, 1, 7, NEXT), packed_desc(0xb, 1, 7, WRITE)]);
    rig.driver.offer(&[packed_desc(0xc, 1, 4, WRITE)]);
    let tags = [(); 2].map(|()| rig.device.pop(&mut rig.chain).unwrap().unwrap());
    rig.device.push_used(tags[1], 513);
    rig.device.push_used(tags[0], 0);
    let before = rig.driver.descriptor(0);
    let published = rig.device.publish();
    assert_eq!((before.flags, published, rig.device.publish()), (NEXT | AVAIL, true, false));
    assert_eq!(rig.driver.descriptor(0), packed_desc(0xa, 513, 4, AVAIL | USED | WRITE));
    assert_eq!(rig.driver.descriptor(1), packed_desc(0xb, 0, 7, AVAIL | USED));
    assert_eq!(rig.device.position(), 0x8003_8003);
}

#[test]
fn used_descriptors_of_the_second_lap_have_clear_flags() {
    let mut rig = packed_rig(2, PLAIN);
    rig.go_round(3);
    assert_eq!(rig.driver.descriptor(0), packed_desc(0x1, 0, 0, 0));
    assert_eq!(rig.driver.descriptor(1).flags, AVAIL | USED);
}

#[test]
fn queue_goes_on_after_an_unusable_chain() {
    let mut rig = packed_rig(4, PLAIN);
    rig.driver.offer(&[packed_desc(TABLE, 16, 3, INDIRECT)]);
    rig.driver.offer(&[packed_desc(0x1, 16, 2, 0)]);
    assert!(rig.device.pop(&mut rig.chain).is_err());
    assert_eq!((rig.chain.readable(), rig.chain.writable()), (&[][..], &[][..]));
    rig.device.push_used(3, 0);
    rig.device.publish();
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(2)));
    assert_eq!(rig.driver.descriptor(0), packed_desc(TABLE, 0, 3, AVAIL | USED));
}

#[test]
fn driver_that_wants_no_events_is_not_notified() {
    let mut rig = packed_rig(4, EVENT_IDX);
    let mut notified = |flags| {
        rig.driver.set_driver_event(0x8003, flags);
        rig.driver.offer(&[packed_desc(0, 1, 0, 0)]);
        let tag = rig.device.pop(&mut rig.chain).unwrap().unwrap();
        rig.device.push_used(tag, 0);
        rig.device.publish();
        rig.device.needs_notification()
    };
    assert_eq!([DISABLE, ENABLE, AT].map(&mut notified), [false, true, false]);
    assert!(notified(AT));
}

#[test]
fn event_position_without_the_feature_counts_as_every_event() {
    let mut rig = packed_rig(4, PLAIN);
    rig.driver.set_driver_event(0x8003, AT);
    rig.driver.offer(&[packed_desc(0, 1, 0, 0)]);
    rig.device.pop(&mut rig.chain).unwrap();
    rig.device.push_used(0, 0);
    rig.device.publish();
    assert!(rig.device.needs_notification());
}

#[test]
fn event_inside_a_chain_of_the_batch_is_notified_once() {
    let mut rig = packed_rig(4, EVENT_IDX);
    rig.go_round(3);
    rig.driver.set_driver_event(0x0000, AT);
    rig.driver.offer(&[packed_desc(0, 1, 0, NEXT), packed_desc(0, 1, 0, 0)]);
    rig.device.pop(&mut rig.chain).unwrap();
    rig.device.push_used(0, 0);
    rig.device.publish();
    assert!(rig.device.needs_notification());
    assert!(!rig.device.needs_notification());
}

#[test]
fn event_is_found_among_batches_that_were_not_decided_for_more_than_a_lap() {
    let mut rig = packed_rig(2, EVENT_IDX);
    rig.driver.set_driver_event(0x8001, AT);
    for _ in 0..5 {
        rig.driver.offer(&[packed_desc(0, 1, 0, 0)]);
        rig.device.pop(&mut rig.chain).unwrap();
        rig.device.push_used(0, 0);
        rig.device.publish();
    }
    assert!(rig.device.needs_notification());
}

#[test]
fn nothing_published_needs_no_notification() {
    let mut rig = packed_rig(4, PLAIN);
    rig.driver.offer(&[packed_desc(0, 1, 0, 0)]);
    rig.device.pop(&mut rig.chain).unwrap();
    rig.device.push_used(0, 0);
    assert!(!rig.device.needs_notification());
}

#[test]
fn kicks_are_armed_at_our_position_with_event_idx_while_something_is_in_flight() {
    let mut rig = packed_rig(4, EVENT_IDX);
    rig.go_round(4);
    rig.driver.offer(&[packed_desc(0, 1, 0, 0)]);
    rig.device.disable_kicks();
    rig.device.pop(&mut rig.chain).unwrap();
    let off = rig.driver.device_event();
    let available = rig.device.enable_kicks();
    assert_eq!((off.1, available, rig.driver.device_event()), (DISABLE, Ok(false), (0x0001, AT)));
}

#[test]
fn all_kicks_are_wanted_with_nothing_in_flight_and_our_position_is_told() {
    let mut rig = packed_rig(4, EVENT_IDX);
    rig.go_round(5);
    rig.device.disable_kicks();
    let available = rig.device.enable_kicks();
    assert_eq!((available, rig.driver.device_event()), (Ok(false), (0x0001, ENABLE)));
}

#[test]
fn kicks_are_switched_off_and_on_without_event_idx() {
    let mut rig = packed_rig(4, PLAIN);
    rig.device.disable_kicks();
    let off = rig.driver.device_event().1;
    let available = rig.device.enable_kicks();
    let on = rig.driver.device_event().1;
    rig.device.disable_kicks();
    let off_again = rig.driver.device_event().1;
    assert_eq!((off, available, on, off_again), (DISABLE, Ok(false), ENABLE, DISABLE));
}

#[test]
fn chain_that_came_while_arming_is_reported() {
    let mut rig = packed_rig(4, EVENT_IDX);
    rig.driver.offer(&[packed_desc(0, 1, 0, 0)]);
    assert_eq!(rig.device.enable_kicks(), Ok(true));
}

#[test]
fn sizes_that_are_no_power_of_two_or_outside_the_limits_are_refused() {
    let refused = |queue_size| DeviceQueue::new(&view(), layout(queue_size), PACKED, FRESH_BASE).unwrap_err();
    let bad = |queue_size| RingFault::BadQueueSize { queue_size, min: 2, max: 1024 };
    let sizes = [0, 1, 3, 1000, 2048, 32768];
    assert_eq!(sizes.map(refused), sizes.map(bad));
}

#[test]
fn misaligned_and_unmapped_parts_are_refused_by_name() {
    let refused = |layout: RingLayout| match DeviceQueue::new(&view(), layout, PACKED, FRESH_BASE) {
        Err(RingFault::Part { part, source }) => (part, source),
        other => panic!("not refused: {other:?}"),
    };
    let misaligned = |addr, align_bytes| AccessError::Misaligned { addr, align_bytes };
    let unmapped = |addr, len_bytes| AccessError::Unmapped { addr, len_bytes };
    let good = layout(8);
    let ring = |addr| RingLayout { descriptors: GuestAddress(addr), ..good };
    let driver = |addr| RingLayout { avail: GuestAddress(addr), ..good };
    let device = |addr| RingLayout { used: GuestAddress(addr), ..good };
    assert_eq!(refused(ring(0x1008)), (RingPart::PackedRing, misaligned(0x1008, 16)));
    assert_eq!(refused(driver(0x8002)), (RingPart::DriverEvent, misaligned(0x8002, 4)));
    assert_eq!(refused(device(0xc001)), (RingPart::DeviceEvent, misaligned(0xc001, 4)));
    assert_eq!(refused(ring(END - 16)), (RingPart::PackedRing, unmapped(END - 16, 128)));
    assert_eq!(refused(driver(END)), (RingPart::DriverEvent, unmapped(END, 4)));
    assert_eq!(refused(device(END)), (RingPart::DeviceEvent, unmapped(END, 4)));
}

#[test]
fn ring_in_a_new_memory_table_goes_on_at_its_position() {
    let mut rig = packed_rig(4, PLAIN);
    rig.driver.offer(&[packed_desc(0x1, 16, 0, 0)]);
    rig.device.pop(&mut rig.chain).unwrap();
    let regions = rig.view.memory().regions();
    let grown = MemoryView::new(Arc::new(GuestMemory::new(regions.to_vec()).unwrap()));
    rig.device.rebind(&grown).unwrap();
    rig.driver.offer(&[packed_desc(0x2, 16, 1, 0)]);
    rig.device.push_used(0, 0);
    rig.device.publish();
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(1)));
    assert_eq!(rig.driver.descriptor(0).flags, AVAIL | USED);
}

#[test]
fn rebinding_to_memory_without_the_ring_is_refused_and_changes_nothing() {
    let mut rig = packed_rig(4, PLAIN);
    let refused = rig.device.rebind(&MemoryView::new(Arc::new(GuestMemory::default()))).unwrap_err();
    rig.driver.offer(&[packed_desc(0x1, 16, 0, 0)]);
    assert!(matches!(refused, RingFault::Part { part: RingPart::PackedRing, .. }));
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
}

#[test]
fn smallest_and_largest_queue_hold_their_full_count_of_chains() {
    let taken = |queue_size: u16| {
        let mut rig = packed_rig(queue_size, PLAIN);
        (0..queue_size).for_each(|id| rig.driver.offer(&[packed_desc(0x1, 16, id, 0)]));
        (0..queue_size).filter(|&id| rig.device.pop(&mut rig.chain) == Ok(Some(id))).count()
    };
    assert_eq!(taken(2), 2);
    assert_eq!(taken(1024), 1024);
}
