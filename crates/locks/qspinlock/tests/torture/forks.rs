//! Forks while other threads wait and hold: the child can use what the forking thread holds, and has none of
//! its waiters.
//!
//! The children only lock: after a fork from a process with many threads, little else is allowed.
//!
//! See also: how the kernel signals forks (`src/linux/fork.rs`).

use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use qspinlock::{Clock, Deadline, Fair, Fifo, Hybrid, NODES_PER_THREAD, Policy};

use crate::rig::{self, Counted, Guarded, watched};

/// A child that takes longer than this hangs.
const CHILD_LIMIT: Duration = Duration::from_secs(300);

/// The first check that fails in a child, as its exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
enum Finding {
    Fine = 0,
    OwnLockNotReleased,
    OwnLockNotTaken,
    OthersLockTaken,
    HeldLockTaken,
    NotReleasedByHandler,
    Grandchild,
    Hangs,
    Died,
}

const FINDINGS: [Finding; 9] = [
    Finding::Fine,
    Finding::OwnLockNotReleased,
    Finding::OwnLockNotTaken,
    Finding::OthersLockTaken,
    Finding::HeldLockTaken,
    Finding::NotReleasedByHandler,
    Finding::Grandchild,
    Finding::Hangs,
    Finding::Died,
];

/// The locks of a run.
struct Stage<P> {
    /// Held by the forking thread, with waiters.
    wanted: Guarded<P>,
    /// Held by the forking thread, without waiters.
    unwanted: Guarded<P>,
    /// Always held by another thread.
    others: Guarded<P>,
    /// Used by other threads; held or not at the fork.
    used: Guarded<P>,
}

/// More often than newcomers may pass a waiter, under any policy.
const MORE_THAN_MAY_PASS: u32 = 10_000;

fn in_a_moment() -> Deadline {
    let now = qspinlock::now(Clock::Monotonic);
    Deadline { at_ns: now.at_ns + 100_000, ..now }
}

type Lock<P> = qspinlock::QueueLock<P, Counted>;

/// The lock that the next alarm releases.
static HELD: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn release_held<P: Policy>(_signal: libc::c_int) {
    let lock = HELD.load(Relaxed).cast::<Lock<P>>();
    // SAFETY: the thread that sets the alarm keeps the lock alive until the alarm has fired.
    let lock = unsafe { &*lock };
    // SAFETY: the thread that sets the alarm holds the lock.
    unsafe { lock.release() };
}

/// Waits for a lock that this thread holds itself, until an alarm's handler releases it.
fn wait_until_handler_releases<P: Policy>(lock: &Lock<P>) -> bool {
    lock.acquire();
    HELD.store((&raw const *lock).cast_mut().cast(), Relaxed);
    // SAFETY: the handler only releases a lock.
    unsafe { libc::signal(libc::SIGALRM, release_held::<P> as extern "C" fn(libc::c_int) as usize) };
    let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let alarm = libc::itimerval { it_interval: zero, it_value: libc::timeval { tv_sec: 0, tv_usec: 2_000 } };
    // SAFETY: the call only reads `alarm`.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const alarm, std::ptr::null_mut()) };
    lock.acquire();
    // SAFETY: acquired above.
    unsafe { lock.release() };
    !lock.is_held()
}

/// Everything that the child does.
fn check_in_child<P: Policy>(stage: &Stage<P>, is_grandchild: bool) -> Finding {
    for own in [&stage.wanted, &stage.unwanted] {
        if own.lock.try_acquire() {
            return Finding::HeldLockTaken;
        }
        // SAFETY: the forking thread, which is this one, held it.
        unsafe { own.lock.release() };
        if !own.lock.try_acquire() {
            return Finding::OwnLockNotTaken;
        }
        // More often than there are nodes: each node must come back. Also on a queue with waiters of the
        // parent.
        for _ in 0..3 * NODES_PER_THREAD {
            if own.lock.acquire_before(in_a_moment()) {
                return Finding::HeldLockTaken;
            }
        }
        // SAFETY: acquired above.
        unsafe { own.lock.release() };
        if own.word() != 0 {
            return Finding::OwnLockNotReleased;
        }
        own.visit();
        if !wait_until_handler_releases(&own.lock) {
            return Finding::NotReleasedByHandler;
        }
    }
    for _ in 0..2 * NODES_PER_THREAD {
        if stage.others.lock.try_acquire() || stage.others.lock.acquire_before(in_a_moment()) {
            return Finding::OthersLockTaken;
        }
    }
    // Whatever the lock's state in the parent: the child may time out but must not hang. If it gets the lock, it
    // gets it again and again: it may pass the parent's waiters as often as any newcomer, and then drops them.
    if stage.used.lock.acquire_before(in_a_moment()) {
        // SAFETY: acquired above.
        unsafe { stage.used.lock.release() };
        for _ in 0..MORE_THAN_MAY_PASS {
            stage.used.lock.acquire();
            // SAFETY: acquired above.
            unsafe { stage.used.lock.release() };
        }
        if stage.used.word() != 0 {
            return Finding::OwnLockNotReleased;
        }
    }
    let fresh = Guarded::<P>::new();
    fresh.visit();
    if !wait_until_handler_releases(&fresh.lock) {
        return Finding::NotReleasedByHandler;
    }
    if is_grandchild {
        return Finding::Fine;
    }
    stage.wanted.lock.acquire();
    stage.unwanted.lock.acquire();
    if run_child(stage, true) == Finding::Fine { Finding::Fine } else { Finding::Grandchild }
}

