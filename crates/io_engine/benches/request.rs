//! What one 4 KiB read costs at depth 64: wall time, and processor time split into ours and the kernel's.
//!
//! `cargo bench -p io_engine [-- SECONDS]`. User time is an upper bound for our own code: it includes this
//! loop and the way into the kernel. The file is in the page cache, so no device is measured, except in the
//! rows that say `O_DIRECT`.
//!
//! Not here: rings and requests (`blk_server`'s benchmark).
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, IoVecs, MemoryView, Region};
use io_engine::{
    Engine, EngineConfig, Event, FileId, FileSpec, Handles, IoUringEngine, KernelAge, LinuxAioEngine,
    NullEngine, Op, OpKind,
};

const DEPTH: u32 = 64;
const IMAGE_BYTES: u64 = 64 << 20;
const BLOCK_BYTES: u64 = 4096;
/// What `cargo test --benches` runs, so that this cannot rot.
const SMOKE: Duration = Duration::from_millis(20);

/// Processor time of this thread: exact in sum, and in ticks for each half.
struct Usage {
    run_ns: f64,
    user_ticks: f64,
    system_ticks: f64,
}

impl Usage {
    fn now() -> Self {
        let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        let run_ns = schedstat.split_whitespace().next().unwrap().parse().unwrap();
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let after_name = stat.rsplit(')').next().unwrap();
        // Fields 14 and 15 of proc(5); the first after the name is field 3.
        let mut ticks = after_name.split_whitespace().skip(11).map(|field| field.parse().unwrap());
        Self { run_ns, user_ticks: ticks.next().unwrap(), system_ticks: ticks.next().unwrap() }
    }

    /// User and system time since `before`: the exact sum, split as the ticks are.
    fn since(&self, before: &Self) -> (f64, f64) {
        let run_ns = self.run_ns - before.run_ns;
        let user: f64 = self.user_ticks - before.user_ticks;
        let system: f64 = self.system_ticks - before.system_ticks;
        let share = user / (user + system).max(1.0);
        (run_ns * share, run_ns * (1.0 - share))
    }
}

fn run(name: &str, engine: Box<dyn Engine>, image: &Image, duration: Duration) {
    let Handles { mut submit, mut reap } = engine.start().unwrap();
    let spec = FileSpec { file: Arc::clone(image.file()), alignment: image.alignment() };
    let file = submit.attach_file(spec).unwrap();
    let region = Region::from_memfd(GuestAddress(0), u64::from(DEPTH) * BLOCK_BYTES).unwrap();
    let view = MemoryView::new(Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap()));
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next_op = |token: u64, mut buffers: IoVecs, file: FileId| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let block = state % (IMAGE_BYTES / BLOCK_BYTES);
        buffers
            .fill(&view, [GuestRange { addr: token * BLOCK_BYTES, len_bytes: BLOCK_BYTES as u32 }])
            .unwrap();
        let range = image.check(block * 8, BLOCK_BYTES).unwrap();
        Op { token, file, kind: OpKind::Read { range }, buffers }
    };
    for token in 0..u64::from(DEPTH) {
        submit.push(next_op(token, IoVecs::with_capacity(1), file)).unwrap();
    }
    let (started, before, mut done) = (Instant::now(), Usage::now(), 0_u64);
    let mut events = Vec::with_capacity(DEPTH as usize);
    while started.elapsed() < duration {
        submit.submit().unwrap();
        reap.reap(&mut events);
        if events.is_empty() {
            reap.wait(None).unwrap();
        }
        for event in events.drain(..) {
            let Event::Completed(completion) = event else { continue };
            completion.result.unwrap();
            done += 1;
            submit.push(next_op(completion.token, completion.buffers, file)).unwrap();
        }
    }
    let wall_ns = started.elapsed().as_nanos() as f64;
    let (user_ns, system_ns) = Usage::now().since(&before);
    let per_op = |ns: f64| ns / done as f64;
    println!(
        "{name:>28}: {:>7.0} ns wall, {:>6.0} ns user, {:>6.0} ns system per op, {done} ops",
        per_op(wall_ns),
        per_op(user_ns),
        per_op(system_ns),
    );
}

fn main() {
    let seconds = std::env::args().filter_map(|arg| arg.parse().ok()).next_back();
    let smoke = std::env::args().any(|arg| arg == "--test") || !std::env::args().any(|arg| arg == "--bench");
    let duration = if smoke { SMOKE } else { Duration::from_secs_f64(seconds.unwrap_or(2.0)) };
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("disk.raw");
    std::fs::write(&path, vec![0x5a; IMAGE_BYTES as usize]).unwrap();
    let image =
        Image::open(&HostOpener, &ImageOptions { cache: CacheMode::Writeback, ..ImageOptions::new(&path) })
            .unwrap();
    let direct_path = folder.path().join("direct.raw");
    std::fs::copy(&path, &direct_path).unwrap();
    let direct = ImageOptions { cache: CacheMode::None, ..ImageOptions::new(&direct_path) };
    let direct = Image::open(&HostOpener, &direct).inspect_err(|error| println!("no O_DIRECT: {error}")).ok();
    let config = EngineConfig { depth: DEPTH, ..EngineConfig::default() };
    for _ in 0..if smoke { 1 } else { 3 } {
        run("null", Box::new(NullEngine::new(&config).unwrap()), &image, duration);
        for age in [KernelAge::Newest, KernelAge::Before6_1, KernelAge::Linux5_15] {
            let engine = IoUringEngine::as_if_on(age, config.clone()).unwrap();
            run(&format!("io_uring {age:?}"), Box::new(engine), &image, duration);
        }
        if let Some(direct) = &direct {
            let engine = IoUringEngine::new(config.clone()).unwrap();
            run("io_uring O_DIRECT", Box::new(engine), direct, duration);
            match LinuxAioEngine::new(config.clone()) {
                Ok(engine) => run("linux-aio O_DIRECT", Box::new(engine), direct, duration),
                Err(error) => println!("no linux-aio: {error}"),
            }
        }
    }
}
