//! The time that one user's thread spends on locks, by caller.
//!
//! - An acquisition that finds its lock free only increments a counter. Of the other acquisitions, one in [`STRIDE`] is
//!   timed, by the clock and by the thread's CPU time.
//! - The rest of a wait, without CPU time, is sleep or time in which other threads had the core.

use std::time::Instant;

use lock_api::{Mutex, MutexGuard, RawMutex};

use super::locks::ReadMostly;
use crate::load::cpu::thread_ns;
use crate::load::nanos;

/// One contended acquisition in this many is timed.
const STRIDE: u32 = 5;

/// The code that acquires a lock, as in the published profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    /// The LRU list of pages in use.
    PageList,
    /// The list of unused pages.
    FreeList,
    /// The queue of processes that are ready to run; each core has one.
    RunQueue,
    /// The lock inside a reader/writer semaphore.
    Semaphore,
    /// The process table's reader/writer lock.
    Table,
}

pub(crate) const CALLERS: [Caller; 5] =
    [Caller::PageList, Caller::FreeList, Caller::RunQueue, Caller::Semaphore, Caller::Table];

/// One caller's acquisitions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Waits {
    pub acquired: u64,
    /// Acquisitions that did not find the lock free.
    pub contended: u64,
    /// Contended acquisitions that were timed.
    pub timed: u64,
    /// Waiting time of the timed acquisitions.
    pub waited_ns: u64,
    /// CPU time during these waits: spinning, falling asleep and waking up.
    pub cpu_ns: u64,
}

#[allow(clippy::cast_precision_loss)] // sums of one sample
impl Waits {
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            acquired: self.acquired + other.acquired,
            contended: self.contended + other.contended,
            timed: self.timed + other.timed,
            waited_ns: self.waited_ns + other.waited_ns,
            cpu_ns: self.cpu_ns + other.cpu_ns,
        }
    }

    /// CPU time of all contended acquisitions, extrapolated from the timed ones.
    pub fn all_cpu_ns(&self) -> f64 {
        self.scaled(self.cpu_ns)
    }

    /// Waiting time of all contended acquisitions, extrapolated from the timed ones.
    pub fn all_waited_ns(&self) -> f64 {
        self.scaled(self.waited_ns)
    }

    fn scaled(&self, timed_ns: u64) -> f64 {
        if self.timed == 0 { 0.0 } else { timed_ns as f64 * self.contended as f64 / self.timed as f64 }
    }
}

/// One thread's counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Meter {
    callers: [Waits; CALLERS.len()],
    turn: u32,
}

impl Meter {
    /// `turn` staggers the threads, so that they do not time the same acquisitions.
    pub fn new(turn: u32) -> Self {
        Self { turn: turn % STRIDE, ..Self::default() }
    }

    pub fn waits(&self) -> &[Waits; CALLERS.len()] {
        &self.callers
    }

    #[inline]
    #[track_caller]
    pub fn lock<'l, L: RawMutex, T>(
        &mut self,
        caller: Caller,
        lock: &'l Mutex<L, T>,
    ) -> MutexGuard<'l, L, T> {
        match self.acquired(caller, lock.try_lock()) {
            Some(guard) => guard,
            None => self.contended(caller, || lock.lock()),
        }
    }

    #[inline]
    #[track_caller]
    pub fn read<'l, T, R: ReadMostly<T>>(&mut self, caller: Caller, lock: &'l R) -> R::Read<'l> {
        match self.acquired(caller, lock.try_read()) {
            Some(guard) => guard,
            None => self.contended(caller, || lock.read()),
        }
    }

    #[inline]
    #[track_caller]
    pub fn write<'l, T, R: ReadMostly<T>>(&mut self, caller: Caller, lock: &'l R) -> R::Write<'l> {
        match self.acquired(caller, lock.try_write()) {
            Some(guard) => guard,
            None => self.contended(caller, || lock.write()),
        }
    }

    #[inline]
    fn acquired<G>(&mut self, caller: Caller, at_once: Option<G>) -> Option<G> {
        self.callers[caller as usize].acquired += 1;
        at_once
    }

    fn contended<G>(&mut self, caller: Caller, wait: impl FnOnce() -> G) -> G {
        let waits = &mut self.callers[caller as usize];
        waits.contended += 1;
        self.turn += 1;
        if !self.turn.is_multiple_of(STRIDE) {
            return wait();
        }
        let (since, cpu_ns) = (Instant::now(), thread_ns());
        let guard = wait();
        waits.cpu_ns += thread_ns().saturating_sub(cpu_ns);
        waits.waited_ns += nanos(since.elapsed());
        waits.timed += 1;
        guard
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use qspinlock::StdMutex;

    use super::*;

    #[test]
    fn lock_that_is_free_is_counted_and_not_timed() {
        let (mut meter, lock) = (Meter::new(0), Mutex::<StdMutex, u32>::new(0));
        (0..10).for_each(|_| *meter.lock(Caller::FreeList, &lock) += 1);
        let expected = Waits { acquired: 10, ..Waits::default() };
        assert_eq!(meter.waits()[Caller::FreeList as usize], expected);
        assert_eq!(meter.waits()[Caller::Table as usize], Waits::default());
    }

    #[test]
    fn wait_for_a_sleeping_holder_takes_time_and_next_to_no_processor() {
        let lock = Mutex::<StdMutex, ()>::new(());
        let guard = lock.lock();
        let waits = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let mut meter = Meter::new(STRIDE - 1);
                drop(meter.lock(Caller::RunQueue, &lock));
                meter.waits()[Caller::RunQueue as usize]
            });
            std::thread::sleep(Duration::from_millis(50));
            drop(guard);
            waiter.join().unwrap()
        });
        assert_eq!((waits.acquired, waits.contended, waits.timed), (1, 1, 1), "{waits:?}");
        assert!(waits.waited_ns > waits.cpu_ns, "{waits:?}");
    }

    #[test]
    fn waits_that_were_not_timed_count_as_those_that_were() {
        let waits = Waits { acquired: 30, contended: 10, timed: 2, waited_ns: 400, cpu_ns: 100 };
        assert_eq!((waits.all_waited_ns(), waits.all_cpu_ns()), (2000.0, 500.0));
        assert_eq!(waits.and(waits).contended, 20);
    }
}
