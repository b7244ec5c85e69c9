//! The host's monotonic clock: readings that two processes can compare, and short ones for the request path.

use std::sync::LazyLock;
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

/// A time before all that this process measures.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Nanoseconds since a time early in this process. 0 for earlier times.
#[inline]
pub(crate) fn process_ns(at: Instant) -> u64 {
    let since = at.saturating_duration_since(*START);
    // Wraps after 584 years.
    since.as_secs().wrapping_mul(1_000_000_000).wrapping_add(u64::from(since.subsec_nanos()))
}

/// Nanoseconds of CLOCK_MONOTONIC. All processes of the host share this clock.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanoseconds) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(nanoseconds.unwrap_or(0))
}
