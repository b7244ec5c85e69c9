//! The state of a drained queue's ring that the next server needs to serve it.
//!
//! Not here: draining it (`worker/commands.rs`), what travels beside (`session/state.rs`).

use super::{Queue, State};

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
