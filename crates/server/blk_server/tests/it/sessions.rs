//! Sessions, and the rings that they start and stop: successive front-ends, two at once, and the state that a stop
//! leaves.
//!
//! Spec: vhost-user, "Ring states", GET_VRING_BASE, SET_VRING_CALL, RESET_DEVICE.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use guest_mem::GuestMemory;

use crate::rig::format::{Format, on_both_formats};
use crate::rig::passed::{
    add_transfer, event, faulty, hold, let_go, mappings, memfd, region, serves, share, take_signals, works,
};
use crate::rig::raw_guest::connected;
use crate::rig::{
    CALM, FrontEnd, Guest, MIB, Options, PATIENCE, Rig, code, eventually, feature, kind, ready, vring_addr,
    vring_state, wait_readable,
};

const OK: u8 = 0;
const REFUSED: u64 = 1;
/// `RING_EVENT_FLAGS_DISABLE` (virtio 1.3 §2.8.14) and the mark of a bareblk device at slot 3.
const WORKING_DEVICE_EVENT: u32 = 1 << 16 | 0x8000 | 0x7c00 | 3;
const WITHOUT_EVENT_IDX: u64 = feature::USUAL & !feature::EVENT_IDX;

fn used_idx(guest: &Guest) -> u16 {
    let mut idx = [0; 2];
    guest.view.read(guest.layout.used.0 + 2, &mut idx).unwrap();
    u16::from_le_bytes(idx)
}

/// A second front-end in the memory of the first, as after a migration on one host.
fn take_over(rig: &Rig, memory: &Arc<GuestMemory>, features: u64) -> FrontEnd {
    let mut front_end = rig.connect();
    front_end.negotiate(features);
    share(&mut front_end, memory.regions().to_vec());
    front_end
}

/// SET_VRING_ENABLE without waiting for the answer.
fn send_enable(front_end: &FrontEnd) {
    front_end.send_flags(code::SET_VRING_ENABLE, 9, &vring_state(0, 1), &[]);
}

fn is_unanswered(front_end: &FrontEnd) -> bool {
    front_end.socket().set_read_timeout(Some(CALM)).unwrap();
    let silent = front_end.receive().is_none();
    front_end.socket().set_read_timeout(Some(PATIENCE)).unwrap();
    silent
}

#[test]
fn front_ends_come_and_go_one_after_the_other() {
    let rig = Rig::start(Options::default());
    assert!((0..50).all(|_| works(&rig)));
}

#[test]
fn front_end_that_looks_at_the_configuration_and_leaves_is_followed_by_one_that_works() {
    let rig = Rig::start(Options::default());
    let looking = rig.connect();
    looking.negotiate(feature::USUAL);
    assert_eq!(looking.config(0, 60).len(), 60);
    drop(looking);
    assert!(works(&rig));
}

on_both_formats! {
    front_end_that_vanishes_leaves_its_buffers_mapped_until_the_requests_are_complete,
    second_session_starts_its_rings_when_the_first_stops_its,
    second_session_starts_its_rings_when_the_first_disconnects,
    stop_is_answered_after_the_requests_in_flight_with_the_base_that_follows_them,
    queue_started_with_a_stale_base_runs_no_request_twice,
    requests_available_before_the_queue_starts_are_served_without_a_kick,
    queue_stopped_and_started_again_goes_on_where_it_was,
    queue_goes_on_in_a_new_session_with_the_base_of_the_last_one,
    queue_set_up_again_with_a_fresh_ring_starts_from_its_beginning,
    device_reset_is_followed_by_a_new_negotiation,
    reset_waits_for_the_requests_in_flight,
    disabled_queue_pauses_and_an_enabled_one_goes_on,
    queues_on_two_workers_serve_one_disk_under_load,
}

fn front_end_that_vanishes_leaves_its_buffers_mapped_until_the_requests_are_complete(ring: Format) {
    let (options, engine) = faulty();
    let rig = Rig::start(options);
    let file = memfd(16 * MIB);
    let mut front_end = rig.connect();
    front_end.negotiate(ring.usual());
    share(&mut front_end, vec![region(&file, 0, 16 * MIB, 0)]);
    let mut guest = front_end.start_queue(0, 256, ring.usual());
    hold(&engine);
    for n in 0..8 {
        add_transfer(&mut guest, kind::IN, n * 8, (8 + n) * MIB, 4096);
    }
    guest.submit();
    assert!(eventually(|| engine.hanging() == 8));
    drop((front_end, guest));
    std::thread::sleep(CALM);
    assert_eq!(mappings(&file), 1);
    let_go(&engine);
    assert!(eventually(|| mappings(&file) == 0));
    assert!(works(&rig));
}

