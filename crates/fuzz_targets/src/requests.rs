//! `requests`: block requests of every kind and shape, one after the other, through a worker to a small image.
//!
//! `input → header, data, room, cut anywhere → ring → the worker's own loop, sync engine → image, memory, used length`
//!
//! - Every byte of the guest's memory and of the image is afterwards what the model (`requests/model.rs`) makes of it: so
//!   there is one status byte, at the end of the writable part, and nothing is written outside of either.
//! - The used length is exact.
//!
//! Not here: chains that are none (`chains.rs`).

mod model;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blk_server::{DiskConfig, InlineWorker, Wce};
use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestRange};
use io_engine::{EngineConfig, SyncEngine};
use rustix::event::{EventfdFlags, eventfd};
use tempfile::{NamedTempFile, TempPath};
use virtqueue::{DriverQueue, RingFeatures, RingLayout, Used};

use crate::guest::Guest;
use crate::input::{Input, Seed};
use model::{Limits, Part, SECTOR, World};

const IMAGE_SECTORS: usize = 32;
const QUEUE_SIZE: u16 = 32;
/// The ring lies below, tables behind it, then what requests consist of.
const TABLES: u64 = 0x3000;
const AREA: u64 = 0x4000;
const REGION_BYTES: u64 = 0x6000;
const END: u64 = 2 * REGION_BYTES;
/// Longest data of a request.
const MOST_BYTES: usize = 12 << 10;
const MOST_REQUESTS: usize = 24;
const SERIAL: &str = "fuzzed";

/// One run.
pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choices = input.u8();
    let mut bed = Bed::new(choices);
    for _ in 0..MOST_REQUESTS {
        if input.is_empty() {
            break;
        }
        bed.request(&mut input);
    }
}

/// A queue, its worker, the disk behind it, and what both are to be.
struct Bed {
    guest: Guest,
    ring: DriverQueue,
    worker: InlineWorker,
    kick: OwnedFd,
    indirect: bool,
    disk: Vec<u8>,
    file: File,
    limits: Limits,
    /// Where the next request's bytes may lie.
    next_addr: u64,
    _path: TempPath,
}

/// In memory if there is such a folder: an image is made for each run.
fn folder() -> PathBuf {
    let shared = PathBuf::from("/dev/shm");
    if shared.is_dir() { shared } else { std::env::temp_dir() }
}

impl Bed {
    fn new(choices: u8) -> Self {
        let features = RingFeatures { packed: choices & 1 != 0, event_idx: choices & 2 != 0, indirect: true };
        let cache = if choices & 8 != 0 { CacheMode::Writethrough } else { CacheMode::Writeback };
        let (path, file, disk) = image();
        let options = ImageOptions {
            cache,
            block_size: Some(512),
            discard: choices & 0x10 == 0,
            lock_timeout: Duration::ZERO,
            ..ImageOptions::new(&path)
        };
        let image = Image::open(&HostOpener, &options).expect("an image of our own");
        let limits = Limits {
            discard_sectors: image.discard_limits().map(|limits| limits.max_sectors),
            zeroes_sectors: image.write_zeroes_limits().map(|limits| limits.max_sectors),
        };
        let guest = Guest::new(&[REGION_BYTES, REGION_BYTES]);
        let layout = RingLayout {
            queue_size: QUEUE_SIZE,
            descriptors: GuestAddress(0),
            avail: GuestAddress(0x1000),
            used: GuestAddress(0x2000),
        };
        let ring = DriverQueue::new(&guest.view, layout, features).expect("a ring of our own");
        let (kick, worker) = worker(image, &guest, layout, features);
        Self {
            guest,
            ring,
            worker,
            kick,
            indirect: choices & 4 != 0,
            disk,
            file,
            limits,
            next_addr: AREA,
            _path: path,
        }
    }

    fn request(&mut self, input: &mut Input<'_>) {
        self.next_addr = AREA;
        let (said, room) = (said(input), room(input));
        let readable = self.lay_out(input, &said);
        let writable = self.lay_out(input, &vec![0xee; room]);
        let ranges = |parts: &[Part]| {
            parts.iter().map(|&(addr, len_bytes)| GuestRange { addr, len_bytes }).collect::<Vec<_>>()
        };
        let added = if self.indirect {
            self.ring.add_indirect(&ranges(&readable), &ranges(&writable), GuestAddress(TABLES), 7)
        } else {
            self.ring.add(&ranges(&readable), &ranges(&writable), 7)
        };
        if added.is_err() {
            return; // more parts than the ring has
        }
        self.ring.publish();
        let _ = self.ring.kick_needed();
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("an eventfd");
        let used = self.wait();
        assert_eq!(used.token, 7);
        self.compare(&readable, &writable, used.written_bytes);
        assert!(self.ring.pop_used().expect("a ring that was kept").is_none(), "answered twice");
    }

