//! What commands change in a queue: its descriptors and memory, draining, stopping, moving, leaving.
//!
//! Not here: the commands (`worker/commands.rs`), what a session hands over beside the ring (`session/state.rs`).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_mem::{GuestMemory, MemoryView};
use io_engine::{FileId, WatchId};

use super::{Queue, State};
use crate::data_path::queue::queue_start::Ending;

/// Where the ring stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingState {
    pub(crate) position: u32,
    /// It had a fault: left alone until the front-end stops or resets it.
    pub(crate) is_broken: bool,
}

/// Why the queue cannot be left to somebody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CannotLeave {
    /// Guest memory, or that of the in-flight log, was truncated.
    LostMemory,
    /// Requests that are parked, and no log that has them.
    Parked { requests: usize },
}

impl Queue {
    /// Another worker serves it from now on, under these names; nothing is in flight.
    pub(crate) fn arrive(&mut self, id: u32, file: FileId, watch: WatchId) {
        debug_assert!(self.pending_interrupt.due().is_none(), "a quiet queue owes no call: see `publish`");
        (self.id, self.file, self.watch) = (id, file, watch);
        self.counted.moves += 1;
        self.resume();
    }

    /// Leaves the ring to whoever serves it next, who may count on kicks, and tells where to go on.
    pub(crate) fn leave(&mut self) -> u32 {
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

    /// Takes nothing more until [`Queue::resume`].
    pub(crate) fn drain(&mut self) {
        if self.state == State::Running {
            self.state = State::Draining;
        }
    }

    /// Takes nothing more for good: it is about to stop.
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

    /// Whether it is about to stop, and has to finish first what the server before it had begun.
    pub(crate) fn must_redo(&self) -> bool {
        self.state == State::Stopping && !self.leaves_unbegun && self.ring.to_redo() > 0
    }

    /// Whether the front-end has cut off the memory of the in-flight log.
    pub(crate) fn lost_log(&self) -> bool {
        self.log.as_ref().is_some_and(|log| log.is_poisoned())
    }

    /// Goes over to a new memory table. That the ring is there as a whole, and where it was, its session has made sure
    /// of: a queue that broke here would go on holding the old table, and store what is parked into it.
    pub(crate) fn set_memory(&mut self, memory: Arc<GuestMemory>) {
        let view = MemoryView::new(memory);
        match self.ring.rebind(&view) {
            Ok(()) => {
                self.view = view;
                self.rebind_parked();
            }
            Err(fault) => {
                debug_assert!(false, "the session has looked: {fault}");
                self.break_ring(&fault);
            }
        }
    }

    /// Returns the ring's state; only parked requests are still in flight. The queue can go on afterwards, or the next
    /// server continues with the ring. The next server can rely on kicks.
    pub(crate) fn leave_as_it_is(&mut self) -> Result<RingState, CannotLeave> {
        if self.view.is_poisoned() || self.lost_log() {
            return Err(CannotLeave::LostMemory);
        }
        if !self.parked.is_empty() && self.log.is_none() {
            return Err(CannotLeave::Parked { requests: self.in_flight.parked() });
        }
        let _ = self.ring.enable_kicks();
        Ok(RingState { position: self.ring.position(), is_broken: self.state == State::Broken })
    }
}
