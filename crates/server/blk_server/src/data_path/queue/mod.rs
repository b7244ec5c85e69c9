//! One running queue: takes chains, passes their ops to the engine, and completes them.
//!
//! `take_requests (pop → parse → check range → in-flight slot → op)` … engine …
//! `complete (slot → status byte → used ring)`, `publish (used index → call fd)`
//!
//! - One worker owns the queue. Nothing here is shared, locked, or allocated per request.
//! - A bad chain fails with IOERR, or is returned with length 0 if its status byte cannot be written.
//! - A bad ring stops its queue (`faults.rs`); other queues continue.

pub(crate) mod coalescing;
pub(crate) mod in_flight;
pub(crate) mod parked;
pub(crate) mod queue_start;
pub(crate) mod refusal;
pub(crate) mod ring_start;

pub(crate) mod changes;
mod charges;
pub(crate) mod fault_log;
mod faults;
mod gating;
mod parking;
mod starter;
pub(crate) mod submit_context;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use disk_image::Image;
use guest_mem::{GuestMemory, MemoryView};
use io_engine::{Completion, FileId, OpError, WatchId, signal_shared};
use rustix::io::Errno;
use virtio_blk::{ReplySlot, SegmentBuffer, Status, parse, reply_slot};
use virtqueue::{Chain, DeviceQueue, PopError, RingFault};

use crate::data_path::counters::QueueCounters;
use crate::data_path::counters::QueueMeter;
use crate::data_path::disk::Disk;
use crate::data_path::disk::session_link::SessionLink;
use crate::data_path::queue::coalescing::PendingInterrupt;
use crate::data_path::queue::in_flight::{Finished, InFlight, RequestDurability, RequestInfo, RequestKind};
use crate::data_path::queue::parked::ParkedRequests;
use crate::data_path::queue::queue_start::QueueStart;
use crate::data_path::queue::ring_start::open_ring;
use crate::data_path::throttle::gate::QueueGate;
use crate::data_path::worker::turn::REFUSED_DESCRIPTORS;
use crate::host::clock::process_ns;
use fault_log::log_refused;
use starter::{Outcome, Starter};
use submit_context::{MAX_OPS, SubmitContext};

/// The measured cost of one request in a timed pass; zero in other passes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TimeSample {
    taken: Duration,
    completed: Duration,
}

impl TimeSample {
    /// Divides `submission` among the `taken` requests, `completion` among the `completed` ones.
    pub(crate) fn new(submission: Duration, taken: usize, completion: Duration, completed: usize) -> Self {
        let part = |time: Duration, count: usize| time / u32::try_from(count).unwrap_or(u32::MAX).max(1);
        Self { taken: part(submission, taken), completed: part(completion, completed) }
    }
}

/// When the completions of a pass arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    /// The beginning of the pass.
    pub(crate) now: Instant,
    /// The time from which latencies are computed (`process_ns`).
    pub(crate) ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// Takes no requests; the requests in flight complete.
    Draining,
    /// Like `Draining`, but the queue never runs again.
    Stopping,
    /// Takes no requests until the front-end stops or resets the queue.
    Broken,
}

/// One running queue.
pub(crate) struct Queue {
    disk: Arc<Disk>,
    /// The disk's image since the worker has had the queue.
    image: Arc<Image>,
    session: Arc<SessionLink>,
    index: u16,
    /// The worker's id for this queue, which is part of every op's token.
    id: u32,
    view: MemoryView,
    ring: DeviceQueue,
    /// Memory of the in-flight log.
    in_flight_log: Option<Arc<GuestMemory>>,
    /// See [`QueueStart::leaves_unbegun`].
    leaves_unbegun: bool,
    chain: Chain,
    /// The segments of the discard or write-zeroes request that is being started.
    segments: SegmentBuffer,
    in_flight: InFlight,
    parked: ParkedRequests,
    /// `None`: the disk has no limits.
    gate: Option<Box<QueueGate>>,
    pub(crate) file: FileId,
    pub(crate) kick: Arc<OwnedFd>,
    pub(crate) watch: WatchId,
    call: Option<Arc<OwnedFd>>,
    err: Option<Arc<OwnedFd>>,
    state: State,
    /// Whether the queue is about to stop. If so, it parks failed requests only if `leaves_parked`.
    ends: bool,
    /// Whether parked requests stay in the in-flight log for the next server.
    leaves_parked: bool,
    /// Whether the queue stopped taking requests because the engine or the pool had no room for the disk.
    waits_for_room: bool,
    pending_interrupt: PendingInterrupt,
    counted: QueueCounters,
    /// Requests taken in this pass. `worker_time` counts their share of the pass.
    taken: u32,
    completed: u32,
    meter: Arc<QueueMeter>,
}

