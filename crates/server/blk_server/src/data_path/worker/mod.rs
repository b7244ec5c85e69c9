//! A worker: one thread with one event loop that owns its engines and its queues.
//!
//! [`Worker::pass`] follows the eight steps of ARCHITECTURE.md: it takes available chains, submits them with one system
//! call, reaps completions, publishes each used index once, and signals each call fd at most once. After work the
//! worker polls for a while (`poller.rs`). Then it enables kicks, checks once more, and sleeps in the engine, where
//! kicks, completions and commands wake it.
//!
//! - A pass checks only *active* queues. A queue that stays empty enables its kicks and rests until one arrives.
//! - Other threads send [`Command`]s to the worker and share no state with it.
//! - A disk's queues may be on several workers, and move between them (`worker/commands.rs`).

pub(crate) mod balancer_wakeup;
pub(crate) mod buffers;
pub(crate) mod command;
pub(crate) mod poller;
pub(crate) mod submissions;
pub(crate) mod timed_passes;
pub(crate) mod timers;
pub(crate) mod turn;
pub(crate) mod worker_options;
pub(crate) mod worker_thread;
pub(crate) mod workers;

mod commands;
mod engines;
mod gates;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use guest_mem::{GuestMemory, sigbus};
use io_engine::{Completion, Event, WatchToken};
use tracing::error;

use crate::data_path::counters::WorkerCounters;
use crate::data_path::counters::WorkerMeter;
use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::disk::session_link::EndReason;
use crate::data_path::queue::submit_context::SubmitContext;
use crate::data_path::queue::{Done, Queue, TimeSample};
use crate::data_path::worker::balancer_wakeup::{BalancerWakeup, BusyWatch};
use crate::data_path::worker::command::Command;
use crate::data_path::worker::poller::Poller;
use crate::data_path::worker::submissions::SubmissionMeter;
use crate::data_path::worker::timed_passes::{MEAN_GAP, TimedPasses};
use crate::data_path::worker::timers::{Timer, Timers};
use crate::data_path::worker::turn::Turns;
use crate::data_path::worker::worker_options::WorkerId;
use crate::host::clock::process_ns;
use engines::{ENGINE, Engines};

/// Number of empty passes after which a queue enables its kicks and rests.
const IDLE_PASSES: u32 = 64;
/// How often a worker with requests in flight checks for stuck ones.
const STUCK_CHECK: Duration = Duration::from_secs(10);
/// Watch token of the worker's wakeup fd. Queue numbers have 32 bits, so they never equal it.
const WAKEUP: WatchToken = WatchToken(1 << 32);

/// A queue and the worker's state for it.
struct WorkerQueue {
    queue: Queue,
    /// Index of its engine.
    engine: usize,
    /// The index of its disk in `Turns`.
    disk: usize,
    active: bool,
    /// The worker's list of gated queues contains it.
    is_gated: bool,
    idle_passes: u32,
    /// Commands to answer when the queue [is quiet](Queue::is_quiet).
    stop: Option<SyncSender<u32>>,
    leave: Option<SyncSender<Box<Queue>>>,
    memory: Option<NewMemory>,
}

impl WorkerQueue {
    fn new(queue: Queue, engine: usize, disk: usize) -> Self {
        let (active, is_gated, idle_passes) = (false, false, 0);
        Self { queue, engine, disk, active, is_gated, idle_passes, stop: None, leave: None, memory: None }
    }

    /// Whether a command waits until the queue [is quiet](Queue::is_quiet).
    fn is_awaited(&self) -> bool {
        self.stop.is_some() || self.leave.is_some() || self.memory.is_some()
    }

    /// Counts a pass in which the ring was empty. Returns whether the queue rests from now on.
    fn rests(&mut self) -> bool {
        self.idle_passes = self.idle_passes.saturating_add(1);
        if self.idle_passes <= IDLE_PASSES || self.queue.waits_for_room() {
            return false;
        }
        self.idle_passes = 0;
        if self.queue.gate_opens().is_some() {
            self.active = false;
            return true;
        }
        self.active = self.queue.enable_kicks();
        if self.active {
            self.queue.disable_kicks();
        }
        !self.active
    }
}

/// A queue's new memory table, until the queue [is quiet](Queue::is_quiet).
struct NewMemory {
    memory: Arc<GuestMemory>,
    done: SyncSender<()>,
}

