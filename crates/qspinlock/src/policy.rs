//! What a queued lock does where there is a choice: who may pass whom, how long to spin, whether to sleep.
//!
//! Policies are types, chosen at compile time; none of them costs a branch on the fast path.
//!
//! Not here: the mechanism (`queue.rs`).

/// The choices. Implemented by [`Native`], [`Fair`] and [`Hybrid`]; implement it to make another experiment.
pub trait Policy: 'static {
    /// A waiter may sleep. Without it, it spins to the end, and wants a core of its own.
    const SLEEPS: bool;
    /// How often newcomers may take the lock while the oldest waiter is on its way to it. With 0, unlocking hands
    /// the lock over and nobody is ever passed: first in, first out. At most [`MAX_PASSED`](crate::MAX_PASSED).
    const PASS_LIMIT: u32;
    /// Looks at a lock that is held before a newcomer queues, if newcomers may pass.
    const NEWCOMER_LOOKS: u32;
    /// Processor hints between a newcomer's look number `look` and the next one.
    #[must_use]
    fn newcomer_pause(look: u32) -> u32 {
        1 << look.min(4)
    }
    /// Looks at its own node before a waiter sleeps.
    const WAITER_LOOKS: u32;
    /// Looks at the lock before an heir sleeps again.
    const HEIR_LOOKS: u32;
    /// Who takes the lock from the queue wakes the next waiter at once, so that it is awake (and spins) when its
    /// turn comes. An experiment: it is woken twice if it falls asleep again.
    const WAKE_AHEAD: bool = false;
}

/// First in, first out, and spinning all the time: for threads that have a core each.
#[derive(Debug, Clone, Copy, Default)]
pub struct Native;

/// First in, first out; waiters spin for a while, then sleep. Each of them is woken once, by the unlock that hands
/// the lock over to it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fair;

/// Waiters queue, but a newcomer that finds the lock free may take it, at most [`PASS_LIMIT`](Policy::PASS_LIMIT)
/// times in a row while the oldest waiter is being woken: the throughput of an unfair lock, without starvation.
#[derive(Debug, Clone, Copy, Default)]
pub struct Hybrid;

impl Policy for Native {
    const SLEEPS: bool = false;
    const PASS_LIMIT: u32 = 0;
    const NEWCOMER_LOOKS: u32 = 0;
    const WAITER_LOOKS: u32 = u32::MAX;
    const HEIR_LOOKS: u32 = 0;
}

impl Policy for Fair {
    const SLEEPS: bool = true;
    const PASS_LIMIT: u32 = 0;
    const NEWCOMER_LOOKS: u32 = 0;
    const WAITER_LOOKS: u32 = 1000;
    const HEIR_LOOKS: u32 = 0;
}

impl Policy for Hybrid {
    const SLEEPS: bool = true;
    const PASS_LIMIT: u32 = 512;
    const NEWCOMER_LOOKS: u32 = 40;
    const WAITER_LOOKS: u32 = 100;
    const HEIR_LOOKS: u32 = 1000;
}
