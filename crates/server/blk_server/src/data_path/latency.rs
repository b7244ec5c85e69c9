//! How long requests take: one histogram per kind of request, written by one worker and read by any thread.
//!
//! `taken … answered → LatencyCells (relaxed stores) → Latency (a copy) → DiskTotals → ctl stats, metrics`
//!
//! - A power of two has [`BUCKETS_PER_OCTAVE`] buckets, so a percentile is at most an eighth too high. Each time below
//!   16 ns has a bucket of its own; all times of 69 s and more share the last one.
//! - A queue's cells have one writer at a time, like its counters (`counters.rs`). docs/decisions/0055 explains why no
//!   crate is used for this.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

const OCTAVE_BITS: u32 = 3;
/// Buckets per power of two.
pub(crate) const BUCKETS_PER_OCTAVE: usize = 1 << OCTAVE_BITS;
/// Times of 2^36 ns and more are in the last bucket.
const MAX_BITS: u32 = 36;
const BUCKETS: usize = (MAX_BITS - OCTAVE_BITS + 1) as usize * BUCKETS_PER_OCTAVE;

/// The bucket of a time.
#[inline]
fn bucket_of(ns: u64) -> usize {
    // The lowest octaves count as one octave, whose buckets are 1 ns wide.
    let shift = (ns | BUCKETS_PER_OCTAVE as u64).ilog2() - OCTAVE_BITS;
    #[allow(clippy::cast_possible_truncation)] // less than 2 * BUCKETS_PER_OCTAVE
    let within = (ns >> shift) as usize;
    (shift as usize * BUCKETS_PER_OCTAVE + within).min(BUCKETS - 1)
}

/// The exclusive upper limit of the bucket.
fn below_ns(bucket: usize) -> u64 {
    let shift = (bucket / BUCKETS_PER_OCTAVE).saturating_sub(1);
    ((bucket + 1 - shift * BUCKETS_PER_OCTAVE) as u64) << shift
}

/// The times of requests of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "InJson", into = "InJson")]
pub struct LatencyHistogram {
    /// Requests per bucket; empty without requests.
    counts: Vec<u64>,
    /// The sum of all times.
    pub sum_ns: u64,
    /// The longest time.
    pub max_ns: u64,
}

impl LatencyHistogram {
    /// Makes a histogram from the [`LatencyHistogram::buckets`] of another histogram.
    pub fn from_buckets(buckets: impl IntoIterator<Item = (u64, u64)>, sum_ns: u64, max_ns: u64) -> Self {
        let mut histogram = Self { counts: Vec::new(), sum_ns, max_ns };
        for (below_ns, requests) in buckets {
            histogram.add_to(bucket_of(below_ns.saturating_sub(1)), requests);
        }
        histogram
    }

    /// Adds one request.
    pub fn note(&mut self, ns: u64) {
        self.add_to(bucket_of(ns), 1);
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    fn add_to(&mut self, bucket: usize, requests: u64) {
        self.counts.resize(BUCKETS, 0);
        self.counts[bucket] = self.counts[bucket].saturating_add(requests);
    }

    /// The number of requests.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum: u64, count| sum.saturating_add(*count))
    }

    /// The buckets that contain requests, fastest first: the exclusive upper limit of each, and its number of requests.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        let all = self.counts.iter().enumerate();
        all.filter(|(_, count)| **count > 0).map(|(bucket, count)| (below_ns(bucket), *count))
    }

    /// The time that this fraction of the requests did not exceed; at most an eighth too high. 0 without requests.
    #[must_use]
    pub fn quantile_ns(&self, fraction: f64) -> u64 {
        let all = self.count();
        // Exact below 2^53 requests; beyond that, the rank is off by a few.
        #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let rank = ((all as f64 * fraction).ceil() as u64).clamp(1, all.max(1));
        let mut seen = 0_u64;
        let bucket = self.buckets().find(|(_, count)| {
            seen = seen.saturating_add(*count);
            seen >= rank
        });
        match bucket {
            // The last bucket has no upper end.
            Some((below, _)) if below < 1 << MAX_BITS => (below - 1).min(self.max_ns),
            Some(_) => self.max_ns,
            None => 0,
        }
    }

    /// Adds all requests of `other`.
    pub fn add(&mut self, other: &Self) {
        for (bucket, count) in other.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            self.add_to(bucket, *count);
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The requests noted since the reading `before`. If the longest request is older than that, the maximum is rounded
    /// up like a percentile.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let old = |bucket: usize| before.counts.get(bucket).copied().unwrap_or(0);
        let counts = self.counts.iter().enumerate();
        let counts = counts.map(|(bucket, count)| count.saturating_sub(old(bucket))).collect();
        let sum_ns = self.sum_ns.saturating_sub(before.sum_ns);
        let mut since = Self { counts, sum_ns, max_ns: self.max_ns };
        if self.max_ns <= before.max_ns {
            since.max_ns = since.quantile_ns(1.0);
        }
        since
    }
}