impl Queue {
    /// # Errors
    /// The fault of the ring.
    pub(crate) fn new(start: &QueueStart, id: u32, file: FileId, watch: WatchId) -> Result<Self, String> {
        let view = MemoryView::new(Arc::clone(&start.memory));
        let layout = start.layout.ok_or("a ring address lies in no memory region")?;
        let ring = open_ring(start, &view, layout)?;
        layout.note_device_stores(view.memory(), start.ring);
        // `seg_max` announced this many segments, whatever size the driver chose for the queue.
        let longest = layout.queue_size.max(start.disk.queue_size());
        let image = start.disk.image();
        let zeroes = image.discard_limits().is_some() || image.write_zeroes_limits().is_some();
        let ring = ring.with_indirect_limit(longest);
        Ok(Self {
            disk: Arc::clone(&start.disk),
            image,
            session: Arc::clone(&start.session),
            index: start.index,
            id,
            view,
            in_flight_log: start.log.as_ref().map(|log| Arc::clone(log.memory())),
            leaves_unbegun: start.leaves_unbegun,
            chain: Chain::with_capacity(longest),
            segments: SegmentBuffer::default(),
            in_flight: InFlight::new(layout.queue_size),
            parked: ParkedRequests::new(start.disk.park_policy(), layout.queue_size, zeroes),
            gate: charges::gate(&start.disk),
            ring,
            file,
            kick: Arc::clone(&start.kick),
            watch,
            call: start.call.clone(),
            err: start.err.clone(),
            state: State::Running,
            ends: false,
            leaves_parked: false,
            waits_for_room: false,
            pending_interrupt: PendingInterrupt::new(start.disk.coalescing()),
            counted: QueueCounters::default(),
            taken: 0,
            completed: 0,
            meter: Arc::clone(&start.meter),
        })
    }

    /// Number of descriptors.
    pub(crate) fn size(&self) -> u16 {
        self.ring.layout().queue_size
    }

    pub(crate) fn note_kick(&mut self) {
        self.counted.kicks += 1;
    }

    /// Whether the disk accepts no more writes.
    pub(crate) fn has_failed(&self) -> bool {
        self.disk.has_failed_with(&self.image)
    }

    pub(crate) fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    pub(crate) fn session(&self) -> &Arc<SessionLink> {
        &self.session
    }

    pub(crate) fn memory(&self) -> &Arc<GuestMemory> {
        self.view.memory()
    }

    /// Steps 2 to 5 for available chains, up to the engine's batch and the disk's budget. Returns the number of requests.
    #[inline]
    pub(crate) fn take_requests(&mut self, context: &mut SubmitContext<'_>) -> usize {
        if self.gate.is_some() { self.take_limited(context) } else { self.take::<false>(context) }
    }

    /// `LIMITED`: the gate decides whether a request may start.
    #[inline]
    fn take<const LIMITED: bool>(&mut self, context: &mut SubmitContext<'_>) -> usize {
        self.waits_for_room = false;
        context.now_ns = process_ns(context.now);
        let mut taken = if self.has_retries() { self.retry_parked(context) } else { 0 };
        while taken < context.batch && !context.budget.is_spent() && self.takes_requests() {
            if context.room < MAX_OPS {
                self.waits_for_room = true;
                context.budget.end(); // the disk's other queues share the room
                break;
            }
            // Step 2: the next available chain.
            match self.ring.pop(&mut self.chain) {
                Ok(None) => break,
                Ok(Some(tag)) => {
                    context.budget.take(self.chain.count());
                    if !self.start_request::<LIMITED>(tag, context) {
                        break;
                    }
                }
                Err(PopError::Chain { tag, fault }) => {
                    context.budget.take(REFUSED_DESCRIPTORS);
                    log_refused(&self.disk, self.index, context.now, &fault);
                    self.finish_refused(tag);
                }
                Err(PopError::Ring(fault)) => self.break_ring(&fault),
            }
            taken += 1;
        }
        #[allow(clippy::cast_possible_truncation)] // at most a batch
        let counted = taken as u32;
        self.taken += counted;
        taken
    }

    #[inline]
    fn takes_requests(&self) -> bool {
        self.state == State::Running || self.must_redo()
    }

