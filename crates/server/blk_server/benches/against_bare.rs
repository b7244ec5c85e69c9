//! Random 4 KiB requests on an image in memory, 64 at a time: the device half with a real engine, and a bare loop
//! that copies the same blocks from the same file to the same buffers, on the same thread, in turns.
//!
//! `cargo bench -p blk_server --bench against_bare [-- OPTION=VALUE …]`: `rounds=30`, `ms=50` (of each, per round),
//! `engine=mmap`, `op=read|write`, `mib=1024`, `packed=yes`, `image=/dev/shm` (folder of the image), `memory=FOLDER`
//! (of the guest's memory; a memfd otherwise), `buffers=row|spread` (64 blocks side by side, or anywhere in 1 GiB).
//! `profile=SECONDS`: only the device half and its driver, for a profiler that is started with it. Instructions outside
//! the copy: `valgrind --tool=callgrind --toggle-collect='*InlineWorker*serve*' … callgrind`. The measured time covers
//! the device half, with its kick and call, and the copies, but not the driver.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_precision_loss)]

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_mem::{GuestAddress, Region, RegionSpec};
use io_engine::{EngineConfig, EngineKind, make};
use rig::{BLOCK_BYTES, DATA_BASE, Rig, guest};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

mod rig;

const DEPTH: u64 = 64;
const SECTORS_PER_BLOCK: u64 = BLOCK_BYTES / 512;
const SPREAD_BYTES: u64 = 1 << 30;
/// Written in one call, so that a tmpfs with `huge=always` uses huge pages.
const PIECE_BYTES: u64 = 2 << 20;

/// xorshift64, so that both use the same offsets.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

struct Options {
    given: HashMap<String, String>,
}

impl Options {
    fn from_args() -> Self {
        let pairs = std::env::args().filter_map(|arg| {
            let (name, value) = arg.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        });
        Self { given: pairs.collect() }
    }

    fn text<'o>(&'o self, name: &str, default: &'o str) -> &'o str {
        self.given.get(name).map_or(default, String::as_str)
    }

    fn number(&self, name: &str, default: u64) -> u64 {
        self.given.get(name).map_or(default, |value| value.parse().unwrap())
    }
}

struct Pair {
    rig: Rig,
    image: MmapRegion,
    memory: MmapRegion,
    kind: u32,
    /// Where a batch's blocks lie in the image, and its buffers in the guest's memory.
    places: Vec<(u64, u64)>,
    blocks: u64,
    spread: bool,
    random: Random,
    next_in_order: Option<u64>,
    _image: tempfile::NamedTempFile,
}

impl Pair {
    fn new(options: &Options, image_bytes: u64) -> Self {
        let image = filled(Path::new(options.text("image", "/dev/shm")), image_bytes);
        let spread = options.text("buffers", "row") == "spread";
        let data_bytes = if spread { SPREAD_BYTES } else { DEPTH * BLOCK_BYTES };
        let memory = memory(options.given.get("memory"), DATA_BASE + data_bytes);
        let wanted = options.text("engine", "mmap");
        let kind = EngineKind::ALL.into_iter().find(|kind| kind.to_string() == wanted).unwrap();
        let engine = make(kind, &EngineConfig::default()).unwrap();
        let fd = File::from(memory.fd().try_clone().unwrap());
        let map =
            |file: File, bytes| MmapRegion::from_file(FileOffset::new(file, 0), bytes as usize).unwrap();
        Self {
            image: map(image.reopen().unwrap(), image_bytes),
            memory: map(fd, DATA_BASE + data_bytes),
            rig: Rig::new(0, engine, image.path(), guest(memory), options.text("packed", "no") == "yes"),
            kind: if options.text("op", "read") == "write" {
                virtio_blk::kind::OUT
            } else {
                virtio_blk::kind::IN
            },
            places: vec![(0, 0); DEPTH as usize],
            blocks: image_bytes / BLOCK_BYTES,
            spread,
            random: Random(0x9e37_79b9_7f4a_7c15),
            next_in_order: None,
            _image: image,
        }
    }

    fn choose(&mut self) {
        for (slot, place) in (0..).zip(&mut self.places) {
            let in_order = self.next_in_order.map(|first| (first + slot) % self.blocks);
            let from = in_order.unwrap_or_else(|| self.random.below(self.blocks)) * BLOCK_BYTES;
            let buffer = if self.spread { self.random.below(SPREAD_BYTES / BLOCK_BYTES) } else { slot };
            *place = (from, DATA_BASE + buffer * BLOCK_BYTES);
        }
    }

