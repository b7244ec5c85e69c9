//! Building blocks for the queued lock's models: a number behind a lock, threads, policies with tiny limits.
//!
//! The models are in the other files of this folder.

use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::thread::{self, JoinHandle};
use std::sync::Arc; // not loom's `Arc`: it is not part of the model, and loom's adds steps

use super::platform::{self, Modelled};
use crate::{Deadline, Event, Policy, QueueLock};

/// The model's version of the shipped policy `Fifo`, without polls before sleep.
pub(crate) struct SleepyFifo;

impl Policy for SleepyFifo {
    const SLEEPS: bool = true;
    const PASS_LIMIT: u32 = 0;
    const SERVES_THE_AWAKE: bool = true;
    const NEWCOMER_LOOKS: u32 = 0;
    const WAITER_LOOKS: u32 = 0;
    const WAITER_LOOKS_BEHIND_A_SLEEPER: u32 = 0;
    const HEIR_LOOKS: u32 = 0;
}

/// First in, first out: unlocking hands the lock over. Waiters sleep after `LOOKS` polls.
pub(super) struct Handing<const LOOKS: u32>;

/// Newcomers may pass `PASS` times. Waiters and heirs sleep after `LOOKS` polls.
pub(super) struct Passing<const PASS: u32, const LOOKS: u32>;

/// Like [`Passing`], but newcomers do not pass a waiter that is awake.
pub(super) struct ServingTheAwake<const PASS: u32, const LOOKS: u32>;

/// An heir naps before it sleeps. Deadlines pass only in models that call `tick`.
pub(super) struct Napping<const PASS: u32>;

/// Newcomers poll a held lock once before they queue.
pub(super) struct Looking<const PASS: u32>;

/// The next waiter is woken before its turn.
pub(super) struct Ahead<const PASS: u32>;

macro_rules! policy {
    ($policy:ty, <$($limit:ident),*>, $pass:expr, $awake:expr, $newcomer:expr, $looks:expr, $nap:expr, $ahead:expr) => {
        impl<$(const $limit: u32),*> Policy for $policy {
            const SLEEPS: bool = true;
            const PASS_LIMIT: u32 = $pass;
            const SERVES_THE_AWAKE: bool = $awake;
            const NEWCOMER_LOOKS: u32 = $newcomer;
            const WAITER_LOOKS: u32 = $looks;
            const WAITER_LOOKS_BEHIND_A_SLEEPER: u32 = 0;
            const HEIR_LOOKS: u32 = $looks;
            const HEIR_NAP_NS: u64 = $nap;
            const WAKE_AHEAD: bool = $ahead;

            fn newcomer_pause(_look: u32) -> u32 {
                1
            }
        }
    };
}

policy!(Handing<LOOKS>, <LOOKS>, 0, true, 0, LOOKS, 0, false);
policy!(Passing<PASS, LOOKS>, <PASS, LOOKS>, PASS, false, 0, LOOKS, 0, false);
policy!(ServingTheAwake<PASS, LOOKS>, <PASS, LOOKS>, PASS, true, 0, LOOKS, 0, false);
policy!(Napping<PASS>, <PASS>, PASS, false, 0, 1, 1, false);
policy!(Looking<PASS>, <PASS>, PASS, false, 1, 1, 0, false);
policy!(Ahead<PASS>, <PASS>, PASS, false, 0, 0, 0, true);

/// A number behind a queued lock. Loom fails the model if two threads access the number at the same time.
pub(super) struct Guarded<P, F: platform::Futex> {
    pub(super) lock: QueueLock<P, Modelled<F>>,
    number: UnsafeCell<u32>,
}

// SAFETY: only the lock's holder accesses the number; loom checks exactly that.
unsafe impl<P, F: platform::Futex> Sync for Guarded<P, F> {}
// SAFETY: nothing in it is bound to a thread.
unsafe impl<P, F: platform::Futex> Send for Guarded<P, F> {}

