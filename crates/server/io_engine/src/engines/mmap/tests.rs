//! Tests of calls on files in memory that shrink, grow, or use up their file system's space while they are mapped.
//!
//! `tests/contract` tests the contract of every engine.

#![allow(clippy::cast_possible_truncation)] // small numbers of our own

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use disk_image::Alignment;
use guest_mem::sigbus;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use xtask::sizes::unless_emulated;
use xtask::skip::{Reason, skip};

use super::presence::CHUNK_BYTES;
use super::*;
use crate::backend::Buffers;

const PAGE: u64 = 4096;
const DEPTH: u32 = 32;

fn memfd(size_bytes: u64) -> Arc<File> {
    let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size_bytes).unwrap();
    Arc::new(file)
}

fn engine() -> MmapBackend {
    MmapBackend::new(&EngineConfig { depth: DEPTH, ..EngineConfig::default() }).unwrap()
}

fn attach(engine: &mut MmapBackend, index: u32, file: &Arc<File>) -> io::Result<Target> {
    engine.register_file(index, &FileSpec::of_file(Arc::clone(file), Alignment::BUFFERED))
}

fn engine_on(file: &Arc<File>) -> MmapBackend {
    let mut engine = engine();
    attach(&mut engine, 0, file).unwrap();
    engine
}

/// One transfer of a whole buffer.
struct Transfer {
    verb: Verb,
    file: u32,
    offset_bytes: u64,
    data: Vec<u8>,
}

fn read(offset_bytes: u64, len: u64) -> Transfer {
    Transfer { verb: Verb::Read, file: 0, offset_bytes, data: vec![0xee; len as usize] }
}

fn write(offset_bytes: u64, data: Vec<u8>) -> Transfer {
    Transfer { verb: Verb::Write, file: 0, offset_bytes, data }
}

fn queue(engine: &mut MmapBackend, name: u64, file: u32, call: &Call) {
    // SAFETY: 1. callers keep the memory of the call until they have the result.
    unsafe { engine.queue(name, Target::Registered(file), call) }.unwrap();
}

/// Runs one batch. Returns the results in the order of the transfers.
fn run(engine: &mut MmapBackend, transfers: &mut [Transfer]) -> Vec<i32> {
    for (name, transfer) in (0..).zip(transfers.iter_mut()) {
        let Transfer { verb, file, offset_bytes, ref mut data } = *transfer;
        let len_bytes = data.len() as u32;
        let buffers = Buffers::One { base: data.as_mut_ptr(), len_bytes };
        queue(
            engine,
            name,
            file,
            &Call { verb, flags: 0, offset_bytes, len_bytes: len_bytes.into(), buffers },
        );
    }
    engine.submit().unwrap();
    engine.begin_reap();
    let mut results: Vec<RawResult> = std::iter::from_fn(|| engine.pop()).collect();
    results.sort_by_key(|raw| raw.user_data);
    assert_eq!(results.len(), transfers.len());
    results.iter().map(|raw| raw.result).collect()
}

fn content(file: &File, offset_bytes: u64, len: u64) -> Vec<u8> {
    let mut out = vec![0; len as usize];
    file.read_exact_at(&mut out, offset_bytes).unwrap();
    out
}

fn pattern(offset_bytes: u64, len: u64) -> Vec<u8> {
    (offset_bytes..offset_bytes + len).map(byte_at).collect()
}

fn byte_at(offset_bytes: u64) -> u8 {
    (offset_bytes % 251) as u8 + 1
}

/// A xorshift generator, so that all runs use the same numbers.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn file_that_is_not_in_memory_is_refused_and_told_what_to_use() {
    // A file of procfs, because a machine may have no file on a disk.
    let elsewhere = Arc::new(File::open("/proc/version").unwrap());
    let error = attach(&mut engine(), 0, &elsewhere).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    assert!(error.to_string().starts_with("mmap is for files in memory (tmpfs, memfd) and DAX"), "{error}");
    assert!(error.to_string().ends_with("use io_uring or threads"), "{error}");
}

