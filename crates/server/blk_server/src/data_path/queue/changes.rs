//! How a worker's commands change a queue: descriptors and memory; draining, stopping, moving, leaving.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_mem::{GuestMemory, MemoryView};
use io_engine::{FileId, WatchId};

use super::{Queue, State};
use crate::data_path::queue::queue_start::Ending;

/// The state of a drained queue's ring, which the next server needs in order to serve the queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingState {
    pub(crate) position: u32,
    /// Whether the ring had a fault. If so, no server accesses it until the front-end stops or resets it.
    pub(crate) is_broken: bool,
}

/// Why the next server cannot serve the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CannotLeave {
    /// The front-end truncated guest memory or the in-flight log.
    LostMemory,
    /// Requests are parked, and the queue has no log that lists them.
    Parked { requests: usize },
}

impl Queue {
    /// Records the ids that the queue's new worker has given it. No request of the queue is in an engine.
    pub(crate) fn arrive(&mut self, id: u32, file: FileId, watch: WatchId) {
        debug_assert!(
            self.pending_interrupt.due().is_none(),
            "a quiet queue has no pending interrupt: see `publish`"
        );
        (self.id, self.file, self.watch) = (id, file, watch);
        self.image = self.disk.image();
        self.counted.moves += 1;
        // The limits may have changed during the move.
        self.renew_gate();
        self.resume();
    }

    /// Releases the ring with kicks enabled, for its next user. Returns its position.
    pub(crate) fn leave(&mut self) -> u32 {
        self.meter.store(&self.counted);
        self.log_left_parked();
        let _ = self.ring.enable_kicks();
        self.ring.position()
    }

    pub(crate) fn set_call(&mut self, call: Option<Arc<OwnedFd>>) {
        self.call = call;
    }

    pub(crate) fn set_err(&mut self, err: Option<Arc<OwnedFd>>) {
        self.err = err;
    }

    /// Makes the queue take no requests until [`Queue::resume`].
    pub(crate) fn drain(&mut self) {
        if self.state == State::Running {
            self.state = State::Draining;
        }
    }

    /// Makes the queue take no more requests, because it stops soon.
    pub(crate) fn begin_stop(&mut self, ending: Ending) {
        if self.state != State::Broken {
            self.state = State::Stopping;
        }
        self.stop_parking(ending);
    }

    pub(crate) fn resume(&mut self) {
        if self.state == State::Draining {
            self.state = State::Running;
        }
    }

    /// Whether a queue that stops must first finish requests that the previous server had begun. If the next server
    /// reads the log, they stay there.
    pub(crate) fn must_redo(&self) -> bool {
        let stay_in_log = self.leaves_unbegun || self.leaves_parked;
        self.state == State::Stopping && !stay_in_log && self.ring.to_redo() > 0
    }

    /// Whether the front-end truncated the memory of the in-flight log.
    pub(crate) fn lost_log(&self) -> bool {
        self.in_flight_log.as_ref().is_some_and(|log| log.is_poisoned())
    }

    /// Changes to a new memory table. The session has checked that the new table contains the whole ring at its old
    /// addresses.
    pub(crate) fn set_memory(&mut self, memory: Arc<GuestMemory>) {
        let view = MemoryView::new(memory);
        match self.ring.rebind(&view) {
            Ok(()) => {
                self.view = view;
                self.rebind_parked();
            }
            Err(fault) => {
                debug_assert!(false, "the session has checked the new table: {fault}");
                self.break_ring(&fault);
            }
        }
    }

    /// Releases the ring with kicks enabled, so that this queue or the next server can continue with it. Returns its
    /// state. The only requests in flight are parked ones.
    pub(crate) fn leave_as_it_is(&mut self) -> Result<RingState, CannotLeave> {
        if self.view.is_poisoned() || self.lost_log() {
            return Err(CannotLeave::LostMemory);
        }
        if !self.parked.is_empty() && self.in_flight_log.is_none() {
            return Err(CannotLeave::Parked { requests: self.in_flight.parked() });
        }
        self.meter.store(&self.counted);
        self.close_gate();
        let _ = self.ring.enable_kicks();
        Ok(RingState { position: self.ring.position(), is_broken: self.state == State::Broken })
    }
}
