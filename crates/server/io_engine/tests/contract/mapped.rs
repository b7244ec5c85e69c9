//! Mapped disks: every byte is compared with what QEMU reads, for all kinds of images; and hostile tables.
//!
//! See also: the cases of the contract (`main.rs`), the images (`beds/mapped.rs`).

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use disk_image::{CacheMode, Image};
use guest_mem::{GuestRange, IoVecs, MemoryView};
use io_engine::{Completion, Engine, EngineKind, Event, FileId, FileSpec, Op, OpError, OpKind, Verb};

use crate::bed::{DEPTH, PATIENCE, make_on, memory};
use crate::beds::{Images, mapped};

/// Memory of one op.
const SLOT_BYTES: u64 = 1 << 20;
/// Ops in flight.
const SLOTS: u64 = 12;
/// Enough for all tables of the images here.
const ALL_TABLES: u64 = 8 << 20;

struct Rng(u64);

impl Rng {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

struct Job {
    offset: u64,
    len: u64,
    /// Address and length.
    pieces: Vec<(u64, u64)>,
}

/// A worker with its engine, on an image that others may share.
struct Reader {
    engine: Box<dyn Engine>,
    file: FileId,
    image: Arc<Image>,
    view: MemoryView,
    busy: Vec<Option<Job>>,
}

impl Reader {
    fn new(kind: EngineKind, image: &Arc<Image>) -> Self {
        let (mut engine, _) = mapped(kind);
        engine.start().unwrap();
        let file = engine.attach_file(FileSpec::of(image)).unwrap();
        let busy = (0..SLOTS).map(|_| None).collect();
        Self { engine, file, image: Arc::clone(image), view: memory(), busy }
    }

    /// Reads into pieces that lie in memory from the end to the start, and of which some are short.
    fn push(&mut self, slot: u64, offset: u64, len: u64, rng: &mut Rng) {
        let (mut pieces, mut left) = (Vec::new(), len);
        let most = [len, 4096, 700, 65536][rng.below(4) as usize];
        while left > 0 {
            let piece = (1 + rng.below(most)).max(len / 500).min(left);
            left -= piece;
            pieces.push((slot * SLOT_BYTES + left, piece));
        }
        self.view.store(slot * SLOT_BYTES, &vec![0xee; len as usize]).unwrap();
        let mut buffers = IoVecs::with_capacity(pieces.len());
        let ranges = pieces.iter().map(|&(addr, len)| GuestRange { addr, len_bytes: len as u32 });
        buffers.fill(&self.view, ranges).unwrap();
        let range = self.image.check(offset / 512, len).unwrap();
        let op = Op { token: slot, file: self.file, kind: OpKind::Read { range }, buffers };
        self.engine.push(op).unwrap();
        self.busy[slot as usize] = Some(Job { offset, len, pieces });
    }

    /// What the op has stored, in its order.
    fn stored(&self, job: &Job) -> Vec<u8> {
        let mut stored = vec![0; job.len as usize];
        let mut rest = stored.as_mut_slice();
        for &(at, len) in &job.pieces {
            let (piece, after) = rest.split_at_mut(len as usize);
            self.view.read(at, piece).unwrap();
            rest = after;
        }
        stored
    }

    fn wait(&mut self) -> Vec<Completion> {
        let start = Instant::now();
        loop {
            self.engine.submit().unwrap();
            let mut events = Vec::new();
            self.engine.reap(&mut events);
            if !events.is_empty() {
                let completion = |event| match event {
                    Event::Completed(completion) => completion,
                    other => panic!("{other:?}"),
                };
                return events.into_iter().map(completion).collect();
            }
            assert!(start.elapsed() < PATIENCE, "nothing completes");
            self.engine.wait(Some(PATIENCE)).unwrap();
        }
    }