#[test]
fn read_ends_where_a_truncated_file_ends_to_the_byte() {
    let file = memfd(4 * PAGE);
    file.write_all_at(&pattern(0, 4 * PAGE), 0).unwrap();
    let mut engine = engine_on(&file);
    let ends = [4 * PAGE, 3 * PAGE, 2 * PAGE + 1, PAGE + 100, PAGE, 7, 0];
    let seen = ends.map(|end_bytes| {
        file.set_len(end_bytes).unwrap();
        let mut batch = [read(0, 4 * PAGE), read(0, 4)];
        let results = run(&mut engine, &mut batch);
        let whole = results[0] as usize;
        (results, batch[0].data[..whole] == pattern(0, whole as u64)[..])
    });
    assert_eq!(seen, ends.map(|end_bytes| (vec![end_bytes as i32, end_bytes.min(4) as i32], true)));
}

#[test]
fn read_ends_with_the_file_inside_a_page_that_is_still_mapped() {
    let file = memfd(2 * PAGE);
    file.write_all_at(&pattern(0, 2 * PAGE), 0).unwrap();
    let mut engine = engine_on(&file);
    run(&mut engine, &mut [read(0, 2 * PAGE)]);
    file.set_len(PAGE + 100).unwrap();
    let mut batch = [read(PAGE, 512), read(PAGE + 512, 512), read(0, 512)];
    assert_eq!(run(&mut engine, &mut batch), [100, 0, 512]);
    assert!(batch[0].data[..100] == pattern(PAGE, 100));
}

#[test]
fn asking_for_pages_that_are_gone_or_never_were_is_no_fault() {
    let file = memfd(2 * PAGE);
    let engine = engine_on(&file);
    let mapped = engine.files[0].as_ref().unwrap();
    file.set_len(0).unwrap();
    let faults = sigbus::faults();
    for verb in [Verb::Read, Verb::Write, Verb::Sync] {
        for offset_bytes in [0, PAGE, 3 * PAGE, u64::MAX] {
            for base in [std::ptr::null_mut(), 8 as *mut u8, usize::MAX as *mut u8] {
                let buffers = Buffers::One { base, len_bytes: 4096 };
                // SAFETY: 1. the call has no array, and prefetching does not access its only buffer.
                unsafe { mapped.prefetch(&Call { verb, flags: 0, offset_bytes, len_bytes: PAGE, buffers }) };
            }
        }
    }
    assert_eq!(sigbus::faults(), faults);
}

#[test]
fn write_behind_the_end_in_the_last_page_is_not_lost() {
    let file = memfd(2 * PAGE);
    let mut engine = engine_on(&file);
    run(&mut engine, &mut [read(0, PAGE)]);
    file.set_len(100).unwrap();
    let results = run(&mut engine, &mut [write(50, vec![7; 100]), write(0, vec![8; 10])]);
    assert_eq!((results, file.metadata().unwrap().len()), (vec![100, 10], 150));
    assert_eq!((content(&file, 50, 100), content(&file, 0, 10)), (vec![7; 100], vec![8; 10]));
}

#[test]
fn rest_of_the_batch_is_sound_when_one_call_meets_the_end() {
    let file = memfd(64 * PAGE);
    file.write_all_at(&pattern(0, 64 * PAGE), 0).unwrap();
    let mut engine = engine_on(&file);
    file.set_len(32 * PAGE).unwrap();
    let faults = sigbus::faults();
    let mut batch = [read(PAGE, PAGE), read(40 * PAGE, PAGE), read(2 * PAGE, PAGE), write(0, vec![9; 512])];
    let results = run(&mut engine, &mut batch);
    assert!(sigbus::faults() > faults);
    assert_eq!(results, [PAGE as i32, 0, PAGE as i32, 512]);
    assert_eq!([&batch[0].data[..], &batch[2].data[..]].concat(), pattern(PAGE, 2 * PAGE));
    assert_eq!(content(&file, 0, 513), [vec![9; 512], pattern(512, 1)].concat());
}

/// hugetlbfs has no system calls that write, so the engine repeats an untrusted write by a separate copy.
#[test]
fn copy_into_a_lost_mapping_stays_lost_when_another_one_of_its_batch_is_made_again() {
    let file = memfd(2 * PAGE);
    file.write_all_at(&[0; 2 * PAGE as usize], 0).unwrap();
    let mut mapped = MappedFile::new(&file).unwrap();
    let mut bytes = [7; 512];
    let write = |offset_bytes, base| Call {
        verb: Verb::Write,
        flags: 0,
        offset_bytes,
        len_bytes: 512,
        buffers: Buffers::One { base, len_bytes: 512 },
    };
    let (sound, lost) = (write(0, bytes.as_mut_ptr()), write(PAGE, bytes.as_mut_ptr()));
    file.set_len(PAGE).unwrap();
    // SAFETY: 1. the bytes live to the end of the test.
    let copied = [&sound, &lost].map(|call| unsafe { mapped.copy(call) });
    file.set_len(2 * PAGE).unwrap();
    mapped.judge();
    // SAFETY: as above.
    let alone = unsafe { mapped.write_alone(&sound) };
    assert_eq!((copied, alone), ([Some(512); 2], 512));
    assert_eq!((content(&file, PAGE, 1), mapped.trusts(&lost)), (vec![0], false));
}

