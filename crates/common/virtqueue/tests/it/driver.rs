//! The driver half against a device that may break any rule.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use guest_mem::{AccessError, GuestAddress, MemoryView};
use virtqueue::split::{AddError, DriverFault, RawRing, Used};
use virtqueue::{DriverQueue, RingFeatures};

use crate::rig::*;

/// The driver, and raw access to the device's fields.
fn driver(queue_size: u16, features: RingFeatures) -> (DriverQueue, RawRing) {
    let view = view();
    let driver = DriverQueue::new(&view, layout(queue_size), features).unwrap();
    (driver, RawRing::new(&view, layout(queue_size)).unwrap())
}

/// A driver whose only chain, with 512 writable bytes and tag 0, is with the device.
fn one_in_flight() -> (DriverQueue, RawRing) {
    let (mut driver, device) = driver(4, PLAIN);
    driver.add(&[range(1, 16)], &[range(2, 512)], 77).unwrap();
    driver.publish();
    (driver, device)
}

#[test]
fn new_ring_is_zeroed_whatever_was_there() {
    let view = view();
    view.store(0x1000, &[0xff; 0xc000]).unwrap();
    DriverQueue::new(&view, layout(4), EVENT_IDX).unwrap();
    let ring = RawRing::new(&view, layout(4)).unwrap();
    assert_eq!((ring.avail_idx(), ring.used_idx(), ring.used_flags(), ring.avail_event()), (0, 0, 0, 0));
}

#[test]
fn added_chain_is_seen_after_publish_only() {
    let (mut driver, device) = driver(4, PLAIN);
    driver.add(&[range(1, 16)], &[], 0).unwrap();
    let before = device.avail_idx();
    driver.publish();
    assert_eq!((before, device.avail_idx()), (0, 1));
    assert!(!driver.publish());
}

#[test]
fn used_chain_comes_back_with_its_token_and_frees_its_descriptors() {
    let (mut driver, device) = one_in_flight();
    device.set_used_entry(0, 0, 512);
    device.set_used_idx(1);
    let free_before = driver.free_descriptors();
    assert_eq!(driver.pop_used(), Ok(Some(Used { token: 77, tag: 0, written_bytes: 512 })));
    assert_eq!(driver.pop_used(), Ok(None));
    assert_eq!((free_before, driver.free_descriptors(), driver.in_flight()), (2, 4, 0));
}

#[test]
fn used_index_beyond_what_is_in_flight_is_refused() {
    let (mut driver, device) = one_in_flight();
    device.set_used_idx(2);
    let jump = DriverFault::UsedIndexJump { used_idx: 2, next_used: 0, in_flight: 1 };
    assert_eq!(driver.pop_used(), Err(jump.clone()));
    assert_eq!(driver.arm_interrupts(), Err(jump));
}

#[test]
fn used_chain_that_was_added_but_not_published_is_refused() {
    let (mut driver, device) = driver(4, PLAIN);
    driver.add(&[range(1, 16)], &[], 0).unwrap();
    device.set_used_idx(1);
    let jump = DriverFault::UsedIndexJump { used_idx: 1, next_used: 0, in_flight: 0 };
    assert_eq!(driver.pop_used(), Err(jump));
}

#[test]
fn used_id_outside_the_table_is_refused() {
    let (mut driver, device) = one_in_flight();
    device.set_used_entry(0, 0x1_0000, 0);
    device.set_used_idx(1);
    assert_eq!(driver.pop_used(), Err(DriverFault::IdOutOfRange { id: 0x1_0000, queue_size: 4 }));
}

#[test]
fn used_id_that_is_not_in_flight_is_refused() {
    let (mut driver, device) = one_in_flight();
    device.set_used_entry(0, 1, 0);
    device.set_used_idx(1);
    assert_eq!(driver.pop_used(), Err(DriverFault::NotInFlight { id: 1 }));
}

