//! A guest's load: the calling thread drives one queue of the driver library, which a worker behind a socket serves.
//!
//! `refill (push each, submit once) … completions → … → wait (arm, sleep on the call eventfd)`
//!
//! - Requests are as Linux sends them: header, data, status, through an indirect table (virtio 1.3 §5.2.6,
//!   §2.7.5.3); data is page-aligned. A failed request ends the sample.
//! - The client sleeps when nothing has completed and never polls, like a guest's driver.

use std::io;
use std::time::{Duration, Instant};

use blk_driver::{Buffer, Completion, Device, Durability, Queue, Request, Work};
use blk_server::{DEFAULT_POLL, EngineFactory, Submissions};
use disk_image::Image;
use guest_mem::GuestRange;

use super::served::Served;
use crate::experiment::SampleError;
use crate::load::{Job, Measured, Sectors, WARM_UP, cpu, mean_us, nanos};
use crate::runner::Xorshift;
use crate::stop::Stop;

/// The default queue size of QEMU's virtio-blk.
const QUEUE_SIZE: u16 = 256;
/// If nothing completes for this long, the measurement fails.
const PATIENCE: Duration = Duration::from_secs(30);
/// Largest number of completions taken per call.
const BATCH: usize = 128;

/// A connected queue and its server, ready for load.
pub(crate) struct RingLoad {
    // Field order matters: the connection must be dropped before the server.
    queue: Queue,
    data: Buffer,
    _device: Device,
    served: Served,
    job: Job,
    sectors: Sectors,
    /// The time at which the request in each slot was sent.
    sent: Vec<Instant>,
    free: Vec<u16>,
    found: Vec<Completion>,
}

/// Sums since the start.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    sent: u64,
    sending_ns: u64,
    done: u64,
    latency_ns: u64,
}

/// The values that are read at both ends of the measured interval.
struct Reading {
    at: Instant,
    sums: Sums,
    submissions: Submissions,
    process_ns: u64,
    client_ns: u64,
}

impl RingLoad {
    /// Serves `image` with `engine`, made for `depth` requests, and connects to it.
    pub fn start(engine: EngineFactory, depth: u32, image: Image, job: Job) -> io::Result<Self> {
        let data_bytes = u32::from(job.depth) * job.block_bytes;
        let served = Served::start(engine, depth, DEFAULT_POLL, QUEUE_SIZE, vec![image])?;
        let (device, queue) = served.connect(0, u64::from(data_bytes))?;
        let data = device.pool().take(data_bytes).map_err(io::Error::other)?;
        fill(&data, data_bytes);
        let (sent, free) = (vec![Instant::now(); usize::from(job.depth)], (0..job.depth).collect());
        let found = vec![Completion::default(); BATCH];
        Ok(Self { queue, data, _device: device, served, job, sectors: Sectors::of(&job), sent, free, found })
    }

    /// Runs the job, then waits for the requests in flight.
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
        Reading { at: Instant::now(), sums, submissions: self.served.submissions(), process_ns, client_ns }
    }

    fn keep_busy(&mut self, end: Instant, sums: &mut Sums, stop: &Stop) -> io::Result<()> {
        let mut now = Instant::now();
        while now < end && !stop.is_asked() {
            self.refill(now, sums)?;
            self.reap(sums)?;
            now = Instant::now();
        }
        Ok(())
    }

    fn drain(&mut self, sums: &mut Sums) -> io::Result<()> {
        while self.free.len() < usize::from(self.job.depth) {
            self.reap(sums)?;
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
            self.push(slot)?;
        }
        self.queue.submit();
        sums.sending_ns += nanos(now.elapsed());
        Ok(())
    }

    fn push(&mut self, slot: u16) -> io::Result<()> {
        let len_bytes = self.job.block_bytes;
        let addr = self.data.range().addr + u64::from(slot) * u64::from(len_bytes);
        let data = &[GuestRange { addr, len_bytes }];
        let work = Work::Write { sector: self.sectors.next(), data, durability: Durability::Cached };
        self.queue.push(&Request::new(work, u64::from(slot))).map_err(io::Error::other)
    }

    /// Takes all completions; sleeps until there is one.
    fn reap(&mut self, sums: &mut Sums) -> io::Result<()> {
        let count = self.queue.wait(&mut self.found, PATIENCE).map_err(io::Error::other)?;
        if count == 0 {
            return Err(io::Error::other(format!("no request completed for {} s", PATIENCE.as_secs())));
        }
        let now = Instant::now();
        for completion in &self.found[..count] {
            completion.result.map_err(io::Error::other)?;
            #[allow(clippy::cast_possible_truncation)] // the slot it was pushed with
            let slot = completion.token as u16;
            sums.done += 1;
            sums.latency_ns += nanos(now.saturating_duration_since(self.sent[usize::from(slot)]));
            self.free.push(slot);
        }
        Ok(())
    }
}

fn fill(data: &Buffer, data_bytes: u32) {
    let mut random = Xorshift::new(2);
    (0..data_bytes / 8).for_each(|word| data.write(word * 8, &random.next().to_le_bytes()));
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
