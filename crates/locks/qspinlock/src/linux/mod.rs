//! The queued locks' Linux platform: futexes, clocks, and each thread's nodes.
//!
//! - No allocation: nodes are a static array; the kernel backs only the pages that were touched.
//! - Nothing runs at thread exit: a thread keeps one number in a thread-local cell without a destructor. So
//!   locks work before the first line of `main` and in destructors that run late.
//! - These calls leave `errno` unchanged: C code reads it after it has unlocked.
//!
//! See also: which thread has which nodes (`linux/slots.rs`), forks (`linux/fork.rs`).

mod errno;
mod fork;
pub(crate) mod slots;

use core::sync::atomic::AtomicU32;
use std::time::Duration;

use errno::KeptErrno;

use crate::Node;
use crate::platform::{Clock, Deadline, Platform, Slept};

/// The default platform of all locks in this crate.
#[derive(Debug, Clone, Copy, Default)]
pub struct Linux;

const NS_PER_S: u64 = 1_000_000_000;

// SAFETY: the nodes are one static array; `slots` gives each number to only one living thread at a time.
unsafe impl Platform for Linux {
    #[inline]
    fn nodes() -> &'static [Node] {
        slots::nodes()
    }

    #[inline]
    fn own_nodes() -> Option<u32> {
        slots::own_nodes()
    }

    fn common_nodes() -> u32 {
        slots::COMMON_NODES
    }

    fn epoch() -> u32 {
        fork::epoch()
    }

    fn wait(word: &AtomicU32, expected: u32, deadline: Option<Deadline>) -> Slept {
        futex_wait(word, expected, deadline)
    }

    fn wake_one(word: &AtomicU32) {
        // SAFETY: FUTEX_WAKE only compares the address and reads none of our memory.
        unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1)
        };
    }

    fn after_ns(clock: Clock, ns: u64) -> Deadline {
        let now = now(clock);
        Deadline { at_ns: now.at_ns.saturating_add(ns), clock }
    }

    fn is_past(deadline: Deadline) -> bool {
        now(deadline.clock).at_ns >= deadline.at_ns
    }

    #[inline]
    fn relax() {
        core::hint::spin_loop();
    }

    fn sleep_ns(ns: u64, deadline: Option<Deadline>) {
        let clock = deadline.map_or(Clock::Monotonic, |deadline| deadline.clock);
        let until = Self::after_ns(clock, ns).or_earlier(deadline);
        // No other thread knows this word, so none wakes us.
        futex_wait(&AtomicU32::new(0), 0, Some(until));
    }

    #[cfg(feature = "stats")]
    #[inline]
    fn note(event: crate::Event) {
        crate::stats::note(event);
    }
}

/// Reads a clock.
#[must_use]
pub fn now(clock: Clock) -> Deadline {
    let id = match clock {
        Clock::Monotonic => libc::CLOCK_MONOTONIC,
        Clock::Realtime => libc::CLOCK_REALTIME,
    };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec that the call may write to, and both clocks exist on every Linux.
    unsafe { libc::clock_gettime(id, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let ns = u64::try_from(time.tv_nsec).unwrap_or(0);
    Deadline { clock, at_ns: seconds.saturating_mul(NS_PER_S).saturating_add(ns) }
}

/// The deadline `timeout` from now; `None` if that is beyond the clock's range.
pub(crate) fn deadline_in(timeout: Duration) -> Option<Deadline> {
    let now = now(Clock::Monotonic);
    let at_ns = u64::try_from(timeout.as_nanos()).ok().and_then(|ns| now.at_ns.checked_add(ns))?;
    // The kernel's clocks count in signed nanoseconds.
    (at_ns < i64::MAX as u64).then_some(Deadline { at_ns, ..now })
}

fn futex_wait(word: &AtomicU32, expected: u32, deadline: Option<Deadline>) -> Slept {
    let realtime = match deadline {
        Some(Deadline { clock: Clock::Realtime, .. }) => libc::FUTEX_CLOCK_REALTIME,
        _ => 0,
    };
    let until = deadline.map(timespec);
    let until = until.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    // FUTEX_WAIT_BITSET, because its timeout is an absolute clock reading. Any wake matches all bits.
    let operation = libc::FUTEX_WAIT_BITSET | libc::FUTEX_PRIVATE_FLAG | realtime;
    let no_second_word = core::ptr::null::<u32>();
    let _errno = KeptErrno::new();
    // SAFETY: `word` is aligned and outlives the call; `until` is null or a timespec that outlives it too.
    let result = unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), operation, expected, until, no_second_word, u32::MAX)
    };
    if result == -1 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ETIMEDOUT) {
        return Slept::TimedOut;
    }
    Slept::Woken
}

fn timespec(deadline: Deadline) -> libc::timespec {
    let seconds = libc::time_t::try_from(deadline.at_ns / NS_PER_S).unwrap_or(libc::time_t::MAX);
    let ns = libc::c_long::try_from(deadline.at_ns % NS_PER_S).unwrap_or(0);
    libc::timespec { tv_sec: seconds, tv_nsec: ns }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fifo, QueueLock};

    #[test]
    fn sleep_in_a_lock_leaves_errno_as_it_was() {
        let lock = QueueLock::<Fifo, Linux>::new();
        assert!(lock.try_acquire());
        let errno = || std::io::Error::last_os_error().raw_os_error();
        drop(KeptErrno(libc::EPIPE)); // sets errno

        let until = Linux::after_ns(Clock::Monotonic, 2_000_000);
        assert!(!lock.acquire_before(until)); // the kernel returns ETIMEDOUT

        assert_eq!(errno(), Some(libc::EPIPE));
    }
}
