//! One limited quantity of one disk: passes the units of the disk's turns to the disk's queues, in the order in which
//! the queues booked them.
//!
//! `queue: book (share) → reach: granted? ─ no → when to try again`; `turn: booked in all buckets → its slot →
//! granted`
//!
//! - `booked` and `granted` count units for ever. A queue that books gets the units up to its end once `granted` has
//!   reached that end.
//! - A queue books its share of a turn, about a quantum or more. If all queues together booked less than a turn, the
//!   first one that asks would get the rest. The share is adjusted when a turn begins ([`Lane::adjust_share`]).
//! - A long request uses units that are not granted. They are booked as a debt, which all queues of the disk pay.
//! - The disk has at most one turn in its buckets, however many queues wait. So a disk's share of a group depends
//!   neither on the number of its queues nor on the size of its requests. A disk whose worker wakes late books late, and
//!   would get fewer turns than others; it then books two at once.
//! - Any queue may book the turn, or grant it once its slot has come. If two do it at once, one of them undoes its part.
//! - An `Estimate` decides only how fairly queues and disks share. No value of it breaks a limit, so models leave it out.
//! - All orderings are relaxed: the numbers protect no other data. A thread that stops between two steps delays no
//!   other: they book another turn.

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;
use std::sync::atomic::AtomicU64 as Estimate;
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::bucket::Bucket;

/// No turn is booked.
const NONE: u64 = 0;
/// The bit of `Lane::turn` that says that two turns are booked.
const TWO: u64 = 1;
/// How many turns a disk may be behind the disk of its group that has had most.
const MOST_BEHIND: u64 = 8;
/// Maximum number of turns that one call grants, so that a worker's pass stays short. The caller tries again in the
/// next pass.
const TURNS_AT_ONCE: u32 = 64;
/// Limit of the debt, so that no counter gets too far ahead of the other.
const MOST_DEBT: u64 = 1 << 61;
/// If a turn could have begun this long ago, the disk uses less than its limit.
const CREDIT_NS: u64 = 10_000_000;

/// Units that a queue has booked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Booking {
    /// The queue gets the units when all units of the lane up to this one are granted.
    pub(crate) end: u64,
    pub(crate) units: u64,
    /// What the lane had granted when the queue booked.
    granted: u64,
}

impl Booking {
    /// What remains after the queue has collected the first units.
    pub(crate) fn without(self, units: u64) -> Option<Self> {
        (units < self.units).then(|| Self { units: self.units - units, ..self })
    }
}

/// A bucket, and what a turn of this lane costs in it.
#[derive(Debug)]
struct Share {
    bucket: Arc<Bucket>,
    turn_ns: u64,
}

/// See the module documentation.
#[derive(Debug)]
#[cfg_attr(not(all(test, loom)), repr(align(64)))]
pub(crate) struct Lane {
    booked: AtomicU64,
    granted: AtomicU64,
    /// The end of the last debt.
    debt_end: AtomicU64,
    /// The slot of the booked turn, with the bit [`TWO`], or [`NONE`].
    turn: AtomicU64,
    /// The slot of the last turn.
    began: Estimate,
    /// How many turns the disk has had, including those that it missed because it had no work.
    turns: Estimate,
    /// The units that a queue books at once.
    share: Estimate,
    turn_units: u64,
    parts: u64,
    quantum: u64,
    /// Units are never granted faster than this, in units per second.
    fastest: u64,
    shares: Box<[Share]>,
}

impl Lane {
    /// `parts`: how many units of this lane are one unit of the buckets. `quantum`: the least that a queue books at
    /// once. `turn`: the length of one turn, raised to `quantum` if smaller. `fastest`: the highest rate of the buckets.
    /// The last three are in units of the buckets.
    pub(crate) fn new(
        parts: u64,
        (quantum, turn): (u64, u64),
        fastest: u64,
        buckets: Vec<Arc<Bucket>>,
    ) -> Self {
        let turn = turn.max(quantum);
        let share = |bucket: Arc<Bucket>| Share { turn_ns: bucket.cost_ns(turn), bucket };
        let quantum = quantum.saturating_mul(parts);
        Self {
            booked: AtomicU64::new(0),
            granted: AtomicU64::new(0),
            debt_end: AtomicU64::new(0),
            turn: AtomicU64::new(NONE),
            began: Estimate::new(0),
            turns: Estimate::new(0),
            share: Estimate::new(quantum),
            turn_units: turn.saturating_mul(parts),
            parts,
            quantum,
            fastest: fastest.saturating_mul(parts).max(1),
            shares: buckets.into_iter().map(share).collect(),
        }
    }

