//! One queue with one owner: requests in, completions out, no lock.
//!
//! `push (slot, header, chain) → prepare_kick (publish, ask) → Kick::notify … completions (used ring → status)`
//!
//! - A status byte is believed, a used length is not: it is handed on ([`Completion::stored_bytes`]), and a read whose
//!   length is too small is an error only with [`ShortReads::Refuse`]. A device should set the length, but some do
//!   not, and neither Linux nor QEMU's own drivers look at it (virtio 1.3 §2.7.8.2, §2.7.8.3).
//! - A length larger than the buffers, an unknown id, an index that jumps: the ring is broken and the queue ends.
//! - While a back-end is away nothing changes: requests are taken into the old ring, until the next one is there
//!   (`restart.rs`), and deadlines hold.
//!
//! Spec: virtio 1.3 §2.7, §2.8, §5.2.6. Not here: checks of a request (`fill.rs`), sleeping (`wait.rs`), blocking calls
//! (`blocking.rs`), several owners (`shared.rs`), the session (`device.rs`).

use std::sync::Arc;
use std::time::Instant;

use guest_mem::{GuestAddress, GuestMemory, Region};
use virtio_blk::{RequestHeader, Status, kind};
use virtqueue::{AddError, DriverQueue, RingFeatures, Used};

use crate::area::{Area, AreaLayout, Side};
use crate::error::{MakeQueueError, PushError, QueueError};
use crate::fill::{Filled, Limits, fill};
use crate::kick::{Doorbell, EventFd, Kick};
use crate::link::{QueueLink, RingPlace};
use crate::memory::{MemoryMap, OpenRanges, Pool};
use crate::request::{Completion, Request, RequestError};
use crate::slots::{Phase, Slot, Slots, Stage};

/// Buffers per request, unless the device takes fewer: what QEMU's own virtio-blk announces for a queue of 128.
pub(crate) const DEFAULT_MAX_SEGMENTS: u16 = 128;

/// What to do about a read that succeeded, with a used length too small for its data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShortReads {
    /// The status says that it was done, and is believed.
    #[default]
    Trust,
    /// It ends with [`RequestError::ShortRead`].
    Refuse,
}

/// Counters since the queue was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Requests taken.
    pub pushed: u64,
    /// Requests ended, [`crate::RequestError::Returned`] not counted.
    pub completed: u64,
    /// Notifications that the device wanted.
    pub kicks: u64,
    /// Batches made visible to the device.
    pub publications: u64,
    /// Times the owner went to sleep for a completion.
    pub sleeps: u64,
}

/// See the file's head.
#[derive(Debug)]
pub struct Queue {
    pub(crate) index: u16,
    queue_size: u16,
    pub(crate) features: RingFeatures,
    limits: Limits,
    pub(crate) short_reads: ShortReads,
    open: OpenRanges,
    pub(crate) slots: Slots,
    pub(crate) area: Area,
    pub(crate) ring: DriverQueue,
    /// The device was asked to signal.
    pub(crate) armed: bool,
    pub(crate) bell: Arc<dyn Doorbell>,
    pub(crate) call: Arc<EventFd>,
    pub(crate) link: Arc<QueueLink>,
    /// For blocking calls.
    pub(crate) pool: Pool,
    /// No live request has an earlier one.
    pub(crate) earliest: Option<Instant>,
    /// The last call had no room for requests whose time is up.
    overdue: bool,
    pub(crate) dead: Option<QueueError>,
    pub(crate) stats: QueueStats,
}

/// What a queue is made of.
#[derive(Debug)]
pub(crate) struct QueueParts {
    /// At the device.
    pub index: u16,
    /// A power of two.
    pub queue_size: u16,
    pub features: RingFeatures,
    pub limits: Limits,
    /// Holds the queue's own area.
    pub region: Arc<Region>,
    /// Where in it: [`area_bytes`] are needed.
    pub area: GuestAddress,
    /// What requests may name.
    pub map: Arc<MemoryMap>,
    pub pool: Pool,
    pub bell: Arc<dyn Doorbell>,
    /// Rung when the session should look at the queue's link.
    pub notice: Option<Arc<dyn Doorbell>>,
}

/// How much of a region a queue takes: a multiple of 4096.
pub(crate) fn area_bytes(queue_size: u16, max_segments: u16) -> u64 {
    AreaLayout::new(GuestAddress(0), queue_size, max_segments).size_bytes()
}