    /// Reads everything in order, then `count` random pieces. Calls `check` with each op and its completion.
    fn read(&mut self, count: u64, rng: &mut Rng, mut check: impl FnMut(&Self, &Job, &Completion)) {
        let (size, block) = (self.image.capacity_sectors() * 512, u64::from(self.image.block_size()));
        let (mut at, mut left) = (0, count);
        loop {
            while let Some(slot) = self.busy.iter().position(Option::is_none) {
                let (offset, len) = if at < size {
                    (at, (size - at).min(SLOT_BYTES))
                } else if left > 0 {
                    left -= 1;
                    let offset = rng.below(size / block) * block;
                    let most = [1, 8, 300, 2048][rng.below(4) as usize];
                    (offset, (block * (1 + rng.below(most))).min(size - offset).min(SLOT_BYTES))
                } else {
                    break;
                };
                at += len;
                self.push(slot as u64, offset, len, rng);
            }
            if self.busy.iter().all(Option::is_none) {
                assert_eq!(self.engine.in_flight(), 0);
                return;
            }
            for completion in self.wait() {
                let job = self.busy[completion.token as usize].take().expect("an op completes once");
                check(self, &job, &completion);
            }
        }
    }
}

/// Several workers read the image at the same time, each with its own engine.
fn assert_same(image: Image, expected: &[u8], kinds: &[EngineKind]) {
    assert_eq!(image.capacity_sectors() * 512, expected.len() as u64);
    let image = &Arc::new(image);
    std::thread::scope(|scope| {
        for (seed, &kind) in (1..).zip(kinds) {
            scope.spawn(move || {
                let mut reader = Reader::new(kind, image);
                reader.read(150, &mut Rng(seed), |reader, job, completion| {
                    let Job { offset, len, .. } = *job;
                    assert_eq!(
                        (completion.result, completion.stored_bytes),
                        (Ok(()), len),
                        "{kind} at {offset}"
                    );
                    assert_eq!(completion.buffers.remaining_bytes(), 0);
                    let wanted = &expected[offset as usize..(offset + len) as usize];
                    let stored = reader.stored(job);
                    let differs = stored.iter().zip(wanted).position(|(stored, wanted)| stored != wanted);
                    assert_eq!(differs, None, "{kind} reads {len} bytes at {offset}");
                });
            });
        }
    });
}

const BOTH: [EngineKind; 2] = [EngineKind::IoUring, EngineKind::Threads];

/// With few slices of tables in memory through the page cache, and with all of them and direct I/O.
fn assert_same_in_all_ways(images: &Images, name: &str) {
    let expected = images.content(name);
    for (cache, table_cache_bytes) in [(CacheMode::Writeback, 1), (CacheMode::None, ALL_TABLES)] {
        assert_same(images.open(name, cache, table_cache_bytes), &expected, &BOTH);
    }
}

/// Commands of `qemu-io` that write, zero and discard at random places.
fn random_writes(rng: &mut Rng, size: u64, unit: u64, count: usize) -> Vec<String> {
    let units = size / unit;
    let command = |_| {
        let start = rng.below(units);
        let longest = if rng.below(4) == 0 { 700 } else { 40 };
        let len = 1 + rng.below((units - start).min(longest));
        let (at, len, pattern) = (start * unit, len * unit, 1 + rng.below(255));
        match rng.below(8) {
            0 => format!("write -z {at} {len}"),
            1 => format!("write -z -u {at} {len}"),
            2 => format!("discard {at} {len}"),
            _ => format!("write -P {pattern} {at} {len}"),
        }
    };
    (0..count).map(command).collect()
}

fn written(images: &Images, name: &str, options: &str, size: u64, seed: u64) {
    images.img(&["create", "-q", "-f", "qcow2", "-o", options, name, &size.to_string()]);
    images.io(name, &random_writes(&mut Rng(seed), size, 512, 40));
}

#[test]
fn images_of_each_cluster_size_read_as_qemu_reads_them() {
    let Some(images) = Images::new() else { return };
    for (seed, options) in (10..).zip([
        "cluster_size=512",
        "cluster_size=1k,compat=0.10",
        "cluster_size=4k",
        "cluster_size=64k",
        "cluster_size=2M",
        "cluster_size=16k,extended_l2=on",
        "cluster_size=128k,extended_l2=on",
    ]) {
        let name = format!("{seed}.qcow2");
        written(&images, &name, options, (5 << 20) + 1536, seed);
        assert_same_in_all_ways(&images, &name);
    }
}

#[test]
fn compressed_images_read_as_qemu_reads_them() {
    let Some(images) = Images::new() else { return };
    for (seed, options) in (20..).zip([
        "cluster_size=512",
        "cluster_size=64k",
        "cluster_size=64k,compression_type=zstd",
        "cluster_size=2M,compression_type=zstd",
        "cluster_size=64k,extended_l2=on",
    ]) {
        written(&images, "plain", "cluster_size=64k", 6 << 20, seed);
        let name = format!("{seed}.qcow2");
        images.img(&["convert", "-c", "-f", "qcow2", "-O", "qcow2", "-o", options, "plain", &name]);
        images.io(&name, &random_writes(&mut Rng(seed), 6 << 20, 4096, 5));
        assert_same_in_all_ways(&images, &name);
    }
}

#[test]
fn chain_over_a_shorter_raw_file_reads_as_qemu_reads_it() {
    let Some(images) = Images::new() else { return };
    let raw: Vec<u8> = (0..3_000_000_u32).map(|at| (at / 77) as u8).collect();
    std::fs::write(images.path("base.raw"), raw).unwrap();
    let create = |name: &str, below: &str, format: &str, options: &str, size: u64| {
        let size = size.to_string();
        images.img(&["create", "-q", "-f", "qcow2", "-o", options, "-b", below, "-F", format, name, &size]);
        images.io(name, &random_writes(&mut Rng(size.len() as u64 + 77), 4 << 20, 512, 12));
    };
    create("one", "base.raw", "raw", "cluster_size=4k", 5 << 20);
    create("two", "one", "qcow2", "cluster_size=64k,extended_l2=on", 4 << 20);
    create("three", "two", "qcow2", "cluster_size=512", 7 << 20);
    create("four", "three", "qcow2", "cluster_size=64k", 8 << 20);
    assert_same_in_all_ways(&images, "four");
}

#[test]
fn external_data_and_snapshots_read_as_qemu_reads_them() {
    let Some(images) = Images::new() else { return };
    written(&images, "external", "cluster_size=64k,data_file=external.data", 5 << 20, 30);
    assert_same_in_all_ways(&images, "external");
    written(&images, "snapshots", "cluster_size=64k", 5 << 20, 31);
    images.img(&["snapshot", "-c", "first", "snapshots"]);
    images.io("snapshots", &random_writes(&mut Rng(32), 5 << 20, 512, 20));
    assert_same_in_all_ways(&images, "snapshots");
}

#[test]
fn read_of_one_extent_is_one_call_into_the_guests_memory() {
    let Some(images) = Images::new() else { return };
    written(&images, "a", "cluster_size=64k,preallocation=metadata", 4 << 20, 40);
    images.io("a", &["write -P 7 0 1M".into()]);
    let image = Arc::new(images.open("a", CacheMode::Writeback, ALL_TABLES));
    let mut bed = make_on(mapped(EngineKind::IoUring), image, images.folder);
    assert_eq!(bed.read(8192, 4096), [7; 4096]);
    let calls =
        |bed: &crate::bed::Bed| bed.recorder.records().iter().map(|record| record.verb).collect::<Vec<_>>();
    assert_eq!(calls(&bed), [Verb::Read, Verb::Read], "the table, and the data");
    assert_eq!(bed.read(65536, 4096), [7; 4096]);
    assert_eq!(calls(&bed).len(), 3);
}

#[test]
fn full_line_of_ops_all_complete() {
    let Some(images) = Images::new() else { return };
    written(&images, "plain", "cluster_size=64k", 6 << 20, 50);
    images.img(&["convert", "-c", "-f", "qcow2", "-O", "qcow2", "plain", "c"]);
    let expected = images.content("c");
    let image = Arc::new(images.open("c", CacheMode::Writeback, 1));
    let mut bed = make_on(mapped(EngineKind::IoUring), image, images.folder);
    for token in 0..u64::from(DEPTH) {
        let range = bed.range(token * 90_112, 90_112);
        bed.push(token, OpKind::Read { range }, &[(token * 131_072, 90_112)]);
    }
    let done = bed.finish(DEPTH as usize);
    assert!(done.iter().all(|done| done.result == Ok(())), "{done:?}");
    for token in 0..u64::from(DEPTH) {
        let at = (token * 90_112) as usize;
        assert!(bed.load(token * 131_072, 90_112) == expected[at..at + 90_112], "op {token}");
    }
}

#[test]
fn file_that_was_cut_off_gives_an_error_and_no_zeroes() {
    let Some(images) = Images::new() else { return };
    images.img(&["create", "-q", "-f", "qcow2", "-o", "preallocation=full", "a", "4M"]);
    images.io("a", &["write -P 7 0 4M".into()]);
    let image = Arc::new(images.open("a", CacheMode::Writeback, ALL_TABLES));
    let path = images.path("a");
    let mut bed = make_on(mapped(EngineKind::IoUring), image, images.folder);
    assert_eq!(bed.read(0, 65536), [7; 65536]);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - (1 << 20)).unwrap();
    let range = bed.range((4 << 20) - 65536, 65536);
    let completion = bed.run(OpKind::Read { range }, &[(0, 65536)]);
    assert!(matches!(completion.result, Err(OpError::EndOfImage { .. })), "{completion:?}");
    assert_eq!(completion.stored_bytes, 0);
}