#[test]
fn file_that_grew_is_copied_from_and_to_again() {
    let file = memfd(PAGE);
    let mut engine = engine_on(&file);
    file.set_len(8 * PAGE).unwrap();
    let first = run(&mut engine, &mut [write(6 * PAGE, pattern(0, PAGE))]);
    let mapped = engine.files[0].as_ref().unwrap().mapped_bytes();
    let mut again = [read(6 * PAGE, PAGE)];
    let second = run(&mut engine, &mut again);
    assert_eq!((first, second, mapped), (vec![PAGE as i32], vec![PAGE as i32], 8 * PAGE));
    assert!(again[0].data == pattern(0, PAGE));
}

#[test]
fn file_that_was_empty_when_it_came_is_used_when_it_has_grown() {
    let file = memfd(0);
    let mut engine = engine_on(&file);
    let empty = run(&mut engine, &mut [read(0, PAGE)]);
    file.set_len(PAGE).unwrap();
    let grown = run(&mut engine, &mut [write(0, vec![5; 512]), read(512, 512)]);
    assert_eq!((empty, grown), (vec![0], vec![512, 512]));
    assert_eq!(content(&file, 0, 512), vec![5; 512]);
}

#[test]
fn two_files_in_one_batch_keep_apart_and_one_may_be_truncated() {
    let files = [memfd(4 * PAGE), memfd(4 * PAGE)];
    files[1].write_all_at(&pattern(0, 4 * PAGE), 0).unwrap();
    let mut engine = engine_on(&files[0]);
    attach(&mut engine, 1, &files[1]).unwrap();
    files[0].set_len(PAGE).unwrap();
    let of_second = Transfer { file: 1, ..read(3 * PAGE, PAGE) };
    let mut batch = [read(3 * PAGE, PAGE), of_second, write(0, vec![1; 16])];
    let results = run(&mut engine, &mut batch);
    assert_eq!(results, [0, PAGE as i32, 16]);
    assert!(batch[1].data == pattern(3 * PAGE, PAGE));
    assert_eq!(content(&files[0], 0, 16), [1; 16]);
    assert_eq!(content(&files[1], 0, 16), pattern(0, 16));
}

#[test]
fn file_open_for_reading_is_read_and_not_written() {
    let file = memfd(PAGE);
    file.write_all_at(&pattern(0, PAGE), 0).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file.as_fd()));
    let mut engine = engine_on(&Arc::new(File::open(path).unwrap()));
    let mut batch = [write(0, vec![9; 512]), read(0, PAGE)];
    assert_eq!(run(&mut engine, &mut batch), [-libc::EBADF, PAGE as i32]);
    assert!(batch[1].data == pattern(0, PAGE));
}

#[test]
fn long_transfer_stops_where_one_call_may() {
    let file = memfd(1 << 20);
    let mut engine = engine_on(&file);
    let most = copy::MAX_COPY_BYTES as i32;
    assert_eq!(run(&mut engine, &mut [write(0, vec![3; 1 << 20]), read(0, 1 << 20)]), [most, most]);
    assert_eq!(content(&file, 0, 1 << 20), [vec![3; 512 << 10], vec![0; 512 << 10]].concat());
}

#[test]
fn long_hole_is_punched_by_the_pool_and_wakes_the_worker() {
    let file = memfd(4 << 20);
    file.write_all_at(&[1; 4 << 20], 0).unwrap();
    let mut engine = engine_on(&file);
    let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let punch =
        Call { verb: Verb::Allocate, flags, offset_bytes: 0, len_bytes: 2 << 20, buffers: Buffers::None };
    queue(&mut engine, 5, 0, &punch);
    let mut results = Vec::new();
    while results.is_empty() {
        engine.wait(None).unwrap();
        engine.begin_reap();
        results.extend(std::iter::from_fn(|| engine.pop()));
    }
    assert_eq!((results[0].user_data, results[0].result, engine.jobs_in_pool), (5, 0, 0));
    assert_eq!(content(&file, (2 << 20) - 1, 2), [0, 1]);
}

