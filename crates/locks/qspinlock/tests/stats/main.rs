//! Checks statistics against known acquisitions.
//!
//! The switch and the counts are process-wide, so the tests in this file run one at a time.
//!
//! See also: the cost of statistics (`benches/stats.rs`), more lines than rows (`bounds.rs`).
#![allow(missing_docs, clippy::unwrap_used)]

mod bounds;

use std::hint::black_box;
use std::sync::mpsc::channel;
use std::sync::{Mutex as StdSync, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use lock_api::{Mutex, RawMutex, RawMutexFair, RawMutexTimed};
use qspinlock::stats::{self, EventCounts, Mode, Profile, Profiled, SiteCounts};
use qspinlock::{Event, Fair, Fifo, Hybrid, Linux, Platform, PvQSpinLock, QSpinLock, StdMutex, TicketLock};

type Ordered = Profiled<PvQSpinLock<Fifo>>;

static ALONE: StdSync<()> = StdSync::new(());

/// Sets the mode and starts from zero, until it is dropped.
struct Recorded(#[allow(dead_code)] MutexGuard<'static, ()>);

fn record(mode: Mode) -> Recorded {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    stats::reset();
    stats::set_mode(mode);
    Recorded(alone)
}

impl Drop for Recorded {
    fn drop(&mut self) {
        stats::set_mode(Mode::Off);
    }
}

fn at(profile: &Profile, line: u32) -> SiteCounts {
    let here = |site: &&SiteCounts| site.file == file!() && site.line == line;
    profile.sites.iter().find(here).copied().unwrap_or_default()
}

/// Takes the lock `times` times; returns the line.
fn take<L: RawMutex>(lock: &Mutex<L, u64>, times: u64) -> u32 {
    for _ in 0..times {
        *lock.lock() += 1;
    }
    line!() - 2
}

/// Notes the events of a slow path on each acquisition and each release.
struct Eventful(TicketLock);

// SAFETY: the ticket lock's arguments; this only adds notes.
unsafe impl RawMutex for Eventful {
    const INIT: Self = Self(TicketLock::INIT);
    type Guard = <TicketLock as RawMutex>::Guard;

    fn lock(&self) -> Self::Guard {
        self.0.lock()
    }
    fn try_lock(&self) -> Option<Self::Guard> {
        Linux::note(Event::Queued);
        Linux::note(Event::Halted);
        self.0.try_lock()
    }
    unsafe fn unlock(&self, guard: Self::Guard) {
        Linux::note(Event::Kicked);
        // SAFETY: the caller keeps this function's contract, which is the same.
        unsafe { self.0.unlock(guard) }
    }
    fn is_locked(&self) -> bool {
        self.0.is_locked()
    }
}

/// Holds the lock until `enough`, while `others` threads want it. Returns the other threads' line.
fn hold_until<L>(enough: impl Fn() -> bool, others: usize, lock: &Mutex<L, u64>) -> u32
where
    L: RawMutex<Guard: Send> + Send + Sync,
{
    thread::scope(|scope| {
        let held = lock.lock();
        (0..others).for_each(|_| _ = scope.spawn(|| take(lock, 1)));
        while !enough() {
            thread::sleep(Duration::from_millis(1));
        }
        drop(held);
    });
    take(lock, 0)
}

#[test]
fn two_lines_that_take_one_lock_are_told_apart() {
    let _recorded = record(Mode::Counters);
    let lock = Mutex::<Ordered, u64>::new(0);
    (0..3).for_each(|_| *lock.lock() += 1);
    let first = line!() - 1;
    (0..5).for_each(|_| *lock.lock() += 1);
    let profile = stats::snapshot();
    assert_eq!(at(&profile, first).times.acquired, 3);
    assert_eq!(at(&profile, first + 2).times.acquired, 5);
}

#[test]
fn one_thread_s_acquisitions_are_counted_exactly_and_uncontended() {
    let _recorded = record(Mode::Counters);
    let lock = Mutex::<Ordered, u64>::new(0);
    let line = take(&lock, 1000);
    let site = at(&stats::snapshot(), line);
    assert_eq!((site.times.acquired, site.contended, site.refused), (1000, 0, 0));
    assert_eq!((site.events, site.times.timed), (EventCounts::default(), 0));
}

#[test]
fn many_threads_acquisitions_are_counted_exactly() {
    let _recorded = record(Mode::Counters);
    let lock = Mutex::<Profiled<PvQSpinLock<Hybrid>>, u64>::new(0);
    let each = if cfg!(miri) { 20 } else { 20_000 };
    thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(|| take(&lock, each)))));
    let line = take(&lock, 0);
    let profile = stats::snapshot();
    assert_eq!((*lock.lock(), at(&profile, line).times.acquired), (4 * each, 4 * each));
    assert!(at(&profile, line).contended <= 4 * each);
    assert_eq!(profile.crowded_threads, 0);
}

