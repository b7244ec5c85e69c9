//! The load of a guest: the driver half of a virtqueue on the calling thread, a server's worker behind it.
//!
//! `refill (header, add, publish, kick) … pop used (status) … arm interrupts → sleep on the call eventfd`
//!
//! - Requests as Linux sends them: header, data, status, through an indirect table (virtio 1.3 §5.2.6, §2.7.5.3);
//!   data is aligned to pages. A status other than OK ends the sample.
//! - The client sleeps when nothing is complete and never polls: as a guest's driver does.
//!
//! Not here: which engine and cache mode (`experiments/`), a guest's own costs.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blk_server::{DEFAULT_POLL, DiskConfig, LoneWorker, Submissions, Wce};
use disk_image::Image;
use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use io_engine::Engine;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use virtio_blk::{RequestHeader, Status, kind};
use virtqueue::{DriverQueue, RingFeatures, RingLayout};

use super::{Job, Measured, Sectors, WARM_UP, cpu, mean_us};
use crate::experiment::SampleError;
use crate::runner::Xorshift;
use crate::stop::Stop;

/// As QEMU's virtio-blk has it unless told otherwise.
const QUEUE_SIZE: u16 = 256;
const LAYOUT: RingLayout = RingLayout {
    queue_size: QUEUE_SIZE,
    descriptors: GuestAddress(0),
    avail: GuestAddress(0x1_0000),
    used: GuestAddress(0x2_0000),
};
const FEATURES: RingFeatures = RingFeatures { event_idx: true, indirect: true, packed: false };
/// Per slot: 16 bytes of header, one of status, a table of three descriptors, a block of data.
const HEADERS: u64 = 0x3_0000;
const STATUSES: u64 = 0x4_0000;
const TABLES: u64 = 0x5_0000;
const TABLE_BYTES: u64 = 64;
const DATA: u64 = 0x10_0000;
/// Nothing completes for this long: something is broken.
const PATIENCE: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// What the device must not have left of the last request.
const NO_STATUS: u8 = 0xff;

/// A queue with its worker, ready for load.
pub(crate) struct RingLoad {
    worker: LoneWorker,
    ring: DriverQueue,
    view: MemoryView,
    kick: OwnedFd,
    call: OwnedFd,
    job: Job,
    sectors: Sectors,
    /// When the request in each slot was sent.
    sent: Vec<Instant>,
    free: Vec<u16>,
}

/// Sums since the start.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    sent: u64,
    sending_ns: u64,
    done: u64,
    latency_ns: u64,
}

/// Everything that is read at both ends of the counted part.
struct Reading {
    at: Instant,
    sums: Sums,
    submissions: Submissions,
    process_ns: u64,
    client_ns: u64,
}

impl RingLoad {
    /// Starts the worker on `image` with `engine`.
    pub fn start(engine: Box<dyn Engine>, image: Image, job: Job) -> io::Result<Self> {
        let data_bytes = u64::from(job.depth) * u64::from(job.block_bytes);
        let region = Region::from_memfd(GuestAddress(0), DATA + data_bytes).map_err(io::Error::other)?;
        let memory = GuestMemory::new(vec![Arc::new(region)]).map_err(io::Error::other)?;
        let memory = Arc::new(memory);
        let view = MemoryView::new(Arc::clone(&memory));
        fill(&view, data_bytes)?;
        let ring = DriverQueue::new(&view, LAYOUT, FEATURES).map_err(io::Error::other)?;
        let fd = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (kick, call) = (fd()?, fd()?);
        let (name, serial) = ("lab".to_owned(), "lab".to_owned());
        let disk = DiskConfig { name, image, serial, queues: 1, queue_size: QUEUE_SIZE, wce: Wce::Guest };
        let (its_kick, its_call) = (kick.try_clone()?, call.try_clone()?);
        let worker =
            LoneWorker::start(engine, disk, memory, LAYOUT, FEATURES, its_kick, its_call, DEFAULT_POLL)?;
        let sent = vec![Instant::now(); usize::from(job.depth)];
        let free = (0..job.depth).collect();
        Ok(Self { worker, ring, view, kick, call, job, sectors: Sectors::of(&job), sent, free })
    }

    /// Runs the job, then waits for what is in flight.
    pub fn run(mut self, stop: &Stop) -> Result<Measured, SampleError> {
        let broken = |error: io::Error| SampleError::because("the load ended", &error);
        let mut sums = Sums::default();
        let warm = Instant::now() + Duration::from_secs_f64(self.job.seconds * WARM_UP);
        self.keep_busy(warm, &mut sums, stop).map_err(broken)?;
        let before = self.read(sums);
        let end = before.at + Duration::from_secs_f64(self.job.seconds);
        self.keep_busy(end, &mut sums, stop).map_err(broken)?;
        let measured = measured(&before, &self.read(sums));
        self.drain(&mut sums).map_err(broken)?;
        if stop.is_asked() { Err(SampleError::Interrupted) } else { Ok(measured) }
    }

