//! Requests that fail on the host and are parked: the guest waits, other requests continue, and in the end the guest
//! has noticed nothing.
//!
//! The engine is io_engine's fake, on real files.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blk_server::{ParkPolicy, ParkWhat, QueueCounters, WorkerId};
use disk_image::CacheMode;
use io_engine::{Engine, EngineConfig, FakeEngine, FakeHandle, Fault, ThreadsEngine, Verb, When};
use rustix::io::Errno;

use crate::rig;
use crate::rig::format::Format;
use crate::rig::in_flight_log::Log;
use crate::rig::passed::{Pending, add_transfer, mappings, memfd, region, serves, share};
use crate::rig::raw_guest::{faulty, range};
use crate::rig::{
    CALM, FrontEnd, Guest, MIB, Options, PATIENCE, Rig, code, eventually, feature, kind, ready,
    segment_bytes, single_region_bytes,
};

const OK: u8 = 0;
const IOERR: u8 = 1;
const OPEN: u8 = 0xff;
/// Parks any failure; retries only on request.
const HOLD: ParkPolicy = ParkPolicy { what: ParkWhat::Any, retry_after: None };
const BLOCK: u32 = 4096;
const BOTH: [Format; 2] = [Format::Split, Format::Packed];

struct Bed {
    fake: FakeHandle,
    front_end: FrontEnd,
    guest: Guest,
    rig: Rig,
}

fn bed_with(policy: ParkPolicy, cache: CacheMode, format: Format) -> Bed {
    let (options, fake) = faulty(Options { park: Some(policy), ..Options::cached(cache) });
    let rig = Rig::start(options);
    let (front_end, guest) = ready(&rig, format.usual());
    Bed { fake, front_end, guest, rig }
}

fn bed() -> Bed {
    bed_with(HOLD, CacheMode::Writeback, Format::Split)
}

fn block(number: u64) -> Vec<u8> {
    (0..u64::from(BLOCK)).map(|at| (at % 251 + number) as u8).collect()
}

fn addr_of(number: u64) -> u64 {
    8 * MIB + number * u64::from(BLOCK)
}

fn counters(rig: &Rig) -> QueueCounters {
    rig.server.as_ref().unwrap().report().disks[0].queues[0].counters
}

fn resume(rig: &Rig) -> usize {
    rig.server.as_ref().unwrap().resume_disk("test0", PATIENCE).unwrap()
}

fn fails(fake: &FakeHandle, verb: Verb, errno: Errno) {
    fake.inject(When::Verb(verb), Fault::Errno(errno), u64::MAX);
}

fn add_write(guest: &mut Guest, number: u64) -> Pending {
    guest.view.store(addr_of(number), &block(number)).unwrap();
    add_transfer(guest, kind::OUT, number * 8, addr_of(number), BLOCK)
}

fn is_written(rig: &Rig, number: u64) -> bool {
    rig.image_bytes(number * u64::from(BLOCK), BLOCK as usize) == block(number)
}

impl Bed {
    /// Sends writes of one block each, which fail and are parked.
    fn hold_writes(&mut self, first: u64, count: u64) -> Vec<Pending> {
        // The counter changes shortly after the guest sees the completion.
        assert!(eventually(|| counters(&self.rig).parked == 0));
        fails(&self.fake, Verb::Write, Errno::NOSPC);
        let pending = (first..first + count).map(|number| add_write(&mut self.guest, number)).collect();
        self.guest.submit();
        assert!(eventually(|| counters(&self.rig).parked == count), "{:?}", counters(&self.rig));
        pending
    }

    /// Checks that every pending request completes with this status.
    fn answered(&mut self, pending: &[Pending], status: u8) {
        for _ in pending {
            self.guest.next_used().expect("an answer");
        }
        assert!(self.guest.ring.pop_used().unwrap().is_none());
        let statuses: Vec<_> = pending.iter().map(|pending| pending.status(&self.guest)).collect();
        assert_eq!(statuses, vec![status; pending.len()]);
    }
}

// ---- parked requests that complete in the end

