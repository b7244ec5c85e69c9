//! Packed rings that change hands: the next device resumes at the right position, whatever base the front-end sends.
//!
//! Both sides are real halves. A device "dies" by being dropped.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use guest_mem::MemoryView;
use proptest::prelude::*;
use virtqueue::packed::FRESH_BASE;
use virtqueue::{Chain, DeviceQueue, DriverQueue, RingFault, RingFeatures};

use crate::rig::{layout, range, view};

const PLAIN: RingFeatures = RingFeatures { event_idx: false, indirect: false, packed: true };
const BY_IDX: RingFeatures = RingFeatures { event_idx: true, ..PLAIN };

struct Bed {
    view: MemoryView,
    queue_size: u16,
    features: RingFeatures,
    driver: DriverQueue,
}

fn bed(queue_size: u16, features: RingFeatures) -> Bed {
    let view = view();
    let driver = DriverQueue::new(&view, layout(queue_size), features).unwrap();
    Bed { view, queue_size, features, driver }
}

impl Bed {
    fn open(&self, base: u32) -> Result<DeviceQueue, RingFault> {
        DeviceQueue::new(&self.view, layout(self.queue_size), self.features, base)
    }

    fn add(&mut self, descriptors: u64) {
        let buffers: Vec<_> = (0..descriptors).map(|i| range(0x4_0000 + i * 16, 16)).collect();
        self.driver.add(&buffers, &[], 0).unwrap();
        self.driver.publish();
    }

    /// Sends a chain from the driver to a polling device and back.
    fn exchange(&mut self, device: &mut DeviceQueue, descriptors: u64) {
        self.add(descriptors);
        device.disable_kicks();
        let tag = pop(device).unwrap();
        device.push_used(tag, 0);
        device.publish();
        self.driver.pop_used().unwrap().unwrap();
    }

    /// Leaves the ring as a foreign, polling device does: without a stored position.
    fn left_by_foreign_device(&self) {
        self.view.store(0xc000, &(1_u32 << 16).to_le_bytes()).unwrap();
    }
}

fn pop(device: &mut DeviceQueue) -> Option<u16> {
    device.pop(&mut Chain::with_capacity(16)).unwrap()
}

fn is_stale(opened: &Result<DeviceQueue, RingFault>) -> bool {
    matches!(opened, Err(RingFault::StaleBase { .. }))
}

// ---- new rings

#[test]
fn new_ring_starts_at_its_beginning_whatever_front_ends_say_about_it() {
    let bed = bed(8, PLAIN);
    let opened = [FRESH_BASE, 0, 0x8000, 0x0003_0003].map(|base| bed.open(base).unwrap());
    assert!(opened.iter().all(|device| device.position() == FRESH_BASE && device.was_fresh()));
}

#[test]
fn new_ring_with_requests_starts_at_the_first_of_them() {
    let mut bed = bed(8, PLAIN);
    bed.add(3);
    bed.add(1);
    let mut opened = [FRESH_BASE, 0, 0x8000].map(|base| bed.open(base).unwrap());
    assert!(opened.iter_mut().all(|device| device.was_fresh() && pop(device).is_some()));
}

#[test]
fn new_ring_full_of_requests_starts_at_the_first_of_them() {
    let mut bed = bed(2, PLAIN);
    bed.add(2);
    let mut opened = [FRESH_BASE, 0, 0x8000].map(|base| bed.open(base).unwrap());
    assert!(opened.iter_mut().all(|device| device.was_fresh() && pop(device).is_some()));
}

/// The driver does not write the device area, so the position of the previous ring may still be stored there.
#[test]
fn new_ring_in_the_place_of_an_old_one_starts_at_its_beginning() {
    let mut bed = bed(8, PLAIN);
    let mut device = bed.open(FRESH_BASE).unwrap();
    (0..5).for_each(|_| bed.exchange(&mut device, 1));
    device.enable_kicks().unwrap();
    bed.view.store(0x1000, &[0; 128]).unwrap();
    let mut opened = bed.open(FRESH_BASE).unwrap();
    assert_eq!((opened.position(), pop(&mut opened)), (FRESH_BASE, None));
}

