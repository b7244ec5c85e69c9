//! What a queued lock does where there is a choice: who may pass whom, how long to spin, whether to sleep.
//!
//! Policies are types, chosen at compile time; none of them costs a branch on the fast path.
//!
//! Not here: the mechanism (`queue.rs`).

/// The choices. Implemented by [`Native`], [`Fifo`], [`Fair`] and [`Hybrid`]; implement it to make another experiment.
pub trait Policy: 'static {
    /// A waiter may sleep. Without it, it spins to the end, and wants a core of its own.
    const SLEEPS: bool;
    /// How often newcomers may take the lock past the oldest waiter, all in all. With 0, unlocking hands the lock
    /// over, to a sleeping waiter too. At most [`MAX_PASSED`](crate::MAX_PASSED).
    const PASS_LIMIT: u32;
    /// Nobody passes a waiter that is awake: unlocking hands the lock over to it, and an heir shuts the door as soon
    /// as it runs.
    const SERVES_THE_AWAKE: bool;
    /// Looks at a lock that is held before a newcomer queues, if newcomers may pass.
    const NEWCOMER_LOOKS: u32;
    /// Looks at its own node before a waiter sleeps.
    const WAITER_LOOKS: u32;
    /// Looks at its own node before a waiter sleeps that stands behind a sleeping one.
    const WAITER_LOOKS_BEHIND_A_SLEEPER: u32;
    /// Looks at the lock before an heir sleeps again.
    const HEIR_LOOKS: u32;
    /// How long an heir that found the lock held sleeps, once, before it shuts the door to those who pass: they are
    /// quicker if nobody looks over their shoulder. With 0 it does neither.
    const HEIR_NAP_NS: u64 = 0;
    /// Who takes the lock from the queue wakes the next waiter at once, so that it is awake (and spins) when its
    /// turn comes. An experiment: it is woken twice if it falls asleep again.
    const WAKE_AHEAD: bool = false;

    /// Processor hints between a newcomer's look number `look` and the next one.
    #[must_use]
    fn newcomer_pause(look: u32) -> u32 {
        1 << look.min(7)
    }
}

/// First in, first out, and spinning all the time: for threads that have a core each.
#[derive(Debug, Clone, Copy, Default)]
pub struct Native;

/// First in, first out, without exception; waiters spin for a while, then sleep. With more threads than cores each
/// acquisition costs a context switch, and the lock is idle meanwhile.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fifo;

/// First in, first out among waiters; while the one whose turn it is has yet to wake up, newcomers may use the lock
/// that would be idle, at most [`PASS_LIMIT`](Policy::PASS_LIMIT) times.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fair;

/// Waiters queue, but a newcomer that finds the lock free takes it while the oldest waiter sleeps or wakes up; at most
/// 2,047 times past the same waiter. Once that waiter is awake and has waited a moment longer, nobody passes. The
/// throughput of an unfair lock, without starvation.
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
    const WAITER_LOOKS: u32 = 100;
    const WAITER_LOOKS_BEHIND_A_SLEEPER: u32 = 4;
    const HEIR_LOOKS: u32 = 40;
    const HEIR_NAP_NS: u64 = 50_000;
}
