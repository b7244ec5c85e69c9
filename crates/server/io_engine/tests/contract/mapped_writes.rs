//! Written qcow2 disks: workers write into the same clusters beside discards, and what they read, what QEMU reads and what
//! `qemu-img check` says are compared with a model; errors, and threads that end.
//!
//! See also: the cases of the contract (`main.rs`), reading (`mapped.rs`), the images (`beds/mapped.rs`).

use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use disk_image::{CacheMode, Image};
use guest_mem::{GuestRange, IoVecs, MemoryView};
use io_engine::{
    Completion, Durability, Engine, EngineKind, Event, FileId, FileSpec, MappedEngine, Op, OpError, OpKind,
    Unmap, WatchToken, make,
};
use rustix::io::Errno;
use xtask::skip::{Reason, skip};

use crate::bed::{Bed, PATIENCE, Storage, config, is_zero, memory, pattern, start};
use crate::beds::{Images, mapped};

const BLOCK: u64 = 4096;
/// Memory of one op, and its longest range.
const SLOT_BYTES: u64 = 256 << 10;
/// Ops in flight of a worker.
const SLOTS: u64 = 12;
const CLOSE: Duration = PATIENCE;
/// An answer takes milliseconds.
const LONGEST_SLEEP: Duration = Duration::from_secs(20);

struct Rng(u64);

impl Rng {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

#[derive(Clone)]
struct Job {
    kind: OpKind,
    offset: u64,
    len: u64,
    data: Vec<u8>,
    pieces: Vec<(u64, u64)>,
}

/// A worker with an engine of its own. It owns every second block of most runs of 64 KiB, and all of some runs; no other
/// worker touches those.
struct Worker {
    number: u64,
    engine: Box<dyn Engine>,
    file: FileId,
    image: Arc<Image>,
    view: MemoryView,
    /// What its blocks hold. Other blocks are not kept up to date.
    model: Vec<u8>,
    busy: Vec<Option<Job>>,
    rng: Rng,
}

const RUN: u64 = 64 << 10;
const WORKERS: u64 = 2;

impl Worker {
    fn new(number: u64, kind: EngineKind, image: &Arc<Image>, content: &[u8]) -> Self {
        let (mut engine, _) = mapped(kind);
        engine.start().unwrap();
        let file = engine.attach_file(FileSpec::of(image)).unwrap();
        let busy = (0..SLOTS).map(|_| None).collect();
        let (image, rng) = (Arc::clone(image), Rng(0x1234_5678_9abc ^ (number + 1) << 40));
        Self { number, engine, file, image, view: memory(), model: content.to_vec(), busy, rng }
    }

    /// The worker that owns all of the run at this offset; `None`: each owns some of its blocks.
    fn owner_of_run(offset: u64) -> Option<u64> {
        let run = offset / RUN;
        (run % 3 == 2).then_some(run / 3 % WORKERS)
    }

    fn owns(&self, block_offset: u64) -> bool {
        Self::owner_of_run(block_offset).unwrap_or(block_offset / BLOCK % WORKERS) == self.number
    }

    /// A range of own blocks with no op in flight.
    fn range(&mut self) -> Option<(u64, u64)> {
        let size = self.model.len() as u64;
        let offset = self.rng.below(size / BLOCK) * BLOCK;
        let most = [1, 3, 16, 64][self.rng.below(4) as usize];
        let is_free = |at: &u64| {
            let inside = |job: &Job| job.offset < at + BLOCK && *at < job.offset + job.len;
            *at < size && self.owns(*at) && !self.busy.iter().flatten().any(inside)
        };
        let len = (0..most).map(|block| offset + block * BLOCK).take_while(is_free).count() as u64 * BLOCK;
        (len > 0).then_some((offset, len))
    }

    fn push(&mut self, slot: u64) {
        let Some((offset, len)) = self.range() else { return };
        let range = self.image.check(offset / 512, len).unwrap();
        let durability = if self.rng.below(8) == 0 { Durability::Durable } else { Durability::Cached };
        let unmap = [Unmap::Allowed, Unmap::Forbidden][self.rng.below(2) as usize];
        let kind = match self.rng.below(20) {
            0 => OpKind::WriteZeroes { range, unmap, durability },
            1 | 2 => OpKind::Discard { range, durability },
            3..10 => OpKind::Read { range },
            _ => OpKind::Write { range, durability },
        };
        self.push_kind(slot, kind, offset, len);
    }

