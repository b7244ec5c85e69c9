//! Which misuse is reported, and that correct use is not.
//!
//! Without a report these threads would wait forever: a test that hangs has failed.
//!
//! See also: exclusion (`tests/it/contract.rs`).
#![allow(missing_docs, clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use lock_api::{Mutex, MutexGuard, RawMutex};
use qspinlock::checked::{Checked, MAX_HELD, not_checked};
use qspinlock::{Fair, Hybrid, PvQSpinLock};

type Raw = Checked<PvQSpinLock<Fair>>;
type Lock<T = u32> = Mutex<Raw, T>;

fn lock() -> Lock {
    Lock::new(0)
}

/// The panic message of `body`; `None` if it did not panic.
fn report(body: impl FnOnce()) -> Option<String> {
    catch_unwind(AssertUnwindSafe(body)).err().map(|payload| *payload.downcast::<String>().unwrap())
}

fn place(line: u32) -> String {
    format!("{}:{line}:", file!())
}

/// Each thread takes its own lock, and when all have done so, the next thread's lock. Returns the reports,
/// and how many threads got both locks.
fn take_in_a_circle(locks: &[Lock]) -> (Vec<String>, usize) {
    let all_have_one = Barrier::new(locks.len());
    let got_both = AtomicUsize::new(0);
    let body = |number: usize| {
        let _own = locks[number].lock();
        all_have_one.wait();
        let _next = locks[(number + 1) % locks.len()].lock();
        got_both.fetch_add(1, Relaxed);
    };
    let reports = thread::scope(|scope| {
        let body = &body;
        let start = |number| scope.spawn(move || report(|| body(number)));
        let threads: Vec<_> = (0..locks.len()).map(start).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    });
    (reports, got_both.into_inner())
}

#[test]
fn lock_that_is_taken_again_by_its_thread_is_reported_with_both_lines() {
    let lock = lock();
    let _held = lock.lock();
    let taken = line!() - 1;
    let report = report(|| drop(lock.lock())).unwrap();
    let asked = line!() - 1;
    assert!(report.contains(&place(taken)) && report.contains(&place(asked)), "{report}");
    assert!(report.contains("0x") && report.lines().count() == 1, "{report}");
}

#[test]
fn lock_that_was_reported_is_still_held_and_can_be_let_go() {
    let lock = lock();
    let held = lock.lock();
    assert!(report(|| drop(lock.lock())).is_some());
    assert!(lock.is_locked());
    drop(held);
    assert!(lock.try_lock().is_some());
}

#[test]
fn own_lock_asked_for_without_waiting_or_with_a_limit_is_no_misuse() {
    let lock = lock();
    let _held = lock.lock();
    assert!(lock.try_lock().is_none());
    assert!(lock.try_lock_for(Duration::from_millis(3)).is_none());
}

#[test]
fn of_two_threads_that_wait_for_each_other_one_reports_and_the_other_goes_on() {
    let locks = [lock(), lock()];
    let (reports, got_both) = take_in_a_circle(&locks);
    assert_eq!((reports.len(), got_both), (1, 1), "{reports:?}");
    assert!(
        reports[0].starts_with("deadlock: 2 threads wait for each other: this one waits at "),
        "{reports:?}"
    );
    assert!(locks.iter().all(|lock| !lock.is_locked()));
}

#[test]
fn of_three_threads_in_a_circle_one_reports_all_three_locks() {
    let locks = [lock(), lock(), lock()];
    let (reports, got_both) = take_in_a_circle(&locks);
    assert_eq!((reports.len(), got_both), (1, 2), "{reports:?}");
    assert_eq!(reports[0].matches("for lock 0x").count(), 3, "{reports:?}");
    assert_eq!(reports[0].matches("it/checked.rs:").count(), 6, "{reports:?}");
}

#[test]
fn circle_that_a_time_limit_ends_is_not_reported() {
    let locks = [lock(), lock()];
    let both_have_one = Barrier::new(2);
    thread::scope(|scope| {
        let patient = scope.spawn(|| {
            let _own = locks[0].lock();
            both_have_one.wait();
            drop(locks[1].lock());
        });
        let _own = locks[1].lock();
        both_have_one.wait();
        assert!(locks[0].try_lock_for(Duration::from_millis(20)).is_none());
        drop(_own);
        patient.join().unwrap();
    });
}

#[test]
fn crowd_that_takes_locks_in_one_order_is_never_reported() {
    let (threads, rounds) = if cfg!(miri) { (3, 5) } else { (16, 300) };
    let locks: Vec<Mutex<Checked<PvQSpinLock<Hybrid>>, usize>> = (0..5).map(|_| Mutex::new(0)).collect();
    let body = |number: usize| {
        for round in 0..rounds {
            let low = (number + round) % (locks.len() - 1);
            let mut first = locks[low].lock();
            thread::yield_now(); // so that other threads come while it is held
            let mut second = locks[low + 1].lock();
            *first += 1;
            *second += 1;
            if round % 16 == 0 {
                thread::sleep(Duration::from_millis(2)); // long enough for a search for cycles
            }
        }
    };
    thread::scope(|scope| {
        let body = &body;
        (0..threads).for_each(|number| _ = scope.spawn(move || body(number)));
    });
    assert_eq!(locks.iter().map(|lock| *lock.lock()).sum::<usize>(), 2 * threads * rounds);
}

