//! One thread of a job: keeps `iodepth` requests in flight until the work or the time is used up, and measures.
//!
//! `choose (direction, block, rate) → push … submit (slat ends) → reap (clat ends) → count`
//!
//! - Reads the clock once at each end of a submission, and once per poll of the completions, as often as fio.
//! - Polls for completions when nothing more can be submitted. A poll returns at most as many completions as a
//!   submission has requests: one for files. fio does the same, so its latencies include the time until the poll.
//! - No request may take longer than the client's patience: an unanswered request ends the run with an error.
//! - With verify, a request waits while another on the same block is in flight. After the work, all written blocks are
//!   read back, uncounted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::offsets::{Direction, Offsets};
use super::pace::Pace;
use super::verify::{Mismatch, Verify};
use crate::job::{Job, Span};
use crate::measured::cpu::CpuTime;
use crate::measured::{Measured, QueueCounts, batch_step, depth_step};
use crate::stop::Stop;
use crate::target::port::{Ask, Done, Io, Port, PortError};

/// How long a thread sleeps before it checks the clock and the stop request.
const LOOK: Duration = Duration::from_millis(100);

/// Why a thread ended early.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Failure {
    /// A request failed.
    #[error("{what} at offset {offset_bytes}: {why}")]
    Request {
        /** Read, write or flush. */
        what: &'static str,
        /** Offset of the request. */
        offset_bytes: u64,
        /** The target's error. */
        why: String,
    },
    /// A request was not answered.
    #[error("{what} at offset {offset_bytes} was not answered for {seconds} s: the target hangs")]
    Silence {
        /** Read, write or flush. */
        what: &'static str,
        /** Offset of the request. */
        offset_bytes: u64,
        /** Time since the request was sent. */
        seconds: f64,
    },
    /// A block differs from what was written.
    #[error(transparent)]
    Verify(#[from] Mismatch),
    /// The target as a whole failed.
    #[error("{0}")]
    Target(String),
}

impl From<PortError> for Failure {
    fn from(error: PortError) -> Self {
        Self::Target(error.0)
    }
}

/// The counters of a running thread, which other threads can read. Only the thread itself writes them.
#[derive(Debug, Default)]
#[repr(align(128))] // its own cache line, and the adjacent one that is prefetched with it
pub(crate) struct Live {
    pub bytes: [AtomicU64; 2],
    pub ios: [AtomicU64; 2],
}

/// State that all threads of a run share.
#[derive(Clone, Copy)]
pub(crate) struct Common<'r> {
    pub job: &'r Job,
    pub stop: &'r Stop,
    /// Set if a thread has failed.
    pub failed: &'r AtomicBool,
    pub poll: bool,
    pub patience: Duration,
    /// Requests per submission.
    pub batch: u32,
}

/// The state of one slot.
#[derive(Clone, Copy, Debug)]
struct Slot {
    ask: Ask,
    offset_bytes: u64,
    start: Instant,
    issued: Instant,
    in_flight: bool,
}

/// The next request.
#[derive(Clone, Copy, Debug)]
struct Next {
    ask: Ask,
    offset_bytes: u64,
}

pub(crate) struct Worker<'r> {
    common: Common<'r>,
    live: &'r Live,
    port: Box<dyn Port>,
    offsets: Offsets,
    pace: Pace,
    verify: Option<Verify>,
    /// During the read-back: the blocks that are still to be read.
    script: Option<VecDeque<u64>>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Slots whose requests were pushed, but wait for room.
    unissued: VecDeque<u32>,
    done: Vec<Done>,
    /// Requests that have completed, but were not polled yet: a poll returns at most one batch, as in fio.
    backlog: VecDeque<Done>,
    in_flight: usize,
    /// Transfers left to do.
    left: u64,
    /// Writes since the last flush.
    unsynced: u32,
    /// The next request, which was chosen but is not possible yet.
    kept: Option<Next>,
    /// When the rate allows the next request.
    due: Option<Instant>,
    end: Option<Instant>,
    /// When this thread last checked for requests without an answer.
    looked: Instant,
    measured: Measured,
}