/// Forks, lets the child check, and waits for it.
fn run_child<P: Policy>(stage: &Stage<P>, is_grandchild: bool) -> Finding {
    // SAFETY: the child calls only what is allowed after a fork from many threads: locks, clocks, signals,
    // `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let finding = check_in_child(stage, is_grandchild);
        // SAFETY: ends this process at once.
        unsafe { libc::_exit(finding as i32) };
    }
    assert!(child > 0);
    let (begin, mut status) = (Instant::now(), 0);
    // SAFETY: the status is written.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        if begin.elapsed() > CHILD_LIMIT {
            // SAFETY: our child, which has not been waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            // SAFETY: as above.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            return Finding::Hangs;
        }
        thread::sleep(Duration::from_micros(500));
    }
    let code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
    code.and_then(|code| FINDINGS.get(usize::try_from(code).ok()?).copied()).unwrap_or(Finding::Died)
}

/// Forks while holding two locks, one with waiters, and after timed waits that left nodes behind.
fn fork_once<P: Policy>(stage: &Stage<P>, rng: &mut Rng) -> Finding {
    stage.unwanted.lock.acquire();
    stage.wanted.lock.acquire();
    while !stage.wanted.lock.is_wanted() {
        thread::yield_now();
    }
    // Leaves nodes in the queue of a lock that the child never gets.
    (0..rng.u32(..2 * NODES_PER_THREAD))
        .for_each(|_| assert!(!stage.others.lock.acquire_before(in_a_moment())));
    let finding = run_child(stage, false);
    // SAFETY: acquired above; the child's copies are its own.
    unsafe { stage.wanted.lock.release() };
    // SAFETY: as above.
    unsafe { stage.unwanted.lock.release() };
    finding
}

fn torture<P: Policy>() {
    let stage: [Stage<P>; 1] = [Stage {
        wanted: Guarded::new(),
        unwanted: Guarded::new(),
        others: Guarded::new(),
        used: Guarded::new(),
    }];
    let stage = &stage[0];
    let over = AtomicBool::new(false);
    stage.others.lock.acquire();
    let end = rig::end();
    let mut forks = 0;
    watched(std::slice::from_ref(&stage.wanted), || {
        thread::scope(|scope| {
            for seed in 0..2 * rig::cores() as u64 {
                let over = &over;
                scope.spawn(move || {
                    let mut rng = Rng::with_seed(seed);
                    while !over.load(Relaxed) {
                        stage.wanted.visit_somehow(&mut rng);
                        stage.used.visit_somehow(&mut rng);
                    }
                });
            }
            let mut rng = Rng::with_seed(7);
            let mut finding = Finding::Fine;
            while Instant::now() < end && finding == Finding::Fine {
                finding = fork_once(stage, &mut rng);
                forks += 1;
            }
            over.store(true, Relaxed);
            assert_eq!(finding, Finding::Fine, "in child {forks}; parent's lock: {}", stage.wanted);
        });
    });
    // SAFETY: acquired above.
    unsafe { stage.others.lock.release() };
    println!("{forks} forks");
    [&stage.wanted, &stage.unwanted, &stage.others, &stage.used].into_iter().for_each(Guarded::assert_quiet);
}

#[test]
fn child_uses_the_fair_locks_that_its_forking_thread_held() {
    torture::<Fair>();
}

#[test]
fn child_uses_the_fifo_locks_that_its_forking_thread_held() {
    torture::<Fifo>();
}

#[test]
fn child_uses_the_hybrid_locks_that_its_forking_thread_held() {
    torture::<Hybrid>();
}
