//! When a write is durable: the calls that reach the kernel for each choice of feature bits and cache mode.
//!
//! The calls come from io_engine's recorder. Spec: virtio 1.3 §5.2.5.2, §5.2.6.2.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use io_engine::{Record, Verb};
use rustix::io::ReadWriteFlags;

use crate::rig;
use crate::rig::cache_bed::{BARE, Bed, WRITEBACK, verbs};
use crate::rig::format::{Format, on_both_formats};
use crate::rig::{MIB, Options, Rig, code, feature, kind, segment_bytes};

/// Whether the second call was issued after the first one had completed, and both succeeded.
fn one_after_the_other(calls: &[Record]) -> bool {
    let results = calls.iter().map(|call| call.completed.expect("answered before the kernel was done"));
    results.clone().all(|(_, result)| result >= 0)
        && results.zip(&calls[1..]).all(|((completed, _), next)| completed < next.issued)
}

#[test]
fn driver_that_flushes_has_cached_writes_and_a_flush_is_a_sync() {
    let mut bed = Bed::start(feature::USUAL);
    assert_eq!(bed.writeback(), 1);
    assert!(!bed.write_is_durable());
    assert_eq!(verbs(&bed.calls(kind::FLUSH, &[])), [Verb::Sync]);
}

#[test]
fn driver_without_flush_and_cache_control_has_durable_writes() {
    let mut bed = Bed::start(BARE);
    assert_eq!(bed.writeback(), 0);
    assert!(bed.write_is_durable());
}

#[test]
fn driver_with_cache_control_only_starts_durable_and_switches_both_ways() {
    let mut bed = Bed::start(BARE | feature::CONFIG_WCE);
    assert_eq!((bed.writeback(), bed.write_is_durable()), (0, true));
    bed.set_writeback(1);
    assert_eq!((bed.writeback(), bed.write_is_durable()), (1, false));
    bed.set_writeback(0);
    assert_eq!((bed.writeback(), bed.write_is_durable()), (0, true));
}

#[test]
fn driver_with_flush_and_cache_control_starts_cached_and_switches_both_ways() {
    let mut bed = Bed::start(feature::USUAL | feature::CONFIG_WCE);
    assert_eq!((bed.writeback(), bed.write_is_durable()), (1, false));
    bed.set_writeback(0);
    assert_eq!((bed.writeback(), bed.write_is_durable()), (0, true));
    assert_eq!(verbs(&bed.calls(kind::FLUSH, &[])), [Verb::Sync]);
    bed.set_writeback(1);
    assert_eq!((bed.writeback(), bed.write_is_durable()), (1, false));
}

#[test]
fn features_said_again_keep_the_cache_mode_that_the_guest_chose() {
    let mut bed = Bed::start(feature::USUAL | feature::CONFIG_WCE);
    bed.set_writeback(0);
    bed.front_end.negotiate(feature::USUAL | feature::CONFIG_WCE);
    assert_eq!((bed.writeback(), bed.write_is_durable()), (0, true));
}

#[test]
fn guest_that_switched_the_cache_off_finds_it_off_after_its_reset() {
    let mut bed = Bed::start(feature::USUAL | feature::CONFIG_WCE);
    bed.set_writeback(0);
    bed.front_end.ok(code::RESET_DEVICE, &[], &[]);
    bed.front_end.negotiate(BARE); // the firmware's driver
    bed.front_end.negotiate(feature::USUAL | feature::CONFIG_WCE);
    bed.guest = bed.front_end.start_queue(0, 256, feature::USUAL);
    assert_eq!((bed.writeback(), bed.write_is_durable()), (0, true));
}

on_both_formats! {
    guest_that_switched_the_cache_off_finds_it_off_after_its_front_end_reconnected,
    guest_that_kept_the_cache_on_has_it_on_after_its_front_end_reconnected,
    guest_of_an_earlier_server_is_taken_for_one_that_switched_the_cache_off_until_it_chooses,
    ring_that_pauses_and_goes_on_keeps_the_cache_mode,
}

fn guest_that_switched_the_cache_off_finds_it_off_after_its_front_end_reconnected(ring: Format) {
    let mut bed = Bed::start(ring.usual() | feature::CONFIG_WCE);
    bed.set_writeback(0);
    assert!(bed.write_is_durable());
    bed.reconnect(ring.usual() | feature::CONFIG_WCE);
    assert_eq!((bed.writeback(), bed.write_is_durable()), (0, true));
}

fn guest_that_kept_the_cache_on_has_it_on_after_its_front_end_reconnected(ring: Format) {
    let mut bed = Bed::start(ring.usual() | feature::CONFIG_WCE);
    assert!(!bed.write_is_durable());
    bed.reconnect(ring.usual() | feature::CONFIG_WCE);
    assert_eq!((bed.writeback(), bed.write_is_durable()), (1, false));
}

fn guest_of_an_earlier_server_is_taken_for_one_that_switched_the_cache_off_until_it_chooses(ring: Format) {
    let mut bed = Bed::start(ring.usual() | feature::CONFIG_WCE);
    assert!(!bed.write_is_durable());
    drop(bed.rig.stop());
    bed.rig.start_server(Options { recorder: Some(bed.recorder.clone()), ..Options::default() });
    bed.reconnect(ring.usual() | feature::CONFIG_WCE);
    assert!(bed.write_is_durable());
    bed.set_writeback(1);
    assert!(!bed.write_is_durable());
}