#[test]
fn counts_of_ended_threads_stay_whoever_inherits_their_tables() {
    let _recorded = record(Mode::Counters);
    let lock = Mutex::<Ordered, u64>::new(0);
    let threads = if cfg!(miri) { 5 } else { 200 };
    (0..threads).for_each(|_| _ = thread::scope(|scope| scope.spawn(|| take(&lock, 7)).join().unwrap()));
    let line = take(&lock, 0);
    assert_eq!(at(&stats::snapshot(), line).times.acquired, 7 * threads);
}

#[test]
fn switched_off_nothing_is_counted_at_all() {
    let _recorded = record(Mode::Off);
    let lock = Mutex::<Profiled<PvQSpinLock<Fair>>, u64>::new(0);
    take(&lock, 10);
    hold_until(|| true, 2, &lock);
    assert!(lock.try_lock_for(Duration::ZERO).is_some() && lock.try_lock().is_some());
    let profile = stats::snapshot();
    assert_eq!(profile, Profile { crowded_threads: profile.crowded_threads, ..Profile::default() });
    assert_eq!(stats::totals(), EventCounts::default());
}

#[test]
fn waiters_that_sleep_are_contended_queued_halted_and_woken_once_each() {
    let _recorded = record(Mode::Counters);
    let lock = Mutex::<Ordered, u64>::new(0);
    let line = hold_until(|| stats::totals().halted == 4, 4, &lock);
    let (site, totals) = (at(&stats::snapshot(), line), stats::totals());
    assert_eq!((site.times.acquired, site.contended), (4, 4));
    assert_eq!((site.events.queued, site.events.halted, site.events.stole), (4, 4, 0));
    // The holder wakes the first waiter, and each waiter wakes the next.
    assert_eq!((totals.kicked, site.events.kicked), (4, 3));
}

#[test]
fn contended_attempts_are_counted_for_locks_that_say_nothing() {
    let _recorded = record(Mode::Full);
    let lock = Mutex::<Profiled<TicketLock>, u64>::new(0);
    let contended = || stats::snapshot().sites.iter().map(|site| site.contended).sum::<u64>();
    let line = hold_until(|| contended() == 2, 2, &lock);
    let site = at(&stats::snapshot(), line);
    assert_eq!((site.times.acquired, site.contended, site.times.timed), (2, 2, 2));
    assert!(site.times.waited > Duration::ZERO && site.events == EventCounts::default(), "{site:?}");
}

#[test]
fn events_of_taking_and_of_letting_go_are_of_the_line_that_took() {
    let _recorded = record(Mode::Counters);
    let lock = Mutex::<Profiled<Eventful>, u64>::new(0);
    let guard = lock.lock();
    let line = line!() - 1;
    drop(black_box(guard));
    let events = at(&stats::snapshot(), line).events;
    assert_eq!(events, EventCounts { queued: 1, halted: 1, kicked: 1, ..EventCounts::default() });
    assert_eq!(stats::totals(), events);
}

#[test]
fn events_without_a_profiled_lock_are_in_the_totals_and_at_no_line() {
    let _recorded = record(Mode::Counters);
    let lock = Mutex::<Eventful, u64>::new(0);
    thread::scope(|scope| _ = scope.spawn(|| drop(lock.try_lock())).join());
    let profile = stats::snapshot();
    assert_eq!((profile.unattributed.kicked, profile.sites.len()), (1, 0));
    assert_eq!(stats::totals(), profile.unattributed);
}

#[test]
fn guard_that_is_sent_is_counted_at_the_line_that_took_it() {
    let _recorded = record(Mode::Full);
    let lock = Mutex::<Profiled<Eventful>, u64>::new(0);
    let guard = lock.lock();
    let line = line!() - 1;
    thread::scope(|scope| _ = scope.spawn(move || drop(guard)).join());
    let site = at(&stats::snapshot(), line);
    assert_eq!((site.times.acquired, site.times.timed, site.events.kicked), (1, 1, 1));
    assert!(site.times.held > Duration::ZERO, "{site:?}");
}

#[test]
fn try_lock_that_fails_is_refused_and_no_acquisition() {
    let _recorded = record(Mode::Counters);
    let lock = Mutex::<Ordered, u64>::new(0);
    let _held = lock.lock();
    assert!(lock.try_lock().is_none());
    let site = at(&stats::snapshot(), line!() - 1);
    assert_eq!((site.times.acquired, site.refused, site.contended), (0, 1, 0));
}