#[test]
fn call_that_was_not_submitted_is_cancelled_and_does_nothing() {
    let file = memfd(PAGE);
    let mut engine = engine_on(&file);
    let mut data = [7; 16];
    let buffers = Buffers::One { base: data.as_mut_ptr(), len_bytes: 16 };
    queue(&mut engine, 3, 0, &Call { verb: Verb::Write, flags: 0, offset_bytes: 0, len_bytes: 16, buffers });
    engine.cancel(3);
    engine.submit().unwrap();
    engine.begin_reap();
    assert_eq!(engine.pop().map(|raw| (raw.user_data, raw.result)), Some((3, -libc::ECANCELED)));
    assert_eq!((engine.pop().is_none(), content(&file, 0, 16)), (true, vec![0; 16]));
}

#[test]
fn detached_file_is_unmapped() {
    let file = memfd(PAGE);
    let mut engine = engine();
    let target = attach(&mut engine, 0, &file).unwrap();
    engine.unregister_file(0, target);
    assert_eq!(Arc::strong_count(&file), 1);
}

fn allocated_bytes(file: &File) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512
}

/// Whether a copy would serve the chunk.
fn is_copied(engine: &MmapBackend, chunk: u64) -> bool {
    engine.files[0].as_ref().unwrap().has_chunk(chunk)
}

#[test]
fn reading_a_hole_fills_nothing_and_what_was_written_is_copied() {
    let file = memfd(16 * CHUNK_BYTES);
    let mut engine = engine_on(&file);
    // Mapping the file has allocated its last chunk.
    assert_eq!(allocated_bytes(&file), CHUNK_BYTES);
    let mut batch: Vec<_> = (0..16).map(|chunk| read(chunk * CHUNK_BYTES + PAGE, 512)).collect();
    assert_eq!(run(&mut engine, &mut batch), [512; 16]);
    assert!(batch.iter().all(|read| read.data == [0; 512]));
    assert_eq!(allocated_bytes(&file), CHUNK_BYTES);

    // The first write fills a part of a chunk, the second one fills the rest of it.
    let half = CHUNK_BYTES / 2;
    let copied = [0, half].map(|offset_bytes| {
        run(&mut engine, &mut [write(CHUNK_BYTES + offset_bytes, vec![7; half as usize])]);
        let mut read = [read(2 * CHUNK_BYTES - 512, 512)];
        run(&mut engine, &mut read);
        (is_copied(&engine, 1), read[0].data[0])
    });
    assert_eq!((copied, is_copied(&engine, 2)), ([(false, 0), (true, 7)], false));
    assert_eq!(allocated_bytes(&file), 2 * CHUNK_BYTES);
}

#[test]
fn hole_that_one_worker_punches_is_not_filled_by_the_reads_of_another() {
    let file = memfd(4 * CHUNK_BYTES);
    file.write_all_at(&vec![7; 4 * CHUNK_BYTES as usize], 0).unwrap();
    let (mut one, mut other) = (engine_on(&file), engine_on(&file));
    let reads = || [read(CHUNK_BYTES, 512), read(2 * CHUNK_BYTES, 512)];
    run(&mut other, &mut reads());
    assert!(is_copied(&other, 1) && is_copied(&one, 1));
    let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (offset_bytes, len_bytes) = (CHUNK_BYTES, CHUNK_BYTES);
    let punch = Call { verb: Verb::Allocate, flags, offset_bytes, len_bytes, buffers: Buffers::None };
    queue(&mut one, 0, 0, &punch);
    one.submit().unwrap();
    let mut after = reads();
    run(&mut other, &mut after);
    assert_eq!((after[0].data[0], after[1].data[0], allocated_bytes(&file)), (0, 7, 3 * CHUNK_BYTES));
}

