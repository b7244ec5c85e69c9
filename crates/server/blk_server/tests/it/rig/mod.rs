//! A server in this process, and a test front-end that can send anything, valid or not.
//!
//! `Rig` (image file, socket, server) ← `FrontEnd` (vhost-user messages, guest memory) ← `Guest` (one queue)
#![allow(dead_code, missing_debug_implementations, missing_docs, clippy::unwrap_used, clippy::expect_used)]

pub mod cache_bed;
pub mod crash_model;
pub mod dirty;
pub mod disks;
pub mod format;
pub mod fuse_disk;
pub mod guest;
pub mod in_flight_log;
pub mod packed_guest;
pub mod passed;
pub mod raw_guest;
pub mod rest;
pub mod small_fs;
pub mod workers;
pub mod workload;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blk_server::{
    Balance, Coalescing, DiskConfig, EngineFactory, EngineSource, ParkPolicy, Server, ServerConfig,
    SocketConfig, StopReport, Wce, WorkerOptions,
};
use disk_image::{CacheMode, HostOpener, Image, ImageOptions, Opener};
use guest_mem::{GuestAddress, GuestMemory, MemoryView, Region};
use io_engine::{EngineConfig, IoUringEngine, Recorder};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::SendFlags;
use vhost_user::{Header, Reply};
use virtqueue::{DriverQueue, RingLayout};

pub use guest::{Answer, Guest, header_bytes, wait_readable};
pub use vhost_user::code;

/// The time that a test waits for an event that must happen; only a hang takes so long.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// The time that a test watches for an event that must not happen.
pub const CALM: Duration = Duration::from_millis(200);
pub const MIB: u64 = 1 << 20;
/// The front-end's own addresses: guest addresses plus this.
pub const USER_BASE: u64 = 0x7f00_0000_0000;

pub mod feature {
    pub const RO: u64 = 1 << 5;
    pub const FLUSH: u64 = 1 << 9;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const PROTOCOL: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;
    pub const USUAL: u64 = FLUSH | MQ | DISCARD | WRITE_ZEROES | INDIRECT | EVENT_IDX | PROTOCOL | VERSION_1;
}

pub mod kind {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

/// The options of the disks; `Options::default()` is a 16 MiB image with O_DIRECT.
pub struct Options {
    pub image: ImageOptions,
    pub image_bytes: u64,
    /// An image for the first disk, instead of a new one.
    pub existing: Option<PathBuf>,
    pub queues: u16,
    pub queue_size: u16,
    pub wce: Wce,
    pub engine: Option<EngineFactory>,
    pub recorder: Option<Recorder>,
    pub folder: Option<PathBuf>,
    pub workers: usize,
    /// The number of disks, each with its own socket; only the first one has these options.
    pub disks: usize,
    /// The engine of all disks but the first, instead of the server's engine.
    pub other_engine: Option<Arc<EngineSource>>,
    /// Whether the server counts what it submits.
    pub counting: bool,
    pub balance: Balance,
    pub poll: Duration,
    pub coalescing: Option<Coalescing>,
    pub park: Option<ParkPolicy>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            image: ImageOptions { lock_timeout: Duration::ZERO, ..ImageOptions::new("") },
            image_bytes: 16 * MIB,
            existing: None,
            queues: 4,
            queue_size: 256,
            wce: Wce::Guest,
            engine: None,
            recorder: None,
            folder: None,
            workers: 1,
            disks: 1,
            other_engine: None,
            counting: false,
            balance: Balance::Off,
            poll: Duration::from_micros(50),
            coalescing: None,
            park: None,
        }
    }
}

impl Options {
    pub fn buffered() -> Self {
        Self::cached(CacheMode::Writeback)
    }

    pub fn cached(cache: CacheMode) -> Self {
        let mut options = Self::default();
        options.image.cache = cache;
        options
    }
}

pub struct Rig {
    pub folder: tempfile::TempDir,
    pub image: PathBuf,
    pub socket: PathBuf,
    pub server: Option<Server>,
}