    fn read(&self, sums: Sums) -> Reading {
        let (process_ns, client_ns) = (cpu::process_ns(), cpu::thread_ns());
        Reading { at: Instant::now(), sums, submissions: self.worker.submissions(), process_ns, client_ns }
    }

    fn keep_busy(&mut self, end: Instant, sums: &mut Sums, stop: &Stop) -> io::Result<()> {
        let mut now = Instant::now();
        while now < end && !stop.is_asked() {
            self.refill(now, sums)?;
            if !self.take_used(sums)? && !self.ring.arm_interrupts().map_err(io::Error::other)? {
                self.sleep()?;
            }
            now = Instant::now();
        }
        Ok(())
    }

    fn drain(&mut self, sums: &mut Sums) -> io::Result<()> {
        while self.ring.in_flight() > 0 {
            if !self.take_used(sums)? && !self.ring.arm_interrupts().map_err(io::Error::other)? {
                self.sleep()?;
            }
        }
        Ok(())
    }

    /// Sends a request for each free slot: one index update and at most one kick for all.
    fn refill(&mut self, now: Instant, sums: &mut Sums) -> io::Result<()> {
        if self.free.is_empty() {
            return Ok(());
        }
        sums.sent += self.free.len() as u64;
        while let Some(slot) = self.free.pop() {
            self.sent[usize::from(slot)] = now;
            self.add(slot)?;
        }
        self.ring.publish();
        if self.ring.kick_needed() {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes())?;
        }
        sums.sending_ns += nanos(now.elapsed());
        Ok(())
    }

    fn add(&mut self, slot: u16) -> io::Result<()> {
        let place = u64::from(slot);
        let header = RequestHeader { kind: kind::OUT, sector: self.sectors.next() };
        let (header_at, status_at) = (HEADERS + place * 16, STATUSES + place);
        self.view.store(header_at, &header.to_bytes()).map_err(io::Error::other)?;
        self.view.store(status_at, &[NO_STATUS]).map_err(io::Error::other)?;
        let block_bytes = self.job.block_bytes;
        let readable = [
            GuestRange { addr: header_at, len_bytes: 16 },
            GuestRange { addr: DATA + place * u64::from(block_bytes), len_bytes: block_bytes },
        ];
        let writable = [GuestRange { addr: status_at, len_bytes: 1 }];
        let table = GuestAddress(TABLES + place * TABLE_BYTES);
        self.ring.add_indirect(&readable, &writable, table, place).map_err(io::Error::other)?;
        Ok(())
    }

    /// Takes everything that is complete; returns whether there was anything.
    fn take_used(&mut self, sums: &mut Sums) -> io::Result<bool> {
        let mut now = None;
        while let Some(used) = self.ring.pop_used().map_err(io::Error::other)? {
            let now = *now.get_or_insert_with(Instant::now);
            #[allow(clippy::cast_possible_truncation)] // the slot given to `add_indirect`
            let slot = used.token as u16;
            self.check_status(slot)?;
            sums.done += 1;
            sums.latency_ns += nanos(now.saturating_duration_since(self.sent[usize::from(slot)]));
            self.free.push(slot);
        }
        Ok(now.is_some())
    }

    fn check_status(&self, slot: u16) -> io::Result<()> {
        let mut status = [NO_STATUS];
        self.view.read(STATUSES + u64::from(slot), &mut status).map_err(io::Error::other)?;
        if status[0] == Status::Ok as u8 {
            return Ok(());
        }
        Err(io::Error::other(format!("a write was answered with status {}, not 0", status[0])))
    }

    fn sleep(&self) -> io::Result<()> {
        let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
        if poll(&mut fds, Some(&PATIENCE))? == 0 {
            return Err(io::Error::other(format!("nothing completed for {} s", PATIENCE.tv_sec)));
        }
        rustix::io::read(&self.call, &mut [0; 8])?;
        Ok(())
    }
}

fn fill(view: &MemoryView, data_bytes: u64) -> io::Result<()> {
    let mut random = Xorshift::new(2);
    (0..data_bytes / 8).try_for_each(|word| {
        view.store(DATA + word * 8, &random.next().to_le_bytes()).map_err(io::Error::other)
    })
}

fn measured(before: &Reading, after: &Reading) -> Measured {
    let requests = after.sums.done - before.sums.done;
    let sent = after.sums.sent - before.sums.sent;
    let latency_ns = after.sums.latency_ns - before.sums.latency_ns;
    let client_ns = after.client_ns - before.client_ns;
    let server_ns = (after.process_ns - before.process_ns).saturating_sub(client_ns);
    Measured {
        requests,
        seconds: (after.at - before.at).as_secs_f64(),
        submit_us: after.submissions.since(before.submissions).mean_us(),
        client_submit_us: mean_us(after.sums.sending_ns - before.sums.sending_ns, sent),
        complete_ms: mean_us(latency_ns, requests).map(|us| us / 1000.0),
        cpu_us_per_io: mean_us(server_ns, requests),
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
