//! Where a packed device resumes: it accepts positions that fit the ring, and refuses positions that the ring
//! contradicts.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use virtqueue::packed::{FRESH_BASE, RawDescriptor, RawPacked};
use virtqueue::{DeviceQueue, DriverQueue, RingFault};

use crate::rig::*;

const AVAIL: u16 = RawDescriptor::AVAIL;

/// A new device on the ring of `rig`.
fn resume(rig: &PackedRig, base: u32) -> Result<u32, RingFault> {
    let device = DeviceQueue::new(&rig.view, *rig.device.layout(), PACKED, base)?;
    Ok(device.position())
}

/// A ring of 4 that has served this many chains of one descriptor. Its device polls and has stored no
/// position.
fn used(count: u16) -> PackedRig {
    let mut rig = packed_rig(4, PLAIN);
    rig.go_round(count);
    rig.device.disable_kicks();
    rig
}

#[test]
fn slots_outside_the_ring_and_chains_in_flight_are_no_position() {
    let rig = used(3);
    let bad = |base| Err(RingFault::BadBase { base, queue_size: 4 });
    assert_eq!(resume(&rig, 0x8004_8004), bad(0x8004_8004));
    assert_eq!(resume(&rig, 0x7fff_7fff), bad(0x7fff_7fff));
    assert_eq!(resume(&rig, 0x8003_8001), bad(0x8003_8001));
}

#[test]
fn ring_that_was_left_in_order_goes_on_at_any_place_of_two_laps() {
    for count in 1..=8 {
        let mut rig = used(count);
        rig.device.enable_kicks().unwrap();
        let left = rig.device.position();
        rig.driver.offer(&[packed_desc(0x7, 1, 1, 0)]);
        let mut device = DeviceQueue::new(&rig.view, layout(4), PACKED, left).unwrap();
        assert_eq!(device.pop(&mut rig.chain), Ok(Some(1)), "after {count}");
    }
}

#[test]
fn used_ring_with_the_position_of_a_new_one_is_refused_at_any_place_of_two_laps() {
    for count in 1..8 {
        let rig = used(count);
        let refused = resume(&rig, FRESH_BASE);
        assert!(matches!(refused, Err(RingFault::StaleBase { base: FRESH_BASE, .. })), "after {count}");
    }
}

#[test]
fn ring_used_for_two_whole_laps_and_not_left_in_order_is_refused_as_new() {
    let rig = used(8);
    assert_eq!(resume(&rig, FRESH_BASE), Err(RingFault::StaleBase { base: FRESH_BASE, slot: 1 }));
}

#[test]
fn older_position_is_refused_with_the_slot_that_was_used_since() {
    let rig = used(3);
    assert_eq!(resume(&rig, 0x8001_8001), Err(RingFault::StaleBase { base: 0x8001_8001, slot: 1 }));
    let rig = used(5);
    assert_eq!(resume(&rig, 0x8002_8002), Err(RingFault::StaleBase { base: 0x8002_8002, slot: 2 }));
    let rig = used(6);
    assert_eq!(resume(&rig, 0x0001_0001), Err(RingFault::StaleBase { base: 0x0001_0001, slot: 1 }));
}

#[test]
fn refusal_says_what_to_do() {
    let text = resume(&used(3), FRESH_BASE).unwrap_err().to_string();
    assert_eq!(
        text,
        "ring base 0x80008000 is stale: slot 0 of the packed ring has been used since, and the current position is not recorded in memory, so the guest must reset the device"
    );
}

#[test]
fn chains_that_wait_in_a_new_ring_do_not_make_it_an_old_one() {
    let view = view();
    let mut driver = DriverQueue::new(&view, layout(8), PACKED).unwrap();
    driver.add(&[range(1, 1); 3], &[], 0).unwrap();
    driver.add(&[range(1, 1); 2], &[], 1).unwrap();
    driver.publish();
    assert!(DeviceQueue::new(&view, layout(8), PACKED, FRESH_BASE).is_ok());
}

#[test]
fn new_ring_that_is_being_filled_is_no_old_one() {
    let view = view();
    let driver = RawPacked::new(&view, layout(8)).unwrap();
    driver.set_descriptor(0, packed_desc(0x1, 1, 0, AVAIL));
    driver.set_descriptor(1, packed_desc(0x2, 1, 0, 0)); // the first of a chain: its flags are stored last
    driver.set_descriptor(2, packed_desc(0x3, 1, 0, AVAIL));
    driver.set_descriptor(3, packed_desc(0x4, 0, 0, 0)); // address stored, the rest still missing
    assert!(DeviceQueue::new(&view, layout(8), PACKED, FRESH_BASE).is_ok());
}
