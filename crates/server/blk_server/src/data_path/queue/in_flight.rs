//! The requests in flight of one queue, one slot per tag.
//!
//! A tag is the head of a chain in a split ring, or the buffer id in a packed one. If a tag becomes available while its
//! slot is in use, the ring is faulty. A request may have several ops. Times are those of `process_ns`.

use std::time::Duration;

use io_engine::OpError;
use virtio_blk::ReplySlot;

/// The server logs each request that takes longer than this, once.
pub(crate) const STUCK_AFTER: Duration = Duration::from_secs(30);

/// The kind, range and durability of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestInfo {
    pub(crate) kind: RequestKind,
    pub(crate) sector: u64,
    pub(crate) bytes: u64,
    pub(crate) durability: RequestDurability,
}

impl RequestInfo {
    /// The offset in the image, for log lines.
    pub(crate) fn offset_bytes(&self) -> u64 {
        self.sector.saturating_mul(disk_image::SECTOR_BYTES)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

impl RequestKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write zeroes",
        }
    }
}

impl std::fmt::Display for RequestKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The durability that status OK guarantees for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestDurability {
    /// The request is complete; a write is visible to every reader.
    Done,
    /// This request's data is durable.
    Durable,
    /// All data is durable.
    Flushed,
}

#[derive(Clone, Debug)]
struct Slot {
    reply: ReplySlot,
    info: RequestInfo,
    ops_left: u16,
    stored_bytes: u64,
    failed: Option<OpError>,
    /// When the request was taken from the ring.
    taken_ns: u64,
    reported: bool,
    is_parked: bool,
    /// Number of earlier attempts.
    tries: u32,
}

/// A request whose ops are all complete.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finished {
    pub(crate) reply: ReplySlot,
    pub(crate) info: RequestInfo,
    pub(crate) stored_bytes: u64,
    pub(crate) failed: Option<OpError>,
    /// When the request was taken from the ring.
    pub(crate) taken_ns: u64,
    /// Number of earlier attempts.
    pub(crate) tries: u32,
}

/// A request that was parked and is about to start again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Retry {
    pub(crate) reply: ReplySlot,
    pub(crate) info: RequestInfo,
    pub(crate) taken_ns: u64,
    pub(crate) tries: u32,
}

/// The requests in flight of one queue.
#[derive(Debug)]
pub(crate) struct InFlight {
    slots: Box<[Option<Slot>]>,
    count: usize,
    parked: usize,
    /// When each tag's request last started again after it was parked. Empty before the first retry.
    retried_ns: Box<[u64]>,
}