pub(crate) struct Worker {
    engines: Engines,
    commands: Receiver<Command>,
    wakeup: Arc<OwnedFd>,
    queues: Vec<Option<WorkerQueue>>,
    /// The active queues, by number.
    turns: Turns,
    /// Queues that took requests or got completions in this pass, by number.
    touched: Vec<u32>,
    /// Queues that rest until their gate opens, by number.
    gated: Vec<u32>,
    events: Vec<Event>,
    poller: Poller,
    seen_faults: u64,
    timers: Timers,
    timed: TimedPasses,
    counted: WorkerCounters,
    counters: Arc<WorkerMeter>,
    /// The meter of a server that measures its request path.
    meter: Option<Arc<SubmissionMeter>>,
    /// Measures busy time for the balancer; `None` if the server does not balance queues.
    balance: Option<BusyWatch>,
    quit: bool,
}

impl Worker {
    /// Makes a worker and starts its base engine. Call this on the worker's thread.
    pub(crate) fn new(
        id: WorkerId,
        base: Arc<EngineSource>,
        commands: Receiver<Command>,
        wakeup: Arc<OwnedFd>,
        poll: Duration,
    ) -> std::io::Result<Self> {
        let depth = usize::try_from(base.depth).unwrap_or(usize::MAX);
        let mut engines = Engines::start(id, base)?;
        engines.base().watch(Arc::clone(&wakeup), WAKEUP)?;
        let mut timers = Timers::default();
        timers.set(Timer::StuckCheck, Some(Instant::now() + STUCK_CHECK));
        Ok(Self {
            engines,
            commands,
            wakeup,
            queues: Vec::new(),
            turns: Turns::default(),
            touched: Vec::new(),
            gated: Vec::new(),
            events: Vec::with_capacity(depth + 64),
            poller: Poller::new(poll),
            seen_faults: sigbus::faults(),
            timers,
            timed: TimedPasses::new(id),
            counted: WorkerCounters::default(),
            counters: Arc::default(),
            meter: None,
            balance: None,
            quit: false,
        })
    }

    /// Sets the worker's counters, and the meter of the time until requests reach the kernel.
    pub(crate) fn with_meters(
        mut self,
        counters: Arc<WorkerMeter>,
        meter: Option<Arc<SubmissionMeter>>,
    ) -> Self {
        counters.runs_here();
        self.counters = counters;
        self.meter = meter;
        self
    }

    /// Sets the event with which the worker wakes the balancer when it is busy.
    pub(crate) fn with_balancer_wakeup(mut self, balancer_wakeup: Option<Arc<BalancerWakeup>>) -> Self {
        self.balance = balancer_wakeup.map(|wakeup| {
            let watch = BusyWatch::new(wakeup, Instant::now());
            self.timers.set(Timer::BusyCheck, Some(watch.next_check()));
            watch
        });
        self
    }

    pub(crate) fn run(&mut self) {
        while !self.quit {
            let now = Instant::now();
            if self.pass(now) {
                self.poller.progressed(now);
            } else if self.keeps_polling(now) {
                std::hint::spin_loop();
            } else if !self.arm() {
                self.sleep();
            }
        }
    }

    /// Whether busy polling prevents sleep: then a worker with queues never sleeps.
    fn keeps_polling(&self, now: Instant) -> bool {
        self.poller.keeps_polling(now) && !(self.poller.is_busy() && self.turns.is_empty())
    }

    /// Does steps 2 to 8 for all available work. Returns whether there was any.
    #[inline]
    pub(crate) fn pass(&mut self, now: Instant) -> bool {
        let timed = self.timed.is_due(self.counted.busy_passes);
        let taken = self.take_requests(now); // 2–5: chains to ops
        self.submit(); // 5: one system call for the whole batch
        let submitted = (timed || self.meter.is_some()).then(Instant::now);
        if let (Some(meter), Some(submitted)) = (&self.meter, submitted) {
            meter.note(submitted - now, taken);
        }
        let completed = self.reap(now, taken, submitted); // 6–7: completions to the used rings
        let sample = self.note_pass(now, submitted.filter(|_| timed), taken, completed);
        self.publish(sample, now); // 8: used index and call fd, once per queue
        if sigbus::faults() != self.seen_faults {
            self.end_faulted_sessions();
        }
        if self.timers.is_any_due(now) {
            self.run_timers(now);
        }
        taken > 0 || completed > 0
    }

    /// Returns the number of requests.
    #[inline]
    fn take_requests(&mut self, now: Instant) -> usize {
        let mut all = 0;
        let mut pass = self.turns.begin();
        while let Some(id) = self.turns.next(&mut pass) {
            let Some(Some(entry)) = self.queues.get_mut(id as usize) else {
                self.turns.rest(&mut pass);
                continue;
            };
            let Some(slot) = self.engines.get_mut(entry.engine) else {
                self.turns.rest(&mut pass);
                continue;
            };
            let engine = &mut *slot.engine;
            let before = entry.queue.in_engine();
            let room = engine.room_of(entry.queue.file);
            let mut context = SubmitContext {
                engine,
                room,
                pool: &mut slot.pool,
                now,
                now_ns: 0,
                budget: &mut pass.budget,
            };
            let taken = entry.queue.take_requests(&mut context);
            slot.in_flight += entry.queue.in_engine() - before;
            if taken > 0 {
                all += taken;
                entry.idle_passes = 0;
                // The pass also publishes requests that were answered without the engine.
                self.touched.push(id);
            } else if !self.poller.is_busy() && entry.rests() {
                self.turns.rest(&mut pass);
                entry.note_gate(id, &mut self.gated, &mut self.timers);
            }
        }
        all
    }

