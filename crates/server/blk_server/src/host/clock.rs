//! The host's monotonic clock: readings that two processes can compare, and shorter ones for the request path.

use std::sync::{LazyLock, OnceLock};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Number of attempts to read both clocks at the same time.
const ATTEMPTS: usize = 5;

/// An instant before everything that this process measures.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Nanoseconds since [`START`]; 0 for earlier instants.
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

/// The reading of [`monotonic_ns`] at this instant, to within microseconds.
#[inline]
pub(crate) fn ns_at(instant: Instant) -> u64 {
    let &(base, base_ns) = base();
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    match instant.checked_duration_since(base) {
        Some(after) => base_ns.saturating_add(ns(after)),
        None => base_ns.saturating_sub(ns(base.saturating_duration_since(instant))),
    }
}

/// The instant at which [`monotonic_ns`] returns `ns`, but at most a hundred years ahead.
pub(crate) fn instant_at(ns: u64) -> Instant {
    let &(base, base_ns) = base();
    let far = Duration::from_secs(100 * 365 * 86_400);
    let after = Duration::from_nanos(ns.saturating_sub(base_ns)).min(far);
    base.checked_add(after).unwrap_or(base)
}

/// One instant on both clocks: of several readings, the one that took the least time.
fn base() -> &'static (Instant, u64) {
    static BASE: OnceLock<(Instant, u64)> = OnceLock::new();
    BASE.get_or_init(|| {
        let reading = || {
            let (before, instant, after) = (monotonic_ns(), Instant::now(), monotonic_ns());
            (after.saturating_sub(before), instant, before)
        };
        let readings = std::iter::repeat_with(reading).take(ATTEMPTS);
        let best = readings.min_by_key(|(took_ns, ..)| *took_ns);
        best.map_or_else(|| (Instant::now(), monotonic_ns()), |(_, instant, ns)| (instant, ns))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instant_becomes_the_clocks_reading_and_back() {
        let (before, now, after) = (monotonic_ns(), Instant::now(), monotonic_ns());
        // The base may have been read on a busy machine, where reading both clocks takes long.
        let error_ns = 1_000_000;
        let read = ns_at(now);
        assert!(read + error_ns >= before && read <= after + error_ns, "{before} {read} {after}");
        let later = read + 5_000_000;
        assert_eq!(ns_at(instant_at(later)), later);
        assert!(instant_at(u64::MAX) > now);
    }
}
