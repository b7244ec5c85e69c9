//! A front-end that changes shared memory while the server reads it: in-flight logs, the dirty log, indirect tables.
//! Another front-end changes configuration and memory while requests run. Each may lose its own data; no other guest
//! notices.
//!
//! Each test has two threads: one scribbles, the other behaves normally. A guest of another disk works meanwhile.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use fastrand::Rng;
use guest_mem::{GuestMemory, MemoryView};
use virtqueue::LogArea;
use xtask::sizes::RACES;

use crate::rig;
use crate::rig::dirty::{self, log_all};
use crate::rig::format::{Format, on_both_formats};
use crate::rig::packed_guest::hostile_over;
use crate::rig::passed::{add_transfer, memfd, region, serves, works};
use crate::rig::raw_guest::{connected, table};
use crate::rig::{FrontEnd, Guest, MIB, Options, Rig, code, feature, header_bytes, kind};

on_both_formats! {
    in_flight_log_that_changes_while_rings_start_hurts_its_own_queue_at_most,
    dirty_log_that_is_written_over_changes_nothing_of_the_requests,
    indirect_table_that_changes_while_it_is_read_is_one_request_all_the_same,
    configuration_and_memory_that_change_under_requests_hurt_none_of_them,
}

/// The good guest is checked once in this many rounds.
const LOOK_EVERY: u32 = 8;

/// Calls `scribble` repeatedly on a separate thread while `act` runs.
fn beside(mut scribble: impl FnMut(&mut Rng) + Send, act: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = Rng::with_seed(7);
            while !stop.load(Relaxed) {
                scribble(&mut rng);
            }
        });
        // A failed assertion must also end the other thread.
        let _end = OnDrop(&stop);
        act();
    });
}

struct OnDrop<'s>(&'s AtomicBool);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn pick<T: Copy>(rng: &mut Rng, all: &[T]) -> T {
    all[rng.usize(..all.len())]
}

/// A server with a hostile front-end's disk and a good guest's disk.
fn two_disks() -> (Rig, FrontEnd, Guest) {
    let rig = Rig::start(Options { disks: 2, ..Options::buffered() });
    let (front_end, good) = rig.guest_of(1);
    (rig, front_end, good)
}

// ---- in-flight logs

const RING_SIZE: u16 = 16;
/// More entries than the ring has: those beyond the ring name no descriptor.
const LOG_ENTRIES: u16 = 1024;
/// Size of one of the rig's rings, with all its parts.
const RING_BYTES: usize = 0xb000;

/// A log that the hostile front-end can write.
struct Log {
    view: MemoryView,
    /// Size of the header before the log's entries, and size of each entry.
    words: (u64, u64),
}

impl Log {
    fn give(front_end: &FrontEnd, ring: Format) -> Self {
        let bytes = LogArea::bytes(1, LOG_ENTRIES, ring == Format::Packed);
        let fd = memfd(bytes);
        let sizes = [1, LOG_ENTRIES, 0, 0].into_iter().flat_map(u16::to_ne_bytes);
        let body: Vec<_> = [bytes, 0].into_iter().flat_map(u64::to_ne_bytes).chain(sizes).collect();
        front_end.ok(code::SET_INFLIGHT_FD, &body, &[fd.as_fd()]);
        let memory = GuestMemory::new(vec![region(&fd, 0, bytes, 0)]).unwrap();
        let words = if ring == Format::Packed { (4, 4) } else { (2, 2) };
        Self { view: MemoryView::new(Arc::new(memory)), words }
    }

    fn set(&self, at: u64, word: u64) {
        self.view.store(8 * at, &word.to_le_bytes()).unwrap();
    }

    fn entry(&self, entry: u16) -> u64 {
        self.words.0 + self.words.1 * u64::from(entry)
    }

    /// In most calls, marks an entry beyond the ring as in flight for a moment. In the others, changes any other word.
    fn scribble(&self, ring: Format, rng: &mut Rng) {
        for _ in 0..16 {
            self.set(self.entry(LOG_ENTRIES - 1), 1);
            self.set(self.entry(LOG_ENTRIES - 1), 0);
        }
        let entry = if rng.bool() { rng.u16(..RING_SIZE) } else { rng.u16(..LOG_ENTRIES) };
        let small = |rng: &mut Rng| u64::from(rng.u16(..2 * RING_SIZE));
        let links = small(rng) << 16 | small(rng) << 32 | rng.u64(..4) << 48;
        match rng.u8(..8) {
            0 => self.set(self.entry(entry), rng.u64(..2) | links),
            1 => self.set(self.entry(entry) + rng.u64(1..self.words.1), rng.u64(..)),
            2 => self.set(self.entry(entry), 0),
            3 if ring == Format::Packed => self.set(2, small(rng) | small(rng) << 16 | rng.u64(..4) << 32),
            _ => self.set(1, 1 | u64::from(LOG_ENTRIES) << 16 | pick(rng, &[0, 0, 0, links & !0 << 32])),
        }
    }
}

/// Starts a new ring with one request, on a queue that may have stopped after a fault.
fn start_anew(front_end: &FrontEnd, ring: Format) {
    let place = front_end.new_guest(0, RING_SIZE, ring.plain());
    // Zeroes the ring, because the server does not take a used packed ring for a new one.
    place.view.store(place.layout.descriptors.0, &[0; RING_BYTES]).unwrap();
    let mut guest = front_end.new_guest(0, RING_SIZE, ring.plain());
    add_transfer(&mut guest, kind::IN, 0, 8 * MIB, 512);
    guest.ring.publish();
    front_end.announce_queue(&guest);
    front_end.ok(code::SET_VRING_ENABLE, &rig::vring_state(0, 1), &[]);
    guest.kick();
    front_end.stop_queue(0);
}

