//! The packed driver half against a device that may break any rule.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use guest_mem::{AccessError, GuestAddress};
use virtqueue::packed::{FRESH_BASE, RawDescriptor, RawPacked};
use virtqueue::{AddError, DeviceQueue, DriverFault, DriverQueue, RingFeatures, Used};

use crate::rig::*;

const AVAIL: u16 = RawDescriptor::AVAIL;
const USED: u16 = RawDescriptor::USED;
/// Flags of a used descriptor in the first lap.
const DONE: u16 = AVAIL | USED;

/// The driver, and raw access to the ring.
fn driver(queue_size: u16, features: RingFeatures) -> (DriverQueue, RawPacked) {
    let view = view();
    let features = RingFeatures { packed: true, ..features };
    let driver = DriverQueue::new(&view, layout(queue_size), features).unwrap();
    (driver, RawPacked::new(&view, layout(queue_size)).unwrap())
}

/// A driver whose only chain, of two descriptors with 512 writable bytes and tag 0, is with the device.
fn one_in_flight() -> (DriverQueue, RawPacked) {
    let (mut driver, device) = driver(4, PLAIN);
    driver.add(&[range(1, 16)], &[range(2, 512)], 77).unwrap();
    driver.publish();
    (driver, device)
}

#[test]
fn new_ring_is_zeroed_whatever_was_there() {
    let view = view();
    view.store(0x1000, &[0xff; 0xc000]).unwrap();
    let driver = DriverQueue::new(&view, layout(4), PACKED).unwrap();
    let ring = RawPacked::new(&view, layout(4)).unwrap();
    assert_eq!([0, 1, 2, 3].map(|slot| ring.descriptor(slot)), [RawDescriptor::default(); 4]);
    assert_eq!((ring.driver_event(), ring.device_event()), ((0, 0), (0, 0)));
    assert_eq!(driver.initial_base(), FRESH_BASE);
}

#[test]
fn added_chain_is_seen_after_publish_only_with_its_flags() {
    let (mut driver, ring) = driver(4, PLAIN);
    let tag = driver.add(&[range(1, 16)], &[range(2, 512)], 0).unwrap();
    let before = ring.descriptor(0).flags;
    driver.publish();
    assert_eq!((tag, before), (0, 0));
    assert_eq!(ring.descriptor(0), packed_desc(1, 16, 0, AVAIL | NEXT));
    assert_eq!(ring.descriptor(1), packed_desc(2, 512, 0, AVAIL | WRITE));
    assert!(!driver.publish());
}

#[test]
fn chain_across_the_end_of_the_ring_has_the_flags_of_both_laps() {
    let (mut driver, ring) = driver(2, PLAIN);
    let tag = driver.add(&[range(1, 1)], &[], 0).unwrap();
    driver.publish();
    ring.set_descriptor(0, packed_desc(0, 0, tag, DONE));
    driver.pop_used().unwrap();
    driver.add(&[range(2, 1), range(3, 1)], &[], 1).unwrap();
    driver.publish();
    assert_eq!([ring.descriptor(1).flags, ring.descriptor(0).flags], [AVAIL | NEXT, USED]);
}

#[test]
fn used_chain_comes_back_with_its_token_and_frees_its_descriptors() {
    let (mut driver, device) = one_in_flight();
    let free_before = driver.free_descriptors();
    device.set_descriptor(0, packed_desc(0, 512, 0, DONE | WRITE));
    assert_eq!(driver.pop_used(), Ok(Some(Used { token: 77, tag: 0, written_bytes: 512 })));
    assert_eq!(driver.pop_used(), Ok(None));
    assert_eq!((free_before, driver.free_descriptors(), driver.in_flight()), (2, 4, 0));
}

#[test]
fn used_id_outside_the_ring_is_refused() {
    let (mut driver, device) = one_in_flight();
    device.set_descriptor(0, packed_desc(0, 0, 4, DONE));
    assert_eq!(driver.pop_used(), Err(DriverFault::IdOutOfRange { id: 4, queue_size: 4 }));
}