/// No mapping replaces the old one, so the batch's copies came from a mapping that no longer exists.
#[test]
fn write_to_a_file_that_became_empty_extends_it_and_a_read_ends() {
    let full = || {
        let file = memfd(4 * PAGE);
        file.write_all_at(&pattern(0, 4 * PAGE), 0).unwrap();
        let engine = engine_on(&file);
        file.set_len(0).unwrap();
        (file, engine)
    };
    let (file, mut engine) = full();
    assert_eq!(run(&mut engine, &mut [write(0, vec![7; 512])]), [512]);
    assert_eq!((file.metadata().unwrap().len(), content(&file, 0, 512)), (512, vec![7; 512]));
    let (_file, mut engine) = full();
    assert_eq!(run(&mut engine, &mut [read(0, 512)]), [0]);
}

#[test]
fn file_truncated_inside_its_last_page_ends_there() {
    let file = memfd(4 * CHUNK_BYTES);
    file.write_all_at(&pattern(0, 4 * CHUNK_BYTES), 0).unwrap();
    let mut engine = engine_on(&file);
    let last = 4 * CHUNK_BYTES - PAGE;
    assert_eq!(run(&mut engine, &mut [read(last, PAGE)]), [PAGE as i32]);
    assert!(is_copied(&engine, 3));
    file.set_len(last + 100).unwrap();
    let mut batch = [read(last, 512), read(0, PAGE)];
    assert_eq!(run(&mut engine, &mut batch), [100, PAGE as i32]);
    assert!(batch[0].data[..100] == pattern(last, 100) && batch[1].data == pattern(0, PAGE));
}

/// The test never truncates the file below this length.
const KEPT_BYTES: u64 = 64 * PAGE;
const FULL_BYTES: u64 = 128 * PAGE;
/// The test never writes below this offset.
const WRITTEN_FROM: u64 = 56 * PAGE;

/// Repeats until told to stop: truncates the file, to a whole page or not, extends it again, and fills it.
fn truncate_at_random(file: &File, stop: &AtomicBool) {
    let mut state = 0x2545_f491_4f6c_dd1d;
    while !stop.load(Ordering::Relaxed) {
        let choice = random(&mut state);
        let end_bytes = KEPT_BYTES + choice % (FULL_BYTES - KEPT_BYTES);
        let to_the_page = choice & (1 << 40) != 0;
        file.set_len(if to_the_page { end_bytes & !(PAGE - 1) } else { end_bytes }).unwrap();
        std::thread::yield_now();
        file.set_len(FULL_BYTES).unwrap();
        std::thread::yield_now();
        // A copy reaches only pages that are present.
        file.write_all_at(&pattern(KEPT_BYTES, FULL_BYTES - KEPT_BYTES), KEPT_BYTES).unwrap();
    }
}

/// Reads and writes across the whole file in one batch. Checks that each result is one of the possible contents.
fn checked_batch(engine: &mut MmapBackend, file: &File, round: u64, state: &mut u64) {
    let mut batch: Vec<Transfer> = (0..16).map(|_| read(random(state) % (FULL_BYTES - PAGE), PAGE)).collect();
    // Each batch writes each of the last eight kept pages once.
    batch.extend((56..64).map(|page| write(page * PAGE + round % 100, vec![round as u8; 512])));
    let beyond = (0..8).map(|_| write(KEPT_BYTES + random(state) % (64 * PAGE - 512), vec![0xff; 512]));
    batch.extend(beyond);
    let results = run(engine, &mut batch);
    for (transfer, &result) in batch.iter().zip(&results).filter(|(transfer, _)| transfer.verb == Verb::Read)
    {
        check_read(transfer, result);
    }
    for (transfer, &result) in batch.iter().zip(&results).skip(16).take(8) {
        assert_eq!(result, 512);
        assert!(
            content(file, transfer.offset_bytes, 512) == transfer.data,
            "lost at {}",
            transfer.offset_bytes
        );
    }
    assert!(results.iter().all(|&result| result >= 0), "{results:?}");
}

fn check_read(transfer: &Transfer, result: i32) {
    let (start, data) = (transfer.offset_bytes, &transfer.data[..result as usize]);
    let right = (start..).zip(data).all(|(at, &byte)| match at {
        0..WRITTEN_FROM => byte == byte_at(at),
        KEPT_BYTES.. => [0, 0xff, byte_at(at)].contains(&byte),
        _ => true,
    });
    assert!(right, "wrong data at {start}");
    let end = start + result as u64;
    assert!(end == start + PAGE || end >= KEPT_BYTES, "ended at {end}, in the part that is never truncated");
}

