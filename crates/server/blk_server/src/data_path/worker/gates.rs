//! Handles queues whose next request waits for the limits of their disk.
//!
//! `a request is refused → the queue is inactive, without kicks → Timer::Gate → active again → the request is tried
//! again`
//!
//! Only a queue with a waiting request sets a timer, so an idle worker is not woken.

use std::time::Instant;

use super::timers::{Timer, Timers};
use super::{Worker, WorkerQueue};

impl WorkerQueue {
    /// Sets the timer for an inactive queue, if it waits for its gate.
    pub(super) fn note_gate(&mut self, id: u32, gated: &mut Vec<u32>, timers: &mut Timers) {
        let Some(opens) = self.queue.gate_opens() else { return };
        timers.set(Timer::Gate, Some(opens));
        if !std::mem::replace(&mut self.is_gated, true) {
            gated.push(id);
        }
    }
}

impl Worker {
    /// Activates queues whose gate opens now.
    pub(super) fn open_gates(&mut self, now: Instant) {
        for at in (0..self.gated.len()).rev() {
            let id = self.gated[at];
            let entry = self.queues.get_mut(id as usize).and_then(Option::as_mut);
            let waits =
                entry.as_deref().filter(|entry| !entry.active).and_then(|entry| entry.queue.gate_opens());
            if let Some(opens) = waits.filter(|opens| now < *opens) {
                self.timers.set(Timer::Gate, Some(opens));
                continue;
            }
            self.gated.swap_remove(at);
            if let Some(entry) = entry {
                entry.is_gated = false;
                self.activate(id);
            }
        }
    }

    /// Gives the disk's queues new gates with the current limits.
    pub(super) fn renew_gates(&mut self, disk: u64) {
        for id in (0..).take(self.queues.len()) {
            let Some(Some(entry)) = self.queues.get_mut(id as usize) else { continue };
            if entry.queue.disk().id() == disk {
                entry.queue.renew_gate();
                self.activate(id);
            }
        }
    }
}