    #[inline]
    fn submit(&mut self) {
        if let Err(error) = self.engines.submit() {
            self.engine_failed(&error);
        }
    }

    /// Returns the number of events, plus work without an event.
    #[inline]
    fn reap(&mut self, now: Instant, taken: usize, submitted: Option<Instant>) -> usize {
        self.engines.reap(&mut self.events);
        let mut events = std::mem::take(&mut self.events);
        let count = events.len() + self.engines.take_unseen_work();
        if events.is_empty() {
            self.events = events;
            return count;
        }
        // Requests that this pass took may be complete already, so its beginning would be too early.
        let at = if taken > 0 { submitted.unwrap_or_else(Instant::now) } else { now };
        let done = Done { now, ns: process_ns(at) };
        // Borrows each event: it is as large as a cache line, and a copy would stall on the engine's stores.
        for event in &mut events {
            match *event {
                Event::Completed(ref mut completion) => self.complete(completion, done),
                Event::Readable(WAKEUP) => self.take_commands(),
                Event::Readable(token) if token.0 >= ENGINE.0 => {}
                // Step 1: a kick.
                Event::Readable(WatchToken(id)) => self.kicked(id),
                Event::WatchFailed(WatchToken(id), errno) => self.watch_failed(id, errno),
            }
        }
        events.clear();
        self.events = events;
        count
    }

    #[inline]
    fn complete(&mut self, completion: &mut Completion, done: Done) {
        #[allow(clippy::cast_possible_truncation)] // `start_request` put number and tag together
        let (id, tag) = ((completion.token >> 16) as u32, completion.token as u16);
        let Some(Some(entry)) = self.queues.get_mut(id as usize) else {
            debug_assert!(false, "a queue stays until its ops are complete");
            return;
        };
        let before = entry.queue.in_engine();
        entry.queue.complete(tag, completion, done);
        if let Some(engine) = self.engines.get_mut(entry.engine) {
            engine.in_flight -= before - entry.queue.in_engine();
            let buffers = std::mem::take(&mut completion.buffers);
            engine.pool.give_back(entry.queue.file, buffers, entry.queue.memory());
        }
        if self.touched.last() != Some(&id) {
            self.touched.push(id);
        }
    }

    #[inline]
    fn publish(&mut self, sample: TimeSample, now: Instant) {
        while let Some(id) = self.touched.pop() {
            let Some(Some(entry)) = self.queues.get_mut(id as usize) else { continue };
            entry.queue.publish(sample, now);
            self.timers.set(Timer::Call, entry.queue.call_due());
            self.timers.set(Timer::Retry, entry.queue.retry_due());
            if entry.queue.is_quiet() && entry.is_awaited() && !entry.queue.must_redo() {
                self.drained(id);
            }
        }
    }

    /// Counts the pass. Returns the cost per request if the pass was timed.
    #[inline]
    fn note_pass(
        &mut self,
        now: Instant,
        submitted: Option<Instant>,
        taken: usize,
        completed: usize,
    ) -> TimeSample {
        if taken == 0 && completed == 0 {
            self.counted.idle_passes += 1;
            return TimeSample::default();
        }
        self.counted.busy_passes += 1;
        let sample = submitted.map_or_else(TimeSample::default, |submitted| {
            self.timed.timed(self.counted.busy_passes);
            let submission = (submitted - now) * MEAN_GAP;
            let completion = submitted.elapsed() * MEAN_GAP;
            self.counted.submission_time += submission;
            self.counted.completion_time += completion;
            TimeSample::new(submission, taken, completion, completed)
        });
        self.counters.store(&self.counted);
        sample
    }

    fn kicked(&mut self, id: u64) {
        let Ok(index) = u32::try_from(id) else { return };
        self.with(index, |entry| entry.queue.note_kick());
        self.activate(index);
    }

    fn activate(&mut self, id: u32) {
        let Some(Some(entry)) = self.queues.get_mut(id as usize) else { return };
        entry.idle_passes = 0;
        if !entry.active {
            entry.active = true;
            entry.queue.disable_kicks();
            self.turns.activate(entry.disk, id);
        }
    }

