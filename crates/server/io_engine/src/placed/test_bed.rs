//! The test bed of the placements: an image, guest memory, and workers that write, read back and compare.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, IoVecs, MemoryView, Region};

use super::limits::EngineMaker;
use crate::config::EngineConfig;
use crate::engine::{Completion, Durability, Engine, Event, FileId, FileSpec, Op, OpKind};
use crate::{FakeEngine, FakeHandle, IoUringEngine, LinuxAioEngine};

pub const DEPTH: u32 = 128;
const BLOCK: u64 = 4096;
/// A test that waits this long is considered hung.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn config() -> EngineConfig {
    let drain_timeout = Duration::from_millis(300);
    EngineConfig { depth: DEPTH, drain_timeout, several_threads: true, ..EngineConfig::default() }
}

pub fn io_uring() -> EngineMaker {
    Box::new(|| Ok(Box::new(IoUringEngine::new(EngineConfig { several_threads: false, ..config() })?)))
}

pub fn shared_io_uring() -> EngineMaker {
    Box::new(|| Ok(Box::new(IoUringEngine::new(config())?)))
}

pub fn linux_aio() -> EngineMaker {
    Box::new(|| Ok(Box::new(LinuxAioEngine::new(config())?)))
}

/// Fake engines, and a handle for each.
pub fn fake() -> (EngineMaker, Arc<std::sync::Mutex<Vec<FakeHandle>>>) {
    let made = Arc::<std::sync::Mutex<Vec<FakeHandle>>>::default();
    let handles = Arc::clone(&made);
    let make = move || {
        let (engine, handle) = FakeEngine::new(config())?;
        made.lock().unwrap().push(handle);
        Ok(Box::new(engine) as Box<dyn Engine>)
    };
    (Box::new(make), handles)
}

pub struct Bed {
    pub image: Image,
    pub memory: Arc<GuestMemory>,
    _folder: tempfile::TempDir,
}

impl Bed {
    /// Returns `None` if the test program's directory does not support `O_DIRECT`.
    pub fn new(cache: CacheMode) -> Option<Arc<Self>> {
        let program = std::env::current_exe().unwrap();
        let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        let path = folder.path().join("disk.raw");
        let options = ImageOptions { create_bytes: Some(16 << 20), cache, ..ImageOptions::new(path) };
        let image = Image::open(&HostOpener, &options);
        if let Err(error) = &image {
            xtask::skip::skip(
                xtask::skip::Reason::NoDirectIo(program.parent().unwrap().display().to_string()),
                error,
            );
        }
        let region = Region::from_memfd(GuestAddress(0), 16 << 20).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
        Some(Arc::new(Self { image: image.ok()?, memory, _folder: folder }))
    }

    pub fn buffered() -> Arc<Self> {
        Self::new(CacheMode::Writeback).unwrap()
    }
}

/// One worker's engine, with blocks of the image and memory that only this worker uses.
pub struct Worker {
    pub engine: Box<dyn Engine>,
    pub file: FileId,
    bed: Arc<Bed>,
    view: MemoryView,
    number: u64,
    events: Vec<Event>,
}

fn fill(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..BLOCK / 8).flat_map(|_| next()).collect()
}

impl Worker {
    pub fn start(mut engine: Box<dyn Engine>, number: u64, bed: &Arc<Bed>) -> Self {
        engine.start().unwrap();
        let (file, alignment) = (Arc::clone(bed.image.file().unwrap()), bed.image.alignment());
        let file = engine.attach_file(FileSpec::of_file(file, alignment)).unwrap();
        let view = MemoryView::new(Arc::clone(&bed.memory));
        Self { engine, file, bed: Arc::clone(bed), view, number, events: Vec::new() }
    }

    /// Offset of a block in the image and in memory. Each worker has 64 blocks.
    fn place(&self, block: u64) -> u64 {
        (self.number * 64 + block) * BLOCK
    }

    pub fn op(&self, token: u64, block: u64, write: bool) -> Op {
        let addr = self.place(block);
        let range = self.bed.image.check(addr / 512, BLOCK).unwrap();
        let kind = if write {
            OpKind::Write { range, durability: Durability::Cached }
        } else {
            OpKind::Read { range }
        };
        let mut buffers = IoVecs::with_capacity(1);
        buffers.fill(&self.view, [GuestRange { addr, len_bytes: BLOCK as u32 }]).unwrap();
        Op { token, file: self.file, kind, buffers }
    }

    pub fn flush(&self, token: u64) -> Op {
        Op { token, file: self.file, kind: OpKind::Flush, buffers: IoVecs::with_capacity(0) }
    }

    pub fn push(&mut self, op: Op) {
        assert!(self.engine.push(op).is_ok(), "no room");
    }

