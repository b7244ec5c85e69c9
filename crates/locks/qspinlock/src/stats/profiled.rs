//! A lock that records the source lines that take it.
//!
//! - Acquisition: counted at the caller's line before the attempt, so that counting does not prolong the
//!   critical section.
//! - Contention: the first try failed. Until the thread has the lock, its events belong to the caller's line.
//! - Release: if it wakes a waiter, that event belongs to the line that took the lock.
//!
//! See also: the counters (`table.rs`).

use core::fmt;
use core::panic::Location;
use core::time::Duration;
use std::time::Instant;

use lock_api::{RawMutex, RawMutexFair, RawMutexTimed};

use super::mode::Recording;
use super::table::{Attribution, Row, mine};

/// Wraps the lock `L` and records statistics per source line. See the [module](super).
pub struct Profiled<L>(L);

impl<L> fmt::Debug for Profiled<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profiled").finish_non_exhaustive()
    }
}

/// An acquisition of a [`Profiled`] lock.
#[derive(Debug)]
pub struct Attributed<G> {
    inner: G,
    /// `None`: not counted.
    row: Option<&'static Row>,
    /// `None`: not timed.
    since: Option<Instant>,
}

impl<G> Attributed<G> {
    #[inline]
    fn not_counted(inner: G) -> Self {
        Self { inner, row: None, since: None }
    }

    /// `asked`: when the wait began, if it is timed.
    #[inline]
    fn counted(inner: G, row: &'static Row, asked: Option<Instant>) -> Self {
        let since = asked.map(|asked| {
            let since = Instant::now();
            row.add_wait(since.saturating_duration_since(asked));
            since
        });
        Self { inner, row: Some(row), since }
    }
}

impl<L: RawMutex> Profiled<L> {
    #[inline(never)]
    #[track_caller]
    fn lock_counted(&self, recording: Recording) -> Attributed<L::Guard> {
        let row = mine().row(Location::caller());
        let asked = row.count_acquisition(recording).then(Instant::now);
        let _attribution = Attribution::to_own(row);
        let inner = match self.0.try_lock() {
            Some(inner) => inner,
            None => self.lock_contended(row),
        };
        Attributed::counted(inner, row, asked)
    }

    #[inline(never)]
    #[track_caller]
    fn lock_contended(&self, row: &'static Row) -> L::Guard {
        row.contended.add(1);
        self.0.lock()
    }

    #[inline(never)]
    #[track_caller]
    fn try_lock_counted(&self, recording: Recording) -> Option<Attributed<L::Guard>> {
        let row = mine().row(Location::caller());
        let _attribution = Attribution::to_own(row);
        let Some(inner) = self.0.try_lock() else {
            row.refused.add(1);
            return None;
        };
        let timed = row.count_acquisition(recording);
        let since = timed.then(Instant::now);
        if timed {
            row.add_wait(Duration::ZERO);
        }
        Some(Attributed { inner, row: Some(row), since })
    }

    /// Events of `release` belong to the line that acquired the lock. Reads the clock before the release, and counts
    /// the time after it.
    #[inline]
    fn release_counted(
        &self,
        row: &'static Row,
        since: Option<Instant>,
        inner: L::Guard,
        release: impl FnOnce(&L, L::Guard),
    ) {
        let (_attribution, row) = Attribution::to_same_line(row);
        let until = since.map(|since| (since, Instant::now()));
        release(&self.0, inner);
        if let Some((since, until)) = until {
            row.add_hold(since, until);
        }
    }
}

impl<L: RawMutexTimed> Profiled<L> {
    /// `attempt` is one of the inner lock's timed attempts.
    #[inline(never)]
    #[track_caller]
    fn attempt_counted(
        &self,
        recording: Recording,
        attempt: impl FnOnce(&L) -> Option<L::Guard>,
    ) -> Option<Attributed<L::Guard>> {
        let row = mine().row(Location::caller());
        let _attribution = Attribution::to_own(row);
        if let Some(inner) = self.0.try_lock() {
            let asked = row.count_acquisition(recording).then(Instant::now);
            return Some(Attributed::counted(inner, row, asked));
        }
        row.contended.add(1);
        let asked = recording.stride().map(|_| Instant::now());
        let inner = attempt_noted(row, || attempt(&self.0))?;
        let timed = row.count_acquisition(recording);
        Some(Attributed::counted(inner, row, asked.filter(|_| timed)))
    }
}

