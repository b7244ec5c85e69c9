//! The dirty log of live migration: which pages it contains, when they start to be recorded, and front-ends that misuse
//! it.
//!
//! The tests compare all guest memory before and after: each page that the device changed must be in the log.
//!
//! Spec: vhost-user, "Migration".
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::Arc;

use disk_image::CacheMode;
use guest_mem::{GuestRange, MemoryView};
use io_engine::{EngineConfig, EngineKind, make};
use rustix::fs::ftruncate;

use crate::rig;
use crate::rig::dirty::{
    Log, MEMORY_BYTES, begin, changed, contents, end, log_all, log_body, log_ring, page_of,
};
use crate::rig::format::{Format, on_both_formats};
use crate::rig::passed::{add_transfer, event, faulty, hold, let_go, mappings, serves, take_signals, works};
use crate::rig::{
    FrontEnd, Guest, MIB, Options, Rig, code, eventually, feature, header_bytes, kind, segment_bytes,
    single_region_bytes, vring_state,
};
use xtask::skip::{Reason, skip_part};

const QUEUE_SIZE: u16 = 64;

on_both_formats! {
    data_of_reads_that_were_under_way_is_in_the_log_that_came_meanwhile,
    nothing_is_noted_once_logging_is_off_and_the_ring_never_stopped,
    ring_that_is_started_is_in_the_log_as_a_whole,
}

fn ready(rig: &Rig, format: Format) -> (FrontEnd, Guest) {
    let mut front_end = rig.connect();
    front_end.negotiate(format.usual());
    front_end.share_memory(MEMORY_BYTES);
    let guest = front_end.start_queue(0, QUEUE_SIZE, format.usual());
    (front_end, guest)
}

// ---- every store of every engine

/// A request: the memory that the device reads, the memory where it may store data, and the status byte (on its own
/// page).
struct Wish {
    kind: u32,
    sector: u64,
    out: Option<GuestRange>,
    room: Vec<GuestRange>,
}

fn range(addr: u64, len_bytes: u32) -> GuestRange {
    GuestRange { addr, len_bytes }
}

/// Requests of all types: aligned and unaligned, in one piece and in several, within a page and across pages. `data` is
/// free memory.
fn wishes(data: u64) -> Vec<Wish> {
    let at = |number: u64| data + number * 0x2_0000;
    let reads = [
        (0, vec![range(at(0), 4096)]),
        (8, vec![range(at(1) + 4096 - 256, 512)]),
        (16, vec![range(at(2) + 3, 1024)]),
        (64, vec![range(at(3) + 512, 65536)]),
        (200, vec![range(at(4) + 4095, 1), range(at(4) + 8191, 2), range(at(4) + 16384 - 100, 509)]),
        (300, vec![range(at(5), 4096), range(at(5) + 32768, 8192)]),
    ];
    let reads = reads.map(|(sector, room)| Wish { kind: kind::IN, sector, out: None, room });
    let beyond =
        Wish { kind: kind::IN, sector: 16 * MIB / 512 - 1, out: None, room: vec![range(at(6), 4096)] };
    let id = Wish { kind: kind::GET_ID, sector: 0, out: None, room: vec![range(at(7) + 4090, 20)] };
    let out = |kind, sector, out| Wish { kind, sector, out, room: vec![] };
    let others = [
        out(kind::OUT, 2048, Some(range(at(8), 8192))),
        out(kind::FLUSH, 0, None),
        out(kind::WRITE_ZEROES, 0, Some(range(at(9), 16))),
        out(kind::DISCARD, 0, Some(range(at(10), 16))),
        out(77, 0, None),
    ];
    reads.into_iter().chain([beyond, id]).chain(others).collect()
}

const HEADERS: u64 = 4 * MIB;
const STATUS: u64 = 5 * MIB;
const DATA: u64 = 8 * MIB;

fn status_of(number: usize) -> u64 {
    STATUS + number as u64 * 0x1000 + 17
}

/// Puts the requests into the ring without making them available.
fn add(guest: &mut Guest, wishes: &[Wish], round: u64) {
    for (number, wish) in wishes.iter().enumerate() {
        let header = HEADERS + number as u64 * 64;
        guest.view.store(header, &header_bytes(wish.kind, wish.sector)).unwrap();
        guest.view.store(status_of(number), &[0xff]).unwrap();
        if let Some(out) = wish.out {
            let bytes = match wish.kind {
                kind::OUT => vec![round as u8; out.len_bytes as usize],
                _ => segment_bytes(4096, 8, 0).to_vec(),
            };
            guest.view.store(out.addr, &bytes).unwrap();
        }
        for &room in &wish.room {
            guest.view.store(room.addr, &vec![0; room.len_bytes as usize]).unwrap();
        }
        let readable: Vec<_> = [range(header, 16)].into_iter().chain(wish.out).collect();
        let writable: Vec<_> = wish.room.iter().copied().chain([range(status_of(number), 1)]).collect();
        guest.add(&readable, &writable);
    }
}