/// A new ring that the driver has filled looks like a ring that the last device left.
#[test]
fn new_ring_in_the_place_of_an_old_one_with_requests_beyond_its_end_starts_at_its_beginning() {
    for added in 5..8 {
        let mut bed = bed(8, PLAIN);
        let mut device = bed.open(FRESH_BASE).unwrap();
        (0..5).for_each(|_| bed.exchange(&mut device, 1));
        device.enable_kicks().unwrap();
        bed.driver = DriverQueue::new(&bed.view, layout(8), PLAIN).unwrap();
        bed.view.store(0xc000, &0x8005_u32.to_le_bytes()).unwrap();
        (0..added).for_each(|_| bed.add(1));
        let mut opened = bed.open(FRESH_BASE).unwrap();
        assert_eq!((opened.position(), opened.was_fresh()), (FRESH_BASE, true));
        assert!(pop(&mut opened).is_some());
    }
}

/// The ring could also be a used one, whose last used chain began in the last slot.
#[test]
fn full_ring_that_may_be_new_or_was_left_elsewhere_is_refused() {
    let mut bed = bed(8, PLAIN);
    (0..8).for_each(|_| bed.add(1));
    bed.view.store(0xc000, &0x8005_u32.to_le_bytes()).unwrap();
    assert!(is_stale(&bed.open(FRESH_BASE)));
}

#[test]
fn base_outside_the_ring_or_with_something_in_flight_is_refused() {
    let bed = bed(8, PLAIN);
    let refused = |base| matches!(bed.open(base), Err(RingFault::BadBase { queue_size: 8, .. }));
    assert!(refused(0x0008_0008) && refused(0x8008_8008) && refused(0xffff_ffff));
    assert!(refused(0x8001_8002) && refused(0x8003_8000) && refused(0x0001_8001));
}

// ---- rings in use

#[test]
fn exact_base_of_a_ring_in_use_goes_on_there() {
    let mut bed = bed(8, PLAIN);
    let mut device = bed.open(FRESH_BASE).unwrap();
    for descriptors in [3, 1, 2, 1, 3, 3, 3, 1, 8, 7] {
        bed.exchange(&mut device, descriptors);
        // After whole laps, the position is the one that front-ends send for new rings, so this test must send the
        // base.
        let base = device.position();
        bed.left_by_foreign_device();
        if base & 0x7fff == 0 {
            device.enable_kicks().unwrap();
        }
        device = bed.open(base).unwrap();
        assert_eq!((device.position(), device.was_fresh()), (base, false));
    }
}

#[test]
fn lower_half_of_a_base_means_both() {
    let mut bed = bed(8, PLAIN);
    let mut device = bed.open(FRESH_BASE).unwrap();
    bed.exchange(&mut device, 3);
    bed.left_by_foreign_device();
    assert_eq!(bed.open(device.position() & 0xffff).unwrap().position(), device.position());
}

#[test]
fn ring_left_with_nothing_in_flight_goes_on_where_it_was_left_with_a_stale_base() {
    for features in [PLAIN, BY_IDX] {
        let mut bed = bed(8, features);
        let mut device = bed.open(FRESH_BASE).unwrap();
        for descriptors in [3, 1, 2, 1, 3, 3, 3, 8, 1, 7] {
            bed.exchange(&mut device, descriptors);
            device.enable_kicks().unwrap();
            let left = device.position();
            let opened = [FRESH_BASE, 0, 0x8000, 0x8003_8003].map(|base| bed.open(base).unwrap().position());
            assert_eq!(opened, [left; 4]);
            device = bed.open(FRESH_BASE).unwrap();
        }
    }
}

#[test]
fn last_request_that_completes_while_kicks_are_wanted_is_behind_the_position_left() {
    for features in [PLAIN, BY_IDX] {
        let mut bed = bed(8, features);
        let mut device = bed.open(FRESH_BASE).unwrap();
        bed.exchange(&mut device, 3);
        bed.add(2);
        let tag = pop(&mut device).unwrap();
        device.enable_kicks().unwrap();
        assert!(is_stale(&bed.open(FRESH_BASE)));
        device.push_used(tag, 0);
        device.publish();
        assert_eq!(bed.open(FRESH_BASE).unwrap().position(), device.position());
    }
}

/// A device may also die while it serves without having announced that it polls.
#[test]
fn request_taken_while_kicks_are_wanted_takes_back_what_was_said_before_it() {
    for features in [PLAIN, BY_IDX] {
        let mut bed = bed(8, features);
        let mut device = bed.open(FRESH_BASE).unwrap();
        bed.exchange(&mut device, 3);
        device.enable_kicks().unwrap();
        assert_eq!(bed.open(FRESH_BASE).unwrap().position(), device.position());
        bed.add(2);
        pop(&mut device).unwrap();
        assert!(is_stale(&bed.open(FRESH_BASE)));
    }
}

