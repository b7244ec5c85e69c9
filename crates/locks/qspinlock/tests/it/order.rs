//! Which thread gets a queued lock when; each test sets up one situation.
//!
//! While the lock is held, only a new waiter changes its word: so a test waits for the word to change to know
//! that a thread has queued. A waiter that must not run is kept in a signal handler.
//!
//! See also: long runs with many threads (`torture`), exclusion (`queued.rs`).
#![cfg(not(any(loom, miri)))]
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::{self, Scope};
use std::time::Duration;

use qspinlock::{
    Clock, Deadline, Fair, Fifo, Hybrid, Linux, NODES_PER_THREAD, Native, Platform, Policy, QueueLock,
};

type Lock<P> = QueueLock<P, Linux>;

fn word<P, S>(lock: &QueueLock<P, S>) -> u32 {
    // SAFETY: a lock is one atomic word, and it is borrowed.
    unsafe { &*(&raw const *lock).cast::<AtomicU32>() }.load(Relaxed)
}

/// Releases a lock that this test holds.
fn release<P: Policy, S: Platform>(lock: &QueueLock<P, S>) {
    // SAFETY: the thread that acquired the lock calls this, once.
    unsafe { lock.release() };
}

fn in_ms(ms: u64) -> Deadline {
    let now = qspinlock::now(Clock::Monotonic);
    Deadline { at_ns: now.at_ns + ms * 1_000_000, ..now }
}

/// Starts `body`, which queues on `lock` (held by the caller), and returns once it has queued.
fn queued<'scope, P: Policy, S: Platform>(
    scope: &'scope Scope<'scope, '_>,
    lock: &QueueLock<P, S>,
    body: impl FnOnce() + Send + 'scope,
) -> thread::ScopedJoinHandle<'scope, ()> {
    let before = word(lock);
    let waiter = scope.spawn(body);
    while word(lock) == before {
        thread::yield_now();
    }
    waiter
}

/// Lets waiters queue one after another; returns their numbers in the order in which they got the lock.
fn order_of<P: Policy>(waiters: usize, release_by: fn(&Lock<P>)) -> Vec<usize> {
    let (lock, order) = (Lock::<P>::new(), Mutex::new(Vec::new()));
    lock.acquire();
    thread::scope(|scope| {
        for number in 0..waiters {
            let (lock, order) = (&lock, &order);
            queued(scope, lock, move || {
                lock.acquire();
                order.lock().unwrap().push(number);
                release_by(lock);
            });
        }
        release_by(&lock);
    });
    assert_eq!(word(&lock), 0);
    order.into_inner().unwrap()
}

fn release_fairly<P: Policy>(lock: &Lock<P>) {
    // SAFETY: the thread that acquired the lock calls this, once.
    unsafe { lock.release_fairly() };
}