    /// A flush has a thread of the engine's: the worker sleeps until that is done. Who is never answered hangs here.
    fn wait(&mut self) -> Used {
        loop {
            self.worker.serve();
            if let Some(used) = self.ring.pop_used().expect("a ring that was kept") {
                return used;
            }
        }
    }

    /// Cuts `bytes` up, puts the pieces into memory, and says where; one of them may be somewhere else.
    fn lay_out(&mut self, input: &mut Input<'_>, mut bytes: &[u8]) -> Vec<Part> {
        let mut parts = Vec::new();
        let cuts = input.below(8);
        for cut in 0..=cuts {
            let most = if cut == cuts {
                bytes.len()
            } else {
                bytes.len().min(usize::from(input.u16()) % (bytes.len() + 1))
            };
            let (piece, rest) = bytes.split_at(most);
            bytes = rest;
            if piece.is_empty() {
                continue;
            }
            let len = u32::try_from(piece.len()).expect("a small request");
            let wild = input.u8();
            let addr = match wild {
                0xf0..=0xf3 => input.u64() | END,
                0xf4..=0xf7 => END - u64::from(len / 2),
                0xf8..=0xfb => REGION_BYTES - u64::from(len / 2),
                _ => self.next_addr + u64::from(wild & 7),
            };
            if addr < END {
                self.guest.store(addr, piece);
                self.next_addr = (addr + u64::from(len)).min(END - 16);
            }
            parts.push((addr, len));
        }
        parts
    }

    fn compare(&mut self, readable: &[Part], writable: &[Part], used_bytes: u32) {
        let now = self.guest.now();
        let mut memory = std::mem::take(&mut self.guest.expected);
        let before = self.disk.clone();
        let mut discarded = Vec::new();
        let mut world = World {
            memory: &mut memory,
            disk: &mut self.disk,
            discarded: &mut discarded,
            serial: SERIAL.as_bytes(),
            limits: self.limits,
        };
        let wanted = world.serve(readable, writable);
        let area = usize::try_from(AREA).expect("small");
        if now[area..] != memory[area..] {
            let at = (area..now.len()).find(|&at| now[at] != memory[at]).unwrap_or(0);
            let (is, must) = (now[at], memory[at]);
            panic!("{at:#x} holds {is:#x}, must be {must:#x}; {readable:x?} {writable:x?}");
        }
        assert_eq!(used_bytes, wanted, "used length of {readable:x?} {writable:x?}");
        self.guest.expected = memory;
        self.compare_disk(&before, &discarded);
    }

    fn compare_disk(&mut self, before: &[u8], discarded: &[std::ops::Range<usize>]) {
        let mut now = vec![0; self.disk.len()];
        self.file.read_exact_at(&mut now, 0).expect("the image");
        assert_eq!(self.file.metadata().expect("the image").len(), now.len() as u64, "the image's size");
        // Looking at each byte takes longer than everything else.
        let all = if now == self.disk { 0..0 } else { 0..now.len() };
        for at in all {
            let may = now[at] == self.disk[at]
                || (now[at] == 0 || now[at] == before[at])
                    && discarded.iter().any(|range| range.contains(&at));
            assert!(may, "byte {at:#x} of the image is {:#x}, must be {:#x}", now[at], self.disk[at]);
        }
        self.disk = now;
    }
}

fn image() -> (TempPath, File, Vec<u8>) {
    let disk: Vec<u8> =
        (0..IMAGE_SECTORS * SECTOR).map(|at| u8::try_from(at / SECTOR).unwrap_or(0) ^ 0x80).collect();
    let (file, path) = NamedTempFile::new_in(folder()).expect("a file for the image").into_parts();
    file.write_all_at(&disk, 0).expect("room for the image");
    (path, file, disk)
}

fn worker(
    image: Image,
    guest: &Guest,
    layout: RingLayout,
    features: RingFeatures,
) -> (OwnedFd, InlineWorker) {
    let disk = DiskConfig {
        name: "fuzz".into(),
        image,
        serial: SERIAL.into(),
        queues: 1,
        queue_size: QUEUE_SIZE,
        wce: Wce::Guest,
        engine: None,
        workers: None,
        coalescing: None,
        hold: None,
    };
    let config = EngineConfig { depth: 64, threads: 1, ..EngineConfig::default() };
    let engine = Box::new(SyncEngine::new(config).expect("an engine"));
    let fd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    let (kick, call) = (fd(), fd());
    let theirs = kick.try_clone().expect("a descriptor");
    let memory = Arc::clone(guest.view.memory());
    let worker = InlineWorker::start(engine, disk, memory, layout, features, theirs, call);
    (kick, worker.expect("a worker"))
}

