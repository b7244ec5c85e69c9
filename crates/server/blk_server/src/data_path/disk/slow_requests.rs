//! The latest slow requests of a disk: those that took at least the disk's `slow-ms`.
//!
//! A request that is not slow costs one comparison. Slow requests share a lock per disk.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// Number of requests that a disk remembers.
const REMEMBERED: usize = 32;
/// Stands for "no limit": no request takes this long.
const NEVER_NS: u64 = u64::MAX;

/// A slow request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlowRequest {
    /// When it was answered.
    pub at: SystemTime,
    /// The queue's number.
    pub queue: u16,
    /// The request's type: `read`, `write`, `flush`, `discard` or `write zeroes`.
    pub kind: &'static str,
    /// The request's first sector.
    pub sector: u64,
    /// The request's length.
    pub bytes: u64,
    /// The time from taking the request to answering it, including the time for which it was parked.
    pub took: Duration,
    /// Number of attempts.
    pub tries: u32,
    /// Whether it was answered with an error.
    pub failed: bool,
}

/// A disk's time limit and its latest slow requests.
#[derive(Debug)]
pub(crate) struct SlowRequests {
    limit_ns: AtomicU64,
    /// Oldest first.
    latest: Mutex<VecDeque<SlowRequest>>,
}

impl Default for SlowRequests {
    fn default() -> Self {
        Self { limit_ns: AtomicU64::new(NEVER_NS), latest: Mutex::default() }
    }
}

impl SlowRequests {
    /// How long a request must take to count as slow.
    #[inline]
    pub(crate) fn limit_ns(&self) -> u64 {
        // Relaxed: no other data depends on it.
        self.limit_ns.load(Relaxed)
    }

    /// `None`: no request counts as slow.
    pub(crate) fn limit(&self) -> Option<Duration> {
        Some(self.limit_ns()).filter(|ns| *ns != NEVER_NS).map(Duration::from_nanos)
    }

    /// Applies to requests that are answered from now on.
    pub(crate) fn set_limit(&self, limit: Option<Duration>) {
        let ns = limit.map_or(NEVER_NS, |limit| u64::try_from(limit.as_nanos()).unwrap_or(NEVER_NS));
        self.limit_ns.store(ns, Relaxed);
    }

    pub(crate) fn add(&self, request: SlowRequest) {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.len() == REMEMBERED {
            latest.pop_front();
        }
        latest.push_back(request);
    }

    /// Returns the latest slow requests, oldest first.
    pub(crate) fn latest(&self) -> Vec<SlowRequest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(sector: u64) -> SlowRequest {
        let (at, took) = (SystemTime::UNIX_EPOCH, Duration::from_millis(5));
        SlowRequest { at, queue: 0, kind: "read", sector, bytes: 512, took, tries: 1, failed: false }
    }

    #[test]
    fn only_the_latest_requests_are_remembered_oldest_first() {
        let slow = SlowRequests::default();
        (0..100).for_each(|sector| slow.add(request(sector)));
        let sectors: Vec<u64> = slow.latest().iter().map(|request| request.sector).collect();
        assert_eq!(sectors, (68..100).collect::<Vec<_>>());
    }

    #[test]
    fn limit_is_off_at_first_and_can_be_set_and_taken_away() {
        let slow = SlowRequests::default();
        assert_eq!((slow.limit(), slow.limit_ns()), (None, u64::MAX));
        slow.set_limit(Some(Duration::from_millis(3)));
        assert_eq!((slow.limit(), slow.limit_ns()), (Some(Duration::from_millis(3)), 3_000_000));
        slow.set_limit(None);
        assert_eq!(slow.limit(), None);
    }
}
