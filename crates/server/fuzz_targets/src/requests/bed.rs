//! A queue, its worker and its disk. Each request passes through all of them and is then compared with the model.
//!
//! - Later runs on the same thread reuse image, memory, worker and engine, because opening them takes several times as
//!   long as a run. Each run gets a new queue, zeroed memory and the original image.
//! - A bed whose run has failed is not reused.

use std::cell::RefCell;
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use blk_server::{DiskConfig, InlineWorker, Wce};
use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestRange};
use io_engine::{EngineConfig, SyncEngine};
use rustix::event::{EventfdFlags, eventfd};
use tempfile::{NamedTempFile, TempPath};
use virtqueue::{DriverQueue, RingFeatures, RingLayout, Used};

use super::model::{Limits, Part, SECTOR, World};
use crate::guest::{Guest, memory_folder};
use crate::input::Input;

const IMAGE_SECTORS: usize = 32;
const QUEUE_SIZE: u16 = 32;
/// The ring is below this address, tables follow it, then the parts of requests.
const TABLES: u64 = 0x3000;
const AREA: u64 = 0x4000;
const REGION_BYTES: u64 = 0x6000;
const END: u64 = 2 * REGION_BYTES;
const SERIAL: &str = "fuzzed";
const LAYOUT: RingLayout = RingLayout {
    queue_size: QUEUE_SIZE,
    descriptors: GuestAddress(0),
    avail: GuestAddress(0x1000),
    used: GuestAddress(0x2000),
};
/// The ranges that a second thread may overwrite: the parts of the ring, then tables, headers and the first data.
pub(super) const SHARED: [Range<u64>; 5] =
    [0..0x200, 0x1000..0x1048, 0x2000..0x2108, TABLES..TABLES + 0x100, AREA..AREA + 0x200];
/// The bits of an input's first byte that choose the disk's settings. The others choose the ring's.
const DISK_CHOICES: u8 = 0x18;

thread_local! {
    /// One bed for each value of the bits in `DISK_CHOICES`.
    static KEPT: RefCell<Vec<(u8, Bed)>> = const { RefCell::new(Vec::new()) };
}

/// A queue, its worker, its disk, and the expected memory and image.
pub(super) struct Bed {
    pub guest: Guest,
    ring: DriverQueue,
    worker: InlineWorker,
    kick: OwnedFd,
    choices: u8,
    indirect: bool,
    disk: Vec<u8>,
    file: File,
    limits: Limits,
    /// The address for the next part of a request.
    next_addr: u64,
    _path: TempPath,
}

impl Bed {
    /// Returns a bed that is like new.
    pub fn take(choices: u8) -> Self {
        let kept = KEPT.with_borrow_mut(|kept| {
            let at = kept.iter().position(|(known, _)| *known == choices & DISK_CHOICES)?;
            Some(kept.swap_remove(at).1)
        });
        let Some(mut bed) = kept else { return Self::new(choices) };
        bed.renew(choices);
        bed
    }

    /// Keeps the bed for another run. Returns memory and image, which the run may have changed.
    pub fn put_back(self) -> Vec<u8> {
        let mut left = self.guest.now();
        left.extend_from_slice(&self.disk);
        KEPT.with_borrow_mut(|kept| kept.push((self.choices & DISK_CHOICES, self)));
        left
    }

    fn new(choices: u8) -> Self {
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
        let features = features(choices);
        let ring = DriverQueue::new(&guest.view, LAYOUT, features).expect("a ring of our own");
        let (kick, worker) = worker(image, &guest, features);
        Self {
            guest,
            ring,
            worker,
            kick,
            choices,
            indirect: choices & 4 != 0,
            disk,
            file,
            limits,
            next_addr: AREA,
            _path: path,
        }
    }

    /// A new queue in zeroed memory, and the original image.
    pub fn renew(&mut self, choices: u8) {
        // Stop first, because a queue may write to its ring while it stops.
        self.worker.stop().expect("a worker without requests");
        self.guest.clear();
        self.disk = first_contents();
        self.file.write_all_at(&self.disk, 0).expect("room for the image");
        (self.choices, self.indirect, self.next_addr) = (choices, choices & 4 != 0, AREA);
        let features = features(choices);
        self.ring = DriverQueue::new(&self.guest.view, LAYOUT, features).expect("a ring of our own");
        let memory = Arc::clone(self.guest.view.memory());
        self.worker.start_again(memory, LAYOUT, features).expect("a ring of our own");
    }

