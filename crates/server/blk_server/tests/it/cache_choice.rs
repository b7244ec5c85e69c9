//! Guests that may have disabled their write cache through another server: how this server detects such a guest, and
//! how long it treats the guest's writes as durable.
//!
//! As long as the guest may have disabled its cache through another server, its writes are durable. The next choice
//! that the guest makes on this server takes precedence.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::os::fd::AsFd;
use std::sync::Arc;

use guest_mem::GuestMemory;
use io_engine::Verb;
use rustix::io::ReadWriteFlags;

use crate::rig;
use crate::rig::cache_bed::Bed;
use crate::rig::format::{Format, on_both_formats};
use crate::rig::in_flight_log::Log;
use crate::rig::passed::memfd;
use crate::rig::{FrontEnd, Guest, Options, code, feature, vring_addr, vring_state};

/// The features of a guest that may disable its cache.
fn full(ring: Format) -> u64 {
    ring.usual() | feature::CONFIG_WCE
}

/// A guest that uses queue 0 and, as far as this server knows, has never disabled its cache.
fn bed(ring: Format) -> Bed {
    let mut bed = Bed::start(full(ring));
    assert!(!bed.write_is_durable());
    bed
}

/// Stops the server and starts another one that has no state of the guest.
fn restart(bed: &mut Bed) {
    drop(bed.rig.stop());
    bed.rig.start_server(Options { recorder: Some(bed.recorder.clone()), ..Options::default() });
}

/// Connects a new session of the same guest, without a ring.
fn connect(bed: &mut Bed, ring: Format) {
    let memory = Arc::clone(&bed.front_end.memory);
    connect_with(bed, ring, memory);
}

fn connect_with(bed: &mut Bed, ring: Format, memory: Arc<GuestMemory>) {
    bed.front_end = bed.rig.connect();
    bed.front_end.negotiate(full(ring));
    bed.front_end.share(memory);
}

fn enable(front_end: &FrontEnd, queue: u16) {
    front_end.ok(code::SET_VRING_ENABLE, &vring_state(queue, 1), &[]);
}

fn start(bed: &Bed) {
    bed.front_end.announce_queue(&bed.guest);
    enable(&bed.front_end, 0);
}

/// Announces a ring outside the guest's memory.
fn fail_to_start(bed: &Bed) {
    bed.front_end.announce_queue(&bed.guest);
    let mut layout = bed.guest.layout;
    layout.used.0 += 1 << 40;
    bed.front_end.ok(code::SET_VRING_ADDR, &vring_addr(0, &layout), &[]);
    enable(&bed.front_end, 0);
    assert!(bed.guest.err_signalled());
    rig::passed::take_signals(&bed.guest.err);
}

fn write_is_durable(bed: &Bed, guest: &mut Guest) -> bool {
    bed.recorder.clear();
    assert_eq!(guest.write(0, &[1; 4096]).status, Some(0));
    let calls = bed.recorder.records();
    assert_eq!((calls.len(), calls[0].verb), (1, Verb::Write));
    calls[0].flags & ReadWriteFlags::DSYNC.bits().cast_signed() != 0
}

on_both_formats! {
    ring_in_use_whose_first_start_failed_is_still_one_of_a_guest_that_may_have_chosen,
    position_of_a_ring_that_never_ran_here_tells_nothing,
    start_that_failed_in_one_session_tells_the_next_one_nothing,
    ring_that_its_log_kept_from_starting_is_still_one_of_a_guest_that_may_have_chosen,
    ring_in_use_with_a_log_is_one_of_a_guest_that_may_have_chosen,
    new_ring_tells_nothing_of_another_that_is_in_use,
    new_ring_before_one_in_use_is_served_durably_from_its_first_request,
    guest_that_left_and_came_back_may_have_chosen_elsewhere,
    choice_of_writeback_does_not_count_for_a_guest_that_left_and_came_back,
    guest_that_comes_in_place_of_one_that_was_killed_may_have_chosen_elsewhere,
    guest_that_moves_to_another_front_end_of_this_server_keeps_its_mode,
    guest_that_was_reset_and_left_may_have_chosen_elsewhere,
    guest_that_chose_is_known_even_if_its_ring_fails_to_start_then,
    guest_of_this_server_that_reconnects_after_a_start_that_failed_keeps_its_mode,
    ring_that_was_paused_by_its_front_end_keeps_the_mode_in_the_same_session,
}

fn ring_in_use_whose_first_start_failed_is_still_one_of_a_guest_that_may_have_chosen(ring: Format) {
    let mut bed = bed(ring);
    restart(&mut bed);
    connect(&mut bed, ring);
    fail_to_start(&bed);
    start(&bed);
    assert!(bed.write_is_durable());
    bed.set_writeback(1);
    assert!(!bed.write_is_durable());
}

fn position_of_a_ring_that_never_ran_here_tells_nothing(ring: Format) {
    let mut bed = bed(ring);
    restart(&mut bed);
    connect(&mut bed, ring);
    fail_to_start(&bed);
    bed.front_end.stop_queue(0);
    start(&bed);
    assert!(bed.write_is_durable());
}

fn start_that_failed_in_one_session_tells_the_next_one_nothing(ring: Format) {
    let mut bed = bed(ring);
    restart(&mut bed);
    connect(&mut bed, ring);
    fail_to_start(&bed);
    connect(&mut bed, ring);
    start(&bed);
    assert!(bed.write_is_durable());
}

