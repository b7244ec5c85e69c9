//! What is in flight: one slot per request, in private memory, as many as the queue has descriptors.
//!
//! ```text
//! Free → Live (its owner waits) ─ device answers ─→ told, Free
//!          ├ deadline, cancel → Ending → told → Zombie ─ device answers → Returning → told, Free
//!          └ device gone      → Ending → told, Free
//! ```
//!
//! - A slot holds all that is needed to send its request again, into another ring.
//! - What has ended and was not yet told is counted (`untold`): a caller with little room asks again.
//! - Chains keep their capacity: a warm queue does not allocate.
//!
//! Not here: the bytes that the device sees (`area.rs`), checks of a user's request (`fill.rs`).

use std::time::Instant;

use guest_mem::GuestRange;
use virtio_blk::Segment;

use crate::memory::Buffer;
use crate::request::{Completion, RequestError};

/// Where a slot is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Nobody's.
    Free,
    /// Its owner waits for it.
    Live,
    /// Ended, its owner does not know yet.
    Ending(Result<(), RequestError>),
    /// Ended, and its owner knows; the buffers are still with the device.
    Zombie,
    /// As `Zombie`, and the device has let go; its owner does not know yet.
    Returning,
}

/// What is sent for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The request and nothing else.
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
    /// The ring has its chain.
    pub in_ring: bool,
    pub phase: Phase,
    pub token: u64,
    pub deadline: Option<Instant>,
    /// Order of the pushes.
    pub sequence: u64,
    /// The header's type.
    pub kind: u32,
    pub sector: u64,
    /// All buffers, header first, status last.
    pub chain: Vec<GuestRange>,
    /// How many of `chain` the device reads.
    pub readable: usize,
    /// Of a discard or a write zeroes.
    pub segments: Vec<Segment>,
    /// What a read must store.
    pub wanted_bytes: u32,
    /// What it did store, of a request that is `Ending`.
    pub stored_bytes: u32,
    /// Made by the queue for a blocking call: nobody is told of its return.
    pub own: bool,
    /// What it still uses when the call is over.
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

    /// Buffers of what is to be sent now: those the device reads, and those it writes.
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
    /// The one freed last is used next: it is still in the cache.
    free: Vec<u16>,
    /// `Ending` and `Returning` ones.
    untold: usize,
    /// `Live` ones that the ring has no room for.
    waiting: usize,
    /// Requests whose end was told, since the queue was made.
    pub ended: u64,
    next_sequence: u64,
}

impl Slots {
    /// `count` free ones.
    pub(crate) fn new(count: u16) -> Self {
        let slots = (0..count).map(|_| Slot::free()).collect();
        Self { slots, free: (0..count).rev().collect(), untold: 0, waiting: 0, ended: 0, next_sequence: 0 }
    }