impl Queue {
    /// A queue on the first of its two rings, which it makes anew.
    ///
    /// # Errors
    /// [`MakeQueueError`].
    pub(crate) fn new(parts: QueueParts) -> Result<Self, MakeQueueError> {
        let QueueParts { index, queue_size, features, limits, region, area, map, pool, bell, notice } = parts;
        let layout = AreaLayout::new(area, queue_size, limits.max_segments);
        let area = Area::map(layout, Arc::new(GuestMemory::new(vec![region])?))?;
        let ring = layout.make_ring(Side::A, area.view(), features)?;
        let call = Arc::new(EventFd::new().map_err(MakeQueueError::Signal)?);
        let first = RingPlace { layout: layout.ring(Side::A), base: ring.initial_base() };
        let memory = Arc::clone(area.view().memory());
        let link = Arc::new(QueueLink::new(layout, memory, features, first, Arc::clone(&call), notice));
        Ok(Self {
            index,
            queue_size,
            features,
            limits,
            short_reads: ShortReads::default(),
            open: OpenRanges::new(map),
            slots: Slots::new(queue_size),
            area,
            ring,
            armed: false,
            bell,
            call,
            link,
            pool,
            earliest: None,
            overdue: false,
            dead: None,
            stats: QueueStats::default(),
        })
    }

    /// For the session.
    pub(crate) fn link(&self) -> &Arc<QueueLink> {
        &self.link
    }

    /// Its index at the device.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// In descriptors, as negotiated.
    #[must_use]
    pub fn queue_size(&self) -> u16 {
        self.queue_size
    }

