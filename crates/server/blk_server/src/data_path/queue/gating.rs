//! Applies the disk's limits to a queue: a request that must wait stays in the ring until the gate opens.
//!
//! `pop → parse → admit (charges.rs) ─ no → unpop; the queue waits until the gate opens → pop …`
//!
//! - A stopping queue starts only requests that the previous server had begun. They are charged but do not wait, so the
//!   limits do not delay a stop.
//! - The gate moves with its queue. When the limits change, the queue gets a new gate.

use std::sync::Arc;
use std::time::Instant;

use super::submit_context::SubmitContext;
use super::{Queue, State};
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

    /// Applies changed limits of the disk. The old gate leaves the queue's debt to the disk.
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

    /// Gives the queue's debt or unused units to the disk, which hands them to the next server.
    pub(super) fn close_gate(&mut self) {
        if let Some(gate) = self.gate.as_deref_mut() {
            gate.close();
        }
    }
}