    /// Not free.
    #[inline]
    pub(crate) fn used(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Requests of blocking calls that are over.
    pub(crate) fn own_zombies(&self) -> usize {
        self.slots.iter().filter(|slot| slot.own && slot.stage == Stage::Zombie).count()
    }

    /// Free.
    #[inline]
    pub(crate) fn left(&self) -> usize {
        self.free.len()
    }

    /// Ended and not told.
    #[inline]
    pub(crate) fn untold(&self) -> usize {
        self.untold
    }

    /// Live, and not in the ring for want of room.
    #[inline]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// A free one, which stays free until [`Slots::begin`].
    #[inline]
    pub(crate) fn next_free(&mut self) -> Option<(u16, &mut Slot)> {
        let &index = self.free.last()?;
        self.slots.get_mut(usize::from(index)).map(|slot| (index, slot))
    }

    /// By index.
    #[inline]
    pub(crate) fn get(&self, index: u16) -> &Slot {
        &self.slots[usize::from(index)]
    }

    /// By index.
    #[inline]
    pub(crate) fn get_mut(&mut self, index: u16) -> &mut Slot {
        &mut self.slots[usize::from(index)]
    }

    /// The slot of the last [`Slots::next_free`] is live: in the ring, or ended already with `outcome`.
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

    /// Its owner is to be told `result`.
    pub(crate) fn end(&mut self, index: u16, result: Result<(), RequestError>) {
        self.set_untold(index, Stage::Ending(result));
    }

    fn set_untold(&mut self, index: u16, stage: Stage) {
        self.get_mut(index).stage = stage;
        self.untold += 1;
    }

    /// The device is done with slot `index`, whose owner is told later.
    pub(crate) fn returned(&mut self, index: u16) {
        let slot = self.get_mut(index);
        slot.in_ring = false;
        if slot.stage == Stage::Zombie {
            self.release(index);
        }
    }

    /// A zombie that is no longer with the device.
    fn release(&mut self, index: u16) {
        if self.get(index).own {
            self.free(index);
        } else {
            self.set_untold(index, Stage::Returning);
        }
    }

    /// Nobody's again.
    #[inline]
    pub(crate) fn free(&mut self, index: u16) {
        let slot = self.get_mut(index);
        (slot.stage, slot.in_ring, slot.own) = (Stage::Free, false, false);
        slot.bounce = None;
        self.free.push(index);
    }

    /// The ring has no room for `index`: later.
    pub(crate) fn wait(&mut self, index: u16) {
        self.get_mut(index).in_ring = false;
        self.waiting += 1;
    }

    /// The ring has taken one that waited.
    pub(crate) fn sent_waiting(&mut self, index: u16) {
        self.get_mut(index).in_ring = true;
        self.waiting -= 1;
    }

    /// The live one that waits longest.
    pub(crate) fn first_waiting(&self) -> Option<u16> {
        let waiting = self.indices().filter(|&i| self.get(i).stage == Stage::Live && !self.get(i).in_ring);
        waiting.min_by_key(|&index| self.get(index).sequence)
    }

    /// Those for which `wanted` holds.
    pub(crate) fn position(&self, wanted: impl Fn(&Slot) -> bool) -> Option<u16> {
        self.indices().find(|&index| wanted(self.get(index)))
    }

    /// All.
    pub(crate) fn indices(&self) -> impl Iterator<Item = u16> + use<> {
        #[allow(clippy::cast_possible_truncation)] // made from a `u16`
        let count = self.slots.len() as u16;
        0..count
    }

    /// Ends the live slot `index` before the device is done with it.
    pub(crate) fn end_early(&mut self, index: u16, error: RequestError) {
        if !self.get(index).in_ring {
            self.waiting -= 1;
        }
        self.end(index, Err(error));
    }

    /// Tells what is untold, as far as `out` goes; returns how many.
    #[cold]
    pub(crate) fn tell(&mut self, out: &mut [Completion]) -> usize {
        let mut told = 0;
        for index in self.indices() {
            while told < out.len()
                && let Some(completion) = self.tell_one(index)
            {
                out[told] = completion;
                told += 1;
            }
        }
        told
    }

    fn tell_one(&mut self, index: u16) -> Option<Completion> {
        let slot = self.get(index);
        let (token, in_ring) = (slot.token, slot.in_ring);
        match slot.stage {
            Stage::Ending(result) => {
                let stored_bytes = if result.is_ok() { slot.stored_bytes } else { 0 };
                self.untold -= 1;
                self.ended += 1;
                self.told_end(index, result, in_ring);
                Some(Completion { token, stored_bytes, result })
            }
            Stage::Returning => {
                self.untold -= 1;
                self.free(index);
                Some(Completion { token, stored_bytes: 0, result: Err(RequestError::Returned) })
            }
            Stage::Free | Stage::Live | Stage::Zombie => None,
        }
    }

    fn told_end(&mut self, index: u16, result: Result<(), RequestError>, in_ring: bool) {
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

    /// The device is gone: what is live is lost, and the rest comes back.
    pub(crate) fn lose_all(&mut self) {
        self.waiting = 0;
        for index in self.indices() {
            if self.get(index).stage == Stage::Live {
                self.end(index, Err(RequestError::Lost));
            }
            self.abandon(index);
        }
    }

    /// The ring that slot `index` was in is not looked at any more.
    pub(crate) fn abandon(&mut self, index: u16) {
        let slot = self.get_mut(index);
        if slot.in_ring
            && let Some(buffer) = slot.bounce.take()
        {
            // Who had the ring may still write there.
            buffer.abandon();
        }
        self.returned(index);
    }

    /// A live slot is to be sent again, from its beginning.
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

    /// Nobody waits for the queue's own request any more.
    pub(crate) fn forget_own(&mut self) {
        while let Some(index) = self.position(|slot| slot.own && slot.stage == Stage::Live) {
            self.waiting -= usize::from(!self.get(index).in_ring);
            self.get_mut(index).stage = Stage::Zombie;
            if !self.get(index).in_ring {
                self.release(index);
            }
        }
    }

    /// The queue's own request that ended before the device was done with it keeps `buffer` until it is. Back to
    /// the pool if there is none.
    pub(crate) fn strand(&mut self, buffer: Option<Buffer>) {
        let own = self.indices().filter(|&i| self.get(i).own && self.get(i).stage == Stage::Zombie);
        // The last one pushed: an earlier one without a buffer (a flush, say) comes back at another time.
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