    fn push_kind(&mut self, slot: u64, kind: OpKind, offset: u64, len: u64) {
        let seed = self.rng.below(1 << 40);
        let data =
            if matches!(kind, OpKind::Write { .. }) { pattern(seed, len as usize) } else { Vec::new() };
        let mut pieces = Vec::new();
        if kind.moves_data() {
            // Some are shorter than a sector, so that a block has more pieces than a part of an op.
            let most = [len, 4096, 700, 33][self.rng.below(4) as usize];
            let mut left = len;
            while left > 0 {
                let piece = (1 + self.rng.below(most)).max(len / 500).min(left);
                left -= piece;
                pieces.push((slot * SLOT_BYTES + left, piece));
            }
        }
        self.store(&pieces, &data);
        let mut buffers = IoVecs::with_capacity(pieces.len());
        let ranges = pieces.iter().map(|&(addr, len)| GuestRange { addr, len_bytes: len as u32 });
        buffers.fill(&self.view, ranges).unwrap();
        self.engine.push(Op { token: slot, file: self.file, kind, buffers }).unwrap();
        self.busy[slot as usize] = Some(Job { kind, offset, len, data, pieces });
    }

    fn store(&self, pieces: &[(u64, u64)], data: &[u8]) {
        let mut rest = data;
        for &(at, len) in pieces {
            let count = rest.len().min(len as usize);
            self.view.store(at, &rest[..count]).unwrap();
            rest = &rest[count..];
        }
    }

    fn load(&self, job: &Job) -> Vec<u8> {
        let mut loaded = vec![0; job.len as usize];
        let mut rest = loaded.as_mut_slice();
        for &(at, len) in &job.pieces {
            let (piece, after) = rest.split_at_mut(len as usize);
            self.view.read(at, piece).unwrap();
            rest = after;
        }
        loaded
    }

    fn completions(&mut self) -> Vec<Completion> {
        self.engine.submit().unwrap();
        let mut events = Vec::new();
        self.engine.reap(&mut events);
        let completion = |event| match event {
            Event::Completed(completion) => completion,
            other => panic!("{other:?}"),
        };
        events.into_iter().map(completion).collect()
    }

    fn wait(&mut self) -> Vec<Completion> {
        let start = Instant::now();
        loop {
            let done = self.completions();
            if !done.is_empty() {
                return done;
            }
            assert!(start.elapsed() < PATIENCE, "nothing completes");
            self.engine.wait(Some(PATIENCE)).unwrap();
        }
    }

    /// Compares what was read, or notes what was written.
    fn ended(&mut self, completion: &Completion) {
        let job = self.busy[completion.token as usize].take().expect("an op completes once");
        assert_eq!(completion.result, Ok(()), "{:?}", job.kind);
        self.note(&job);
    }

    fn note(&mut self, job: &Job) {
        let span = job.offset as usize..(job.offset + job.len) as usize;
        match job.kind {
            OpKind::Read { .. } => {
                let (loaded, wanted) = (self.load(job), &self.model[span]);
                let differs = loaded.iter().zip(wanted).position(|(loaded, wanted)| loaded != wanted);
                assert_eq!(differs, None, "worker {} at {} + {}", self.number, job.offset, job.len);
            }
            OpKind::Write { .. } => self.model[span].copy_from_slice(&job.data),
            OpKind::WriteZeroes { .. } => self.model[span].fill(0),
            OpKind::Discard { .. } => self.discarded(span.start as u64, span.end as u64),
            OpKind::Flush => {}
        }
    }

    /// Only whole clusters become zeroes.
    fn discarded(&mut self, start: u64, end: u64) {
        let Some((_, cluster)) = self.image.backing().volume().unwrap().compression(0) else { return };
        let size = self.model.len() as u64;
        let end = if end == size { end } else { end - end % cluster };
        let start = start.next_multiple_of(cluster);
        if start < end && self.image.backing().volume().unwrap().can_zero(true) {
            self.model[start as usize..end as usize].fill(0);
        }
    }