#[test]
fn threads_that_back_off_from_either_order_are_never_reported() {
    let rounds = if cfg!(miri) { 5 } else { 500 };
    let locks = [lock(), lock()];
    let body = |first: usize| {
        for _ in 0..rounds {
            let held = locks[first].lock();
            thread::yield_now();
            if let Some(mut other) = locks[1 - first].try_lock_for(Duration::from_micros(50)) {
                *other += 1;
            }
            drop(held);
        }
    };
    thread::scope(|scope| {
        let body = &body;
        (0..4).for_each(|number| _ = scope.spawn(move || body(number % 2)));
    });
}

#[test]
fn acquisition_that_is_let_go_twice_is_reported_and_the_lock_stays_with_its_new_holder() {
    let lock = Raw::INIT;
    let once = lock.lock();
    // SAFETY: none; this call is the misuse under test. The state is a number and references to statics.
    let twice = unsafe { std::ptr::read(&raw const once) };
    // SAFETY: the state of the acquisition above.
    unsafe { lock.unlock(once) };
    let again = lock.lock();
    // SAFETY: none, as above.
    let report = report(|| unsafe { lock.unlock(twice) }).unwrap();
    assert!(report.contains("which does not hold it"), "{report}");
    assert!(lock.is_locked());
    // SAFETY: the state of the second acquisition.
    unsafe { lock.unlock(again) };
    assert!(!lock.is_locked());
}

#[test]
fn state_of_another_lock_is_reported_and_nothing_is_let_go() {
    let (lock, other) = (Raw::INIT, Raw::INIT);
    let (_state, state_of_other) = (lock.lock(), other.lock());
    // SAFETY: none; this call is the misuse under test. It locks and unlocks nothing.
    let report = report(|| unsafe { lock.unlock(state_of_other) }).unwrap();
    assert!(report.contains("not hold") && lock.is_locked() && other.is_locked(), "{report}");
}

/// Sends a guard whose type is not `Send`.
struct Smuggled<'a>(MutexGuard<'a, Raw, u32>);

// SAFETY: any thread may release the inner lock, and the module documents how `Checked` treats that.
unsafe impl Send for Smuggled<'_> {}

#[test]
fn guard_carried_to_another_thread_is_let_go_there_and_its_thread_may_lock_again() {
    let lock = lock();
    let guard = Smuggled(lock.lock());
    thread::scope(|scope| {
        _ = scope
            .spawn(move || {
                let guard = guard;
                drop(guard.0);
            })
            .join();
    });
    *lock.lock() += 1;
    assert_eq!(*lock.lock(), 1);
}

#[test]
fn lock_made_where_a_forgotten_one_was_is_another() {
    let mut place = lock();
    for _ in 0..3 {
        std::mem::forget(place.lock());
        place = lock();
    }
    *place.lock() += 1;
}

#[test]
fn locks_beyond_the_last_record_are_counted_and_work() {
    let locks: Vec<_> = (0..MAX_HELD + 2).map(|_| lock()).collect();
    let before = not_checked();
    let held: Vec<_> = locks.iter().map(Mutex::lock).collect();
    assert_eq!(not_checked() - before, 2);
    drop(held);
    assert!(locks.iter().all(|lock| lock.try_lock().is_some()));
    assert_eq!(not_checked() - before, 2);
}

#[test]
fn bump_and_fair_unlock_keep_the_records() {
    let lock = lock();
    let mut guard = lock.lock();
    MutexGuard::bump(&mut guard);
    assert!(report(|| drop(lock.lock())).is_some());
    MutexGuard::unlock_fair(guard);
    drop(lock.lock());
}

#[test]
fn panic_while_held_lets_go_and_leaves_no_record() {
    let lock = lock();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _held = lock.lock();
        panic!("meant to");
    }));
    assert!(panicked.is_err());
    drop(lock.lock());
}

#[cfg(feature = "stats")]
#[test]
fn profiled_lock_reports_the_lines_of_its_callers() {
    let lock = Mutex::<qspinlock::stats::Profiled<Raw>, u32>::new(0);
    qspinlock::stats::set_mode(qspinlock::stats::Mode::Counters);
    let _held = lock.lock();
    let taken = line!() - 1;
    let report = report(|| drop(lock.lock())).unwrap();
    qspinlock::stats::set_mode(qspinlock::stats::Mode::Off);
    assert!(report.contains(&place(taken)) && report.contains(&place(taken + 2)), "{report}");
}
