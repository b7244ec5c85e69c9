//! A load of all request types at random sectors, with many in flight. The model checks each read.
#![allow(dead_code)] // each test binary uses only a part

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blk_driver::{
    Buffer, Completion, Device, Durability, Event, GuestRange, Options, PoolOptions, Queue, Reconnect,
    Request, Segment, Work,
};
use fastrand::Rng;

use super::model::{Model, Read, SECTOR_BYTES, Version, content};

/// A request takes longer than this only if something is broken.
const PATIENCE: Duration = Duration::from_secs(300);
const MOST_SECTORS: u64 = 64;
const BUFFER_BYTES: u32 = 64 * 512;
/// Requests in flight per queue.
const DEPTH: usize = 24;
const QUEUES: u16 = 2;

/// Whether writes to the same sectors may be in flight at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlap {
    Yes,
    No,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rings {
    Split,
    Packed,
}

/// The request's type and sectors.
enum Doing {
    Write(Version),
    Read(Read),
    Flush,
}

/// The buffers and the state of one request.
struct Slot {
    queue: usize,
    buffer: Buffer,
    doing: Option<Doing>,
}

/// Counts of a load.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub reconnects: u32,
    /// Number of requests that the driver sent again because there was no in-flight log.
    pub sent_again: u32,
    pub ended: u64,
    /// Number of durable writes sent. The driver follows each with a flush, because the disk has a write cache.
    pub durable_writes: u64,
}

pub struct Load {
    /// The device, for callers that need more than requests.
    pub device: Arc<Device>,
    queues: Vec<Queue>,
    slots: Vec<Slot>,
    pub model: Model,
    overlap: Overlap,
    /// Sectors per block.
    unit: u64,
    /// The current limit of requests in flight. After it has fallen, completed requests must not be resubmitted.
    most: usize,
    random: Rng,
    pub seen: Seen,
    /// Whether the disk may get another size.
    pub may_grow: bool,
}

/// The time that the driver waits for a killed back-end.
const RECONNECT: Reconnect = Reconnect::For(PATIENCE);

impl Load {
    /// Connects to a new disk, which is all zeroes.
    pub fn connect(socket: std::path::PathBuf, rings: Rings, overlap: Overlap, seed: u64) -> Self {
        Self::connect_with(socket, rings, overlap, true, seed)
    }

    /// `log` is whether there is an in-flight log.
    pub fn connect_with(
        socket: std::path::PathBuf,
        rings: Rings,
        overlap: Overlap,
        log: bool,
        seed: u64,
    ) -> Self {
        let pool_bytes = u64::from(BUFFER_BYTES) * DEPTH as u64 * u64::from(QUEUES);
        let options = Options {
            queues: QUEUES,
            queue_size: 64,
            packed: Some(rings == Rings::Packed),
            pool: PoolOptions { size_bytes: pool_bytes, huge_pages: false },
            timeout: PATIENCE,
            reconnect: RECONNECT,
            in_flight_log: Some(log),
            ..Options::new(socket)
        };
        let (device, queues) = Device::connect(&options).unwrap();
        let slot = |queue| Slot { queue, buffer: device.pool().take(BUFFER_BYTES).unwrap(), doing: None };
        let slots = (0..DEPTH * usize::from(QUEUES)).map(|at| slot(at % usize::from(QUEUES))).collect();
        let unit = u64::from(device.info().block_size_bytes) / SECTOR_BYTES as u64;
        // Few sectors, so that requests in flight often overlap.
        let sectors = if overlap == Overlap::Yes { 512 } else { 4096 };
        let (model, random, seen) = (Model::new(sectors), Rng::with_seed(seed), Seen::default());
        let (device, most) = (Arc::new(device), 1);
        Self { device, queues, slots, model, overlap, unit, most, random, seen, may_grow: false }
    }

    /// Sends a few requests and takes completions.
    pub fn step(&mut self) {
        if self.random.u8(..8) == 0 {
            self.most = self.random.usize(1..=self.slots.len());
        }
        for _ in 0..8 {
            let free = self.slots.iter().position(|slot| slot.doing.is_none());
            let Some(at) = free.filter(|_| self.in_flight() < self.most) else { break };
            self.send(at);
        }
        self.queues.iter_mut().for_each(Queue::submit);
        self.take(Duration::from_micros(500));
    }

    fn random_sectors(&mut self) -> Range<u64> {
        let units = self.random.u64(1..=MOST_SECTORS / self.unit) * self.unit;
        let first = self.random.u64(0..=(self.model.sectors() - units) / self.unit) * self.unit;
        first..first + units
    }

