//! Measures how long requests take from the ring to the kernel, in servers started by `Server::start_counting`.
//!
//! `Worker::pass (chains taken … engine's submit returned) → SubmissionMeter → Server::submissions`

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Number of submitted requests, and the total time that their submission took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Submissions {
    /// Requests taken from the ring and submitted.
    pub requests: u64,
    /// Sum over these requests: the time from the start of the pass that took the request until the engine's `submit`
    /// returned.
    pub total_ns: u64,
}

impl Submissions {
    /// The difference from `earlier`, a reading of the same server.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self { requests: self.requests - earlier.requests, total_ns: self.total_ns - earlier.total_ns }
    }

    /// Mean per request, in µs; `None` without requests.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // 2^53 ns are 104 days
    pub fn mean_us(self) -> Option<f64> {
        (self.requests > 0).then(|| self.total_ns as f64 / self.requests as f64 / 1000.0)
    }
}

/// A server's counters: its workers write them, other threads read them.
#[derive(Debug, Default)]
pub(crate) struct SubmissionMeter {
    requests: AtomicU64,
    total_ns: AtomicU64,
}

impl SubmissionMeter {
    /// Counts `requests` of one pass, which were submitted `spent` after it began.
    pub(crate) fn note(&self, spent: Duration, requests: usize) {
        if requests > 0 {
            let requests = requests as u64;
            let spent_ns = u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX);
            // Relaxed: no thread depends on the order of these two sums.
            self.requests.fetch_add(requests, Relaxed);
            self.total_ns.fetch_add(spent_ns.saturating_mul(requests), Relaxed);
        }
    }

    pub(crate) fn read(&self) -> Submissions {
        Submissions { requests: self.requests.load(Relaxed), total_ns: self.total_ns.load(Relaxed) }
    }
}