#[test]
fn fifo_lock_is_had_in_the_order_of_queueing() {
    assert_eq!(order_of::<Fifo>(8, release), [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn native_lock_is_had_in_the_order_of_queueing() {
    assert_eq!(order_of::<Native>(3, release), [0, 1, 2]);
}

#[test]
fn waiters_of_a_fair_lock_have_it_in_the_order_of_queueing() {
    assert_eq!(order_of::<Fair>(8, release), [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn waiters_of_a_hybrid_lock_have_it_in_the_order_of_queueing() {
    assert_eq!(order_of::<Hybrid>(8, release), [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn hybrid_lock_released_fairly_is_had_in_the_order_of_queueing() {
    assert_eq!(order_of::<Hybrid>(8, release_fairly), [0, 1, 2, 3, 4, 5, 6, 7]);
}

/// Waiters 0 to 4, of which the `impatient` ones time out before the lock is released: returns the order of
/// the others.
fn order_without<P: Policy>(impatient: &[usize]) -> Vec<usize> {
    let (lock, order) = (Lock::<P>::new(), Mutex::new(Vec::new()));
    lock.acquire();
    thread::scope(|scope| {
        let mut giving_up = Vec::new();
        for number in 0..5 {
            let (lock, order, gives_up) = (&lock, &order, impatient.contains(&number));
            let waiter = queued(scope, lock, move || {
                if gives_up {
                    assert!(!lock.acquire_before(in_ms(20)));
                    return;
                }
                lock.acquire();
                order.lock().unwrap().push(number);
                release(lock);
            });
            giving_up.extend(gives_up.then_some(waiter));
        }
        giving_up.into_iter().for_each(|waiter| waiter.join().unwrap());
        release(&lock);
    });
    assert_eq!(word(&lock), 0);
    order.into_inner().unwrap()
}

#[test]
fn waiter_that_gave_up_in_the_middle_is_skipped_and_the_others_keep_their_order() {
    assert_eq!(order_without::<Fifo>(&[2]), [0, 1, 3, 4]);
    assert_eq!(order_without::<Fair>(&[2]), [0, 1, 3, 4]);
    assert_eq!(order_without::<Hybrid>(&[2]), [0, 1, 3, 4]);
}

#[test]
fn waiters_that_gave_up_at_both_ends_are_skipped_and_the_others_keep_their_order() {
    assert_eq!(order_without::<Fifo>(&[0, 3, 4]), [1, 2]);
    assert_eq!(order_without::<Fair>(&[0, 3, 4]), [1, 2]);
    assert_eq!(order_without::<Hybrid>(&[0, 3, 4]), [1, 2]);
}

#[test]
fn lock_whose_waiters_have_all_given_up_is_free_when_released() {
    assert!(order_without::<Fifo>(&[0, 1, 2, 3, 4]).is_empty());
    assert!(order_without::<Fair>(&[0, 1, 2, 3, 4]).is_empty());
    assert!(order_without::<Hybrid>(&[0, 1, 2, 3, 4]).is_empty());
}

/// `try_acquire` must return on a lock with a holder and a waiter; if it waited, the test would hang.
fn try_acquire_fails_behind_a_holder_and_a_waiter<P: Policy>() {
    let lock = Lock::<P>::new();
    assert!(lock.try_acquire());
    assert!(!lock.try_acquire());
    thread::scope(|scope| {
        queued(scope, &lock, || {
            lock.acquire();
            release(&lock);
        });
        assert!((0..1000).all(|_| !lock.try_acquire()));
        release(&lock);
    });
    assert!(lock.try_acquire());
    release(&lock);
}

#[test]
fn try_acquire_of_a_held_lock_does_not_wait() {
    try_acquire_fails_behind_a_holder_and_a_waiter::<Native>();
    try_acquire_fails_behind_a_holder_and_a_waiter::<Fifo>();
    try_acquire_fails_behind_a_holder_and_a_waiter::<Fair>();
    try_acquire_fails_behind_a_holder_and_a_waiter::<Hybrid>();
}

fn deadline_that_has_passed_takes_a_free_lock_and_leaves_a_held_one<P: Policy>() {
    let (lock, long_ago) = (Lock::<P>::new(), Deadline { clock: Clock::Realtime, at_ns: 0 });
    assert!(lock.acquire_before(long_ago));
    assert!(!lock.acquire_before(long_ago));
    assert!(!lock.acquire_before(Deadline { clock: Clock::Monotonic, at_ns: 1 }));
    release(&lock);
    assert_eq!(word(&lock), 0);
}

#[test]
fn deadline_that_has_passed_is_one() {
    deadline_that_has_passed_takes_a_free_lock_and_leaves_a_held_one::<Native>();
    deadline_that_has_passed_takes_a_free_lock_and_leaves_a_held_one::<Fifo>();
    deadline_that_has_passed_takes_a_free_lock_and_leaves_a_held_one::<Fair>();
    deadline_that_has_passed_takes_a_free_lock_and_leaves_a_held_one::<Hybrid>();
}

/// Timed waits that fail, on more held locks than this thread has nodes.
fn more_waits_left_behind_than_nodes<P: Policy>() {
    let locks = [const { Lock::<P>::new() }; 3 * NODES_PER_THREAD as usize];
    locks.iter().for_each(Lock::acquire);
    assert!((0..2).all(|_| locks.iter().all(|lock| !lock.acquire_before(in_ms(1)))));

    let contended = Lock::<P>::new();
    contended.acquire();
    thread::scope(|scope| {
        // Another thread releases this lock while this thread, which has no node left, waits.
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(5));
            release(&contended);
        });
        contended.acquire();
    });
    release(&contended);

    locks.iter().for_each(release);
    assert!(locks.iter().all(|lock| word(lock) == 0));
}

#[test]
fn thread_that_left_all_its_nodes_behind_still_gets_locks() {
    more_waits_left_behind_than_nodes::<Fifo>();
    more_waits_left_behind_than_nodes::<Fair>();
    more_waits_left_behind_than_nodes::<Hybrid>();
}

/// Set while a thread sits in the signal handler.
static IS_PARKED: AtomicBool = AtomicBool::new(false);
static MAY_GO_ON: AtomicBool = AtomicBool::new(false);

extern "C" fn park(_signal: libc::c_int) {
    IS_PARKED.store(true, SeqCst);
    while !MAY_GO_ON.load(SeqCst) {
        thread::yield_now();
    }
}

/// Waits until a queued thread sleeps.
fn wait_until_asleep(thread: libc::pid_t) {
    let is_asleep = || {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('S'))
    };
    while !is_asleep() {
        thread::yield_now();
    }
}

/// Calls `body` while a waiter of `lock`, asleep if its policy lets it sleep, cannot run when it is woken.
fn behind_a_parked_waiter<P: Policy, S: Platform>(lock: &QueueLock<P, S>, body: impl FnOnce() -> u32) -> u32 {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    [&IS_PARKED, &MAY_GO_ON].into_iter().for_each(|flag| flag.store(false, SeqCst));
    // SAFETY: the handler uses only atomics and yields.
    unsafe { libc::signal(libc::SIGUSR1, park as extern "C" fn(libc::c_int) as usize) };
    lock.acquire();
    thread::scope(|scope| {
        let (own_id, id) = mpsc::channel();
        queued(scope, lock, move || {
            // SAFETY: takes nothing, cannot fail.
            let waiter = unsafe { libc::pthread_self() };
            // SAFETY: as above.
            own_id.send((waiter, unsafe { libc::gettid() })).unwrap();
            lock.acquire();
            release(lock);
        });
        let (waiter, number) = id.recv().unwrap();
        if P::SLEEPS {
            wait_until_asleep(number);
        }
        // SAFETY: the thread is alive: it waits for a lock that is held here.
        assert_eq!(unsafe { libc::pthread_kill(waiter, libc::SIGUSR1) }, 0);
        while !IS_PARKED.load(SeqCst) {
            thread::yield_now();
        }
        release(lock);
        let result = body();
        MAY_GO_ON.store(true, SeqCst);
        result
    })
}

/// More passes than any policy allows.
const NO_BOUND: u32 = 100_000;

/// How often newcomers get the lock past a waiter that cannot run.
fn passes_of_a_parked_waiter<P: Policy>() -> u32 {
    let lock = Lock::<P>::new();
    behind_a_parked_waiter(&lock, || {
        let mut passes = 0;
        while passes < NO_BOUND && lock.try_acquire() {
            passes += 1;
            release(&lock);
        }
        // A deadline does not help either: it is the waiter's turn.
        if lock.acquire_before(in_ms(1)) { NO_BOUND } else { passes }
    })
}

#[test]
fn sleeping_waiter_of_a_hybrid_lock_is_passed_as_often_as_the_policy_says_and_no_more() {
    assert_eq!(passes_of_a_parked_waiter::<Hybrid>(), Hybrid::PASS_LIMIT);
}

#[test]
fn sleeping_waiter_of_a_fair_lock_is_passed_as_often_as_the_policy_says_and_no_more() {
    assert_eq!(passes_of_a_parked_waiter::<Fair>(), Fair::PASS_LIMIT);
}

#[test]
fn waiter_of_a_fifo_or_native_lock_is_never_passed() {
    assert_eq!(passes_of_a_parked_waiter::<Fifo>(), 0);
    assert_eq!(passes_of_a_parked_waiter::<Native>(), 0);
}

/// The panic message when a lock that no thread holds is released.
fn says_when_released_unheld<P: Policy>() -> String {
    let result = thread::spawn(|| release(&Lock::<P>::new())).join();
    result.err().and_then(|panic| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}

#[test]
#[cfg(debug_assertions)]
fn release_of_a_lock_that_nobody_holds_is_diagnosed_in_debug_builds() {
    let all = [
        says_when_released_unheld::<Native>(),
        says_when_released_unheld::<Fifo>(),
        says_when_released_unheld::<Fair>(),
        says_when_released_unheld::<Hybrid>(),
    ];
    assert_eq!(all, ["a free lock was unlocked"; 4]);
}

#[test]
#[cfg(not(debug_assertions))]
fn release_of_a_lock_that_nobody_holds_changes_nothing() {
    let lock = Lock::<Hybrid>::new();
    release(&lock);
    assert_eq!(word(&lock), 0);
    lock.acquire();
    release(&lock);
}

#[test]
fn lock_acquired_by_one_thread_is_released_by_another() {
    static RELEASED: AtomicUsize = AtomicUsize::new(0);
    let lock = Lock::<Fair>::new();
    lock.acquire();
    thread::scope(|scope| {
        queued(scope, &lock, || {
            lock.acquire();
            RELEASED.fetch_add(1, Relaxed);
        });
        scope.spawn(|| release(&lock));
    });
    assert_eq!(RELEASED.load(Relaxed), 1);
    assert!(lock.is_held());
    release(&lock);
}