    fn send(&mut self, at: usize) {
        let sectors = self.random_sectors();
        match self.random.u8(0..100) {
            0..35 => self.send_read(at, sectors),
            35..40 => self.push(at, Doing::Flush, Work::Flush),
            // The caller tries a different request.
            _ if self.overlap == Overlap::No && self.model.is_being_written(sectors.clone()) => {}
            40..48 => self.send_zeroes(at, sectors),
            _ => self.send_write(at, sectors),
        }
    }

    fn data(&self, at: usize, sectors: &Range<u64>) -> [GuestRange; 1] {
        let len_bytes = u32::try_from((sectors.end - sectors.start) as usize * SECTOR_BYTES).unwrap();
        [GuestRange { len_bytes, ..self.slots[at].buffer.range() }]
    }

    fn send_read(&mut self, at: usize, sectors: Range<u64>) {
        let (sector, data) = (sectors.start, self.data(at, &sectors));
        let read = self.model.begin_read(sectors);
        self.push(at, Doing::Read(read), Work::Read { sector, data: &data });
    }

    fn send_write(&mut self, at: usize, sectors: Range<u64>) {
        let (sector, data) = (sectors.start, self.data(at, &sectors));
        let version = self.model.begin_write(sectors.clone(), false);
        let bytes = content(version, sector, (sectors.end - sector) as usize);
        self.slots[at].buffer.write(0, &bytes);
        let durability = if self.random.u8(..) < 32 { Durability::Durable } else { Durability::Cached };
        self.seen.durable_writes += u64::from(durability == Durability::Durable);
        self.push(at, Doing::Write(version), Work::Write { sector, data: &data, durability });
    }

    fn send_zeroes(&mut self, at: usize, sectors: Range<u64>) {
        let count = u32::try_from(sectors.end - sectors.start).unwrap();
        let segments = [Segment { sector: sectors.start, sectors: count, unmap: self.random.bool() }];
        let version = self.model.begin_write(sectors, true);
        self.push(at, Doing::Write(version), Work::WriteZeroes { segments: &segments });
    }

    fn push(&mut self, at: usize, doing: Doing, work: Work<'_>) {
        let slot = &mut self.slots[at];
        self.queues[slot.queue].push(&Request::new(work, at as u64)).unwrap();
        slot.doing = Some(doing);
    }

    fn take(&mut self, limit: Duration) {
        let mut out = [Completion::default(); 64];
        for queue in 0..self.queues.len() {
            let ended = self.queues[queue].wait(&mut out, limit).unwrap();
            out[..ended].iter().for_each(|completion| self.settle(completion));
        }
        while let Some(event) = self.device.next_event(Duration::ZERO) {
            self.note(&event);
        }
    }

    fn note(&mut self, event: &Event) {
        match event {
            Event::Reconnected(report) => {
                self.seen.reconnects += 1;
                self.seen.sent_again += u32::from(!report.kept_rings);
            }
            Event::Disconnected => {}
            Event::ConfigChanged(_) if self.may_grow => {}
            other => panic!("{other:?}"),
        }
    }

    fn settle(&mut self, completion: &Completion) {
        assert_eq!(completion.result, Ok(()), "a request failed");
        let slot = &mut self.slots[completion.token as usize];
        self.seen.ended += 1;
        match slot.doing.take().expect("a request ended twice") {
            Doing::Write(version) => self.model.end_write(version),
            Doing::Read(read) => {
                let mut bytes = vec![0; completion.stored_bytes as usize];
                slot.buffer.read(0, &mut bytes);
                self.model.end_read(&read, &bytes).unwrap();
            }
            Doing::Flush => {}
        }
    }

    /// Zeroes all sectors of the model, for a disk that is not new.
    pub fn erase(&mut self) {
        for first in (0..self.model.sectors()).step_by(MOST_SECTORS as usize) {
            self.send_zeroes(0, first..first + MOST_SECTORS);
            self.queues[0].submit();
            self.finish();
        }
    }

    fn in_flight(&self) -> usize {
        self.slots.iter().filter(|slot| slot.doing.is_some()).count()
    }

    fn finish(&mut self) {
        let end = Instant::now() + PATIENCE;
        while self.in_flight() > 0 {
            assert!(Instant::now() < end, "{} requests never end", self.in_flight());
            self.take(Duration::from_millis(5));
        }
    }

    /// Keeps the load running until some more requests have completed.
    pub fn work(&mut self) {
        let (end, enough) = (Instant::now() + PATIENCE, self.seen.ended + 50);
        while self.seen.ended < enough {
            assert!(Instant::now() < end, "no request ends, {} are in flight", self.in_flight());
            self.step();
        }
    }

    /// Waits for all requests, then reads all sectors.
    pub fn verify(&mut self) {
        self.finish();
        for first in (0..self.model.sectors()).step_by(MOST_SECTORS as usize) {
            self.send_read(0, first..first + MOST_SECTORS);
            self.queues[0].submit();
            self.finish();
        }
    }
}
