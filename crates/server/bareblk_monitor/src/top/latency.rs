//! Latencies of one interval: the difference of two histograms that a server has counted since its start.
//!
//! `buckets of two answers → difference → percentiles, octaves for the heat map`

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The highest power of two of nanoseconds that the heat map distinguishes: 69 s and longer.
const LAST_OCTAVE: u8 = 36;

/// The latencies of one kind of request, as a server reports them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Counted {
    max_ns: u64,
    /// Each bucket's upper bound and its number of requests. Older servers do not send buckets.
    buckets: Option<Vec<(u64, u64)>>,
}

/// The requests of an interval.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Latencies {
    buckets: BTreeMap<u64, u64>,
    longest_ns: u64,
}

/// Some percentiles, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Percentiles {
    /// 50 % of the requests took at most this long.
    pub p50_ns: u64,
    /// 90 % of the requests took at most this long.
    pub p90_ns: u64,
    /// 99 % of the requests took at most this long.
    pub p99_ns: u64,
    /// 99.9 % of the requests took at most this long.
    pub p999_ns: u64,
    /// The longest request.
    pub max_ns: u64,
}

impl Counted {
    /// The requests since `before`; `None` if the server sends no buckets.
    pub fn since(&self, before: Option<&Self>) -> Option<Latencies> {
        let old: BTreeMap<u64, u64> =
            before.and_then(|before| before.buckets.as_ref()).into_iter().flatten().copied().collect();
        let now = self.buckets.as_ref()?.iter();
        let buckets: BTreeMap<u64, u64> = now
            .map(|(below, count)| (*below, count.saturating_sub(old.get(below).copied().unwrap_or(0))))
            .filter(|(_, count)| *count > 0)
            .collect();
        let is_new = before.is_none_or(|before| self.max_ns > before.max_ns);
        let longest = buckets.last_key_value().map_or(0, |(below, _)| below.saturating_sub(1));
        let longest_ns = if is_new { self.max_ns } else { longest.min(self.max_ns) };
        Some(Latencies { buckets, longest_ns })
    }
}

impl Latencies {
    /// Adds all requests of `other`.
    pub fn add(&mut self, other: &Self) {
        for (below, count) in &other.buckets {
            let sum = self.buckets.entry(*below).or_default();
            *sum = sum.saturating_add(*count);
        }
        self.longest_ns = self.longest_ns.max(other.longest_ns);
    }

    fn count(&self) -> u64 {
        self.buckets.values().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The percentiles; `None` without requests.
    pub fn percentiles(&self) -> Option<Percentiles> {
        let all = self.count();
        let at = |per_mille: u64| {
            let rank = u128::from(all) * u128::from(per_mille);
            let mut seen = 0;
            let bucket = self.buckets.iter().find(|(_, count)| {
                seen += u128::from(**count) * 1000;
                seen >= rank
            });
            bucket.map_or(self.longest_ns, |(below, _)| below.saturating_sub(1).min(self.longest_ns))
        };
        (all > 0).then(|| Percentiles {
            p50_ns: at(500),
            p90_ns: at(900),
            p99_ns: at(990),
            p999_ns: at(999),
            max_ns: self.longest_ns,
        })
    }

    /// The number of requests in each power of two of nanoseconds that has any.
    pub fn octaves(&self) -> Vec<(u8, u64)> {
        let mut octaves: Vec<(u8, u64)> = Vec::new();
        for (below, count) in &self.buckets {
            let octave = octave(below.saturating_sub(1));
            match octaves.last_mut() {
                Some((last, sum)) if *last == octave => *sum = sum.saturating_add(*count),
                _ => octaves.push((octave, *count)),
            }
        }
        octaves
    }
}

/// The power of two that a time belongs to.
fn octave(ns: u64) -> u8 {
    u8::try_from((ns | 1).ilog2()).unwrap_or(u8::MAX).min(LAST_OCTAVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(buckets: &[(u64, u64)], max_ns: u64) -> Counted {
        Counted { max_ns, buckets: Some(buckets.to_vec()) }
    }

    #[test]
    fn percentiles_are_those_of_the_requests_between_two_answers() {
        let before = counted(&[(1000, 1_000_000)], 990);
        let now = counted(&[(1000, 1_000_050), (5000, 49), (9000, 1)], 8123);
        let latencies = now.since(Some(&before)).unwrap();
        let wanted = Percentiles { p50_ns: 999, p90_ns: 4999, p99_ns: 4999, p999_ns: 8123, max_ns: 8123 };
        assert_eq!(latencies.percentiles(), Some(wanted));
        let again = now.since(Some(&now)).unwrap();
        assert_eq!(again.percentiles(), None);
    }

    #[test]
    fn longest_request_of_an_interval_is_not_that_of_an_earlier_one() {
        let before = counted(&[(1000, 1), (9000, 1)], 8123);
        let now = counted(&[(1000, 5), (9000, 1)], 8123);
        assert_eq!(now.since(Some(&before)).unwrap().percentiles().unwrap().max_ns, 999);
    }

    #[test]
    fn server_without_buckets_has_no_percentiles() {
        assert_eq!(Counted::default().since(None), None);
    }

    #[test]
    fn numbers_that_no_server_counts_overflow_nothing() {
        let wild = counted(&[(0, u64::MAX), (u64::MAX, u64::MAX), (5, 3)], u64::MAX);
        let mut latencies = wild.since(None).unwrap();
        latencies.add(&latencies.clone());
        assert!(latencies.percentiles().is_some());
        assert_eq!(latencies.octaves().last(), Some(&(36, u64::MAX)));
        let restarted = counted(&[(5, 1)], 4).since(Some(&wild)).unwrap();
        assert_eq!(restarted.percentiles(), None);
    }

    #[test]
    fn octaves_sum_the_buckets_between_two_powers_of_two() {
        let latencies = counted(&[(1100, 1), (1200, 2), (3000, 4)], 2999).since(None).unwrap();
        assert_eq!(latencies.octaves(), [(10, 3), (11, 4)]);
    }
}