/// Removes the pages that the driver itself writes, which are its part of the ring.
fn without_drivers(guest: &Guest, mut pages: BTreeSet<u64>) -> BTreeSet<u64> {
    pages.remove(&page_of(guest.layout.avail.0));
    pages
}

fn every_store_is_in_the_log(kind: EngineKind, format: Format) {
    let (cache, folder) = match kind {
        EngineKind::Mmap => (CacheMode::Writeback, Some("/dev/shm".into())),
        _ => (CacheMode::None, None),
    };
    let config = EngineConfig::default();
    let engine: blk_server::EngineFactory = Box::new(move || make(kind, &config));
    let rig = Rig::start(Options { folder, engine: Some(engine), ..Options::cached(cache) });
    let content: Vec<u8> = (0..16 * MIB).map(|at| (at % 251) as u8 + 1).collect();
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(&rig.image).unwrap(),
        &content,
        0,
    )
    .unwrap();
    let (front_end, mut guest) = ready(&rig, format);
    let log = Log::new();
    begin(&front_end, &[(0, guest.layout)], format.usual(), &log);

    let wishes = wishes(DATA);
    for round in 0..4 {
        add(&mut guest, &wishes, round);
        log.take();
        let before = contents(&guest.view);
        guest.submit();
        assert!(wishes.iter().all(|_| guest.next_used().is_some()));
        if round == 3 {
            front_end.stop_queue(0);
        }
        let (after, logged) = (contents(&guest.view), log.take());

        let changed = without_drivers(&guest, changed(&before, &after));
        let missing: Vec<_> = changed.difference(&logged).collect();
        assert!(missing.is_empty(), "{kind}, {format:?}, round {round}: not in the log: {missing:x?}");
        // At least the pages of each status byte, of the data of seven requests, and of the ring have changed.
        assert!(changed.len() > wishes.len() + 7, "{changed:x?}");
        // Pages that the device only reads must not be in the log: a migration under guest writes would never end.
        let read_only = wishes.iter().filter_map(|wish| wish.out).map(|out| page_of(out.addr));
        let too_many: Vec<_> = read_only.chain([HEADERS]).filter(|page| logged.contains(page)).collect();
        assert!(too_many.is_empty(), "{kind}, {format:?}: {too_many:x?}");
    }
}

#[test]
fn every_page_that_an_engine_changes_is_in_the_log() {
    for kind in EngineKind::FOR_FILES {
        if let Err(why) = make(kind, &EngineConfig::default()) {
            skip_part(Reason::NoEngine(kind.to_string()), why);
            continue;
        }
        every_store_is_in_the_log(kind, Format::Split);
        every_store_is_in_the_log(kind, Format::Packed);
    }
}

// ---- logging that starts and stops

fn data_of_reads_that_were_under_way_is_in_the_log_that_came_meanwhile(format: Format) {
    let (options, handle) = faulty();
    let rig = Rig::start(options);
    rig::fill_file(&rig.image, 7, 16 << 20);
    let (front_end, mut guest) = ready(&rig, format);
    hold(&handle);
    for number in 0..4 {
        add_transfer(&mut guest, kind::IN, number * 8, DATA + number * 0x1_0000 + 100, 4096);
    }
    guest.submit();
    assert!(eventually(|| handle.hanging() == 4));

    let (first, second) = (Log::new(), Log::new());
    begin(&front_end, &[(0, guest.layout)], format.usual(), &first);
    // Passes a second log, as a front-end does when memory is plugged in.
    second.give(&front_end);
    first.take();
    let before = contents(&guest.view);
    let_go(&handle);
    assert!((0..4).all(|_| guest.next_used().is_some()));

    let changed = without_drivers(&guest, changed(&before, &contents(&guest.view)));
    let logged = second.take();
    assert!(changed.len() >= 8 && changed.is_subset(&logged), "{changed:x?} {logged:x?}");
    assert!(first.take().is_empty());
    assert_eq!(mappings(&first.fd), 1, "the server still has the log that was replaced");
}