#[test]
fn bad_entry_fails_its_own_request_only() {
    let Some(images) = Images::new() else { return };
    images.img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=64k", "a", "4M"]);
    images.io("a", &["write -P 7 0 4M".into()]);
    let entries = l2_table(&std::fs::read(images.path("a")).unwrap());
    let file = std::fs::File::options().write(true).open(images.path("a")).unwrap();
    // Reserved bits; data far past the file's end, which reads as zeroes; a compressed cluster there.
    for (index, entry) in [(3, 0xff_u64 << 1), (5, 1 << 50), (7, 1 << 62 | 1 << 45)] {
        file.write_all_at(&entry.to_be_bytes(), entries + index * 8).unwrap();
    }
    let image = Arc::new(images.open("a", CacheMode::Writeback, ALL_TABLES));
    let mut bed = make_on(mapped(EngineKind::IoUring), image, images.folder);
    let range = bed.range(65536, 4 * 65536);
    let completion = bed.run(OpKind::Read { range }, &[(0, 4 * 65536)]);
    assert_eq!((completion.result, completion.stored_bytes), (Err(OpError::Damaged), 2 * 65536));
    assert_eq!(completion.buffers.remaining_bytes(), 2 * 65536, "the rest, for a retry");
    assert_eq!(bed.load(0, 2 * 65536), [7; 2 * 65536]);
    assert_eq!(bed.read(4 * 65536, 65536), [7; 65536]);
    assert_eq!(bed.read(5 * 65536, 65536), [0; 65536]);
    let range = bed.range(7 * 65536, 4096);
    assert_eq!(bed.run(OpKind::Read { range }, &[(0, 4096)]).result, Err(OpError::Damaged));
}