    /// How many units of this lane are one unit of the buckets.
    pub(crate) fn parts(&self) -> u64 {
        self.parts
    }

    pub(crate) fn quantum(&self) -> u64 {
        self.quantum
    }

    /// Books a queue's share of a turn, but not more than `most`, and at least a quantum.
    #[inline]
    pub(crate) fn book(&self, most: u64) -> Booking {
        let granted = self.granted.load(Relaxed);
        let units = self.share.load(Relaxed).min(most.max(self.quantum)).max(1);
        Booking { end: self.booked.fetch_add(units, Relaxed).wrapping_add(units), units, granted }
    }

    /// The granted part of a booking: at least half of it, by turns that began after the queue booked. So the last queue
    /// that a turn serves does not wait for the next turn because of a small rest.
    pub(crate) fn first_part(&self, booking: Booking) -> Option<u64> {
        let granted = self.granted.load(Relaxed);
        let missing = u64::try_from(ahead(booking.end, granted)).unwrap_or(0);
        let is_older = granted.wrapping_sub(booking.granted) >= self.turn_units;
        (is_older && missing <= booking.units / 2).then(|| booking.units - missing)
    }

    /// Whether all units up to `end` are granted.
    pub(crate) fn is_granted(&self, end: u64) -> bool {
        ahead(end, self.granted.load(Relaxed)) <= 0
    }

    /// Grants the turns up to `end` whose slots have come. Whether all units up to `end` are granted.
    ///
    /// # Errors
    /// When to try again. The units are rarely granted earlier.
    #[inline]
    pub(crate) fn reach(&self, end: u64, now: u64) -> Result<(), u64> {
        for _ in 0..TURNS_AT_ONCE {
            let missing = ahead(end, self.granted.load(Relaxed));
            if missing <= 0 {
                return Ok(());
            }
            let turn = self.turn.load(Relaxed);
            let (slot, two) = (turn & !TWO, turn & TWO);
            if turn == NONE {
                self.book_turn(now);
            } else if slot > now {
                return Err(slot.saturating_add(self.at_least_ns(missing.unsigned_abs())));
            } else if self.turn.compare_exchange(turn, NONE, Relaxed, Relaxed).is_ok() {
                self.began.store(slot, Relaxed);
                self.adjust_share(now - slot);
                self.granted.fetch_add(self.turn_units << two, Relaxed);
            }
        }
        Err(now)
    }

    /// Sets the share so that the bookings of all queues together are whole turns: one, or as many as queues with a
    /// quantum each need. Then each queue is served in one of these turns, whatever the order within a turn. `late_ns`:
    /// how long ago the turn could begin.
    fn adjust_share(&self, late_ns: u64) {
        if late_ns > CREDIT_NS {
            self.share.store(self.quantum, Relaxed);
            return;
        }
        // A turn of one quantum is no more than a share; units that are owed say nothing about the queues.
        if self.turn_units == self.quantum || self.unpaid() > 0 {
            return;
        }
        let booked = u64::try_from(self.debt()).unwrap_or(0).max(1);
        let [turn, share, quantum, booked] =
            [self.turn_units, self.share.load(Relaxed), self.quantum, booked].map(u128::from);
        // Rounded up; a little less than a quantum for each queue is enough.
        let turns = ((16 * booked * quantum / (share * turn) + 14) / 16).max(1);
        let fair = (share * turns * turn / booked).clamp(quantum - quantum / 16, turn);
        // Bookings were made with earlier shares, so small changes are made slowly.
        let is_near = (share / 2..=2 * share).contains(&fair);
        let next = if is_near { (7 * share + fair) / 8 } else { fair };
        self.share.store(u64::try_from(next).unwrap_or(self.quantum), Relaxed);
    }

    /// Books a turn, or two if the disk has had fewer than another disk of its group although it always had work: its
    /// worker wakes late.
    fn book_turn(&self, now: u64) {
        let next = self.turns.load(Relaxed) + 1;
        let most = self.shares.iter().map(|share| share.bucket.count_turns(next)).max().unwrap_or(next);
        let had_work = now.saturating_sub(self.began.load(Relaxed)) <= CREDIT_NS;
        // Lateness matters only to short turns.
        let is_short = self.shares.iter().all(|share| share.turn_ns <= CREDIT_NS);
        let two = u64::from(had_work && is_short && next < most);
        let slots = self.shares.iter().map(|share| share.bucket.book(share.turn_ns << two, now));
        let slot = (slots.max().unwrap_or(now).max(NONE + 2) & !TWO) | two;
        if self.turn.compare_exchange(NONE, slot, Relaxed, Relaxed).is_ok() {
            let least = if had_work { most.saturating_sub(MOST_BEHIND) } else { most };
            self.turns.store(least.max(next + two), Relaxed);
        } else {
            // Another queue has booked the turn.
            self.shares.iter().for_each(|share| share.bucket.give_back(share.turn_ns << two));
        }
    }

