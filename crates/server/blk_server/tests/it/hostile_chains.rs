//! Guests that send invalid requests: each request fails without affecting others, and the next request works.
//!
//! An invalid request completes with IOERR if its status byte can be written, otherwise with length 0.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use virtqueue::split::RawDescriptor;

use crate::rig::format::{Format, on_both_formats};
use crate::rig::packed_guest::{Hostile, hostile_guest};
use crate::rig::raw_guest::{last, readable, table, writable};
use crate::rig::{MIB, Options, Rig, eventually, header_bytes, kind};

/// An address outside the guest's 16 MiB.
const NOWHERE: u64 = 64 * MIB;
/// Length 0: the device did not even write the status.
const NOT_WRITTEN: (u32, u8) = (0, 0xff);
/// The status is IOERR; the device wrote nothing else.
const IOERR: (u32, u8) = (1, 1);

/// A read of one sector in three descriptors; the tests corrupt one.
fn normal(raw: &dyn Hostile) -> [RawDescriptor; 3] {
    let at = raw.area();
    [readable(at, 16, 1), writable(at + 0x1000, 512, 2), last(at + 0x800, 1)]
}

/// Returns the result of a read that `spoil` has corrupted. The next request must work.
fn answered(ring: Format, spoil: impl FnOnce(&dyn Hostile, &mut [RawDescriptor; 3])) -> (u32, u8) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut raw) = hostile_guest(&rig, ring);
    let mut chain = normal(&*raw);
    spoil(&*raw, &mut chain);
    let answer = raw.exchange(&chain);
    assert!(raw.works(), "the next request fails");
    answer
}

on_both_formats! {
    unspoilt_chain_is_read,
    readable_descriptor_after_a_writable_one_fails,
    malformed_chain_that_is_answered_counts_as_an_error,
    chain_without_a_writable_byte_is_given_back_unwritten,
    empty_status_descriptor_makes_the_last_data_byte_the_status,
    status_in_no_region_is_given_back_unwritten,
    header_in_no_region_fails,
    header_that_is_too_short_or_empty_fails,
    data_in_no_region_fails,
    data_longer_than_memory_and_disk_fails,
    write_from_no_region_fails_and_leaves_the_disk_alone,
    sectors_past_the_end_fail_whatever_the_overflow,
    indirect_table_with_a_next_descriptor_is_given_back_unwritten,
    indirect_table_of_65_535_entries_is_given_back_unwritten,
    indirect_table_of_no_or_broken_entries_is_given_back_unwritten,
    indirect_table_in_no_region_is_given_back_unwritten,
    every_descriptor_of_the_ring_in_one_chain_is_read_and_one_more_is_not,
}

fn unspoilt_chain_is_read(ring: Format) {
    assert_eq!(answered(ring, |_, _| {}), (513, 0));
}

#[test]
fn chain_that_loops_to_its_head_is_given_back_unwritten() {
    let answer = answered(Format::Split, |_, chain| {
        chain[1] = RawDescriptor { flags: RawDescriptor::NEXT, next: 0, ..chain[1] };
    });
    assert_eq!(answer, NOT_WRITTEN);
}

#[test]
fn descriptor_that_is_its_own_successor_is_given_back_unwritten() {
    assert_eq!(answered(Format::Split, |_, chain| chain[1].next = 1), NOT_WRITTEN);
}

#[test]
fn next_outside_the_ring_is_given_back_unwritten() {
    assert_eq!(answered(Format::Split, |_, chain| chain[1].next = 256), NOT_WRITTEN);
    assert_eq!(answered(Format::Split, |_, chain| chain[1].next = u16::MAX), NOT_WRITTEN);
}

fn make_data_readable_after_status(chain: &mut [RawDescriptor; 3]) {
    chain.swap(1, 2);
    chain[1] = RawDescriptor { flags: chain[1].flags | RawDescriptor::NEXT, next: 2, ..chain[1] };
    chain[2].flags = 0;
}

fn readable_descriptor_after_a_writable_one_fails(ring: Format) {
    assert_eq!(answered(ring, |_, chain| make_data_readable_after_status(chain)), IOERR);
}