fn ring_that_pauses_and_goes_on_keeps_the_cache_mode(ring: Format) {
    let mut bed = Bed::start(ring.usual() | feature::CONFIG_WCE);
    assert!(!bed.write_is_durable());
    bed.front_end.stop_queue(0);
    bed.front_end.announce_queue(&bed.guest);
    assert!(!bed.write_is_durable());
}

#[test]
fn zeroes_and_discards_of_a_writethrough_disk_are_synced_before_they_complete() {
    let mut bed = Bed::start(BARE);
    let zeroes = bed.calls(kind::WRITE_ZEROES, &segment_bytes(0, 64, 0));
    let unmapped = bed.calls(kind::WRITE_ZEROES, &segment_bytes(0, 64, 1));
    let discard = bed.calls(kind::DISCARD, &segment_bytes(64, 64, 0));
    for calls in [zeroes, unmapped, discard] {
        assert_eq!(verbs(&calls), [Verb::Allocate, Verb::Sync]);
        assert!(one_after_the_other(&calls));
    }
}

#[test]
fn every_segment_of_a_writethrough_discard_is_synced_before_it_completes() {
    let mut bed = Bed::start(BARE);
    let segments: Vec<_> = (0..4).map(|i| segment_bytes(i * 64, 8, 0)).collect();
    let calls = bed.calls(kind::DISCARD, &segments.concat());
    let last_freed =
        calls.iter().filter(|call| call.verb == Verb::Allocate).map(|call| call.completed.unwrap().0);
    let last_freed = last_freed.max().unwrap();
    let synced = calls.iter().any(|call| call.verb == Verb::Sync && call.issued > last_freed);
    let each = calls.iter().filter(|call| call.verb == Verb::Sync).count() == 4;
    assert!(synced || each);
    assert!(calls.iter().all(|call| call.completed.is_some_and(|(_, result)| result == 0)));
}

#[test]
fn zeroes_and_discards_of_a_writeback_disk_leave_the_sync_to_the_flush() {
    let mut bed = Bed::start(feature::USUAL);
    assert_eq!(verbs(&bed.calls(kind::WRITE_ZEROES, &segment_bytes(0, 64, 0))), [Verb::Allocate]);
    assert_eq!(verbs(&bed.calls(kind::DISCARD, &segment_bytes(64, 64, 0))), [Verb::Allocate]);
}

#[test]
fn misaligned_write_of_a_writethrough_disk_is_durable_in_every_part() {
    let mut bed = Bed::start(BARE);
    let bytes = 600 * 1024;
    let head = bed.guest.area();
    bed.recorder.clear();
    let pieces = [rig::raw_guest::range(8 * MIB + 1, bytes)];
    let token = bed.guest.scattered(kind::OUT, 0, head, &pieces).unwrap();
    bed.guest.submit();
    bed.guest.wait_for(token);
    let calls = bed.recorder.records();
    assert_eq!(calls.iter().map(|call| call.len_bytes).max(), Some(256 * 1024));
    assert!(calls.iter().all(|call| call.flags == ReadWriteFlags::DSYNC.bits() as i32));
}

#[test]
fn reads_never_sync() {
    let mut bed = Bed::start(BARE);
    bed.recorder.clear();
    assert_eq!(bed.guest.read(0, 4096).status, Some(0));
    let calls = bed.recorder.records();
    assert_eq!((verbs(&calls), calls[0].flags), (vec![Verb::Read], 0));
}

#[test]
fn configuration_is_not_written_without_cache_control() {
    let mut bed = Bed::start(feature::USUAL);
    assert_ne!(bed.front_end.set_config(WRITEBACK, &[0]), 0);
    assert_eq!((bed.writeback(), bed.write_is_durable()), (1, false));
}

#[test]
fn only_the_writeback_byte_takes_only_zero_or_one() {
    let mut bed = Bed::start(feature::USUAL | feature::CONFIG_WCE);
    assert_ne!(bed.front_end.set_config(WRITEBACK, &[2]), 0);
    assert_ne!(bed.front_end.set_config(WRITEBACK, &[0, 0]), 0);
    assert_ne!(bed.front_end.set_config(0, &[0; 8]), 0);
    assert_ne!(bed.front_end.set_config(u32::MAX, &[0]), 0);
    assert_eq!((bed.writeback(), bed.write_is_durable()), (1, false));
    assert_eq!(bed.front_end.config(0, 8), (16 * MIB / 512).to_le_bytes());
}

#[test]
fn features_without_version_1_are_refused_and_a_second_try_works() {
    let rig = Rig::start(Options::default());
    let front_end = rig.connect();
    let protocol = front_end.ask_u64(code::GET_PROTOCOL_FEATURES);
    front_end.send(code::SET_PROTOCOL_FEATURES, &protocol.to_ne_bytes(), &[]);
    let legacy = feature::USUAL & !feature::VERSION_1;
    assert_ne!(front_end.acked(code::SET_FEATURES, &legacy.to_ne_bytes(), &[]), 0);
    assert_eq!(front_end.acked(code::SET_FEATURES, &feature::USUAL.to_ne_bytes(), &[]), 0);
}