#[test]
fn ring_whose_device_died_at_work_is_refused_whatever_the_base() {
    for features in [PLAIN, BY_IDX] {
        let mut bed = bed(8, features);
        let mut device = bed.open(FRESH_BASE).unwrap();
        bed.exchange(&mut device, 3);
        let exact = device.position();
        assert!(is_stale(&bed.open(FRESH_BASE)) && is_stale(&bed.open(0)) && is_stale(&bed.open(exact)));
    }
}

/// The second chain's used descriptor overwrites the descriptor of the first chain, and the second chain still looks
/// available.
#[test]
fn ring_whose_device_died_after_completing_out_of_order_is_refused_with_an_exact_base() {
    for features in [PLAIN, BY_IDX] {
        for polls in [false, true] {
            let mut bed = bed(8, features);
            let mut device = bed.open(FRESH_BASE).unwrap();
            bed.add(1);
            bed.add(1);
            if polls {
                device.disable_kicks();
            }
            pop(&mut device).unwrap();
            let second = pop(&mut device).unwrap();
            device.push_used(second, 0);
            device.publish();
            bed.driver.pop_used().unwrap().unwrap();
            assert!(is_stale(&bed.open(0x8001_8001)));
        }
    }
}

/// Some front-ends send a position for a new ring that is also the end of its first lap.
#[test]
fn full_ring_whose_device_died_before_it_published_is_refused_with_base_0() {
    let mut bed = bed(4, PLAIN);
    let mut device = bed.open(0).unwrap();
    (0..4).for_each(|_| bed.add(1));
    device.disable_kicks();
    (0..2).for_each(|_| {
        let tag = pop(&mut device).unwrap();
        device.push_used(tag, 0);
    });
    assert!(is_stale(&bed.open(0)));
}

#[test]
fn whole_laps_end_where_they_are_said_to() {
    let mut bed = bed(4, PLAIN);
    let mut device = bed.open(FRESH_BASE).unwrap();
    (0..4).for_each(|_| bed.exchange(&mut device, 1));
    assert!(is_stale(&bed.open(FRESH_BASE)) && is_stale(&bed.open(0)));
    device.enable_kicks().unwrap();
    assert_eq!((device.position(), bed.open(FRESH_BASE).unwrap().position()), (0, 0));
    (0..4).for_each(|_| bed.exchange(&mut device, 1));
    device.enable_kicks().unwrap();
    assert_eq!(bed.open(FRESH_BASE).unwrap().position(), FRESH_BASE);
    assert!(is_stale(&bed.open(0)) || bed.open(0).unwrap().position() == FRESH_BASE);
}

#[test]
fn position_left_that_the_ring_contradicts_is_not_believed() {
    let mut bed = bed(8, PLAIN);
    let mut device = bed.open(FRESH_BASE).unwrap();
    (0..5).for_each(|_| bed.exchange(&mut device, 1));
    device.enable_kicks().unwrap();
    bed.view.store(0xc000, &3u16.to_le_bytes()).unwrap(); // slot 3 of another lap
    assert!(is_stale(&bed.open(FRESH_BASE)));
}

/// Few cases under Miri, which is slow and has no file system.
fn config() -> ProptestConfig {
    let cases = if cfg!(miri) { 4 } else { 256 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    /// Chains of any length complete in any order; devices are replaced in between.
    #[test]
    fn every_ring_left_in_order_is_found_again(
        lengths in prop::collection::vec((1_u64..=4, any::<bool>()), 1..60),
        by_idx: bool,
        stale in prop::sample::select(vec![FRESH_BASE, 0, 0x8000]),
    ) {
        let mut bed = bed(8, if by_idx { BY_IDX } else { PLAIN });
        let mut device = bed.open(FRESH_BASE).unwrap();
        for (descriptors, two) in lengths {
            bed.add(descriptors);
            if two {
                bed.add(5 - descriptors);
            }
            device.disable_kicks();
            let tags: Vec<_> = std::iter::from_fn(|| pop(&mut device)).collect();
            tags.into_iter().rev().for_each(|tag| device.push_used(tag, 0));
            device.publish();
            while bed.driver.pop_used().unwrap().is_some() {}
            device.enable_kicks().unwrap();
            let left = device.position();
            device = bed.open(stale).unwrap();
            prop_assert_eq!(device.position(), left);
        }
    }
}
