//! One queue with one owner: requests in, completions out, no lock.
//!
//! `push (slot, header, chain) → prepare_kick (publish, ask) → Kick::notify … completions (used ring →
//! status)`
//!
//! - The queue trusts a status byte, but not a used length. It passes the length on ([`Completion::stored_bytes`]); a
//!   read whose length is too small is an error only with [`ShortReads::Refuse`]. A device should set the length, but
//!   some do not, and neither Linux nor QEMU's own drivers check it (virtio 1.3 §2.7.8.2, §2.7.8.3).
//! - A length larger than the buffers, an unknown id, or an index that jumps means that the ring is broken; then the
//!   queue ends.
//! - Without a back-end, the queue still takes requests, into the old ring, until the next back-end connects
//!   (`restart.rs`). Deadlines apply as usual.
//!
//! Spec: virtio 1.3 §2.7, §2.8, §5.2.6. See also: checks of a request (`fill.rs`), sleeping (`wait.rs`),
//! blocking calls (`blocking.rs`), several owners (`shared/`), the session (`device.rs`).

pub(crate) mod area;

mod blocking;

pub(crate) mod fill;

pub(crate) mod link;

mod restart;
#[cfg(test)]
mod restart_stress;

#[cfg(test)]
pub(crate) mod restart_tests;

mod slots;

pub(crate) mod wait;

use std::sync::Arc;
use std::time::Instant;

use guest_mem::{GuestAddress, GuestMemory, Region};
use virtio_blk::{RequestHeader, Status, kind};
use virtqueue::{AddError, DriverQueue, RingFeatures, Used};

use self::area::{Area, AreaLayout, Side};
use self::fill::{Filled, Limits, fill};
use self::link::{QueueLink, RingPlace};
use self::slots::{Phase, Slot, Slots, Stage};
use crate::error::{MakeQueueError, PushError, QueueError};
use crate::kick::{Doorbell, EventFd, Kick};
use crate::memory::{MemoryMap, OpenRanges, Pool};
use crate::request::{Completion, Request, RequestError};

/// Treatment of a successful read whose used length is too small for its data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShortReads {
    /// Trust the status, which reports the read as done.
    #[default]
    Trust,
    /// End the read with [`RequestError::ShortRead`].
    Refuse,
}

/// Counters since the queue was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Requests taken.
    pub pushed: u64,
    /// Requests ended, not counting [`crate::RequestError::Returned`].
    pub completed: u64,
    /// Notifications that the device requested.
    pub kicks: u64,
    /// Batches made visible to the device.
    pub publications: u64,
    /// How often the owner slept to wait for a completion.
    pub sleeps: u64,
}

/// See the module documentation.
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
    /// Whether the queue has requested a signal from the device.
    pub(crate) armed: bool,
    pub(crate) bell: Arc<dyn Doorbell>,
    pub(crate) call: Arc<EventFd>,
    pub(crate) link: Arc<QueueLink>,
    /// For blocking calls.
    pub(crate) pool: Pool,
    /// No live request has an earlier deadline than this.
    pub(crate) earliest: Option<Instant>,
    /// Set if the last call had no room to report all requests whose deadline has passed.
    overdue: bool,
    pub(crate) dead: Option<QueueError>,
    pub(crate) stats: QueueStats,
}

/// The parts of a queue.
#[derive(Debug)]
pub(crate) struct QueueParts {
    /// The queue's index at the device.
    pub index: u16,
    /// A power of two.
    pub queue_size: u16,
    pub features: RingFeatures,
    pub limits: Limits,
    /// The region with the queue's area.
    pub region: Arc<Region>,
    /// The area's address in the region; the area takes [`area::area_bytes`].
    pub area: GuestAddress,
    /// The memory that requests may refer to.
    pub map: Arc<MemoryMap>,
    pub pool: Pool,
    pub bell: Arc<dyn Doorbell>,
    /// The doorbell of the session: rung when the session should check the queue's link.
    pub notice: Option<Arc<dyn Doorbell>>,
}

impl Queue {
    /// Makes a queue on the first of its two rings, which it initialises.
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

    /// The link for the session.
    pub(crate) fn link(&self) -> &Arc<QueueLink> {
        &self.link
    }

    /// The queue's index at the device.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// The queue's size in descriptors, as negotiated.
    #[must_use]
    pub fn queue_size(&self) -> u16 {
        self.queue_size
    }

