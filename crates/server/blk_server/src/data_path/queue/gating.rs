//! Applies the disk's limits to a queue: a request that must wait stays in the ring until the gate opens.
//!
//! `pop → parse → admit (charges.rs) ─ no → unpop; the queue waits until the gate opens → pop …`
//!
//! - A queue that stops starts only requests that the previous server had begun. They are charged and do not wait, so a
//!   stop does not wait for the limits. If the disk owes too much, such a request fails with IOERR.
//! - The gate moves with its queue. A change of the limits gives the queue a new one.

use std::sync::Arc;
use std::time::Instant;

use virtio_blk::{ReplySlot, Status};

use super::fault_log::log_refused;
use super::submit_context::SubmitContext;
use super::{Queue, State};
use crate::data_path::queue::refusal::Refusal;
use crate::data_path::throttle::bucket::{EPOCH, virtual_time};
use crate::data_path::throttle::gate::QueueGate;
use crate::host::clock::{instant_at, ns_at};

impl Queue {
    /// Like `take`, but within the limits of the disk.
    #[cold]
    #[inline(never)]
    pub(super) fn take_limited(&mut self, context: &mut SubmitContext<'_>) -> usize {
        let is_shut = |gate: &QueueGate| gate.is_shut(virtual_time(ns_at(context.now)));
        if self.state == State::Running && !self.has_retries() && self.gate.as_deref().is_some_and(is_shut) {
            return 0;
        }
        // The driver may have taken back the waiting request.
        self.gate.iter_mut().for_each(|gate| gate.open());
        self.take::<true>(context)
    }

    /// When to try again, if a request waits for the limits.
    pub(crate) fn gate_opens(&self) -> Option<Instant> {
        if self.state != State::Running {
            return None;
        }
        let shut_until = self.gate.as_deref()?.shut_until()?;
        Some(instant_at(shut_until.saturating_sub(EPOCH)))
    }

    /// Takes over changed limits of the disk.
    pub(crate) fn renew_gate(&mut self) {
        let throttle = self.disk.throttle();
        let known = self.gate.as_deref().map(QueueGate::throttle);
        let is_same = match (known, &throttle) {
            (Some(known), Some(new)) => Arc::ptr_eq(known, new),
            (None, None) => true,
            _ => false,
        };
        if !is_same {
            self.gate = throttle.map(|throttle| Box::new(QueueGate::new(throttle)));
        }
    }

    /// Puts the chain that was taken last back into the ring. Returns false: no request was started.
    #[cold]
    pub(super) fn put_back(&mut self) -> bool {
        self.ring.unpop();
        false
    }

    /// Answers a request that the limits do not allow. Returns true: the chain is done.
    #[cold]
    pub(super) fn refuse(&mut self, tag: u16, reply: &ReplySlot, why: &Refusal, now: Instant) -> bool {
        log_refused(&self.disk, self.index, now, why);
        self.count_other(Status::IoErr);
        self.answer(tag, reply, Status::IoErr, 0);
        true
    }

    /// Returns the queue's remaining units to its disk, which hands them to the next server.
    pub(super) fn close_gate(&mut self) {
        if let Some(gate) = self.gate.as_deref_mut() {
            gate.close();
        }
    }
}
