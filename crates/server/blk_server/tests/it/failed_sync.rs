//! After a failed sync a disk promises nothing: the errors that the guest gets, and the calls that the server still
//! makes.
//!
//! docs/decisions/0012 explains the reasons.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use blk_server::AdminError;
use disk_image::CacheMode;
use io_engine::{FakeHandle, Fault, Recorder, Verb, When};
use rustix::io::Errno;

use crate::rig::passed::add_transfer;
use crate::rig::raw_guest::faulty;
use crate::rig::{
    FrontEnd, Guest, MIB, Options, PATIENCE, Rig, eventually, feature, kind, ready, segment_bytes,
};

const OK: Option<u8> = Some(0);
const IOERR: Option<u8> = Some(1);
/// A driver whose writes are durable when they complete.
const DURABLE: u64 = feature::USUAL & !feature::FLUSH;

struct Bed {
    fake: FakeHandle,
    recorder: Recorder,
    front_end: FrontEnd,
    guest: Guest,
    rig: Rig,
}

impl Bed {
    fn start(cache: CacheMode, features: u64) -> Self {
        let recorder = Recorder::new();
        let options = Options { recorder: Some(recorder.clone()), ..Options::cached(cache) };
        let (options, fake) = faulty(options);
        let rig = Rig::start(options);
        let (front_end, guest) = ready(&rig, features);
        Self { fake, recorder, front_end, guest, rig }
    }

    fn fail_next(&self, verb: Verb, errno: Errno) {
        self.fake.inject(When::Verb(verb), Fault::Errno(errno), 1);
    }

    fn flush(&mut self) -> Option<u8> {
        self.guest.request(kind::FLUSH, 0, &[], 0).status
    }

    fn discard(&mut self) -> Option<u8> {
        self.guest.request(kind::DISCARD, 0, &segment_bytes(0, 8, 0), 0).status
    }

    fn zero(&mut self) -> Option<u8> {
        self.guest.request(kind::WRITE_ZEROES, 0, &segment_bytes(8, 8, 0), 0).status
    }

    /// The statuses of a write, discard, write-zeroes, flush and read.
    fn statuses(&mut self) -> [Option<u8>; 5] {
        let write = self.guest.write(0, &[1; 512]).status;
        [write, self.discard(), self.zero(), self.flush(), self.guest.read(0, 512).status]
    }
}

const READS_ONLY: [Option<u8>; 5] = [IOERR, IOERR, IOERR, IOERR, OK];
const ALL_WORK: [Option<u8>; 5] = [OK; 5];

/// The statuses after the disk's first flush failed.
fn after_failed_flush(cache: CacheMode) -> [Option<u8>; 5] {
    let mut bed = Bed::start(cache, feature::USUAL);
    bed.fail_next(Verb::Sync, Errno::IO);
    assert_eq!(bed.flush(), IOERR);
    bed.statuses()
}

/// The statuses after a durable request failed.
fn after_failed(
    cache: CacheMode,
    verb: Verb,
    errno: Errno,
    send: fn(&mut Bed) -> Option<u8>,
) -> [Option<u8>; 5] {
    let mut bed = Bed::start(cache, DURABLE);
    bed.fail_next(verb, errno);
    assert_eq!(send(&mut bed), IOERR);
    bed.statuses()
}

fn write(bed: &mut Bed) -> Option<u8> {
    bed.guest.write(0, &[1; 512]).status
}

#[test]
fn flush_that_failed_leaves_a_disk_that_only_reads_in_every_mode() {
    let modes = [CacheMode::None, CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Directsync];
    assert_eq!(modes.map(after_failed_flush), [READS_ONLY; 4]);
}

/// After the failure, the server makes no call for which a later sync could report success.
#[test]
fn kernel_is_asked_for_reads_only_after_a_flush_failed() {
    let mut bed = Bed::start(CacheMode::Writeback, feature::USUAL);
    bed.fail_next(Verb::Sync, Errno::IO);
    bed.flush();
    bed.recorder.clear();
    bed.statuses();
    let verbs: Vec<_> = bed.recorder.records().iter().map(|call| call.verb).collect();
    assert_eq!(verbs, [Verb::Read]);
}

#[test]
fn stop_after_a_flush_failed_reports_the_disk_as_not_flushed() {
    let mut bed = Bed::start(CacheMode::None, feature::USUAL);
    bed.fail_next(Verb::Sync, Errno::IO);
    bed.flush();
    let report = bed.rig.stop();
    assert!(!report.is_clean());
    assert_eq!(report.not_flushed[0].1.to_string(), "an earlier sync failed, so data may be lost");
}

#[test]
fn disk_whose_sync_failed_is_neither_paused_nor_copied() {
    let mut bed = Bed::start(CacheMode::Writeback, feature::USUAL);
    bed.fail_next(Verb::Sync, Errno::IO);
    bed.flush();
    let server = bed.rig.running();
    let paused = server.while_paused(&["test0".to_owned()], PATIENCE, || panic!("paused"));
    assert!(matches!(paused, Err(AdminError::FlushFailed { .. })), "{paused:?}");
    let copied = server.snapshot(&[("test0".to_owned(), tempfile::tempfile().unwrap())], PATIENCE);
    assert!(matches!(copied, Err(AdminError::FlushFailed { .. })), "{copied:?}");
}