#[test]
fn parked_writes_keep_the_guest_waiting_others_go_on_and_all_are_done_when_resumed() {
    for format in BOTH {
        let mut bed = bed_with(HOLD, CacheMode::Writeback, format);
        let pending = bed.hold_writes(0, 20);
        assert_eq!(bed.guest.read(2048, BLOCK).status, Some(OK));
        assert_eq!(resume(&bed.rig), 20);
        assert!(eventually(|| counters(&bed.rig).parked == 20 && counters(&bed.rig).retries == 20));
        assert!(pending.iter().all(|pending| pending.status(&bed.guest) == OPEN));
        bed.fake.clear();
        assert_eq!(resume(&bed.rig), 20);
        bed.answered(&pending, OK);
        assert!((0..20).all(|number| is_written(&bed.rig, number)));
        assert!(eventually(|| counters(&bed.rig).parked == 0 && counters(&bed.rig).errors == 0));
        assert!(serves(&mut bed.guest) && resume(&bed.rig) == 0);
    }
}

#[test]
fn parked_write_is_tried_again_by_itself_after_the_pause() {
    let hold = ParkPolicy { retry_after: Some(Duration::from_millis(20)), ..HOLD };
    let mut bed = bed_with(hold, CacheMode::Writeback, Format::Split);
    let pending = bed.hold_writes(3, 1);
    assert!(eventually(|| counters(&bed.rig).retries > 2));
    assert_eq!(pending[0].status(&bed.guest), OPEN);
    bed.fake.clear();
    bed.answered(&pending, OK);
    assert!(is_written(&bed.rig, 3));
}

#[test]
fn parked_write_without_a_pause_is_not_tried_again() {
    let mut bed = bed();
    let pending = bed.hold_writes(0, 1);
    bed.fake.clear();
    std::thread::sleep(CALM);
    assert_eq!((pending[0].status(&bed.guest), counters(&bed.rig).retries), (OPEN, 0));
    resume(&bed.rig);
    bed.answered(&pending, OK);
}

/// The disk may become full within a request. The rest is carried out later, and no part is carried out twice.
#[test]
fn transfer_that_fails_halfway_goes_on_where_it_stopped() {
    let mut bed = bed();
    bed.fake.inject(When::Verb(Verb::Write), Fault::Short(700), 1);
    fails(&bed.fake, Verb::Write, Errno::NOSPC);
    let write = add_write(&mut bed.guest, 1);
    bed.guest.submit();
    assert!(eventually(|| counters(&bed.rig).parked == 1));
    let halfway = bed.rig.image_bytes(4096, 4096);
    assert!(halfway[..700] == block(1)[..700] && halfway[700..].iter().all(|&byte| byte == 0));
    // The server does not read the guest's memory again for the part that has been written.
    bed.guest.view.store(addr_of(1), &[0xee; 600]).unwrap();
    bed.fake.clear();
    resume(&bed.rig);
    bed.answered(&[write], OK);
    assert!(is_written(&bed.rig, 1) && eventually(|| counters(&bed.rig).parked == 0));

    bed.fake.inject(When::Verb(Verb::Read), Fault::Short(512), 1);
    fails(&bed.fake, Verb::Read, Errno::IO);
    let read = add_transfer(&mut bed.guest, kind::IN, 8, addr_of(9), BLOCK);
    bed.guest.submit();
    assert!(eventually(|| counters(&bed.rig).parked == 1));
    bed.fake.clear();
    resume(&bed.rig);
    assert_eq!(bed.guest.wait_for(read.token), BLOCK + 1);
    assert_eq!(bed.guest.bytes(addr_of(9), BLOCK as usize), block(1));
}

fn add_zeroing(guest: &mut Guest, verb: u32, segments: &[[u8; 16]]) -> u64 {
    let head = guest.area();
    guest.view.store(head, &rig::header_bytes(verb, 0)).unwrap();
    guest.view.store(head + 0x1000, &segments.concat()).unwrap();
    guest.view.store(head + 0x800, &[OPEN]).unwrap();
    let length = (segments.len() * 16) as u32;
    guest.add(&[range(head, 16), range(head + 0x1000, length)], &[range(head + 0x800, 1)])
}

