//! One rate: a bucket that measures in time (the generic cell rate algorithm).
//!
//! `book (cost in nanoseconds) → the instant from which the units may be used`; `give_back` undoes a booking
//!
//! - The bucket is one number: the instant at which everything booked so far is paid for. A booking adds its cost. In
//!   an unused bucket, this instant lags behind the clock, at most by the capacity. The lag is the credit.
//! - Instants are nanoseconds of the host's monotonic clock, so two processes can compare them, plus [`EPOCH`], so that
//!   credit may reach back before the start of the host.
//! - All memory orderings are relaxed: the instant protects no other data.

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::atomic::AtomicU64 as Estimate;
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The highest allowed rate, also for a burst: no device is that fast.
pub(crate) const MAX_RATE: u64 = 1 << 40;
/// Added to the clock: 73 years, more than any capacity.
pub(crate) const EPOCH: u64 = 1 << 61;
/// The largest capacity: 36 years.
const MAX_CAPACITY_NS: u64 = 1 << 60;
/// The largest cost of one booking: 9 years.
const MAX_COST_NS: u64 = 1 << 58;
/// How far a bucket that another process hands over may be booked in advance: the longest turn.
const MAX_AHEAD_NS: u64 = 1024 * 1_000_000_000;
const SECOND_NS: u128 = 1_000_000_000;

/// Converts a reading of the host's clock to an instant of the buckets.
pub(crate) fn virtual_time(monotonic_ns: u64) -> u64 {
    EPOCH.saturating_add(monotonic_ns)
}

/// One rate, and how much of it was booked.
#[derive(Debug)]
#[cfg_attr(not(all(test, loom)), repr(align(64)))]
pub(crate) struct Bucket {
    /// In units per second, 1 to [`MAX_RATE`].
    rate: u64,
    capacity_ns: u64,
    /// The instant at which everything booked is paid for.
    paid_at: AtomicU64,
    /// The most turns that any disk has had. It only decides who gets a turn, so no model covers it.
    turns: Estimate,
}

impl Bucket {
    /// Creates a full bucket. `capacity`: the credit after a long pause, in units.
    pub(crate) fn new(rate: u64, capacity: u64) -> Self {
        let rate = rate.clamp(1, MAX_RATE);
        let capacity_ns = time_of(capacity, rate).min(MAX_CAPACITY_NS);
        Self { rate, capacity_ns, paid_at: AtomicU64::new(0), turns: Estimate::new(0) }
    }

    /// The time that `units` take, rounded up, so that rounding never exceeds the rate.
    pub(crate) fn cost_ns(&self, units: u64) -> u64 {
        time_of(units, self.rate).clamp(1, MAX_COST_NS)
    }

    /// Books `cost_ns`. Returns the instant from which the booked units may be used, which may lie in the past.
    #[inline]
    pub(crate) fn book(&self, cost_ns: u64, now: u64) -> u64 {
        self.paid_at.fetch_max(now.saturating_sub(self.capacity_ns), Relaxed);
        self.paid_at.fetch_add(cost_ns, Relaxed)
    }

    /// Undoes a booking.
    #[inline]
    pub(crate) fn give_back(&self, cost_ns: u64) {
        self.paid_at.fetch_sub(cost_ns, Relaxed);
    }

    /// Records that a disk has had this many turns. Returns the most turns that any disk has had.
    pub(crate) fn count_turns(&self, turns: u64) -> u64 {
        self.turns.fetch_max(turns, Relaxed).max(turns)
    }

    /// Units that may be used immediately.
    pub(crate) fn credit(&self, now: u64) -> u64 {
        let lag_ns = now.saturating_sub(self.paid_at.load(Relaxed)).min(self.capacity_ns);
        units_in(lag_ns, self.rate)
    }

    /// Units that may be used immediately after a long pause.
    pub(crate) fn capacity(&self) -> u64 {
        units_in(self.capacity_ns, self.rate)
    }

    /// The state, for another process or for a bucket with a different rate.
    pub(crate) fn paid_at(&self) -> u64 {
        self.paid_at.load(Relaxed)
    }