/// Counts a failed attempt as one timeout, whatever the inner lock notes.
fn attempt_noted<G>(row: &'static Row, attempt: impl FnOnce() -> Option<G>) -> Option<G> {
    let before = row.time_outs();
    let inner = attempt();
    if inner.is_none() {
        row.set_time_outs(before.wrapping_add(1));
    }
    inner
}

// SAFETY: 1. exclusion and ordering are those of `L`, itself a `RawMutex`: every acquisition and every
// release here is exactly one of the inner lock's; 2. `Attributed` owns the inner state of that acquisition
// and passes it to that lock's `unlock`, once; forgetting it forgets the inner state, which `L` allows; 3.
// nothing here unwinds between the inner acquisition and returning its state: clock, counters and
// thread-local cells do not panic.
unsafe impl<L: RawMutex> RawMutex for Profiled<L> {
    #[allow(clippy::declare_interior_mutable_const)] // as in the trait
    const INIT: Self = Self(L::INIT);

    type Guard = Attributed<L::Guard>;

    #[inline]
    #[track_caller]
    fn lock(&self) -> Self::Guard {
        let recording = Recording::now();
        if recording.is_off() {
            return Attributed::not_counted(self.0.lock());
        }
        self.lock_counted(recording)
    }

    #[inline]
    #[track_caller]
    fn try_lock(&self) -> Option<Self::Guard> {
        let recording = Recording::now();
        if recording.is_off() {
            return self.0.try_lock().map(Attributed::not_counted);
        }
        self.try_lock_counted(recording)
    }

    #[inline]
    unsafe fn unlock(&self, guard: Self::Guard) {
        let Attributed { inner, row, since } = guard;
        // SAFETY: the caller passes the state of an acquisition of this lock; `inner` is the inner lock's
        // state for it.
        let release = |lock: &L, inner| unsafe { lock.unlock(inner) };
        match row {
            None => release(&self.0, inner),
            Some(row) => self.release_counted(row, since, inner, release),
        }
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.is_locked()
    }
}

// SAFETY: as above; `bump` restores the inner state on every exit path, because `L`'s does.
unsafe impl<L: RawMutexFair> RawMutexFair for Profiled<L> {
    #[inline]
    unsafe fn unlock_fair(&self, guard: Self::Guard) {
        let Attributed { inner, row, since } = guard;
        // SAFETY: the caller passes the state of an acquisition of this lock; `inner` is the inner lock's
        // state for it.
        let release = |lock: &L, inner| unsafe { lock.unlock_fair(inner) };
        match row {
            None => release(&self.0, inner),
            Some(row) => self.release_counted(row, since, inner, release),
        }
    }

    /// Counts as one acquisition, held from the first acquisition to the last release.
    #[inline]
    #[track_caller]
    unsafe fn bump(&self, guard: &mut Self::Guard) {
        let _attribution = guard.row.map(Attribution::to_same_line);
        // SAFETY: the caller passes the state of an acquisition of this lock; `inner` is the inner lock's
        // state for it.
        unsafe { self.0.bump(&mut guard.inner) }
    }
}

// SAFETY: as for `RawMutex`; this acquires nothing that the inner lock did not acquire.
unsafe impl<L: RawMutexTimed> RawMutexTimed for Profiled<L> {
    type Duration = L::Duration;
    type Instant = L::Instant;

    #[track_caller]
    fn try_lock_for(&self, timeout: L::Duration) -> Option<Self::Guard> {
        let recording = Recording::now();
        if recording.is_off() {
            return self.0.try_lock_for(timeout).map(Attributed::not_counted);
        }
        self.attempt_counted(recording, |lock| lock.try_lock_for(timeout))
    }

    #[track_caller]
    fn try_lock_until(&self, timeout: L::Instant) -> Option<Self::Guard> {
        let recording = Recording::now();
        if recording.is_off() {
            return self.0.try_lock_until(timeout).map(Attributed::not_counted);
        }
        self.attempt_counted(recording, |lock| lock.try_lock_until(timeout))
    }
}
