//! A test bed: one engine, one image, one guest memory, and the shortest way to run an op.
//!
//! See also: the cases (`cases.rs`), faults (`faults.rs`).

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use disk_image::volume::metadata::MetadataThread;
use disk_image::{CacheMode, CheckedRange, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, IoVecs, MemoryView, Region};
use io_engine::{
    Completion, Engine, EngineConfig, Event, FakeEngine, FakeHandle, FileId, FileSpec, IoUringEngine,
    KernelAge, Op, OpKind, Recorder,
};
use rustix::event::{EventfdFlags, eventfd};
use xtask::skip::{Reason, skip};

use crate::beds::{CephImage, NbdServer};

pub const FAKE: &str = "the fake works on any file system";
pub const DEPTH: u32 = 64;
pub const IMAGE_BYTES: u64 = 16 << 20;
pub const MEMORY_BYTES: u64 = 16 << 20;
/// A test that waits this long for an event has failed.
pub const PATIENCE: Duration = Duration::from_secs(300);

pub struct Bed {
    // The first field, so that the engine releases memory and files before the other fields are dropped.
    pub engine: Box<dyn Engine>,
    pub file: FileId,
    pub image: Arc<Image>,
    pub view: MemoryView,
    pub recorder: Recorder,
    pub fake: Option<FakeHandle>,
    pub events: Vec<Event>,
    _storage: Storage,
}

/// The storage, which is removed with the bed.
pub enum Storage {
    Folder {
        _folder: tempfile::TempDir,
    },
    Server {
        _server: NbdServer,
    },
    Ceph {
        _image: CephImage,
    },
    /// A writable qcow2 disk. The thread ends before its file goes.
    Writable {
        _metadata: MetadataThread,
        _folder: tempfile::TempDir,
    },
    /// The case keeps it.
    None,
    Loop {
        device: String,
        _folder: tempfile::TempDir,
    },
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Self::Loop { device, .. } = self {
            let _ = Command::new("losetup").args(["-d", device]).status();
        }
    }
}

pub fn config() -> EngineConfig {
    EngineConfig {
        depth: DEPTH,
        drain_timeout: PATIENCE,
        recorder: Some(Recorder::new()),
        ..EngineConfig::default()
    }
}

fn uring(age: KernelAge) -> (Box<dyn Engine>, EngineConfig) {
    let config = config();
    (Box::new(IoUringEngine::as_if_on(age, config.clone()).unwrap()), config)
}

/// A folder on the file system of the build, which is a real disk on most machines.
pub fn disk_folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A folder on tmpfs.
pub fn ram_folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

pub fn uring_direct() -> Option<Bed> {
    on_file(uring(KernelAge::Newest), disk_folder(), CacheMode::None)
}

pub fn uring_buffered() -> Option<Bed> {
    on_file(uring(KernelAge::Newest), disk_folder(), CacheMode::Writeback)
}

pub fn uring_tmpfs() -> Option<Bed> {
    on_file(uring(KernelAge::Newest), ram_folder(), CacheMode::Writeback)
}

pub fn uring_before_6_1() -> Option<Bed> {
    on_file(uring(KernelAge::Before6_1), disk_folder(), CacheMode::None)
}

pub fn uring_before_5_19() -> Option<Bed> {
    on_file(uring(KernelAge::Before5_19), disk_folder(), CacheMode::None)
}

pub fn uring_5_15() -> Option<Bed> {
    on_file(uring(KernelAge::Linux5_15), disk_folder(), CacheMode::None)
}

pub fn uring_loop_device() -> Option<Bed> {
    on_loop_device(uring(KernelAge::Newest), &[], |device| ImageOptions::new(device))
}

/// A device whose sectors are larger than the blocks that the guest sees. This is possible through the page cache.
pub fn uring_4k_sectors() -> Option<Bed> {
    let small_blocks = |device: &str| ImageOptions {
        cache: CacheMode::Writeback,
        block_size: Some(512),
        ..ImageOptions::new(device)
    };
    on_loop_device(uring(KernelAge::Newest), &["--sector-size", "4096"], small_blocks)
}

pub fn on_loop_device(
    engine: (Box<dyn Engine>, EngineConfig),
    arguments: &[&str],
    options: impl Fn(&str) -> ImageOptions,
) -> Option<Bed> {
    let folder = disk_folder();
    let backing = folder.path().join("backing.raw");
    std::fs::File::create(&backing).unwrap().set_len(IMAGE_BYTES).unwrap();
    let Some(device) = losetup(&backing, arguments) else {
        skip(Reason::NoLoopDevice, "");
        return None;
    };
    let options = options(&device);
    Some(make(engine, &options, Storage::Loop { device, _folder: folder }, None))
}

