//! Guests that break a ring: that queue stops and says so, the others go on, and a new setup revives it.
//!
//! Not here: faults inside one request (`hostile_chains.rs`), rings whose memory goes (`memory.rs`).
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod rig;

use std::os::fd::AsFd;
use std::time::Instant;

use guest_mem::GuestAddress;
use io_engine::{Fault, Verb, When};
use rig::raw_guest::{PLAIN, RawGuest, connected, faulty, last, readable, writable};
use rig::{CALM, FrontEnd, Guest, MIB, Options, Rig, code, eventually, vring_state, wait_readable};

/// A front-end with two queues started: one to be broken, one to go on.
fn two_queues(rig: &Rig) -> (FrontEnd, RawGuest, Guest) {
    let front_end = connected(rig, PLAIN);
    let raw = RawGuest::start(&front_end, 0);
    let other = front_end.start_queue(1, 256, PLAIN);
    (front_end, raw, other)
}

fn offer_normal_read(raw: &RawGuest) {
    let at = raw.area();
    raw.prepare_read();
    raw.set(&[readable(at, 16, 1), writable(at + 0x1000, 512, 2), last(at + 0x800, 1)]);
    raw.offer(0);
}

/// The queue is stopped and says so; the other one goes on; a stop and a new setup revive it.
fn broken_but_revivable(front_end: &FrontEnd, raw: &mut RawGuest, other: &mut Guest) {
    assert!(raw.guest.err_signalled(), "the err fd stays silent");
    assert_eq!(other.read(0, 512).status, Some(0));
    let used = raw.ring.used_idx();
    offer_normal_read(raw);
    std::thread::sleep(CALM);
    assert_eq!(raw.ring.used_idx(), used, "a broken queue takes requests");
    front_end.stop_queue(0);
    let revived = front_end.new_guest(0, 256, PLAIN);
    front_end.announce_queue(&revived);
    assert!(RawGuest::over(revived).works(), "the queue does not come back");
    assert_eq!(other.read(0, 512).status, Some(0));
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

#[test]
fn head_that_is_still_in_flight_stops_the_queue_and_its_first_request_completes() {
    let (options, fake) = faulty(Options::default());
    let rig = Rig::start(options);
    let (front_end, mut raw, mut other) = two_queues(&rig);
    fake.inject(When::Verb(Verb::Read), Fault::Hold, 1);
    offer_normal_read(&raw);
    assert!(eventually(|| fake.held() == 1));
    raw.offer(0);
    assert!(raw.guest.err_signalled());
    fake.release().unwrap();
    assert_eq!(raw.next_used(), Some((0, 513)));
    broken_but_revivable(&front_end, &mut raw, &mut other);
}

#[test]
fn head_in_flight_whose_chain_was_spoilt_meanwhile_stops_the_queue_too() {
    let (options, fake) = faulty(Options::default());
    let rig = Rig::start(options);
    let (front_end, mut raw, mut other) = two_queues(&rig);
    fake.inject(When::Verb(Verb::Read), Fault::Hold, 1);
    offer_normal_read(&raw);
    assert!(eventually(|| fake.held() == 1));
    raw.set(&[readable(0, 16, 0)]);
    raw.offer(0);
    assert!(raw.guest.err_signalled());
    fake.release().unwrap();
    assert_eq!(raw.next_used(), Some((0, 513)));
    broken_but_revivable(&front_end, &mut raw, &mut other);
}

/// Announces queue 0 with its rings at `base` and enables it.
fn start_ring_at(front_end: &FrontEnd, base: u64) -> Guest {
    let mut guest = front_end.new_guest(0, 256, PLAIN);
    guest.layout.descriptors = GuestAddress(base);
    guest.layout.avail = GuestAddress(base + 0x8000);
    guest.layout.used = GuestAddress(base + 0xa000);
    front_end.announce_queue(&guest);
    front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    guest
}

fn unusable_ring_is_reported(base: u64) {
    let rig = Rig::start(Options::default());
    let front_end = connected(&rig, PLAIN);
    let mut other = front_end.start_queue(1, 256, PLAIN);
    let guest = start_ring_at(&front_end, base);
    assert!(guest.err_signalled());
    assert_eq!(other.read(0, 512).status, Some(0));
    front_end.stop_queue(0);
    let revived = front_end.new_guest(0, 256, PLAIN);
    front_end.announce_queue(&revived);
    assert!(RawGuest::over(revived).works());
}

#[test]
fn ring_in_no_region_is_reported_and_a_new_setup_works() {
    unusable_ring_is_reported(64 * MIB);
}

#[test]
fn ring_across_the_end_of_memory_is_reported_and_a_new_setup_works() {
    unusable_ring_is_reported(16 * MIB - 0xa000);
}

#[test]
fn misaligned_ring_is_reported_and_a_new_setup_works() {
    unusable_ring_is_reported(8 * MIB + 8);
}

#[test]
fn well_behaved_queue_never_signals_its_err_fd() {
    let rig = Rig::start(Options::default());
    let (_front_end, mut raw, other) = two_queues(&rig);
    assert!((0..50).all(|_| raw.works()));
    assert!(!wait_readable(&raw.guest.err, Instant::now() + CALM));
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
