//! Guests that break a ring: that queue stops and signals its error, other queues continue, and a new setup restarts
//! it.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::os::fd::AsFd;
use std::time::Instant;

use guest_mem::GuestAddress;
use io_engine::{Fault, Verb, When};

use crate::rig::format::{Format, on_both_formats};
use crate::rig::packed_guest::{Hostile, PackedGuest, hostile_over};
use crate::rig::raw_guest::{RawGuest, connected, faulty, last, readable, table};
use crate::rig::{CALM, FrontEnd, Guest, MIB, Options, Rig, code, eventually, vring_state, wait_readable};

on_both_formats! {
    tag_that_is_still_in_flight_stops_the_queue_and_its_first_request_completes,
    ring_in_no_region_is_reported_and_a_new_setup_works,
    ring_across_the_end_of_memory_is_reported_and_a_new_setup_works,
    misaligned_ring_is_reported_and_a_new_setup_works,
    base_that_no_ring_of_its_format_has_fails_that_queue_alone,
    well_behaved_queue_never_signals_its_err_fd,
}

/// A front-end with two started queues: one to break, one to continue.
fn two_queues(rig: &Rig) -> (FrontEnd, RawGuest, Guest) {
    let (front_end, guest, other) = two_guests(rig, Format::Split);
    (front_end, RawGuest::over(guest), other)
}

fn two_packed_queues(rig: &Rig) -> (FrontEnd, PackedGuest, Guest) {
    let (front_end, guest, other) = two_guests(rig, Format::Packed);
    (front_end, PackedGuest::over(guest), other)
}

fn two_guests(rig: &Rig, ring: Format) -> (FrontEnd, Guest, Guest) {
    let front_end = connected(rig, ring.plain());
    let guest = front_end.start_queue(0, 256, ring.plain());
    let other = front_end.start_queue(1, 256, ring.plain());
    (front_end, guest, other)
}

/// The queue stops and signals its error. The other queue continues. A stop and a new setup restart the broken one.
fn broken_but_revivable(front_end: &FrontEnd, raw: &mut dyn Hostile, other: &mut Guest) {
    assert!(raw.guest().err_signalled(), "the err fd stays silent");
    assert_eq!(other.read(0, 512).status, Some(0));
    raw.offer_read();
    std::thread::sleep(CALM);
    assert_eq!(raw.byte(raw.area() + 0x800), 0xff, "a broken queue takes requests");
    revive(front_end, if other.features.packed { Format::Packed } else { Format::Split });
    assert_eq!(other.read(0, 512).status, Some(0));
}

fn revive(front_end: &FrontEnd, ring: Format) {
    front_end.stop_queue(0);
    let revived = front_end.new_guest(0, 256, ring.plain());
    front_end.announce_queue(&revived);
    assert!(hostile_over(revived, ring).works(), "the queue does not come back");
}

#[test]
fn available_index_that_jumps_stops_the_queue_until_it_is_set_up_again() {
    let rig = Rig::start(Options::default());
    let (front_end, mut raw, mut other) = two_queues(&rig);
    assert!(raw.works());
    raw.ring.set_avail_idx(raw.ring.avail_idx().wrapping_add(257));
    raw.guest.kick();
    broken_but_revivable(&front_end, &mut raw, &mut other);
}

#[test]
fn available_index_that_goes_back_stops_the_queue_until_it_is_set_up_again() {
    let rig = Rig::start(Options::default());
    let (front_end, mut raw, mut other) = two_queues(&rig);
    assert!(raw.works());
    raw.ring.set_avail_idx(0);
    raw.guest.kick();
    broken_but_revivable(&front_end, &mut raw, &mut other);
}

#[test]
fn head_outside_the_ring_stops_the_queue_until_it_is_set_up_again() {
    let rig = Rig::start(Options::default());
    let (front_end, mut raw, mut other) = two_queues(&rig);
    raw.offer(256);
    broken_but_revivable(&front_end, &mut raw, &mut other);
}

fn tag_that_is_still_in_flight_stops_the_queue_and_its_first_request_completes(ring: Format) {
    let (options, fake) = faulty(Options::default());
    let rig = Rig::start(options);
    let (front_end, guest, mut other) = two_guests(&rig, ring);
    let mut raw = hostile_over(guest, ring);
    fake.inject(When::Verb(Verb::Read), Fault::Hang, 1);
    raw.offer_read();
    assert!(eventually(|| fake.hanging() == 1));
    raw.offer_read();
    assert!(raw.guest().err_signalled());
    fake.release().unwrap();
    assert_eq!(raw.next_used_read(), Some((0, 513)));
    broken_but_revivable(&front_end, &mut *raw, &mut other);
}

#[test]
fn head_in_flight_whose_chain_was_spoilt_meanwhile_stops_the_queue_too() {
    let (options, fake) = faulty(Options::default());
    let rig = Rig::start(options);
    let (front_end, mut raw, mut other) = two_queues(&rig);
    fake.inject(When::Verb(Verb::Read), Fault::Hang, 1);
    raw.offer_read();
    assert!(eventually(|| fake.hanging() == 1));
    raw.set(&[readable(0, 16, 0)]);
    raw.offer(0);
    assert!(raw.guest.err_signalled());
    fake.release().unwrap();
    assert_eq!(raw.next_used(), Some((0, 513)));
    broken_but_revivable(&front_end, &mut raw, &mut other);
}

// ---- packed rings

