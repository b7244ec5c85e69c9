//! Counts the waiters that a signal picked while others waited, until each has decided whether to pass the signal on.
//!
//! - Waiters are counted under the list's lock, in the list's epoch: a forked child has none of its parent's threads.
//! - A thread that waits for the count is about to destroy the variable: only counted threads still use it.
//!
//! See also: which waiters are counted and why (`cond.rs`).

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::time::Duration;

use crate::thread::keeping_errno;

/// The epoch in the upper half, the count in the lower. Zero: none.
#[repr(transparent)]
pub(super) struct Owing(AtomicU64);

impl Owing {
    /// Adds one. The caller holds the list's lock.
    pub(super) fn add(&self, epoch: u32) {
        if of_epoch(self.0.load(Relaxed), epoch).is_some() {
            self.0.fetch_add(1, Relaxed);
        } else {
            // Threads counted in another epoch do not exist in this process, so no other thread writes.
            self.0.store(u64::from(epoch) << u32::BITS | 1, Relaxed);
        }
    }

    /// Subtracts one. The variable may no longer exist when this returns.
    pub(super) fn take(&self) {
        // Release pairs with the acquire in `wait`: the thread no longer uses the variable.
        self.0.fetch_sub(1, Release);
    }

    /// Waits until the count is zero.
    pub(super) fn wait(&self, epoch: u32) {
        let mut patience = Patience::new();
        while of_epoch(self.0.load(Acquire), epoch).is_some_and(|owing| owing > 0) {
            patience.wait();
        }
    }
}

/// Waits for threads that are about to act. A real-time thread that only yields keeps threads of lower
/// priority off the processor, so the wait soon sleeps.
pub(super) struct Patience {
    yields_left: u32,
}

impl Patience {
    pub(super) fn new() -> Self {
        Self { yields_left: 100 }
    }

    pub(super) fn wait(&mut self) {
        if let Some(left) = self.yields_left.checked_sub(1) {
            self.yields_left = left;
            std::thread::yield_now();
        } else {
            keeping_errno(|| std::thread::sleep(Duration::from_micros(50)));
        }
    }
}

fn of_epoch(word: u64, epoch: u32) -> Option<u64> {
    (word >> u32::BITS == u64::from(epoch)).then_some(word & u64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_of_a_forked_childs_parent_are_not_waited_for() {
        let owing = Owing(AtomicU64::new(0));
        owing.wait(7);
        owing.add(7);
        owing.add(7);
        owing.wait(8);
        owing.add(8);
        owing.take();
        owing.wait(8);
    }
}