    /// Requests taken and not yet ended (a request that ended but is with the device counts).
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slots.used()
    }

    /// Requests of `buffers` buffers each that can be pushed now.
    #[must_use]
    pub fn room(&self, buffers: usize) -> usize {
        let (needed, max_segments) = (buffers + 2, usize::from(self.limits.max_segments));
        let (per_request, most) = match self.features.indirect {
            true => (1, max_segments + 2),
            false => (needed, usize::from(self.queue_size)),
        };
        if self.dead.is_some() || self.slots.waiting() > 0 || buffers > max_segments || needed > most {
            return 0;
        }
        self.slots.left().min(usize::from(self.ring.free_descriptors()) / per_request)
    }

    /// What to do about reads with too small a used length.
    pub fn set_short_reads(&mut self, policy: ShortReads) {
        self.short_reads = policy;
    }

    /// Takes a request; the device sees it after the next [`Queue::prepare_kick`] or [`Queue::submit`].
    ///
    /// # Errors
    /// [`PushError`].
    #[inline]
    pub fn push(&mut self, request: &Request<'_>) -> Result<(), PushError> {
        self.push_as(request, false)
    }

    /// `own`: for a blocking call.
    #[inline]
    pub(crate) fn push_as(&mut self, request: &Request<'_>, own: bool) -> Result<(), PushError> {
        if let Some(error) = &self.dead {
            return Err(PushError::Dead(error.clone()));
        }
        let in_flight = self.slots.used();
        // Those that wait for room in the ring came first.
        let waiting = self.slots.waiting() > 0;
        let Some((index, slot)) = self.slots.next_free().filter(|_| !waiting) else {
            return Err(PushError::Full { in_flight });
        };
        let filled = fill(slot, index, request, &self.limits, &mut self.open, &self.area)?;
        slot.own = own;
        let outcome = match filled {
            Filled::Done => Some(Ok(())),
            Filled::Send => {
                send(&mut self.ring, &self.area, self.features, index, slot)
                    .map_err(|e| refusal(e, in_flight))?;
                None
            }
        };
        self.slots.begin(outcome);
        self.note_deadline(request.deadline);
        self.stats.pushed += 1;
        Ok(())
    }

    #[inline]
    fn note_deadline(&mut self, deadline: Option<Instant>) {
        let Some(deadline) = deadline else { return };
        self.earliest = Some(self.earliest.map_or(deadline, |earliest| earliest.min(deadline)));
    }

    /// Makes everything pushed visible to the device; `Some` if the device wants to be notified.
    #[must_use]
    pub fn prepare_kick(&mut self) -> Option<Kick> {
        self.read_mail();
        self.publish().then(|| Kick::new(Arc::clone(&self.bell)))
    }

    /// [`Queue::prepare_kick`] and [`Kick::notify`] in one: for an owner without a lock.
    pub fn submit(&mut self) {
        self.read_mail();
        if self.publish() {
            self.bell.ring();
        }
    }

    /// Returns whether the device wants to be notified.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        if self.dead.is_some() {
            return false;
        }
        self.stats.publications += u64::from(self.ring.publish());
        let wanted = self.ring.kick_needed();
        self.stats.kicks += u64::from(wanted);
        wanted
    }

    /// Takes what has ended, up to `out.len()`; never waits. Also ends requests whose deadline has passed, and sends
    /// the flush after a durable write (and notifies the device of it).
    ///
    /// # Errors
    /// [`QueueError`], after everything in flight was handed out.
    #[inline]
    pub fn completions(&mut self, out: &mut [Completion]) -> Result<usize, QueueError> {
        let (taken, wanted) = self.take(out);
        if wanted {
            self.bell.ring();
        }
        taken
    }

    /// [`Queue::completions`] for an owner with a lock: what it wants to notify comes back.
    pub(crate) fn completions_and_kick(
        &mut self,
        out: &mut [Completion],
    ) -> (Result<usize, QueueError>, Option<Kick>) {
        let (taken, wanted) = self.take(out);
        (taken, wanted.then(|| Kick::new(Arc::clone(&self.bell))))
    }

    /// Also returns whether the device wants to be notified.
    #[inline]
    fn take(&mut self, out: &mut [Completion]) -> (Result<usize, QueueError>, bool) {
        self.read_mail();
        let mut taken = 0;
        if self.slots.untold() > 0 {
            taken = self.slots.tell(out);
        }
        if self.overdue {
            taken += self.end_overdue(&mut out[taken..]);
        }
        let (popped, wanted) = self.pop(&mut out[taken..]);
        taken += popped;
        if self.earliest.is_some() {
            taken += self.end_overdue(&mut out[taken..]);
        }
        match &self.dead {
            Some(error) if taken == 0 && !out.is_empty() => (Err(error.clone()), false),
            _ => (Ok(taken), wanted),
        }
    }

    /// Takes used chains off the ring, as far as `out` goes.
    #[inline]
    fn pop(&mut self, out: &mut [Completion]) -> (usize, bool) {
        if self.dead.is_some() {
            return (0, false);
        }
        if self.armed {
            self.armed = false;
            self.ring.disable_interrupts();
        }
        let (mut popped, mut sent) = (0, false);
        while popped < out.len() {
            match self.ring.pop_used() {
                Ok(None) => break,
                Ok(Some(used)) => match self.settle(used) {
                    Settled::Told(completion) => {
                        out[popped] = completion;
                        popped += 1;
                    }
                    Settled::Silent => {}
                    Settled::Flush => sent = true,
                },
                Err(fault) => {
                    self.die(QueueError::Device { queue: self.index, fault });
                    return (popped + self.slots.tell(&mut out[popped..]), false);
                }
            }
        }
        if self.slots.waiting() > 0 {
            sent |= self.send_waiting() > 0;
        }
        (popped, sent && self.publish())
    }

    /// The device is done with a chain.
    #[inline]
    fn settle(&mut self, used: Used) -> Settled {
        #[allow(clippy::cast_possible_truncation)] // as it was given to the ring
        let index = used.token as u16;
        let slot = self.slots.get_mut(index);
        match slot.stage {
            Stage::Live => {
                let result =
                    outcome(slot, self.area.load_status(index), used.written_bytes, self.short_reads);
                if result.is_ok() && slot.phase == Phase::WriteBeforeFlush {
                    return self.flush_after_write(index);
                }
                let completion = Completion { token: slot.token, stored_bytes: slot.stored_bytes, result };
                self.slots.ended += 1;
                self.slots.free(index);
                Settled::Told(completion)
            }
            Stage::Zombie if !slot.own => {
                let token = slot.token;
                self.slots.free(index);
                Settled::Told(Completion { token, stored_bytes: 0, result: Err(RequestError::Returned) })
            }
            _ => {
                self.slots.returned(index);
                Settled::Silent
            }
        }
    }

    /// How the live request in slot `index` ended, which the device is done with.
    pub(crate) fn outcome(&mut self, index: u16, written_bytes: u32) -> Result<(), RequestError> {
        let status = self.area.load_status(index);
        outcome(self.slots.get_mut(index), status, written_bytes, self.short_reads)
    }

    fn flush_after_write(&mut self, index: u16) -> Settled {
        let slot = self.slots.get_mut(index);
        slot.phase = Phase::FlushAfterWrite;
        // The write's descriptors are free again, so there is room, unless others have waited for it.
        if send(&mut self.ring, &self.area, self.features, index, slot).is_err() {
            self.slots.wait(index);
        }
        Settled::Flush
    }

    /// Sends what waits for room, in the order of the pushes; returns how many.
    pub(crate) fn send_waiting(&mut self) -> u64 {
        let mut sent = 0;
        while self.slots.waiting() > 0
            && let Some(index) = self.slots.first_waiting()
        {
            let slot = self.slots.get(index);
            if send(&mut self.ring, &self.area, self.features, index, slot).is_err() {
                break;
            }
            self.slots.sent_waiting(index);
            sent += 1;
        }
        sent
    }

    /// Ends what should have ended by now, and tells as far as `out` goes.
    #[cold]
    fn end_overdue(&mut self, out: &mut [Completion]) -> usize {
        let now = Instant::now();
        if self.earliest.is_none_or(|earliest| now < earliest) {
            self.overdue = false;
            return 0;
        }
        self.overdue = out.is_empty();
        if self.overdue {
            return 0;
        }
        let mut earliest = None::<Instant>;
        for index in self.slots.indices() {
            let slot = self.slots.get(index);
            let (Stage::Live, Some(deadline)) = (slot.stage, slot.deadline) else { continue };
            if deadline <= now {
                self.slots.end_early(index, RequestError::DeadlinePassed);
            } else {
                earliest = Some(earliest.map_or(deadline, |earliest| earliest.min(deadline)));
            }
        }
        self.earliest = earliest;
        self.slots.tell(out)
    }

    /// Ends the request(s) with this token now, with [`crate::RequestError::Cancelled`]; the device is not asked
    /// (virtio-blk knows no cancellation), so the buffers come back later. Returns whether there was one.
    pub fn cancel(&mut self, token: u64) -> bool {
        let mut found = false;
        while let Some(index) =
            self.slots.position(|slot| slot.stage == Stage::Live && slot.token == token && !slot.own)
        {
            self.slots.end_early(index, RequestError::Cancelled);
            found = true;
        }
        found
    }

    /// The earliest deadline of a request in flight (or of one that was until recently): for owners who sleep by
    /// themselves, since only a call here ends a request.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.earliest
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        QueueStats { completed: self.slots.ended, ..self.stats }
    }

    /// Everything in flight is lost.
    #[cold]
    pub(crate) fn die(&mut self, error: QueueError) {
        if matches!(error, QueueError::Device { .. }) {
            self.link.report_broken();
        }
        self.dead = Some(error);
        self.earliest = None;
        self.slots.lose_all();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.link.report_dropped();
    }
}