    fn with(&mut self, id: u32, act: impl FnOnce(&mut WorkerQueue)) {
        if let Some(Some(entry)) = self.queues.get_mut(id as usize) {
            act(entry);
        }
    }

    /// Enables the kicks of all active queues. Returns whether one of them has work after all. Queues of a disk without
    /// room in the engine stay active: a completion wakes the worker for them.
    pub(crate) fn arm(&mut self) -> bool {
        let mut pass = self.turns.begin();
        while let Some(id) = self.turns.next(&mut pass) {
            if let Some(Some(entry)) = self.queues.get_mut(id as usize) {
                let engine = self.engines.get_mut(entry.engine).filter(|engine| engine.in_flight > 0);
                if engine.is_some_and(|engine| entry.queue.has_no_room(&*engine.engine)) {
                    continue;
                }
                if entry.queue.has_retries() {
                    return true;
                }
                match entry.queue.gate_opens() {
                    Some(opens) if opens <= Instant::now() => return true,
                    Some(_) => {}
                    None if entry.queue.enable_kicks() => {
                        entry.queue.disable_kicks();
                        return true;
                    }
                    None => {}
                }
                entry.active = false;
                entry.note_gate(id, &mut self.gated, &mut self.timers);
            }
            self.turns.rest(&mut pass);
        }
        false
    }

    /// Sleeps until an event. An idle worker has no time limit; with requests in flight the limit is [`STUCK_CHECK`].
    pub(crate) fn sleep(&mut self) {
        if sigbus::faults() != self.seen_faults {
            self.end_faulted_sessions();
        }
        self.counted.sleeps += 1;
        self.counters.store(&self.counted);
        let stuck_check = (self.engines.in_flight() > 0).then_some(STUCK_CHECK);
        let limit = stuck_check.into_iter().chain(self.timers.sleep_limit()).min();
        if let Err(error) = self.engines.wait(limit) {
            self.engine_failed(&error);
        }
        self.poller.woke(Instant::now());
    }

    /// Runs the timers that are due.
    #[cold]
    fn run_timers(&mut self, now: Instant) {
        for timer in Timer::ALL {
            if self.timers.take_due(timer, now) {
                match timer {
                    Timer::Call => self.make_due_calls(now),
                    Timer::Retry => self.look_at_parked(now),
                    Timer::Gate => self.open_gates(now),
                    Timer::StuckCheck => self.report_stuck(now),
                    Timer::BusyCheck => self.check_busy(now),
                }
            }
        }
    }

    /// Calls drivers whose completions have waited long enough.
    fn make_due_calls(&mut self, now: Instant) {
        for entry in self.queues.iter_mut().flatten() {
            entry.queue.call_if_due(now);
            self.timers.set(Timer::Call, entry.queue.call_due());
        }
    }

    /// Marks parked requests that are due for the next pass.
    fn look_at_parked(&mut self, now: Instant) {
        for id in (0..).take(self.queues.len()) {
            let Some(Some(entry)) = self.queues.get_mut(id as usize) else { continue };
            if entry.queue.look_at_parked(now) {
                self.activate(id);
            } else {
                self.timers.set(Timer::Retry, entry.queue.retry_due());
            }
        }
    }

    fn report_stuck(&mut self, now: Instant) {
        self.timers.set(Timer::StuckCheck, Some(now + STUCK_CHECK));
        self.queues.iter_mut().flatten().for_each(|entry| entry.queue.report_stuck(now));
    }

    fn check_busy(&mut self, now: Instant) {
        if let Some(watch) = &mut self.balance {
            watch.check(now, self.counted.submission_time + self.counted.completion_time);
            self.timers.set(Timer::BusyCheck, Some(watch.next_check()));
        }
    }

    fn engine_failed(&self, error: &std::io::Error) {
        // The worker cannot serve its guests without the engine, and they would wait forever.
        error!("the I/O engine failed, the server ends: {error}");
        std::process::abort();
    }

    fn watch_failed(&mut self, id: u64, errno: rustix::io::Errno) {
        if WatchToken(id) == WAKEUP || id >= ENGINE.0 {
            // The worker would no longer receive commands, or events of one of its engines.
            self.engine_failed(&errno.into());
        }
        let Ok(index) = u32::try_from(id) else { return };
        self.with(index, |entry| entry.queue.break_kick(errno));
    }

    /// Ends the session of a front-end that truncated a page which this process then accessed.
    #[cold]
    fn end_faulted_sessions(&mut self) {
        self.seen_faults = sigbus::faults();
        for entry in self.queues.iter_mut().flatten() {
            if let Some(what) = entry.queue.memory_fault() {
                entry.queue.break_memory();
                entry.queue.session().end(EndReason::MemoryFault(what));
            }
        }
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
