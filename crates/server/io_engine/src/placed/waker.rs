//! How a thread that is about to sleep is told of something new: at most one wake-up per sleep, none while it is awake.
//!
//! | sleeper ([`Waker::begin_sleep`]) | whoever has something ([`Waker::ring`]) |
//! |---|---|
//! | 1. `asleep = true` | 1. publishes: a ring's tail, a flag |
//! | 2. fence | 2. fence |
//! | 3. looks at what may be published; sleeps only if there is nothing | 3. looks at `asleep`; sounds the alarm if set |
//!
//! - Dekker: the fences are in one total order. Whichever comes second is followed by a look that sees what was written
//!   before the first: either the sleeper finds what was published, or the other one finds it asleep. One of both is
//!   enough, and without the fences neither need happen: a store may pass a later load of another variable, also on
//!   x86-64.
//! - Every change of `asleep` is a swap: each knows what it replaced.
//! - `asleep` orders nothing else: what was published carries its own ordering.
//! - Checked by a model: `RUSTFLAGS="--cfg loom" cargo test -p io_engine --lib model --target-dir target/loom`.
//!
//! Not here: the alarm (`epoll_wait.rs`), what is published.

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// What ends a sleep, also one that begins after it.
pub(crate) trait Signal {
    fn signal(&self);
}

/// See the file's head.
#[derive(Debug)]
pub(crate) struct Waker<A> {
    asleep: AtomicBool,
    pub signal: A,
}

impl<A: Signal> Waker<A> {
    pub fn new(signal: A) -> Self {
        Self { asleep: AtomicBool::new(false), signal }
    }

    /// Wakes the sleeper if it sleeps or is about to; what it is to find is published already. Returns whether that
    /// took an alarm.
    #[inline]
    pub fn wake(&self) -> bool {
        // Pairs with the fence in `begin_sleep`.
        fence(Ordering::SeqCst);
        // The swap lets only one of several signal the alarm.
        let rings = self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed);
        if rings {
            self.signal.signal();
        }
        rings
    }

    /// From here on whoever publishes something rings. The caller looks once more before it sleeps.
    #[inline]
    pub fn begin_sleep(&self) {
        // A swap, as every other change: all of them read the one before, so none comes between two others unseen. With a
        // store the model finds a wake-up that is lost.
        self.asleep.swap(true, Ordering::Relaxed);
        // Pairs with the fence in `ring`.
        fence(Ordering::SeqCst);
    }

    /// Awake again. Returns whether somebody rang: the alarm has sounded, or will at any moment.
    #[inline]
    pub fn end_sleep(&self) -> bool {
        !self.asleep.swap(false, Ordering::Relaxed)
    }

    /// A hint: out of date when it is acted upon.
    #[inline]
    pub fn seems_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, loom))]
#[path = "waker_model.rs"]
mod model;