fn losetup(backing: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("losetup").args(["--show", "-f"]).args(arguments).arg(backing).output().ok()?;
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

pub fn fake() -> Option<Bed> {
    fake_on(CacheMode::Writeback)
}

/// The fake engine on storage whose alignment sends misaligned requests through bounce buffers.
pub fn fake_that_bounces() -> Option<Bed> {
    let bed = fake_direct()?;
    if !bed.bounces() {
        skip(Reason::NoAlignment(parent_of(&disk_folder())), "");
        return None;
    }
    Some(bed)
}

pub fn fake_direct() -> Option<Bed> {
    fake_on(CacheMode::None)
}

fn fake_on(cache: CacheMode) -> Option<Bed> {
    // Some of the fake engine's calls never end.
    let config = EngineConfig { drain_timeout: Duration::from_millis(200), ..config() };
    let (engine, handle) = FakeEngine::new(config.clone()).unwrap();
    let mut bed = on_file((Box::new(engine), config), disk_folder(), cache)?;
    bed.fake = Some(handle);
    Some(bed)
}

fn parent_of(folder: &tempfile::TempDir) -> String {
    folder.path().parent().unwrap().display().to_string()
}

pub fn on_file(
    engine: (Box<dyn Engine>, EngineConfig),
    folder: tempfile::TempDir,
    cache: CacheMode,
) -> Option<Bed> {
    let path = folder.path().join("disk.raw");
    let options = ImageOptions { create_bytes: Some(IMAGE_BYTES), cache, ..ImageOptions::new(&path) };
    if let Err(error) = Image::open(&HostOpener, &options) {
        skip(Reason::NoDirectIo(parent_of(&folder)), error);
        return None;
    }
    let options = ImageOptions { create_bytes: None, ..options };
    Some(make(engine, &options, Storage::Folder { _folder: folder }, None))
}

fn make(
    (engine, config): (Box<dyn Engine>, EngineConfig),
    options: &ImageOptions,
    storage: Storage,
    fake: Option<FakeHandle>,
) -> Bed {
    start((engine, config), Arc::new(Image::open(&HostOpener, options).unwrap()), storage, fake)
}

/// A bed on an open image.
pub fn make_on(engine: (Box<dyn Engine>, EngineConfig), image: Arc<Image>, folder: tempfile::TempDir) -> Bed {
    start(engine, image, Storage::Folder { _folder: folder }, None)
}

pub fn start(
    (mut engine, config): (Box<dyn Engine>, EngineConfig),
    image: Arc<Image>,
    storage: Storage,
    fake: Option<FakeHandle>,
) -> Bed {
    engine.start().unwrap();
    let file = engine.attach_file(spec(&image)).unwrap();
    let recorder = config.recorder.unwrap();
    Bed { engine, file, image, view: memory(), recorder, fake, events: Vec::new(), _storage: storage }
}

pub fn spec(image: &Image) -> FileSpec {
    FileSpec::of(image)
}

pub fn memory() -> MemoryView {
    let region = Region::from_memfd(GuestAddress(0), MEMORY_BYTES).unwrap();
    MemoryView::new(Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap()))
}

pub fn kick_fd() -> Arc<OwnedFd> {
    Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap())
}

pub fn kick(fd: &OwnedFd) {
    rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
}

/// The contents of a pattern's sector before the sector's number and the seed are added: each byte is 7 times its
/// offset.
const SECTOR: [u64; 64] = {
    let (mut sector, mut at) = ([0; 64], 0);
    while at < 512 {
        sector[at / 8] |= ((at as u64 * 7) & 0xff) << (8 * (at % 8));
        at += 1;
    }
    sector
};

/// `len` bytes that differ by offset and by seed. Computes eight bytes at a time, because cases in an emulated guest
/// spend most of their time here.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len.next_multiple_of(512));
    for number in 0..len.div_ceil(512) as u64 {
        let own = ((number ^ (seed * 131)) & 0xff) * 0x0101_0101_0101_0101;
        for word in &SECTOR {
            bytes.extend_from_slice(&(word ^ own).to_le_bytes());
        }
    }
    bytes.truncate(len);
    bytes
}

pub fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(4096).all(|chunk| *chunk == [0; 4096][..chunk.len()])
}

impl Bed {
    /// Keeps the storage until the bed is dropped.
    pub fn keep(&mut self, storage: Storage) {
        self._storage = storage;
    }

    pub fn block_bytes(&self) -> u64 {
        u64::from(self.image.block_size())
    }

