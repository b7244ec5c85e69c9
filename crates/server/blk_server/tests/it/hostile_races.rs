//! A driver that changes rings, tables and headers while the server reads them: no other guest's data changes.
//!
//! - It writes only a few byte values. Any mixture of these values that the device may read is a header for sectors
//!   below 8 MiB or for no sector. So all sectors from 8 MiB on must keep their contents.
//! - The test keeps restarting the ring, because a ring with random contents soon fails.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use fastrand::Rng;
use virtqueue::packed::{self, RawPacked};
use virtqueue::split::{RawDescriptor, RawRing};
use xtask::sizes::RACES;

use crate::rig::format::{Format, on_both_formats};
use crate::rig::packed_guest::hostile_over;
use crate::rig::raw_guest::connected;
use crate::rig::{FrontEnd, Guest, MIB, Options, PATIENCE, Rig, fill_file, header_bytes};

on_both_formats! {
    ring_that_changes_while_it_is_read_hurts_its_own_part_of_the_disk_at_most,
}

const QUEUE_SIZE: u16 = 256;
/// Size of one of the rig's rings, with all its parts.
const RING_BYTES: usize = 0xb000;
/// No mixture of the driver's bytes names a sector from here on.
const OUT_OF_REACH: u64 = 8 * MIB;
/// The first sector of the good guest.
const GOOD_SECTOR: u64 = 12 * MIB / 512;
const GOOD_BYTES: u64 = MIB;
/// The image's initial contents; no request type has this value.
const FILLER: u8 = 0xa5;
/// The ring is set up again after this many requests of the good guest.
const NEW_RING_EVERY: u32 = 8;
const STORES_AT_ONCE: u32 = 48;

/// Addresses for headers, data, status bytes and tables.
const PLACES: [u64; 12] = [
    0x10_0000, 0x10_0010, 0x10_0080, 0x10_0090, 0x10_00a0, 0x10_00b0, 0x11_0000, 0x11_1000, 0x11_0200,
    0x12_0000, 0x12_0001, 0x12_0080,
];
const HEADERS: usize = 6;
const TABLES: [u64; 2] = [0x13_0000, 0x13_1000];
/// No entry names the eighth as its next: headers must not contain that byte.
const TABLE_ENTRIES: u16 = 7;
const LENGTHS: [u32; 8] = [16, 16, 1, 0x200, 0x400, 0x1000, 7, 0];
/// IN, OUT, OUT, FLUSH, DISCARD, WRITE_ZEROES, and an undefined type. GET_ID is left out: a serial has other bytes.
const KINDS: [u32; 7] = [0, 1, 1, 4, 11, 13, 5];

/// Whether a header with `byte` as the sector's second byte ends below 8 MiB or beyond the image's end.
fn is_tame(byte: u8) -> bool {
    byte != 8 && !(0x20..0x80).contains(&byte)
}

fn assert_tame(words: impl IntoIterator<Item = u64>) {
    words.into_iter().for_each(|word| assert!(word.to_le_bytes().into_iter().all(is_tame), "{word:#x}"));
}

fn pick<T: Copy>(rng: &mut Rng, all: &[T]) -> T {
    all[rng.usize(..all.len())]
}

fn tame_byte(rng: &mut Rng) -> u8 {
    pick(rng, &[0, 1, 2, 3, 7, 9, 0x10, 0x1f])
}

/// A descriptor for slot `at`: mostly a part of a request that starts in every fourth slot, sometimes a table.
fn any_descriptor(rng: &mut Rng, at: u16) -> RawDescriptor {
    if rng.u8(..6) == 0 {
        let (addr, len_bytes) = (pick(rng, &TABLES), pick(rng, &[16, 48, 48, 112]));
        return RawDescriptor { addr, len_bytes, flags: RawDescriptor::INDIRECT, next: 0 };
    }
    let (part, next) = (part(rng, at % 4), if rng.u8(..16) == 0 { rng.u16(..QUEUE_SIZE) } else { at + 1 });
    RawDescriptor { next, ..part }
}

/// A header, data, a status or anything else. Tables contain such descriptors too, because the device may read a table
/// as a header.
fn part(rng: &mut Rng, which: u16) -> RawDescriptor {
    let (next, write) = (RawDescriptor::NEXT, RawDescriptor::WRITE);
    let (addr, len_bytes, flags) = match if rng.u8(..8) == 0 { 3 } else { which } {
        0 => (PLACES[rng.usize(..HEADERS)], 16, next),
        1 => (
            pick(rng, &PLACES[HEADERS..HEADERS + 3]),
            pick(rng, &[0x200, 0x400, 0x1000]),
            next | pick(rng, &[0, write]),
        ),
        2 => (pick(rng, &PLACES[HEADERS + 3..]), 1, write),
        _ => (pick(rng, &PLACES), pick(rng, &LENGTHS), pick(rng, &[0, next, write, next | write])),
    };
    RawDescriptor { addr, len_bytes, flags, next: (which + 1) % 7 }
}

fn scribble(guest: &Guest, ring: Format, rng: &mut Rng) {
    for _ in 0..STORES_AT_ONCE {
        let mut header = header_bytes(pick(rng, &KINDS), 0);
        (header[8], header[9]) = (tame_byte(rng), tame_byte(rng));
        guest.view.store(PLACES[rng.usize(..HEADERS)], &header).unwrap();
        match ring {
            Format::Split => scribble_split(guest, rng),
            Format::Packed => scribble_packed(guest, rng),
        }
    }
    guest.kick();
}