/// The JSON form of a histogram.
#[derive(Serialize, Deserialize)]
struct InJson {
    sum_ns: u64,
    max_ns: u64,
    buckets: Vec<(u64, u64)>,
}

impl From<InJson> for LatencyHistogram {
    fn from(json: InJson) -> Self {
        Self::from_buckets(json.buckets, json.sum_ns, json.max_ns)
    }
}

impl From<LatencyHistogram> for InJson {
    fn from(histogram: LatencyHistogram) -> Self {
        let LatencyHistogram { sum_ns, max_ns, .. } = histogram;
        Self { sum_ns, max_ns, buckets: histogram.buckets().collect() }
    }
}

/// How long one disk's requests took, from when a worker took them until it answered them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Latency {
    /// Reads.
    pub read: LatencyHistogram,
    /// Writes.
    pub write: LatencyHistogram,
    /// Flushes.
    pub flush: LatencyHistogram,
    /// Discards and write-zeroes.
    pub other: LatencyHistogram,
}

impl Latency {
    /// Adds all requests of `other`.
    pub fn add(&mut self, other: &Self) {
        self.read.add(&other.read);
        self.write.add(&other.write);
        self.flush.add(&other.flush);
        self.other.add(&other.other);
    }
}

/// The histogram that a worker writes.
#[derive(Debug)]
pub(crate) struct HistogramCells {
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
    counts: [AtomicU64; BUCKETS],
}

impl Default for HistogramCells {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        Self { sum_ns: zero(), max_ns: zero(), counts: std::array::from_fn(|_| zero()) }
    }
}

impl HistogramCells {
    /// Adds one request. Only the worker that serves the queue calls this.
    #[inline]
    pub(crate) fn note(&self, ns: u64) {
        add(&self.counts[bucket_of(ns)], 1);
        add(&self.sum_ns, ns);
        if ns > self.max_ns.load(Relaxed) {
            self.max_ns.store(ns, Relaxed);
        }
    }

    fn add_to(&self, histogram: &mut LatencyHistogram) {
        let counts = self.counts.iter().map(|count| count.load(Relaxed)).enumerate();
        counts.filter(|(_, count)| *count > 0).for_each(|(bucket, count)| histogram.add_to(bucket, count));
        histogram.sum_ns = histogram.sum_ns.saturating_add(self.sum_ns.load(Relaxed));
        histogram.max_ns = histogram.max_ns.max(self.max_ns.load(Relaxed));
    }
}

/// Adds without a locked instruction, because the cell has one writer.
#[inline]
fn add(cell: &AtomicU64, more: u64) {
    cell.store(cell.load(Relaxed).wrapping_add(more), Relaxed);
}

/// The histograms of one queue.
#[derive(Debug, Default)]
pub(crate) struct LatencyCells {
    pub(crate) read: HistogramCells,
    pub(crate) write: HistogramCells,
    pub(crate) flush: HistogramCells,
    pub(crate) other: HistogramCells,
}

