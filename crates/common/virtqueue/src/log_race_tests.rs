//! Tests with logs that a front-end changes while a queue reads them: the queue reads each word once and uses the
//! value it read.
//!
//! These tests use one thread: after each word that the queue reads, the test changes some words. (A test with a
//! real second thread: `blk_server/tests/it/hostile_logs.rs`.)
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use proptest::prelude::*;

use crate::log::{PACKED_WORDS, SPLIT_WORDS};
use crate::packed::FRESH_BASE;
use crate::step::observing_reads;
use crate::{
    Chain, DeviceQueue, DriverQueue, LogArea, PopError, Recovery, RingFault, RingFeatures, RingLayout,
};

const QUEUE_SIZE: u16 = 4;
/// Number of entries in the log; more than the ring has.
const ENTRIES: u16 = 16;
/// Words of a packed ring's log.
const MOST_WORDS: usize = PACKED_WORDS.0 + PACKED_WORDS.1 * ENTRIES as usize;
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

/// A ring with two chains in flight, and its log; the device has died.
struct Bed {
    ring: MemoryView,
    log: MemoryView,
    features: RingFeatures,
    words: usize,
}

impl Bed {
    fn new(packed: bool) -> Self {
        let features = RingFeatures { event_idx: false, indirect: false, packed };
        let (head, each) = if packed { PACKED_WORDS } else { SPLIT_WORDS };
        let words = head + each * usize::from(ENTRIES);
        let bed = Self { ring: memory(16 << 10), log: memory(4096), features, words };
        let mut driver = DriverQueue::new(&bed.ring, LAYOUT, features).unwrap();
        let (mut device, mut chain) = (bed.open().unwrap(), Chain::with_capacity(QUEUE_SIZE));
        for addr in [0x2000, 0x2100] {
            driver.add(&[GuestRange { addr, len_bytes: 7 }], &[], addr).unwrap();
        }
        driver.publish();
        while device.pop(&mut chain).unwrap().is_some() {}
        bed
    }

    fn open(&self) -> Result<DeviceQueue, RingFault> {
        let area = LogArea::new(Arc::clone(self.log.memory()), 0, ENTRIES);
        let base = if self.features.packed { FRESH_BASE } else { 0 };
        DeviceQueue::with_log(&self.ring, LAYOUT, self.features, base, &area)
    }

    /// Opens the queue and calls `change` after each word that the queue reads, with the number of words read
    /// so far.
    fn open_while(
        &self,
        mut change: impl FnMut(&MemoryView, usize) + 'static,
    ) -> Result<DeviceQueue, RingFault> {
        let (log, mut count) = (self.log.clone(), 0);
        let observe = move || {
            count += 1;
            change(&log, count);
        };
        observing_reads(observe, || self.open())
    }
}

fn set_word(log: &MemoryView, at: usize, word: u64) {
    log.store(8 * at as u64, &word.to_le_bytes()).unwrap();
}

fn word(log: &MemoryView, at: usize) -> u64 {
    let mut bytes = [0; 8];
    log.read(8 * at as u64, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

/// Pops every chain and uses each at once.
fn drain(device: &mut DeviceQueue) -> Result<Vec<u64>, RingFault> {
    let (mut chain, mut addrs) = (Chain::with_capacity(QUEUE_SIZE), vec![]);
    loop {
        match device.pop(&mut chain) {
            Ok(None) => break,
            Ok(Some(tag)) => {
                addrs.push(chain.readable().first().map_or(0, |range| range.addr));
                device.push_used(tag, 0);
            }
            Err(PopError::Chain { tag, .. }) => device.push_used(tag, 0),
            Err(PopError::Ring(fault)) => return Err(fault),
        }
    }
    device.publish();
    Ok(addrs)
}

#[test]
fn entry_beyond_a_split_ring_that_goes_in_flight_behind_the_look_at_it_is_not_popped() {
    let bed = Bed::new(false);
    let beyond = SPLIT_WORDS.0 + SPLIT_WORDS.1 * usize::from(ENTRIES - 1);
    let mut device = bed.open_while(move |log, _| set_word(log, beyond, 1 ^ word(log, beyond))).unwrap();
    assert!(device.to_redo() <= QUEUE_SIZE);
    drain(&mut device).unwrap();
}

#[test]
fn each_word_is_read_once_and_what_it_says_later_changes_nothing() {
    for packed in [false, true] {
        let bed = Bed::new(packed);
        let reads = Rc::new(Cell::new(0));
        let counted = Rc::clone(&reads);
        let mut device = bed
            .open_while(move |log, count| {
                counted.set(count);
                (0..count).for_each(|at| set_word(log, at, u64::MAX));
            })
            .unwrap();
        assert_eq!(reads.get(), bed.words);
        assert_eq!(device.recovery(), Recovery { redone: 2, was_foreign: false });
        assert_eq!(drain(&mut device).unwrap(), [0x2000, 0x2100]);
    }
}

#[test]
fn batch_that_names_a_head_beyond_its_split_ring_is_that_of_a_longer_ring() {
    let bed = Bed::new(false);
    let last_used = u64::from(QUEUE_SIZE);
    set_word(&bed.log, 1, 1 | u64::from(ENTRIES) << 16 | last_used << 32 | 0xffff << 48);
    assert_eq!(bed.open().unwrap().recovery(), Recovery { redone: 0, was_foreign: true });
}

/// Disables proptest's file of failures, because Miri has no file system.
fn config() -> ProptestConfig {
    let cases = if cfg!(miri) { 4 } else { 500 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    /// For any stores between any two reads: the queue reports a fault, or pops no more chains than the ring
    /// has, all of them the ring's own.
    #[test]
    fn log_that_changes_in_any_way_does_no_harm(
        packed: bool,
        stores in prop::collection::vec((0..MOST_WORDS, prop_oneof![
            any::<u64>(),
            0_u64..2,
            (0_u64..2, 0_u64..18, 0_u64..18, 0_u64..4).prop_map(|(a, b, c, d)| a | b << 16 | c << 32 | d << 48),
        ]), 1..MOST_WORDS),
    ) {
        let bed = Bed::new(packed);
        let words = bed.words;
        let opened = bed.open_while(move |log, count| {
            let (at, word) = stores[count % stores.len()];
            set_word(log, at % words, word);
        });
        if let Ok(mut device) = opened {
            prop_assert!(device.to_redo() <= QUEUE_SIZE);
            let _ = drain(&mut device);
        }
    }
}
