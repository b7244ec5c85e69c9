//! The policy of a queued lock: which threads may overtake others, how long to spin, whether to sleep.
//!
//! Policies are types, chosen at compile time; none of them costs a branch on the fast path.
//!
//! See also: the mechanism (`queue.rs`).

/// A policy. [`Native`], [`Fifo`], [`Fair`] and [`Hybrid`] implement this trait. Other implementations allow
/// experiments.
pub trait Policy: 'static {
    /// Whether waiters may sleep. If not, a waiter spins until it has the lock, and needs its own core.
    const SLEEPS: bool;
    /// How often, in total, newcomers may overtake the oldest waiter. With 0, unlocking hands the lock over, even to a
    /// sleeping waiter. At most [`MAX_PASSED`](crate::MAX_PASSED).
    const PASS_LIMIT: u32;
    /// Whether newcomers never overtake a waiter that is awake: unlocking hands the lock over to it, and an heir stops
    /// newcomers as soon as it runs.
    const SERVES_THE_AWAKE: bool;
    /// How often a newcomer polls a held lock before it queues, if newcomers may overtake.
    const NEWCOMER_LOOKS: u32;
    /// A newcomer polls a held lock that has a queue only if it last met a queue at least this long ago; with 0 it
    /// never does.
    const RARELY_NS: u64 = 0;
    /// How often a waiter polls its own node before it sleeps.
    const WAITER_LOOKS: u32;
    /// How often a waiter behind a sleeping waiter polls its own node before it sleeps.
    const WAITER_LOOKS_BEHIND_A_SLEEPER: u32;
    /// How often an heir polls the lock before it sleeps again.
    const HEIR_LOOKS: u32;
    /// How long an heir that finds the lock held sleeps, once, before it stops newcomers. They are faster while no heir
    /// polls the lock. With 0 the heir neither sleeps nor stops newcomers.
    const HEIR_NAP_NS: u64 = 0;
    /// Whether a thread that takes the lock from the queue at once wakes the next waiter, so that it already spins when
    /// the lock is handed over. An experiment: a waiter that falls asleep again is woken twice.
    const WAKE_AHEAD: bool = false;

    /// Number of spin hints between poll number `look` of a newcomer and the next poll.
    #[must_use]
    fn newcomer_pause(look: u32) -> u32 {
        1 << look.min(7)
    }
}

/// First in, first out, spinning without limit. Each thread needs its own core.
#[derive(Debug, Clone, Copy, Default)]
pub struct Native;

/// Strictly first in, first out; waiters spin for a while, then sleep. With more threads than cores each
/// acquisition costs a context switch, and the lock is idle meanwhile.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fifo;

/// First in, first out among waiters. While the next waiter is still waking up, newcomers may use the lock,
/// which would be idle otherwise, at most [`PASS_LIMIT`](Policy::PASS_LIMIT) times.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fair;

/// Waiters queue, but a newcomer that finds the lock free takes it while the oldest waiter sleeps or wakes
/// up, at most 8,190 times past the same waiter. Once that waiter is awake and has waited a moment longer,
/// newcomers cannot pass. Has the throughput of an unfair lock, without starvation.
#[derive(Debug, Clone, Copy, Default)]
pub struct Hybrid;

impl Policy for Native {
    const SLEEPS: bool = false;
    const PASS_LIMIT: u32 = 0;
    const SERVES_THE_AWAKE: bool = true;
    const NEWCOMER_LOOKS: u32 = 0;
    const WAITER_LOOKS: u32 = u32::MAX;
    const WAITER_LOOKS_BEHIND_A_SLEEPER: u32 = u32::MAX;
    const HEIR_LOOKS: u32 = 0;
}

impl Policy for Fifo {
    const SLEEPS: bool = true;
    const PASS_LIMIT: u32 = 0;
    const SERVES_THE_AWAKE: bool = true;
    const NEWCOMER_LOOKS: u32 = 0;
    const WAITER_LOOKS: u32 = 400;
    const WAITER_LOOKS_BEHIND_A_SLEEPER: u32 = 4;
    const HEIR_LOOKS: u32 = 0;
}

impl Policy for Fair {
    const SLEEPS: bool = true;
    const PASS_LIMIT: u32 = 64;
    const SERVES_THE_AWAKE: bool = true;
    const NEWCOMER_LOOKS: u32 = 1;
    const WAITER_LOOKS: u32 = 400;
    const WAITER_LOOKS_BEHIND_A_SLEEPER: u32 = 4;
    const HEIR_LOOKS: u32 = 400;
}

impl Policy for Hybrid {
    const SLEEPS: bool = true;
    const PASS_LIMIT: u32 = crate::MAX_PASSED;
    const SERVES_THE_AWAKE: bool = false;
    const NEWCOMER_LOOKS: u32 = 8;
    const RARELY_NS: u64 = 320;
    const WAITER_LOOKS: u32 = 100;
    const WAITER_LOOKS_BEHIND_A_SLEEPER: u32 = 4;
    const HEIR_LOOKS: u32 = 40;
    const HEIR_NAP_NS: u64 = 50_000;
}