/// Where the first L2 table is.
fn l2_table(image: &[u8]) -> u64 {
    let word = |at: usize| u64::from_be_bytes(*image[at..].first_chunk().unwrap());
    word(word(40) as usize) & 0x00ff_ffff_ffff_fe00
}

#[test]
fn tables_that_another_process_changes_cost_errors_and_nothing_else() {
    let Some(images) = Images::new() else { return };
    for options in ["cluster_size=4k", "cluster_size=16k,extended_l2=on"] {
        written(&images, "plain", options, 4 << 20, 60);
        images.img(&["convert", "-c", "-f", "qcow2", "-O", "qcow2", "-o", options, "plain", "a"]);
        images.io("a", &random_writes(&mut Rng(61), 4 << 20, 4096, 30));
        let image = &Arc::new(images.open("a", CacheMode::Writeback, 1));
        let over = &AtomicBool::new(false);
        let path = images.path("a");
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let bytes = std::fs::read(&path).unwrap();
                let file = std::fs::File::options().write(true).open(&path).unwrap();
                let (mut rng, table) = (Rng(62), l2_table(&bytes));
                while !over.load(Ordering::Relaxed) {
                    let at = table + rng.below(1 << 16) / 8 * 8;
                    let old = bytes.get(at as usize..at as usize + 8).unwrap_or(&[0; 8]);
                    let word = match rng.below(4) {
                        0 => rng.below(u64::MAX >> 11) << 11,
                        1 => 1 << 62 | rng.below(1 << 50),
                        2 => rng.below(1 << 13) * 4096,
                        _ => u64::from_be_bytes(*old.first_chunk().unwrap()),
                    };
                    file.write_all_at(&word.to_be_bytes(), at).unwrap();
                }
            });
            let readers = BOTH.map(|kind| {
                scope.spawn(move || {
                    let (mut rng, mut failed) = (Rng(63), 0);
                    let mut reader = Reader::new(kind, image);
                    reader.read(1500, &mut rng, |_, job, completion| match completion.result {
                        Ok(()) => assert_eq!(completion.stored_bytes, job.len),
                        Err(_) => {
                            let rest = completion.buffers.remaining_bytes();
                            assert_eq!(completion.stored_bytes + rest, job.len);
                            failed += 1;
                        }
                    });
                    failed
                })
            });
            let failed = readers.map(|reader| reader.join().unwrap());
            over.store(true, Ordering::Relaxed);
            assert!(failed.iter().all(|failed| *failed > 0), "nothing was damaged: {failed:?}");
        });
    }
}

