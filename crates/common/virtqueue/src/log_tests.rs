//! Tests of an in-flight log's layout, and of logs that our devices did not write: each fault has its own error.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use proptest::prelude::*;

use crate::packed::FRESH_BASE;
use crate::{
    Chain, DeviceQueue, DriverQueue, LogArea, LogFault, Recovery, RingFault, RingFeatures, RingLayout,
};

const QUEUE_SIZE: u16 = 4;
const LAYOUT: RingLayout = RingLayout {
    queue_size: QUEUE_SIZE,
    descriptors: GuestAddress(0),
    avail: GuestAddress(0x1000),
    used: GuestAddress(0x1800),
};

fn memory(size_bytes: u64) -> MemoryView {
    let region = Arc::new(Region::from_memfd(GuestAddress(0), size_bytes).unwrap());
    MemoryView::new(Arc::new(GuestMemory::new(vec![region]).unwrap()))
}

/// A ring, its driver and its log.
struct Bed {
    ring: MemoryView,
    log: MemoryView,
    features: RingFeatures,
    driver: DriverQueue,
    chain: Chain,
}

impl Bed {
    fn new(packed: bool) -> Self {
        let features = RingFeatures { event_idx: false, indirect: false, packed };
        let (ring, log) = (memory(16 << 10), memory(4096));
        let driver = DriverQueue::new(&ring, LAYOUT, features).unwrap();
        Self { ring, log, features, driver, chain: Chain::with_capacity(QUEUE_SIZE) }
    }

    fn open(&self) -> Result<DeviceQueue, RingFault> {
        let area = LogArea::new(Arc::clone(self.log.memory()), 0, QUEUE_SIZE);
        let base = if self.features.packed { FRESH_BASE } else { 0 };
        DeviceQueue::with_log(&self.ring, LAYOUT, self.features, base, &area)
    }

    fn fault(&self) -> LogFault {
        match self.open() {
            Err(RingFault::Log(fault)) => fault,
            other => panic!("{other:?}"),
        }
    }

    fn add(&mut self, addr: u64, descriptors: u16) {
        let buffer = |part: u16| GuestRange { addr: addr + u64::from(part), len_bytes: 7 };
        let buffers: Vec<_> = (0..descriptors).map(buffer).collect();
        self.driver.add(&buffers, &[], addr).unwrap();
        self.driver.publish();
    }

    fn pop(&mut self, device: &mut DeviceQueue) -> u16 {
        device.pop(&mut self.chain).unwrap().unwrap()
    }

    fn words(&self) -> Vec<u64> {
        let mut bytes = [0; 8 * 24];
        self.log.read(0, &mut bytes).unwrap();
        bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
    }

    fn set_word(&self, at: u64, word: u64) {
        self.log.store(8 * at, &word.to_le_bytes()).unwrap();
    }
}

#[test]
fn log_of_a_split_ring_has_each_field_where_the_specification_has_it() {
    let mut bed = Bed::new(false);
    let mut device = bed.open().unwrap();
    assert_eq!(bed.words()[..2], [0, 0x0000_0000_0004_0001]);
    for addr in [0x2000, 0x2100, 0x2200] {
        bed.add(addr, 1);
    }
    let heads: Vec<u16> = (0..3).map(|_| bed.pop(&mut device)).collect();

    let entry =
        |words: &[u64], head: u16| [words[2 + 2 * usize::from(head)], words[3 + 2 * usize::from(head)]];
    let begun = bed.words();
    assert!((0..3).all(|taken| entry(&begun, heads[taken]) == [1, taken as u64]));
    device.push_used(heads[2], 0);
    device.push_used(heads[0], 0);
    let next = entry(&bed.words(), heads[0])[0] >> 48;
    device.publish();

    assert_eq!(next, u64::from(heads[2]));
    let after = bed.words();
    assert_eq!(after[1], 1 | 4 << 16 | u64::from(heads[0]) << 32 | 2 << 48);
    let in_flight = heads.iter().map(|&head| entry(&after, head)[0] & 0xff).collect::<Vec<_>>();
    assert_eq!(in_flight, [0, 1, 0]);
}