    /// Requests taken and not yet ended. (A request that ended but is still with the device counts too.)
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slots.used()
    }

    /// How many requests of `buffers` buffers each can be pushed now.
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

    /// Sets how to treat successful reads whose used length is too small.
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

    /// `own`: the request belongs to a blocking call of this crate.
    #[inline]
    pub(crate) fn push_as(&mut self, request: &Request<'_>, own: bool) -> Result<(), PushError> {
        if let Some(error) = &self.dead {
            return Err(PushError::Dead(error.clone()));
        }
        let in_flight = self.slots.used();
        // Requests that wait for room in the ring come first.
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

    /// Makes every pushed request visible to the device; `Some` if the device wants a notification.
    #[must_use]
    pub fn prepare_kick(&mut self) -> Option<Kick> {
        self.read_mail();
        self.publish().then(|| Kick::new(Arc::clone(&self.bell)))
    }

    /// [`Queue::prepare_kick`] and [`Kick::notify`] in one call, for an owner without a lock.
    pub fn submit(&mut self) {
        self.read_mail();
        if self.publish() {
            self.bell.ring();
        }
    }

    /// Returns whether the device wants a notification.
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

    /// Takes up to `out.len()` completions; never waits. Also ends requests whose deadline has passed, and
    /// sends the flush after a durable write (and notifies the device of it).
    ///
    /// # Errors
    /// [`QueueError`], but only after all completions have been taken.
    #[inline]
    pub fn completions(&mut self, out: &mut [Completion]) -> Result<usize, QueueError> {
        let (taken, wanted) = self.take(out);
        if wanted {
            self.bell.ring();
        }
        taken
    }

    /// Like [`Queue::completions`], for an owner with a lock: returns the notification instead of sending it.
    pub(crate) fn completions_and_kick(
        &mut self,
        out: &mut [Completion],
    ) -> (Result<usize, QueueError>, Option<Kick>) {
        let (taken, wanted) = self.take(out);
        (taken, wanted.then(|| Kick::new(Arc::clone(&self.bell))))
    }

    /// Takes completions. Also returns whether the device wants a notification.
    #[inline]
    fn take(&mut self, out: &mut [Completion]) -> (Result<usize, QueueError>, bool) {
        self.read_mail();
        let mut taken = 0;
        if self.slots.unreported() > 0 {
            taken = self.slots.report(out);
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

    /// Takes used chains off the ring while `out` has room.
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
                    Settled::Ended(completion) => {
                        out[popped] = completion;
                        popped += 1;
                    }
                    Settled::Silent => {}
                    Settled::Flush => sent = true,
                },
                Err(fault) => {
                    self.die(QueueError::Device { queue: self.index, fault });
                    return (popped + self.slots.report(&mut out[popped..]), false);
                }
            }
        }
        if self.slots.waiting() > 0 {
            sent |= self.send_waiting() > 0;
        }
        (popped, sent && self.publish())
    }

    /// Handles a chain that the device has completed.
    #[inline]
    fn settle(&mut self, used: Used) -> Settled {
        #[allow(clippy::cast_possible_truncation)] // the ring returns the `u16` that it was given
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
                Settled::Ended(completion)
            }
            Stage::Zombie if !slot.own => {
                let token = slot.token;
                self.slots.free(index);
                Settled::Ended(Completion { token, stored_bytes: 0, result: Err(RequestError::Returned) })
            }
            _ => {
                self.slots.returned(index);
                Settled::Silent
            }
        }
    }

    /// The result of the live request in slot `index`, which the device has completed.
    pub(crate) fn outcome(&mut self, index: u16, written_bytes: u32) -> Result<(), RequestError> {
        let status = self.area.load_status(index);
        outcome(self.slots.get_mut(index), status, written_bytes, self.short_reads)
    }

    fn flush_after_write(&mut self, index: u16) -> Settled {
        let slot = self.slots.get_mut(index);
        slot.phase = Phase::FlushAfterWrite;
        // The write's descriptors are free again, so there is room, unless other requests wait for it.
        if send(&mut self.ring, &self.area, self.features, index, slot).is_err() {
            self.slots.wait(index);
        }
        Settled::Flush
    }

    /// Sends the requests that wait for room, in the order in which they were pushed. Returns how many it sent.
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

    /// Ends the requests whose deadline has passed, and reports as many as `out` has room for.
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
        self.slots.report(out)
    }

    /// Ends the request(s) with this token now, with [`crate::RequestError::Cancelled`]. The device is not informed
    /// (virtio-blk has no cancellation), so it returns the buffers later. Returns whether there was such a request.
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

    /// The earliest deadline of a request in flight (or of one that was in flight until recently). For owners that
    /// sleep in their own event loop, because only a call to this queue ends a request at its deadline.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.earliest
    }

    /// The queue's counters.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        QueueStats { completed: self.slots.ended, ..self.stats }
    }

    /// Ends everything in flight with `Lost`.
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

/// The result of handling a used chain.
enum Settled {
    /// Report the completion to the owner.
    Ended(Completion),
    /// Report nothing, because no caller waits for it.
    Silent,
    /// Send the flush.
    Flush,
}

/// The request's result, from the device's answer; stores a read's length in the slot.
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