#[test]
fn next_front_end_finds_the_disk_as_it_failed() {
    let mut bed = Bed::start(CacheMode::None, feature::USUAL);
    bed.fail_next(Verb::Sync, Errno::IO);
    bed.flush();
    drop(bed.front_end);
    (bed.front_end, bed.guest) = ready(&bed.rig, feature::USUAL);
    assert_eq!(bed.statuses(), READS_ONLY);
}

#[test]
fn flush_that_waited_for_one_that_failed_fails_too() {
    let mut bed = Bed::start(CacheMode::Writeback, feature::USUAL);
    bed.fail_next(Verb::Sync, Errno::IO);
    let flushes = [0, 1].map(|_| add_transfer(&mut bed.guest, kind::FLUSH, 0, 0, 0));
    bed.guest.submit();
    assert!(eventually(|| flushes.iter().all(|flush| flush.status(&bed.guest) == 1)));
}

#[test]
fn durable_write_in_flight_while_a_flush_fails_is_not_called_durable() {
    let mut bed = Bed::start(CacheMode::Writeback, DURABLE);
    bed.fake.inject(When::Verb(Verb::Write), Fault::Hang, 1);
    bed.fail_next(Verb::Sync, Errno::IO);
    let write = add_transfer(&mut bed.guest, kind::OUT, 0, 8 * MIB, 512);
    bed.guest.submit();
    assert!(eventually(|| bed.fake.hanging() == 1));
    assert_eq!(bed.flush(), IOERR);
    bed.fake.release().unwrap();
    assert!(eventually(|| write.status(&bed.guest) == 1));
}

#[test]
fn flush_given_up_when_the_time_to_stop_is_over_is_no_failed_sync() {
    let mut bed = Bed::start(CacheMode::Writeback, feature::USUAL);
    bed.fake.inject(When::Verb(Verb::Sync), Fault::Hang, 1);
    let held = add_transfer(&mut bed.guest, kind::FLUSH, 0, 0, 0);
    bed.guest.submit();
    assert!(eventually(|| bed.fake.hanging() == 1));
    let report = bed.rig.server.take().unwrap().stop(std::time::Duration::from_millis(300));
    assert!(!report.unfinished.is_empty() && report.not_flushed.is_empty());
    assert!(eventually(|| held.status(&bed.guest) == 1));
}

// ---- durable requests

#[test]
fn durable_write_that_fails_with_eio_through_the_page_cache_fails_the_disk() {
    assert_eq!(after_failed(CacheMode::Writethrough, Verb::Write, Errno::IO, write), READS_ONLY);
    assert_eq!(after_failed(CacheMode::Writeback, Verb::Write, Errno::IO, write), READS_ONLY);
}

/// Only the write itself failed: no other data is lost.
#[test]
fn durable_write_that_fails_past_the_page_cache_fails_alone() {
    assert_eq!(after_failed(CacheMode::Directsync, Verb::Write, Errno::IO, write), ALL_WORK);
    assert_eq!(after_failed(CacheMode::None, Verb::Write, Errno::IO, write), ALL_WORK);
}

#[test]
fn durable_write_that_fails_for_reasons_of_its_own_fails_alone() {
    assert_eq!(after_failed(CacheMode::Writethrough, Verb::Write, Errno::NOSPC, write), ALL_WORK);
}

#[test]
fn sync_that_fails_at_the_end_of_a_durable_discard_fails_the_disk_in_every_mode() {
    assert_eq!(after_failed(CacheMode::Writethrough, Verb::Sync, Errno::NOSPC, Bed::discard), READS_ONLY);
    assert_eq!(after_failed(CacheMode::Directsync, Verb::Sync, Errno::IO, Bed::discard), READS_ONLY);
    assert_eq!(after_failed(CacheMode::Directsync, Verb::Sync, Errno::IO, Bed::zero), READS_ONLY);
}

#[test]
fn durable_discard_that_the_file_system_refuses_fails_alone() {
    let refused = after_failed(CacheMode::Writethrough, Verb::Allocate, Errno::OPNOTSUPP, Bed::discard);
    assert_eq!(refused, ALL_WORK);
}

/// The request reports the first segment's failure; the server must still notice the failed sync of the second.
#[test]
fn sync_that_fails_in_a_later_segment_of_a_discard_fails_the_disk() {
    let mut bed = Bed::start(CacheMode::Directsync, DURABLE);
    bed.fail_next(Verb::Allocate, Errno::OPNOTSUPP);
    bed.fail_next(Verb::Sync, Errno::IO);
    let segments = [segment_bytes(0, 8, 0), segment_bytes(16, 8, 0)].concat();
    assert_eq!(bed.guest.request(kind::DISCARD, 0, &segments, 0).status, IOERR);
    assert_eq!(bed.statuses(), READS_ONLY);
}

#[test]
fn cached_write_that_fails_fails_alone() {
    let mut bed = Bed::start(CacheMode::Writeback, feature::USUAL);
    bed.fail_next(Verb::Write, Errno::IO);
    assert_eq!(write(&mut bed), IOERR);
    assert_eq!(bed.statuses(), ALL_WORK);
}

#[test]
fn unsafe_disk_never_fails_as_a_whole() {
    assert_eq!(after_failed(CacheMode::Unsafe, Verb::Write, Errno::IO, write), ALL_WORK);
}
