//! The device half against a driver that may break any rule: which chains the device takes, which it refuses, and how
//! it reports that.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use guest_mem::{AccessError, GuestAddress, GuestMemory, MemoryView};
use virtqueue::{ChainFault, DeviceQueue, IndirectFault, PopError, RingFault, RingLayout, RingPart};

use crate::rig::*;

fn fault_of(mut rig: Rig) -> ChainFault {
    match rig.device.pop(&mut rig.chain) {
        Err(PopError::Chain { tag: 0, fault }) => fault,
        other => panic!("no chain fault but {other:?}"),
    }
}

fn refused(layout: RingLayout) -> RingFault {
    DeviceQueue::new(&view(), layout, EVENT_IDX, 0).unwrap_err()
}

#[test]
fn chain_of_three_descriptors_is_taken_readable_part_first() {
    let mut rig = rig(8, PLAIN);
    rig.offer_direct(&[
        desc(0x10_000, 16, NEXT, 1),
        desc(0x11_000, 4096, NEXT | WRITE, 2),
        desc(0x12_000, 1, WRITE, 0),
    ]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!(rig.chain.readable(), [range(0x10_000, 16)]);
    assert_eq!(rig.chain.writable(), [range(0x11_000, 4096), range(0x12_000, 1)]);
    assert_eq!((rig.chain.readable_bytes(), rig.chain.writable_bytes()), (16, 4097));
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(None));
}