impl<P: Policy, F: platform::Futex> Guarded<P, F> {
    /// Must be the first line of an execution; the calling thread becomes thread 0.
    pub(super) fn new() -> Arc<Self> {
        platform::begin();
        platform::enter_as(0);
        Arc::new(Self { lock: QueueLock::new(), number: UnsafeCell::new(0) })
    }

    /// Starts another thread, with its own nodes.
    pub(super) fn spawn<T: 'static>(
        self: &Arc<Self>,
        number: u32,
        run: impl FnOnce(&Self) -> T + 'static,
    ) -> JoinHandle<T> {
        let theirs = Arc::clone(self);
        thread::spawn(move || {
            platform::enter_as(number);
            run(&theirs)
        })
    }

    /// Only for the lock's holder.
    pub(super) fn add_one(&self) {
        platform::trace("has it");
        // SAFETY: the pointer is the cell's; loom panics if another thread accesses it without an order
        // between them.
        self.number.with_mut(|number| unsafe { *number += 1 });
    }

    /// Only for the lock's holder.
    pub(super) fn number(&self) -> u32 {
        // SAFETY: as in `add_one`.
        self.number.with(|number| unsafe { *number })
    }

    pub(super) fn release(&self) {
        // SAFETY: the lock's holder calls this, once.
        unsafe { self.lock.release() };
        platform::trace("released");
    }

    pub(super) fn release_fairly(&self) {
        // SAFETY: the lock's holder calls this, once.
        unsafe { self.lock.release_fairly() };
        platform::trace("released fairly");
    }

    pub(super) fn locked_add_one(&self) {
        self.lock.acquire();
        self.add_one();
        self.release();
    }

    pub(super) fn locked_add_one_fairly(&self) {
        self.lock.acquire();
        self.add_one();
        self.release_fairly();
    }

    pub(super) fn try_add_one(&self) -> bool {
        let taken = self.lock.try_acquire();
        if taken {
            self.add_one();
            self.release();
        }
        taken
    }

    pub(super) fn add_one_before(&self, deadline: Deadline) -> bool {
        let taken = self.lock.acquire_before(deadline);
        if taken {
            self.add_one();
            self.release();
        }
        taken
    }

    /// Must be called when all threads have finished. Asserts that the number is `sum` and that the lock is free and
    /// has no waiters.
    pub(super) fn assert_done(&self, sum: u32) {
        assert!(self.lock.try_acquire(), "an ended thread still holds the lock or waits for it");
        assert_eq!(self.number(), sum);
        self.release();
        assert!(!self.lock.is_held());
    }
}

/// How many of the interleavings are explored.
#[derive(Clone, Copy)]
pub(super) enum Interleavings {
    /// All of them, in any run.
    All,
    /// Interleavings with at most this many preemptions; the second limit is for a long run.
    Preempted(usize, usize),
}

/// Runs the model in each of the selected interleavings.
///
/// An heir may step down each time it is appointed, and be appointed again before it makes progress. So
/// models with heirs have endless executions; only a bound on preemptions leaves finitely many.
pub(super) fn check(which: Interleavings, model: impl Fn() + Sync + Send + 'static) {
    platform::forget_counts();
    let mut builder = Builder::new();
    builder.max_branches = 10_000;
    builder.preemption_bound = match which {
        Interleavings::All => None,
        Interleavings::Preempted(_, long) if is_long() => Some(long),
        Interleavings::Preempted(smoke, _) => Some(smoke),
    };
    let _trace = platform::PrintsTrace;
    builder.check(model);
    std::println!("{} executions", platform::executions());
}

/// Whether to run in full size, as in `xtask::sizes`; this low-level crate does not depend on `xtask`.
fn is_long() -> bool {
    std::env::var("BAREBLK_LONG").is_ok_and(|long| long == "1")
}

/// Asserts that the model reached the cases that it is for.
pub(super) fn assert_happened(events: &[Event]) {
    let missing: std::vec::Vec<_> = events.iter().filter(|event| platform::count(**event) == 0).collect();
    assert!(missing.is_empty(), "happened in no execution: {missing:?}");
}