fn ring_that_its_log_kept_from_starting_is_still_one_of_a_guest_that_may_have_chosen(ring: Format) {
    let mut bed = bed(ring);
    restart(&mut bed);
    connect(&mut bed, ring);
    let log = |version: u8| {
        let fd = memfd(16_384);
        rustix::io::pwrite(&fd, &[version], 8).unwrap();
        fd
    };
    let sizes = [1_u16, 256, 0, 0].into_iter().flat_map(u16::to_ne_bytes);
    let body: Vec<_> = [16_384_u64, 0].into_iter().flat_map(u64::to_ne_bytes).chain(sizes).collect();
    bed.front_end.ok(code::SET_INFLIGHT_FD, &body, &[log(7).as_fd()]);
    start(&bed);
    assert!(bed.guest.err_signalled());
    bed.front_end.ok(code::SET_INFLIGHT_FD, &body, &[log(0).as_fd()]);
    start(&bed);
    assert!(bed.write_is_durable());
}

fn ring_in_use_with_a_log_is_one_of_a_guest_that_may_have_chosen(ring: Format) {
    let log = Log::new();
    let mut bed = bed(ring);
    restart(&mut bed);
    connect(&mut bed, ring);
    log.give(&bed.front_end);
    start(&bed);
    assert!(bed.write_is_durable());
    // The next server reads the same state from the log.
    restart(&mut bed);
    connect(&mut bed, ring);
    log.give(&bed.front_end);
    start(&bed);
    assert!(bed.write_is_durable());
}

fn new_ring_tells_nothing_of_another_that_is_in_use(ring: Format) {
    let mut bed = bed(ring);
    restart(&mut bed);
    connect(&mut bed, ring);
    let mut new = bed.front_end.start_queue(1, 256, full(ring));
    assert!(!write_is_durable(&bed, &mut new));
    connect(&mut bed, ring);
    start(&bed);
    assert!(bed.write_is_durable());
}

fn new_ring_before_one_in_use_is_served_durably_from_its_first_request(ring: Format) {
    let mut bed = Bed::start(full(ring));
    let mut second = bed.front_end.start_queue(1, 256, full(ring));
    assert!(!write_is_durable(&bed, &mut second));
    let base = bed.front_end.stop_queue(1);
    restart(&mut bed);
    connect(&mut bed, ring);
    bed.front_end.announce_queue(&bed.guest);
    bed.front_end.announce_queue(&second);
    bed.front_end.ok(code::SET_VRING_BASE, &vring_state(1, base), &[]);
    enable(&bed.front_end, 0);
    assert!(bed.write_is_durable());
    enable(&bed.front_end, 1);
    assert!(write_is_durable(&bed, &mut second));
}

fn guest_that_left_and_came_back_may_have_chosen_elsewhere(ring: Format) {
    let mut bed = bed(ring);
    bed.front_end.stop_queue(0);
    connect(&mut bed, ring);
    start(&bed);
    assert!(bed.write_is_durable());
}

fn choice_of_writeback_does_not_count_for_a_guest_that_left_and_came_back(ring: Format) {
    let mut bed = bed(ring);
    bed.set_writeback(1);
    bed.front_end.stop_queue(0);
    connect(&mut bed, ring);
    start(&bed);
    assert!(bed.write_is_durable());
}

/// A killed VMM does not stop its rings.
fn guest_that_comes_in_place_of_one_that_was_killed_may_have_chosen_elsewhere(ring: Format) {
    let mut bed = bed(ring);
    let mut elsewhere = self::bed(ring);
    elsewhere.front_end.stop_queue(0);
    connect_with(&mut bed, ring, Arc::clone(&elsewhere.front_end.memory));
    std::mem::swap(&mut bed.guest, &mut elsewhere.guest);
    start(&bed);
    assert!(bed.write_is_durable());
}

/// A migration on one host: the second VMM connects before the first one stops, and continues where the first one
/// stopped.
fn guest_that_moves_to_another_front_end_of_this_server_keeps_its_mode(ring: Format) {
    let mut bed = bed(ring);
    let memory = Arc::clone(&bed.front_end.memory);
    let mut second = bed.rig.connect();
    second.negotiate(full(ring));
    let base = bed.front_end.stop_queue(0);
    second.share(memory);
    bed.front_end = second;
    bed.front_end.announce_queue(&bed.guest);
    bed.front_end.ok(code::SET_VRING_BASE, &vring_state(0, base), &[]);
    enable(&bed.front_end, 0);
    assert!(!bed.write_is_durable());
}

fn guest_that_was_reset_and_left_may_have_chosen_elsewhere(ring: Format) {
    let mut bed = bed(ring);
    bed.front_end.ok(code::RESET_DEVICE, &[], &[]);
    connect(&mut bed, ring);
    start(&bed);
    assert!(bed.write_is_durable());
}

fn guest_that_chose_is_known_even_if_its_ring_fails_to_start_then(ring: Format) {
    let mut bed = bed(ring);
    restart(&mut bed);
    connect(&mut bed, ring);
    bed.set_writeback(1);
    fail_to_start(&bed);
    start(&bed);
    assert!(!bed.write_is_durable());
}

fn guest_of_this_server_that_reconnects_after_a_start_that_failed_keeps_its_mode(ring: Format) {
    let mut bed = bed(ring);
    connect(&mut bed, ring);
    fail_to_start(&bed);
    connect(&mut bed, ring);
    start(&bed);
    assert!(!bed.write_is_durable());
}

fn ring_that_was_paused_by_its_front_end_keeps_the_mode_in_the_same_session(ring: Format) {
    let mut bed = bed(ring);
    for _ in 0..2 {
        bed.front_end.stop_queue(0);
        start(&bed);
        assert!(!bed.write_is_durable());
    }
}
