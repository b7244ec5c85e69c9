//! A guest with two queues that writes, zeroes, discards, flushes and switches its cache at random. It records what it
//! sent and what the device answered.
//!
//! Each sector of a write holds the request's number, so the image shows which requests reached it.
#![allow(dead_code, missing_debug_implementations, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::time::Instant;

use disk_image::CacheMode;
use guest_mem::GuestRange;
use io_engine::{FakeHandle, Fault, Recorder, When};

use crate::rig::crash_model::{Deed, History, Request, Version};
use crate::rig::{self, FrontEnd, Guest, Options, PATIENCE, Rig, feature, header_bytes, kind, segment_bytes};

/// The features that a usual driver accepts.
pub const FEATURES: u64 = feature::USUAL | feature::CONFIG_WCE;
/// Offset of the `writeback` byte in the configuration space (virtio 1.3 §5.2.4).
const WRITEBACK: u32 = 32;
/// Requests are aligned to this, whatever the file system's block size.
const UNIT_SECTORS: u64 = 8;
const UNITS: u64 = 24;
const MAX_UNITS: u64 = 6;
const SECTORS: u64 = UNITS * UNIT_SECTORS;
const QUEUES: u16 = 2;
/// Requests in flight per queue.
const DEPTH: usize = 8;
const SLOT_BYTES: u64 = 0x1_0000;
const STEPS: usize = 120;
const _: () = assert!(is_quiet(STEPS - 1));
/// Polls without completions before calls that hang are released.
const STALLED: u32 = 200;

/// Marsaglia's xorshift64.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

/// A fault that happens once, after a step of the workload. In a [quiet](is_quiet) step it comes before the write and
/// the flush that the guest sends alone.
pub struct Mishap {
    pub step: usize,
    pub when: When,
    pub fault: Fault,
}

/// The options of the disk, and the faults.
pub struct Plan {
    pub options: Options,
    pub fake: Option<FakeHandle>,
    pub mishaps: Vec<Mishap>,
    /// Whether the guest enables and disables its cache.
    pub switches: bool,
    pub seed: u64,
}

/// Whether the guest waits for every request after this step, then sends a write and a flush alone. Therefore every
/// history has promises that no other request can have kept.
pub const fn is_quiet(step: usize) -> bool {
    step % 30 == 29
}

struct Lane {
    guest: Guest,
    /// The request in each slot of memory.
    slots: [Option<usize>; DEPTH],
}

struct Driver {
    recorder: Recorder,
    fake: Option<FakeHandle>,
    front_end: FrontEnd,
    lanes: Vec<Lane>,
    requests: Vec<Request>,
    writethrough: bool,
    /// For each request, how often the cache had been switched when it was sent.
    switches_at: Vec<u32>,
    switches: u32,
    dice: Dice,
}

/// Runs the plan and returns the history. Checks the image's final contents.
pub fn run(plan: Plan) -> History {
    let Plan { options, fake, mut mishaps, switches, seed } = plan;
    let recorder = options.recorder.clone().expect("a recorder");
    let cache = options.image.cache;
    let mut rig = Rig::start(options);
    let mut driver = Driver::new(&rig, recorder, fake, cache, seed);
    for step in 0..STEPS {
        driver.step(switches);
        if is_quiet(step) {
            driver.drain();
        }
        driver.inject(mishaps.extract_if(.., |mishap| mishap.step <= step));
        if is_quiet(step) {
            driver.flush_a_write();
        }
    }
    let history = driver.history(cache);
    drop(rig.stop());
    check_image(&rig, &history);
    history
}

impl Driver {
    fn new(rig: &Rig, recorder: Recorder, fake: Option<FakeHandle>, cache: CacheMode, seed: u64) -> Self {
        let mut front_end = rig.connect();
        front_end.negotiate(FEATURES);
        front_end.share_memory(16 * rig::MIB);
        let lane = |index| Lane { guest: front_end.start_queue(index, 256, FEATURES), slots: [None; DEPTH] };
        let lanes = (0..QUEUES).map(lane).collect();
        let writethrough = cache.starts_writethrough();
        let (requests, switches_at, switches, dice) = (vec![], vec![], 0, Dice::new(seed));
        Self { recorder, fake, front_end, lanes, requests, writethrough, switches_at, switches, dice }
    }

    fn history(self, cache: CacheMode) -> History {
        History {
            requests: self.requests,
            calls: self.recorder.records(),
            sectors: SECTORS,
            shares_errors: !cache.is_direct(),
            promises_nothing: cache.ignores_flushes(),
            end: self.recorder.mark(),
        }
    }

    fn inject(&self, mishaps: impl Iterator<Item = Mishap>) {
        mishaps.for_each(|Mishap { when, fault, .. }| {
            self.fake.as_ref().expect("an engine that can go wrong").inject(when, fault, 1);
        });
    }

    fn flush_a_write(&mut self) {
        self.send(0, kind::OUT);
        self.drain();
        self.send(0, kind::FLUSH);
        self.drain();
    }

    fn step(&mut self, may_switch: bool) {
        let queue = usize::try_from(self.dice.below(QUEUES.into())).unwrap();
        match self.dice.below(100) {
            0..55 => self.send(queue, kind::OUT),
            55..62 => self.send(queue, kind::WRITE_ZEROES),
            62..69 => self.send(queue, kind::DISCARD),
            69..80 => self.send(queue, kind::FLUSH),
            80..84 if may_switch => self.switch_cache(),
            _ => self.wait_for_one(),
        }
        if self.dice.below(2) == 0 {
            self.lanes.iter_mut().for_each(|lane| lane.guest.submit());
        }
        self.poll();
    }