#[test]
fn parked_discard_or_zeroes_are_done_again_as_they_were_sent() {
    for verb in [kind::DISCARD, kind::WRITE_ZEROES] {
        let mut bed = bed();
        for number in 0..6 {
            assert_eq!(bed.guest.write(number * 8, &block(number)).status, Some(OK));
        }
        bed.fake.inject(When::Overlaps(Verb::Allocate, 8192..12_288), Fault::Errno(Errno::IO), u64::MAX);
        let token = add_zeroing(&mut bed.guest, verb, &[segment_bytes(0, 8, 0), segment_bytes(16, 8, 0)]);
        bed.guest.submit();
        assert!(eventually(|| counters(&bed.rig).parked == 1));
        // A guest that changes a parked request has no effect.
        let other = segment_bytes(32, 16, 0);
        bed.guest.view.store(bed.guest.area() + 0x1000, &[other, other].concat()).unwrap();
        bed.fake.clear();
        resume(&bed.rig);
        assert_eq!(bed.guest.wait_for(token), 1);
        assert_eq!(bed.guest.bytes(bed.guest.area() + 0x800, 1), [OK]);
        let is_zero = |number: u64| bed.rig.image_bytes(number * 4096, 4096).iter().all(|&byte| byte == 0);
        assert!(is_zero(0) && is_zero(2));
        assert!([1, 3, 4, 5].into_iter().all(|number| is_written(&bed.rig, number)));
    }
}

// ---- requests that are parked, and requests that are not

#[test]
fn only_lack_of_space_is_parked_if_only_that_is_to_be() {
    let hold = ParkPolicy { what: ParkWhat::NoSpace, ..HOLD };
    let mut bed = bed_with(hold, CacheMode::Writeback, Format::Split);
    bed.fake.inject(When::Verb(Verb::Write), Fault::Errno(Errno::IO), 1);
    assert_eq!(bed.guest.write(0, &block(0)).status, Some(IOERR));
    bed.fake.inject(When::Verb(Verb::Write), Fault::Errno(Errno::DQUOT), 1);
    let pending = add_write(&mut bed.guest, 1);
    bed.guest.submit();
    assert!(eventually(|| counters(&bed.rig).parked == 1));
    resume(&bed.rig);
    bed.answered(&[pending], OK);
}

#[test]
fn what_the_host_cannot_do_at_all_is_reported() {
    let mut bed = bed();
    fails(&bed.fake, Verb::Allocate, Errno::OPNOTSUPP);
    let discarded = bed.guest.request(kind::DISCARD, 0, &segment_bytes(0, 8, 0), 0);
    assert_eq!(discarded.status, Some(IOERR));
}

#[test]
fn flush_passes_parked_writes_and_one_that_fails_is_reported_and_ends_their_wait() {
    let mut bed = bed();
    let pending = bed.hold_writes(0, 3);
    assert_eq!(bed.guest.request(kind::FLUSH, 0, &[], 0).status, Some(OK));
    bed.fake.inject(When::Verb(Verb::Sync), Fault::Errno(Errno::NOSPC), 1);
    assert_eq!(bed.guest.request(kind::FLUSH, 0, &[], 0).status, Some(IOERR));
    // The disk now accepts only reads: writes fail, even if the host would complete them.
    bed.fake.clear();
    resume(&bed.rig);
    bed.answered(&pending, IOERR);
    assert!(!is_written(&bed.rig, 0));
    assert_eq!(bed.guest.read(0, BLOCK).status, Some(OK));
}

#[test]
fn durable_write_whose_failure_may_mean_others_is_reported() {
    let mut bed = bed_with(HOLD, CacheMode::Writethrough, Format::Split);
    bed.fake.inject(When::Verb(Verb::Write), Fault::Errno(Errno::IO), 1);
    assert_eq!(bed.guest.write(0, &block(0)).status, Some(IOERR));
}

#[test]
fn durable_write_without_space_is_parked_and_durable_when_it_is_done() {
    let recorder = io_engine::Recorder::new();
    let options = Options {
        park: Some(HOLD),
        recorder: Some(recorder.clone()),
        ..Options::cached(CacheMode::Writethrough)
    };
    let (options, fake) = faulty(options);
    let rig = Rig::start(options);
    let (front_end, guest) = ready(&rig, feature::USUAL);
    let mut bed = Bed { fake, front_end, guest, rig };
    let pending = bed.hold_writes(0, 1);
    bed.fake.clear();
    resume(&bed.rig);
    bed.answered(&pending, OK);
    let last = recorder.records().pop().unwrap();
    assert_eq!(
        (last.verb, last.flags),
        (Verb::Write, rustix::io::ReadWriteFlags::DSYNC.bits().cast_signed())
    );
}