impl InFlight {
    pub(crate) fn new(queue_size: u16) -> Self {
        let slots = (0..queue_size).map(|_| None).collect();
        Self { slots, count: 0, parked: 0, retried_ns: Box::default() }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Number of parked requests, which [`InFlight::count`] includes.
    pub(crate) fn parked(&self) -> usize {
        self.parked
    }

    /// Number of requests in the engine.
    #[inline]
    pub(crate) fn in_engine(&self) -> usize {
        self.count - self.parked
    }

    #[inline]
    pub(crate) fn is_taken(&self, tag: u16) -> bool {
        self.slots.get(usize::from(tag)).is_some_and(Option::is_some)
    }

    /// Fills the slot before the engine gets the request's ops.
    #[inline]
    pub(crate) fn begin(&mut self, tag: u16, reply: ReplySlot, info: RequestInfo, ops: u16, now_ns: u64) {
        let slot = &mut self.slots[usize::from(tag)];
        debug_assert!(slot.is_none(), "the caller checks that the tag is free");
        *slot = Some(Slot {
            reply,
            info,
            ops_left: ops,
            stored_bytes: 0,
            failed: None,
            taken_ns: now_ns,
            reported: false,
            is_parked: false,
            tries: 0,
        });
        self.count += 1;
    }

    /// Keeps a failed request in flight, without ops in the engine.
    pub(crate) fn park(&mut self, tag: u16, finished: &Finished) {
        let &Finished { reply, info, taken_ns, tries, .. } = finished;
        self.begin(tag, reply, info, 0, taken_ns);
        if let Some(slot) = &mut self.slots[usize::from(tag)] {
            (slot.is_parked, slot.tries) = (true, tries + 1);
            self.parked += 1;
        }
    }

    /// Removes a parked request from its slot, so that it can start again.
    pub(crate) fn take_parked(&mut self, tag: u16) -> Option<Retry> {
        let entry = self.slots.get_mut(usize::from(tag))?;
        let &mut Slot { reply, info, taken_ns, tries, .. } = entry.as_mut().filter(|slot| slot.is_parked)?;
        *entry = None;
        (self.count, self.parked) = (self.count - 1, self.parked - 1);
        Some(Retry { reply, info, taken_ns, tries })
    }

    /// Gives a request that has just started again the state that it had before it was parked.
    pub(crate) fn note_retry(&mut self, tag: u16, retry: &Retry, stored_bytes: u64) {
        if self.retried_ns.is_empty() {
            self.retried_ns = vec![0; self.slots.len()].into();
        }
        if let Some(Some(slot)) = self.slots.get_mut(usize::from(tag)) {
            self.retried_ns[usize::from(tag)] = slot.taken_ns;
            (slot.tries, slot.stored_bytes, slot.taken_ns) = (retry.tries, stored_bytes, retry.taken_ns);
        }
    }

    /// Returns `None` if the tag is free.
    pub(crate) fn durability(&self, tag: u16) -> Option<RequestDurability> {
        Some(self.slots.get(usize::from(tag))?.as_ref()?.info.durability)
    }

    /// Completes one op. If it was the request's last op, returns the request with its first failure.
    #[inline]
    pub(crate) fn complete_op(
        &mut self,
        tag: u16,
        result: Result<(), OpError>,
        stored_bytes: u64,
    ) -> Option<Finished> {
        let entry = &mut self.slots[usize::from(tag)];
        let slot = entry.as_mut()?;
        slot.ops_left -= 1;
        slot.stored_bytes += stored_bytes;
        if let Err(error) = result {
            slot.failed.get_or_insert(error);
        }
        if slot.ops_left > 0 {
            return None;
        }
        let Slot { reply, info, stored_bytes, failed, taken_ns, tries, .. } = *slot;
        *entry = None;
        self.count -= 1;
        Some(Finished { reply, info, stored_bytes, failed, taken_ns, tries })
    }

    /// Whether [`InFlight::report_stuck`] would return a request.
    pub(crate) fn has_stuck(&self, now_ns: u64) -> bool {
        self.stuck(now_ns).next().is_some()
    }

    /// Returns the oldest stuck request that has not been returned yet.
    pub(crate) fn report_stuck(&mut self, now_ns: u64) -> Option<(RequestInfo, Duration)> {
        let (tag, age) = self.stuck(now_ns).max_by_key(|&(_, age)| age)?;
        let slot = self.slots[tag].as_mut()?;
        slot.reported = true;
        Some((slot.info, age))
    }

    /// The stuck requests that were not yet returned, by tag, each with its age since this attempt started.
    fn stuck(&self, now_ns: u64) -> impl Iterator<Item = (usize, Duration)> {
        let slots = self.slots.iter().enumerate();
        let running = slots.filter_map(|(tag, slot)| Some((tag, slot.as_ref()?)));
        let unreported = running.filter(|(_, slot)| !slot.reported && !slot.is_parked);
        let aged = unreported.map(move |(tag, slot)| {
            let started_ns = if slot.tries > 0 { self.retried_ns[tag] } else { slot.taken_ns };
            (tag, Duration::from_nanos(now_ns.saturating_sub(started_ns)))
        });
        aged.filter(|&(_, age)| age >= STUCK_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
    use virtqueue::Chain;

    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;
    const INFO: RequestInfo =
        RequestInfo { kind: RequestKind::Read, sector: 8, bytes: 512, durability: RequestDurability::Done };

    fn reply() -> ReplySlot {
        let region = Region::from_memfd(GuestAddress(0), 4096).expect("memory");
        let view = MemoryView::new(Arc::new(GuestMemory::new(vec![Arc::new(region)]).expect("one region")));
        let mut chain = Chain::with_capacity(1);
        chain.set(&[], &[GuestRange { addr: 0, len_bytes: 1 }]);
        virtio_blk::reply_slot(&chain, &view).expect("a status byte")
    }

    #[test]
    fn request_is_finished_by_its_last_op_and_keeps_its_first_failure() {
        let mut in_flight = InFlight::new(4);
        in_flight.begin(2, reply(), INFO, 3, 70);
        assert!(in_flight.complete_op(2, Ok(()), 512).is_none());
        assert!(in_flight.complete_op(2, Err(OpError::Cancelled), 0).is_none());
        let late = OpError::WriteStalled { offset_bytes: 0 };
        let finished = in_flight.complete_op(2, Err(late), 100).expect("the last op");
        assert_eq!((finished.stored_bytes, finished.failed), (612, Some(OpError::Cancelled)));
        assert_eq!(finished.taken_ns, 70);
        assert!(!in_flight.is_taken(2) && in_flight.count() == 0);
    }

    #[test]
    fn stuck_request_is_reported_once_with_its_age_and_a_young_one_is_not() {
        let (start, mut in_flight) = (7, InFlight::new(4));
        in_flight.begin(0, reply(), INFO, 1, start);
        in_flight.begin(1, reply(), INFO, 1, start + 30 * SECOND_NS);
        let now = start + 35 * SECOND_NS;
        assert!(!in_flight.has_stuck(start + 29 * SECOND_NS));
        assert_eq!(in_flight.report_stuck(now), Some((INFO, Duration::from_secs(35))));
        assert!(!in_flight.has_stuck(now));
        assert_eq!(in_flight.report_stuck(now), None);
    }

    #[test]
    fn parked_request_keeps_its_tag_is_not_stuck_and_goes_on_where_it_was() {
        let (start, mut in_flight) = (7, InFlight::new(4));
        in_flight.begin(2, reply(), INFO, 1, start);
        let finished = in_flight.complete_op(2, Err(OpError::WriteStalled { offset_bytes: 0 }), 100).unwrap();
        in_flight.park(2, &finished);
        let retried = start + 60 * SECOND_NS;
        assert!(in_flight.is_taken(2) && !in_flight.has_stuck(retried));
        assert_eq!((in_flight.count(), in_flight.parked(), in_flight.in_engine()), (1, 1, 0));
        let retry = in_flight.take_parked(2).unwrap();
        in_flight.begin(2, retry.reply, retry.info, 1, retried);
        in_flight.note_retry(2, &retry, 100);
        assert_eq!((in_flight.parked(), in_flight.in_engine()), (0, 1));
        // The request was taken long ago, but its retry is recent.
        assert!(
            !in_flight.has_stuck(retried + 29 * SECOND_NS) && in_flight.has_stuck(retried + 30 * SECOND_NS)
        );
        let finished = in_flight.complete_op(2, Ok(()), 412).unwrap();
        assert_eq!((finished.stored_bytes, finished.tries, finished.info), (512, 1, INFO));
        assert_eq!(finished.taken_ns, start);
    }

    #[test]
    fn retry_that_hangs_is_stuck_although_other_requests_are_retried_meanwhile() {
        let mut in_flight = InFlight::new(4);
        let failed = Err(OpError::WriteStalled { offset_bytes: 0 });
        let park = |in_flight: &mut InFlight, tag| {
            let finished = in_flight.complete_op(tag, failed, 0).unwrap();
            in_flight.park(tag, &finished);
        };
        let retry = |in_flight: &mut InFlight, tag, at_ns| {
            let retry = in_flight.take_parked(tag).unwrap();
            in_flight.begin(tag, retry.reply, retry.info, 1, at_ns);
            in_flight.note_retry(tag, &retry, 0);
        };
        for tag in [0, 1] {
            in_flight.begin(tag, reply(), INFO, 1, 0);
            park(&mut in_flight, tag);
        }
        retry(&mut in_flight, 0, 10 * SECOND_NS);
        for seconds in (20..600).step_by(10) {
            retry(&mut in_flight, 1, seconds * SECOND_NS);
            park(&mut in_flight, 1);
        }
        assert_eq!(in_flight.report_stuck(600 * SECOND_NS), Some((INFO, Duration::from_secs(590))));
        // The tag's next request is no retry.
        in_flight.complete_op(0, Ok(()), 512).unwrap();
        in_flight.begin(0, reply(), INFO, 1, 600 * SECOND_NS);
        assert!(!in_flight.has_stuck(629 * SECOND_NS) && in_flight.has_stuck(630 * SECOND_NS));
    }

    #[test]
    fn op_of_a_request_that_is_not_there_finishes_nothing() {
        assert!(InFlight::new(4).complete_op(3, Ok(()), 0).is_none());
    }
}
