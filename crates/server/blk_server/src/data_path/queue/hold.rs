//! Requests that the host failed and that are held: kept in flight, tried again later, instead of reported to the guest.
//!
//! `completion failed → Hold::wants → Held (the guest waits) → due, or resumed → tried again → answered | held again`
//!
//! - A held request keeps its tag, and so its place in the ring and in the in-flight log; it has nothing in the engine
//!   and none of its worker's buffers. There are never more than the queue has descriptors.
//! - Room for all of them is made when the queue starts; without a policy there is nothing.
//! - A sync is never held: a second one that succeeds says nothing about what the first one lost (docs/decisions/0012).
//!
//! Why it is so: docs/decisions/0038. Not here: trying again, and when there is no time for it (`queue/mod.rs`,
//! `queue/holding.rs`).

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use guest_mem::IoVecs;
use io_engine::OpError;
use rustix::io::Errno;
use virtio_blk::{SegmentBuffer, Segments};

/// Held requests that nobody tries again are looked at this often: their disk may have failed for good meanwhile.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Which failures are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldWhat {
    /// Whatever a repair of the host's storage may cure.
    Any,
    /// No space left, or no quota.
    NoSpace,
}

/// How a disk holds requests that the host failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Which.
    pub what: HoldWhat,
    /// How long until they are tried again by themselves; `None`: only when somebody asks for it.
    pub retry_after: Option<Duration>,
}

impl Hold {
    /// Whether waiting may help. What was given up, what the host cannot do at all, and memory of the guest that is
    /// gone, will be the same the next time.
    pub(crate) fn wants(&self, error: OpError) -> bool {
        match (self.what, error) {
            (_, OpError::Cancelled) => false,
            (_, OpError::Errno(errno)) if is_no_space(errno) => true,
            (HoldWhat::NoSpace, _) => false,
            (HoldWhat::Any, OpError::Errno(errno)) => {
                !matches!(errno, Errno::FAULT | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS)
            }
            (HoldWhat::Any, OpError::EndOfImage { .. } | OpError::WriteStalled { .. }) => true,
        }
    }

    fn pause(&self) -> Duration {
        self.retry_after.unwrap_or(LOOK_AGAIN)
    }
}

/// As on the command line.
impl fmt::Display for HoldWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "hold",
            Self::NoSpace => "hold-on-enospc",
        })
    }
}

/// Whether there would have been room on a larger file system.
pub(crate) fn is_no_space(errno: Errno) -> bool {
    matches!(errno, Errno::NOSPC | Errno::DQUOT)
}

/// What is left of one.
#[derive(Debug)]
pub(crate) struct HeldRequest {
    pub(crate) tag: u16,
    /// Of a read or write: what is not yet done.
    pub(crate) buffers: IoVecs,
}

/// Those of one queue.
#[derive(Debug, Default)]
pub(crate) struct Held {
    hold: Option<Hold>,
    /// Oldest first.
    requests: VecDeque<HeldRequest>,
    /// How many, from the front, are to be tried again as soon as there is room.
    to_try: usize,
    due: Option<Instant>,
    /// Of discards and zeroes in flight, by tag: the guest may have written over its own by the time they are tried
    /// again.
    segments: Box<[SegmentBuffer]>,
    /// Requests that were held and are not yet answered.
    open: u64,
    /// Of those since the last time that there was none: answered with an error.
    failed: u64,
    all: u64,
}

/// All held requests are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Over {
    pub(crate) requests: u64,
    pub(crate) failed: u64,
}

impl Held {
    /// `zeroes`: whether the disk takes discards or zeroes.
    pub(crate) fn new(hold: Option<Hold>, queue_size: u16, zeroes: bool) -> Self {
        if hold.is_none() {
            return Self::default();
        }
        let tags = usize::from(queue_size);
        let kept = if zeroes { tags } else { 0 };
        Self {
            hold,
            requests: VecDeque::with_capacity(tags),
            segments: (0..kept).map(|_| SegmentBuffer::default()).collect(),
            ..Self::default()
        }
    }

    pub(crate) fn hold(&self) -> Option<Hold> {
        self.hold
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// For as long as the request is in flight.
    pub(crate) fn keep_segments(&mut self, tag: u16, segments: &Segments<'_>) {
        if let Some(kept) = self.segments.get_mut(usize::from(tag)) {
            kept.keep(segments);
        }
    }

    pub(crate) fn segments(&self, tag: u16) -> Option<Segments<'_>> {
        self.segments.get(usize::from(tag)).map(SegmentBuffer::kept)
    }

    /// `is_first`: it was not held before.
    pub(crate) fn push(&mut self, request: HeldRequest, is_first: bool, now: Instant) {
        self.requests.push_back(request);
        let (open, pause) = (u64::from(is_first), self.hold.map_or(LOOK_AGAIN, |hold| hold.pause()));
        self.open += open;
        self.all += open;
        self.due.get_or_insert(now + pause);
    }

