//! The host's monotonic clock, whose readings two processes can compare.
//!
//! Not here: instants within one process (`std::time::Instant`).

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the host's monotonic clock, which all its processes share.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanoseconds) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(nanoseconds.unwrap_or(0))
}