// ---- limits

/// A small engine and two disks on one worker: parked requests of one disk take no room from the other.
#[test]
fn parked_requests_take_no_room_from_others_and_are_done_however_many_there_are() {
    let config = EngineConfig { depth: 24, ..EngineConfig::default() };
    let (engine, fake) = FakeEngine::new(config).unwrap();
    let engine = Mutex::new(Some(engine));
    let factory = move || Ok(Box::new(engine.lock().unwrap().take().unwrap()) as Box<dyn Engine>);
    let options =
        Options { engine: Some(Box::new(factory)), disks: 2, park: Some(HOLD), ..Options::buffered() };
    let rig = Rig::start(options);
    let (front_end, guest) = ready(&rig, feature::USUAL);
    let mut bed = Bed { fake, front_end, guest, rig };
    let mut other = bed.rig.connect_to(1);
    other.negotiate(feature::USUAL);
    other.share_memory(16 * MIB);
    let mut other = other.start_queue(0, 256, feature::USUAL);

    let mut pending = Vec::new();
    for round in 0..3 {
        pending = bed.hold_writes(0, 80);
        assert_eq!(other.read(0, BLOCK).status, Some(OK), "round {round}");
        bed.fake.clear();
        assert_eq!(resume(&bed.rig), 80);
        bed.answered(&pending, OK);
        assert!(serves(&mut other));
    }
    assert_eq!(pending.len(), 80);
    assert!((0..80).all(|number| is_written(&bed.rig, number)));
}

// ---- stops, moves, changes of memory

#[test]
fn stop_tries_parked_requests_once_more_and_answers_them_as_that_ends() {
    for format in BOTH {
        let mut bed = bed_with(HOLD, CacheMode::Writeback, format);
        let pending = bed.hold_writes(0, 4);
        bed.front_end.stop_queue(0);
        bed.answered(&pending, IOERR);

        let mut bed = bed_with(HOLD, CacheMode::Writeback, format);
        let pending = bed.hold_writes(0, 4);
        bed.fake.clear();
        bed.front_end.stop_queue(0);
        bed.answered(&pending, OK);
        assert!((0..4).all(|number| is_written(&bed.rig, number)));
    }
}

#[test]
fn server_that_stops_does_not_wait_for_parked_requests() {
    let mut bed = bed();
    let pending = bed.hold_writes(0, 4);
    let report = bed.rig.stop();
    assert!(report.unfinished.is_empty() && report.is_clean(), "{report:?}");
    bed.answered(&pending, IOERR);
}

#[test]
fn front_end_that_goes_leaves_nothing_behind() {
    let mut bed = bed();
    bed.hold_writes(0, 4);
    drop(bed.front_end);
    bed.fake.clear();
    let (_front_end, mut guest) = ready(&bed.rig, feature::USUAL);
    assert!(serves(&mut guest));
    assert!(eventually(|| counters(&bed.rig).parked == 0));
}

#[test]
fn disk_that_is_removed_does_not_wait_for_parked_requests() {
    let mut bed = bed();
    let pending = bed.hold_writes(0, 2);
    bed.rig.server.as_ref().unwrap().remove_disk("test0", true, PATIENCE).unwrap();
    bed.answered(&pending, IOERR);
}

/// A worker with the fake engine, and others with plain ones.
fn fake_in_the_first_worker() -> (Options, FakeHandle) {
    let (engine, handle) = FakeEngine::new(EngineConfig::default()).unwrap();
    let (engine, first) = (Mutex::new(Some(engine)), AtomicBool::new(true));
    let factory = move || {
        if first.swap(false, Ordering::Relaxed) {
            return Ok(Box::new(engine.lock().unwrap().take().unwrap()) as Box<dyn Engine>);
        }
        Ok(Box::new(ThreadsEngine::new(EngineConfig::default())?) as Box<dyn Engine>)
    };
    (Options { engine: Some(Box::new(factory)), park: Some(HOLD), workers: 2, ..Options::buffered() }, handle)
}