fn in_flight_log_that_changes_while_rings_start_hurts_its_own_queue_at_most(ring: Format) {
    let (rig, _front_end, mut good) = two_disks();
    let mut front_end = rig.connect();
    front_end.negotiate(ring.plain());
    let log = Log::give(&front_end, ring);
    front_end.share_memory(16 * MIB);
    let scribble = move |rng: &mut Rng| log.scribble(ring, rng);
    beside(scribble, || {
        for round in 0..RACES.now() {
            start_anew(&front_end, ring);
            assert!(round % LOOK_EVERY != 0 || serves(&mut good), "round {round}");
        }
    });
    drop(front_end);
    assert!(works(&rig), "the disk does not come back");
}

// ---- the dirty log

fn dirty_log_that_is_written_over_changes_nothing_of_the_requests(ring: Format) {
    let (rig, _front_end, mut good) = two_disks();
    let front_end = connected(&rig, ring.usual());
    let mut guest = front_end.start_queue(0, 64, ring.usual());
    let log = dirty::Log::new();
    dirty::begin(&front_end, &[(0, guest.layout)], ring.usual(), &log);
    let scribble = |rng: &mut Rng| match rng.u8(..4) {
        0 => log.fill(),
        _ => drop(log.take()),
    };
    beside(scribble, || {
        for round in 0..RACES.now() {
            assert!(serves(&mut guest), "round {round}");
            if round % LOOK_EVERY == 0 {
                log_all(&front_end, ring.usual(), round % (2 * LOOK_EVERY) == 0);
                assert!(serves(&mut good), "round {round}");
            }
        }
    });
    drop(front_end);
    assert!(works(&rig), "the disk does not come back");
}

// ---- indirect tables

/// Table addresses: aligned, unaligned, and across the border of two regions.
const TABLES: [u64; 3] = [0x13_0000, 0x13_1004, 12 * MIB - 0x18];
const TABLE_BYTES: u64 = 64;
const HEADER: u64 = 0x10_0000;
const STATUS: u64 = 0x11_0000;
const DATA: u64 = 0x12_0000;

/// One word of a table entry: an address, or length, flags and next. The device may read bytes of several words mixed;
/// no mixture of these addresses points into the ring.
fn table_word(rng: &mut Rng, is_address: bool) -> u64 {
    if is_address {
        return pick(rng, &[HEADER, DATA, STATUS, DATA + 1, 12 * MIB - 256, 65 * MIB, u64::MAX]);
    }
    let len_bytes = pick(rng, &[16, 512, 4096, 1, 0, 7, 0x10_0000, u64::from(u32::MAX)]);
    // NEXT, WRITE, INDIRECT in a split ring's table; a packed ring's has the id where flags are.
    len_bytes | rng.u64(..8) << 32 | rng.u64(..8) << 48
}

fn indirect_table_that_changes_while_it_is_read_is_one_request_all_the_same(ring: Format) {
    let (rig, _front_end, mut good) = two_disks();
    let mut front_end = rig.connect();
    front_end.negotiate(ring.plain());
    front_end.share_regions(&[(0, 12 * MIB), (12 * MIB, 4 * MIB)]);
    let mut hostile = hostile_over(front_end.start_queue(0, 256, ring.plain()), ring);
    let view = hostile.guest().view.clone();
    let scribble = move |rng: &mut Rng| {
        let header = header_bytes(pick(rng, &[kind::IN, kind::OUT, kind::FLUSH, kind::DISCARD, 99]), 0);
        view.store(HEADER, &header).unwrap();
        let (table, word) = (pick(rng, &TABLES), rng.u64(..TABLE_BYTES / 8));
        view.store(table + 8 * word, &table_word(rng, word % 2 == 0).to_le_bytes()).unwrap();
    };
    beside(scribble, || {
        for round in 0..10 * RACES.now() {
            // The request completes once, whether it was valid or not.
            hostile.exchange(&[table(TABLES[round as usize % TABLES.len()], TABLE_BYTES as u32)]);
            assert!(round % (10 * LOOK_EVERY) != 0 || serves(&mut good), "round {round}");
        }
    });
    assert!(hostile.works(), "the queue was stopped for what is in a table");
    drop(front_end);
    assert!(works(&rig), "the disk does not come back");
}

// ---- configuration, memory table

fn configuration_and_memory_that_change_under_requests_hurt_none_of_them(ring: Format) {
    const WRITEBACK: u32 = 32;
    let features = ring.usual() | feature::CONFIG_WCE;
    let (rig, _front_end, mut good) = two_disks();
    let mut front_end = connected(&rig, features);
    let mut guest = front_end.start_queue(0, 64, features);
    let before = front_end.config(0, WRITEBACK);
    let messages = |rng: &mut Rng| {
        let mut bytes = vec![0; rng.usize(..12)];
        rng.fill(&mut bytes);
        front_end.set_config(pick(rng, &[0, 20, WRITEBACK, 59, 60, u32::MAX]), &bytes);
        assert_eq!(front_end.set_config(WRITEBACK, &[rng.u8(..2)]), 0);
        if rng.bool() {
            front_end.add_region(32 * MIB, 4 * MIB);
            front_end.remove_region(32 * MIB);
        }
    };
    beside(messages, || {
        for round in 0..RACES.now() {
            assert!(serves(&mut guest), "round {round}");
            assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).status, Some(0));
            assert!(round % LOOK_EVERY != 0 || serves(&mut good), "round {round}");
        }
    });
    assert_eq!(front_end.config(0, WRITEBACK), before);
    assert!(serves(&mut guest));
}
