//! Host faults: errors, short transfers, full disks, requests that hang. Each fault affects only one request.
//!
//! The engine is io_engine's fake, on real files.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::time::Duration;

use io_engine::{FakeHandle, Fault, Verb, When};
use rustix::io::Errno;

use crate::rig;
use crate::rig::passed::add_transfer;
use crate::rig::raw_guest::{faulty, range};
use crate::rig::{FrontEnd, Guest, MIB, Options, Rig, eventually, feature, kind, ready, segment_bytes};

const OK: Option<u8> = Some(0);
const IOERR: Option<u8> = Some(1);

struct Bed {
    fake: FakeHandle,
    _front_end: FrontEnd,
    guest: Guest,
    rig: Rig,
}

fn bed() -> Bed {
    let (options, fake) = faulty(Options::buffered());
    let rig = Rig::start(options);
    let (front_end, guest) = ready(&rig, feature::USUAL);
    Bed { fake, _front_end: front_end, guest, rig }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8).collect()
}

impl Bed {
    /// Adds a read of `sector` with its own buffers; `slot` numbers them.
    fn add_read(&mut self, slot: u64, sector: u64) -> u64 {
        let head = self.guest.area() + slot * 16;
        self.guest.scattered(kind::IN, sector, head, &[range(8 * MIB + slot * 4096, 512)]).unwrap()
    }

    fn status(&self, slot: u64) -> u8 {
        self.guest.bytes(self.guest.area() + slot * 16 + 0x800, 1)[0]
    }
}

#[test]
fn read_error_is_ioerr_and_others_go_on() {
    let mut bed = bed();
    bed.fake.inject(When::Overlaps(Verb::Read, 4096..8192), Fault::Errno(Errno::IO), u64::MAX);
    let answers = [0, 8, 15, 16].map(|sector| bed.guest.read(sector, 512).status);
    assert_eq!(answers, [OK, IOERR, IOERR, OK]);
    assert_eq!(bed.guest.write(8, &[1; 512]).status, OK);
}

#[test]
fn write_error_is_ioerr_once_and_the_next_try_works() {
    let mut bed = bed();
    bed.fake.inject(When::Verb(Verb::Write), Fault::Errno(Errno::IO), 1);
    assert_eq!(bed.guest.write(0, &[1; 512]).status, IOERR);
    assert_eq!(bed.guest.write(0, &[2; 512]).status, OK);
    assert_eq!(bed.rig.image_bytes(0, 512), vec![2; 512]);
}

#[test]
fn request_that_the_host_cancels_of_its_own_is_ioerr() {
    let mut bed = bed();
    bed.fake.inject(When::Verb(Verb::Read), Fault::Errno(Errno::CANCELED), 1);
    assert_eq!(bed.guest.read(0, 512).status, IOERR);
    assert_eq!(bed.guest.read(0, 512).status, OK);
}

/// Without a completion, the next server would start at the wrong request.
#[test]
fn request_given_up_when_the_time_to_stop_is_over_is_ioerr() {
    let mut bed = bed();
    bed.fake.inject(When::Verb(Verb::Read), Fault::Hang, 1);
    let held = add_transfer(&mut bed.guest, kind::IN, 0, 8 * MIB, 512);
    bed.guest.submit();
    assert!(eventually(|| bed.fake.hanging() == 1));
    let report = bed.rig.server.take().unwrap().stop(Duration::from_millis(300));
    assert!(!report.unfinished.is_empty());
    assert!(eventually(|| held.status(&bed.guest) == 1));
}

#[test]
fn no_room_is_ioerr_and_reads_go_on() {
    let mut bed = bed();
    bed.fake.set_space_left(Some(1024));
    assert_eq!(bed.guest.write(0, &pattern(1024)).status, OK);
    assert_eq!(bed.guest.write(8, &[2; 512]).status, IOERR);
    assert_eq!(bed.guest.read(0, 1024).data, pattern(1024));
    bed.fake.set_space_left(None);
    assert_eq!(bed.guest.write(8, &[2; 512]).status, OK);
}

#[test]
fn short_transfers_are_resumed_until_all_is_there() {
    let mut bed = bed();
    bed.fake.inject(When::Verb(Verb::Write), Fault::Short(700), 5);
    bed.fake.inject(When::Verb(Verb::Read), Fault::Short(1), 5);
    let written = bed.guest.write(1, &pattern(8192));
    let read = bed.guest.read(1, 8192);
    assert_eq!((written.status, bed.rig.image_bytes(512, 8192)), (OK, pattern(8192)));
    assert_eq!((read.status, read.used_bytes, read.data), (OK, 8193, pattern(8192)));
}