    /// When [`Held::look`] is to be called.
    #[inline]
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// It is time, unless only somebody's word counts; `hopeless`: nothing is to be had by waiting any longer.
    pub(crate) fn look(&mut self, now: Instant, hopeless: bool) {
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        self.due = None;
        match self.hold {
            Some(Hold { retry_after: None, .. }) if !hopeless && !self.is_empty() => {
                self.due = Some(now + LOOK_AGAIN);
            }
            _ => _ = self.try_all(),
        }
    }

    /// Those that are held now, which are so many.
    pub(crate) fn try_all(&mut self) -> usize {
        self.to_try = self.requests.len();
        self.due = None;
        self.to_try
    }

    #[inline]
    pub(crate) fn has_to_try(&self) -> bool {
        self.to_try > 0
    }

    pub(crate) fn next_to_try(&mut self) -> Option<HeldRequest> {
        self.to_try = self.to_try.checked_sub(1)?;
        self.requests.pop_front()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut HeldRequest> {
        self.requests.iter_mut()
    }

    /// A request that was held is answered. Returns something if it was the last one.
    pub(crate) fn answered(&mut self, failed: bool) -> Option<Over> {
        self.failed += u64::from(failed);
        self.open = self.open.saturating_sub(1);
        if self.open > 0 {
            return None;
        }
        Some(Over { requests: std::mem::take(&mut self.all), failed: std::mem::take(&mut self.failed) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY: Hold = Hold { what: HoldWhat::Any, retry_after: Some(Duration::from_secs(3)) };
    const NO_SPACE: Hold = Hold { what: HoldWhat::NoSpace, retry_after: None };

    fn errno(errno: Errno) -> OpError {
        OpError::Errno(errno)
    }

    #[test]
    fn lack_of_space_is_held_by_both_and_an_io_error_by_one() {
        for held in [Errno::NOSPC, Errno::DQUOT] {
            assert!(ANY.wants(errno(held)) && NO_SPACE.wants(errno(held)), "{held}");
        }
        let cut = OpError::EndOfImage { offset_bytes: 0, end_bytes: 512 };
        assert!(ANY.wants(errno(Errno::IO)) && ANY.wants(cut));
        assert!(!NO_SPACE.wants(errno(Errno::IO)) && !NO_SPACE.wants(cut));
    }

    #[test]
    fn what_waiting_does_not_cure_is_never_held() {
        for hopeless in [Errno::FAULT, Errno::INVAL, Errno::OPNOTSUPP, Errno::NOSYS] {
            assert!(!ANY.wants(errno(hopeless)), "{hopeless}");
        }
        assert!(!ANY.wants(OpError::Cancelled) && !NO_SPACE.wants(OpError::Cancelled));
    }

    fn request(tag: u16) -> HeldRequest {
        HeldRequest { tag, buffers: IoVecs::default() }
    }

    fn two(hold: Hold, now: Instant) -> Held {
        let mut held = Held::new(Some(hold), 4, false);
        held.push(request(1), true, now);
        held.push(request(3), true, now + Duration::from_secs(1));
        held
    }

    #[test]
    fn all_are_due_a_pause_after_the_first_in_the_order_in_which_they_were_held() {
        let now = Instant::now();
        let mut held = two(ANY, now);
        held.look(now + Duration::from_secs(2), false);
        assert!(!held.has_to_try() && held.next_to_try().is_none());
        held.look(now + Duration::from_secs(3), false);
        assert_eq!((held.next_to_try().unwrap().tag, held.next_to_try().unwrap().tag), (1, 3));
        assert!(!held.has_to_try() && held.is_empty() && held.due().is_none());
    }

    #[test]
    fn one_that_is_held_again_waits_for_the_next_time() {
        let now = Instant::now();
        let mut held = two(ANY, now);
        assert_eq!(held.try_all(), 2);
        let first = held.next_to_try().unwrap();
        held.push(first, false, now);
        assert_eq!(held.next_to_try().unwrap().tag, 3);
        assert!(held.next_to_try().is_none() && !held.is_empty());
        assert_eq!(held.due(), Some(now + Duration::from_secs(3)));
    }

    #[test]
    fn without_a_pause_nothing_is_tried_until_it_is_hopeless() {
        let now = Instant::now();
        let mut held = two(NO_SPACE, now);
        held.look(now + LOOK_AGAIN, false);
        assert!(!held.has_to_try() && held.due() == Some(now + 2 * LOOK_AGAIN));
        held.look(now + 2 * LOOK_AGAIN, true);
        assert!(held.has_to_try());
    }

    #[test]
    fn end_is_told_with_the_last_answer_and_counted_anew_after() {
        let mut held = two(ANY, Instant::now());
        assert_eq!(held.answered(true), None);
        assert_eq!(held.answered(false), Some(Over { requests: 2, failed: 1 }));
        held.push(request(0), true, Instant::now());
        assert_eq!(held.answered(false), Some(Over { requests: 1, failed: 0 }));
    }
}