fn malformed_chain_that_is_answered_counts_as_an_error(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut raw) = hostile_guest(&rig, ring);
    let mut chain = normal(&*raw);
    make_data_readable_after_status(&mut chain);
    assert_eq!(raw.exchange(&chain), IOERR);
    let counted = || {
        let counters = rig.report_of(0).queues[0].counters;
        (counters.requests(), counters.other, counters.errors)
    };
    // The worker stores its counters after the driver can see the answer.
    assert!(eventually(|| counted() == (1, 1, 1)), "{:?}", counted());
}

fn chain_without_a_writable_byte_is_given_back_unwritten(ring: Format) {
    let missing = answered(ring, |_, chain| chain[0].flags = 0);
    let empty = answered(ring, |_, chain| {
        chain[1].len_bytes = 0;
        chain[2].len_bytes = 0;
    });
    assert_eq!((missing, empty), (NOT_WRITTEN, NOT_WRITTEN));
}

fn empty_status_descriptor_makes_the_last_data_byte_the_status(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut raw) = hostile_guest(&rig, ring);
    let mut chain = normal(&*raw);
    chain[2].len_bytes = 0;
    let (used_bytes, untouched) = raw.exchange(&chain);
    assert_eq!((used_bytes, untouched, raw.byte(raw.area() + 0x1000 + 511)), (1, 0xff, 1));
    assert!(raw.works());
}

fn status_in_no_region_is_given_back_unwritten(ring: Format) {
    let gap = answered(ring, |_, chain| chain[2].addr = NOWHERE);
    let end = answered(ring, |_, chain| chain[2].addr = 16 * MIB);
    let wrapping = answered(ring, |_, chain| chain[2] = last(u64::MAX, 2));
    assert_eq!((gap, end, wrapping), (NOT_WRITTEN, NOT_WRITTEN, NOT_WRITTEN));
}

fn header_in_no_region_fails(ring: Format) {
    let gap = answered(ring, |_, chain| chain[0].addr = NOWHERE);
    let across_the_end = answered(ring, |_, chain| chain[0].addr = 16 * MIB - 8);
    let wrapping = answered(ring, |_, chain| chain[0].addr = u64::MAX - 7);
    assert_eq!((gap, across_the_end, wrapping), (IOERR, IOERR, IOERR));
}

fn header_that_is_too_short_or_empty_fails(ring: Format) {
    let short = answered(ring, |_, chain| chain[0].len_bytes = 15);
    let empty = answered(ring, |_, chain| chain[0].len_bytes = 0);
    assert_eq!((short, empty), (IOERR, IOERR));
}

fn data_in_no_region_fails(ring: Format) {
    let gap = answered(ring, |_, chain| chain[1].addr = NOWHERE);
    let across_the_end = answered(ring, |_, chain| chain[1].addr = 16 * MIB - 256);
    let wrapping = answered(ring, |_, chain| chain[1].addr = u64::MAX - 255);
    assert_eq!((gap, across_the_end, wrapping), (IOERR, IOERR, IOERR));
}

fn data_longer_than_memory_and_disk_fails(ring: Format) {
    let answer = answered(ring, |_, chain| chain[1].len_bytes = u32::MAX - 511);
    assert_eq!(answer, IOERR);
}

fn write_from_no_region_fails_and_leaves_the_disk_alone(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut raw) = hostile_guest(&rig, ring);
    let at = raw.area();
    raw.store(at + 0x100, &header_bytes(kind::OUT, 0));
    let chain = [readable(at + 0x100, 16, 1), readable(16 * MIB - 256, 512, 2), last(at + 0x800, 1)];
    raw.store(16 * MIB - 256, &[0xee; 256]);
    assert_eq!(raw.exchange(&chain), IOERR);
    assert_eq!(rig.image_bytes(0, 4096), vec![0; 4096]);
    assert!(raw.works());
}

fn sectors_past_the_end_fail_whatever_the_overflow(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut raw) = hostile_guest(&rig, ring);
    let at = raw.area();
    let sectors = [32_768, 1 << 55, u64::MAX / 512, u64::MAX / 512 + 1, u64::MAX];
    for sector in sectors {
        raw.store(at + 0x100, &header_bytes(kind::IN, sector));
        let chain = [readable(at + 0x100, 16, 1), writable(at + 0x1000, 512, 2), last(at + 0x800, 1)];
        assert_eq!(raw.exchange(&chain), IOERR, "sector {sector}");
    }
    assert!(raw.works());
}