    fn run(&mut self, ops: u64) {
        let mut left = ops;
        while left > 0 || self.busy.iter().any(Option::is_some) {
            while let Some(slot) = self.busy.iter().position(Option::is_none).filter(|_| left > 0) {
                left -= 1;
                if left % 100 == 7 {
                    self.push_kind(slot as u64, OpKind::Flush, 0, 0);
                } else {
                    self.push(slot as u64);
                }
            }
            if self.busy.iter().any(Option::is_some) {
                self.wait().iter().for_each(|completion| self.ended(completion));
            }
        }
        assert_eq!(self.engine.in_flight(), 0);
    }
}

/// Workers write at random; afterwards QEMU reads what the models say, and finds no fault.
fn random_writes(images: &Images, name: &str, cache: CacheMode, table_cache_bytes: u64, ops: u64) {
    let mut content = images.content(name);
    let (image, metadata) = images.open_writable(name, cache, table_cache_bytes);
    let image = Arc::new(image);
    let workers: Vec<Worker> = std::thread::scope(|scope| {
        let started: Vec<_> = (0..WORKERS)
            .zip([EngineKind::IoUring, EngineKind::Threads])
            .map(|(number, kind)| {
                let (image, content) = (&image, &content);
                scope.spawn(move || {
                    let mut worker = Worker::new(number, kind, image, content);
                    worker.run(ops);
                    worker
                })
            })
            .collect();
        started.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    for offset in (0..content.len() as u64).step_by(BLOCK as usize) {
        let span = offset as usize..content.len().min((offset + BLOCK) as usize);
        let owner = workers.iter().find(|worker| worker.owns(offset)).expect("each block has an owner");
        content[span.clone()].copy_from_slice(&owner.model[span]);
    }
    drop(workers);
    metadata.close(CLOSE).unwrap();
    drop(image);
    images.assert_consistent(name);
    let stored = images.content(name);
    let differs = stored.chunks(4096).zip(content.chunks(4096)).position(|(stored, wanted)| stored != wanted);
    assert_eq!((stored.len(), differs), (content.len(), None), "{name}: QEMU reads something else");
}

fn create(images: &Images, name: &str, options: &str, below: Option<(&str, &str)>, size: u64) {
    let size = size.to_string();
    let mut words = vec!["create", "-q", "-f", "qcow2", "-o", options];
    if let Some((below, format)) = below {
        words.extend(["-b", below, "-F", format]);
    }
    words.extend([name, &size]);
    images.img(&words);
}

#[test]
fn workers_write_into_the_same_clusters_beside_discards() {
    let Some(images) = Images::new() else { return };
    for (name, options, cache) in [
        ("large", "cluster_size=64k", CacheMode::Writeback),
        ("direct", "cluster_size=64k", CacheMode::None),
        ("small", "cluster_size=4k", CacheMode::Writeback),
        ("version-2", "cluster_size=16k,compat=0.10", CacheMode::Writeback),
        ("preallocated", "cluster_size=64k,preallocation=metadata", CacheMode::Writeback),
    ] {
        create(&images, name, options, None, 6 << 20);
        random_writes(&images, name, cache, 8 << 20, 3000);
    }
}

#[test]
fn workers_write_over_a_backing_file_in_both_versions() {
    let Some(images) = Images::new() else { return };
    std::fs::write(images.path("base"), pattern(3, 4 << 20)).unwrap();
    for (name, options) in [("three", "cluster_size=64k"), ("two", "cluster_size=64k,compat=0.10")] {
        create(&images, name, options, Some(("base", "raw")), 6 << 20);
        random_writes(&images, name, CacheMode::Writeback, 8 << 20, 1500);
    }
    assert!(
        std::fs::read(images.path("base")).unwrap() == pattern(3, 4 << 20),
        "a backing file is never written"
    );
}

#[test]
fn clusters_are_copied_from_compressed_layers_and_shared_with_snapshots() {
    let Some(images) = Images::new() else { return };
    std::fs::write(images.path("plain"), pattern(4, 4 << 20)).unwrap();
    images.img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "plain", "packed"]);
    create(&images, "middle", "cluster_size=4k", Some(("packed", "qcow2")), 5 << 20);
    images.io("middle", &["write -P 9 1M 300k".into()]);
    create(&images, "top", "cluster_size=64k", Some(("middle", "qcow2")), 6 << 20);
    random_writes(&images, "top", CacheMode::Writeback, 8 << 20, 1000);
    // Compressed clusters in the image itself, and an internal snapshot that keeps its content.
    let before = images.content("packed");
    images.img(&["snapshot", "-c", "first", "packed"]);
    random_writes(&images, "packed", CacheMode::Writeback, 8 << 20, 1000);
    images.img(&["snapshot", "-a", "first", "packed"]);
    assert!(images.content("packed") == before);
}

#[test]
fn slices_that_do_not_all_fit_are_read_again() {
    let Some(images) = Images::new() else { return };
    // 24 slices in a cache for 16.
    create(&images, "a", "cluster_size=4k", None, 48 << 20);
    random_writes(&images, "a", CacheMode::Writeback, 1, 3000);
}

fn bed_on(images: Images, name: &str) -> Bed {
    let (image, metadata) = images.open_writable(name, CacheMode::Writeback, 1 << 20);
    let storage = Storage::Writable { _metadata: metadata, _folder: images.folder };
    start(mapped(EngineKind::IoUring), Arc::new(image), storage, None)
}

#[test]
fn write_of_one_extent_is_one_call_once_its_cluster_is_there() {
    let Some(images) = Images::new() else { return };
    create(&images, "a", "cluster_size=64k", None, 4 << 20);
    let mut bed = bed_on(images, "a");
    bed.write(0, &pattern(1, 4096));
    let before = bed.recorder.records().len();
    bed.write(8192, &pattern(2, 16384));
    assert_eq!(bed.recorder.records().len() - before, 1);
    assert!(is_zero(&bed.read(4096, 4096)), "the rest of a new cluster");
    assert_eq!(bed.read(8192, 16384), pattern(2, 16384));
}

/// A disk whose changes nobody makes: its metadata thread is started by the case.
fn unanswered(images: &Images) -> Bed {
    create(images, "a", "cluster_size=64k", None, 16 << 20);
    let image = images.open_to_write("a", CacheMode::Writeback, 1 << 20);
    let config = io_engine::EngineConfig { depth: 128, ..config() };
    let engine = MappedEngine::new(make(EngineKind::IoUring, &config).unwrap(), 128);
    start((Box::new(engine), config), Arc::new(image), Storage::None, None)
}

fn push_writes(bed: &mut Bed, tokens: std::ops::Range<u64>) {
    for token in tokens {
        let at = token * 65536;
        bed.store(at, &pattern(token, 4096));
        let range = bed.range(at, 4096);
        bed.push(token, OpKind::Write { range, durability: Durability::Cached }, &[(at, 4096)]);
    }
}

#[test]
fn cancelled_writes_do_not_wait_for_a_thread_that_does_not_answer_and_late_answers_reach_no_other_op() {
    let Some(images) = Images::new() else { return };
    let mut bed = unanswered(&images);
    // More than the queue of changes holds.
    push_writes(&mut bed, 0..100);
    bed.engine.submit().unwrap();
    bed.engine.cancel_all();
    let done = bed.finish(100);
    assert!(done.iter().all(|done| done.result == Err(OpError::Cancelled)), "{done:?}");
    // The slots have new ops when the old answers come.
    push_writes(&mut bed, 0..100);
    let metadata = bed.image.backing().start_metadata_thread(|| true).unwrap().unwrap();
    let done = bed.finish(100);
    assert!(done.iter().all(|done| done.result == Ok(())), "{done:?}");
    for token in 0..100 {
        assert_eq!(bed.read(token * 65536, 4096), pattern(token, 4096), "op {token}");
    }
    assert!(bed.image.backing().start_metadata_thread(|| true).unwrap().is_none(), "one thread is enough");
    drop(bed);
    metadata.close(CLOSE).unwrap();
    images.assert_consistent("a");
}

#[test]
fn engine_that_is_dropped_while_changes_are_in_flight_leaves_a_good_image() {
    let Some(images) = Images::new() else { return };
    let mut bed = unanswered(&images);
    push_writes(&mut bed, 0..100);
    bed.engine.submit().unwrap();
    let memory = Arc::clone(bed.view.memory());
    let metadata = bed.image.backing().start_metadata_thread(|| true).unwrap().unwrap();
    drop(bed);
    assert_eq!(Arc::strong_count(&memory), 1);
    metadata.close(CLOSE).unwrap();
    images.assert_consistent("a");
}

/// A worker sleeps in one engine, and watches the descriptors of the others.
#[test]
fn answers_end_the_sleep_of_a_worker_in_another_engine() {
    let Some(images) = Images::new() else { return };
    create(&images, "a", "cluster_size=4k", None, 16 << 20);
    let (image, metadata) = images.open_writable("a", CacheMode::Writeback, 1 << 20);
    for kind in [EngineKind::IoUring, EngineKind::Threads] {
        let config = config();
        let mut base = make(EngineKind::IoUring, &config).unwrap();
        base.start().unwrap();
        let inner = make(kind, &config).unwrap();
        let mut engine = MappedEngine::new(inner, config.depth);
        engine.start().unwrap();
        let file = engine.attach_file(FileSpec::of(&image)).unwrap();
        let descriptor = Arc::new(engine.descriptor().unwrap());
        base.watch_own(descriptor, WatchToken(7)).unwrap();
        let (mut events, mut completed) = (Vec::new(), 0);
        for number in 0..200_u64 {
            let range = image.check(number * 2 % 4096 * 8, 4096).unwrap();
            let kind = OpKind::WriteZeroes { range, unmap: Unmap::Allowed, durability: Durability::Durable };
            engine.push(Op { token: number, file, kind, buffers: IoVecs::with_capacity(0) }).unwrap();
            while completed <= number {
                if engine.arm().unwrap() {
                    base.wait(Some(LONGEST_SLEEP)).unwrap();
                    base.reap(&mut events);
                    assert!(!events.is_empty(), "nothing has ended the sleep: op {number}");
                }
                engine.disarm().unwrap();
                events.clear();
                engine.reap(&mut events);
                let is_done = |event: &&Event| matches!(event, Event::Completed(_));
                completed += events.iter().filter(is_done).count() as u64;
                events.clear();
            }
        }
        engine.detach_file(file);
    }
    drop(image);
    metadata.close(CLOSE).unwrap();
}

#[test]
fn ops_fail_when_the_metadata_thread_ends_and_those_in_place_go_on() {
    let Some(images) = Images::new() else { return };
    let mut bed = unanswered(&images);
    push_writes(&mut bed, 0..100);
    bed.engine.submit().unwrap();
    let refused = bed.image.backing().start_metadata_thread(|| false).unwrap().unwrap();
    let done = bed.finish(100);
    let failed = Err(OpError::Errno(Errno::IO));
    assert!(done.iter().all(|done| done.result == failed), "{done:?}");
    assert!(refused.close(CLOSE).is_err());
    drop(bed);
    let mut bed = bed_on(images, "a");
    bed.write(0, &pattern(1, 4096));
    // All slices are in memory, so only a new cluster needs the thread.
    bed.image.backing().volume().unwrap().join(crate::bed::kick_fd()).unwrap();
    let range = bed.range(0, 4096);
    let kind = OpKind::Write { range, durability: Durability::Durable };
    assert_eq!(bed.run(kind, &[(0, 4096)]).result, Ok(()));
}

#[test]
fn discarded_space_is_used_again() {
    let Some(images) = Images::new() else { return };
    create(&images, "a", "cluster_size=64k", None, 16 << 20);
    let path = images.path("a");
    let mut bed = bed_on(images, "a");
    for turn in 0..24 {
        bed.write(0, &pattern(turn, 8 << 20));
        let range = bed.range(0, 8 << 20);
        let discard = OpKind::Discard { range, durability: Durability::Durable };
        assert_eq!(bed.run(discard, &[]).result, Ok(()));
        assert!(is_zero(&bed.read(0, 8 << 20)));
        // The thread releases the clusters when no op is in flight any more.
        let start = Instant::now();
        while std::fs::metadata(&path).unwrap().blocks() * 512 > 2 << 20 {
            assert!(start.elapsed() < PATIENCE, "the space of discarded data is not given back");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    // The data, the reserve, and some slack.
    let length = std::fs::metadata(&path).unwrap().len();
    assert!(length < 96 << 20, "{length} bytes for 8 MiB of data that were written again and again");
}

/// A separate tmpfs, unmounted when this value is dropped.
struct SmallTmpfs(tempfile::TempDir);

impl SmallTmpfs {
    fn mount(size: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", size, "tmpfs"]).arg(folder.path());
        let is_mounted = command.output().is_ok_and(|output| output.status.success());
        if !is_mounted {
            skip(Reason::NoTmpfs, "");
        }
        is_mounted.then_some(Self(folder))
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn full_file_system_fails_writes_with_enospc_and_they_succeed_when_there_is_room_again() {
    let Some(mut images) = Images::new() else { return };
    let Some(tmpfs) = SmallTmpfs::mount("size=8m") else { return };
    let folder = tempfile::tempdir_in(tmpfs.0.path()).unwrap();
    let ballast = folder.path().join("ballast");
    images.folder = folder;
    create(&images, "a", "cluster_size=64k", None, 16 << 20);
    std::fs::write(&ballast, vec![1; 4 << 20]).unwrap();
    let (image, metadata) = images.open_writable("a", CacheMode::Writeback, 1 << 20);
    let mut bed = start(mapped(EngineKind::IoUring), Arc::new(image), Storage::None, None);
    let mut failed = Vec::new();
    for token in 0..150_u64 {
        let at = token * 65536;
        bed.store(0, &pattern(token, 65536));
        let range = bed.range(at, 65536);
        let completion = bed.run(OpKind::Write { range, durability: Durability::Cached }, &[(0, 65536)]);
        match completion.result {
            Ok(()) => assert!(failed.is_empty(), "later writes need space, too: {failed:?}"),
            Err(error) => {
                assert_eq!(error, OpError::Errno(Errno::NOSPC));
                assert!(!completion.sync_failed);
                failed.push(token);
            }
        }
        if failed.len() == 3 {
            break;
        }
    }
    assert_eq!(failed.len(), 3, "8 MiB hold no 9 MiB");
    for token in 0..failed[0] {
        assert!(bed.read(token * 65536, 65536) == pattern(token, 65536), "{token}");
    }
    std::fs::remove_file(ballast).unwrap();
    for &token in &failed {
        bed.write(token * 65536, &pattern(token, 65536));
    }
    for token in 0..=failed[2] {
        assert!(bed.read(token * 65536, 65536) == pattern(token, 65536), "{token}");
    }
    drop(bed);
    metadata.close(CLOSE).unwrap();
    images.assert_consistent("a");
}

#[test]
fn many_small_pieces_of_a_block_are_written_in_order() {
    let Some(images) = Images::new() else { return };
    create(&images, "a", "cluster_size=4k", None, 4 << 20);
    let mut bed = bed_on(images, "a");
    // Two clusters that are not adjacent in the file, so that the op is written in parts.
    bed.write(4096, &pattern(7, 4096));
    bed.write(0, &pattern(7, 4096));
    let data = pattern(5, 8192);
    let pieces: Vec<(u64, u64)> = (0..1024).rev().map(|piece| (piece * 16, 8)).collect();
    for (chunk, &(at, _)) in data.chunks(8).zip(&pieces) {
        bed.store(at, chunk);
    }
    let range = bed.range(0, 8192);
    let completion = bed.run(OpKind::Write { range, durability: Durability::Cached }, &pieces);
    assert_eq!((completion.result, completion.buffers.remaining_bytes()), (Ok(()), 0));
    assert_eq!(bed.read(0, 8192), data);
}

#[test]
fn read_only_disk_refuses_writes_and_flushes_nothing() {
    let Some(images) = Images::new() else { return };
    create(&images, "a", "cluster_size=64k", None, 4 << 20);
    let image = Arc::new(images.open("a", CacheMode::Writeback, 1 << 20));
    let mut bed = crate::bed::make_on(mapped(EngineKind::IoUring), image, images.folder);
    let range = bed.range(0, 4096);
    let kind = OpKind::Write { range, durability: Durability::Cached };
    assert_eq!(bed.run(kind, &[(0, 4096)]).result, Err(OpError::Errno(Errno::ROFS)));
    assert_eq!(bed.run(OpKind::Flush, &[]).result, Ok(()));
    assert_eq!(bed.recorder.records(), []);
}