    /// Returns false if the chain was put back into the ring.
    #[inline]
    fn start_request<const LIMITED: bool>(&mut self, tag: u16, context: &mut SubmitContext<'_>) -> bool {
        if self.in_flight.is_taken(tag) {
            self.break_ring(&RingFault::HeadInFlight { head: tag });
            return true;
        }
        // Step 3: turn the chain into a request, or into a status byte.
        let parsed = match parse(&self.chain, &self.view, &mut self.segments) {
            Ok(parsed) => parsed,
            Err(fault) => {
                // The status byte cannot be written: the chain is returned with length 0.
                log_refused(&self.disk, self.index, context.now, &fault);
                self.ring.push_used(tag, 0);
                return true;
            }
        };
        let reply = parsed.reply;
        if LIMITED {
            let begun = self.state == State::Stopping;
            match charges::admit(&mut self.gate, &parsed, begun, context.now) {
                Ok(true) => {}
                Ok(false) => return self.put_back(),
                Err(refusal) => return self.refuse(tag, &reply, &refusal, context.now),
            }
        }
        let token = u64::from(self.id) << 16 | u64::from(tag);
        let starter = Starter {
            disk: &self.disk,
            image: &self.image,
            view: &self.view,
            in_flight: &mut self.in_flight,
            parked: &mut self.parked,
            context,
            file: self.file,
            durability: self.disk.durability(self.session.write_cache()),
            token,
            tag,
            reply,
        };
        let outcome = match parsed.request {
            Ok(request) => starter.start(request).unwrap_or_else(|refusal| {
                log_refused(&self.disk, self.index, context.now, &refusal);
                Outcome::Finished { status: Status::IoErr, stored_bytes: 0 }
            }),
            Err(fault) => {
                log_refused(&self.disk, self.index, context.now, &fault);
                Outcome::Finished { status: fault.status(), stored_bytes: 0 }
            }
        };
        match outcome {
            Outcome::Submitted => true,
            Outcome::Finished { status, stored_bytes } => {
                self.finish_without_engine(tag, &reply, status, stored_bytes)
            }
            Outcome::Later => {
                charges::refund(&mut self.gate);
                self.waits_for_room = true;
                self.put_back()
            }
        }
    }

    /// Returns true: the chain is done.
    #[cold]
    fn finish_without_engine(
        &mut self,
        tag: u16,
        reply: &ReplySlot,
        status: Status,
        stored_bytes: u64,
    ) -> bool {
        charges::refund(&mut self.gate);
        self.count_other(status);
        self.answer(tag, reply, status, stored_bytes);
        true
    }

    /// Answers a malformed chain: IOERR, or length 0 if the status byte cannot be written.
    fn finish_refused(&mut self, tag: u16) {
        if self.in_flight.is_taken(tag) {
            return self.break_ring(&RingFault::HeadInFlight { head: tag });
        }
        match reply_slot(&self.chain, &self.view) {
            Ok(reply) => {
                self.count_other(Status::IoErr);
                self.answer(tag, &reply, Status::IoErr, 0);
            }
            Err(_) => self.ring.push_used(tag, 0),
        }
    }

    /// Steps 6 and 7 for one op. The last op of a request writes its status byte and used entry.
    #[inline]
    pub(crate) fn complete(&mut self, tag: u16, completion: &mut Completion, done: Done) {
        let Done { now, ns: done_ns } = done;
        let &mut Completion { result, stored_bytes, .. } = completion;
        if result.is_err() {
            self.note_failed(tag, completion);
        }
        let Some(finished) = self.in_flight.complete_op(tag, result, stored_bytes) else { return };
        if finished.info.kind == RequestKind::Read {
            // Must come after the data was stored and before the driver learns of it. A failed read may also have
            // stored data.
            completion.buffers.note_filled(self.view.memory());
        }
        let status = match finished.failed {
            Some(error) if self.should_park(finished, error) => {
                return self.park(tag, finished, error, &mut completion.buffers, now);
            }
            Some(error) => {
                self.log_failed(now, finished, error);
                Status::IoErr
            }
            None => self.succeeded(&finished.info),
        };
        let failed = status != Status::Ok;
        let took_ns = done_ns.saturating_sub(finished.taken_ns);
        self.count(&finished, took_ns);
        self.counted.errors += u64::from(failed);
        if finished.tries > 0 {
            self.parked_answered(failed);
        }
        if took_ns >= self.disk.slow().limit_ns() {
            self.note_slow(now, finished, took_ns, failed);
        }
        self.answer(tag, &finished.reply, status, finished.stored_bytes);
    }

    /// Step 7: the status byte, then the used entry.
    #[inline(always)] // the compiler would make it a call for each request
    fn answer(&mut self, tag: u16, reply: &ReplySlot, status: Status, stored_bytes: u64) {
        let written_bytes = reply.write(&self.view, status, stored_bytes);
        self.ring.push_used(tag, written_bytes);
    }