#[test]
fn indirect_table_that_loops_is_given_back_unwritten() {
    let answer = answered(Format::Split, |raw, chain| {
        let at = raw.area() + 0x4000;
        raw.set_table(at, &[readable(raw.area(), 16, 1), readable(raw.area(), 16, 0)]);
        chain[0] = table(at, 32);
    });
    assert_eq!(answer, NOT_WRITTEN);
}

#[test]
fn indirect_next_outside_its_table_is_given_back_unwritten() {
    let answer = answered(Format::Split, |raw, chain| {
        let at = raw.area() + 0x4000;
        raw.set_table(at, &[readable(raw.area(), 16, 2), *chain.last().unwrap(), *chain.last().unwrap()]);
        chain[0] = table(at, 32);
    });
    assert_eq!(answer, NOT_WRITTEN);
}

#[test]
fn indirect_table_inside_a_table_is_given_back_unwritten() {
    let answer = answered(Format::Split, |raw, chain| {
        let at = raw.area() + 0x4000;
        raw.set_table(at, &[readable(raw.area(), 16, 1), table(at, 32)]);
        chain[0] = table(at, 32);
    });
    assert_eq!(answer, NOT_WRITTEN);
}

fn indirect_table_with_a_next_descriptor_is_given_back_unwritten(ring: Format) {
    let answer = answered(ring, |raw, chain| {
        let at = raw.area() + 0x4000;
        raw.set_table(at, &[readable(raw.area(), 16, 1), last(raw.area() + 0x800, 1)]);
        chain[0] = RawDescriptor { flags: RawDescriptor::INDIRECT | RawDescriptor::NEXT, ..table(at, 32) };
    });
    assert_eq!(answer, NOT_WRITTEN);
}

fn indirect_table_of_65_535_entries_is_given_back_unwritten(ring: Format) {
    let answer = answered(ring, |raw, chain| {
        let at = 8 * MIB;
        let entries = (0..u16::MAX).map(|i| readable(raw.area(), 16, i.saturating_add(1)));
        raw.set_table(at, &entries.collect::<Vec<_>>());
        chain[0] = table(at, u32::from(u16::MAX) * 16);
    });
    assert_eq!(answer, NOT_WRITTEN);
}

fn indirect_table_of_no_or_broken_entries_is_given_back_unwritten(ring: Format) {
    let empty = answered(ring, |raw, chain| chain[0] = table(raw.area() + 0x4000, 0));
    let ragged = answered(ring, |raw, chain| chain[0] = table(raw.area() + 0x4000, 40));
    let four_gib = answered(ring, |raw, chain| chain[0] = table(raw.area() + 0x4000, !15));
    assert_eq!((empty, ragged, four_gib), (NOT_WRITTEN, NOT_WRITTEN, NOT_WRITTEN));
}

fn indirect_table_in_no_region_is_given_back_unwritten(ring: Format) {
    let gap = answered(ring, |_, chain| chain[0] = table(NOWHERE, 48));
    let across_the_end = answered(ring, |raw, chain| {
        raw.set_table(16 * MIB - 16, &[readable(raw.area(), 16, 1)]);
        chain[0] = table(16 * MIB - 16, 32);
    });
    let wrapping = answered(ring, |_, chain| chain[0] = table(u64::MAX - 15, 32));
    assert_eq!((gap, across_the_end, wrapping), (NOT_WRITTEN, NOT_WRITTEN, NOT_WRITTEN));
}

fn every_descriptor_of_the_ring_in_one_chain_is_read_and_one_more_is_not(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut raw) = hostile_guest(&rig, ring);
    let at = raw.area();
    let mut chain: Vec<_> =
        (0..256).map(|i| writable(at + 0x1000 + u64::from(i) * 512, 512, i + 1)).collect();
    chain[0] = readable(at, 16, 1);
    chain[255] = last(at + 0x800, 1);
    assert_eq!(raw.exchange(&chain), (254 * 512 + 1, 0));
    let at_table = 8 * MIB;
    let mut longer: Vec<_> = (0..257).map(|i| writable(at + 0x1000, 512, i + 1)).collect();
    longer[0] = readable(at, 16, 1);
    longer[256] = last(at + 0x800, 1);
    raw.set_table(at_table, &longer);
    assert_eq!(raw.exchange(&[table(at_table, 257 * 16)]), NOT_WRITTEN);
    assert!(raw.works());
}
