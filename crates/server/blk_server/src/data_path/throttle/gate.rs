//! The gate of one queue: lets requests start while the queue has units, and otherwise says when to try again.
//!
//! `admit (cost) → enough in each balance? charged : shut until an instant`; a queue that ends returns its balances
//!
//! - A queue always has its next units booked, whatever its next request costs. It collects them when they are granted.
//!   So long requests get no more than short ones.
//! - A request that costs more than [`QUANTA_AHEAD`] starts when the queue has collected these. The rest is a debt of
//!   the disk: all of its queues wait for it, and until it is paid, no other such request starts.

use std::sync::Arc;

use super::bucket::virtual_time;
use super::disk_throttle::{DiskThrottle, KINDS};
use super::lane::{Booking, Lane};
use super::limits::LimitKind;
use crate::host::clock::monotonic_ns;

/// Quanta that a queue collects at most before a request starts: 1 MiB, or 16 requests.
const QUANTA_AHEAD: u64 = 16;
/// A queue that leaves units unused for longer than this loses those beyond [`QUANTA_AHEAD`].
const FRESH_NS: u64 = 10_000_000;
/// Limit for a queue that stops: it starts requests that the previous server had begun, unless the disk needs more time
/// than this to pay its debt.
const STOP_DEBT_NS: u64 = 1_000_000_000;

/// Whether a request reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// What a request costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) direction: Direction,
    /// Number of requests, before `iops-size` is applied.
    pub(crate) ops: u64,
    pub(crate) bytes: u64,
}

impl Cost {
    /// The quantities that the request needs, and how many units of each.
    fn units(self, iops_size: Option<u64>) -> [(LimitKind, u64); 4] {
        let parts = iops_size.map_or(0, |size| self.bytes.div_ceil(size));
        let (ops, bytes) = (self.ops.max(parts), self.bytes);
        let (iops, bps) = match self.direction {
            Direction::Read => (LimitKind::IopsRead, LimitKind::BpsRead),
            Direction::Write => (LimitKind::IopsWrite, LimitKind::BpsWrite),
        };
        [(LimitKind::Iops, ops), (iops, ops), (LimitKind::Bps, bytes), (bps, bytes)]
    }
}

/// Whether a request of a queue that stops may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// The request may start, and has been charged.
    Starts,
    /// The queue must ask again in the next pass.
    AskAgain,
    /// The request fails, because the disk owes too much.
    Refused,
}

/// A queue's account of one quantity.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    balance: u64,
    /// A booking whose first part the queue has collected.
    rest: Option<Booking>,
    /// What the queue gets next.
    booked: Option<Booking>,
    /// If the queue next asks after this instant, it has left its units unused for too long.
    fresh_until: u64,
    /// The most that the queue books: doubled each time that it waits. A queue that uses little books little, and so
    /// has nothing to save.
    most: u64,
}

/// What the queue must have before a request with this cost starts.
fn wanted(lane: &Lane, units: u64) -> u64 {
    units.min(QUANTA_AHEAD * lane.quantum())
}

impl Account {
    /// Collects what a request with this cost needs.
    ///
    /// # Errors
    /// When to ask again.
    fn fill(&mut self, lane: &Lane, units: u64, now: u64) -> Result<(), u64> {
        let wanted = wanted(lane, units);
        if now > self.fresh_until {
            self.drop_savings(lane);
        }
        while self.balance < wanted {
            self.collect(lane, now)?;
        }
        if units > wanted { lane.debt_is_paid(now) } else { Ok(()) }
    }

    /// Collects what is granted of the oldest booking.
    fn collect(&mut self, lane: &Lane, now: u64) -> Result<(), u64> {
        if let Some(rest) = self.rest {
            self.reach(lane, rest, now)?;
            self.balance += rest.units;
            self.rest = None;
            return Ok(());
        }
        let most = self.most;
        let booking = *self.booked.get_or_insert_with(|| lane.book(most));
        let part = match self.reach(lane, booking, now) {
            Ok(()) => booking.units,
            Err(again) => lane.first_part(booking).ok_or(again)?,
        };
        self.balance += part;
        self.rest = booking.without(part);
        // Books the next units at once, so that a queue with one request at a time keeps its place beside a full one.
        self.booked = Some(lane.book(self.most));
        Ok(())
    }

    fn reach(&mut self, lane: &Lane, booking: Booking, now: u64) -> Result<(), u64> {
        let reached = lane.reach(booking.end, now);
        self.fresh_until = reached.err().unwrap_or(now).saturating_add(FRESH_NS);
        if reached.is_err() {
            self.most = self.most.max(lane.quantum()).saturating_mul(2);
        }
        reached
    }

    fn charge(&mut self, lane: &Lane, units: u64) {
        let paid = units.min(self.balance);
        self.balance -= paid;
        if units > paid {
            lane.owe(units - paid);
        }
    }