#[test]
fn second_session_negotiates_and_reads_configuration_while_the_first_runs() {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    let second = rig.connect();
    second.negotiate(feature::USUAL);
    assert_eq!(second.config(0, 8), (16 * MIB / 512).to_le_bytes());
    assert!(serves(&mut guest));
}

fn second_session_starts_its_rings_when_the_first_stops_its(ring: Format) {
    let rig = Rig::start(Options::default());
    let (first, mut guest) = ready(&rig, ring.usual());
    assert!(serves(&mut guest));
    let second = take_over(&rig, &first.memory, ring.usual());
    second.announce_queue(&guest);
    send_enable(&second);
    assert!(is_unanswered(&second));
    assert!(serves(&mut guest));
    first.stop_queue(0);
    assert_eq!(second.receive().unwrap().u64(), 0);
    assert!(serves(&mut guest));
}

fn second_session_starts_its_rings_when_the_first_disconnects(ring: Format) {
    let rig = Rig::start(Options::default());
    let (first, mut guest) = ready(&rig, ring.usual());
    let second = take_over(&rig, &first.memory, ring.usual());
    second.announce_queue(&guest);
    send_enable(&second);
    drop(first);
    assert_eq!(second.receive().unwrap().u64(), 0);
    assert!(serves(&mut guest));
}

#[test]
fn second_session_is_refused_when_the_first_keeps_its_rings_running() {
    let rig = Rig::start(Options::default());
    let (_first, mut guest) = ready(&rig, feature::USUAL);
    let mut second = rig.connect();
    second.negotiate(feature::USUAL);
    second.share_memory(16 * MIB);
    let other = second.new_guest(0, 256, feature::USUAL);
    second.announce_queue(&other);
    assert_eq!(second.acked(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]), REFUSED);
    assert!(serves(&mut guest));
}

#[test]
fn ring_that_failed_to_start_does_not_keep_other_sessions_out() {
    let rig = Rig::start(Options::default());
    let mut first = rig.connect();
    first.negotiate(feature::USUAL);
    first.share_memory(16 * MIB);
    let mut lost = first.new_guest(0, 256, feature::USUAL);
    lost.layout.used.0 += 1 << 40;
    first.announce_queue(&lost);
    first.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    assert!(lost.err_signalled());
    assert!(works(&rig));
}

fn stop_is_answered_after_the_requests_in_flight_with_the_base_that_follows_them(ring: Format) {
    let (options, engine) = faulty();
    let rig = Rig::start(options);
    let (front_end, mut guest) = ready(&rig, ring.usual());
    assert!(serves(&mut guest));
    hold(&engine);
    let pending: Vec<_> =
        (0..3).map(|n| add_transfer(&mut guest, kind::IN, n * 8, (8 + n) * MIB, 4096)).collect();
    guest.submit();
    assert!(eventually(|| engine.hanging() == 3));
    front_end.send(code::GET_VRING_BASE, &vring_state(0, 0), &[]);
    assert!(is_unanswered(&front_end));
    let_go(&engine);
    let reply = front_end.receive().unwrap();
    assert_eq!(reply.body, vring_state(0, ring.base_after(5, 15, 256)));
    // The requests have completed, visibly, before the reply.
    assert!(pending.iter().all(|pending| pending.status(&guest) == OK));
    assert!(pending.iter().all(|_| guest.ring.pop_used().unwrap().is_some()));
}