#[test]
fn log_of_a_packed_ring_has_each_field_where_the_specification_has_it() {
    let mut bed = Bed::new(true);
    let mut device = bed.open().unwrap();
    assert_eq!(bed.words()[..4], [0, 0x0000_0000_0004_0001, 0x0101_0000_0000, 0]);
    bed.add(0x2000, 2);
    bed.add(0x2100, 1);
    let ids = [bed.pop(&mut device), bed.pop(&mut device)];

    let words = bed.words();
    let meta = |id: u16, flags: u64| u64::from(id) | flags << 16 | 7 << 32;
    assert_eq!(words[1], 1 | 4 << 16 | 3 << 32 | 3 << 48, "entry 3 is free");
    // In flight, next, last, number of descriptors; counter; id, flags (AVAIL, NEXT) and length; address.
    assert_eq!(words[4..6], [1 | 1 << 16 | 1 << 32 | 2 << 48, 0]);
    assert_eq!(words[6] >> 16, meta(0, 0x81) >> 16);
    assert_eq!(words[7], 0x2000);
    assert_eq!(words[8] & 0xff, 0);
    assert_eq!(words[10..12], [meta(ids[0], 0x80), 0x2001]);
    assert_eq!(words[12..16], [1 | 3 << 16 | 2 << 32 | 1 << 48, 1, meta(ids[1], 0x80), 0x2100]);

    device.push_used(ids[0], 0);
    device.publish();
    let words = bed.words();
    assert_eq!(words[1], 1 | 4 << 16, "entries 0, 1, 3 are free");
    assert_eq!((words[4] & 0xff, words[8] >> 16 & 0xffff, words[12] & 0xff), (0, 3, 1));
    assert_eq!(words[2], 2 | 2 << 16 | 1 << 32 | 1 << 40);
}

#[test]
fn successor_goes_by_ring_and_log_whatever_base_the_front_end_sends() {
    for packed in [false, true] {
        let mut bed = Bed::new(packed);
        let mut device = bed.open().unwrap();
        for addr in [0x2000, 0x2100, 0x2200] {
            bed.add(addr, 1);
        }
        let first = bed.pop(&mut device);
        bed.pop(&mut device);
        device.push_used(first, 0);
        device.publish();
        drop(device);

        let mut next = bed.open().unwrap(); // with the base of a new ring
        assert_eq!(next.recovery(), Recovery { redone: 1, was_foreign: false });
        assert_eq!(next.position() & 0x7fff, 2);
        bed.pop(&mut next);
        assert_eq!((bed.chain.readable()[0].addr, next.to_redo()), (0x2100, 0));
        bed.pop(&mut next);
        assert_eq!(bed.chain.readable()[0].addr, 0x2200);
    }
}

#[test]
fn new_ring_with_the_log_of_an_older_one_is_served_and_nothing_of_that_is_done_again() {
    for packed in [false, true] {
        let mut bed = Bed::new(packed);
        let mut device = bed.open().unwrap();
        for addr in 0x2000..0x200b {
            bed.add(addr, 1);
            let tag = bed.pop(&mut device);
            device.push_used(tag, 0);
            device.publish();
            bed.driver.pop_used().unwrap().unwrap();
        }
        bed.add(0x2100, 1);
        bed.pop(&mut device);
        drop(device);

        bed.driver = DriverQueue::new(&bed.ring, LAYOUT, bed.features).unwrap();
        bed.add(0x2200, 1);
        let mut next = bed.open().unwrap();
        assert_eq!(next.recovery(), Recovery { redone: 0, was_foreign: true });
        let tag = bed.pop(&mut next);
        assert_eq!(bed.chain.readable()[0].addr, 0x2200);
        next.push_used(tag, 0);
        next.publish();
        assert_eq!(bed.driver.pop_used().unwrap().unwrap().token, 0x2200);
    }
}

#[test]
fn packed_ring_without_its_log_is_refused_when_its_device_died_at_work() {
    let mut bed = Bed::new(true);
    let mut device = bed.open().unwrap();
    device.disable_kicks();
    for addr in [0x2000, 0x2100] {
        bed.add(addr, 1);
    }
    let first = bed.pop(&mut device);
    bed.pop(&mut device);
    device.push_used(first, 0);
    device.publish();
    drop(device);

    bed.log.store(0, &[0; 4096]).unwrap();
    assert!(matches!(bed.open(), Err(RingFault::StaleBase { .. })));
}

#[test]
fn logs_of_other_makes_are_refused_with_what_they_say_and_what_is_known() {
    for packed in [false, true] {
        let bed = Bed::new(packed);
        bed.open().unwrap();
        bed.set_word(1, 2 | 4 << 16);
        assert_eq!(bed.fault(), LogFault::Version { version: 2 });
        bed.set_word(1, 1 | 8 << 16);
        assert_eq!(bed.fault(), LogFault::Entries { entries: 8, announced: 4 });
        bed.set_word(1, 1 | 4 << 16);
        bed.set_word(0, 1);
        assert_eq!(bed.fault(), LogFault::Features { features: 1 });
        let area = LogArea::new(Arc::clone(bed.log.memory()), 0, 2);
        let small = DeviceQueue::with_log(&bed.ring, LAYOUT, bed.features, FRESH_BASE, &area);
        assert_eq!(small.unwrap_err(), LogFault::TooSmall { entries: 2, queue_size: 4 }.into());
        let area = LogArea::new(Arc::clone(bed.log.memory()), 64, QUEUE_SIZE);
        let outside = DeviceQueue::with_log(&bed.ring, LAYOUT, bed.features, FRESH_BASE, &area);
        assert!(matches!(outside, Err(RingFault::Log(LogFault::Place { queue: 64, .. }))), "{outside:?}");
    }
}