/// What a used chain leads to.
enum Settled {
    /// Its owner is told.
    Told(Completion),
    /// Nobody waits for it.
    Silent,
    /// A flush follows.
    Flush,
}

/// How a request ended, by what the device wrote; a read's length goes into the slot.
#[inline]
fn outcome(
    slot: &mut Slot,
    status: u8,
    written_bytes: u32,
    short_reads: ShortReads,
) -> Result<(), RequestError> {
    match Status::from_byte(status) {
        Some(Status::Ok) => {}
        Some(Status::IoErr) => return Err(RequestError::IoErr),
        Some(Status::Unsupp) => return Err(RequestError::Unsupported),
        None => return Err(RequestError::BadStatus { status }),
    }
    let wanted_bytes = slot.wanted_bytes;
    let stored_bytes = written_bytes.saturating_sub(1).min(wanted_bytes);
    slot.stored_bytes = stored_bytes;
    let short = slot.kind == kind::IN && stored_bytes < wanted_bytes;
    if short && short_reads == ShortReads::Refuse {
        return Err(RequestError::ShortRead { stored_bytes, wanted_bytes: u64::from(wanted_bytes) });
    }
    Ok(())
}

/// Puts a slot's request into the ring.
#[inline]
fn send(
    ring: &mut DriverQueue,
    area: &Area,
    features: RingFeatures,
    index: u16,
    slot: &Slot,
) -> Result<(), AddError> {
    let header = match slot.phase {
        Phase::FlushAfterWrite => RequestHeader { kind: kind::FLUSH, sector: 0 },
        Phase::Only | Phase::WriteBeforeFlush => RequestHeader { kind: slot.kind, sector: slot.sector },
    };
    area.store_header(index, header);
    area.store_segments(index, &slot.segments);
    let (readable, writable) = slot.buffers();
    let token = u64::from(index);
    if features.indirect {
        let table = area.table(index, readable.len() + writable.len());
        ring.add_indirect(readable, writable, table, token)?;
    } else {
        ring.add(readable, writable, token)?;
    }
    Ok(())
}

fn refusal(error: AddError, in_flight: usize) -> PushError {
    match error {
        AddError::Full { .. } => PushError::Full { in_flight },
        other => PushError::Ring(other),
    }
}