    fn served(&mut self) -> Duration {
        self.choose();
        for (slot, &(from, buffer)) in (0..).zip(&self.places) {
            self.rig.add(slot, self.kind, from / BLOCK_BYTES * SECTORS_PER_BLOCK, buffer);
        }
        self.rig.serve(DEPTH)
    }

    fn bare(&mut self) -> Duration {
        self.choose();
        let start = Instant::now();
        for &(from, buffer) in &self.places {
            let block = self.image.get_slice(from as usize, BLOCK_BYTES as usize).unwrap();
            let buffer = self.memory.get_slice(buffer as usize, BLOCK_BYTES as usize).unwrap();
            match self.kind {
                virtio_blk::kind::OUT => buffer.copy_to_volatile_slice(block),
                _ => block.copy_to_volatile_slice(buffer),
            }
        }
        start.elapsed()
    }

    /// Touches every page of both mappings before the measurement, because the first write to a page causes a fault.
    fn touch_all(&mut self) {
        for first in (0..self.blocks).step_by(DEPTH as usize) {
            self.next_in_order = Some(first);
            self.served();
            self.next_in_order = Some(first);
            self.bare();
        }
        self.next_in_order = None;
    }

    /// ns per request.
    fn round(&mut self, limit: Duration, mut batch: impl FnMut(&mut Self) -> Duration) -> f64 {
        let (start, mut spent, mut batches) = (Instant::now(), Duration::ZERO, 0_u64);
        while start.elapsed() < limit {
            spent += batch(self);
            batches += 1;
        }
        spent.as_nanos() as f64 / (batches * DEPTH) as f64
    }
}

fn filled(folder: &Path, bytes: u64) -> tempfile::NamedTempFile {
    let mut image = tempfile::NamedTempFile::new_in(folder).unwrap();
    let mut block = vec![0x5a; PIECE_BYTES as usize];
    for number in 0..bytes / PIECE_BYTES {
        block
            .chunks_exact_mut(BLOCK_BYTES as usize)
            .for_each(|page| page[..8].copy_from_slice(&number.to_ne_bytes()));
        image.write_all(&block).unwrap();
    }
    image
}

fn memory(folder: Option<&String>, size_bytes: u64) -> Region {
    let Some(folder) = folder else { return Region::from_memfd(GuestAddress(0), size_bytes).unwrap() };
    let file = tempfile::tempfile_in(folder).unwrap();
    file.set_len(size_bytes).unwrap();
    let spec = RegionSpec { guest_addr: GuestAddress(0), size_bytes, user_addr: 0, file_offset_bytes: 0 };
    Region::map(spec, Arc::new(file.into())).unwrap()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let options = Options::from_args();
    let smoke = std::env::args().any(|arg| arg == "--test") || !std::env::args().any(|arg| arg == "--bench");
    if std::env::args().any(|arg| arg == "callgrind") {
        let mut pair = Pair::new(&options, options.number("mib", 64) << 20);
        (0..1000).for_each(|_| _ = pair.served());
        return;
    }
    let (rounds, ms, mib) = if smoke { (2, 5, 16) } else { (30, 50, 1024) };
    let limit = Duration::from_millis(options.number("ms", ms));
    let mut pair = Pair::new(&options, options.number("mib", mib) << 20);
    pair.touch_all();
    if let Some(seconds) = options.given.get("profile") {
        let ours = pair.round(Duration::from_secs(seconds.parse().unwrap()), Pair::served);
        println!("{ours:.0} ns per request");
        return;
    }
    let (mut served, mut bare, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.number("rounds", rounds) {
        let before = pair.round(limit / 2, Pair::bare);
        let ours = pair.round(limit, Pair::served);
        let theirs = f64::midpoint(before, pair.round(limit / 2, Pair::bare));
        served.push(ours);
        bare.push(theirs);
        ratios.push(theirs / ours);
    }
    let count = ratios.len() as f64;
    let mean = ratios.iter().sum::<f64>() / count;
    let deviation = (ratios.iter().map(|ratio| (ratio - mean).powi(2)).sum::<f64>() / (count - 1.0)).sqrt();
    println!(
        "{} {}: {:.0} ns per request, bare {:.0} ns; requests per second against bare: median {:.3}, mean {mean:.3} ± {:.3}",
        options.text("engine", "mmap"),
        options.text("op", "read"),
        median(&mut served),
        median(&mut bare),
        median(&mut ratios),
        1.96 * deviation / count.sqrt(),
    );
}