    /// Collects all that is granted, and forgets what exceeds the most that a request may need. If the lane got it back,
    /// queues could save up a burst in turn.
    fn drop_savings(&mut self, lane: &Lane) {
        for booked in [&mut self.rest, &mut self.booked] {
            if let Some(booking) = booked.take_if(|booking| lane.is_granted(booking.end)) {
                self.balance += booking.units;
            }
        }
        self.balance = self.balance.min(QUANTA_AHEAD * lane.quantum());
        self.most = 0;
    }

    fn refund(&mut self, lane: &Lane, units: u64) {
        let kept = wanted(lane, units);
        self.balance += kept;
        lane.give_back(units - kept);
    }

    /// Returns the balance, except savings, and the bookings to the lane.
    fn close(&mut self, lane: &Lane) {
        self.drop_savings(lane);
        lane.give_back(std::mem::take(&mut self.balance));
        for booking in [&mut self.rest, &mut self.booked].into_iter().filter_map(Option::take) {
            lane.cancel(booking);
        }
    }
}

/// The gate of one queue.
#[derive(Debug)]
pub(crate) struct QueueGate {
    throttle: Arc<DiskThrottle>,
    accounts: [Account; KINDS],
    /// No request may start before this instant. 0: the gate is open.
    shut_until: u64,
    /// When the waiting request was first refused.
    waits_since: Option<u64>,
    last: Option<Cost>,
}

impl QueueGate {
    pub(crate) fn new(throttle: Arc<DiskThrottle>) -> Self {
        Self { throttle, accounts: [Account::default(); KINDS], shut_until: 0, waits_since: None, last: None }
    }

    pub(crate) fn throttle(&self) -> &Arc<DiskThrottle> {
        &self.throttle
    }

    /// The instant until which no request may start, if a request was refused.
    #[inline]
    pub(crate) fn shut_until(&self) -> Option<u64> {
        (self.shut_until > 0).then_some(self.shut_until)
    }

    /// Whether it is too early to try again.
    #[inline]
    pub(crate) fn is_shut(&self, now: u64) -> bool {
        now < self.shut_until
    }

    /// Opens the gate for another try. No request waits unless one is refused again.
    pub(crate) fn open(&mut self) {
        self.shut_until = 0;
    }

    /// Whether the request may start. If so, it is charged.
    pub(crate) fn admit(&mut self, cost: Cost, now: u64) -> bool {
        let mut shut_until = 0;
        for (kind, lane, units) in needed(&self.throttle, cost) {
            if let Err(again) = self.accounts[kind as usize].fill(lane, units * lane.parts(), now) {
                shut_until = shut_until.max(again);
            }
        }
        self.shut_until = shut_until;
        if shut_until > 0 {
            if self.waits_since.is_none() {
                self.waits_since = Some(now);
                self.throttle.usage().begin_wait(now);
            }
            return false;
        }
        self.end_wait(now);
        self.charge(cost);
        true
    }

    /// As [`QueueGate::admit`], for a request that the previous server had begun: the queue is stopping, so the request
    /// never waits for the limits.
    pub(crate) fn admit_begun(&mut self, cost: Cost, now: u64) -> Admission {
        let paid = needed(&self.throttle, cost).filter_map(|(_, lane, _)| lane.debt_is_paid(now).err());
        match paid.max() {
            Some(again) if again <= now => return Admission::AskAgain,
            Some(again) if again > now.saturating_add(STOP_DEBT_NS) => return Admission::Refused,
            _ => {}
        }
        self.charge(cost);
        Admission::Starts
    }

    fn charge(&mut self, cost: Cost) {
        self.last = Some(cost);
        for (kind, lane, units) in needed(&self.throttle, cost) {
            self.accounts[kind as usize].charge(lane, units * lane.parts());
            self.throttle.usage().charge(kind, units);
        }
    }

    /// Undoes the last charge: the request has not reached the storage.
    pub(crate) fn refund(&mut self) {
        let Some(cost) = self.last.take() else { return };
        for (kind, lane, units) in needed(&self.throttle, cost) {
            self.accounts[kind as usize].refund(lane, units * lane.parts());
            self.throttle.usage().refund(kind, units);
        }
    }

    /// Makes the last charge final.
    pub(crate) fn settle(&mut self) {
        self.last = None;
    }

    fn end_wait(&mut self, now: u64) {
        if let Some(since) = self.waits_since.take() {
            self.throttle.usage().end_wait(since, now);
        }
    }

    /// Returns all balances to the disk, because the queue ends or its state is handed to another process.
    pub(crate) fn close(&mut self) {
        for (account, lane) in self.accounts.iter_mut().zip(self.throttle.lanes()) {
            if let Some(lane) = lane {
                account.close(lane);
            }
        }
        self.shut_until = 0;
        self.end_wait(virtual_time(monotonic_ns()));
    }
}

/// What a request with this cost needs of the limited quantities.
fn needed(throttle: &DiskThrottle, cost: Cost) -> impl Iterator<Item = (LimitKind, &Lane, u64)> {
    let units = cost.units(throttle.iops_size()).into_iter().filter(|&(_, units)| units > 0);
    units.filter_map(|(kind, units)| Some((kind, throttle.lane(kind)?, units)))
}

impl Drop for QueueGate {
    fn drop(&mut self) {
        self.close();
    }
}