impl Rig {
    pub fn start(options: Options) -> Self {
        // Not /tmp, which may be a tmpfs without real O_DIRECT.
        let parent = options.folder.clone().unwrap_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")));
        let folder = tempfile::Builder::new().prefix("rig-").tempdir_in(parent).unwrap();
        let image = options.existing.clone().unwrap_or_else(|| folder.path().join("disk.raw"));
        for number in usize::from(options.existing.is_some())..options.disks {
            let image = numbered(&image, number);
            File::create(image).unwrap().set_len(options.image_bytes).unwrap();
        }
        // The folder's path may be too long for a socket address.
        let name = format!("{}.sock", folder.path().file_name().unwrap().display());
        let socket = std::env::temp_dir().join(name);
        let mut rig = Self { folder, image, socket, server: None };
        rig.start_server(options);
        rig
    }

    pub fn start_server(&mut self, options: Options) {
        let opener: Arc<dyn Opener> = Arc::new(HostOpener);
        let config = EngineConfig { recorder: options.recorder, ..EngineConfig::default() };
        let depth = config.depth;
        let engine = options.engine.unwrap_or_else(|| {
            Box::new(move || Ok(Box::new(IoUringEngine::new(config.clone())?) as Box<dyn io_engine::Engine>))
        });
        let Options {
            queues,
            queue_size,
            wce,
            workers,
            disks,
            other_engine,
            balance,
            poll,
            coalescing,
            park,
            ..
        } = options;
        let disk = |number| {
            let path = numbered(&self.image, number);
            let image_options = ImageOptions { path, ..options.image.clone() };
            let image = Image::open(opener.as_ref(), &image_options).unwrap();
            let serial = image.default_serial();
            let name = format!("test{number}");
            let engine = other_engine.clone().filter(|_| number > 0);
            let disk = DiskConfig {
                name,
                image,
                serial,
                queues,
                queue_size,
                wce,
                engine,
                workers: None,
                coalescing,
                park,
            };
            let path = numbered(&self.socket, number);
            (disk, SocketConfig { path, mode: 0o600, uid: None, gid: None })
        };
        let engine = EngineSource::new("test", depth, engine);
        let server = ServerConfig { engine, workers: vec![WorkerOptions::default(); workers], poll, balance };
        let start = if options.counting { Server::start_counting } else { Server::start };
        self.server = Some(start(&server, &opener, (0..disks).map(disk).collect()).unwrap());
    }

    pub fn stop(&mut self) -> StopReport {
        self.server.take().unwrap().stop(PATIENCE)
    }

    pub fn connect(&self) -> FrontEnd {
        self.connect_to(0)
    }

    pub fn connect_to(&self, disk: usize) -> FrontEnd {
        FrontEnd::connect(&numbered(&self.socket, disk))
    }

    pub fn image_bytes(&self, offset_bytes: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        std::os::unix::fs::FileExt::read_exact_at(
            &File::open(&self.image).unwrap(),
            &mut bytes,
            offset_bytes,
        )
        .unwrap();
        bytes
    }
}

/// The file of disk `number`; the first disk's has no number.
fn numbered(path: &Path, number: usize) -> PathBuf {
    if number == 0 { path.to_owned() } else { path.with_extension(number.to_string()) }
}

/// A connection, and the memory that it shares.
pub struct FrontEnd {
    connection: vhost_user::FrontEnd,
    pub memory: Arc<GuestMemory>,
}

impl FrontEnd {
    pub fn connect(socket: &Path) -> Self {
        let connection = vhost_user::FrontEnd::connect(socket, PATIENCE).unwrap();
        Self { connection, memory: Arc::default() }
    }

    pub fn socket(&self) -> &UnixStream {
        self.connection.socket()
    }

    pub fn send(&self, code: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send_flags(code, Header::REQUEST, body, fds);
    }

    /// Ignores errors: the server may have closed the connection already; the test notices when it reads.
    pub fn send_flags(&self, code: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        let _ = self.connection.send(code, flags, body, fds);
    }