#[test]
fn chain_used_twice_is_refused_the_second_time() {
    let (mut driver, device) = one_in_flight();
    driver.add(&[range(3, 1)], &[], 78).unwrap();
    driver.publish();
    device.set_used_entry(0, 0, 0);
    device.set_used_entry(1, 0, 0);
    device.set_used_idx(2);
    assert!(driver.pop_used().is_ok());
    assert_eq!(driver.pop_used(), Err(DriverFault::NotInFlight { id: 0 }));
}

#[test]
fn more_bytes_than_were_writable_are_refused() {
    let (mut driver, device) = one_in_flight();
    device.set_used_entry(0, 0, 513);
    device.set_used_idx(1);
    let fault = DriverFault::WrittenTooMuch { written_bytes: 513, writable_bytes: 512 };
    assert_eq!(driver.pop_used(), Err(fault));
}

#[test]
fn chain_that_does_not_fit_is_refused_and_leaves_the_ring_as_it_was() {
    let (mut driver, device) = one_in_flight();
    let refused = driver.add(&[range(1, 1); 3], &[], 0);
    driver.publish();
    assert_eq!(refused, Err(AddError::Full { needed: 3, free: 2 }));
    assert_eq!((driver.free_descriptors(), device.avail_idx()), (2, 1));
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
fn chain_longer_than_the_queue_passes_through_a_table_where_the_device_announced_more() {
    let (driver, _) = driver(4, INDIRECT_DESC);
    let mut driver = driver.with_indirect_limit(6);
    let seven = [range(1, 1); 7];
    assert_eq!(driver.add(&seven[..5], &[], 0), Err(AddError::TooLong { needed: 5, limit: 4 }));
    let too_long = Err(AddError::TooLong { needed: 7, limit: 6 });
    assert_eq!(driver.add_indirect(&seven, &[], GuestAddress(TABLE), 0), too_long);
    assert_eq!(driver.add_indirect(&seven[..6], &[], GuestAddress(TABLE), 0), Ok(0));
}

#[test]
fn indirect_chain_takes_one_descriptor() {
    let (mut driver, _) = driver(4, INDIRECT_DESC);
    driver.add_indirect(&[range(1, 1); 2], &[range(2, 1); 2], GuestAddress(TABLE), 0).unwrap();
    assert_eq!(driver.free_descriptors(), 3);
}

#[test]
fn indirect_chain_without_the_feature_or_without_memory_is_refused() {
    let (mut plain, _) = driver(4, PLAIN);
    let (mut indirect, _) = driver(4, INDIRECT_DESC);
    let buffer = [range(1, 1)];
    let unmapped = AccessError::Unmapped { addr: END, len_bytes: 16 };
    assert_eq!(
        plain.add_indirect(&buffer, &[], GuestAddress(TABLE), 0),
        Err(AddError::IndirectNotNegotiated)
    );
    assert_eq!(indirect.add_indirect(&buffer, &[], GuestAddress(END), 0), Err(AddError::Table(unmapped)));
    assert_eq!(indirect.free_descriptors(), 4);
}

#[test]
fn device_with_kicks_off_by_flag_is_not_kicked() {
    let view = view();
    let mut driver = DriverQueue::new(&view, layout(4), PLAIN).unwrap();
    let mut device = virtqueue::DeviceQueue::new(&view, layout(4), PLAIN, 0).unwrap();
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
fn interrupts_are_switched_off_and_on_by_flag_without_event_idx() {
    let view = view();
    let mut driver = DriverQueue::new(&view, layout(4), PLAIN).unwrap();
    let flags = |view: &MemoryView| {
        let mut bytes = [0; 2];
        view.read(layout(4).avail.0, &mut bytes).unwrap();
        u16::from_le_bytes(bytes)
    };
    driver.disable_interrupts();
    let off = flags(&view);
    let used = driver.arm_interrupts();
    assert_eq!((off, used, flags(&view)), (1, Ok(false), 0));
}