fn gives_up_once<L: RawMutexTimed<Duration = Duration>>() {
    let _recorded = record(Mode::Full);
    let lock = Mutex::<Profiled<L>, u64>::new(0);
    let held = lock.lock();
    assert!(lock.try_lock_for(Duration::from_millis(2)).is_none());
    drop(held);
    assert!(lock.try_lock_for(Duration::from_millis(2)).is_some());
    let profile = stats::snapshot();
    let (late, early) = (at(&profile, line!() - 4), at(&profile, line!() - 2));
    assert_eq!((late.times.acquired, late.contended, late.events.timed_out), (0, 1, 1));
    assert_eq!((early.times.acquired, early.contended, early.times.timed), (1, 0, 1));
}

#[test]
fn attempt_that_ends_at_its_deadline_is_one_time_out() {
    gives_up_once::<PvQSpinLock<Hybrid>>();
    gives_up_once::<QSpinLock>();
}

#[test]
fn sampling_times_the_first_of_each_line_and_then_one_in_so_many() {
    let _recorded = record(Mode::Sampled { one_in: 10 });
    let lock = Mutex::<Profiled<TicketLock>, u64>::new(0);
    let timed = |times| {
        let line = take(&lock, times);
        at(&stats::snapshot(), line).times.timed
    };
    let before = timed(0); // another test's thread may have left the line in the middle of a stride
    assert_eq!((before, timed(100), timed(50)), (0, 10, 15));
}

#[test]
fn full_timing_knows_how_long_a_lock_was_held() {
    let _recorded = record(Mode::Full);
    let lock = Mutex::<Profiled<StdMutex>, ()>::new(());
    let held = lock.lock();
    let line = line!() - 1;
    thread::sleep(Duration::from_millis(5));
    drop(held);
    let times = at(&stats::snapshot(), line).times;
    assert!(times.timed == 1 && times.held >= Duration::from_millis(5), "{times:?}");
}

#[test]
fn bump_is_one_acquisition_that_lasts() {
    fn bumped<L: RawMutexFair>() -> u64 {
        let lock = Mutex::<Profiled<L>, ()>::new(());
        let mut guard = lock.lock();
        lock_api::MutexGuard::bump(&mut guard);
        lock_api::MutexGuard::unlock_fair(guard);
        at(&stats::snapshot(), line!() - 3).times.acquired
    }
    let _recorded = record(Mode::Counters);
    assert_eq!(bumped::<PvQSpinLock<Fair>>(), 1);
}

#[test]
fn snapshot_of_running_threads_never_runs_backwards() {
    let _recorded = record(Mode::Counters);
    let lock = Mutex::<Profiled<PvQSpinLock<Hybrid>>, u64>::new(0);
    let (stop, stopped) = channel::<()>();
    let body = |stopped: std::sync::mpsc::Receiver<()>| {
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            take(&lock, 100);
            thread::yield_now();
        }
    };
    let line = take(&lock, 1);
    let readings: Vec<_> = thread::scope(|scope| {
        scope.spawn(|| body(stopped));
        let readings = (0..if cfg!(miri) { 2 } else { 20 })
            .map(|_| at(&stats::snapshot(), line).times.acquired)
            .collect();
        drop(stop);
        readings
    });
    assert!(readings.is_sorted() && readings[0] >= 1, "{readings:?}");
}

#[test]
fn reset_begins_from_zero_and_shares_are_of_what_came_after() {
    let _recorded = record(Mode::Counters);
    let lock = Mutex::<Ordered, u64>::new(0);
    let line = take(&lock, 9);
    stats::reset();
    assert!(stats::snapshot().sites.is_empty());
    take(&lock, 4);
    assert_eq!(at(&stats::snapshot(), line).times.acquired, 4);
}

#[test]
fn table_has_a_line_per_site_the_most_waited_for_first() {
    let times = |waited_us| qspinlock::LockTimes {
        acquired: 40,
        timed: 4,
        waited: Duration::from_micros(waited_us),
        held: Duration::from_micros(8),
    };
    let site = |line, waited_us| SiteCounts {
        file: "pages.rs",
        line,
        times: times(waited_us),
        contended: 10,
        ..SiteCounts::default()
    };
    let profile = Profile { sites: vec![site(7, 300), site(3, 100)], ..Profile::default() };
    let text = profile.to_string();
    let lines: Vec<Vec<_>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert_eq!(
        lines[1],
        ["75.0", "40", "25.00", "0", "0", "0", "0", "0", "0", "0", "0", "75.00", "3.0", "2.00", "pages.rs:7"]
    );
    assert_eq!((lines[2][0], *lines[2].last().unwrap()), ("25.0", "pages.rs:3"));
}

#[test]
fn mode_that_is_set_is_the_one_that_is_read() {
    let _recorded = record(Mode::Off);
    let modes = [Mode::Counters, Mode::SAMPLED, Mode::Full, Mode::Off];
    let read = modes.map(|mode| {
        stats::set_mode(mode);
        stats::mode()
    });
    assert_eq!(read, modes);
    stats::set_mode(Mode::Sampled { one_in: 0 });
    assert_eq!(stats::mode(), Mode::Full);
}
