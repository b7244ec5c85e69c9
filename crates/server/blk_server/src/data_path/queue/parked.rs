//! The list of a queue's parked requests, which failed on the host and stay in flight until a retry succeeds.
//!
//! `completion failed → ParkPolicy::wants → ParkedRequests → due, or resumed → retried → completed | parked again`
//!
//! - A parked request keeps its tag, and thereby its entries in the ring and the in-flight log. It has no ops in the
//!   engine and no buffers of the worker.
//! - The list is allocated when the queue starts, and only with a policy.
//! - A failed sync is never parked (docs/decisions/0012). docs/decisions/0038 explains the other choices.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use guest_mem::IoVecs;
use io_engine::OpError;
use rustix::io::Errno;
use virtio_blk::{SegmentBuffer, Segments};

/// If only `ctl resume` starts retries: how often to check whether the disk has failed permanently.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Which failures are parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParkWhat {
    /// Every failure that a repair of the host's storage may fix.
    Any,
    /// Lack of space or quota.
    NoSpace,
}

/// Which failed requests a disk parks, and when it retries them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParkPolicy {
    /// The failures that are parked.
    pub what: ParkWhat,
    /// Pause before each retry; `None`: the queue retries only on `ctl resume`.
    pub retry_after: Option<Duration>,
}

impl ParkPolicy {
    /// Whether a retry may help. It cannot if the request was cancelled or is unsupported, or if memory was lost or
    /// the image is damaged.
    pub(crate) fn wants(&self, error: OpError) -> bool {
        match (self.what, error) {
            (_, OpError::Cancelled | OpError::Damaged) => false,
            (_, OpError::Errno(errno)) if is_no_space(errno) => true,
            (ParkWhat::NoSpace, _) => false,
            (ParkWhat::Any, OpError::Errno(errno)) => {
                !matches!(errno, Errno::FAULT | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS)
            }
            (ParkWhat::Any, OpError::EndOfImage { .. } | OpError::WriteStalled { .. }) => true,
        }
    }

    fn pause(&self) -> Duration {
        self.retry_after.unwrap_or(LOOK_AGAIN)
    }
}

/// Formats the value as the command line spells it.
impl fmt::Display for ParkWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "hold",
            Self::NoSpace => "hold-on-enospc",
        })
    }
}

/// Whether a larger file system or quota would have avoided the error.
pub(crate) fn is_no_space(errno: Errno) -> bool {
    matches!(errno, Errno::NOSPC | Errno::DQUOT)
}

/// A parked request.
#[derive(Debug)]
pub(crate) struct ParkedRequest {
    pub(crate) tag: u16,
    /// When it was parked.
    pub(crate) since: Instant,
    /// The unfinished part of a read or write.
    pub(crate) buffers: IoVecs,
}

/// The parked requests of one queue.
#[derive(Debug, Default)]
pub(crate) struct ParkedRequests {
    policy: Option<ParkPolicy>,
    /// Oldest first.
    requests: VecDeque<ParkedRequest>,
    /// Number of requests, from the front, to retry as soon as there is room.
    to_retry: usize,
    due: Option<Instant>,
    /// Segments of discard and write-zeroes requests in flight, by tag. These are copies, because the guest may
    /// overwrite the originals before a retry.
    segments: Box<[SegmentBuffer]>,
    /// Number of requests that were parked and have not completed yet.
    open: u64,
    /// Number of requests that completed with an error since `open` was last 0.
    failed: u64,
    all: u64,
}

/// All parked requests have completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AllAnswered {
    pub(crate) requests: u64,
    pub(crate) failed: u64,
}

impl ParkedRequests {
    /// `zeroes`: whether the disk offers discard or write zeroes.
    pub(crate) fn new(policy: Option<ParkPolicy>, queue_size: u16, zeroes: bool) -> Self {
        if policy.is_none() {
            return Self::default();
        }
        let tags = usize::from(queue_size);
        let kept = if zeroes { tags } else { 0 };
        Self {
            policy,
            requests: VecDeque::with_capacity(tags),
            segments: (0..kept).map(|_| SegmentBuffer::default()).collect(),
            ..Self::default()
        }
    }

    pub(crate) fn policy(&self) -> Option<ParkPolicy> {
        self.policy
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Keeps a copy of the segments while the request is in flight.
    pub(crate) fn keep_segments(&mut self, tag: u16, segments: &Segments<'_>) {
        if let Some(kept) = self.segments.get_mut(usize::from(tag)) {
            kept.keep(segments);
        }
    }

    pub(crate) fn segments(&self, tag: u16) -> Option<Segments<'_>> {
        self.segments.get(usize::from(tag)).map(SegmentBuffer::kept)
    }

    /// `is_first`: the request was not parked before.
    pub(crate) fn push(&mut self, request: ParkedRequest, is_first: bool, now: Instant) {
        self.requests.push_back(request);
        let (open, pause) = (u64::from(is_first), self.policy.map_or(LOOK_AGAIN, |policy| policy.pause()));
        self.open += open;
        self.all += open;
        self.due.get_or_insert(now + pause);
    }

