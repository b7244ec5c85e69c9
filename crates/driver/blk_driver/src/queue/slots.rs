//! The requests in flight: one slot per request, in private memory, and as many slots as the queue has descriptors.
//!
//! ```text
//! Free → Live (its owner waits) ─ device answers ─→ reported, Free
//!          ├ deadline, cancel → Ending → reported → Zombie ─ device answers → Returning → reported, Free
//!          └ device gone      → Ending → reported, Free
//! ```
//!
//! - A slot holds everything that is needed to send its request again, into another ring.
//! - `unreported` counts the slots that have ended and were not yet reported: a caller whose array has no room for all
//!   of them calls again.
//! - Chains keep their capacity: a warm queue does not allocate.

use std::time::Instant;

use guest_mem::GuestRange;
use virtio_blk::Segment;

use crate::memory::Buffer;
use crate::request::{Completion, RequestError};

/// The state of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Unused.
    Free,
    /// The owner waits for the request.
    Live,
    /// The request ended, but this was not yet reported to the owner.
    Ending(Result<(), RequestError>),
    /// The request ended, and this was reported; the device still has the buffers.
    Zombie,
    /// The request ended, and this was reported. The device has since released the buffers, but the queue has not
    /// reported this yet.
    Returning,
}

/// The part of a request that the device gets next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The request alone.
    Only,
    /// A write; its flush comes next.
    WriteBeforeFlush,
    /// The flush after the write.
    FlushAfterWrite,
}

/// One request.
#[derive(Debug)]
pub(crate) struct Slot {
    pub stage: Stage,
    /// The chain is in the ring.
    pub in_ring: bool,
    pub phase: Phase,
    pub token: u64,
    pub deadline: Option<Instant>,
    /// Position in the order in which requests were pushed.
    pub sequence: u64,
    /// The header's type.
    pub kind: u32,
    pub sector: u64,
    /// All buffers, header first, status last.
    pub chain: Vec<GuestRange>,
    /// Number of buffers in `chain` that the device reads.
    pub readable: usize,
    /// Segments of a discard or a write zeroes.
    pub segments: Vec<Segment>,
    /// Bytes that a read must store.
    pub wanted_bytes: u32,
    /// Bytes that the device stored, for a request that is `Ending`.
    pub stored_bytes: u32,
    /// The queue made the request for a blocking call, so it does not report the request's return.
    pub own: bool,
    /// The buffer that the request still uses after the call has returned.
    pub bounce: Option<Buffer>,
}

impl Slot {
    fn free() -> Self {
        Self {
            stage: Stage::Free,
            in_ring: false,
            phase: Phase::Only,
            token: 0,
            deadline: None,
            sequence: 0,
            kind: 0,
            sector: 0,
            chain: Vec::new(),
            readable: 0,
            segments: Vec::new(),
            wanted_bytes: 0,
            stored_bytes: 0,
            own: false,
            bounce: None,
        }
    }

    /// The buffers of the request to send now: those that the device reads, and those that it writes.
    #[inline]
    pub(crate) fn buffers(&self) -> (&[GuestRange], &[GuestRange]) {
        match self.phase {
            Phase::FlushAfterWrite => {
                let last = self.chain.len().saturating_sub(1);
                (&self.chain[..1.min(last)], &self.chain[last..])
            }
            Phase::Only | Phase::WriteBeforeFlush => self.chain.split_at(self.readable),
        }
    }
}

/// All slots of a queue.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Box<[Slot]>,
    /// The slot freed last is used first, because it is still in the cache.
    free: Vec<u16>,
    /// Slots that are `Ending` or `Returning`.
    unreported: usize,
    /// `Live` slots that the ring has no room for.
    waiting: usize,
    /// Requests whose end was reported since the queue was made.
    pub ended: u64,
    next_sequence: u64,
}

impl Slots {
    /// `count` free slots.
    pub(crate) fn new(count: u16) -> Self {
        let slots = (0..count).map(|_| Slot::free()).collect();
        Self {
            slots,
            free: (0..count).rev().collect(),
            unreported: 0,
            waiting: 0,
            ended: 0,
            next_sequence: 0,
        }
    }