#[test]
fn zero_length_descriptors_are_walked_but_not_kept() {
    let mut rig = rig(8, PLAIN);
    rig.offer_direct(&[desc(0x10_000, 0, NEXT, 1), desc(0x11_000, 7, NEXT, 2), desc(0, 0, WRITE, 0)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!(rig.chain.readable(), [range(0x11_000, 7)]);
    assert_eq!(rig.chain.writable(), []);
}

#[test]
fn buffer_in_a_gap_is_no_fault_of_the_chain() {
    let mut rig = rig(8, PLAIN);
    rig.offer_direct(&[desc(u64::MAX - 3, 16, WRITE, 0)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!(rig.chain.writable(), [range(u64::MAX - 3, 16)]);
}

#[test]
fn chain_of_four_gib_buffers_is_summed_in_64_bits() {
    let mut rig = rig(2, PLAIN);
    rig.offer_direct(&[desc(0, u32::MAX, NEXT, 1), desc(0, u32::MAX, 0, 0)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!(rig.chain.readable_bytes(), 2 * u64::from(u32::MAX));
}

#[test]
fn indirect_table_is_walked_by_its_next_fields() {
    let mut rig = rig(8, INDIRECT_DESC);
    rig.offer_table(&[desc(0x1, 16, NEXT, 2), desc(0x3, 1, WRITE, 0), desc(0x2, 512, NEXT | WRITE, 1)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!(rig.chain.readable(), [range(1, 16)]);
    assert_eq!(rig.chain.writable(), [range(2, 512), range(3, 1)]);
}

#[test]
fn direct_descriptors_followed_by_a_table_are_one_chain() {
    let mut rig = rig(8, INDIRECT_DESC);
    rig.fill_table(TABLE, &[desc(0x2, 512, NEXT | WRITE, 1), desc(0x3, 1, WRITE, 0)]);
    rig.offer_direct(&[desc(0x1, 16, NEXT, 1), desc(TABLE, 32, INDIRECT, 0)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!(rig.chain.readable(), [range(1, 16)]);
    assert_eq!(rig.chain.writable(), [range(2, 512), range(3, 1)]);
}

#[test]
fn write_flag_of_the_descriptor_that_names_a_table_is_ignored() {
    let mut rig = rig(8, INDIRECT_DESC);
    rig.fill_table(TABLE, &[desc(0x1, 16, 0, 0)]);
    rig.offer_direct(&[desc(TABLE, 16, INDIRECT | WRITE, 0)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!(rig.chain.readable(), [range(1, 16)]);
}

#[test]
fn table_across_adjacent_regions_and_unaligned_is_walked() {
    let mut rig = rig(8, INDIRECT_DESC);
    let table = SECOND_REGION - 19;
    rig.fill_table(table, &[desc(0x1, 16, NEXT, 1), desc(0x2, 512, NEXT, 2), desc(0x3, 1, WRITE, 0)]);
    rig.offer_direct(&[desc(table, 48, INDIRECT, 0)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!(rig.chain.readable(), [range(1, 16), range(2, 512)]);
    assert_eq!(rig.chain.writable(), [range(3, 1)]);
}

#[test]
fn tables_in_either_region_and_across_are_walked_in_turn() {
    let mut rig = rig(8, INDIRECT_DESC);
    let tables = [SECOND_REGION + 64, TABLE, SECOND_REGION - 16, END - 32];
    for (head, table) in (0..).zip(tables) {
        rig.fill_table(table, &[desc(table, 16, NEXT, 1), desc(table, 1, WRITE, 0)]);
        rig.driver.set_descriptor(head, desc(table, 32, INDIRECT, 0));
        rig.driver.offer(head);
    }
    let taken = tables.map(|_| rig.device.pop(&mut rig.chain).map(|_| rig.chain.readable()[0].addr));
    assert_eq!(taken, tables.map(Ok));
}

#[test]
fn next_outside_the_table_is_refused() {
    let rig = rig(8, PLAIN);
    rig.offer_direct(&[desc(0x1, 16, NEXT, 8)]);
    assert_eq!(fault_of(rig), ChainFault::NextOutOfRange { next: 8, table_entries: 8 });
}

#[test]
fn next_outside_an_indirect_table_is_refused() {
    let rig = rig(8, INDIRECT_DESC);
    rig.offer_table(&[desc(0x1, 16, NEXT, 2), desc(0x1, 16, 0, 0)]);
    assert_eq!(fault_of(rig), ChainFault::NextOutOfRange { next: 2, table_entries: 2 });
}

#[test]
fn looped_chain_is_refused_as_too_long() {
    let rig = rig(4, PLAIN);
    rig.offer_direct(&[desc(0x1, 16, NEXT, 1), desc(0x2, 16, NEXT, 0)]);
    assert_eq!(fault_of(rig), ChainFault::TooLong { limit: 4 });
}

#[test]
fn looped_table_is_refused_as_too_long() {
    let rig = rig(4, INDIRECT_DESC);
    rig.offer_table(&[desc(0x1, 16, NEXT, 0)]);
    assert_eq!(fault_of(rig), ChainFault::TooLong { limit: 4 });
}

#[test]
fn chain_as_long_as_the_queue_is_taken() {
    let mut rig = rig(4, PLAIN);
    rig.offer_direct(&[desc(0, 1, NEXT, 1), desc(0, 1, NEXT, 2), desc(0, 1, NEXT, 3), desc(0, 1, 0, 0)]);
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
    assert_eq!(rig.chain.readable().len(), 4);
}

#[test]
fn direct_and_indirect_descriptors_together_are_bounded_by_the_queue_size() {
    let rig = rig(2, INDIRECT_DESC);
    rig.fill_table(TABLE, &[desc(0, 1, NEXT, 1), desc(0, 1, 0, 0)]);
    rig.offer_direct(&[desc(0, 1, NEXT, 1), desc(TABLE, 32, INDIRECT, 0)]);
    assert_eq!(fault_of(rig), ChainFault::TooLong { limit: 2 });
}

#[test]
fn readable_descriptor_after_a_writable_one_is_refused() {
    let rig = rig(4, PLAIN);
    rig.offer_direct(&[desc(0, 1, NEXT | WRITE, 1), desc(0, 1, 0, 0)]);
    assert_eq!(fault_of(rig), ChainFault::ReadableAfterWritable);
}

#[test]
fn indirect_descriptor_without_the_feature_is_refused() {
    let rig = rig(4, PLAIN);
    rig.offer_table(&[desc(0, 1, 0, 0)]);
    assert_eq!(fault_of(rig), IndirectFault::NotNegotiated.into());
}

#[test]
fn table_inside_a_table_is_refused() {
    let rig = rig(4, INDIRECT_DESC);
    rig.offer_table(&[desc(TABLE, 16, INDIRECT, 0)]);
    assert_eq!(fault_of(rig), IndirectFault::Nested.into());
}

#[test]
fn indirect_descriptor_with_a_next_one_is_refused() {
    let rig = rig(4, INDIRECT_DESC);
    rig.offer_direct(&[desc(TABLE, 16, INDIRECT | NEXT, 1), desc(0, 1, 0, 0)]);
    assert_eq!(fault_of(rig), IndirectFault::WithNext.into());
}

#[test]
fn empty_table_is_refused() {
    let rig = rig(4, INDIRECT_DESC);
    rig.offer_direct(&[desc(TABLE, 0, INDIRECT, 0)]);
    assert_eq!(fault_of(rig), IndirectFault::Empty.into());
}

#[test]
fn table_of_broken_length_is_refused() {
    let rig = rig(4, INDIRECT_DESC);
    rig.offer_direct(&[desc(TABLE, 17, INDIRECT, 0)]);
    assert_eq!(fault_of(rig), IndirectFault::Length { len_bytes: 17 }.into());
}

#[test]
fn table_with_more_entries_than_the_queue_is_refused() {
    let rig = rig(4, INDIRECT_DESC);
    rig.offer_direct(&[desc(TABLE, 5 * 16, INDIRECT, 0)]);
    assert_eq!(fault_of(rig), IndirectFault::TooLarge { entries: 5, limit: 4 }.into());
}

#[test]
fn limit_that_is_not_the_queues_is_not_called_so() {
    let faults: [ChainFault; 2] =
        [ChainFault::TooLong { limit: 1024 }, IndirectFault::TooLarge { entries: 2000, limit: 1024 }.into()];
    assert_eq!(
        faults.map(|fault| fault.to_string()),
        [
            "descriptor chain is longer than the 1024 descriptors allowed",
            "indirect table has 2000 entries, more than the 1024 descriptors allowed",
        ]
    );
}

#[test]
fn table_of_65_535_entries_is_refused() {
    let rig = rig(1024, INDIRECT_DESC);
    rig.offer_direct(&[desc(TABLE, 65_535 * 16, INDIRECT, 0)]);
    assert_eq!(fault_of(rig), IndirectFault::TooLarge { entries: 65_535, limit: 1024 }.into());
}

#[test]
fn table_in_a_gap_is_refused() {
    let rig = rig(4, INDIRECT_DESC);
    rig.offer_direct(&[desc(END, 16, INDIRECT, 0)]);
    let unmapped = AccessError::Unmapped { addr: END, len_bytes: 16 };
    assert_eq!(fault_of(rig), IndirectFault::Unmapped(unmapped).into());
}

#[test]
fn table_that_wraps_the_address_space_is_refused() {
    let rig = rig(4, INDIRECT_DESC);
    rig.offer_direct(&[desc(u64::MAX - 15, 32, INDIRECT, 0)]);
    let unmapped = AccessError::Unmapped { addr: u64::MAX - 15, len_bytes: 32 };
    assert_eq!(fault_of(rig), IndirectFault::Unmapped(unmapped).into());
}

#[test]
fn queue_goes_on_after_an_unusable_chain() {
    let mut rig = rig(4, PLAIN);
    rig.offer_direct(&[desc(0, 1, NEXT, 9), desc(0x1, 16, 0, 0)]);
    rig.driver.offer(1);
    let unusable = rig.device.pop(&mut rig.chain);
    rig.device.push_used(0, 0);
    let good = rig.device.pop(&mut rig.chain);
    rig.device.publish();
    assert!(matches!(unusable, Err(PopError::Chain { tag: 0, .. })));
    assert_eq!(good, Ok(Some(1)));
    assert_eq!(rig.chain.readable(), [range(1, 16)]);
    assert_eq!((rig.driver.used_idx(), rig.driver.used_entry(0)), (1, (0, 0)));
}

#[test]
fn chain_that_failed_half_way_leaves_no_buffers_behind() {
    let mut rig = rig(4, PLAIN);
    rig.offer_direct(&[desc(0, 1, NEXT, 1), desc(0, 1, NEXT, 9)]);
    assert!(rig.device.pop(&mut rig.chain).is_err());
    assert_eq!((rig.chain.readable(), rig.chain.readable_bytes()), (&[][..], 0));
}

#[test]
fn available_index_beyond_the_queue_size_is_a_ring_fault_everywhere() {
    let mut rig = rig(4, PLAIN);
    rig.driver.set_avail_idx(5);
    let jump = RingFault::AvailIndexJump { avail_idx: 5, next_avail: 0, queue_size: 4 };
    assert_eq!(rig.device.available(), Err(jump.clone()));
    assert_eq!(rig.device.enable_kicks(), Err(jump.clone()));
    assert_eq!(rig.device.pop(&mut rig.chain), Err(PopError::Ring(jump)));
}

#[test]
fn available_index_that_goes_back_is_a_ring_fault() {
    let mut rig = rig_at(7, 4, PLAIN);
    rig.driver.set_avail_idx(6);
    let jump = RingFault::AvailIndexJump { avail_idx: 6, next_avail: 7, queue_size: 4 };
    assert_eq!(rig.device.pop(&mut rig.chain), Err(PopError::Ring(jump)));
}

#[test]
fn full_ring_of_available_chains_is_no_jump() {
    let rig = rig_at(u16::MAX, 4, PLAIN);
    rig.driver.set_avail_idx(3);
    assert_eq!(rig.device.available(), Ok(4));
}

#[test]
fn head_outside_the_table_is_a_ring_fault_and_is_not_taken() {
    let mut rig = rig(4, PLAIN);
    rig.driver.offer(4);
    let fault = PopError::Ring(RingFault::HeadOutOfRange { head: 4, queue_size: 4 });
    assert_eq!(rig.device.pop(&mut rig.chain), Err(fault));
    assert_eq!(rig.device.position(), 0);
}

#[test]
fn queue_sizes_that_are_no_power_of_two_or_outside_the_limits_are_refused() {
    let bad = |queue_size| RingFault::BadQueueSize { queue_size, min: 2, max: 1024 };
    assert_eq!(refused(layout(0)), bad(0));
    assert_eq!(refused(layout(1)), bad(1));
    assert_eq!(refused(layout(3)), bad(3));
    assert_eq!(refused(layout(1000)), bad(1000));
    assert_eq!(refused(layout(2048)), bad(2048));
}

#[test]
fn misaligned_ring_parts_are_refused_by_name() {
    let misaligned = |part, addr, align_bytes| RingFault::Part {
        part,
        source: AccessError::Misaligned { addr, align_bytes },
    };
    let good = layout(8);
    let descriptors = RingLayout { descriptors: GuestAddress(0x1008), ..good };
    let avail = RingLayout { avail: GuestAddress(0x8001), ..good };
    let used = RingLayout { used: GuestAddress(0xc002), ..good };
    assert_eq!(refused(descriptors), misaligned(RingPart::Descriptors, 0x1008, 16));
    assert_eq!(refused(avail), misaligned(RingPart::Avail, 0x8001, 2));
    assert_eq!(refused(used), misaligned(RingPart::Used, 0xc002, 4));
}

#[test]
fn unmapped_ring_parts_are_refused_by_name() {
    let unmapped =
        |part, addr, len_bytes| RingFault::Part { part, source: AccessError::Unmapped { addr, len_bytes } };
    let good = layout(8);
    let descriptors = RingLayout { descriptors: GuestAddress(END - 16), ..good };
    let avail = RingLayout { avail: GuestAddress(END), ..good };
    let used = RingLayout { used: GuestAddress(u64::MAX - 3), ..good };
    assert_eq!(refused(descriptors), unmapped(RingPart::Descriptors, END - 16, 128));
    assert_eq!(refused(avail), unmapped(RingPart::Avail, END, 22));
    assert_eq!(refused(used), unmapped(RingPart::Used, u64::MAX - 3, 70));
}

#[test]
fn event_field_past_the_end_of_memory_matters_only_when_negotiated() {
    let at_end = RingLayout { avail: GuestAddress(END - 4 - 2 * 8), ..layout(8) };
    let view = view();
    assert!(DeviceQueue::new(&view, at_end, PLAIN, 0).is_ok());
    assert!(DeviceQueue::new(&view, at_end, EVENT_IDX, 0).is_err());
}

#[test]
fn used_entries_appear_with_the_next_publish() {
    let mut rig = rig(4, PLAIN);
    rig.device.push_used(3, 4097);
    let before = rig.driver.used_idx();
    let published = rig.device.publish();
    assert_eq!((before, published), (0, true));
    assert_eq!((rig.driver.used_idx(), rig.driver.used_entry(0)), (1, (3, 4097)));
    assert!(!rig.device.publish());
}

#[test]
fn positions_wrap_past_65_535() {
    let mut rig = rig_at(u16::MAX, 2, PLAIN);
    rig.driver.set_descriptor(0, desc(0x1, 1, 0, 0));
    rig.driver.set_descriptor(1, desc(0x2, 1, 0, 0));
    rig.driver.offer(1);
    rig.driver.offer(0);
    let heads = [rig.device.pop(&mut rig.chain), rig.device.pop(&mut rig.chain)];
    rig.device.push_used(1, 5);
    rig.device.push_used(0, 6);
    rig.device.publish();
    assert_eq!(heads, [Ok(Some(1)), Ok(Some(0))]);
    assert_eq!((rig.device.position(), rig.driver.used_idx()), (1, 1));
    assert_eq!([rig.driver.used_entry(u16::MAX), rig.driver.used_entry(0)], [(1, 5), (0, 6)]);
}

#[test]
fn chain_given_back_is_popped_again() {
    let mut rig = rig(4, PLAIN);
    rig.offer_direct(&[desc(0x1, 16, 0, 0)]);
    let first = rig.device.pop(&mut rig.chain);
    rig.device.unpop();
    let again = rig.device.pop(&mut rig.chain);
    assert_eq!((first, again), (Ok(Some(0)), Ok(Some(0))));
    assert_eq!(rig.device.position(), 1);
}

#[test]
fn new_queue_goes_on_where_the_ring_says_the_last_device_stopped() {
    let mut rig = rig_at(40, 4, PLAIN);
    rig.offer_direct(&[desc(0x1, 16, 0, 0)]);
    assert_eq!(rig.device.position(), 40);
    assert_eq!(rig.device.available(), Ok(1));
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
}

#[test]
fn driver_with_interrupts_off_by_flag_is_not_notified() {
    let mut rig = rig(4, PLAIN);
    rig.device.push_used(0, 0);
    rig.device.publish();
    rig.driver.set_avail_flags(1);
    let suppressed = rig.device.needs_notification();
    rig.device.push_used(1, 0);
    rig.device.publish();
    rig.driver.set_avail_flags(0);
    assert!(!suppressed);
    assert!(rig.device.needs_notification());
}

#[test]
fn nothing_published_needs_no_notification() {
    let mut rig = rig(4, PLAIN);
    rig.device.push_used(0, 0);
    assert!(!rig.device.needs_notification());
}

#[test]
fn event_index_inside_the_batch_is_notified_once() {
    let mut rig = rig_at(u16::MAX, 4, EVENT_IDX);
    rig.driver.set_used_event(0);
    rig.device.push_used(0, 0);
    rig.device.publish();
    rig.device.push_used(1, 0);
    rig.device.publish();
    assert!(rig.device.needs_notification());
    assert!(!rig.device.needs_notification());
}

#[test]
fn event_index_ahead_of_the_batch_is_not_notified_and_the_flag_is_ignored() {
    let mut rig = rig(4, EVENT_IDX);
    rig.driver.set_used_event(1);
    rig.driver.set_avail_flags(1);
    rig.device.push_used(0, 0);
    rig.device.publish();
    let early = rig.device.needs_notification();
    rig.device.push_used(1, 0);
    rig.device.publish();
    assert!(!early);
    assert!(rig.device.needs_notification());
}

#[test]
fn kicks_are_switched_off_and_on_by_flag_without_event_idx() {
    let mut rig = rig(4, PLAIN);
    rig.device.disable_kicks();
    let off = rig.driver.used_flags();
    let available = rig.device.enable_kicks();
    let on = rig.driver.used_flags();
    rig.device.disable_kicks();
    assert_eq!((off, available, on, rig.driver.used_flags()), (1, Ok(false), 0, 1));
}

#[test]
fn kicks_are_armed_at_our_position_with_event_idx_and_flags_stay_zero() {
    let mut rig = rig_at(9, 4, EVENT_IDX);
    rig.device.disable_kicks();
    let available = rig.device.enable_kicks();
    assert_eq!(available, Ok(false));
    assert_eq!((rig.driver.avail_event(), rig.driver.used_flags()), (9, 0));
}

#[test]
fn chain_that_came_while_arming_is_reported() {
    let mut rig = rig(4, EVENT_IDX);
    rig.driver.offer(0);
    assert_eq!(rig.device.enable_kicks(), Ok(true));
}

#[test]
fn ring_in_a_new_memory_table_goes_on_at_its_position() {
    let mut rig = rig(4, INDIRECT_DESC);
    rig.offer_direct(&[desc(0x1, 16, 0, 0)]);
    rig.device.pop(&mut rig.chain).unwrap();
    let regions = rig.view.memory().regions();
    let grown = MemoryView::new(std::sync::Arc::new(GuestMemory::new(regions.to_vec()).unwrap()));
    rig.device.rebind(&grown).unwrap();
    rig.driver.set_descriptor(1, desc(0x2, 16, 0, 0));
    rig.driver.offer(1);
    rig.device.push_used(0, 0);
    rig.device.publish();
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(1)));
    assert_eq!(rig.driver.used_idx(), 1);
}

#[test]
fn rebinding_to_memory_without_the_ring_is_refused_and_changes_nothing() {
    let mut rig = rig(4, PLAIN);
    let empty = MemoryView::new(std::sync::Arc::new(GuestMemory::default()));
    let refused = rig.device.rebind(&empty).unwrap_err();
    rig.offer_direct(&[desc(0x1, 16, 0, 0)]);
    assert!(matches!(refused, RingFault::Part { part: RingPart::Descriptors, .. }));
    assert_eq!(rig.device.pop(&mut rig.chain), Ok(Some(0)));
}

#[test]
fn smallest_and_largest_queue_hold_their_full_count_of_chains() {
    let taken = |queue_size: u16| {
        let mut rig = rig(queue_size, PLAIN);
        (0..queue_size).for_each(|head| rig.driver.offer(head));
        (0..queue_size).filter(|&head| rig.device.pop(&mut rig.chain) == Ok(Some(head))).count()
    };
    assert_eq!(taken(2), 2);
    assert_eq!(taken(1024), 1024);
}

#[test]
fn queue_moves_to_another_thread_and_goes_on_there() {
    let rig = rig(4, PLAIN);
    rig.offer_direct(&[desc(0x1, 16, 0, 0)]);
    let (mut device, mut chain) = (rig.device, rig.chain);
    let popped = std::thread::spawn(move || device.pop(&mut chain)).join().unwrap();
    assert_eq!(popped, Ok(Some(0)));
}
