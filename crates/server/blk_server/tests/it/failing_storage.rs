//! Storage that really fails, under every engine: full file systems, a truncated image, a host that returns EIO. An
//! error ends only the request that caused it. Parked requests complete once the storage works again.
//!
//! tmpfs and ext4 (on a loop device) need the right to mount, and so does FUSE. Without this right the tests print that
//! they are skipped.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};

use blk_server::{ParkPolicy, ParkWhat, QueueCounters};
use disk_image::CacheMode;
use io_engine::{EngineConfig, EngineKind, make};
use xtask::skip::{Reason, skip_part};

use crate::rig::fuse_disk::{Call, FuseDisk};
use crate::rig::passed::{Pending, add_transfer};
use crate::rig::small_fs::{Kind, SmallFs};
use crate::rig::{
    FrontEnd, Guest, MIB, Options, PATIENCE, Rig, eventually, feature, kind, ready, segment_bytes,
};

const OK: Option<u8> = Some(0);
const IOERR: Option<u8> = Some(1);
const CHUNK: u32 = 64 * 1024;
const CHUNK_SECTORS: u64 = CHUNK as u64 / 512;

/// Engines, each with a cache mode that the engine and the storage support.
const ENGINES: [(EngineKind, CacheMode); 8] = [
    (EngineKind::IoUring, CacheMode::None),
    (EngineKind::IoUring, CacheMode::Writeback),
    (EngineKind::LinuxAio, CacheMode::None),
    (EngineKind::PosixAio, CacheMode::Writethrough),
    (EngineKind::Threads, CacheMode::Writeback),
    (EngineKind::Threads, CacheMode::Directsync),
    (EngineKind::Sync, CacheMode::Writeback),
    (EngineKind::Mmap, CacheMode::Writeback),
];

fn options(engine: EngineKind, cache: CacheMode) -> Option<Options> {
    match make(engine, &EngineConfig::default()) {
        Err(error) if error.kind() == std::io::ErrorKind::Unsupported => {
            skip_part(Reason::NoEngine(engine.to_string()), error);
            return None;
        }
        made => drop(made.unwrap()),
    }
    let factory = move || make(engine, &EngineConfig::default());
    Some(Options { engine: Some(Box::new(factory)), ..Options::cached(cache) })
}

fn counters(rig: &Rig) -> QueueCounters {
    rig.server.as_ref().unwrap().report().disks[0].queues[0].counters
}

fn resume(rig: &Rig) -> usize {
    rig.server.as_ref().unwrap().resume_disk("test0", PATIENCE).unwrap()
}

fn chunk(number: u64) -> Vec<u8> {
    (0..u64::from(CHUNK)).map(|at| (at % 251 + number) as u8).collect()
}

fn write_chunk(guest: &mut Guest, number: u64) -> Pending {
    let addr = 8 * MIB + number % 32 * u64::from(CHUNK);
    guest.view.store(addr, &chunk(number)).unwrap();
    let pending = add_transfer(guest, kind::OUT, number * CHUNK_SECTORS, addr, CHUNK);
    guest.submit();
    pending
}

// ---- full file systems

/// Writes chunk after chunk until a write is parked. Returns the parked write and its number.
fn fill_until_parked(rig: &Rig, guest: &mut Guest) -> (Pending, u64) {
    for number in 0..400 {
        let pending = write_chunk(guest, number);
        let mut is_answered = false;
        assert!(eventually(|| {
            is_answered |= guest.ring.pop_used().unwrap().is_some();
            is_answered || counters(rig).parked == 1
        }));
        if !is_answered {
            return (pending, number);
        }
        assert_eq!(pending.status(guest), 0, "chunk {number}");
    }
    panic!("it never got full");
}

fn waits_for_room_and_goes_on(engine: EngineKind, cache: CacheMode, small: &SmallFs) {
    let Some(options) = options(engine, cache) else { return };
    let park = Some(ParkPolicy { what: ParkWhat::NoSpace, retry_after: None });
    let ballast = small.ballast(3 << 20);
    let folder = Some(small.path().to_owned());
    let rig = Rig::start(Options { folder, image_bytes: 64 * MIB, park, ..options });
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    let (held, number) = fill_until_parked(&rig, &mut guest);
    assert!(number > 0, "{engine}, {cache}: nothing fits");
    // Other requests continue, and the parked request does not change after a failed retry.
    assert_eq!(guest.read(0, CHUNK).data, chunk(0), "{engine}, {cache}");
    assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).status, OK);
    assert_eq!(resume(&rig), 1);
    assert!(eventually(|| counters(&rig).retries == 1 && counters(&rig).parked == 1), "{engine}, {cache}");
    assert_eq!(held.status(&guest), 0xff);
    std::fs::remove_file(ballast).unwrap();
    assert_eq!(resume(&rig), 1);
    guest.wait_for(held.token);
    assert_eq!(held.status(&guest), 0, "{engine}, {cache}");
    let whole = (0..=number).all(|number| guest.read(number * CHUNK_SECTORS, CHUNK).data == chunk(number));
    assert!(whole, "{engine}, {cache}: something else was written");
    assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).status, OK);
    assert_eq!((counters(&rig).errors, counters(&rig).parked), (0, 0), "{engine}, {cache}");
}

