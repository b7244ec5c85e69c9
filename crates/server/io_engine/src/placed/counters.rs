//! Counts the events of a placement, once per batch.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// A snapshot of the counters. They start with the placement and never decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlacementCounters {
    /// Batches of ops that were handed to another worker or pushed under the lock.
    pub hand_overs: u64,
    /// Ops in these batches.
    pub ops: u64,
    /// Sleeping completion workers woken for a batch of ops.
    pub owner_wake_ups: u64,
    /// Wake-ups skipped because I/O in flight would wake the completion worker anyway.
    pub spared_wake_ups: u64,
    /// Completions passed on to the worker that pushed the op.
    pub passed: u64,
    /// Sleeping workers woken for a batch of completions.
    pub participant_wake_ups: u64,
    /// Changes of the completion worker, not counting the first choice.
    pub moves: u64,
    /// `shared`: how often a worker took the lock.
    pub locked: u64,
    /// `shared`: how often another worker held the lock at that time.
    pub contended: u64,
    /// `shared`: how long workers waited for the lock.
    pub lock_wait: Duration,
}

/// The counters. All accesses are relaxed, because no other data depends on them.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub hand_overs: Counter,
    pub ops: Counter,
    pub owner_wake_ups: Counter,
    pub spared_wake_ups: Counter,
    pub passed: Counter,
    pub participant_wake_ups: Counter,
    pub moves: Counter,
    pub locked: Counter,
    pub contended: Counter,
    pub lock_wait_ns: Counter,
}

#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub fn add(&self, count: u64) {
        if count > 0 {
            self.0.fetch_add(count, Relaxed);
        }
    }

    fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl Counters {
    pub fn read(&self) -> PlacementCounters {
        PlacementCounters {
            hand_overs: self.hand_overs.get(),
            ops: self.ops.get(),
            owner_wake_ups: self.owner_wake_ups.get(),
            spared_wake_ups: self.spared_wake_ups.get(),
            passed: self.passed.get(),
            participant_wake_ups: self.participant_wake_ups.get(),
            moves: self.moves.get(),
            locked: self.locked.get(),
            contended: self.contended.get(),
            lock_wait: Duration::from_nanos(self.lock_wait_ns.get()),
        }
    }
}