#[test]
fn queue_that_moves_takes_parked_requests_along() {
    for format in BOTH {
        let (options, fake) = fake_in_the_first_worker();
        let rig = Rig::start(options);
        let (front_end, guest) = ready(&rig, format.usual());
        let mut bed = Bed { fake, front_end, guest, rig };
        bed.rig.server.as_ref().unwrap().attach("test0", 0, WorkerId(0), PATIENCE).unwrap();
        let pending = bed.hold_writes(0, 5);
        bed.rig.server.as_ref().unwrap().attach("test0", 0, WorkerId(1), PATIENCE).unwrap();
        let worker = bed.rig.server.as_ref().unwrap().report().disks[0].queues[0].worker;
        assert_eq!((counters(&bed.rig).parked, worker), (5, WorkerId(1)));
        assert!(pending.iter().all(|pending| pending.status(&bed.guest) == OPEN));
        // The other worker's engine has no fault.
        assert_eq!(resume(&bed.rig), 5);
        bed.answered(&pending, OK);
        assert!((0..5).all(|number| is_written(&bed.rig, number)) && serves(&mut bed.guest));
    }
}

#[test]
fn parked_requests_of_a_queue_that_moved_are_tried_again_in_time() {
    let (options, fake) = fake_in_the_first_worker();
    let soon = Some(Duration::from_millis(100));
    let rig = Rig::start(Options { park: Some(ParkPolicy { retry_after: soon, ..HOLD }), ..options });
    let (front_end, guest) = ready(&rig, Format::Split.usual());
    let mut bed = Bed { fake, front_end, guest, rig };
    bed.rig.server.as_ref().unwrap().attach("test0", 0, WorkerId(0), PATIENCE).unwrap();
    let pending = bed.hold_writes(0, 3);
    bed.rig.server.as_ref().unwrap().attach("test0", 0, WorkerId(1), PATIENCE).unwrap();
    // The server retries by itself; the guest does nothing.
    bed.answered(&pending, OK);
}

#[test]
fn parked_requests_are_done_in_the_memory_that_the_guest_has_by_then() {
    let mut bed = bed();
    bed.front_end.add_region(64 * MIB, MIB);
    bed.guest.view = guest_mem::MemoryView::new(Arc::clone(&bed.front_end.memory));
    let pending = bed.hold_writes(0, 2);
    bed.guest.view.store(64 * MIB, &block(7)).unwrap();
    let gone = add_transfer(&mut bed.guest, kind::OUT, 7 * 8, 64 * MIB, BLOCK);
    bed.guest.submit();
    assert!(eventually(|| counters(&bed.rig).parked == 3));
    bed.fake.clear();
    // One of the three has its data in the removed region.
    bed.front_end.remove_region(64 * MIB);
    (0..3).for_each(|_| _ = bed.guest.next_used().expect("an answer"));
    let statuses = [pending[0], pending[1], gone].map(|pending| pending.status(&bed.guest));
    assert_eq!(statuses, [OK, OK, IOERR]);
    assert!(is_written(&bed.rig, 0) && is_written(&bed.rig, 1));
}

