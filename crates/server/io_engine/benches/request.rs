//! Measures the cost of one 4 KiB read at depth 64: wall time, and processor time in user mode and in the kernel.
//!
//! `cargo bench -p io_engine --bench request [-- SECONDS] [attached=FILES] [only=ENGINE]`. `attached` attaches this
//! many idle files before the busy one, which must not change the result. User time is an upper bound for our own
//! code: it includes this loop and the entry into the kernel. The times are those of the whole process, because
//! engines have their own threads and io_uring has kernel threads. Only the `O_DIRECT` rows include the time of
//! a device; the page cache and tmpfs involve none.
//!
//! See also: rings and requests (`blk_server`'s benchmark).
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, IoVecs, MemoryView, Region};
use io_engine::{
    Engine, EngineConfig, EngineKind, Event, FileId, FileSpec, IoUringEngine, KernelAge, NullEngine, Op,
    OpKind, choose, make,
};
use rustix::time::{ClockId, clock_gettime};

const DEPTH: u32 = 64;
const IMAGE_BYTES: u64 = 64 << 20;
const BLOCK_BYTES: u64 = 4096;
/// The duration with `cargo test --benches`, which checks that this benchmark still works.
const SMOKE: Duration = Duration::from_millis(20);

/// Processor time of this process: the exact sum, and user and system time in ticks.
struct Usage {
    run_ns: f64,
    user_ticks: f64,
    system_ticks: f64,
}

impl Usage {
    fn now() -> Self {
        let run = clock_gettime(ClockId::ProcessCPUTime);
        let run_ns = run.tv_sec as f64 * 1e9 + run.tv_nsec as f64;
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let after_name = stat.rsplit(')').next().unwrap();
        // Fields 14 and 15 of proc(5). The first field after the name is field 3.
        let mut ticks = after_name.split_whitespace().skip(11).map(|field| field.parse().unwrap());
        Self { run_ns, user_ticks: ticks.next().unwrap(), system_ticks: ticks.next().unwrap() }
    }

    /// User and system time since `before`: the exact sum, divided in proportion to the ticks.
    fn since(&self, before: &Self) -> (f64, f64) {
        let run_ns = self.run_ns - before.run_ns;
        let user: f64 = self.user_ticks - before.user_ticks;
        let system: f64 = self.system_ticks - before.system_ticks;
        let share = user / (user + system).max(1.0);
        (run_ns * share, run_ns * (1.0 - share))
    }
}

struct Storage {
    image: Image,
    _folder: tempfile::TempDir,
}

impl Storage {
    /// `None` if `O_DIRECT` is requested and the file system does not have it.
    fn new(parent: &Path, cache: CacheMode) -> Option<Self> {
        let folder = tempfile::tempdir_in(parent).unwrap();
        let path = folder.path().join("disk.raw");
        std::fs::write(&path, vec![0x5a; IMAGE_BYTES as usize]).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let image = Image::open(&HostOpener, &ImageOptions { cache, ..ImageOptions::new(&path) });
        Some(Self { image: image.ok()?, _folder: folder })
    }
}

fn option(name: &str) -> Option<String> {
    std::env::args().find_map(|arg| Some(arg.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
}

fn run(name: &str, mut engine: Box<dyn Engine>, image: &Image, duration: Duration) {
    if option("only").is_some_and(|only| !name.ends_with(&only)) {
        return;
    }
    engine.start().unwrap();
    let spec = FileSpec::of(image);
    for _ in 0..option("attached").map_or(0, |files| files.parse().unwrap()) {
        engine.attach_file(spec.clone()).unwrap();
    }
    let file = engine.attach_file(spec).unwrap();
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
        engine.push(next_op(token, IoVecs::with_capacity(1), file)).unwrap();
    }
    let (started, before, mut done) = (Instant::now(), Usage::now(), 0_u64);
    let mut events = Vec::with_capacity(DEPTH as usize);
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
    let wall_ns = started.elapsed().as_nanos() as f64;
    let (user_ns, system_ns) = Usage::now().since(&before);
    let per_op = |ns: f64| ns / done as f64;
    println!(
        "{name:>32}: {:>7.0} ns wall, {:>6.0} ns user, {:>6.0} ns system per op, {done} ops",
        per_op(wall_ns),
        per_op(user_ns),
        per_op(system_ns),
    );
}

fn main() {
    let seconds = std::env::args().filter_map(|arg| arg.parse().ok()).next_back();
    let smoke = std::env::args().any(|arg| arg == "--test") || !std::env::args().any(|arg| arg == "--bench");
    let duration = if smoke { SMOKE } else { Duration::from_secs_f64(seconds.unwrap_or(2.0)) };
    let disk = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let storages = [
        ("page cache", Storage::new(disk, CacheMode::Writeback)),
        ("tmpfs", Storage::new(Path::new("/dev/shm"), CacheMode::Writeback)),
        ("O_DIRECT", Storage::new(disk, CacheMode::None)),
    ];
    let config = EngineConfig { depth: DEPTH, ..EngineConfig::default() };
    for _ in 0..if smoke { 1 } else { 3 } {
        if let Some(cached) = &storages[0].1 {
            run("null", Box::new(NullEngine::new(&config).unwrap()), &cached.image, duration);
            for age in [KernelAge::Before6_1, KernelAge::Linux5_15] {
                let engine = IoUringEngine::as_if_on(age, config.clone()).unwrap();
                run(&format!("page cache, io_uring {age:?}"), Box::new(engine), &cached.image, duration);
            }
        }
        for (name, storage) in &storages {
            let Some(Storage { image, .. }) = storage else { continue };
            let spec = FileSpec::of(image);
            for kind in EngineKind::FOR_FILES {
                // Omits engines that refuse the file.
                if choose(Some(&kind.into()), &spec, &config).is_ok() {
                    run(&format!("{name}, {kind}"), make(kind, &config).unwrap(), image, duration);
                }
            }
        }
    }
}