impl<'r> Worker<'r> {
    pub fn new(common: Common<'r>, clone: u32, span: Span, live: &'r Live, port: Box<dyn Port>) -> Self {
        let job = common.job;
        let now = Instant::now();
        let idle = Slot { ask: Ask::Read, offset_bytes: 0, start: now, issued: now, in_flight: false };
        let only_reads = !job.pattern.writes();
        Self {
            common,
            live,
            port,
            offsets: Offsets::new(job, clone, span),
            pace: Pace::new(job.rate, job.block_bytes),
            verify: job.verify.then(|| Verify::new(job.seed, clone, job.block_bytes, only_reads)),
            script: None,
            slots: vec![idle; job.depth as usize],
            free: (0..job.depth).rev().collect(),
            unissued: VecDeque::with_capacity(job.depth as usize),
            done: Vec::with_capacity(job.depth as usize),
            backlog: VecDeque::with_capacity(job.depth as usize),
            in_flight: 0,
            left: if job.time_based { u64::MAX } else { span.blocks.saturating_mul(job.loops.into()) },
            unsynced: 0,
            kept: None,
            due: None,
            end: None,
            looked: now,
            measured: Measured::default(),
        }
    }

    /// Fills every buffer, so that writes are not all zeroes.
    pub fn prepare(&mut self, clone: u32) -> Result<(), Failure> {
        if !self.common.job.pattern.writes() {
            return Ok(());
        }
        let mut random = fastrand::Rng::with_seed(self.common.job.seed ^ (u64::from(clone) << 32));
        let mut block = vec![0; self.common.job.block_bytes as usize];
        for slot in 0..self.common.job.depth {
            random.fill(&mut block);
            self.port.fill(slot, &block)?;
        }
        Ok(())
    }

    /// Works from `start` on. Returns what was measured even if the thread failed.
    pub fn run(mut self, start: Instant) -> (Measured, QueueCounts, Result<(), Failure>) {
        let (cpu, counts) = (CpuTime::of_thread(), self.port.counts());
        self.end = self.common.job.runtime.map(|runtime| start + runtime);
        self.pace.begin(start);
        let mut result = self.work();
        self.measured.runtime = start.elapsed();
        self.measured.job_runtime = self.measured.runtime;
        self.measured.cpu = CpuTime::of_thread().since(&cpu);
        let counts = self.port.counts().since(&counts);
        if result.is_ok() && !self.common.stop.is_asked() {
            result = self.read_back();
        }
        (self.measured, counts, result)
    }

    /// After the work, reads back everything that was written.
    fn read_back(&mut self) -> Result<(), Failure> {
        let Some(verify) = self.verify.as_ref().filter(|_| self.common.job.pattern.writes()) else {
            return Ok(());
        };
        let script: VecDeque<u64> = verify.offsets().into();
        (self.left, self.end, self.kept) = (script.len() as u64, None, None);
        self.script = Some(script);
        self.pace = Pace::default();
        self.work()
    }

    fn work(&mut self) -> Result<(), Failure> {
        let mut now = Instant::now();
        while !self.is_over(now) {
            let pushed = self.fill_up(now)?;
            if self.free.is_empty() || pushed == 0 || !self.unissued.is_empty() {
                self.reap(pushed)?;
            }
            now = Instant::now();
        }
        // Clears the deadlines, which have passed, so that they do not wake the wait for requests in flight.
        (self.end, self.due) = (None, None);
        while self.in_flight > 0 {
            self.submit()?;
            self.reap(0)?;
        }
        Ok(())
    }

    fn is_over(&self, now: Instant) -> bool {
        self.left == 0 && self.kept.is_none()
            || self.end.is_some_and(|end| now >= end)
            || self.common.stop.is_asked()
            || self.common.failed.load(Relaxed)
    }

    /// Pushes and submits up to one batch; returns how many requests it pushed.
    fn fill_up(&mut self, now: Instant) -> Result<usize, Failure> {
        self.due = None;
        let mut pushed = 0;
        while pushed < self.common.batch as usize
            && let Some(&slot) = self.free.last()
            && let Some(next) = self.choose(now)
        {
            self.free.pop();
            self.push(slot, next, now)?;
            pushed += 1;
        }
        if pushed > 0 || !self.unissued.is_empty() {
            self.submit()?;
        }
        Ok(pushed)
    }

    /// Returns `None` if no request is possible now.
    #[inline]
    fn choose(&mut self, now: Instant) -> Option<Next> {
        let job = self.common.job;
        if job.fsync > 0 && self.unsynced >= job.fsync {
            self.unsynced = 0;
            return Some(Next { ask: Ask::Flush, offset_bytes: 0 });
        }
        let next = match self.kept.take() {
            Some(next) => next,
            None => self.draw()?,
        };
        if !self.is_possible(next, now) {
            self.kept = Some(next);
            return None;
        }
        Some(next)
    }