/// QEMU sends the base of a new ring if its back-end had disappeared; some front-ends are one request behind.
fn queue_started_with_a_stale_base_runs_no_request_twice(ring: Format) {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, ring.usual());
    let first = vec![1; 4096];
    assert!((0..16).all(|_| guest.read(0, 512).status == Some(OK)));
    assert_eq!(guest.write(0, &first).status, Some(OK));
    assert_eq!(front_end.stop_queue(0), ring.base_after(17, 17 * 3, 256));
    for stale in [guest.ring.initial_base(), ring.base_after(16, 16 * 3, 256), 0] {
        front_end.announce_queue(&guest);
        front_end.ok(code::SET_VRING_BASE, &vring_state(0, stale), &[]);
        assert_eq!(front_end.stop_queue(0), ring.base_after(17, 17 * 3, 256));
    }
    front_end.announce_queue(&guest);
    assert_eq!(guest.read(0, 4096).data, first);
    assert_eq!(front_end.stop_queue(0), ring.base_after(18, 18 * 3, 256));
}

/// If its device died while it took requests, the position of a packed ring is unknown. For a split ring, the used
/// index would reveal it.
#[test]
fn packed_ring_whose_device_died_at_work_fails_alone_and_a_new_setup_revives_it() {
    let rig = Rig::start(Options::default());
    let features = Format::Packed.usual();
    let (front_end, mut guest) = ready(&rig, features);
    let mut other = front_end.start_queue(1, 256, features);
    assert!(serves(&mut guest));
    let exact = front_end.stop_queue(0);
    guest.view.store(guest.layout.used.0, &WORKING_DEVICE_EVENT.to_le_bytes()).unwrap();
    front_end.announce_queue(&guest);
    assert!(guest.err_signalled());
    assert!(serves(&mut other));
    // Completions from before the death may be anywhere in the ring, so even this does not help.
    front_end.stop_queue(0);
    front_end.ok(code::SET_VRING_BASE, &vring_state(0, exact), &[]);
    front_end.ok(code::SET_VRING_KICK, &0u64.to_ne_bytes(), &[guest.kick.as_fd()]);
    assert!(guest.err_signalled());
    front_end.stop_queue(0);
    let mut revived = front_end.start_queue(0, 256, features);
    assert!(serves(&mut revived) && serves(&mut other));
}

#[test]
fn new_call_descriptor_is_signalled_at_once_and_for_what_completes_later() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let new = event();
    front_end.ok(code::SET_VRING_CALL, &0u64.to_ne_bytes(), &[new.as_fd()]);
    assert_eq!(take_signals(&new), 1);
    take_signals(&guest.call);
    let pending = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 512);
    assert!(!guest.ring.arm_interrupts().unwrap());
    guest.submit();
    assert!(wait_readable(&new, Instant::now() + PATIENCE));
    assert_eq!((take_signals(&guest.call), pending.status(&guest)), (0, OK));
}

#[test]
fn queue_without_a_call_descriptor_is_served_silently() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    front_end.ok(code::SET_VRING_CALL, &(1u64 << 8).to_ne_bytes(), &[]);
    take_signals(&guest.call);
    let pending = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 512);
    guest.submit();
    assert!(eventually(|| pending.status(&guest) == OK && used_idx(&guest) == 1));
    assert_eq!(take_signals(&guest.call), 0);
}

fn requests_available_before_the_queue_starts_are_served_without_a_kick(ring: Format) {
    let rig = Rig::start(Options::default());
    let mut front_end = rig.connect();
    front_end.negotiate(ring.usual());
    front_end.share_memory(16 * MIB);
    let mut guest = front_end.new_guest(0, 256, ring.usual());
    let pending = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 512);
    guest.ring.publish();
    front_end.announce_queue(&guest);
    front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    guest.wait_for(pending.token);
    assert_eq!(pending.status(&guest), OK);
}

/// With 16 entries, a packed ring's wrap counter flips every few requests, and chains cross the ring's end.
fn queue_stopped_and_started_again_goes_on_where_it_was(ring: Format) {
    let rig = Rig::start(Options::default());
    let front_end = connected(&rig, ring.usual());
    let mut guest = front_end.start_queue(0, 16, ring.usual());
    for round in 1..=40 {
        let requests = round * 3 - 1;
        assert!(serves(&mut guest));
        let base = front_end.stop_queue(0);
        assert_eq!(base, ring.base_after(requests, requests * 3, 16));
        let waiting = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 512);
        guest.submit();
        assert_eq!(waiting.status(&guest), 0xff);
        front_end.ok(code::SET_VRING_BASE, &vring_state(0, base), &[]);
        front_end.ok(code::SET_VRING_KICK, &0u64.to_ne_bytes(), &[guest.kick.as_fd()]);
        guest.wait_for(waiting.token);
        assert_eq!(waiting.status(&guest), OK);
    }
}