fn brief(completions: &[Completion]) -> Vec<(u64, Result<(), OpError>, u64)> {
    completions.iter().map(|done| (done.token, done.result, done.stored_bytes)).collect()
}

#[test]
fn long_hole_takes_many_turns_and_lets_other_reads_pass() {
    let Some(images) = Images::new() else { return };
    images.img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=64k", "a", "512M"]);
    images.io("a", &["write -P 7 0 64k".into()]);
    let image = Arc::new(images.open("a", CacheMode::Writeback, ALL_TABLES));
    let mut reader = Reader::new(EngineKind::IoUring, &image);
    let read = |reader: &mut Reader, token, offset: u64, pieces: &[u64], piece: u32| {
        let ranges = pieces.iter().map(|&addr| GuestRange { addr, len_bytes: piece });
        let mut buffers = IoVecs::with_capacity(pieces.len());
        buffers.fill(&reader.view, ranges).unwrap();
        let range = image.check(offset / 512, pieces.len() as u64 * u64::from(piece)).unwrap();
        reader.engine.push(Op { token, file: reader.file, kind: OpKind::Read { range }, buffers }).unwrap();
    };
    // Loads the table.
    read(&mut reader, 0, 0, &[0], 4096);
    assert_eq!(reader.wait().len(), 1);
    // The same memory again and again, as a hostile guest names it.
    let same = [SLOT_BYTES; 256];
    let len = 256 * SLOT_BYTES;
    reader.view.store(SLOT_BYTES, &vec![0xee; SLOT_BYTES as usize]).unwrap();
    read(&mut reader, 1, 1 << 20, &same, SLOT_BYTES as u32);
    read(&mut reader, 2, 0, &[0], 4096);
    assert_eq!(brief(&reader.wait()), [(2, Ok(()), 4096)]);
    assert_eq!(brief(&reader.wait()), [(1, Ok(()), len)]);
    let mut stored = vec![1; SLOT_BYTES as usize];
    reader.view.read(SLOT_BYTES, &mut stored).unwrap();
    assert!(stored.iter().all(|byte| *byte == 0));
    // Two holes take turns; one is cancelled after it has begun.
    read(&mut reader, 3, 1 << 20, &same, SLOT_BYTES as u32);
    read(&mut reader, 4, 1 << 20, &same[..8], SLOT_BYTES as u32);
    assert_eq!(brief(&reader.wait()), [(4, Ok(()), 8 * SLOT_BYTES)]);
    reader.engine.cancel_file(reader.file);
    let [cancelled] = <[Completion; 1]>::try_from(reader.wait()).unwrap();
    assert_eq!((cancelled.token, cancelled.result), (3, Err(OpError::Cancelled)));
    assert!(cancelled.stored_bytes > 0 && cancelled.stored_bytes < len, "{}", cancelled.stored_bytes);
    assert_eq!(cancelled.stored_bytes + cancelled.buffers.remaining_bytes(), len);
}

