//! Wakes a thread that is about to sleep. Sends at most one signal per sleep, and none while the thread is awake.
//!
//! | sleeper ([`Waker::begin_sleep`]) | publisher ([`Waker::wake`]) |
//! |---|---|
//! | 1. `asleep = true` | 1. publishes: a ring's tail, a flag |
//! | 2. fence | 2. fence |
//! | 3. checks everything that may be published; sleeps only if there is nothing | 3. signals if `asleep` is set |
//!
//! - This is Dekker's algorithm. The fences have one total order, so the side with the second fence sees the other
//!   side's earlier write: either the sleeper finds the published work, or the publisher finds `asleep` set. Without
//!   the fences both can miss, even on x86-64, where a store may pass a later load of another variable.
//! - Every change of `asleep` is a swap, so the code always knows the replaced value.
//! - `asleep` does not order published data, which has its own ordering.
//! - A loom model checks this: `RUSTFLAGS="--cfg loom" cargo test -p io_engine --lib model --target-dir target/loom`.

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Ends a sleep, including one that begins after the signal.
pub(crate) trait Signal {
    fn signal(&self);
}

/// The waker. `A` signals the sleeper.
#[derive(Debug)]
pub(crate) struct Waker<A> {
    asleep: AtomicBool,
    pub signal: A,
}

impl<A: Signal> Waker<A> {
    pub fn new(signal: A) -> Self {
        Self { asleep: AtomicBool::new(false), signal }
    }

    /// Wakes the sleeper if it sleeps or is about to. Call it after publishing. Returns whether a signal was needed.
    #[inline]
    pub fn wake(&self) -> bool {
        // Pairs with the fence in `begin_sleep`.
        fence(Ordering::SeqCst);
        // The swap lets only one of several concurrent publishers signal.
        let signals = self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed);
        if signals {
            self.signal.signal();
        }
        signals
    }

    /// Tells publishers to send a signal from now on. The caller checks for work once more before it sleeps.
    #[inline]
    pub fn begin_sleep(&self) {
        // With a plain store instead of the swap, the model finds a lost wake-up.
        self.asleep.swap(true, Ordering::Relaxed);
        // Pairs with the fence in `wake`.
        fence(Ordering::SeqCst);
    }

    /// Ends the sleep. Returns whether a publisher has signalled or is about to.
    #[inline]
    pub fn end_sleep(&self) -> bool {
        !self.asleep.swap(false, Ordering::Relaxed)
    }

    /// A hint that may already be outdated.
    #[inline]
    pub fn seems_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, loom))]
#[path = "waker_model.rs"]
mod model;