    /// Slots that are not free.
    #[inline]
    pub(crate) fn used(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Requests of blocking calls that have returned, still with the device.
    pub(crate) fn own_zombies(&self) -> usize {
        self.slots.iter().filter(|slot| slot.own && slot.stage == Stage::Zombie).count()
    }

    /// Free slots.
    #[inline]
    pub(crate) fn left(&self) -> usize {
        self.free.len()
    }

    /// Slots that ended and were not reported.
    #[inline]
    pub(crate) fn unreported(&self) -> usize {
        self.unreported
    }

    /// Live slots that are not in the ring, for lack of room.
    #[inline]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// A free slot; it stays free until [`Slots::begin`].
    #[inline]
    pub(crate) fn next_free(&mut self) -> Option<(u16, &mut Slot)> {
        let &index = self.free.last()?;
        self.slots.get_mut(usize::from(index)).map(|slot| (index, slot))
    }

    /// The slot at `index`.
    #[inline]
    pub(crate) fn get(&self, index: u16) -> &Slot {
        &self.slots[usize::from(index)]
    }

    /// The slot at `index`.
    #[inline]
    pub(crate) fn get_mut(&mut self, index: u16) -> &mut Slot {
        &mut self.slots[usize::from(index)]
    }

    /// Takes the slot from the last [`Slots::next_free`] into use: without an `outcome`, it is live and in the ring;
    /// with one, its request has already ended.
    #[inline]
    pub(crate) fn begin(&mut self, outcome: Option<Result<(), RequestError>>) {
        let Some(index) = self.free.pop() else { return };
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let slot = self.get_mut(index);
        (slot.sequence, slot.in_ring) = (sequence, outcome.is_none());
        match outcome {
            None => slot.stage = Stage::Live,
            Some(result) => self.end(index, result),
        }
    }

    /// Ends the request. `result` is reported later.
    pub(crate) fn end(&mut self, index: u16, result: Result<(), RequestError>) {
        self.set_unreported(index, Stage::Ending(result));
    }

    fn set_unreported(&mut self, index: u16, stage: Stage) {
        self.get_mut(index).stage = stage;
        self.unreported += 1;
    }

    /// The device has completed slot `index`; the queue reports it later.
    pub(crate) fn returned(&mut self, index: u16) {
        let slot = self.get_mut(index);
        slot.in_ring = false;
        if slot.stage == Stage::Zombie {
            self.release(index);
        }
    }

    /// Releases a zombie that is no longer with the device.
    fn release(&mut self, index: u16) {
        if self.get(index).own {
            self.free(index);
        } else {
            self.set_unreported(index, Stage::Returning);
        }
    }

    /// Makes the slot free.
    #[inline]
    pub(crate) fn free(&mut self, index: u16) {
        let slot = self.get_mut(index);
        (slot.stage, slot.in_ring, slot.own) = (Stage::Free, false, false);
        slot.bounce = None;
        self.free.push(index);
    }

    /// The ring has no room for slot `index`, so it is sent later.
    pub(crate) fn wait(&mut self, index: u16) {
        self.get_mut(index).in_ring = false;
        self.waiting += 1;
    }

    /// The ring has taken a slot that waited for room.
    pub(crate) fn sent_waiting(&mut self, index: u16) {
        self.get_mut(index).in_ring = true;
        self.waiting -= 1;
    }

    /// The live slot that has waited longest.
    pub(crate) fn first_waiting(&self) -> Option<u16> {
        let waiting = self.indices().filter(|&i| self.get(i).stage == Stage::Live && !self.get(i).in_ring);
        waiting.min_by_key(|&index| self.get(index).sequence)
    }

    /// The index of the first slot for which `wanted` holds.
    pub(crate) fn position(&self, wanted: impl Fn(&Slot) -> bool) -> Option<u16> {
        self.indices().find(|&index| wanted(self.get(index)))
    }

    /// The indices of all slots.
    pub(crate) fn indices(&self) -> impl Iterator<Item = u16> + use<> {
        #[allow(clippy::cast_possible_truncation)] // made from a `u16`
        let count = self.slots.len() as u16;
        0..count
    }

    /// Ends the live slot `index` although the device has not completed it.
    pub(crate) fn end_early(&mut self, index: u16, error: RequestError) {
        if !self.get(index).in_ring {
            self.waiting -= 1;
        }
        self.end(index, Err(error));
    }

    /// Reports ended slots, as many as `out` has room for; returns how many it reported.
    #[cold]
    pub(crate) fn report(&mut self, out: &mut [Completion]) -> usize {
        let mut reported = 0;
        for index in self.indices() {
            while reported < out.len()
                && let Some(completion) = self.report_one(index)
            {
                out[reported] = completion;
                reported += 1;
            }
        }
        reported
    }

    fn report_one(&mut self, index: u16) -> Option<Completion> {
        let slot = self.get(index);
        let (token, in_ring) = (slot.token, slot.in_ring);
        match slot.stage {
            Stage::Ending(result) => {
                let stored_bytes = if result.is_ok() { slot.stored_bytes } else { 0 };
                self.unreported -= 1;
                self.ended += 1;
                self.after_report(index, result, in_ring);
                Some(Completion { token, stored_bytes, result })
            }
            Stage::Returning => {
                self.unreported -= 1;
                self.free(index);
                Some(Completion { token, stored_bytes: 0, result: Err(RequestError::Returned) })
            }
            Stage::Free | Stage::Live | Stage::Zombie => None,
        }
    }

    fn after_report(&mut self, index: u16, result: Result<(), RequestError>, in_ring: bool) {
        match result {
            Err(error) if error.is_with_device() => {
                self.get_mut(index).stage = Stage::Zombie;
                if !in_ring {
                    self.release(index);
                }
            }
            _ => self.free(index),
        }
    }

    /// Handles the loss of the device: live requests end as lost, and the others are returned.
    pub(crate) fn lose_all(&mut self) {
        self.waiting = 0;
        for index in self.indices() {
            if self.get(index).stage == Stage::Live {
                self.end(index, Err(RequestError::Lost));
            }
            self.abandon(index);
        }
    }

    /// Abandons the ring of slot `index`.
    pub(crate) fn abandon(&mut self, index: u16) {
        let slot = self.get_mut(index);
        if slot.in_ring
            && let Some(buffer) = slot.bounce.take()
        {
            // The back-end that had the ring may still write there.
            buffer.abandon();
        }
        self.returned(index);
    }

    /// Prepares a live slot's request to be sent again from its beginning.
    pub(crate) fn rewind(&mut self, index: u16) {
        let slot = self.get_mut(index);
        if slot.phase == Phase::FlushAfterWrite {
            slot.phase = Phase::WriteBeforeFlush;
        }
        if slot.in_ring {
            slot.in_ring = false;
            self.waiting += 1;
        }
    }

    /// Marks the queue's own requests as no longer awaited.
    pub(crate) fn forget_own(&mut self) {
        while let Some(index) = self.position(|slot| slot.own && slot.stage == Stage::Live) {
            self.waiting -= usize::from(!self.get(index).in_ring);
            self.get_mut(index).stage = Stage::Zombie;
            if !self.get(index).in_ring {
                self.release(index);
            }
        }
    }

    /// Attaches `buffer` to the queue's own request that ended before the device completed it; the slot keeps the
    /// buffer until then. Without such a request, returns the buffer to the pool.
    pub(crate) fn strand(&mut self, buffer: Option<Buffer>) {
        let own = self.indices().filter(|&i| self.get(i).own && self.get(i).stage == Stage::Zombie);
        // The buffer belongs to the request that was pushed last. An earlier one may have no buffer either (a flush,
        // for example).
        let last = own.max_by_key(|&index| self.get(index).sequence);
        if let Some(index) = last.filter(|&index| self.get(index).bounce.is_none()) {
            self.get_mut(index).bounce = buffer;
        }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.indices().for_each(|index| {
            if let (true, Some(buffer)) = (self.get(index).in_ring, self.get_mut(index).bounce.take()) {
                buffer.abandon();
            }
        });
    }
}
