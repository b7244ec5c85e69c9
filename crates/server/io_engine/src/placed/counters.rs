//! What a placement did: counted once per batch by whoever did it, read by others.
//!
//! Not here: who reports it (`blk_server`).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// A reading. Everything runs from the placement's start and never goes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlacementCounters {
    /// Batches of ops that went to another worker, or under the lock.
    pub hand_overs: u64,
    /// Ops in them.
    pub ops: u64,
    /// Sleeping completion workers woken for a batch of ops.
    pub owner_wake_ups: u64,
    /// Wake-ups spared because the completion worker would wake up by itself.
    pub spared_wake_ups: u64,
    /// Completions that were passed on to the worker whose they are.
    pub passed: u64,
    /// Sleeping workers woken for a batch of completions.
    pub participant_wake_ups: u64,
    /// Times that the completion worker changed, the first not counted.
    pub moves: u64,
    /// `shared`: times that the lock was taken.
    pub locked: u64,
    /// `shared`: times that somebody else had it.
    pub contended: u64,
    /// `shared`: time spent waiting for it, estimated from samples.
    pub lock_wait: Duration,
}

/// The counters behind it. Relaxed everywhere: sums that nobody derives an order from.
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