#[test]
fn stream_survives_truncations_at_any_moment_and_what_is_kept_stays_right() {
    let file = memfd(FULL_BYTES);
    file.write_all_at(&pattern(0, FULL_BYTES), 0).unwrap();
    let mut engine = engine_on(&file);
    let (stop, faults) = (AtomicBool::new(false), sigbus::faults());
    let rounds = unless_emulated(4000, 200);
    std::thread::scope(|scope| {
        scope.spawn(|| truncate_at_random(&file, &stop));
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut state = 0x9e37_79b9_7f4a_7c15;
            (0..rounds).for_each(|round| checked_batch(&mut engine, &file, round, &mut state));
        }));
        stop.store(true, Ordering::Relaxed);
        assert!(outcome.is_ok(), "see above");
    });
    println!("{} faults survived", sigbus::faults() - faults);
    assert!(sigbus::faults() > faults, "nothing was truncated under a copy");
}

/// A separate tmpfs, unmounted when this value is dropped.
struct SmallTmpfs(tempfile::TempDir);

impl SmallTmpfs {
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(folder.path());
        let mounted = command.output().is_ok_and(|output| output.status.success());
        if !mounted {
            skip(Reason::NoTmpfs, "");
        }
        mounted.then_some(Self(folder))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

#[test]
fn full_tmpfs_fails_the_writes_that_need_a_page_and_no_others() {
    let Some(tmpfs) = SmallTmpfs::mount() else { return };
    let path = tmpfs.path().join("disk.raw");
    let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(4 << 20).unwrap();
    let file = Arc::new(file);
    let mut engine = engine_on(&file);
    let mut results = Vec::new();
    for first in (0..512).step_by(DEPTH as usize) {
        let mut batch: Vec<Transfer> = (first..first + u64::from(DEPTH))
            .map(|page| write(page * PAGE, vec![page as u8; PAGE as usize]))
            .collect();
        results.append(&mut run(&mut engine, &mut batch));
    }
    let stored = results.iter().take_while(|&&result| result == PAGE as i32).count();
    let no_space = -Errno::NOSPC.raw_os_error();
    assert!((200..=256).contains(&stored), "{stored} pages stored");
    assert!(results[stored..].iter().all(|&result| result == no_space), "{results:?}");
    let right = |page: u64| content(&file, page * PAGE, PAGE) == vec![page as u8; PAGE as usize];
    assert!((0..stored as u64).all(right));
    // Existing pages can be written and read, holes can be read, and freed memory can be allocated again.
    let mut batch = [write(0, vec![1; 512]), read(3 << 20, PAGE), read(PAGE, PAGE)];
    assert_eq!(run(&mut engine, &mut batch), [512, PAGE as i32, PAGE as i32]);
    assert_eq!((&batch[1].data[..], batch[2].data[0]), (&[0; PAGE as usize][..], 1));
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 0, 16 * PAGE).unwrap();
    assert_eq!(run(&mut engine, &mut [write(3 << 20, vec![2; PAGE as usize])]), [PAGE as i32]);
    assert_eq!(content(&file, 3 << 20, 1), [2]);
}

#[test]
fn file_in_huge_pages_is_written_and_fails_when_there_are_no_more() {
    const HUGE: u64 = 2 << 20;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let Ok(fd) = memfd_create("test", flags) else {
        return skip(Reason::NoHugePages, "");
    };
    let file = Arc::new(File::from(fd));
    file.set_len(HUGE).unwrap();
    let mut engine = engine_on(&file);
    let first = run(&mut engine, &mut [write(5, vec![7; 512])]);
    if first == [-libc::ENOSPC] {
        return skip(Reason::NoFreeHugePage, "");
    }
    let mut batch = [read(4, 2)];
    assert_eq!(
        (first, run(&mut engine, &mut batch), batch[0].data.clone()),
        (vec![512], vec![2], vec![0, 7])
    );
    file.set_len(4096 * HUGE).unwrap();
    assert_eq!(run(&mut engine, &mut [write(HUGE, vec![8; 512])]), [512]);
    file.set_len(HUGE).unwrap();
    let mut batch = [write(2 * HUGE, vec![9; 512]), write(0, vec![1; 512]), read(HUGE, 512)];
    assert_eq!(run(&mut engine, &mut batch), [-libc::EINVAL, 512, 0]);
}