    fn switch_cache(&mut self) {
        self.writethrough = !self.writethrough;
        self.switches += 1;
        let writeback = u8::from(!self.writethrough);
        assert_eq!(self.front_end.set_config(WRITEBACK, &[writeback]), 0);
    }

    fn send(&mut self, queue: usize, kind: u32) {
        while self.lanes[queue].slots.iter().all(Option::is_some) {
            self.wait_for_one();
        }
        let units = if kind == kind::FLUSH { 0 } else { 1 + self.dice.below(MAX_UNITS) };
        let first = self.dice.below(UNITS - units) * UNIT_SECTORS;
        let sectors = first..first + units * UNIT_SECTORS;
        let number = self.requests.len();
        let sent = self.recorder.mark();
        let (head, slot) = self.lanes[queue].add(kind, &sectors, number);
        self.lanes[queue].slots[slot] = Some(number);
        let token = u64::try_from(queue).unwrap() << 16 | u64::from(head);
        let deed = match kind {
            kind::OUT => Deed::Write,
            kind::FLUSH => Deed::Flush,
            _ => Deed::Zero,
        };
        self.switches_at.push(self.switches);
        self.requests.push(Request {
            deed,
            sectors,
            token,
            sent,
            acked: None,
            writethrough: self.writethrough,
        });
    }

    /// Takes completions and returns their number.
    fn poll(&mut self) -> usize {
        let mut count = 0;
        for lane in &mut self.lanes {
            while let Some(used) = lane.guest.ring.pop_used().unwrap() {
                let number = usize::try_from(used.token).unwrap();
                let ok = lane.finish(number) == 0;
                let request = &mut self.requests[number];
                request.acked = Some((self.recorder.mark(), ok));
                // A request in flight while the guest switches may be treated either way, so the guest does not rely on
                // it.
                request.writethrough &= self.switches_at[number] == self.switches;
                count += 1;
            }
        }
        count
    }

    fn is_idle(&self) -> bool {
        self.lanes.iter().all(|lane| lane.slots.iter().all(Option::is_none))
    }

    fn wait_for_one(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.guest.submit());
        let deadline = Instant::now() + PATIENCE;
        let mut polls = 0;
        while !self.is_idle() && self.poll() == 0 {
            polls += 1;
            if let Some(fake) = &self.fake
                && polls % STALLED == 0
            {
                fake.release().unwrap();
            }
            assert!(Instant::now() < deadline, "requests are not answered");
            std::thread::yield_now();
        }
    }

    fn drain(&mut self) {
        while !self.is_idle() {
            self.wait_for_one();
        }
    }
}

impl Lane {
    /// Puts a request into the ring; returns its tag and its slot.
    fn add(&mut self, kind: u32, sectors: &std::ops::Range<u64>, number: usize) -> (u16, usize) {
        let slot = self.slots.iter().position(Option::is_none).expect("a free slot");
        let base = self.base(slot);
        let bytes = (sectors.end - sectors.start) * 512;
        let data = match kind {
            kind::OUT => sector_contents(number + 1).repeat(usize::try_from(bytes / 512).unwrap()),
            kind::FLUSH => vec![],
            _ => segment_bytes(sectors.start, u32::try_from(bytes / 512).unwrap(), 0).to_vec(),
        };
        let sector = if kind == kind::OUT { sectors.start } else { 0 };
        let view = &self.guest.view;
        view.store(base, &header_bytes(kind, sector)).unwrap();
        view.store(base + 0x800, &[0xff]).unwrap();
        view.store(base + 0x1000, &data).unwrap();
        let data = GuestRange { addr: base + 0x1000, len_bytes: u32::try_from(data.len()).unwrap() };
        let header = GuestRange { addr: base, len_bytes: 16 };
        let readable: &[_] = if data.len_bytes == 0 { &[header] } else { &[header, data] };
        let status = GuestRange { addr: base + 0x800, len_bytes: 1 };
        (self.guest.ring.add(readable, &[status], number as u64).unwrap(), slot)
    }

    fn base(&self, slot: usize) -> u64 {
        self.guest.area() + slot as u64 * SLOT_BYTES
    }

    /// Frees the request's slot and returns its status.
    fn finish(&mut self, number: usize) -> u8 {
        let slot = self.slots.iter().position(|&taken| taken == Some(number)).expect("in flight");
        self.slots[slot] = None;
        let status = self.guest.bytes(self.base(slot) + 0x800, 1)[0];
        assert!(status <= 1, "status {status}");
        status
    }
}

fn sector_contents(version: Version) -> Vec<u8> {
    (version as u64).to_le_bytes().repeat(64)
}

/// The image must hold what the last requests wrote, each sector whole.
fn check_image(rig: &Rig, history: &History) {
    let image = rig.image_bytes(0, usize::try_from(SECTORS * 512).unwrap());
    for (sector, bytes) in (0..).zip(image.chunks_exact(512)) {
        let version = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
        assert!(bytes == sector_contents(version), "sector {sector} is mixed");
        assert!(history.may_read(sector, version), "sector {sector} holds request {version}");
    }
}