    #[inline]
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Marks requests for a retry if they are due. If only `ctl resume` starts retries, marks them once the disk is
    /// `hopeless`.
    pub(crate) fn look(&mut self, now: Instant, hopeless: bool) {
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        self.due = None;
        match self.policy {
            Some(ParkPolicy { retry_after: None, .. }) if !hopeless && !self.is_empty() => {
                self.due = Some(now + LOOK_AGAIN);
            }
            _ => _ = self.retry_all(),
        }
    }

    /// Marks all requests for a retry, and returns their number.
    pub(crate) fn retry_all(&mut self) -> usize {
        self.to_retry = self.requests.len();
        self.due = None;
        self.to_retry
    }

    #[inline]
    pub(crate) fn has_retries(&self) -> bool {
        self.to_retry > 0
    }

    pub(crate) fn pop_retry(&mut self) -> Option<ParkedRequest> {
        self.to_retry = self.to_retry.checked_sub(1)?;
        self.requests.pop_front()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut ParkedRequest> {
        self.requests.iter_mut()
    }

    /// Records the completion of a parked request. Returns the totals if no other parked request is left.
    pub(crate) fn answered(&mut self, failed: bool) -> Option<AllAnswered> {
        self.failed += u64::from(failed);
        self.open = self.open.saturating_sub(1);
        if self.open > 0 {
            return None;
        }
        Some(AllAnswered {
            requests: std::mem::take(&mut self.all),
            failed: std::mem::take(&mut self.failed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY: ParkPolicy = ParkPolicy { what: ParkWhat::Any, retry_after: Some(Duration::from_secs(3)) };
    const NO_SPACE: ParkPolicy = ParkPolicy { what: ParkWhat::NoSpace, retry_after: None };

    fn errno(errno: Errno) -> OpError {
        OpError::Errno(errno)
    }

    #[test]
    fn lack_of_space_is_parked_by_both_and_an_io_error_by_one() {
        for parked in [Errno::NOSPC, Errno::DQUOT] {
            assert!(ANY.wants(errno(parked)) && NO_SPACE.wants(errno(parked)), "{parked}");
        }
        let cut = OpError::EndOfImage { offset_bytes: 0, end_bytes: 512 };
        assert!(ANY.wants(errno(Errno::IO)) && ANY.wants(cut));
        assert!(!NO_SPACE.wants(errno(Errno::IO)) && !NO_SPACE.wants(cut));
    }

    #[test]
    fn failure_that_waiting_does_not_cure_is_never_parked() {
        for hopeless in [Errno::FAULT, Errno::INVAL, Errno::OPNOTSUPP, Errno::NOSYS] {
            assert!(!ANY.wants(errno(hopeless)), "{hopeless}");
        }
        for hopeless in [OpError::Cancelled, OpError::Damaged] {
            assert!(!ANY.wants(hopeless) && !NO_SPACE.wants(hopeless), "{hopeless}");
        }
    }

    fn request(tag: u16) -> ParkedRequest {
        ParkedRequest { tag, since: Instant::now(), buffers: IoVecs::default() }
    }

    fn two(policy: ParkPolicy, now: Instant) -> ParkedRequests {
        let mut parked = ParkedRequests::new(Some(policy), 4, false);
        parked.push(request(1), true, now);
        parked.push(request(3), true, now + Duration::from_secs(1));
        parked
    }

    #[test]
    fn all_are_due_a_pause_after_the_first_in_the_order_in_which_they_were_parked() {
        let now = Instant::now();
        let mut parked = two(ANY, now);
        parked.look(now + Duration::from_secs(2), false);
        assert!(!parked.has_retries() && parked.pop_retry().is_none());
        parked.look(now + Duration::from_secs(3), false);
        assert_eq!((parked.pop_retry().unwrap().tag, parked.pop_retry().unwrap().tag), (1, 3));
        assert!(!parked.has_retries() && parked.is_empty() && parked.due().is_none());
    }

    #[test]
    fn request_that_is_parked_again_waits_for_the_next_time() {
        let now = Instant::now();
        let mut parked = two(ANY, now);
        assert_eq!(parked.retry_all(), 2);
        let first = parked.pop_retry().unwrap();
        parked.push(first, false, now);
        assert_eq!(parked.pop_retry().unwrap().tag, 3);
        assert!(parked.pop_retry().is_none() && !parked.is_empty());
        assert_eq!(parked.due(), Some(now + Duration::from_secs(3)));
    }

    #[test]
    fn without_a_pause_nothing_is_tried_until_it_is_hopeless() {
        let now = Instant::now();
        let mut parked = two(NO_SPACE, now);
        parked.look(now + LOOK_AGAIN, false);
        assert!(!parked.has_retries() && parked.due() == Some(now + 2 * LOOK_AGAIN));
        parked.look(now + 2 * LOOK_AGAIN, true);
        assert!(parked.has_retries());
    }

    #[test]
    fn end_is_told_with_the_last_answer_and_counted_anew_after() {
        let mut parked = two(ANY, Instant::now());
        assert_eq!(parked.answered(true), None);
        assert_eq!(parked.answered(false), Some(AllAnswered { requests: 2, failed: 1 }));
        parked.push(request(0), true, Instant::now());
        assert_eq!(parked.answered(false), Some(AllAnswered { requests: 1, failed: 0 }));
    }
}
