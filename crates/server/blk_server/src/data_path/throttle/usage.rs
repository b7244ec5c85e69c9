//! What a disk has used of its limits, and how long its queues have waited for them.
//!
//! Both continue when the limits change. The values are for reports only.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::limits::LimitKind;

/// Bits of `Usage::waiting` that hold the number of waiting queues: enough for all queues of a disk.
const COUNT_BITS: u32 = 16;
const NS_PER_MS: u64 = 1_000_000;

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    used: [AtomicU64; LimitKind::ALL.len()],
    /// Requests that waited.
    requests: AtomicU64,
    /// Time of the waits that have ended.
    ended_ns: AtomicU64,
    /// The current waits: their number in the low bits, and above it the sum of their start times in milliseconds,
    /// modulo 2^48.
    waiting: AtomicU64,
}

impl Usage {
    pub(crate) fn charge(&self, kind: LimitKind, units: u64) {
        self.used[kind as usize].fetch_add(units, Relaxed);
    }

    pub(crate) fn refund(&self, kind: LimitKind, units: u64) {
        self.used[kind as usize].fetch_sub(units, Relaxed);
    }

    /// Units used, by quantity.
    pub(crate) fn used(&self) -> [u64; LimitKind::ALL.len()] {
        std::array::from_fn(|kind| self.used[kind].load(Relaxed))
    }

    /// Records that a queue begins to wait.
    pub(crate) fn begin_wait(&self, now: u64) {
        self.requests.fetch_add(1, Relaxed);
        self.waiting.fetch_add(entry(now), Relaxed);
    }

    pub(crate) fn end_wait(&self, since: u64, now: u64) {
        self.waiting.fetch_sub(entry(since), Relaxed);
        self.ended_ns.fetch_add(now.saturating_sub(since), Relaxed);
    }

    /// The number of requests that have waited or are waiting, and the total time of these waits in nanoseconds.
    pub(crate) fn waits(&self, now: u64) -> (u64, u64) {
        let waiting = self.waiting.load(Relaxed);
        let (count, begins_ms) = (waiting & ((1 << COUNT_BITS) - 1), waiting >> COUNT_BITS);
        let sum_ms = count.wrapping_mul(now / NS_PER_MS).wrapping_sub(begins_ms);
        // Modulo 2^48 and signed, because a wait may begin after `now`.
        let going_on_ms = (sum_ms << COUNT_BITS).cast_signed() >> COUNT_BITS;
        let going_on_ns = u64::try_from(going_on_ms).unwrap_or(0).saturating_mul(NS_PER_MS);
        (self.requests.load(Relaxed), self.ended_ns.load(Relaxed).saturating_add(going_on_ns))
    }
}

fn entry(begin: u64) -> u64 {
    ((begin / NS_PER_MS) << COUNT_BITS) + 1
}

#[cfg(test)]
mod tests {
    use super::super::bucket::EPOCH;
    use super::*;

    const MS: u64 = NS_PER_MS;
    const NOW: u64 = EPOCH + 5_000 * MS;

    #[test]
    fn waits_count_from_their_beginning_and_those_that_have_ended_to_the_nanosecond() {
        let usage = Usage::default();
        assert_eq!(usage.waits(NOW), (0, 0));
        (0..200).for_each(|_| usage.begin_wait(NOW));
        assert_eq!(usage.waits(NOW - 3 * MS), (200, 0));
        let year = 365 * 86_400 * 1000 * MS;
        assert_eq!(usage.waits(NOW + year), (200, 200 * year));
        (0..199).for_each(|_| usage.end_wait(NOW, NOW + 7));
        assert_eq!(usage.waits(NOW + 2 * MS), (200, 199 * 7 + 2 * MS));
        usage.end_wait(NOW, NOW + 3 * MS);
        assert_eq!(usage.waits(NOW + year), (200, 199 * 7 + 3 * MS));
    }

    #[test]
    fn use_that_is_refunded_does_not_count() {
        let usage = Usage::default();
        usage.charge(LimitKind::Bps, 512);
        usage.charge(LimitKind::Bps, 4096);
        usage.refund(LimitKind::Bps, 512);
        assert_eq!(usage.used()[LimitKind::Bps as usize], 4096);
        assert_eq!(usage.used().iter().sum::<u64>(), 4096);
    }
}