/// After the removal, the front-end may use that memory for something else.
#[test]
fn parked_read_whose_memory_is_withdrawn_fails_and_stores_nothing_there() {
    let mut bed = bed();
    assert_eq!(bed.guest.write(8, &block(1)).status, Some(OK));
    let file = memfd(MIB);
    let extra = region(&file, 64 * MIB, MIB, 0);
    bed.front_end.ok(code::ADD_MEM_REG, &single_region_bytes(&extra), &[file.as_fd()]);
    bed.front_end.memory = Arc::new(bed.front_end.memory.with_region(extra).unwrap());
    fails(&bed.fake, Verb::Read, Errno::IO);
    let read = add_transfer(&mut bed.guest, kind::IN, 8, 64 * MIB, BLOCK);
    bed.guest.submit();
    assert!(eventually(|| counters(&bed.rig).parked == 1));
    bed.fake.clear();
    bed.front_end.remove_region(64 * MIB);
    assert_eq!(mappings(&file), 0);
    // Only the status byte is stored.
    assert_eq!((bed.guest.wait_for(read.token), read.status(&bed.guest)), (1, IOERR));
    let mut bytes = vec![0xee; BLOCK as usize];
    rustix::io::pread(&file, &mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    assert_eq!(resume(&bed.rig), 0);
    assert!(eventually(|| counters(&bed.rig).parked == 0) && serves(&mut bed.guest));
}

#[test]
fn ring_that_is_cut_short_by_a_new_table_keeps_neither_the_old_one_nor_what_is_parked_in_it() {
    for format in BOTH {
        let mut bed = bed_with(HOLD, CacheMode::Writeback, format);
        let file = bed.front_end.memory.regions()[0].fd().try_clone().unwrap();
        let pending = bed.hold_writes(0, 3);
        // The ring's last part begins inside the region and ends beyond it.
        share(&mut bed.front_end, vec![region(&file, 0, bed.guest.layout.used.0 + 2, 0)]);
        // Two mappings are the test's, one is the server's.
        assert_eq!(mappings(&file), 3);
        assert!(bed.guest.err_signalled());
        bed.answered(&pending, IOERR);
        bed.fake.clear();
        assert_eq!((resume(&bed.rig), is_written(&bed.rig, 0)), (0, false));
        share(&mut bed.front_end, vec![region(&file, 0, 16 * MIB, 0)]);
        assert!(serves(&mut bed.guest));
    }
}

// ---- the in-flight log

/// `VHOST_USER_PROTOCOL_F_GET_VRING_BASE_INFLIGHT`.
const BASE_INFLIGHT: u64 = 1 << 20;

fn bed_with_log(log: &Log, format: Format, protocol: u64) -> Bed {
    let (options, fake) = faulty(Options { park: Some(HOLD), ..Options::buffered() });
    let rig = Rig::start(options);
    let mut front_end = log.front_end(&rig, format, protocol);
    front_end.share_memory(16 * MIB);
    let guest = front_end.start_queue(0, 256, format.usual());
    Bed { fake, front_end, guest, rig }
}

#[test]
fn stop_that_may_leave_requests_in_the_log_leaves_those_that_are_parked() {
    for format in BOTH {
        let log = Log::new();
        let mut bed = bed_with_log(&log, format, u64::MAX);
        let pending = bed.hold_writes(0, 4);
        bed.front_end.stop_queue(0);
        assert!(pending.iter().all(|pending| pending.status(&bed.guest) == OPEN));
        bed.fake.clear();
        bed.front_end.announce_queue(&bed.guest);
        bed.answered(&pending, OK);
        assert!((0..4).all(|number| is_written(&bed.rig, number)) && serves(&mut bed.guest));
    }
}

#[test]
fn stop_that_may_not_leave_them_answers_them() {
    let log = Log::new();
    let mut bed = bed_with_log(&log, Format::Split, !BASE_INFLIGHT);
    let pending = bed.hold_writes(0, 4);
    bed.front_end.stop_queue(0);
    bed.answered(&pending, IOERR);
}

/// The server is upgraded while the disk is full.
#[test]
fn server_that_stops_leaves_parked_requests_in_the_log_and_the_next_one_does_them() {
    for format in BOTH {
        let log = Log::new();
        let mut bed = bed_with_log(&log, format, !BASE_INFLIGHT);
        let pending = bed.hold_writes(0, 4);
        assert!(bed.rig.stop().is_clean());
        assert!(pending.iter().all(|pending| pending.status(&bed.guest) == OPEN));
        bed.rig.start_server(Options::buffered());
        bed.front_end = log.front_end(&bed.rig, format, !BASE_INFLIGHT);
        bed.front_end.share(Arc::clone(bed.guest.view.memory()));
        bed.front_end.announce_queue(&bed.guest);
        bed.front_end.ok(code::SET_VRING_ENABLE, &rig::vring_state(0, 1), &[]);
        bed.answered(&pending, OK);
        assert!((0..4).all(|number| is_written(&bed.rig, number)) && serves(&mut bed.guest));
    }
}
