//! The gate of one queue: lets requests start while the queue has units, and says when to ask again.
//!
//! `admit (cost) → balances > 0 ? charged : shut until an instant`; on the end of the queue its balances go back
//!
//! - A request starts if the balance of each quantity that it needs is positive, and may leave a debt. The queue pays it
//!   in quanta, one for each time that its booking is reached, so long requests get no more than short ones.
//! - A queue that ends leaves its debt to its disk, so a guest gains nothing from a reset.

use std::sync::Arc;

use super::bucket::virtual_time;
use super::disk_throttle::{DiskThrottle, KINDS};
use super::lane::Lane;
use super::limits::LimitKind;
use super::usage::Usage;
use crate::host::clock::monotonic_ns;

/// Limit of quanta that one call pays; the caller asks again in the next pass.
const QUANTA_AT_ONCE: u32 = 64;

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
    /// Requests, before `iops-size` is applied.
    pub(crate) ops: u64,
    pub(crate) bytes: u64,
}

impl Cost {
    /// The quantities that the request needs, and how much.
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

/// A queue's account of one quantity.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    balance: i64,
    /// The end of the booked quantum.
    booked: Option<u64>,
}

impl Account {
    /// Makes the balance positive.
    ///
    /// # Errors
    /// When to ask again.
    fn fill(&mut self, lane: &Lane, now: u64) -> Result<(), u64> {
        for _ in 0..QUANTA_AT_ONCE {
            if self.balance > 0 {
                return Ok(());
            }
            let end = *self.booked.get_or_insert_with(|| lane.book());
            lane.reach(end, now)?;
            self.booked = None;
            self.balance = self.balance.saturating_add_unsigned(lane.quantum());
        }
        if self.balance > 0 { Ok(()) } else { Err(now) }
    }

    /// Returns the balance to the lane; a booked quantum will be granted to the lane.
    fn close(&mut self, lane: &Lane) {
        let booked = if self.booked.take().is_some() { lane.quantum() } else { 0 };
        let rest = std::mem::take(&mut self.balance).saturating_add_unsigned(booked);
        match u64::try_from(rest) {
            Ok(left) => lane.give_back(left),
            Err(_) => lane.owe(rest.unsigned_abs()),
        }
    }
}

/// The gate of one queue.
#[derive(Debug)]
pub(crate) struct QueueGate {
    throttle: Arc<DiskThrottle>,
    accounts: [Account; KINDS],
    /// The queue must not ask before this instant. 0: the gate is open.
    shut_until: u64,
    /// When the request that waits was first refused.
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

    /// The instant until which no request may start, if one was refused.
    #[inline]
    pub(crate) fn shut_until(&self) -> Option<u64> {
        (self.shut_until > 0).then_some(self.shut_until)
    }

    /// Whether it is too early to ask.
    #[inline]
    pub(crate) fn is_shut(&self, now: u64) -> bool {
        now < self.shut_until
    }

    /// The queue asks again: no request waits unless one is refused again.
    pub(crate) fn open(&mut self) {
        self.shut_until = 0;
    }

    /// Whether the request may start. If so, it is charged.
    pub(crate) fn admit(&mut self, cost: Cost, now: u64) -> bool {
        let mut shut_until = 0;
        for (kind, units) in cost.units(self.throttle.iops_size()) {
            if let Some(lane) = self.throttle.lane(kind).filter(|_| units > 0)
                && let Err(again) = self.accounts[kind as usize].fill(lane, now)
            {
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

    /// Charges a request that does not wait.
    pub(crate) fn charge(&mut self, cost: Cost) {
        self.last = Some(cost);
        self.change(cost, i64::saturating_sub_unsigned, Usage::charge);
        // Books the next quantum at once, so that a queue with one request at a time keeps its place beside a full one.
        for (account, lane) in self.accounts.iter_mut().zip(self.throttle.lanes()) {
            if let Some(lane) = lane.filter(|_| account.balance <= 0) {
                account.booked.get_or_insert_with(|| lane.book());
            }
        }
    }

    /// Undoes the last charge: the request has not started.
    pub(crate) fn refund(&mut self) {
        if let Some(cost) = self.last.take() {
            self.change(cost, i64::saturating_add_unsigned, Usage::refund);
        }
    }

    fn end_wait(&mut self, now: u64) {
        if let Some(since) = self.waits_since.take() {
            self.throttle.usage().end_wait(since, now);
        }
    }

    fn change(&mut self, cost: Cost, by: fn(i64, u64) -> i64, counted: fn(&Usage, LimitKind, u64)) {
        for (kind, units) in cost.units(self.throttle.iops_size()) {
            if self.throttle.lane(kind).is_some() {
                let account = &mut self.accounts[kind as usize];
                account.balance = by(account.balance, units);
                counted(self.throttle.usage(), kind, units);
            }
        }
    }

    /// Returns everything to the disk: the queue ends, or its state is handed to another process.
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

impl Drop for QueueGate {
    fn drop(&mut self) {
        self.close();
    }
}