/// Header, and what follows it.
fn said(input: &mut Input<'_>) -> Vec<u8> {
    let (shape, sector_shape) = (input.u8(), input.u8());
    let kinds = [0, 1, 4, 8, 11, 13, 1, 0];
    let kind = if shape & 0x80 != 0 { input.u32() } else { kinds[usize::from(shape & 7)] };
    let sector = if sector_shape < 0xe0 { u64::from(sector_shape) % 36 } else { input.u64() };
    let mut said = kind.to_le_bytes().to_vec();
    said.extend_from_slice(&input.u32().to_le_bytes());
    said.extend_from_slice(&sector.to_le_bytes());
    match shape >> 3 & 7 {
        // Segments.
        0..=2 if kind == 11 || kind == 13 => (0..input.below(18)).for_each(|_| said.extend(segment(input))),
        0 | 1 if kind == 1 => {
            let (sectors, byte) = (input.below(12), input.u8());
            said.extend(
                (0..sectors * SECTOR).map(|at| byte.wrapping_add(u8::try_from(at % 251).unwrap_or(0))),
            );
        }
        3 => said.truncate(input.below(17)),
        4 => said.extend(vec![input.u8(); usize::from(input.u16()) % MOST_BYTES]),
        5 => {
            let len = input.below(64);
            said.extend_from_slice(input.take(len));
        }
        _ => {}
    }
    said
}

fn segment(input: &mut Input<'_>) -> [u8; 16] {
    let shape = input.u8();
    let sector = if shape & 0x80 == 0 { u64::from(input.u8()) % 34 } else { input.u64() };
    let sectors = if shape & 0x40 == 0 { u32::from(input.u8()) % 20 } else { input.u32() };
    let flags = if shape & 0x20 == 0 { u32::from(shape & 1) } else { input.u32() };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..].copy_from_slice(&flags.to_le_bytes());
    bytes
}

/// Of the device: for data and status.
fn room(input: &mut Input<'_>) -> usize {
    match input.u8() % 8 {
        0..=2 => 1,
        3 | 4 => input.below(12) * SECTOR + 1,
        5 => input.below(64),
        6 => usize::from(input.u16()) % MOST_BYTES,
        _ => input.below(12) * SECTOR,
    }
}

/// A request of each kind in each of the bed's ways, whole and cut up, then wrong ones.
pub(crate) fn seeds() -> Vec<(String, Vec<u8>)> {
    let plain = [0, 0];
    let request = |shape: u8, sector: u8, more: &[u8], room: &[u8], cuts: &[u8]| {
        Seed::new(&[shape, sector]).and(&[0; 4]).and(more).and(room).and(cuts).bytes()
    };
    let kinds = [
        request(0, 3, &[], &[3, 2], &[plain, plain].concat()),
        request(1, 5, &[4, 0x33], &[0], &[plain, plain].concat()),
        request(2, 0, &[], &[0], &[plain, plain].concat()),
        request(3, 0, &[], &[5, 21], &[plain, plain].concat()),
        request(4, 0, &[2, 0, 8, 8, 0, 20, 3], &[0], &[plain, plain].concat()),
        request(5, 0, &[2, 1, 30, 8, 0, 2, 19], &[0], &[plain, plain].concat()),
    ];
    let cut = request(1, 7, &[3, 9], &[0], &[3, 5, 0, 1, 200, 0, 2, 0, 4, 3, 0, 0, 0]);
    let wrong = [
        request(0, 0x3f, &[], &[3, 5], &[plain, plain].concat()),
        request(0x18, 0, &[9], &[3, 1], &[plain, plain].concat()),
        request(0x81, 0, &[], &[0], &[plain, plain].concat()),
        request(1, 1, &[1, 1], &[0], &[0, 0xf4, 0, 0]),
        request(0, 1, &[], &[3, 1], &[0, 0, 0, 0xf0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ];
    let mut seeds = Vec::new();
    for choices in 0..0x20_u8 {
        let all = kinds.iter().chain([&cut]).chain(&wrong);
        let seed = all.fold(Seed::new(&[choices]), |seed, request| seed.and(request));
        seeds.push((format!("disk-{choices:02x}"), seed.bytes()));
    }
    seeds
}
