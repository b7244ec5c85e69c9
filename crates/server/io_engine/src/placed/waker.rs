//! Wakes a thread that is about to sleep: at most one signal per sleep, none while the thread is awake.
//!
//! | sleeper ([`Waker::begin_sleep`]) | publisher ([`Waker::wake`]) |
//! |---|---|
//! | 1. `asleep = true` | 1. publishes: a ring's tail, a flag |
//! | 2. fence | 2. fence |
//! | 3. checks everything that may be published; sleeps only if there is nothing | 3. signals if `asleep` is set |
//!
//! - Dekker's algorithm: the fences are in one total order, so the side whose fence comes second sees what the other side
//!   wrote before its own. Either the sleeper finds what was published, or the publisher finds `asleep`. Without the
//!   fences neither need happen, not even on x86-64: a store may pass a later load of another variable.
//! - Every change of `asleep` is a swap, so each change knows the value that it replaced.
//! - `asleep` orders nothing else: published data carries its own ordering.
//! - A model checks this: `RUSTFLAGS="--cfg loom" cargo test -p io_engine --lib model --target-dir target/loom`.

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Ends a sleep, even one that begins after the signal.
pub(crate) trait Signal {
    fn signal(&self);
}

/// See the file's head. `A` signals the sleeper.
#[derive(Debug)]
pub(crate) struct Waker<A> {
    asleep: AtomicBool,
    pub signal: A,
}

impl<A: Signal> Waker<A> {
    pub fn new(signal: A) -> Self {
        Self { asleep: AtomicBool::new(false), signal }
    }

    /// Wakes the sleeper if it sleeps or is about to. The caller has published before. Returns whether this took a signal.
    #[inline]
    pub fn wake(&self) -> bool {
        // Pairs with the fence in `begin_sleep`.
        fence(Ordering::SeqCst);
        // The swap lets only one of several publishers signal.
        let signals = self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed);
        if signals {
            self.signal.signal();
        }
        signals
    }

    /// Publishers signal from now on. The caller checks once more before it sleeps.
    #[inline]
    pub fn begin_sleep(&self) {
        // With a store instead of a swap the model finds a lost wake-up.
        self.asleep.swap(true, Ordering::Relaxed);
        // Pairs with the fence in `wake`.
        fence(Ordering::SeqCst);
    }

    /// Ends the sleep. Returns whether a publisher has signalled or is about to.
    #[inline]
    pub fn end_sleep(&self) -> bool {
        !self.asleep.swap(false, Ordering::Relaxed)
    }

    /// A hint: it may be out of date at once.
    #[inline]
    pub fn seems_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, loom))]
#[path = "waker_model.rs"]
mod model;