fn nothing_is_noted_once_logging_is_off_and_the_ring_never_stopped(format: Format) {
    let (options, handle) = faulty();
    let rig = Rig::start(options);
    let (front_end, mut guest) = ready(&rig, format);
    hold(&handle);
    let pending = add_transfer(&mut guest, kind::IN, 0, DATA, 4096);
    guest.submit();
    assert!(eventually(|| handle.hanging() == 1));
    let log = Log::new();

    // If the server stopped the ring, it would wait for the request that hangs, and the replies would wait too.
    begin(&front_end, &[(0, guest.layout)], format.usual(), &log);
    end(&front_end, &[(0, guest.layout)], format.usual());
    log.take();
    let_go(&handle);
    guest.wait_for(pending.token);

    assert!(serves(&mut guest));
    front_end.stop_queue(0);
    assert!(log.take().is_empty());
}

fn ring_that_is_started_is_in_the_log_as_a_whole(format: Format) {
    let rig = Rig::start(Options::default());
    let (front_end, guest) = ready(&rig, format);
    let log = Log::new();
    begin(&front_end, &[(0, guest.layout)], format.usual(), &log);
    front_end.stop_queue(0);
    log.take();

    let word = 0u64.to_ne_bytes();
    front_end.ok(code::SET_VRING_KICK, &word, &[guest.kick.as_fd()]);

    let expected = match format {
        Format::Split => vec![guest.layout.used.0],
        Format::Packed => vec![guest.layout.descriptors.0, guest.layout.used.0],
    };
    assert_eq!(log.take(), expected.into_iter().collect());
}

#[test]
fn one_rings_flag_is_enough_and_its_ring_is_noted_where_the_front_end_wants_it_too() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, Format::Split);
    let log = Log::of_bytes(4096);
    log.give(&front_end);
    assert!(serves(&mut guest));
    assert!(log.take().is_empty(), "nobody asked for notes");

    // An address beyond all memory, so that the used ring's log crosses the end of a page.
    let elsewhere = 20 * MIB + 0x1000 - 6;
    log_ring(&front_end, &(0, guest.layout), Some(elsewhere));
    assert!(serves(&mut guest));

    let logged = log.take();
    assert!(logged.contains(&page_of(guest.layout.used.0)), "{logged:x?}");
    assert!(logged.contains(&(20 * MIB)) && logged.contains(&(20 * MIB + 0x1000)), "{logged:x?}");
    assert!(logged.contains(&page_of(rig::passed::data_addr(&guest))), "{logged:x?}");
}

#[test]
fn reset_ends_logging() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, Format::Split);
    let log = Log::new();
    begin(&front_end, &[(0, guest.layout)], Format::Split.usual(), &log);
    front_end.ok(code::RESET_DEVICE, &[], &[]);
    assert_eq!(mappings(&log.fd), 1);
    log.take();

    log_all(&front_end, Format::Split.usual(), true);
    guest = front_end.start_queue(0, QUEUE_SIZE, Format::Split.usual());
    assert!(serves(&mut guest));
    assert!(log.take().is_empty());
}

#[test]
fn front_end_that_wants_to_be_told_of_new_bits_is_told() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, Format::Split);
    let (log, told) = (Log::new(), event());
    front_end.ok(code::SET_LOG_FD, &[], &[told.as_fd()]);
    assert!(serves(&mut guest));
    assert_eq!(take_signals(&told), 0);

    begin(&front_end, &[(0, guest.layout)], Format::Split.usual(), &log);
    assert!(serves(&mut guest));

    assert!(eventually(|| take_signals(&told) > 0));
}

// ---- regions that are added and removed

#[test]
fn region_that_is_plugged_in_under_the_log_is_noted_and_one_beyond_it_ends_the_session() {
    let rig = Rig::start(Options::default());
    rig::fill_file(&rig.image, 7, 16 << 20);
    let (mut front_end, mut guest) = ready(&rig, Format::Split);
    let log = Log::of_bytes(1024); // 32 MiB
    begin(&front_end, &[(0, guest.layout)], Format::Split.usual(), &log);

    front_end.add_region(24 * MIB, 8 * MIB);
    guest.view = MemoryView::new(Arc::clone(&front_end.memory));
    let pending = add_transfer(&mut guest, kind::IN, 0, 32 * MIB - 4096, 4096);
    guest.submit();
    guest.wait_for(pending.token);
    assert!(log.take().contains(&(32 * MIB - 4096)));

    let region = guest_mem::Region::from_memfd(guest_mem::GuestAddress(32 * MIB), 4096).unwrap();
    front_end.send_flags(code::ADD_MEM_REG, 1 | 8, &single_region_bytes(&region), &[region.fd().as_fd()]);
    assert!(front_end.is_closed());
    assert!(works(&rig));
}

// ---- logs that cannot be used

