//! Measures how io_uring's options affect 4 KiB random reads past the page cache: reads per second, and processor
//! time.
//!
//! `cargo bench -p io_engine --bench uring_options [-- SECONDS]`. Rounds are interleaved. Processor time is that of
//! the whole process, including a kernel thread that submits. If the device cannot be polled, `iopoll` shows the cost
//! of the option in that case. See also: our own code (`request.rs`).
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, IoVecs, MemoryView, Region};
use io_engine::{Engine, EngineConfig, Event, FileId, FileSpec, IoUringEngine, IoUringOptions, Op, OpKind};

const IMAGE_BYTES: u64 = 256 << 20;
const BLOCK_BYTES: u64 = 4096;
/// The duration with `cargo test --benches`, which checks that this benchmark still works.
const SMOKE: Duration = Duration::from_millis(20);

/// Processor time of all threads, including those that have ended.
fn process_ns() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

fn run(name: &str, mut engine: Box<dyn Engine>, image: &Image, depth: u64, duration: Duration) {
    engine.start().unwrap();
    let spec = FileSpec::of(image);
    let file = engine.attach_file(spec).unwrap();
    let region = Region::from_memfd(GuestAddress(0), depth * BLOCK_BYTES).unwrap();
    let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
    engine.use_memory(&memory);
    let view = MemoryView::new(memory);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut next_op = |token: u64, mut buffers: IoVecs, file: FileId| {
        let block = random.below(IMAGE_BYTES / BLOCK_BYTES);
        let range = GuestRange { addr: token * BLOCK_BYTES, len_bytes: BLOCK_BYTES as u32 };
        buffers.fill(&view, [range]).unwrap();
        let range = image.check(block * 8, BLOCK_BYTES).unwrap();
        Op { token, file, kind: OpKind::Read { range }, buffers }
    };
    for token in 0..depth {
        engine.push(next_op(token, IoVecs::with_capacity(1), file)).unwrap();
    }
    let (started, before, mut done) = (Instant::now(), process_ns(), 0_u64);
    let mut events = Vec::with_capacity(depth as usize);
    while started.elapsed() < duration {
        engine.submit().unwrap();
        engine.reap(&mut events);
        if events.is_empty() {
            engine.wait(None).unwrap();
        }
        for event in events.drain(..) {
            let Event::Completed(completion) = event else { continue };
            completion.result.unwrap();
            done += 1;
            engine.push(next_op(completion.token, completion.buffers, file)).unwrap();
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let cpu_ns = (process_ns() - before) / done as f64;
    println!(
        "{name:>16} depth {depth:>2}: {:>8.0} reads/s, {cpu_ns:>7.0} ns cpu per read",
        done as f64 / seconds
    );
}

fn main() {
    let seconds = std::env::args().filter_map(|arg| arg.parse().ok()).next_back();
    let smoke = std::env::args().any(|arg| arg == "--test") || !std::env::args().any(|arg| arg == "--bench");
    let duration = if smoke { SMOKE } else { Duration::from_secs_f64(seconds.unwrap_or(2.0)) };
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("disk.raw");
    std::fs::write(&path, vec![0x5a; IMAGE_BYTES as usize]).unwrap();
    std::fs::File::open(&path).unwrap().sync_all().unwrap();
    let options = |cache| ImageOptions { cache, ..ImageOptions::new(&path) };
    let image = Image::open(&HostOpener, &options(CacheMode::None))
        .or_else(|_| Image::open(&HostOpener, &options(CacheMode::Writeback))) // this file system has no O_DIRECT
        .unwrap();
    let config = EngineConfig { depth: 64, ..EngineConfig::default() };
    let plain = IoUringOptions::default();
    let sqpoll_idle = Some(Duration::from_millis(50));
    let configs = [
        ("plain", plain.clone()),
        ("sqpoll", IoUringOptions { sqpoll_idle, ..plain.clone() }),
        ("iopoll", IoUringOptions { iopoll: true, ..plain.clone() }),
        ("pinned", IoUringOptions { pin_guest_memory: true, ..plain.clone() }),
    ];
    for _ in 0..if smoke { 1 } else { 3 } {
        for depth in [32, 1] {
            for (name, options) in &configs {
                let engine = IoUringEngine::with(options, &config).unwrap();
                run(name, Box::new(engine), &image, depth, duration);
            }
            let two_rings = IoUringEngine::as_if_polled(&configs[2].1, config.clone()).unwrap();
            run("iopoll pretended", Box::new(two_rings), &image, depth, duration);
        }
    }
}
