//! Converts the deadlines of C callers: nanoseconds of the monotonic clock, or a timespec and its clock.

use std::ffi::c_int;

use libc::{CLOCK_MONOTONIC, CLOCK_REALTIME, EINVAL, timespec};
use qspinlock::{Clock, Deadline};

const NS_PER_S: u64 = 1_000_000_000;

/// Returns the value that CLOCK_MONOTONIC will have in `timeout_ns` nanoseconds, in nanoseconds: a deadline for the
/// timedlock functions. Returns UINT64_MAX, a deadline that never comes, if the sum is too large.
#[unsafe(no_mangle)]
pub extern "C" fn qspin_deadline_in(timeout_ns: u64) -> u64 {
    qspinlock::now(Clock::Monotonic).at_ns.saturating_add(timeout_ns)
}

/// A reading of the monotonic clock.
pub(crate) fn monotonic(at_ns: u64) -> Deadline {
    Deadline { clock: Clock::Monotonic, at_ns }
}

/// A reading of the clock with the id `clock`.
///
/// # Errors
/// `EINVAL`: `clock` is another clock, `at` is NULL, or its nanoseconds are invalid.
///
/// # Safety
/// `at` is NULL or points to a timespec.
pub(crate) unsafe fn of_clock(clock: c_int, at: *const timespec) -> Result<Deadline, c_int> {
    let clock = match clock {
        CLOCK_MONOTONIC => Clock::Monotonic,
        CLOCK_REALTIME => Clock::Realtime,
        _ => return Err(EINVAL),
    };
    // SAFETY: the caller's promise: `at` is NULL, or points to a timespec that is alive.
    let at = unsafe { at.as_ref() }.ok_or(EINVAL)?;
    let ns = u64::try_from(at.tv_nsec).ok().filter(|&ns| ns < NS_PER_S).ok_or(EINVAL)?;
    // A negative time is in the past, like 0.
    let at_ns =
        u64::try_from(at.tv_sec).map_or(0, |seconds| seconds.saturating_mul(NS_PER_S).saturating_add(ns));
    Ok(Deadline { clock, at_ns })
}
