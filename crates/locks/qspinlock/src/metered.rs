//! A lock that measures how long threads wait for it and hold it.
//!
//! `lock (one in STRIDE: clock, inner lock, clock) → Held → unlock (clock, inner unlock) → this thread's LockTimes`
//!
//! - Each thread counts in its own memory: a shared counter would be a second lock.
//! - One acquisition in [`STRIDE`] is timed, with three clock readings, one of them while the lock is held. The others
//!   only increment a counter in thread-local storage.
//! - For an uncontended lock, the "waiting" time is the time to take it plus one clock reading.
//!
//! See also: the locks themselves, times per source line (`stats/`).

use core::cell::Cell;
use core::fmt;
use core::time::Duration;
use std::thread_local;
use std::time::Instant;

use lock_api::RawMutex;

/// One acquisition in this many is timed. A prime, so that it does not match the rhythm of a loop that takes
/// the lock.
pub const STRIDE: u64 = 17;

/// Totals of one thread's acquisitions of all [`Metered`] locks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockTimes {
    /// Acquisitions, timed or not.
    pub acquired: u64,
    /// Number of acquisitions that were timed.
    pub timed: u64,
    /// Total time from the request to the acquisition, for the timed acquisitions.
    pub waited: Duration,
    /// Total time from the acquisition to the release, for the timed acquisitions.
    pub held: Duration,
}

impl LockTimes {
    const NONE: Self = Self { acquired: 0, timed: 0, waited: Duration::ZERO, held: Duration::ZERO };

    /// The calling thread's totals since it started.
    #[must_use]
    pub fn of_this_thread() -> Self {
        TIMES.with(Cell::get)
    }

    /// The difference from `earlier`, an earlier reading of the same thread.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            acquired: self.acquired - earlier.acquired,
            timed: self.timed - earlier.timed,
            waited: self.waited.saturating_sub(earlier.waited),
            held: self.held.saturating_sub(earlier.held),
        }
    }

    /// The sum of both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            acquired: self.acquired + other.acquired,
            timed: self.timed + other.timed,
            waited: self.waited + other.waited,
            held: self.held + other.held,
        }
    }

    /// Waiting time of all acquisitions, in ns, extrapolated from the timed ones.
    #[must_use]
    pub fn waited_ns(&self) -> f64 {
        self.scaled(self.waited)
    }

    /// Holding time of all acquisitions, in ns, extrapolated from the timed ones.
    #[must_use]
    pub fn held_ns(&self) -> f64 {
        self.scaled(self.held)
    }

    #[allow(clippy::cast_precision_loss)] // 2^53 ns are 104 days
    fn scaled(&self, timed: Duration) -> f64 {
        if self.timed == 0 {
            return 0.0;
        }
        timed.as_nanos() as f64 * self.acquired as f64 / self.timed as f64
    }
}

thread_local! {
    static TIMES: Cell<LockTimes> = const { Cell::new(LockTimes::NONE) };
}

/// Wraps the lock `L` and measures it.
pub struct Metered<L>(L);

impl<L> fmt::Debug for Metered<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metered").finish_non_exhaustive()
    }
}

/// An acquisition of a [`Metered`] lock.
#[derive(Debug)]
pub struct Held<G> {
    inner: G,
    /// `None`: not timed.
    since: Option<Instant>,
}

/// Counts an acquisition; returns whether to time it.
fn count() -> bool {
    TIMES.with(|times| {
        let mut now = times.get();
        let turn = now.acquired.is_multiple_of(STRIDE);
        now.acquired += 1;
        times.set(now);
        turn
    })
}

fn note_waited(waited: Duration) {
    TIMES.with(|times| {
        let mut now = times.get();
        now.timed += 1;
        now.waited += waited;
        times.set(now);
    });
}

fn note_held(held: Duration) {
    TIMES.with(|times| {
        let mut now = times.get();
        now.held += held;
        times.set(now);
    });
}

// SAFETY: 1. exclusion and ordering are those of `L`, itself a `RawMutex`: every acquisition and every
// release here is exactly one of the inner lock's; 2. `Held` owns the inner guard state for that acquisition
// and passes it to that lock's `unlock`, once; forgetting it forgets the inner state, which `L` allows; 3.
// nothing here unwinds between the inner acquisition and returning `Held`: clock and thread-local cell do not
// panic.
unsafe impl<L: RawMutex> RawMutex for Metered<L> {
    #[allow(clippy::declare_interior_mutable_const)] // as in the trait
    const INIT: Self = Self(L::INIT);

    type Guard = Held<L::Guard>;

