//! Front-ends that attack the process instead of their own disk: the process's other disk must not notice.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use io_engine::{Engine, EngineConfig, FakeEngine, FakeHandle};
use rustix::fs::ftruncate;
use virtqueue::split::RawDescriptor;

use crate::rig::passed::{add_transfer, hold, let_go, memfd, region, serves, share};
use crate::rig::raw_guest::{PLAIN, RawGuest, last, readable, table, writable};
use crate::rig::{FrontEnd, Guest, MIB, Options, Rig, code, eventually, feature, header_bytes, kind, ready};

/// Address of the raw guests' header. The status byte that all chains share follows the header.
const HEADER: u64 = 3 * MIB;
const STATUS: u64 = HEADER + 64;
/// Address of the raw guests' indirect tables, a page or two for each table.
const TABLES: u64 = 4 * MIB;

/// A working guest of the second disk.
fn neighbour(rig: &Rig) -> (FrontEnd, Guest) {
    let mut front_end = rig.connect_to(1);
    front_end.negotiate(feature::USUAL);
    front_end.share_memory(16 * MIB);
    let mut guest = front_end.start_queue(0, 256, feature::USUAL);
    assert!(serves(&mut guest));
    (front_end, guest)
}

/// A front-end of the first disk with this much memory.
fn hostile(rig: &Rig, memory_bytes: u64) -> FrontEnd {
    let mut front_end = rig.connect();
    front_end.negotiate(PLAIN);
    front_end.share_memory(memory_bytes);
    front_end
}

/// Makes `heads` chains of the ring, all with the table at [`TABLES`].
fn fill_ring(raw: &RawGuest, heads: u16, verb: u32, descriptors: &[RawDescriptor]) {
    raw.store(HEADER, &header_bytes(verb, 0));
    raw.set_table(TABLES, descriptors);
    for head in 0..heads {
        raw.ring.set_descriptor(head, table(TABLES, descriptors.len() as u32 * 16));
        raw.ring.set_avail_entry(head, head);
    }
}

/// Makes chains available up to the `idx`-th.
fn offer_up_to(raw: &RawGuest, idx: u16) {
    raw.ring.set_avail_idx(idx);
    raw.guest.kick();
}

/// A discard whose segment table has one byte per page, on every second page from `first_page` on.
fn scattered_discard(first_page: u64) -> Vec<RawDescriptor> {
    let page = |number: u16| first_page + u64::from(number) * 0x2000;
    let segments = (0..256).map(|number| readable(page(number), 1, number + 2));
    let header = std::iter::once(readable(HEADER, 16, 1));
    header.chain(segments).chain([last(page(256), 1)]).collect()
}

/// A fault must not cost the process two mappings: the default limit is 65,530, and 128 chains touch 32,896 pages in
/// one pass.
#[test]
fn memory_truncated_under_128_scattered_discards_ends_that_session_only() {
    const EXTRA: u64 = 64 * MIB;
    let rig = Rig::start(Options { disks: 2, queue_size: 1024, ..Options::default() });
    let (_other, mut other_guest) = neighbour(&rig);
    let (main, extra) = (memfd(16 * MIB), memfd(512 * MIB));
    let mut front_end = hostile(&rig, MIB);
    share(&mut front_end, vec![region(&main, 0, 16 * MIB, 0), region(&extra, EXTRA, 512 * MIB, 0)]);
    let raw = RawGuest::start(&front_end, 0);
    raw.store(HEADER, &header_bytes(kind::DISCARD, 0));
    for chain in 0..128 {
        let at = TABLES + u64::from(chain) * 0x2000;
        let descriptors = scattered_discard(EXTRA + u64::from(chain) * 257 * 0x2000);
        raw.set_table(at, &descriptors);
        raw.ring.set_descriptor(chain, table(at, descriptors.len() as u32 * 16));
        raw.ring.set_avail_entry(chain, chain);
    }
    ftruncate(&extra, 0).unwrap();
    offer_up_to(&raw, 128);
    assert!(front_end.is_closed());
    assert!(serves(&mut other_guest));
}

/// The worker takes both chains in one batch: the first finds the truncated page, after which the whole region reads as
/// zeroes.
#[test]
fn write_from_the_rest_of_a_truncated_region_does_not_succeed() {
    let rig = Rig::start(Options::default());
    let mut front_end = rig.connect();
    front_end.negotiate(PLAIN);
    let (main, cut) = (memfd(16 * MIB), memfd(2 * MIB));
    share(&mut front_end, vec![region(&main, 0, 16 * MIB, 0), region(&cut, 64 * MIB, 2 * MIB, 0)]);
    let raw = RawGuest::start(&front_end, 0);
    raw.store(HEADER, &header_bytes(kind::OUT, 0));
    raw.store(STATUS + 1, &[0xff]);
    let faulting = [readable(65 * MIB, 16, 1), last(STATUS, 1)];
    let writing = [readable(HEADER, 16, 3), readable(64 * MIB, 4096, 4), last(STATUS + 1, 1)];
    raw.set(&[&faulting[..], &writing[..]].concat());
    raw.ring.set_avail_entry(0, 0);
    raw.ring.set_avail_entry(1, 2);
    ftruncate(&cut, MIB).unwrap();
    raw.ring.set_avail_idx(2);
    raw.guest.kick();
    assert!(front_end.is_closed());
    assert_ne!(raw.byte(STATUS + 1), 0);
}