#[test]
fn guest_waits_for_room_on_a_full_tmpfs_and_goes_on_without_an_error() {
    for (engine, cache) in ENGINES {
        let Some(small) = SmallFs::mount(Kind::Tmpfs, 4) else { return };
        waits_for_room_and_goes_on(engine, cache, &small);
    }
}

#[test]
fn guest_waits_for_room_on_a_full_ext4_and_goes_on_without_an_error() {
    for (engine, cache) in ENGINES.into_iter().filter(|(_, cache)| cache.is_direct()) {
        let Some(small) = SmallFs::mount(Kind::Ext4, 8) else { return };
        waits_for_room_and_goes_on(engine, cache, &small);
    }
}

#[test]
fn full_file_system_is_ioerr_and_freed_blocks_can_be_written_again() {
    for (engine, cache) in ENGINES {
        let Some(small) = SmallFs::mount(Kind::Tmpfs, 1) else { return };
        let Some(options) = options(engine, cache) else { continue };
        let folder = Some(small.path().to_owned());
        let rig = Rig::start(Options { folder, image_bytes: 4 * MIB, ..options });
        let (_front_end, mut guest) = ready(&rig, feature::USUAL);
        let written =
            (0..64).take_while(|i| guest.write(i * CHUNK_SECTORS, &chunk(1)).status == OK).count() as u64;
        assert!((1..=16).contains(&written), "{engine}, {cache}: {written} chunks fit");
        assert_eq!(guest.write(60 * CHUNK_SECTORS, &chunk(1)).status, IOERR);
        assert_eq!(guest.read(0, CHUNK).data, chunk(1), "{engine}, {cache}");
        assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).status, OK);
        assert_eq!(
            guest.request(kind::DISCARD, 0, &segment_bytes(0, 256, 0), 0).status,
            OK,
            "{engine}, {cache}"
        );
        assert_eq!(guest.write(60 * CHUNK_SECTORS, &chunk(1)).status, OK, "{engine}, {cache}");
    }
}

// ---- a truncated image

/// Beyond the end of the mapped file an access raises SIGBUS.
#[test]
fn read_behind_the_end_of_a_truncated_image_is_ioerr_and_all_others_go_on() {
    for (engine, cache) in ENGINES {
        let Some(options) = options(engine, cache) else { continue };
        let rig = Rig::start(Options { folder: ram(engine), image_bytes: 4 * MIB, ..options });
        let (_front_end, mut guest) = ready(&rig, feature::USUAL);
        assert_eq!(guest.write(0, &chunk(3)).status, OK);
        File::options().write(true).open(&rig.image).unwrap().set_len(2 * MIB).unwrap();
        let behind = 3 * MIB / 512;
        assert_eq!(guest.read(behind, CHUNK).status, IOERR, "{engine}, {cache}");
        assert_eq!(guest.read(0, CHUNK).data, chunk(3), "{engine}, {cache}");
        assert_eq!(guest.write(8, &chunk(4)).status, OK, "{engine}, {cache}");
        assert_eq!(guest.read(8, CHUNK).data, chunk(4), "{engine}, {cache}");
    }
}

#[test]
fn parked_read_of_a_truncated_image_is_done_when_the_image_is_whole_again() {
    for (engine, cache) in ENGINES {
        let Some(options) = options(engine, cache) else { continue };
        let park = Some(ParkPolicy { what: ParkWhat::Any, retry_after: None });
        let rig = Rig::start(Options { folder: ram(engine), image_bytes: 4 * MIB, park, ..options });
        let (_front_end, mut guest) = ready(&rig, feature::USUAL);
        let image = File::options().write(true).open(&rig.image).unwrap();
        image.set_len(2 * MIB).unwrap();
        let read = add_transfer(&mut guest, kind::IN, 3 * MIB / 512, 8 * MIB, CHUNK);
        guest.submit();
        assert!(eventually(|| counters(&rig).parked == 1), "{engine}, {cache}");
        image.set_len(4 * MIB).unwrap();
        assert_eq!(resume(&rig), 1);
        assert_eq!(guest.wait_for(read.token), CHUNK + 1, "{engine}, {cache}");
        assert_eq!(read.status(&guest), 0);
    }
}

/// `mmap` tests use a file in RAM, because not every host can map a file on disk.
fn ram(engine: EngineKind) -> Option<PathBuf> {
    (engine == EngineKind::Mmap).then(|| "/dev/shm".into())
}

// ---- EIO

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct KeepLog;