    #[inline]
    fn draw(&mut self) -> Option<Next> {
        self.left = self.left.checked_sub(1)?;
        if let Some(script) = &mut self.script {
            return script.pop_front().map(|offset_bytes| Next { ask: Ask::Read, offset_bytes });
        }
        let direction = self.offsets.direction();
        let ask = if direction == Direction::Read { Ask::Read } else { Ask::Write };
        Some(Next { ask, offset_bytes: self.offsets.next(direction) })
    }

    #[inline]
    fn is_possible(&mut self, next: Next, now: Instant) -> bool {
        if self.verify.as_ref().is_some_and(|verify| !verify.is_free(next.offset_bytes)) {
            return false;
        }
        let direction = if next.ask == Ask::Read { Direction::Read } else { Direction::Write };
        match self.pace.take(direction, now) {
            Ok(()) => true,
            Err(due) => {
                self.due = Some(due);
                false
            }
        }
    }

    #[inline]
    fn push(&mut self, slot: u32, next: Next, now: Instant) -> Result<(), Failure> {
        let Next { ask, offset_bytes } = next;
        match (&mut self.verify, ask) {
            (Some(verify), Ask::Read) => verify.begin_read(offset_bytes),
            (Some(verify), Ask::Write) => self.port.fill(slot, verify.begin_write(offset_bytes))?,
            _ => {}
        }
        self.port.push(Io { slot, ask, offset_bytes })?;
        self.slots[slot as usize] = Slot { ask, offset_bytes, start: now, issued: now, in_flight: true };
        self.unissued.push_back(slot);
        self.in_flight += 1;
        self.unsynced += u32::from(ask == Ask::Write);
        self.measured.depths[depth_step(self.in_flight)] += 1;
        Ok(())
    }

    /// Submits, and records which requests started.
    fn submit(&mut self) -> Result<(), Failure> {
        let started = self.port.submit()?;
        if started == 0 {
            return Ok(());
        }
        self.measured.submits[batch_step(started)] += 1;
        let counted = self.script.is_none();
        if self.port.is_synchronous() {
            // The call did all the work, so there is no separate submission time.
            self.unissued.clear();
            return Ok(());
        }
        let now = Instant::now();
        for slot in self.unissued.drain(..started.min(self.unissued.len())) {
            let slot = &mut self.slots[slot as usize];
            slot.issued = now;
            if let Some(direction) = direction(slot.ask).filter(|_| counted) {
                self.measured.directions[direction].slat.add(nanos(slot.start, now));
            }
        }
        Ok(())
    }

    /// Takes completions; sleeps until one arrives if there is nothing else to do.
    fn reap(&mut self, pushed: usize) -> Result<(), Failure> {
        let limit = self.limit();
        if self.in_flight == 0 {
            if pushed == 0 {
                std::thread::sleep(limit.min(LOOK));
            }
            return Ok(());
        }
        if self.backlog.is_empty() {
            self.port.reap(&mut self.done, (!self.common.poll).then_some(limit))?;
            self.backlog.extend(self.done.drain(..));
        }
        let now = Instant::now();
        if now.saturating_duration_since(self.looked) > LOOK {
            self.looked = now;
            self.check_patience(now)?;
        }
        if self.backlog.is_empty() {
            return Ok(());
        }
        let taken = self.backlog.len().min(self.common.batch as usize);
        self.measured.completes[batch_step(taken)] += 1;
        for _ in 0..taken {
            let Some(done) = self.backlog.pop_front() else { break };
            self.complete(done, now)?;
        }
        self.tell();
        Ok(())
    }

    fn limit(&self) -> Duration {
        let next = [self.due, self.end.filter(|_| self.script.is_none())].into_iter().flatten().min();
        next.map_or(LOOK, |at| {
            at.saturating_duration_since(Instant::now()).clamp(Duration::from_micros(1), LOOK)
        })
    }

    #[inline]
    fn complete(&mut self, done: Done, now: Instant) -> Result<(), Failure> {
        let Some(slot) = self.slots.get_mut(done.slot as usize).filter(|slot| slot.in_flight) else {
            return Err(Failure::Target(format!("slot {} completed twice", done.slot)));
        };
        slot.in_flight = false;
        let Slot { ask, offset_bytes, start, issued, .. } = *slot;
        self.in_flight -= 1;
        self.free.push(done.slot);
        if let Some(verify) = &mut self.verify
            && ask == Ask::Write
        {
            verify.end_write(offset_bytes, done.result.is_ok());
        }
        done.result.map_err(|why| Failure::Request { what: word(ask), offset_bytes, why })?;
        if self.script.is_none() {
            self.count(ask, start, issued, now);
        }
        self.check(done.slot, ask, offset_bytes)
    }