/// Sends this SET_LOG_BASE under a running queue with LOG_ALL. Returns whether the server ended this session and no
/// other.
fn is_ended(log: &Log, body: &[u8]) -> bool {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, Format::Split);
    log_all(&front_end, Format::Split.usual(), true);
    assert!(serves(&mut guest));
    front_end.send(code::SET_LOG_BASE, body, &[log.fd.as_fd()]);
    front_end.is_closed() && works(&rig)
}

#[test]
fn log_that_does_not_cover_the_memory_ends_the_session() {
    let log = Log::new();
    assert!(is_ended(&log, &log_body(MEMORY_BYTES / 4096 / 8 - 1, 0)));
    assert!(is_ended(&log, &log_body(1, 0)));
}

#[test]
fn log_that_its_file_does_not_hold_ends_the_session() {
    let log = Log::new();
    let bytes = MEMORY_BYTES / 4096 / 8;
    for (size, offset) in [(bytes + 1, 0), (bytes, 1), (0, 0), (u64::MAX, 0), (bytes, u64::MAX - 100)] {
        assert!(is_ended(&log, &log_body(size, offset)), "{size} {offset}");
    }
}

#[test]
fn log_message_of_another_size_ends_the_session() {
    let log = Log::new();
    assert!(is_ended(&log, &[0; 8]));
    assert!(is_ended(&log, &[log.body(), vec![0; 8]].concat()));
}

#[test]
fn ring_that_is_to_be_noted_outside_the_log_ends_the_session() {
    let rig = Rig::start(Options::default());
    let (front_end, guest) = ready(&rig, Format::Split);
    let log = Log::new();
    begin(&front_end, &[(0, guest.layout)], Format::Split.usual(), &log);
    let used_bytes = 6 + 8 * u64::from(QUEUE_SIZE);
    log_ring(&front_end, &(0, guest.layout), Some(MEMORY_BYTES - used_bytes));

    let mut body = rig::vring_addr(0, &guest.layout);
    body[4] = 1;
    body[32..40].copy_from_slice(&(MEMORY_BYTES - used_bytes + 1).to_ne_bytes());
    front_end.send_flags(code::SET_VRING_ADDR, 1 | 8, &body, &[]);
    assert!(front_end.is_closed());
    assert!(works(&rig));
}

#[test]
fn log_without_a_descriptor_or_without_the_feature_ends_the_session() {
    let rig = Rig::start(Options::default());
    let (front_end, _guest) = ready(&rig, Format::Split);
    front_end.send(code::SET_LOG_BASE, &Log::new().body(), &[]);
    assert!(front_end.is_closed());

    let front_end = rig.connect();
    let log = Log::new();
    front_end.send(code::SET_LOG_BASE, &log.body(), &[log.fd.as_fd()]);
    assert!(front_end.is_closed());
    assert!(works(&rig));
}

#[test]
fn log_whose_file_is_cut_off_ends_its_session_and_no_other() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, Format::Split);
    let log = Log::new();
    begin(&front_end, &[(0, guest.layout)], Format::Split.usual(), &log);
    assert!(serves(&mut guest));
    ftruncate(&log.fd, 0).unwrap();

    guest.add(&[range(HEADERS, 16)], &[range(STATUS, 1)]);
    guest.submit();

    assert!(front_end.is_closed());
    assert!(works(&rig));
    assert!(eventually(|| mappings(&log.fd) == 1));
}

#[test]
fn log_in_the_middle_of_its_file_leaves_the_rest_of_it_alone() {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, Format::Split);
    let (bytes, offset) = (MEMORY_BYTES / 4096 / 8, 4096 + 13);
    let fd = rig::passed::memfd(16384);
    front_end.send(code::SET_LOG_BASE, &log_body(bytes, offset), &[fd.as_fd()]);
    assert!(front_end.receive().is_some());
    log_all(&front_end, Format::Split.usual(), true);

    assert!(serves(&mut guest));
    front_end.ask(code::GET_VRING_BASE, &vring_state(0, 0));

    let mut file = vec![0; 16384];
    rustix::io::pread(&fd, &mut file, 0).unwrap();
    let (before, rest) = file.split_at(offset as usize);
    let (log, behind) = rest.split_at(bytes as usize);
    assert!(before.iter().chain(behind).all(|&byte| byte == 0));
    let used = guest.layout.used.0 / 4096;
    assert_eq!(log[(used / 8) as usize], 1 << (used % 8));
    assert!(works(&rig));
}

#[test]
fn log_all_is_offered() {
    let rig = Rig::start(Options::default());
    let front_end = rig.connect();
    assert_ne!(front_end.ask_u64(code::GET_FEATURES) & feature::LOG_ALL, 0);
    assert_ne!(front_end.ask_u64(code::GET_PROTOCOL_FEATURES) & 2, 0);
}