#[test]
fn tcp_socket_that_lingers_is_refused_as_call_descriptor() {
    let rig = Rig::start(Options { disks: 2, ..Options::default() });
    let (_other, mut other_guest) = neighbour(&rig);
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let lingering = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    rustix::net::sockopt::set_socket_linger(&lingering, Some(Duration::from_secs(60))).unwrap();
    let queue = 0u64.to_ne_bytes();
    assert_eq!(front_end.acked(code::SET_VRING_CALL, &queue, &[lingering.as_fd()]), 1);
    assert!(serves(&mut guest), "the call descriptor of before is still in place");
    assert!(serves(&mut other_guest));
}

/// The kernel copies cached data during submission: 8 GiB in one pass would delay every other disk.
#[test]
fn large_cached_reads_of_one_disk_do_not_hold_up_another_until_they_are_done() {
    let rig =
        Rig::start(Options { disks: 2, queue_size: 1024, image_bytes: 64 * MIB, ..Options::buffered() });
    let (_other, mut other_guest) = neighbour(&rig);
    let front_end = hostile(&rig, 32 * MIB);
    let raw = RawGuest::start(&front_end, 0);
    let pieces = (0..16).map(|piece| writable(16 * MIB, 4 * MIB as u32, piece + 2));
    let header = std::iter::once(readable(HEADER, 16, 1));
    let read_all: Vec<_> = header.chain(pieces).chain([last(STATUS, 1)]).collect();
    fill_ring(&raw, 128, kind::IN, &read_all);
    offer_up_to(&raw, 1); // now it is cached
    assert!(eventually(|| raw.ring.used_idx() == 1));
    offer_up_to(&raw, 128);
    assert!(eventually(|| raw.ring.used_idx() > 1));
    assert!(serves(&mut other_guest));
    let done = raw.ring.used_idx();
    assert!(done < 128, "all large reads were done first");
}

/// The worker walks each chain as far as a chain may go; 32 of them would cost as much as hundreds of valid requests.
#[test]
fn chains_without_an_end_give_others_their_turn_after_a_few() {
    const GOOD_ONES_A_TURN: u16 = 32;
    const ROUNDS: u16 = 10;
    let rig = Rig::start(Options::default());
    let front_end = hostile(&rig, 16 * MIB);
    let raw = RawGuest::start(&front_end, 0);
    for at in 0..256 {
        raw.ring.set_descriptor(at, readable(HEADER, 16, (at + 1) % 256));
        raw.ring.set_avail_entry(at, at);
    }
    let passes = || rig.server.as_ref().unwrap().report().workers[0].counters.busy_passes;
    let before = passes();
    for from in (0..ROUNDS).map(|round| round * 128) {
        offer_up_to(&raw, from + 128);
        assert!(eventually(|| raw.ring.used_idx() == from + 128));
    }
    let long_turns = u64::from(ROUNDS * 128 / GOOD_ONES_A_TURN);
    assert!(eventually(|| passes() - before > 2 * long_turns), "{} passes", passes() - before);
}

/// An engine whose requests hang, with room for 64 at a time (and the ops of one discard).
fn small_engine() -> (Options, FakeHandle) {
    let config = EngineConfig { depth: 64 + 15, ..EngineConfig::default() };
    let (engine, handle) = FakeEngine::new(config).unwrap();
    let engine = std::sync::Mutex::new(Some(engine));
    let factory = move || Ok(Box::new(engine.lock().unwrap().take().unwrap()) as Box<dyn Engine>);
    let options =
        Options { disks: 2, queue_size: 1024, engine: Some(Box::new(factory)), ..Options::default() };
    (options, handle)
}

/// Whenever the engine has room again, one of the full rings could take all the room.
#[test]
fn full_rings_of_one_disk_do_not_keep_another_out_of_a_full_engine() {
    /// 64 turns; one of them must be the other disk's.
    const MANY: u32 = 4096;
    let (options, handle) = small_engine();
    let rig = Rig::start(options);
    let (_other, mut other_guest) = neighbour(&rig);
    let front_end = hostile(&rig, 32 * MIB);
    let start = |queue| {
        let base = 20 * MIB + u64::from(queue) * MIB;
        RawGuest::over(front_end.start_queue_at(base, queue, 1024, feature::USUAL))
    };
    let raws: Vec<_> = (0..4).map(start).collect();
    let read = [readable(HEADER, 16, 1), writable(16 * MIB, 4096, 2), last(STATUS, 1)];
    raws.iter().for_each(|raw| fill_ring(raw, 1024, kind::IN, &read));
    hold(&handle);
    raws.iter().for_each(|raw| offer_up_to(raw, 1024));
    // The first disk has at least its reserve; with the shared part it has nearly the whole engine.
    assert!(eventually(|| handle.hanging() >= 32));
    let pending = add_transfer(&mut other_guest, kind::OUT, 0, 8 * MIB, 4096);
    other_guest.submit();
    let done = || raws.iter().map(|raw| u32::from(raw.ring.used_idx())).sum::<u32>();
    while pending.status(&other_guest) == 0xff && done() < MANY {
        assert!(eventually(|| handle.hanging() > 0));
        // Refills the rings, in which chains complete in order.
        raws.iter().for_each(|raw| offer_up_to(raw, raw.ring.used_idx() + 1024));
        handle.release().unwrap();
    }
    let (status, done) = (pending.status(&other_guest), done());
    let_go(&handle);
    assert_eq!(status, 0, "not answered while {done} others were");
}
