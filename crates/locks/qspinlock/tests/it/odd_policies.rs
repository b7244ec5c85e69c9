//! Combinations of policy choices that are not shipped, with real threads that mix all ways to acquire and
//! release. Checks that the lock excludes, that the threads finish, and that the lock ends in its initial
//! state.
//!
//! See also: shipped policies (`queued.rs`), all interleavings of few threads (`src/model/`).
#![allow(clippy::unwrap_used, missing_docs)]

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::thread;

use qspinlock::{Clock, Deadline, Linux, Policy, QueueLock, now};

const ROUNDS: u32 = if cfg!(miri) { 10 } else { 3_000 };

/// Bit 0: serves the awake; 1: naps; 2: wakes ahead; 3: does not sleep; 4: heirs do not look.
struct Odd<const LIMIT: u32, const BITS: u32>;

impl<const LIMIT: u32, const BITS: u32> Policy for Odd<LIMIT, BITS> {
    const SLEEPS: bool = BITS & 8 == 0;
    const PASS_LIMIT: u32 = LIMIT;
    const SERVES_THE_AWAKE: bool = BITS & 1 != 0;
    const NEWCOMER_LOOKS: u32 = BITS & 1;
    const WAITER_LOOKS: u32 = 3;
    const WAITER_LOOKS_BEHIND_A_SLEEPER: u32 = 0;
    const HEIR_LOOKS: u32 = if BITS & 16 != 0 { 0 } else { 70 };
    const HEIR_NAP_NS: u64 = if BITS & 2 != 0 { 20_000 } else { 0 };
    const WAKE_AHEAD: bool = BITS & 4 != 0;
}

struct Guarded<P: Policy> {
    lock: QueueLock<P, Linux>,
    numbers: UnsafeCell<[u64; 2]>,
}

// SAFETY: only the lock's holder accesses the numbers.
unsafe impl<P: Policy> Sync for Guarded<P> {}

/// A pseudo-random number.
fn throw(series: &mut u32) -> u32 {
    *series ^= *series << 13;
    *series ^= *series >> 17;
    *series ^= *series << 5;
    *series
}

impl<P: Policy> Guarded<P> {
    fn acquire_somehow(&self, how: u32) -> bool {
        let clock = if how & 8 == 0 { Clock::Monotonic } else { Clock::Realtime };
        match how % 8 {
            0..4 => self.lock.acquire(),
            4 => return self.lock.try_acquire(),
            _ => {
                let at_ns = now(clock).at_ns + u64::from(how >> 8) % 60_000;
                return self.lock.acquire_before(Deadline { clock, at_ns });
            }
        }
        true
    }

    fn add_one(&self) {
        // SAFETY: only the lock's holder calls this.
        let numbers = unsafe { &mut *self.numbers.get() };
        numbers[0] += 1;
        core::hint::black_box(&mut *numbers);
        assert_eq!(numbers[0], numbers[1] + 1, "another thread is inside");
        numbers[1] += 1;
    }

    fn work(&self, seed: u32) -> u64 {
        let mut series = seed;
        let mut acquired = 0;
        for _ in 0..ROUNDS {
            if !self.acquire_somehow(throw(&mut series)) {
                continue;
            }
            self.add_one();
            acquired += 1;
            let how = throw(&mut series);
            if how & 0x30 == 0 {
                thread::yield_now();
            }
            if how & 3 == 0 {
                // SAFETY: held, and released once.
                unsafe { self.lock.release_fairly() };
            } else {
                // SAFETY: as above.
                unsafe { self.lock.release() };
            }
        }
        acquired
    }
}

fn mixed_use_ends_and_leaves_the_lock_free<P: Policy>(threads: u32) {
    let guarded = Arc::new(Guarded::<P> { lock: QueueLock::new(), numbers: UnsafeCell::new([0; 2]) });
    let workers: Vec<_> = (1..=threads)
        .map(|worker| {
            let guarded = Arc::clone(&guarded);
            thread::spawn(move || guarded.work(worker * 0x0137_79b9))
        })
        .collect();

    let acquired: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();

    // SAFETY: no other thread is left, and the lock consists of its word.
    let word = unsafe { (&raw const guarded.lock).cast::<u32>().read() };
    assert_eq!(word, 0, "something is left in the word");
    assert!(guarded.lock.try_acquire());
    // SAFETY: no other thread is left.
    assert_eq!(unsafe { *guarded.numbers.get() }, [acquired; 2]);
}

macro_rules! odd {
    ($($name:ident: $limit:expr, $bits:expr, $threads:expr;)*) => {
        $(#[test]
        fn $name() {
            mixed_use_ends_and_leaves_the_lock_free::<Odd<{ $limit }, $bits>>($threads);
        })*
    };
}

odd! {
    one_pass: 1, 0, 6;
    one_pass_and_serves_the_awake: 1, 1, 6;
    one_pass_and_naps: 1, 2, 6;
    one_pass_naps_and_serves_the_awake: 1, 3, 6;
    one_pass_wakes_ahead: 1, 4, 6;
    eight_passes: 8, 0, 6;
    as_many_passes_as_can_be_counted: qspinlock::MAX_PASSED, 0, 6;
    as_many_and_wakes_ahead_naps_and_serves_the_awake: qspinlock::MAX_PASSED, 7, 6;
    heirs_that_do_not_look: 3, 16, 6;
    heirs_that_do_not_look_and_serve_the_awake: 3, 17, 6;
    heirs_that_only_nap: 3, 18, 6;
    no_pass_wakes_ahead: 0, 5, 6;
    one_pass_and_nobody_sleeps: 1, 8, 2;
    passes_naps_and_nobody_sleeps: 5, 11, 2;
}
