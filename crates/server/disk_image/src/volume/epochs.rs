//! When host clusters that no entry leads to any more may be used again: after every op that may still know them.
//!
//! `op begins: publishes the epoch, then looks up … ends`, `entries change → next epoch → every engine's ops are of it?`
//!
//! - An engine publishes the epoch in which its oldest op began. An engine without ops publishes [`IDLE`], so it never
//!   holds up the others.
//! - An engine sorts its ops into two groups. A new epoch gets its own group when the older group has ended. Until then
//!   new ops join the newer group, whose epoch is at most too old. So the published epoch always moves on.
//! - Nobody waits: the metadata thread looks again later.
//! - A loom model checks this (`epochs_model.rs`).

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// No op is in flight. Later than every epoch.
const IDLE: u64 = u64::MAX;

/// The current epoch of a disk.
#[derive(Debug)]
pub(crate) struct Epochs(AtomicU64);

/// The epoch of an engine's oldest op.
#[derive(Debug)]
pub(crate) struct Oldest(AtomicU64);

/// An engine's ops in flight.
#[derive(Debug, Default)]
pub(crate) struct Begun {
    groups: [Group; 2],
    newer: usize,
}

#[derive(Debug, Default)]
struct Group {
    epoch: u64,
    ops: usize,
}

impl Epochs {
    pub fn new() -> Self {
        Self(AtomicU64::new(1))
    }

    /// Begins the next epoch, and returns it. Called by the thread that has just changed entries.
    pub fn begin_next(&self) -> u64 {
        // Release: an op of the new epoch sees the changed entries.
        let next = self.0.fetch_add(1, Ordering::Release) + 1;
        // Pairs with the fence in `Begun::begin`: if an engine's published epoch is not seen from here on, its op sees the
        // changed entries.
        fence(Ordering::SeqCst);
        next
    }
}

impl Oldest {
    pub fn new() -> Self {
        Self(AtomicU64::new(IDLE))
    }

    /// Whether all the engine's ops began in `epoch` or later.
    pub fn is_since(&self, epoch: u64) -> bool {
        // Acquire: what the older ops did is over.
        self.0.load(Ordering::Acquire) >= epoch
    }

    /// For an engine that has gone.
    pub fn leave(&self) {
        self.0.store(IDLE, Ordering::Release);
    }
}

impl Begun {
    /// Counts an op, which may look up entries afterwards. Returns its group, for [`Begun::end`].
    #[inline]
    pub fn begin(&mut self, epochs: &Epochs, oldest: &Oldest) -> u8 {
        let now = epochs.0.load(Ordering::Acquire);
        let (newer, older) = (self.newer, 1 - self.newer);
        if self.groups[newer].ops == 0 {
            self.groups[newer].epoch = now;
            if self.groups[older].ops == 0 {
                // Release: as in `end`, for what earlier ops did, because this value replaces the one that `end` stored.
                oldest.0.store(now, Ordering::Release);
                // Pairs with the fence in `Epochs::begin_next`. An op that begins beside others needs none: either they are
                // seen, and are no younger, or their fence counts for it, too.
                fence(Ordering::SeqCst);
            }
        } else if self.groups[newer].epoch != now && self.groups[older].ops == 0 {
            self.newer = older;
            self.groups[older].epoch = now;
        }
        self.groups[self.newer].ops += 1;
        u8::from(self.newer == 1)
    }

    /// Ends an op.
    #[inline]
    pub fn end(&mut self, group: u8, oldest: &Oldest) {
        let group = usize::from(group);
        self.groups[group].ops -= 1;
        if self.groups[group].ops > 0 {
            return;
        }
        let other = &self.groups[1 - group];
        // Release: pairs with the acquire in `Oldest::is_since`.
        oldest.0.store(if other.ops == 0 { IDLE } else { other.epoch }, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_engine_holds_up_nothing() {
        let (epochs, oldest) = (Epochs::new(), Oldest::new());
        assert!(oldest.is_since(epochs.begin_next()));
        let mut begun = Begun::default();
        let op = begun.begin(&epochs, &oldest);
        let next = epochs.begin_next();
        assert!(!oldest.is_since(next));
        begun.end(op, &oldest);
        assert!(oldest.is_since(next));
    }

    #[test]
    fn epoch_ends_although_ops_never_stop() {
        let (epochs, oldest, mut begun) = (Epochs::new(), Oldest::new(), Begun::default());
        let mut before = begun.begin(&epochs, &oldest);
        for _ in 0..10 {
            let next = epochs.begin_next();
            let mut turns = 0;
            while !oldest.is_since(next) {
                let after = begun.begin(&epochs, &oldest);
                begun.end(before, &oldest);
                (before, turns) = (after, turns + 1);
            }
            assert!(turns <= 3, "{turns} ops");
        }
    }

    #[test]
    fn ops_of_an_older_epoch_count_until_the_last_has_ended() {
        let (epochs, oldest, mut begun) = (Epochs::new(), Oldest::new(), Begun::default());
        let old = [begun.begin(&epochs, &oldest), begun.begin(&epochs, &oldest)];
        let next = epochs.begin_next();
        let new = begun.begin(&epochs, &oldest);
        begun.end(old[1], &oldest);
        begun.end(new, &oldest);
        assert!(!oldest.is_since(next));
        begun.end(old[0], &oldest);
        assert!(oldest.is_since(next));
    }
}