#[test]
fn buffer_id_outside_the_ring_stops_the_queue_until_it_is_set_up_again() {
    let rig = Rig::start(Options::default());
    let (front_end, mut raw, mut other) = two_packed_queues(&rig);
    assert!(raw.works());
    raw.offer(256, &raw.normal_read());
    broken_but_revivable(&front_end, &mut raw, &mut other);
}

#[test]
fn packed_chain_without_an_end_stops_the_queue_until_it_is_set_up_again() {
    let rig = Rig::start(Options::default());
    let (front_end, mut raw, mut other) = two_packed_queues(&rig);
    assert!(raw.works());
    let endless = [readable(raw.area(), 16, 0); 256];
    raw.offer(0, &endless);
    broken_but_revivable(&front_end, &mut raw, &mut other);
}

#[test]
fn packed_chain_longer_than_what_is_not_in_flight_stops_the_queue_and_what_is_completes() {
    let (options, fake) = faulty(Options::default());
    let rig = Rig::start(options);
    let (front_end, mut raw, mut other) = two_packed_queues(&rig);
    fake.inject(When::Verb(Verb::Read), Fault::Hang, 1);
    raw.offer_read();
    assert!(eventually(|| fake.hanging() == 1));
    // Its last descriptor is in the slot of the ring's first.
    raw.offer(1, &[&[readable(raw.area(), 16, 0); 253][..], &[last(raw.area(), 1)]].concat());
    assert!(raw.guest.err_signalled());
    fake.release().unwrap();
    assert_eq!(raw.next_used_read(), Some((0, 513)));
    broken_but_revivable(&front_end, &mut raw, &mut other);
}

#[test]
fn buffer_id_in_flight_of_an_unusable_chain_stops_the_queue_too() {
    let (options, fake) = faulty(Options::default());
    let rig = Rig::start(options);
    let (front_end, mut raw, mut other) = two_packed_queues(&rig);
    fake.inject(When::Verb(Verb::Read), Fault::Hang, 1);
    raw.offer_read();
    assert!(eventually(|| fake.hanging() == 1));
    raw.offer(0, &[table(raw.area(), 5)]);
    assert!(raw.guest.err_signalled());
    fake.release().unwrap();
    assert_eq!(raw.next_used_read(), Some((0, 513)));
    broken_but_revivable(&front_end, &mut raw, &mut other);
}

// ---- rings that cannot be started

/// Announces queue 0 with its rings at `base` and enables it.
fn start_ring_at(front_end: &FrontEnd, base: u64, ring: Format) -> Guest {
    let mut guest = front_end.new_guest(0, 256, ring.plain());
    guest.layout.descriptors = GuestAddress(base);
    guest.layout.avail = GuestAddress(base + 0x8000);
    guest.layout.used = GuestAddress(base + 0xa000);
    front_end.announce_queue(&guest);
    front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    guest
}

fn unusable_ring_is_reported(base: u64, ring: Format) {
    let rig = Rig::start(Options::default());
    let front_end = connected(&rig, ring.plain());
    let mut other = front_end.start_queue(1, 256, ring.plain());
    let guest = start_ring_at(&front_end, base, ring);
    assert!(guest.err_signalled());
    assert_eq!(other.read(0, 512).status, Some(0));
    revive(&front_end, ring);
}

fn ring_in_no_region_is_reported_and_a_new_setup_works(ring: Format) {
    unusable_ring_is_reported(64 * MIB, ring);
}

fn ring_across_the_end_of_memory_is_reported_and_a_new_setup_works(ring: Format) {
    unusable_ring_is_reported(16 * MIB - 0xa000, ring);
}

fn misaligned_ring_is_reported_and_a_new_setup_works(ring: Format) {
    unusable_ring_is_reported(8 * MIB + 8, ring);
}

/// A split ring's index has only 16 bits; a packed ring has no slot 256, and nothing in flight when it starts.
fn base_that_no_ring_of_its_format_has_fails_that_queue_alone(ring: Format) {
    let impossible = match ring {
        Format::Split => [0x1_0000, 0x8000_8000],
        Format::Packed => [0x8100_8100, 0x8001_8002],
    };
    let rig = Rig::start(Options::default());
    let (front_end, guest, mut other) = two_guests(&rig, ring);
    for base in impossible {
        front_end.stop_queue(0);
        front_end.ok(code::SET_VRING_BASE, &vring_state(0, base), &[]);
        front_end.ok(code::SET_VRING_KICK, &0u64.to_ne_bytes(), &[guest.kick.as_fd()]);
        assert!(guest.err_signalled());
        let _ = rustix::io::read(&guest.err, &mut [0; 8]);
        assert_eq!(other.read(0, 512).status, Some(0));
    }
    revive(&front_end, ring);
}

fn well_behaved_queue_never_signals_its_err_fd(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, guest, other) = two_guests(&rig, ring);
    let mut raw = hostile_over(guest, ring);
    assert!((0..200).all(|_| raw.works()));
    assert!(!wait_readable(&raw.guest().err, Instant::now() + CALM));
    assert!(!wait_readable(&other.err, Instant::now() + CALM));
}

#[test]
fn broken_queue_reports_to_an_err_fd_that_came_after_its_start() {
    let rig = Rig::start(Options::default());
    let (front_end, mut raw, mut other) = two_queues(&rig);
    let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
    let late = rustix::event::eventfd(0, flags).unwrap();
    front_end.ok(code::SET_VRING_ERR, &0u64.to_ne_bytes(), &[late.as_fd()]);
    raw.guest.err = late;
    raw.offer(u16::MAX);
    broken_but_revivable(&front_end, &mut raw, &mut other);
}