    /// Sends a request. `said`: header and data; `room`: number of bytes for data and status; `input` decides how both
    /// are cut into pieces.
    pub fn request(&mut self, input: &mut Input<'_>, said: &[u8], room: usize) {
        let Some((readable, writable)) = self.offer(input, said, room) else { return };
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("an eventfd");
        let used = self.wait();
        assert_eq!(used.token, 7);
        self.compare(&readable, &writable, used.written_bytes);
        assert!(self.ring.pop_used().expect("a ring that was kept").is_none(), "answered twice");
    }

    /// Sends a request in a ring that another thread also writes, where its result proves nothing.
    pub fn request_unchecked(&mut self, input: &mut Input<'_>, said: &[u8], room: usize) {
        if self.offer(input, said, room).is_some() {
            self.worker.serve_now();
            let _ = self.ring.pop_used();
        }
    }

    /// Offers a request if the ring has room for it. Returns its readable and writable parts.
    fn offer(&mut self, input: &mut Input<'_>, said: &[u8], room: usize) -> Option<(Vec<Part>, Vec<Part>)> {
        self.next_addr = AREA;
        let readable = self.lay_out(input, said);
        let writable = self.lay_out(input, &vec![0xee; room]);
        let ranges = |parts: &[Part]| {
            parts.iter().map(|&(addr, len_bytes)| GuestRange { addr, len_bytes }).collect::<Vec<_>>()
        };
        let added = if self.indirect {
            self.ring.add_indirect(&ranges(&readable), &ranges(&writable), GuestAddress(TABLES), 7)
        } else {
            self.ring.add(&ranges(&readable), &ranges(&writable), 7)
        };
        added.ok()?;
        self.ring.publish();
        let _ = self.ring.kick_needed();
        Some((readable, writable))
    }

    /// Waits for the result. For a flush, the worker sleeps until the engine's thread is done. If the completion is
    /// missing, the run hangs.
    fn wait(&mut self) -> Used {
        loop {
            self.worker.serve();
            if let Some(used) = self.ring.pop_used().expect("a ring that was kept") {
                return used;
            }
        }
    }

    /// Cuts `bytes` into pieces and stores them in memory. Returns their addresses, one of which may be invalid.
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

    pub fn check_image_size(&self) {
        let len = self.file.metadata().expect("the image").len();
        assert_eq!(len, self.disk.len() as u64, "the image's size");
    }

    fn compare_disk(&mut self, before: &[u8], discarded: &[Range<usize>]) {
        let mut now = vec![0; self.disk.len()];
        self.file.read_exact_at(&mut now, 0).expect("the image");
        self.check_image_size();
        // Comparing single bytes would take most of the time.
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

fn features(choices: u8) -> RingFeatures {
    RingFeatures { packed: choices & 1 != 0, event_idx: choices & 2 != 0, indirect: true }
}

/// Fills each sector with its own byte.
fn first_contents() -> Vec<u8> {
    let mut contents = vec![0; IMAGE_SECTORS * SECTOR];
    (0x80..).zip(contents.chunks_mut(SECTOR)).for_each(|(byte, sector)| sector.fill(byte));
    contents
}

fn image() -> (TempPath, File, Vec<u8>) {
    let disk = first_contents();
    let (file, path) = NamedTempFile::new_in(memory_folder()).expect("a file for the image").into_parts();
    file.write_all_at(&disk, 0).expect("room for the image");
    (path, file, disk)
}

fn worker(image: Image, guest: &Guest, features: RingFeatures) -> (OwnedFd, InlineWorker) {
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
        park: None,
    };
    let config = EngineConfig { depth: 64, threads: 1, ..EngineConfig::default() };
    let engine = Box::new(SyncEngine::new(config).expect("an engine"));
    let fd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    let (kick, call) = (fd(), fd());
    let theirs = kick.try_clone().expect("a descriptor");
    let memory = Arc::clone(guest.view.memory());
    let worker = InlineWorker::start(engine, disk, memory, LAYOUT, features, theirs, call);
    (kick, worker.expect("a worker"))
}
