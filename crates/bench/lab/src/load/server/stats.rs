//! The counters of a running `bareblk serve`, requested over its control socket.
//!
//! `{"do": "stats"} → one line of JSON → Stats`
//!
//! - Answers are read as by any client (docs/reference/control.md): missing fields count as zero.

use std::io;
use std::path::Path;

use serde::Deserialize;
use serde_json::json;

use super::control::Control;

/// Sums over workers and disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Stats {
    /// Number of sleeps of the workers; each ended with a wake-up.
    #[serde(skip)]
    pub sleeps: u64,
    /// Number of batches of operations handed to another worker, or pushed into the engine with the lock held.
    pub hand_overs: u64,
    /// Number of operations in these batches.
    pub ops: u64,
    /// Wakes of the completion worker by a worker that handed operations over.
    pub completion_worker_wake_ups: u64,
    /// Wakes that were skipped, because the worker woke up by itself.
    pub spared_wake_ups: u64,
    /// Completions passed on to the workers that own the requests.
    pub passed: u64,
    /// Wakes of workers by the completion worker.
    pub worker_wake_ups: u64,
    pub locked: u64,
    pub contended: u64,
    pub lock_wait_ns: u64,
}

#[derive(Deserialize)]
struct Answer {
    ok: Option<Report>,
    #[serde(default)]
    error: serde_json::Value,
}

#[derive(Deserialize)]
struct Report {
    #[serde(default)]
    workers: Vec<Worker>,
    #[serde(default)]
    disks: Vec<Disk>,
}

#[derive(Deserialize)]
struct Worker {
    #[serde(default)]
    sleeps: u64,
}

#[derive(Deserialize)]
struct Disk {
    /// Null if each worker completes its own requests.
    placement: Option<Stats>,
}

impl Stats {
    /// Requests the counters from the server with this control socket.
    pub fn ask(control: &Path) -> io::Result<Self> {
        Self::read(&Control::connect(control)?.ask(json!({"do": "stats"}))?)
    }

    fn read(line: &str) -> io::Result<Self> {
        let answer: Answer = serde_json::from_str(line).map_err(io::Error::other)?;
        let report = answer.ok.ok_or_else(|| io::Error::other(answer.error.to_string()))?;
        let mut sum =
            Self { sleeps: report.workers.iter().map(|worker| worker.sleeps).sum(), ..Self::default() };
        report.disks.iter().filter_map(|disk| disk.placement).for_each(|disk| sum.add(disk));
        Ok(sum)
    }

    fn add(&mut self, other: Self) {
        self.each(other, u64::saturating_add);
    }

    #[must_use]
    pub fn since(mut self, earlier: Self) -> Self {
        self.each(earlier, u64::saturating_sub);
        self
    }

    fn each(&mut self, other: Self, act: impl Fn(u64, u64) -> u64) {
        let pairs = [
            (&mut self.sleeps, other.sleeps),
            (&mut self.hand_overs, other.hand_overs),
            (&mut self.ops, other.ops),
            (&mut self.completion_worker_wake_ups, other.completion_worker_wake_ups),
            (&mut self.spared_wake_ups, other.spared_wake_ups),
            (&mut self.passed, other.passed),
            (&mut self.worker_wake_ups, other.worker_wake_ups),
            (&mut self.locked, other.locked),
            (&mut self.contended, other.contended),
            (&mut self.lock_wait_ns, other.lock_wait_ns),
        ];
        pairs.into_iter().for_each(|(ours, theirs)| *ours = act(*ours, theirs));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_workers_and_disks_are_summed() {
        let line = r#"{"id":1,"ok":{"at_ns":5,"workers":[{"worker":0,"sleeps":3},{"worker":1,"sleeps":4}],"disks":[
            {"name":"a","placement":{"placement":"shared","hand_overs":10,"ops":40,"locked":11}},
            {"name":"b","placement":null},
            {"name":"c","placement":{"placement":"shared","hand_overs":1,"ops":2,"worker_wake_ups":9}}]}}"#;
        let stats = Stats::read(line).unwrap();
        let expected =
            Stats { sleeps: 7, hand_overs: 11, ops: 42, locked: 11, worker_wake_ups: 9, ..Stats::default() };
        assert_eq!(stats, expected);
        let earlier = Stats { sleeps: 2, ops: 42, ..Stats::default() };
        assert_eq!(stats.since(earlier), Stats { sleeps: 5, ops: 0, ..expected });
    }

    #[test]
    fn answer_that_is_a_refusal_is_an_error_with_its_words() {
        let line = r#"{"id":1,"error":{"kind":"stopping","message":"the server is stopping"}}"#;
        assert!(Stats::read(line).unwrap_err().to_string().contains("the server is stopping"));
        assert!(Stats::read("{}").is_err() && Stats::read("hello").is_err());
    }
}