#[test]
fn error_after_a_short_transfer_is_ioerr() {
    let mut bed = bed();
    bed.fake.inject(When::Call(0), Fault::Short(512), 1);
    bed.fake.inject(When::Call(1), Fault::Errno(Errno::IO), 1);
    assert_eq!(bed.guest.read(0, 4096).status, IOERR);
    assert_eq!(bed.guest.read(0, 4096).status, OK);
}

#[test]
fn storm_of_interruptions_and_again_is_sat_out() {
    let mut bed = bed();
    bed.fake.inject(When::Always, Fault::Errno(Errno::AGAIN), 300);
    bed.fake.inject(When::Always, Fault::Errno(Errno::INTR), 300);
    assert_eq!(bed.guest.write(0, &pattern(512)).status, OK);
    assert_eq!(bed.guest.read(0, 512).data, pattern(512));
    assert!(bed.fake.calls() > 600);
}

#[test]
fn endless_again_is_ioerr_in_the_end_and_the_server_goes_on() {
    let mut bed = bed();
    bed.fake.inject(When::Verb(Verb::Read), Fault::Errno(Errno::AGAIN), u64::MAX);
    assert_eq!(bed.guest.read(0, 512).status, IOERR);
    bed.fake.clear();
    assert_eq!(bed.guest.read(0, 512).status, OK);
}

#[test]
fn request_that_hangs_completes_after_those_behind_it() {
    let mut bed = bed();
    bed.fake.inject(When::Overlaps(Verb::Read, 0..512), Fault::Hang, 1);
    let slow = bed.add_read(0, 0);
    bed.guest.submit();
    assert!(eventually(|| bed.fake.hanging() == 1));
    let others: Vec<_> = (1..10).map(|slot| bed.add_read(slot, slot)).collect();
    bed.guest.submit();
    let first: Vec<_> = (1..10).map(|_| bed.guest.next_used().unwrap().token).collect();
    assert_eq!((first, bed.status(0)), (others, 0xff));
    bed.fake.release().unwrap();
    assert_eq!(bed.guest.wait_for(slow), 513);
    assert_eq!(bed.status(0), 0);
}

#[test]
fn completions_in_any_order_find_their_requests() {
    let mut bed = bed();
    let expected: Vec<u8> = (0..32).map(|sector| sector as u8 + 1).collect();
    assert!((0..32).all(|sector| bed.guest.write(sector, &[sector as u8 + 1; 512]).status == OK));
    bed.fake.shuffle(7);
    (0..32).for_each(|slot| _ = bed.add_read(slot, slot));
    bed.guest.submit();
    let mut tokens: Vec<_> = (0..32).map(|_| bed.guest.next_used().unwrap().token).collect();
    let in_order = tokens.is_sorted();
    tokens.sort_unstable();
    tokens.dedup();
    let read: Vec<u8> = (0..32).map(|slot| bed.guest.bytes(8 * MIB + slot * 4096, 1)[0]).collect();
    assert_eq!((tokens.len(), in_order, read), (32, false, expected));
}

#[test]
fn one_failed_segment_fails_the_discard_after_all_others_are_done() {
    let mut bed = bed();
    bed.fake.inject(When::Overlaps(Verb::Allocate, 0..4096), Fault::Errno(Errno::IO), 1);
    bed.fake.inject(When::Overlaps(Verb::Allocate, 8192..12_288), Fault::Hang, 1);
    let head = bed.guest.area();
    let segments = [segment_bytes(0, 8, 0), segment_bytes(16, 8, 0), segment_bytes(32, 8, 0)].concat();
    bed.guest.view.store(head, &rig::header_bytes(kind::DISCARD, 0)).unwrap();
    bed.guest.view.store(head + 0x1000, &segments).unwrap();
    bed.guest.view.store(head + 0x800, &[0xff]).unwrap();
    let token = bed.guest.add(&[range(head, 16), range(head + 0x1000, 48)], &[range(head + 0x800, 1)]);
    bed.guest.submit();
    assert!(eventually(|| bed.fake.hanging() == 1));
    assert_eq!((bed.guest.ring.pop_used(), bed.status(0)), (Ok(None), 0xff));
    bed.fake.release().unwrap();
    assert_eq!((bed.guest.wait_for(token), bed.status(0)), (1, 1));
}

#[test]
fn file_system_without_holes_gets_zeroes_written_out() {
    let mut bed = bed();
    assert_eq!(bed.guest.write(0, &pattern(8192)).status, OK);
    bed.fake.inject(When::Verb(Verb::Allocate), Fault::Errno(Errno::OPNOTSUPP), u64::MAX);
    let zeroed = bed.guest.request(kind::WRITE_ZEROES, 0, &segment_bytes(1, 8, 1), 0);
    let expected = [&pattern(512)[..], &[0; 4096], &pattern(8192)[4608..]].concat();
    assert_eq!((zeroed.status, bed.rig.image_bytes(0, 8192)), (OK, expected));
}