    #[inline]
    fn lock(&self) -> Self::Guard {
        if !count() {
            return Held { inner: self.0.lock(), since: None };
        }
        let asked = Instant::now();
        let inner = self.0.lock();
        let since = Instant::now();
        note_waited(since.saturating_duration_since(asked));
        Held { inner, since: Some(since) }
    }

    #[inline]
    fn try_lock(&self) -> Option<Self::Guard> {
        let inner = self.0.try_lock()?;
        let since = count().then(Instant::now);
        if since.is_some() {
            note_waited(Duration::ZERO);
        }
        Some(Held { inner, since })
    }

    #[inline]
    unsafe fn unlock(&self, guard: Self::Guard) {
        if let Some(since) = guard.since {
            note_held(since.elapsed());
        }
        // SAFETY: the caller passes the state of an acquisition of this lock; `inner` is the inner lock's
        // state for it.
        unsafe { self.0.unlock(guard.inner) }
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.is_locked()
    }
}

#[cfg(all(test, not(miri)))] // Miri has no real clock to test
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;
    use crate::{StdMutex, TicketLock};

    type Mutex<L, T> = lock_api::Mutex<Metered<L>, T>;

    /// Runs `body` on a new thread, so that its times are not mixed with those of other tests.
    fn alone<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
        thread::spawn(body).join().unwrap()
    }

    #[test]
    fn every_acquisition_is_counted_and_one_in_seventeen_is_timed() {
        let times = alone(|| {
            let lock = Mutex::<TicketLock, u32>::new(0);
            (0..170).for_each(|_| *lock.lock() += 1);
            assert_eq!(*lock.lock(), 170);
            LockTimes::of_this_thread()
        });
        assert_eq!((times.acquired, times.timed), (171, 11));
        assert!(times.held > Duration::ZERO, "{times:?}");
    }

    #[test]
    fn lock_that_was_held_says_at_least_so_long() {
        let long = Duration::from_millis(5);
        let times = alone(move || {
            let lock = Mutex::<StdMutex, ()>::new(());
            let guard = lock.lock();
            thread::sleep(long);
            drop(guard);
            LockTimes::of_this_thread()
        });
        assert!(times.held >= long && times.timed == 1, "{times:?}");
    }

    #[test]
    fn holder_and_waiter_are_timed_each_on_a_thread_of_its_own() {
        let long = Duration::from_millis(20);
        let lock = Mutex::<StdMutex, ()>::new(());
        let (taken, is_taken) = channel();
        let (holder, waiter) = thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let guard = lock.lock();
                taken.send(()).unwrap();
                thread::sleep(long);
                drop(guard);
                LockTimes::of_this_thread()
            });
            is_taken.recv().unwrap();
            let waiter = scope.spawn(|| {
                drop(lock.lock());
                LockTimes::of_this_thread()
            });
            (holder.join().unwrap(), waiter.join().unwrap())
        });
        assert!(holder.held >= long, "{holder:?}");
        // The waiting time depends on the scheduler: the waiter may have started late.
        assert_eq!((waiter.acquired, waiter.timed, holder.and(waiter).acquired), (1, 1, 2));
    }

    #[test]
    fn try_lock_that_fails_is_no_acquisition() {
        let times = alone(|| {
            let lock = Mutex::<TicketLock, ()>::new(());
            let guard = lock.try_lock();
            assert!(guard.is_some() && lock.try_lock().is_none());
            LockTimes::of_this_thread()
        });
        assert_eq!((times.acquired, times.timed), (1, 1));
    }

    #[test]
    fn threads_exclude_each_other_through_it() {
        let lock = Mutex::<StdMutex, u64>::new(0);
        thread::scope(|scope| {
            (0..3).for_each(|_| _ = scope.spawn(|| (0..10_000).for_each(|_| *lock.lock() += 1)));
        });
        assert_eq!(lock.into_inner(), 30_000);
    }

    #[test]
    fn acquisitions_that_were_not_timed_count_as_those_that_were() {
        let held = Duration::from_nanos(300);
        let times = LockTimes { acquired: 34, timed: 2, waited: Duration::ZERO, held };
        assert!((times.held_ns() - 5100.0).abs() < 1e-9 && times.waited_ns() == 0.0);
        assert_eq!(LockTimes::default().held_ns(), 0.0);
    }

    #[test]
    fn reading_since_an_earlier_one_is_what_came_between() {
        let earlier =
            LockTimes { acquired: 10, timed: 1, waited: Duration::ZERO, held: Duration::from_nanos(5) };
        let later =
            LockTimes { acquired: 30, timed: 2, waited: Duration::ZERO, held: Duration::from_nanos(25) };
        let between = later.since(earlier);
        assert_eq!((between.acquired, between.timed, between.held), (20, 1, Duration::from_nanos(20)));
    }
}