/// What happens after a migration: the next session gets only the base that the last one replied.
fn queue_goes_on_in_a_new_session_with_the_base_of_the_last_one(ring: Format) {
    let rig = Rig::start(Options::default());
    let mut first = connected(&rig, ring.usual());
    let mut guest = first.start_queue(0, 16, ring.usual());
    for round in 1..=20 {
        assert!(serves(&mut guest));
        let base = first.stop_queue(0);
        assert_eq!(base, ring.base_after(round * 2, round * 6, 16));
        let next = take_over(&rig, &first.memory, ring.usual());
        next.announce_queue(&guest);
        next.ok(code::SET_VRING_BASE, &vring_state(0, base), &[]);
        send_enable(&next);
        drop(std::mem::replace(&mut first, next));
        assert_eq!(first.receive().unwrap().u64(), 0);
    }
    assert!(serves(&mut guest));
}

/// The guest's driver starts over with a zeroed ring repeatedly, after different numbers of requests.
fn queue_set_up_again_with_a_fresh_ring_starts_from_its_beginning(ring: Format) {
    let rig = Rig::start(Options::default());
    let front_end = connected(&rig, ring.usual());
    for requests in [1, 2, 7, 40] {
        let mut guest = front_end.start_queue(0, 16, ring.usual());
        assert!((0..requests).all(|_| guest.read(0, 512).status == Some(OK)));
        assert_eq!(front_end.stop_queue(0), ring.base_after(requests, requests * 3, 16));
    }
}

/// What QEMU with firmware does: one queue without EVENT_IDX, then a reset, then the kernel with all features.
fn device_reset_is_followed_by_a_new_negotiation(ring: Format) {
    let rig = Rig::start(Options::default());
    let mut front_end = rig.connect();
    front_end.negotiate(ring.plain());
    front_end.share_memory(16 * MIB);
    for features in [ring.plain(), ring.usual(), ring.plain(), ring.usual()] {
        front_end.ok(code::RESET_DEVICE, &[], &[]);
        let offered = front_end.ask_u64(code::GET_FEATURES);
        front_end.ok(code::SET_FEATURES, &(features & offered).to_ne_bytes(), &[]);
        let mut first = front_end.start_queue(0, 128, features);
        let mut second = front_end.start_queue(1, 256, features);
        assert!(serves(&mut first) && serves(&mut second));
    }
}

fn reset_waits_for_the_requests_in_flight(ring: Format) {
    let (options, engine) = faulty();
    let rig = Rig::start(options);
    let (front_end, mut guest) = ready(&rig, ring.usual());
    hold(&engine);
    let pending = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 4096);
    guest.submit();
    assert!(eventually(|| engine.hanging() == 1));
    front_end.send_flags(code::RESET_DEVICE, 9, &[], &[]);
    assert!(is_unanswered(&front_end));
    let_go(&engine);
    assert_eq!(front_end.receive().unwrap().u64(), 0);
    assert_eq!(pending.status(&guest), OK);
}

fn disabled_queue_pauses_and_an_enabled_one_goes_on(ring: Format) {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, ring.usual());
    assert!(serves(&mut guest));
    front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 0), &[]);
    let pending = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 512);
    guest.submit();
    guest.kick();
    std::thread::sleep(CALM);
    assert_eq!(pending.status(&guest), 0xff);
    front_end.ok(code::SET_VRING_ENABLE, &vring_state(0, 1), &[]);
    guest.wait_for(pending.token);
    assert!(serves(&mut guest));
}

#[test]
fn features_that_change_under_a_running_queue_apply_to_it() {
    let rig = Rig::start(Options::default());
    let (front_end, guest) = ready(&rig, feature::USUAL);
    let offered = front_end.ask_u64(code::GET_FEATURES);
    // The driver starts over without a message: zeroed ring, one feature less.
    let mut fresh = front_end.new_guest(0, 256, WITHOUT_EVENT_IDX);
    front_end.ok(code::SET_FEATURES, &(WITHOUT_EVENT_IDX & offered).to_ne_bytes(), &[]);
    front_end.ok(code::SET_VRING_ADDR, &vring_addr(0, &fresh.layout), &[]);
    (fresh.kick, fresh.call) = (guest.kick, guest.call);
    assert!(serves(&mut fresh));
}