#[test]
fn last_block_of_a_file_keeps_its_bytes_with_direct_io() {
    let Some(images) = Images::new() else { return };
    images.img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "a", "64k"]);
    images.io("a", &["write -P 7 0 4k".into()]);
    let file = std::fs::File::options().write(true).open(images.path("a")).unwrap();
    // 700 bytes of the data cluster, which is the last one.
    let len = file.metadata().unwrap().len();
    file.set_len(len.next_multiple_of(4096) - 4096 + 700).unwrap();
    let image = Arc::new(images.open("a", CacheMode::None, ALL_TABLES));
    let mut bed = make_on(mapped(EngineKind::IoUring), image, images.folder);
    let mut expected = vec![0; 4096];
    expected[..700].fill(7);
    // All of it and more than the file has, in one op or in pieces, by the file's block size.
    for len in [1024, 4096, 8192] {
        let range = bed.range(0, len);
        bed.store(0, &[0xee; 8192]);
        let completion = bed.run(OpKind::Read { range }, &[(0, len)]);
        assert_eq!((completion.result, completion.stored_bytes), (Ok(()), len));
        expected.resize(len as usize, 0);
        assert!(bed.load(0, len) == expected, "{len} bytes");
    }
}

#[test]
fn relative_name_is_relative_to_the_folder_by_which_the_image_is_named() {
    let Some(images) = Images::new() else { return };
    for (folder, pattern) in [("real", 1), ("named", 2)] {
        std::fs::create_dir(images.path(folder)).unwrap();
        std::fs::write(images.path(folder).join("base"), vec![pattern; 1 << 20]).unwrap();
    }
    images.img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "real/top", "1M"]);
    std::os::unix::fs::symlink("../real/top", images.path("named").join("top")).unwrap();
    images.img(&["create", "-q", "-f", "qcow2", "-b", "named/top", "-F", "qcow2", "over", "1M"]);
    for name in ["named/top", "over"] {
        assert_eq!(images.content(name)[0], 2, "QEMU's rule");
        assert_same_in_all_ways(&images, name);
    }
}

#[test]
fn lookup_in_an_upper_layer_ends_after_64_clusters() {
    let Some(images) = Images::new() else { return };
    std::fs::write(images.path("base"), vec![9; 2 << 20]).unwrap();
    let options = "cluster_size=4k";
    images.img(&["create", "-q", "-f", "qcow2", "-o", options, "-b", "base", "-F", "raw", "a", "2M"]);
    // The layer has a table, and nothing in it for 480 clusters.
    images.io("a", &["write -P 7 1920k 4k".into()]);
    let image = images.open("a", CacheMode::Writeback, ALL_TABLES);
    let mut bed = make_on(mapped(EngineKind::IoUring), Arc::new(image), images.folder);
    assert_eq!(bed.read(1920 << 10, 4096), [7; 4096]);
    let before = bed.recorder.records().len();
    assert!(bed.read(0, 1 << 20) == [9; 1 << 20]);
    let ops: std::collections::HashSet<u64> =
        bed.recorder.records()[before..].iter().map(|record| record.token).collect();
    assert_eq!(ops.len(), 4, "parts of 64 clusters");
}