    /// Takes over the state of another bucket, unless this bucket is booked further ahead. Credit beyond the capacity
    /// is lost.
    pub(crate) fn take_over(&self, paid_at: u64, now: u64) {
        // A wrong instant from another process must not stop the disk for longer than one turn.
        self.paid_at.fetch_max(paid_at.min(now.saturating_add(MAX_AHEAD_NS)), Relaxed);
    }
}

fn time_of(units: u64, rate: u64) -> u64 {
    let ns = (u128::from(units) * SECOND_NS).div_ceil(u128::from(rate));
    u64::try_from(ns).unwrap_or(u64::MAX)
}

fn units_in(ns: u64, rate: u64) -> u64 {
    u64::try_from(u128::from(ns) * u128::from(rate) / SECOND_NS).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: u64 = EPOCH + 5_000_000_000;

    #[test]
    fn bookings_are_as_far_apart_as_their_cost_and_a_pause_gives_credit_up_to_the_capacity() {
        let bucket = Bucket::new(1000, 3);
        let cost = bucket.cost_ns(1);
        assert_eq!(cost, 1_000_000);
        let slots: Vec<u64> = (0..5).map(|_| bucket.book(cost, NOW)).collect();
        assert_eq!(slots, [NOW - 3 * cost, NOW - 2 * cost, NOW - cost, NOW, NOW + cost]);
        let later = NOW + 3600 * 1_000_000_000;
        assert_eq!((bucket.credit(later), bucket.book(cost, later)), (3, later - 3 * cost));
    }

    #[test]
    fn booking_that_is_given_back_is_free_again() {
        let bucket = Bucket::new(1000, 1);
        let (cost, first) = (bucket.cost_ns(7), bucket.book(bucket.cost_ns(7), NOW));
        bucket.give_back(cost);
        assert_eq!(bucket.book(cost, NOW), first);
    }

    #[test]
    fn state_of_another_process_counts_and_a_wrong_one_stops_nothing_for_ever() {
        let bucket = Bucket::new(1000, 100);
        bucket.take_over(NOW + 50_000_000, NOW);
        assert_eq!((bucket.credit(NOW), bucket.book(1, NOW)), (0, NOW + 50_000_000));
        bucket.take_over(u64::MAX, NOW);
        assert_eq!(bucket.book(1, NOW), NOW + MAX_AHEAD_NS);
    }

    #[test]
    fn time_of_every_small_number_of_units_is_rounded_up_and_never_zero() {
        for rate in 1..=70 {
            let bucket = Bucket::new(rate, 1);
            for units in 1..=70 {
                let cost = bucket.cost_ns(units);
                assert!(cost > 0 && u128::from(cost) * u128::from(rate) >= u128::from(units) * SECOND_NS);
                assert!((u128::from(cost) - 1) * u128::from(rate) < u128::from(units) * SECOND_NS);
            }
        }
    }

    /// With at most 2^16 disks that have booked one turn each, no sum exceeds 64 bits: `Lane` makes turns of at most
    /// 1024 seconds.
    #[test]
    fn all_turns_of_a_host_fit_the_virtual_time() {
        let uptime_ns: u64 = 100 * 365 * 86_400 * 1_000_000_000;
        assert!((EPOCH + uptime_ns).checked_add(MAX_AHEAD_NS << 16).is_some());
        const { assert!(MAX_CAPACITY_NS < EPOCH) };
    }

    proptest! {
        #[test]
        fn no_rate_capacity_or_amount_overflows(
            rate in 1..=MAX_RATE, capacity: u64, units: u64, uptime_ns in 0..1_u64 << 60
        ) {
            let bucket = Bucket::new(rate, capacity);
            let now = EPOCH + uptime_ns;
            let cost = bucket.cost_ns(units);
            prop_assert!(cost > 0);
            let slot = bucket.book(cost, now);
            prop_assert!(slot <= now && slot >= now - MAX_CAPACITY_NS);
            prop_assert!(slot.checked_add(cost).is_some());
            prop_assert!(bucket.credit(now) <= bucket.capacity());
            if u128::from(units) * SECOND_NS <= u128::from(MAX_COST_NS) * u128::from(rate) {
                prop_assert!(u128::from(cost) * u128::from(rate) >= u128::from(units) * SECOND_NS);
            }
        }
    }
}

#[cfg(all(test, loom))]
#[path = "bucket_model.rs"]
mod model;