#[test]
fn used_id_that_is_not_in_flight_is_refused() {
    let (mut driver, device) = one_in_flight();
    device.set_descriptor(0, packed_desc(0, 0, 1, DONE));
    assert_eq!(driver.pop_used(), Err(DriverFault::NotInFlight { id: 1 }));
}

#[test]
fn used_chain_that_was_added_but_not_published_is_refused() {
    let (mut driver, device) = one_in_flight();
    let unpublished = driver.add(&[range(1, 16)], &[], 0).unwrap();
    device.set_descriptor(0, packed_desc(0, 0, unpublished, DONE));
    assert_eq!(driver.pop_used(), Err(DriverFault::NotInFlight { id: unpublished }));
}

#[test]
fn chain_used_twice_is_refused_the_second_time() {
    let (mut driver, device) = one_in_flight();
    driver.add(&[range(3, 1)], &[], 78).unwrap();
    driver.publish();
    device.set_descriptor(0, packed_desc(0, 0, 0, DONE));
    device.set_descriptor(2, packed_desc(0, 0, 0, DONE));
    assert!(driver.pop_used().is_ok());
    assert_eq!(driver.pop_used(), Err(DriverFault::NotInFlight { id: 0 }));
}

#[test]
fn used_descriptor_with_nothing_in_flight_is_refused() {
    let (mut driver, device) = driver(4, PLAIN);
    device.set_descriptor(0, packed_desc(0, 0, 0, DONE));
    assert_eq!(driver.arm_interrupts(), Ok(true));
    assert_eq!(driver.pop_used(), Err(DriverFault::NotInFlight { id: 0 }));
}

#[test]
fn used_descriptor_further_on_than_the_driver_looks_is_not_seen() {
    let (mut driver, device) = one_in_flight();
    device.set_descriptor(1, packed_desc(0, 0, 0, DONE));
    device.set_descriptor(2, packed_desc(0, 0, 0, DONE));
    assert_eq!(driver.pop_used(), Ok(None));
}

#[test]
fn available_descriptor_with_both_flags_of_the_other_lap_is_not_used() {
    let (mut driver, device) = one_in_flight();
    device.set_descriptor(0, packed_desc(0, 0, 0, USED));
    let half = driver.pop_used();
    device.set_descriptor(0, packed_desc(0, 0, 0, 0));
    assert_eq!((half, driver.pop_used()), (Ok(None), Ok(None)));
}

#[test]
fn more_bytes_than_were_writable_are_refused() {
    let (mut driver, device) = one_in_flight();
    device.set_descriptor(0, packed_desc(0, 513, 0, DONE | WRITE));
    let fault = DriverFault::WrittenTooMuch { written_bytes: 513, writable_bytes: 512 };
    assert_eq!(driver.pop_used(), Err(fault));
}

#[test]
fn length_without_the_write_flag_counts_if_it_can_be() {
    let used = |len_bytes| {
        let (mut driver, device) = one_in_flight();
        device.set_descriptor(0, packed_desc(0, len_bytes, 0, DONE));
        driver.pop_used().unwrap().unwrap().written_bytes
    };
    assert_eq!([512, 513, u32::MAX].map(used), [512, 0, 0]);
}

#[test]
fn chains_used_in_any_order_advance_by_their_own_length() {
    let (mut driver, device) = driver(4, PLAIN);
    let long = driver.add(&[range(1, 1); 3], &[], 100).unwrap();
    let short = driver.add(&[range(1, 1)], &[], 101).unwrap();
    driver.publish();
    device.set_descriptor(0, packed_desc(0, 0, short, DONE));
    device.set_descriptor(1, packed_desc(0, 0, long, DONE));
    let tokens = [(); 2].map(|()| driver.pop_used().unwrap().unwrap().token);
    assert_eq!((tokens, driver.free_descriptors()), ([101, 100], 4));
}

#[test]
fn chain_that_does_not_fit_is_refused_and_leaves_the_ring_as_it_was() {
    let (mut driver, ring) = one_in_flight();
    let refused = driver.add(&[range(1, 1); 3], &[], 0);
    assert_eq!(refused, Err(AddError::Full { needed: 3, free: 2 }));
    assert!(!driver.publish());
    assert_eq!((driver.free_descriptors(), ring.descriptor(2)), (2, RawDescriptor::default()));
}