impl LatencyCells {
    pub(crate) fn add_to(&self, latency: &mut Latency) {
        self.read.add_to(&mut latency.read);
        self.write.add_to(&mut latency.write);
        self.flush.add_to(&mut latency.flush);
        self.other.add_to(&mut latency.other);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn histogram(times: &[u64]) -> LatencyHistogram {
        let mut histogram = LatencyHistogram::default();
        times.iter().for_each(|ns| histogram.note(*ns));
        histogram
    }

    fn read(cells: &HistogramCells) -> LatencyHistogram {
        let mut histogram = LatencyHistogram::default();
        cells.add_to(&mut histogram);
        histogram
    }

    #[test]
    fn buckets_follow_each_other_without_gaps_and_end_at_69_seconds() {
        let mut first_ns = 0;
        for bucket in 0..BUCKETS {
            assert_eq!(bucket_of(first_ns), bucket, "first of {bucket}");
            assert_eq!(bucket_of(below_ns(bucket) - 1), bucket, "last of {bucket}");
            first_ns = below_ns(bucket);
        }
        assert_eq!(first_ns, 1 << MAX_BITS);
        assert_eq!((bucket_of(first_ns), bucket_of(u64::MAX)), (BUCKETS - 1, BUCKETS - 1));
    }

    #[test]
    fn histogram_without_requests_has_no_percentiles() {
        let empty = LatencyHistogram::default();
        assert_eq!((empty.count(), empty.quantile_ns(0.5), empty.buckets().count()), (0, 0, 0));
    }

    #[test]
    fn time_beyond_the_last_bucket_is_shown_as_the_longest() {
        assert_eq!(histogram(&[5, 1 << 40]).quantile_ns(1.0), 1 << 40);
    }

    #[test]
    fn counts_at_the_end_of_their_range_stay_there() {
        let full = LatencyHistogram::from_buckets([(10, u64::MAX), (20, u64::MAX)], u64::MAX, 15);
        let mut sum = full.clone();
        sum.add(&full);
        assert_eq!((sum.count(), sum.sum_ns, sum.quantile_ns(0.99)), (u64::MAX, u64::MAX, 9));
    }

    fn times() -> impl Strategy<Value = Vec<u64>> {
        // Times of all magnitudes are equally likely.
        let time = (0_u32..40, any::<u64>()).prop_map(|(bits, random)| random & ((1 << bits) - 1));
        prop::collection::vec(time, 1..200)
    }

    proptest! {
        #[test]
        fn percentile_is_at_most_an_eighth_above_the_exact_one(mut times in times(), fraction in 0.0..=1.0) {
            let shown = histogram(&times).quantile_ns(fraction);
            times.sort_unstable();
            #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let rank = (times.len() as f64 * fraction).ceil().max(1.0) as usize;
            let exact = times[rank - 1];
            let is_last = exact >= below_ns(BUCKETS - 2);
            prop_assert!(shown >= exact && (is_last || shown <= exact + exact / 8), "{shown}, exactly {exact}");
        }

        #[test]
        fn cells_of_a_worker_hold_what_a_plain_histogram_holds(times in times()) {
            let cells = HistogramCells::default();
            times.iter().for_each(|ns| cells.note(*ns));
            prop_assert_eq!(read(&cells), histogram(&times));
        }

        #[test]
        fn sum_of_two_parts_is_the_whole_and_the_difference_is_the_second(first in times(), second in times()) {
            let (before, added) = (histogram(&first), histogram(&second));
            let mut all = before.clone();
            all.add(&added);
            prop_assert_eq!(&all, &histogram(&[first, second].concat()));
            let since = all.since(&before);
            prop_assert_eq!(&since.counts, &added.counts);
            prop_assert_eq!(since.sum_ns, added.sum_ns);
            let longest = added.max_ns;
            let is_last = longest >= below_ns(BUCKETS - 2);
            prop_assert!(since.max_ns >= longest && (is_last || since.max_ns <= longest + longest / 8));
        }

        #[test]
        fn histogram_is_read_from_json_as_it_was_written(times in times()) {
            let written = histogram(&times);
            let json = serde_json::to_string(&written).unwrap();
            prop_assert_eq!(serde_json::from_str::<LatencyHistogram>(&json).unwrap(), written);
        }
    }
}