    /// The time from the booked turn's slot until `missing` units can be granted at the earliest.
    fn at_least_ns(&self, missing: u64) -> u64 {
        let behind = u128::from(missing.saturating_sub(self.turn_units));
        u64::try_from(behind * 1_000_000_000 / u128::from(self.fastest)).unwrap_or(u64::MAX / 4)
    }

    /// Returns units that a queue was granted and does not use: the queues behind it move up.
    pub(crate) fn give_back(&self, units: u64) {
        self.granted.fetch_add(units, Relaxed);
    }

    /// Undoes a booking: the queues behind it move up.
    pub(crate) fn cancel(&self, Booking { end, units, .. }: Booking) {
        if ahead(end, self.debt_end.load(Relaxed)) > 0 {
            // The booking lies behind the last debt, so it repays none of that debt.
            self.debt_end.fetch_add(units, Relaxed);
        }
        self.granted.fetch_add(units, Relaxed);
    }

    /// Books units that a queue has used without booking them: the queues behind it wait longer.
    pub(crate) fn owe(&self, units: u64) {
        let known = u64::try_from(self.debt()).unwrap_or(0);
        let units = units.min(MOST_DEBT.saturating_sub(known));
        let end = self.booked.fetch_add(units, Relaxed).wrapping_add(units);
        self.debt_end.fetch_max(end, Relaxed);
    }

    /// Units that must still be granted until the last debt is paid.
    pub(crate) fn unpaid(&self) -> u64 {
        u64::try_from(ahead(self.debt_end.load(Relaxed), self.granted.load(Relaxed))).unwrap_or(0)
    }

    /// Whether the last debt is paid.
    ///
    /// # Errors
    /// When to ask again.
    pub(crate) fn debt_is_paid(&self, now: u64) -> Result<(), u64> {
        self.reach(self.debt_end.load(Relaxed), now)
    }

    /// Booked units that are not granted yet; if negative, granted units that no queue has booked.
    pub(crate) fn debt(&self) -> i64 {
        ahead(self.booked.load(Relaxed), self.granted.load(Relaxed))
    }

    /// [`Lane::debt`] in units of the buckets, rounded up, for another process.
    pub(crate) fn state(&self) -> i64 {
        -(-self.debt()).div_euclid(self.parts.cast_signed())
    }

    /// Starts with the state of another lane. Of granted units, at most one turn is taken over.
    pub(crate) fn take_over(&self, state: i64) {
        let units = state.unsigned_abs().saturating_mul(self.parts);
        if state > 0 { self.owe(units) } else { self.give_back(units.min(self.turn_units)) }
    }
}