fn scribble_split(guest: &Guest, rng: &mut Rng) {
    let raw = RawRing::new(&guest.view, guest.layout).unwrap();
    let (slot, entry, table) = (rng.u16(..QUEUE_SIZE - 1), rng.u16(..TABLE_ENTRIES), pick(rng, &TABLES));
    raw.set_descriptor(slot, any_descriptor(rng, slot));
    raw.set_table_descriptor(table, entry, part(rng, entry)).unwrap();
    raw.set_avail_entry(rng.u16(..), rng.u16(..QUEUE_SIZE / 4) * 4);
    match rng.u16(..4000) {
        0 => raw.set_avail_idx(rng.u16(..)),
        1 => raw.set_avail_entry(rng.u16(..), rng.u16(..)),
        2 => raw.set_used_idx(rng.u16(..)),
        _ => raw.set_avail_idx(raw.used_idx().wrapping_add(rng.u16(..64))),
    }
}

fn scribble_packed(guest: &Guest, rng: &mut Rng) {
    let raw = RawPacked::new(&guest.view, guest.layout).unwrap();
    let of = |descriptor: RawDescriptor, id: u16, more: u16| {
        let RawDescriptor { addr, len_bytes, flags, .. } = descriptor;
        packed::RawDescriptor { addr, len_bytes, id, flags: flags | more }
    };
    let marks =
        pick(rng, &[packed::RawDescriptor::AVAIL, packed::RawDescriptor::AVAIL, packed::RawDescriptor::USED]);
    let id = if rng.u16(..4000) == 0 { rng.u16(..) } else { rng.u16(..QUEUE_SIZE) };
    let (slot, entry, table) = (rng.u16(..QUEUE_SIZE), rng.u16(..TABLE_ENTRIES), pick(rng, &TABLES));
    raw.set_descriptor(slot, of(any_descriptor(rng, slot), id, marks));
    raw.set_table_descriptor(table, entry, of(part(rng, entry), 0, 0)).unwrap();
}

/// Sets up the first queue with a new ring.
fn start_anew(front_end: &FrontEnd, guest: &mut Guest, ring: Format) {
    front_end.stop_queue(0);
    // Zeroes the ring, because the server does not take a used packed ring for a new one.
    guest.view.store(guest.layout.descriptors.0, &[0; RING_BYTES]).unwrap();
    *guest = front_end.new_guest(0, QUEUE_SIZE, ring.plain());
    front_end.announce_queue(guest);
}

/// Writes a block of the good guest and reads it back.
fn good_request(good: &mut Guest, number: u32) {
    let sector = GOOD_SECTOR + u64::from(number % 256) * 8;
    let data = [number as u8; 4096];
    assert_eq!(good.write(sector, &data).status, Some(0), "write {number}");
    let back = good.read(sector, 4096);
    assert_eq!((back.status, back.data.as_slice()), (Some(0), &data[..]), "read {number}");
}

/// Requests of the first queue that were completed since its start.
fn answered(rig: &Rig) -> u64 {
    let report = rig.report_of(0);
    let counters = report.queues.iter().filter(|queue| queue.index == 0).map(|queue| queue.counters);
    counters.map(|found| found.reads + found.writes + found.flushes + found.other).sum()
}

fn ring_that_changes_while_it_is_read_hurts_its_own_part_of_the_disk_at_most(ring: Format) {
    assert_tame(PLACES.into_iter().chain(TABLES).chain(LENGTHS.map(u64::from)).chain(KINDS.map(u64::from)));
    let mut rig = Rig::start(Options::buffered());
    rig.stop();
    fill_file(&rig.image, FILLER, 16 * MIB as usize);
    rig.start_server(Options::buffered());
    let front_end = connected(&rig, ring.plain());
    let hostile = Mutex::new(front_end.start_queue(0, QUEUE_SIZE, ring.plain()));
    let mut good = front_end.start_queue(1, QUEUE_SIZE, ring.plain());
    let (stop, mut taken) = (AtomicBool::new(false), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = Rng::with_seed(7);
            while !stop.load(Relaxed) {
                scribble(&hostile.lock().unwrap(), ring, &mut rng);
                std::thread::yield_now(); // lets the waiting thread take the lock
            }
        });
        // A failed assertion must also end the other thread.
        let _end = OnDrop(&stop);
        let end = Instant::now() + PATIENCE;
        for number in 0.. {
            good_request(&mut good, number);
            if number % NEW_RING_EVERY == 0 {
                taken += answered(&rig);
                start_anew(&front_end, &mut hostile.lock().unwrap(), ring);
            }
            if number > RACES.now() && (taken > u64::from(RACES.now()) || Instant::now() > end) {
                break;
            }
        }
    });
    assert!(taken > u64::from(RACES.now()), "the hostile ring had only {taken} requests");
    let mut hostile = hostile.into_inner().unwrap();
    start_anew(&front_end, &mut hostile, ring);
    assert!(hostile_over(hostile, ring).works(), "the queue does not come back");
    check_image(&rig);
}

struct OnDrop<'s>(&'s AtomicBool);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn check_image(rig: &Rig) {
    assert_eq!(std::fs::metadata(&rig.image).unwrap().len(), 16 * MIB);
    let good = GOOD_SECTOR * 512;
    for (from, to) in [(OUT_OF_REACH, good), (good + GOOD_BYTES, 16 * MIB)] {
        let bytes = rig.image_bytes(from, (to - from) as usize);
        let changed = bytes.iter().position(|&byte| byte != FILLER);
        assert_eq!(changed.map(|at| from + at as u64), None, "the image was written out of reach");
    }
}