    /// Blocks that the image's file occupies; 0 if the image is no file.
    pub fn blocks(&self) -> u64 {
        self.image.file().map_or(0, |file| file.metadata().unwrap().blocks())
    }

    pub fn is_file(&self) -> bool {
        self.image.file().is_some_and(|file| file.metadata().unwrap().is_file())
    }

    pub fn path(&self) -> PathBuf {
        self.image.path().to_owned()
    }

    /// The handle that makes the fake engine fail.
    pub fn handle(&self) -> FakeHandle {
        self.fake.clone().expect(FAKE)
    }

    /// Whether this bed needs a bounce buffer for data at an odd address.
    pub fn bounces(&self) -> bool {
        self.image.alignment().memory_bytes > 1
    }

    pub fn range(&self, offset_bytes: u64, len_bytes: u64) -> CheckedRange {
        self.image.check(offset_bytes / 512, len_bytes).unwrap()
    }

    pub fn buffers(&self, pieces: &[(u64, u64)]) -> IoVecs {
        let mut buffers = IoVecs::with_capacity(pieces.len());
        let ranges = pieces.iter().map(|&(addr, len)| GuestRange { addr, len_bytes: len as u32 });
        buffers.fill(&self.view, ranges).unwrap();
        buffers
    }

    pub fn op(&self, token: u64, kind: OpKind, pieces: &[(u64, u64)]) -> Op {
        Op { token, file: self.file, kind, buffers: self.buffers(pieces) }
    }

    pub fn push(&mut self, token: u64, kind: OpKind, pieces: &[(u64, u64)]) {
        let op = self.op(token, kind, pieces);
        self.engine.push(op).unwrap();
    }

    /// Submits, and waits for `count` completions; other events stay in `self.events`.
    pub fn finish(&mut self, count: usize) -> Vec<Completion> {
        let deadline = std::time::Instant::now() + PATIENCE;
        let mut done = Vec::new();
        self.engine.submit().unwrap();
        loop {
            let mut events = Vec::new();
            self.engine.reap(&mut events);
            for event in events {
                match event {
                    Event::Completed(completion) => done.push(completion),
                    other => self.events.push(other),
                }
            }
            if done.len() >= count {
                return done;
            }
            assert!(std::time::Instant::now() < deadline, "{} of {count} ops completed", done.len());
            self.engine.wait(Some(Duration::from_secs(1))).unwrap();
        }
    }

    /// Pushes one op and waits for it.
    pub fn run(&mut self, kind: OpKind, pieces: &[(u64, u64)]) -> Completion {
        self.push(1, kind, pieces);
        self.finish(1).remove(0)
    }

    /// Waits for an event other than a completion.
    pub fn next_event(&mut self) -> Event {
        let deadline = std::time::Instant::now() + PATIENCE;
        while self.events.is_empty() {
            assert!(std::time::Instant::now() < deadline, "no event");
            self.engine.wait(Some(Duration::from_secs(1))).unwrap();
            self.engine.reap(&mut self.events);
        }
        self.events.remove(0)
    }

    /// Waits until nothing has happened for a while. `wait` may end early without an event.
    pub fn settle(&mut self) -> Vec<Event> {
        const QUIET: Duration = Duration::from_millis(50);
        let mut events = std::mem::take(&mut self.events);
        let mut last = std::time::Instant::now();
        while last.elapsed() < QUIET {
            let before = events.len();
            self.engine.wait(Some(QUIET)).unwrap();
            self.engine.reap(&mut events);
            if events.len() > before {
                last = std::time::Instant::now();
            }
        }
        events
    }

    pub fn store(&self, addr: u64, bytes: &[u8]) {
        self.view.store(addr, bytes).unwrap();
    }

    pub fn load(&self, addr: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.view.read(addr, &mut bytes).unwrap();
        bytes
    }

    pub fn write(&mut self, offset_bytes: u64, bytes: &[u8]) {
        let len = bytes.len() as u64;
        self.store(0, bytes);
        let range = self.range(offset_bytes, len);
        let kind = OpKind::Write { range, durability: io_engine::Durability::Cached };
        assert_eq!(self.run(kind, &[(0, len)]).result, Ok(()));
    }

    /// Reads into memory that held different data before.
    pub fn read(&mut self, offset_bytes: u64, len_bytes: u64) -> Vec<u8> {
        self.store(0, &vec![0xee; len_bytes as usize]);
        let range = self.range(offset_bytes, len_bytes);
        let completion = self.run(OpKind::Read { range }, &[(0, len_bytes)]);
        assert_eq!((completion.result, completion.stored_bytes), (Ok(()), len_bytes));
        self.load(0, len_bytes)
    }
}