/// How far `a` is ahead of `b`; the counters may wrap.
#[inline]
fn ahead(a: u64, b: u64) -> i64 {
    a.wrapping_sub(b).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::super::bucket::EPOCH;
    use super::*;

    const MS: u64 = 1_000_000;
    const NOW: u64 = EPOCH + 1_000_000_000;

    /// A lane with 1000 units per second, no credit, and turns of `turn_units`.
    fn lane(turn_units: u64) -> Lane {
        Lane::new(1, (1, turn_units), 1000, vec![Arc::new(Bucket::new(1000, 0))])
    }

    #[test]
    fn queues_get_their_units_in_the_order_in_which_they_asked() {
        let lane = lane(1);
        let ends = [lane.book(u64::MAX), lane.book(u64::MAX), lane.book(u64::MAX)];
        assert_eq!(lane.reach(ends[0].end, NOW), Ok(()));
        assert_eq!(lane.reach(ends[2].end, NOW), Err(NOW + 2 * MS));
        assert_eq!(lane.reach(ends[1].end, NOW), Err(NOW + MS));
        assert_eq!(lane.reach(ends[1].end, NOW + MS), Ok(()));
        assert_eq!(lane.reach(ends[2].end, NOW + 2 * MS), Ok(()));
    }

    #[test]
    fn turn_serves_several_queues_and_what_is_left_serves_the_next() {
        let lane = lane(3);
        let ends = [lane.book(u64::MAX), lane.book(u64::MAX)];
        assert!(ends.iter().all(|booking| lane.reach(booking.end, NOW).is_ok()));
        assert_eq!(lane.debt(), -1);
        assert_eq!(lane.reach(lane.book(u64::MAX).end, NOW), Ok(()));
        assert_eq!(lane.reach(lane.book(u64::MAX).end, NOW), Err(NOW + 3 * MS));
    }

    #[test]
    fn queues_that_wait_book_one_turn_together() {
        let lane = lane(20);
        let mut ends = [0; 4];
        for turn in 0..100 {
            for end in &mut ends {
                if lane.reach(*end, NOW + turn * 20 * MS).is_ok() {
                    *end = lane.book(u64::MAX).end;
                }
            }
        }
        assert_eq!((lane.book(u64::MAX).units, lane.book(3).units, lane.book(0).units), (5, 3, 1));
    }

    #[test]
    fn disk_that_has_had_fewer_turns_than_another_gets_two_at_once_and_pays_both() {
        let bucket = Arc::new(Bucket::new(1000, 0));
        let [late, other] = [(); 2].map(|()| Lane::new(1, (1, 1), 1000, vec![Arc::clone(&bucket)]));
        assert_eq!(late.reach(late.book(1).end, NOW), Ok(()));
        assert!((1..4).all(|ms| other.reach(other.book(1).end, NOW + ms * MS).is_ok()));
        let ends = [late.book(1).end, late.book(1).end];
        assert!(ends.iter().all(|end| late.reach(*end, NOW + 4 * MS).is_ok()));
        assert_eq!(bucket.paid_at(), NOW + 6 * MS);
        // A disk that had no work for a while has missed nothing.
        let later = NOW + 100 * MS;
        assert!((0..4).all(|ms| other.reach(other.book(1).end, later + ms * MS).is_ok()));
        let ends = [late.book(1).end, late.book(1).end];
        assert_eq!(ends.map(|end| late.reach(end, later + 4 * MS)), [Ok(()), Err(later + 5 * MS)]);
    }

    #[test]
    fn unit_that_a_queue_gives_back_lets_the_next_one_move_up() {
        let lane = lane(1);
        let (gone, waits) = (lane.book(u64::MAX), lane.book(u64::MAX));
        assert_eq!(lane.reach(gone.end, NOW), Ok(()));
        assert!(lane.reach(waits.end, NOW).is_err());
        lane.give_back(1);
        assert_eq!(lane.reach(waits.end, NOW), Ok(()));
    }

    #[test]
    fn units_that_were_used_unbooked_are_paid_before_others_are_granted() {
        let lane = lane(1);
        lane.owe(10);
        let mine = lane.book(u64::MAX);
        assert_eq!(lane.reach(mine.end, NOW), Err(NOW + 10 * MS));
        // A queue that asks late loses only the time beyond the credit.
        assert!((1..10).all(|ms| lane.reach(mine.end, NOW + ms * MS).is_err()));
        assert_eq!(lane.reach(mine.end, NOW + 10 * MS), Ok(()));
    }

    #[test]
    fn debt_is_paid_when_its_last_unit_is_granted_whatever_queues_book_behind_it() {
        let lane = lane(1);
        assert_eq!(lane.debt_is_paid(NOW), Ok(()));
        lane.owe(3);
        lane.book(u64::MAX);
        assert_eq!((lane.debt_is_paid(NOW + MS), lane.unpaid()), (Err(NOW + 3 * MS), 2));
        assert_eq!((lane.debt_is_paid(NOW + 3 * MS), lane.unpaid()), (Ok(()), 0));
        assert_eq!(lane.debt(), 1);
    }

    #[test]
    fn booking_that_is_cancelled_pays_no_debt() {
        let lane = lane(1);
        let before = lane.book(u64::MAX);
        lane.owe(3);
        let behind = lane.book(u64::MAX);
        lane.cancel(behind);
        assert_eq!(lane.debt_is_paid(NOW), Err(NOW + 3 * MS));
        lane.cancel(before);
        assert_eq!((lane.debt(), lane.debt_is_paid(NOW)), (2, Err(NOW + 2 * MS)));
    }

    #[test]
    fn call_grants_a_bounded_number_of_turns() {
        let rich = Bucket::new(1000, 1_000_000);
        let lane = Lane::new(1, (1, 1), 1000, vec![Arc::new(rich)]);
        lane.owe(999_000);
        let mine = lane.book(u64::MAX);
        assert_eq!(lane.reach(mine.end, NOW), Err(NOW));
        assert!((0..40_000).any(|_| lane.reach(mine.end, NOW).is_ok()));
    }
}

#[cfg(all(test, loom))]
#[path = "lane_model.rs"]
mod model;
