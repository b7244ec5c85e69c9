//! Threads that constantly end and are replaced, and lock once more in early and late destructors.
//!
//! Late destructors are those of `pthread_key_create`, in a round after all of Rust's own have run.
//!
//! See also: how nodes pass from thread to thread (`src/linux/slots.rs`).

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use fastrand::Rng;
use qspinlock::{Fair, Hybrid, Policy};

use crate::rig::{self, Guarded, watched};

static FAIR: [Guarded<Fair>; 2] = [const { Guarded::new() }; 2];
static HYBRID: [Guarded<Hybrid>; 2] = [const { Guarded::new() }; 2];
static LATE: AtomicU64 = AtomicU64::new(0);

/// The number of rounds that the system guarantees.
const LATE_ROUNDS: usize = 4;

fn visit_all() {
    FAIR.iter().for_each(Guarded::visit);
    HYBRID.iter().for_each(Guarded::visit);
}

struct LocksWhenDropped;

impl Drop for LocksWhenDropped {
    fn drop(&mut self) {
        visit_all();
    }
}

thread_local! {
    static EARLY: LocksWhenDropped = const { LocksWhenDropped };
}

fn late_key() -> libc::pthread_key_t {
    static KEY: OnceLock<libc::pthread_key_t> = OnceLock::new();
    *KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the key is written; the destructor gets the value that is set for it, a number.
        assert_eq!(unsafe { libc::pthread_key_create(&raw mut key, Some(run_late)) }, 0);
        key
    })
}

/// `round` is the number of earlier rounds plus one, as a pointer, because null means "nothing to destroy".
unsafe extern "C" fn run_late(round: *mut c_void) {
    visit_all();
    LATE.fetch_add(1, Relaxed);
    if round.addr() < LATE_ROUNDS {
        set_late(round.addr() + 1);
    }
}

fn set_late(round: usize) {
    // SAFETY: the key exists; the value is a number that no code dereferences.
    unsafe { libc::pthread_setspecific(late_key(), std::ptr::without_provenance(round)) };
}

/// A thread's life. It ends while some of its nodes are still in queues.
fn live<P: Policy>(locks: &[Guarded<P>; 2], mut rng: Rng) -> u64 {
    EARLY.with(|_| ());
    set_late(1);
    let visits = rng.usize(..20);
    (0..visits).map(|_| u64::from(locks[rng.usize(..2)].visit_somehow(&mut rng))).sum()
}

fn torture<P: Policy>(locks: &[Guarded<P>; 2]) {
    let (end, lived) = (rig::end(), AtomicU64::new(0));
    watched(locks, || {
        thread::scope(|scope| {
            for line in 0..4 * rig::cores() as u64 {
                let lived = &lived;
                scope.spawn(move || {
                    let mut rng = Rng::with_seed(line);
                    while Instant::now() < end {
                        let rng = rng.fork();
                        // Joining waits for the destructors too.
                        thread::scope(|scope| scope.spawn(|| live(locks, rng)).join().unwrap());
                        lived.fetch_add(1, Relaxed);
                    }
                });
            }
        });
    });
    println!("{} threads, {} late destructors", lived.load(Relaxed), LATE.load(Relaxed));
    assert!(lived.into_inner() > 0 && LATE.load(Relaxed) > 0);
}

#[test]
fn threads_that_end_lock_fair_locks_in_their_destructors() {
    torture(&FAIR);
}

#[test]
fn threads_that_end_lock_hybrid_locks_in_their_destructors() {
    torture(&HYBRID);
}