impl Write for KeepLog {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The tests share the log, so each test searches for sectors that only its own lines name.
fn keep_log() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing_subscriber::fmt().with_ansi(false).with_writer(|| KeepLog).init());
}

fn logged(parts: &[&str]) -> bool {
    let log = String::from_utf8(LOG.lock().unwrap().clone()).unwrap();
    log.lines().any(|line| parts.iter().all(|part| line.contains(part)))
}

/// A FUSE file system, a server on it, and its guest.
fn fuse(
    engine: EngineKind,
    cache: CacheMode,
    park: Option<ParkPolicy>,
) -> Option<(FuseDisk, Rig, FrontEnd, Guest)> {
    let ticks = AtomicU64::new(0);
    let disk = FuseDisk::mount(4 << 20, Arc::new(move || ticks.fetch_add(1, Ordering::Relaxed)))?;
    let options = options(engine, cache)?;
    let rig = Rig::start(Options { existing: Some(disk.path()), park, ..options });
    let (front_end, guest) = ready(&rig, feature::USUAL);
    Some((disk, rig, front_end, guest))
}

/// The host's engines, without mmap: a file system in this process must not serve pages of a mapping.
fn engines_on_fuse() -> impl Iterator<Item = (EngineKind, CacheMode)> {
    let unmapped = ENGINES.into_iter().filter(|(engine, _)| *engine != EngineKind::Mmap);
    unmapped.filter(|(engine, cache)| options(*engine, *cache).is_some())
}

#[test]
fn bad_spot_of_the_host_is_ioerr_there_and_nowhere_else_and_the_log_names_it() {
    keep_log();
    // Through the page cache, a durable write's EIO may concern other data, so the disk refuses all later writes.
    for (engine, cache) in engines_on_fuse().filter(|(_, cache)| *cache != CacheMode::Writethrough) {
        let Some((disk, _rig, _front_end, mut guest)) = fuse(engine, cache, None) else { return };
        let bad = 2 * MIB..2 * MIB + 4096;
        disk.fail(Call::Read, bad.clone(), fuser::Errno::EIO);
        disk.fail(Call::Write, bad, fuser::Errno::EIO);
        assert_eq!(guest.write(4096, &chunk(1)).status, IOERR, "{engine}, {cache}");
        assert_eq!(guest.read(4096, CHUNK).status, IOERR, "{engine}, {cache}");
        assert_eq!(guest.write(0, &chunk(2)).status, OK, "{engine}, {cache}");
        assert_eq!(guest.read(0, CHUNK).data, chunk(2), "{engine}, {cache}");
        assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).status, OK);
        assert!(disk.failed() >= 2);
    }
    let place = ["test0", "sector=4096", "offset=2097152", "bytes=65536"];
    assert!(logged(&[&place[..], &["write failed", "Input/output error (os error 5)"]].concat()));
    assert!(logged(&[&place[..], &["read failed", "Input/output error (os error 5)"]].concat()));
}

#[test]
fn parked_requests_are_done_when_the_host_is_well_again_and_the_log_says_what_to_do() {
    keep_log();
    let park = Some(ParkPolicy { what: ParkWhat::Any, retry_after: None });
    for (engine, cache) in engines_on_fuse().filter(|(_, cache)| !cache.starts_writethrough()) {
        let Some((disk, rig, _front_end, mut guest)) = fuse(engine, cache, park) else { return };
        disk.fail(Call::Write, MIB..MIB + 4096, fuser::Errno::EIO);
        let held = write_chunk(&mut guest, 16);
        assert!(eventually(|| counters(&rig).parked == 1), "{engine}, {cache}");
        assert_eq!(guest.write(0, &chunk(2)).status, OK);
        disk.heal();
        assert_eq!(resume(&rig), 1);
        guest.wait_for(held.token);
        assert_eq!(held.status(&guest), 0);
        assert_eq!(disk.bytes(MIB as usize..MIB as usize + CHUNK as usize), chunk(16), "{engine}, {cache}");
    }
    let says = ["test0", "sector=2048", "write is parked", "os error 5", "`bareblk ctl resume test0`"];
    assert!(logged(&says));
    assert!(logged(&["all parked requests are answered", "requests=1", "failed=0"]));
}

#[test]
fn failed_sync_of_the_host_is_never_parked() {
    let park = Some(ParkPolicy { what: ParkWhat::Any, retry_after: None });
    let Some((disk, rig, _front_end, mut guest)) = fuse(EngineKind::Threads, CacheMode::Writeback, park)
    else {
        return;
    };
    assert_eq!(guest.write(0, &chunk(2)).status, OK);
    disk.fail(Call::Sync, 0..0, fuser::Errno::ENOSPC);
    assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).status, IOERR);
    disk.heal();
    assert_eq!(guest.write(0, &chunk(2)).status, IOERR);
    assert_eq!(counters(&rig).parked, 0);
    assert!(rig.server.as_ref().unwrap().report().disks[0].failed);
}
