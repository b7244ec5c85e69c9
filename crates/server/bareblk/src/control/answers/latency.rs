//! The latencies of a disk in the answer to `stats`.

use blk_server::{Latency, LatencyHistogram};
use serde::{Deserialize, Serialize};

/// The latencies of one disk, by kind of request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskLatency {
    pub read: Latencies,
    pub write: Latencies,
    pub flush: Latencies,
    /// Discards and write-zeroes.
    pub other: Latencies,
}

/// The time from taking a request to answering it. Percentiles are at most an eighth too high.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Latencies {
    /// The number of requests.
    pub count: u64,
    pub sum_ns: u64,
    pub p50_ns: u64,
    pub p90_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
    pub max_ns: u64,
    /// Each bucket that has requests: its upper bound in nanoseconds, and its number of requests. Sent only if the
    /// client asks for histograms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub buckets: Option<Vec<(u64, u64)>>,
}

impl DiskLatency {
    pub fn new(latency: &Latency, histograms: bool) -> Self {
        let of = |histogram| Latencies::new(histogram, histograms);
        let Latency { read, write, flush, other } = latency;
        Self { read: of(read), write: of(write), flush: of(flush), other: of(other) }
    }

    /// The kinds, with their names.
    pub fn kinds(&self) -> [(&'static str, &Latencies); 4] {
        [("read", &self.read), ("write", &self.write), ("flush", &self.flush), ("other", &self.other)]
    }

    /// The histogram of all kinds together; empty if the answer has no buckets.
    pub fn all(&self) -> LatencyHistogram {
        let mut all = LatencyHistogram::default();
        self.kinds().iter().for_each(|(_, latencies)| all.add(&latencies.histogram()));
        all
    }
}

impl Latencies {
    fn new(histogram: &LatencyHistogram, buckets: bool) -> Self {
        Self {
            count: histogram.count(),
            sum_ns: histogram.sum_ns,
            p50_ns: histogram.quantile_ns(0.5),
            p90_ns: histogram.quantile_ns(0.9),
            p99_ns: histogram.quantile_ns(0.99),
            p999_ns: histogram.quantile_ns(0.999),
            max_ns: histogram.max_ns,
            buckets: buckets.then(|| histogram.buckets().collect()),
        }
    }

    /// The histogram of these latencies; empty if the answer has no buckets.
    pub fn histogram(&self) -> LatencyHistogram {
        let buckets = self.buckets.iter().flatten().copied();
        LatencyHistogram::from_buckets(buckets, self.sum_ns, self.max_ns)
    }
}