    /// Ignores errors: the server may have closed the connection already; the test notices when it reads.
    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let _ = self.connection.send_bytes(bytes, fds);
    }

    /// Sends one out-of-band byte with these descriptors.
    pub fn send_urgent(&self, fds: &[BorrowedFd<'_>]) {
        let _ = vhost_user::send(self.socket(), &[0], fds, SendFlags::OOB);
    }

    pub fn receive(&self) -> Option<Reply> {
        self.connection.receive().ok()
    }

    /// Whether the server has closed the session.
    pub fn is_closed(&self) -> bool {
        let mut byte = [0];
        match self.socket().read(&mut byte) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    pub fn ask(&self, code: u32, body: &[u8]) -> Reply {
        self.send(code, body, &[]);
        self.receive().unwrap_or_else(|| panic!("no answer to request {code}"))
    }

    pub fn ask_u64(&self, code: u32) -> u64 {
        self.ask(code, &[]).u64()
    }

    /// Sends with NEED_REPLY; 0 is success.
    pub fn acked(&self, code: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> u64 {
        self.send_flags(code, Header::REQUEST_WITH_ACK, body, fds);
        self.receive().unwrap_or_else(|| panic!("no answer to request {code}")).u64()
    }

    pub fn ok(&self, code: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.acked(code, body, fds), 0, "request {code} failed");
    }

    /// Negotiates features and protocol features as a usual front-end does.
    pub fn negotiate(&self, features: u64) {
        let offered = self.ask_u64(code::GET_FEATURES);
        let protocol = self.ask_u64(code::GET_PROTOCOL_FEATURES);
        self.send(code::SET_PROTOCOL_FEATURES, &protocol.to_ne_bytes(), &[]);
        self.ok(code::SET_OWNER, &[], &[]);
        self.ok(code::SET_FEATURES, &(features & offered).to_ne_bytes(), &[]);
    }

    /// Shares one region of `bytes` at guest address 0.
    pub fn share_memory(&mut self, bytes: u64) {
        self.share_regions(&[(0, bytes)]);
    }

    /// SET_MEM_TABLE with fresh regions of (guest address, size).
    pub fn share_regions(&mut self, regions: &[(u64, u64)]) {
        let region = |&(addr, bytes)| Arc::new(Region::from_memfd(GuestAddress(addr), bytes).unwrap());
        self.share(Arc::new(GuestMemory::new(regions.iter().map(region).collect()).unwrap()));
    }

    /// SET_MEM_TABLE with memory that a guest may be using already.
    pub fn share(&mut self, memory: Arc<GuestMemory>) {
        let regions = memory.regions();
        let mut body = u64::try_from(regions.len()).unwrap().to_ne_bytes().to_vec();
        regions.iter().for_each(|region| body.extend_from_slice(&region_bytes(region)));
        let fds: Vec<_> = regions.iter().map(|region| region.fd().as_fd()).collect();
        self.ok(code::SET_MEM_TABLE, &body, &fds);
        self.memory = memory;
    }

    pub fn add_region(&mut self, addr: u64, bytes: u64) {
        let region = Arc::new(Region::from_memfd(GuestAddress(addr), bytes).unwrap());
        self.ok(code::ADD_MEM_REG, &single_region_bytes(&region), &[region.fd().as_fd()]);
        self.memory = Arc::new(self.memory.with_region(region).unwrap());
    }

    pub fn remove_region(&mut self, addr: u64) {
        let regions = self.memory.regions().to_vec();
        let (gone, kept): (Vec<_>, Vec<_>) =
            regions.into_iter().partition(|region| region.spec().guest_addr.0 == addr);
        self.ok(code::REM_MEM_REG, &single_region_bytes(&gone[0]), &[]);
        self.memory = Arc::new(GuestMemory::new(kept).unwrap());
    }

    /// Sets up and starts queue `index` in the usual order; the features determine the ring format.
    pub fn start_queue(&self, index: u16, queue_size: u16, features: u64) -> Guest {
        let guest = self.new_guest(index, queue_size, features);
        self.announce_queue(&guest);
        self.ok(code::SET_VRING_ENABLE, &vring_state(index, 1), &[]);
        guest
    }

    /// The guest's half of a queue; sends no message.
    pub fn new_guest(&self, index: u16, queue_size: u16, features: u64) -> Guest {
        let base = u64::from(index) * 0x1_0000;
        let layout = RingLayout {
            queue_size,
            descriptors: GuestAddress(base),
            avail: GuestAddress(base + 0x8000),
            used: GuestAddress(base + 0xa000),
        };
        let features = format::ring_features(features);
        let view = MemoryView::new(Arc::clone(&self.memory));
        let ring = DriverQueue::new(&view, layout, features).unwrap();
        let fd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (kick, call, err) = (fd(), fd(), fd());
        Guest { index, layout, features, view, ring, kick, call, err, next_token: 0 }
    }

    /// Sends NUM, ADDR, BASE, CALL, ERR and KICK.
    pub fn announce_queue(&self, guest: &Guest) {
        let index = guest.index;
        self.ok(code::SET_VRING_NUM, &vring_state(index, guest.layout.queue_size.into()), &[]);
        self.ok(code::SET_VRING_BASE, &vring_state(index, guest.ring.initial_base()), &[]);
        self.ok(code::SET_VRING_ADDR, &vring_addr(index, &guest.layout), &[]);
        let word = u64::from(index).to_ne_bytes();
        self.ok(code::SET_VRING_CALL, &word, &[guest.call.as_fd()]);
        self.ok(code::SET_VRING_ERR, &word, &[guest.err.as_fd()]);
        self.ok(code::SET_VRING_KICK, &word, &[guest.kick.as_fd()]);
    }

    /// GET_VRING_BASE: stops the queue.
    pub fn stop_queue(&self, index: u16) -> u32 {
        let reply = self.ask(code::GET_VRING_BASE, &vring_state(index, 0));
        u32::from_ne_bytes(reply.body[4..8].try_into().unwrap())
    }

    /// GET_CONFIG of `bytes` bytes from `offset`.
    pub fn config(&self, offset: u32, bytes: u32) -> Vec<u8> {
        let body = config_body(offset, &vec![0; bytes as usize]);
        self.ask(code::GET_CONFIG, &body).body.get(12..).unwrap_or_default().to_vec()
    }

    pub fn set_config(&self, offset: u32, bytes: &[u8]) -> u64 {
        self.acked(code::SET_CONFIG, &config_body(offset, bytes), &[])
    }
}

/// Connects, negotiates, shares 16 MiB and starts one queue.
pub fn ready(rig: &Rig, features: u64) -> (FrontEnd, Guest) {
    let mut front_end = rig.connect();
    front_end.negotiate(features);
    front_end.share_memory(16 * MIB);
    let guest = front_end.start_queue(0, 256, features);
    (front_end, guest)
}

pub fn vring_state(index: u16, num: u32) -> [u8; 8] {
    let mut body = [0; 8];
    body[..4].copy_from_slice(&u32::from(index).to_ne_bytes());
    body[4..].copy_from_slice(&num.to_ne_bytes());
    body
}

pub fn vring_addr(index: u16, layout: &RingLayout) -> Vec<u8> {
    let mut body = vec![];
    body.extend_from_slice(&u32::from(index).to_ne_bytes());
    body.extend_from_slice(&0u32.to_ne_bytes());
    for addr in [layout.descriptors.0 + USER_BASE, layout.used.0 + USER_BASE, layout.avail.0 + USER_BASE, 0] {
        body.extend_from_slice(&addr.to_ne_bytes());
    }
    body
}

pub fn region_words(addr: u64, bytes: u64, user_addr: u64, offset: u64) -> Vec<u8> {
    [addr, bytes, user_addr, offset].into_iter().flat_map(u64::to_ne_bytes).collect()
}

pub fn region_bytes(region: &Region) -> Vec<u8> {
    let spec = region.spec();
    region_words(spec.guest_addr.0, spec.size_bytes, spec.guest_addr.0 + USER_BASE, spec.file_offset_bytes)
}

pub fn single_region_bytes(region: &Region) -> Vec<u8> {
    [vec![0; 8], region_bytes(region)].concat()
}

pub fn config_body(offset: u32, bytes: &[u8]) -> Vec<u8> {
    let mut body = vec![];
    for word in [offset, u32::try_from(bytes.len()).unwrap(), 0] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    body.extend_from_slice(bytes);
    body
}

pub fn segment_bytes(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..].copy_from_slice(&flags.to_le_bytes());
    bytes
}

/// Repeats `check` until it returns true or the time is up.
pub fn eventually(mut check: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if check() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    check()
}

pub fn fill_file(path: &Path, byte: u8, len: usize) {
    let mut file = File::create(path).unwrap();
    file.write_all(&vec![byte; len]).unwrap();
    file.sync_all().unwrap();
}