#[test]
fn ninth_front_end_of_a_disk_is_refused_and_a_place_that_is_free_again_is_given() {
    let rig = Rig::start(Options::default());
    let mut eight: Vec<_> = (0..8).map(|_| rig.connect()).collect();
    assert!(eight.iter().all(|front_end| front_end.ask_u64(code::GET_QUEUE_NUM) == 4));
    assert!(rig.connect().is_closed());
    eight.pop();
    assert!(eventually(|| {
        let front_end = rig.connect();
        front_end.send(code::GET_QUEUE_NUM, &[], &[]);
        front_end.receive().is_some()
    }));
}

#[test]
fn connections_that_never_said_anything_make_room_for_one_that_does() {
    let rig = Rig::start(Options::default());
    let silent: Vec<_> = (0..8).map(|_| rig.connect()).collect();
    assert_eq!(rig.connect().ask_u64(code::GET_QUEUE_NUM), 4);
    assert!(silent[0].is_closed());
}

#[test]
fn eventfd_as_call_descriptor_that_is_full_blocks_nobody() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let mut other = front_end.start_queue(1, 256, feature::USUAL);
    let call = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap(); // blocks when full
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    front_end.ok(code::SET_VRING_CALL, &0u64.to_ne_bytes(), &[call.as_fd()]);
    let pending = add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 512);
    guest.ring.arm_interrupts().unwrap();
    guest.submit();
    assert!(eventually(|| pending.status(&guest) == OK));
    assert!(serves(&mut other));
}

#[test]
fn anything_but_an_eventfd_is_refused_as_kick_call_and_err() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    let null: OwnedFd = std::fs::File::options().write(true).open("/dev/null").unwrap().into();
    let (pipe, _write_end) = std::io::pipe().unwrap();
    let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
    let others = [file, null, pipe.into(), socket.into()];
    for code in [code::SET_VRING_KICK, code::SET_VRING_CALL, code::SET_VRING_ERR] {
        let refused = |fd: &OwnedFd| front_end.acked(code, &1u64.to_ne_bytes(), &[fd.as_fd()]) == REFUSED;
        assert!(others.iter().all(refused));
    }
    assert!(serves(&mut guest));
}

fn queues_on_two_workers_serve_one_disk_under_load(ring: Format) {
    let rig = Rig::start(Options { workers: 2, ..Options::default() });
    let mut front_end = rig.connect();
    front_end.negotiate(ring.usual());
    front_end.share_memory(16 * MIB);
    let guests: Vec<_> = (0..4).map(|index| front_end.start_queue(index, 256, ring.usual())).collect();
    std::thread::scope(|scope| guests.into_iter().for_each(|guest| drop(scope.spawn(|| load(guest)))));
    let byte = |queue: u64, n: u64| (queue * 50 + n) as u8 + 1;
    let expected: Vec<u8> = (0..4).flat_map(|q| (0..32).flat_map(move |n| vec![byte(q, n); 4096])).collect();
    assert_eq!(rig.image_bytes(0, expected.len()), expected);
}

/// Writes 32 blocks at once and reads them back at once, many times. Each queue has its own part of the disk.
fn load(mut guest: Guest) {
    let queue = u64::from(guest.index);
    let addr = |n: u64| (8 + 2 * queue) * MIB + n * 4096;
    for _ in 0..50 {
        for verb in [kind::OUT, kind::IN] {
            for n in 0..32 {
                let byte = if verb == kind::OUT { (queue * 50 + n) as u8 + 1 } else { 0 };
                guest.view.store(addr(n), &[byte; 4096]).unwrap();
                add_transfer(&mut guest, verb, (queue * 32 + n) * 8, addr(n), 4096);
            }
            guest.submit();
            assert!((0..32).all(|_| guest.next_used().is_some()));
        }
        let mut read = vec![0; 4096];
        for n in 0..32 {
            guest.view.read(addr(n), &mut read).unwrap();
            assert_eq!(read, vec![(queue * 50 + n) as u8 + 1; 4096]);
        }
    }
}