    #[inline]
    fn count(&mut self, ask: Ask, start: Instant, issued: Instant, now: Instant) {
        let Some(direction) = direction(ask) else {
            self.measured.sync.add(nanos(start, now));
            return;
        };
        let measured = &mut self.measured.directions[direction];
        measured.ios += 1;
        measured.bytes += u64::from(self.common.job.block_bytes);
        measured.clat.add(nanos(issued, now));
        measured.lat.add(nanos(start, now));
    }

    #[inline]
    fn check(&mut self, slot: u32, ask: Ask, offset_bytes: u64) -> Result<(), Failure> {
        let Some(verify) = self.verify.as_mut().filter(|_| ask == Ask::Read) else { return Ok(()) };
        let mut copied = Ok(());
        let checked = verify.end_read(offset_bytes, |block| copied = self.port.read(slot, block));
        copied?;
        self.measured.verified_blocks += u64::from(checked?);
        Ok(())
    }

    /// Publishes this thread's progress.
    #[inline]
    fn tell(&self) {
        for (place, direction) in self.measured.directions.iter().enumerate() {
            // Relaxed: figures for people, each valid on its own.
            self.live.bytes[place].store(direction.bytes, Relaxed);
            self.live.ios[place].store(direction.ios, Relaxed);
        }
    }

    #[cold]
    fn check_patience(&self, now: Instant) -> Result<(), Failure> {
        let oldest = self.slots.iter().filter(|slot| slot.in_flight).min_by_key(|slot| slot.start);
        match oldest.filter(|slot| now.saturating_duration_since(slot.start) > self.common.patience) {
            Some(slot) => Err(Failure::Silence {
                what: word(slot.ask),
                offset_bytes: slot.offset_bytes,
                seconds: self.common.patience.as_secs_f64(),
            }),
            None => Ok(()),
        }
    }
}

fn direction(ask: Ask) -> Option<usize> {
    match ask {
        Ask::Read => Some(Direction::Read.index()),
        Ask::Write => Some(Direction::Write.index()),
        Ask::Flush => None,
    }
}

fn word(ask: Ask) -> &'static str {
    match ask {
        Ask::Read => "read",
        Ask::Write => "write",
        Ask::Flush => "flush",
    }
}

#[inline]
fn nanos(from: Instant, to: Instant) -> u64 {
    u64::try_from(to.saturating_duration_since(from).as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// A port that answers nothing until some time has passed.
    struct Late {
        from: Instant,
        held: Vec<u32>,
        looks: Rc<Cell<u32>>,
    }

    impl Port for Late {
        fn push(&mut self, io: Io) -> Result<(), PortError> {
            self.held.push(io.slot);
            Ok(())
        }

        fn submit(&mut self) -> Result<usize, PortError> {
            Ok(self.held.len())
        }

        fn reap(&mut self, done: &mut Vec<Done>, limit: Option<Duration>) -> Result<(), PortError> {
            self.looks.set(self.looks.get() + 1);
            std::thread::sleep(limit.unwrap_or(LOOK));
            if Instant::now() >= self.from {
                done.extend(self.held.drain(..).map(|slot| Done { slot, result: Ok(()) }));
            }
            Ok(())
        }

        fn fill(&mut self, _: u32, _: &[u8]) -> Result<(), PortError> {
            Ok(())
        }

        fn read(&self, _: u32, _: &mut [u8]) -> Result<(), PortError> {
            Ok(())
        }
    }

    #[test]
    fn requests_that_outlast_the_run_are_waited_for_asleep() {
        let runtime = Duration::from_millis(20);
        let job = Job { runtime: Some(runtime), time_based: true, ..Job::default() };
        let (stop, failed, live) = (Stop::default(), AtomicBool::new(false), Live::default());
        let patience = Duration::from_secs(60);
        let common = Common { job: &job, stop: &stop, failed: &failed, poll: false, patience, batch: 1 };
        let (start, looks) = (Instant::now(), Rc::default());
        let port = Late { from: start + 10 * runtime, held: Vec::new(), looks: Rc::clone(&looks) };
        let worker = Worker::new(common, 0, job.span(0, 1 << 20), &live, Box::new(port));
        let (measured, _, result) = worker.run(start);
        assert_eq!((result, measured.directions[0].ios), (Ok(()), 1));
        assert!(looks.get() < 100, "{} looks", looks.get());
    }
}