    pub fn reap(&mut self) -> Vec<Completion> {
        self.engine.reap(&mut self.events);
        let completed = |event| match event {
            Event::Completed(completion) => completion,
            other => panic!("{other:?} from an engine that watches nothing"),
        };
        self.events.drain(..).map(completed).collect()
    }

    /// Submits and reaps, and sleeps if there were no events.
    pub fn pass(&mut self, sleeps: bool) -> Vec<Completion> {
        self.engine.submit().unwrap();
        let completions = self.reap();
        if completions.is_empty() && sleeps {
            self.engine.wait(Some(PATIENCE / 4)).unwrap();
        }
        completions
    }

    /// Runs passes until `count` ops have completed.
    pub fn finish(&mut self, count: usize) -> Vec<Completion> {
        let deadline = Instant::now() + PATIENCE;
        let mut done = Vec::new();
        while done.len() < count {
            done.extend(self.pass(true));
            assert!(Instant::now() < deadline, "{} of {count} ops ended", done.len());
        }
        done
    }

    /// In each of `rounds`, writes `width` blocks and reads them back into cleared memory. Spins if `sleeps` is false.
    pub fn write_and_check(&mut self, rounds: u64, width: u64, sleeps: bool) {
        for round in 0..rounds {
            for block in 0..width {
                self.view.store(self.place(block), &fill(self.number << 40 | round << 8 | block)).unwrap();
            }
            self.all(width, round, true, sleeps);
            for block in 0..width {
                self.view.store(self.place(block), &[0; BLOCK as usize]).unwrap();
            }
            self.all(width, round, false, sleeps);
            for block in 0..width {
                let mut found = vec![0; BLOCK as usize];
                self.view.read(self.place(block), &mut found).unwrap();
                let wanted = fill(self.number << 40 | round << 8 | block);
                assert!(found == wanted, "worker {} round {round} block {block} differs", self.number);
            }
        }
    }

    fn all(&mut self, width: u64, round: u64, write: bool, sleeps: bool) {
        let deadline = Instant::now() + PATIENCE;
        let (mut pushed, mut ended) = (0, vec![false; width as usize]);
        while ended.iter().any(|ended| !ended) {
            while pushed < width && self.engine.room() > 0 {
                self.push(self.op(round << 8 | pushed, pushed, write));
                pushed += 1;
            }
            for completion in self.pass(sleeps) {
                completion.result.unwrap();
                assert_eq!(completion.token >> 8, round, "an op of another round");
                let before = std::mem::replace(&mut ended[(completion.token & 0xff) as usize], true);
                assert!(!before, "op {:#x} ended twice", completion.token);
            }
            assert!(Instant::now() < deadline, "worker {} hung in round {round}: {ended:?}", self.number);
        }
    }
}

/// Runs `body` with a worker's engine on a separate thread.
pub fn on_thread<R: Send + 'static>(
    engine: Box<dyn Engine>,
    number: u64,
    bed: &Arc<Bed>,
    body: impl FnOnce(&mut Worker) -> R + Send + 'static,
) -> JoinHandle<R> {
    let bed = Arc::clone(bed);
    std::thread::spawn(move || body(&mut Worker::start(engine, number, &bed)))
}

/// Checks that a worker can use all the room that it has seen, although another worker joined the engine since.
pub fn check_room_that_was_seen(first: Box<dyn Engine>, second: Box<dyn Engine>) {
    let bed = Bed::buffered();
    let mut first = Worker::start(first, 0, &bed);
    let seen = first.engine.room_of(first.file);
    let mut second = Worker::start(second, 1, &bed);
    (0..seen as u64).for_each(|token| first.push(first.op(token, token % 64, false)));
    assert_eq!((seen, first.engine.room_of(first.file)), (DEPTH as usize, 0));
    second.push(second.op(0, 0, false));
    second.engine.submit().unwrap();
    let (mut done, mut others) = (0, 0);
    let deadline = Instant::now() + PATIENCE;
    while done < seen || others < 1 {
        done += first.pass(false).len();
        others += second.pass(false).len();
        assert!(Instant::now() < deadline, "{done} of {seen} ops ended");
    }
    assert_eq!(first.engine.room_of(first.file), DEPTH as usize / 2);
}

/// Runs passes of a worker that has no ops of its own, until `stop`.
pub fn idle_until(worker: &mut Worker, stop: &std::sync::atomic::AtomicBool) {
    while !stop.load(std::sync::atomic::Ordering::Acquire) {
        worker.engine.submit().unwrap();
        assert!(worker.reap().is_empty(), "a completion for a worker without ops");
        worker.engine.wait(Some(Duration::from_millis(20))).unwrap();
    }
}