#[test]
fn batch_of_a_split_ring_that_leads_out_of_the_log_is_refused() {
    let bed = Bed::new(false);
    bed.open().unwrap();
    bed.set_word(1, 1 | 4 << 16 | 9 << 32 | 0xffff << 48);
    assert_eq!(bed.fault(), LogFault::NoSuchEntry { entry: 9, entries: 4 });
}

/// Entries 0 and 1 are one chain in flight, entry 2 is another, entry 3 is free.
fn packed_with_two_chains() -> Bed {
    let mut bed = Bed::new(true);
    let mut device = bed.open().unwrap();
    bed.add(0x2000, 2);
    bed.add(0x2100, 1);
    bed.pop(&mut device);
    bed.pop(&mut device);
    bed
}

#[test]
fn packed_log_with_bad_links_is_refused_and_the_entry_named() {
    let list = |free_head: u64| 1 | 4 << 16 | free_head << 32 | free_head << 48;
    let head = |next: u64, last: u64, num: u64| 1 | next << 16 | last << 32 | num << 48;
    let cases = [
        (1, list(7), LogFault::NoSuchEntry { entry: 7, entries: 4 }),
        (1, list(4), LogFault::Lost { found: 3, entries: 4 }),
        (16, 3 << 16, LogFault::EntryTwice { entry: 3 }),
        (4, head(1, 1, 0), LogFault::ChainEnd { entry: 0, num: 0, last: 1 }),
        (4, head(1, 2, 2), LogFault::ChainEnd { entry: 0, num: 2, last: 2 }),
        (4, head(0, 0, 2), LogFault::EntryTwice { entry: 0 }),
        (4, head(9, 1, 2), LogFault::NoSuchEntry { entry: 9, entries: 4 }),
        (4, head(1, 1, 2) & !1, LogFault::Lost { found: 2, entries: 4 }),
        (2, 4 | 4 << 16, LogFault::Position { slot: 4, queue_size: 4 }),
        (14, 4, LogFault::BufferId { id: 4, queue_size: 4 }),
    ];
    for (at, word, expected) in cases {
        let bed = packed_with_two_chains();
        bed.set_word(at, word);
        assert_eq!(bed.fault(), expected);
    }
}

#[test]
fn packed_log_with_one_buffer_id_in_flight_twice_is_refused() {
    let bed = packed_with_two_chains();
    let id = bed.words()[10] & 0xffff;
    bed.set_word(14, id);
    assert_eq!(bed.fault(), LogFault::BufferId { id: id as u16, queue_size: 4 });
}

/// Disables proptest's file of failures, because Miri has no file system.
fn config() -> ProptestConfig {
    let cases = if cfg!(miri) { 8 } else { 2000 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    /// Any log is refused or served: no panic, and no access outside the log and the ring.
    #[test]
    fn log_of_any_contents_does_no_harm(
        packed: bool,
        words in prop::collection::vec((0_u64..24, prop_oneof![
            any::<u64>(),
            // Nearly valid values get further through the checks.
            (0_u64..2, 0_u64..6, 0_u64..6, 0_u64..4).prop_map(|(a, b, c, d)| a | b << 16 | c << 32 | d << 48),
        ]), 0..12),
        used_idx: u16,
    ) {
        let mut bed = if packed { packed_with_two_chains() } else { Bed::new(false) };
        drop(bed.open());
        for (at, word) in words {
            bed.set_word(at, word);
        }
        let head = bed.words()[1];
        bed.set_word(1, head & !0xffff_ffff | 1 | 4 << 16);
        bed.set_word(0, 0);
        if !packed {
            bed.ring.store(LAYOUT.used.0 + 2, &used_idx.to_le_bytes()).unwrap();
        }
        let Ok(mut device) = bed.open() else { return Ok(()) };
        prop_assert!(device.recovery().redone <= QUEUE_SIZE);
        for _ in 0..2 * QUEUE_SIZE {
            match device.pop(&mut bed.chain) {
                Ok(Some(tag)) | Err(crate::PopError::Chain { tag, .. }) => device.push_used(tag, 0),
                Ok(None) => { device.publish(); }
                Err(crate::PopError::Ring(_)) => break,
            }
        }
        device.publish();
    }
}