    #[inline]
    fn count(&mut self, finished: &Finished, took_ns: u64) {
        self.completed += 1;
        let RequestInfo { kind, bytes, .. } = finished.info;
        let (counted, latency) = (&mut self.counted, &self.meter.latency);
        let histogram = match kind {
            RequestKind::Read => {
                (counted.reads, counted.read_bytes) = (counted.reads + 1, counted.read_bytes + bytes);
                &latency.read
            }
            RequestKind::Write => {
                (counted.writes, counted.written_bytes) = (counted.writes + 1, counted.written_bytes + bytes);
                &latency.write
            }
            RequestKind::Flush => {
                counted.flushes += 1;
                &latency.flush
            }
            RequestKind::Discard | RequestKind::WriteZeroes => {
                counted.other += 1;
                &latency.other
            }
        };
        histogram.note(took_ns);
    }

    /// Counts a request that was answered without the engine.
    fn count_other(&mut self, status: Status) {
        self.counted.other += 1;
        self.counted.errors += u64::from(status == Status::IoErr);
    }

    /// The final status of a request that the engine completed successfully.
    #[inline]
    fn succeeded(&self, info: &RequestInfo) -> Status {
        // If memory was lost, zeroes may have been written instead of the guest's data.
        let lost_memory = self.view.is_poisoned() && info.kind != RequestKind::Read;
        // The kernel reports lost pages only once, and a concurrent sync may have received the report.
        let lost_pages = info.durability != RequestDurability::Done && self.has_failed();
        if lost_memory || lost_pages { Status::IoErr } else { Status::Ok }
    }

    /// After a failed sync the disk guarantees no durability any more. With the page cache, EIO from a durable write
    /// counts as a failed sync, because it may refer to other writes' pages.
    #[cold]
    fn note_failed(&self, tag: u16, completion: &Completion) {
        let promised = self.in_flight.durability(tag) == Some(RequestDurability::Durable);
        let lost_pages = promised && completion.result == Err(OpError::Errno(Errno::IO));
        if completion.sync_failed || lost_pages && self.disk.shares_errors() {
            self.disk.mark_failed();
        }
    }

    /// Step 8, once per pass: publishes completions and calls the driver if it requested that.
    #[inline]
    pub(crate) fn publish(&mut self, sample: TimeSample, now: Instant) {
        if self.ring.publish() {
            if let Some(changed) = self.view.memory().log().and_then(|log| log.changed()) {
                signal_shared(changed.as_ref());
            }
            if self.pending_interrupt.add(self.completed, self.in_flight.in_engine(), now) {
                self.call_driver();
            }
        } else if self.pending_interrupt.due().is_some() && self.in_flight.in_engine() == 0 {
            // The last request in the engine failed and is parked, so no completion will trigger the interrupt. A queue
            // that moves or stops must not leave an interrupt pending.
            self.call_driver();
        }
        self.counted.worker_time += sample.taken * self.taken + sample.completed * self.completed;
        (self.taken, self.completed) = (0, 0);
        self.counted.in_flight = self.in_flight.count() as u64;
        self.counted.parked = self.in_flight.parked() as u64;
        self.meter.store(&self.counted);
    }

    /// Calls the driver if it requested an interrupt.
    #[inline]
    fn call_driver(&mut self) {
        self.pending_interrupt.clear();
        if self.ring.needs_notification()
            && let Some(call) = &self.call
        {
            signal_shared(call.as_ref());
            self.counted.calls += 1;
        }
    }

    /// The time by which the driver must be called. `None`: no interrupt is pending.
    #[inline]
    pub(crate) fn call_due(&self) -> Option<Instant> {
        self.pending_interrupt.due()
    }

    pub(crate) fn call_if_due(&mut self, now: Instant) {
        if self.pending_interrupt.due().is_some_and(|due| now >= due) {
            self.call_driver();
        }
    }

    /// Tells the driver not to kick, because the worker polls the ring.
    pub(crate) fn disable_kicks(&mut self) {
        self.ring.disable_kicks();
    }

    /// Requests kicks from now on. Returns whether requests are already available.
    pub(crate) fn enable_kicks(&mut self) -> bool {
        if self.state != State::Running {
            return self.must_redo();
        }
        self.ring.enable_kicks().unwrap_or_else(|fault| {
            self.break_ring(&fault);
            false
        })
    }

    /// Whether available requests wait for room in the engine or the pool.
    pub(crate) fn waits_for_room(&self) -> bool {
        self.waits_for_room
    }

    /// Number of requests in the engine.
    #[inline]
    pub(crate) fn in_engine(&self) -> usize {
        self.in_flight.in_engine()
    }
}
