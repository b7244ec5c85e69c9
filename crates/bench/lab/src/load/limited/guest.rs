//! A guest's load with queues of different depths and block sizes, one thread per queue.
//!
//! `connect → a thread per queue: refill … wait … count each completion in the queue's Course → Course per queue`
//!
//! - A thread sleeps while its queue waits for the limit, like a guest's driver.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use blk_driver::{Buffer, Completion, Device, Options, PoolOptions, Queue, Request, Work};
use guest_mem::GuestRange;

use super::windows::Course;
use crate::runner::Xorshift;
use crate::stop::Stop;

const SECTOR_BYTES: u64 = 512;
/// Largest number of completions taken per call.
const BATCH: usize = 128;
/// How long a thread sleeps at most before it checks whether the sample has ended.
const LOOK: Duration = Duration::from_millis(50);

/// The load of one queue: random reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLoad {
    pub depth: u16,
    pub block_bytes: u32,
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    Requests,
    Bytes,
}

/// A sample's time, and what it counts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    /// When counting begins. Earlier completions are dropped.
    pub began: Instant,
    pub milliseconds: usize,
    pub counted: Counted,
    pub file_bytes: u64,
    pub seed: u64,
}

impl Span {
    fn end(&self) -> Instant {
        self.began + Duration::from_millis(self.milliseconds as u64)
    }
}

/// A connected disk with its queues.
pub(crate) struct Guest {
    device: Device,
    queues: Vec<(Queue, QueueLoad, Buffer)>,
}

impl Guest {
    pub fn connect(socket: &Path, loads: &[QueueLoad]) -> io::Result<Self> {
        let bytes = |load: &QueueLoad| u32::from(load.depth) * load.block_bytes;
        let pool_bytes = loads.iter().map(|load| u64::from(bytes(load))).sum();
        let options = Options {
            queues: u16::try_from(loads.len()).unwrap_or(u16::MAX),
            pool: PoolOptions { size_bytes: pool_bytes, huge_pages: false },
            ..Options::new(socket)
        };
        let (device, queues) = Device::connect(&options).map_err(io::Error::other)?;
        let with_buffer = |(queue, &load): (Queue, &QueueLoad)| {
            let buffer = device.pool().take(bytes(&load)).map_err(io::Error::other)?;
            Ok((queue, load, buffer))
        };
        let queues = queues.into_iter().zip(loads).map(with_buffer).collect::<io::Result<_>>()?;
        Ok(Self { device, queues })
    }

    /// Runs the load until the span's end. Returns a course per queue.
    pub fn run(self, span: Span, stop: &Stop) -> io::Result<Vec<Course>> {
        let Self { device: _device, queues } = self;
        std::thread::scope(|scope| {
            let runs: Vec<_> = queues
                .into_iter()
                .map(|(queue, load, buffer)| {
                    let run = Run::new(queue, load, buffer, span);
                    scope.spawn(move || run.go(stop))
                })
                .collect();
            let panicked = |_| Err(io::Error::other("a thread of the load panicked"));
            runs.into_iter().map(|run| run.join().unwrap_or_else(panicked)).collect()
        })
    }
}

/// One queue's load.
struct Run {
    queue: Queue,
    load: QueueLoad,
    data: Buffer,
    span: Span,
    random: Xorshift,
    free: Vec<u16>,
    course: Course,
}

impl Run {
    fn new(queue: Queue, load: QueueLoad, data: Buffer, span: Span) -> Self {
        let random = Xorshift::new(span.seed + 1 + u64::from(queue.index()));
        let (free, course) = ((0..load.depth).collect(), Course::new(span.began, span.milliseconds));
        Self { queue, load, data, span, random, free, course }
    }

    fn go(mut self, stop: &Stop) -> io::Result<Course> {
        let mut found = vec![Completion::default(); BATCH];
        while Instant::now() < self.span.end() && !stop.is_asked() {
            self.refill()?;
            let count = self.queue.wait(&mut found, LOOK).map_err(io::Error::other)?;
            self.take(&found[..count])?;
        }
        Ok(self.course)
    }

    fn refill(&mut self) -> io::Result<()> {
        if self.free.is_empty() {
            return Ok(());
        }
        while let Some(slot) = self.free.pop() {
            let len_bytes = self.load.block_bytes;
            let blocks = self.span.file_bytes / u64::from(len_bytes);
            let sector = self.random.below(blocks) * (u64::from(len_bytes) / SECTOR_BYTES);
            let addr = self.data.range().addr + u64::from(slot) * u64::from(len_bytes);
            let work = Work::Read { sector, data: &[GuestRange { addr, len_bytes }] };
            self.queue.push(&Request::new(work, u64::from(slot))).map_err(io::Error::other)?;
        }
        self.queue.submit();
        Ok(())
    }

    fn take(&mut self, found: &[Completion]) -> io::Result<()> {
        let now = Instant::now();
        for completion in found {
            completion.result.map_err(io::Error::other)?;
            #[allow(clippy::cast_possible_truncation)] // the slot it was pushed with
            self.free.push(completion.token as u16);
        }
        let each = match self.span.counted {
            Counted::Requests => 1,
            Counted::Bytes => u64::from(self.load.block_bytes),
        };
        if now >= self.span.began {
            self.course.add(now, each * found.len() as u64);
        }
        Ok(())
    }
}