#[test]
fn empty_chain_and_one_longer_than_the_queue_are_refused() {
    let (mut driver, _) = driver(4, INDIRECT_DESC);
    assert_eq!(driver.add(&[], &[], 0), Err(AddError::Empty));
    let five = [range(1, 1); 5];
    let too_long = Err(AddError::TooLong { needed: 5, limit: 4 });
    assert_eq!(driver.add(&five, &[], 0), too_long);
    assert_eq!(driver.add_indirect(&five, &[], GuestAddress(TABLE), 0), too_long);
}

#[test]
fn indirect_chain_takes_one_descriptor_and_its_table_has_only_write_flags() {
    let view = view();
    let features = RingFeatures { indirect: true, ..PACKED };
    let mut driver = DriverQueue::new(&view, layout(16), features).unwrap();
    let (readable, writable) = ([range(1, 1); 9], [range(2, 1)]);
    driver.add_indirect(&readable, &writable, GuestAddress(TABLE), 0).unwrap();
    driver.publish();
    let ring = RawPacked::new(&view, layout(16)).unwrap();
    let mut table = [0; 160];
    view.read(TABLE, &mut table).unwrap();
    assert_eq!(driver.free_descriptors(), 15);
    assert_eq!(ring.descriptor(0), packed_desc(TABLE, 160, 0, AVAIL | INDIRECT));
    assert_eq!(table[..144], packed_desc(1, 1, 0, 0).to_bytes().repeat(9));
    assert_eq!(table[144..], packed_desc(2, 1, 0, WRITE).to_bytes());
}

#[test]
fn indirect_chain_without_the_feature_or_without_memory_is_refused() {
    let (mut plain, _) = driver(4, PLAIN);
    let (mut indirect, _) = driver(4, INDIRECT_DESC);
    let buffer = [range(1, 1)];
    let unmapped = AccessError::Unmapped { addr: END, len_bytes: 16 };
    let refused = plain.add_indirect(&buffer, &[], GuestAddress(TABLE), 0);
    assert_eq!(refused, Err(AddError::IndirectNotNegotiated));
    assert_eq!(indirect.add_indirect(&buffer, &[], GuestAddress(END), 0), Err(AddError::Table(unmapped)));
    assert_eq!((indirect.free_descriptors(), indirect.publish()), (4, false));
}

#[test]
fn device_that_wants_no_kicks_is_not_kicked() {
    let view = view();
    let mut driver = DriverQueue::new(&view, layout(4), PACKED).unwrap();
    let mut device = DeviceQueue::new(&view, layout(4), PACKED, FRESH_BASE).unwrap();
    device.disable_kicks();
    driver.add(&[range(1, 1)], &[], 0).unwrap();
    driver.publish();
    let suppressed = driver.kick_needed();
    device.enable_kicks().unwrap();
    driver.add(&[range(1, 1)], &[], 0).unwrap();
    driver.publish();
    assert_eq!((suppressed, driver.kick_needed(), driver.kick_needed()), (false, true, false));
}

#[test]
fn interrupts_are_switched_off_and_on() {
    let (mut driver, ring) = driver(4, PLAIN);
    driver.disable_interrupts();
    let off = ring.driver_event().1;
    let used = driver.arm_interrupts();
    assert_eq!((off, used, ring.driver_event().1), (1, Ok(false), 0));
}

#[test]
fn interrupts_are_armed_where_the_driver_looks_with_event_idx() {
    let (mut driver, ring) = driver(4, EVENT_IDX);
    driver.add(&[range(1, 16)], &[range(2, 512)], 77).unwrap();
    driver.publish();
    ring.set_descriptor(0, packed_desc(0, 0, 0, DONE));
    driver.pop_used().unwrap();
    assert_eq!((driver.arm_interrupts(), ring.driver_event()), (Ok(false), (0x8002, 2)));
}
