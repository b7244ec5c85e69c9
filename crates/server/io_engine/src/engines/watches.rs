//! The table of watched fds, and of those that have fired since the last report.
//!
//! A slot becomes free only when the kernel has released it. Until then, late events carry an old generation and are
//! dropped.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::engine::{Event, WatchId, WatchToken};

/// The top bit marks watches in io_uring's `user_data`.
const GENERATION_MASK: u32 = 0x7fff_ffff;

/// Maximum number of consecutive polls that end at their first event. A poll that ends without an error met a full
/// completion ring, and works again once armed. If this repeats, the descriptor is always ready (a regular file,
/// `/dev/null`: a front-end may pass any fd as a kick fd), and arming it forever would be a busy loop.
const MAX_ENDED_AT_ONCE: u8 = 200;

#[derive(Debug)]
enum State {
    Free,
    Active {
        fd: Arc<OwnedFd>,
        token: WatchToken,
    },
    /// Stopped. The slot holds the fd until the kernel confirms that it no longer looks it up.
    Stopping {
        _fd: Arc<OwnedFd>,
    },
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    state: State,
    /// The event to report; the watch is then listed in `ready`.
    fired: Option<Result<(), Errno>>,
    /// The kernel has a poll for the watch, or gets one with the next submission.
    armed: bool,
    /// Number of consecutive polls that ended at their first event.
    ended_at_once: u8,
    /// The descriptor is this process's own. The engine then always arms the watch again, even if many polls in a row
    /// end at their first event.
    trusted: bool,
}

#[derive(Debug, Default)]
pub(crate) struct WatchTable {
    slots: Vec<Slot>,
    ready: Vec<u32>,
}

impl WatchTable {
    pub fn insert(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> WatchId {
        let free = self.slots.iter().position(|slot| matches!(slot.state, State::Free));
        let index = free.unwrap_or_else(|| {
            self.slots.push(Slot {
                generation: 0,
                state: State::Free,
                fired: None,
                armed: false,
                ended_at_once: 0,
                trusted: false,
            });
            self.slots.len() - 1
        });
        let slot = &mut self.slots[index];
        slot.state = State::Active { fd, token };
        slot.armed = true;
        slot.ended_at_once = 0;
        slot.trusted = false;
        #[allow(clippy::cast_possible_truncation)] // fds are 31-bit numbers, and so are their watches
        WatchId { index: index as u32, generation: slot.generation }
    }

    /// Marks the watch's descriptor as this process's own. It is always rearmed, because no other process can use it to
    /// keep the engine busy.
    pub fn trust(&mut self, id: WatchId) {
        if let Some(slot) = self.slot(id) {
            slot.trusted = true;
        }
    }

    fn slot(&mut self, id: WatchId) -> Option<&mut Slot> {
        self.slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation)
    }

    /// The fd to arm again if the watch is still active.
    pub fn active_fd(&mut self, id: WatchId) -> Option<Arc<OwnedFd>> {
        match &self.slot(id)?.state {
            State::Active { fd, .. } => Some(Arc::clone(fd)),
            _ => None,
        }
    }

    /// Records that a poll reported an event. `ended`: whether the poll also ended, without an error. Returns whether
    /// to rearm the watch: false once too many polls in a row have ended at their first event, unless the descriptor is
    /// trusted.
    pub fn may_go_on(&mut self, id: WatchId, ended: bool) -> bool {
        let Some(slot) = self.slot(id) else { return false };
        slot.ended_at_once = if ended { slot.ended_at_once.saturating_add(1) } else { 0 };
        slot.trusted || slot.ended_at_once < MAX_ENDED_AT_ONCE
    }

    /// Records that the fd was written to (`Ok`) or cannot be watched (`Err`). Repeated records are reported once.
    #[inline]
    pub fn fire(&mut self, id: WatchId, what: Result<(), Errno>) {
        let Some(slot) = self.slot(id).filter(|slot| matches!(slot.state, State::Active { .. })) else {
            return;
        };
        slot.armed &= what.is_ok();
        if slot.fired.replace(what).is_none() {
            self.ready.push(id.index);
        }
    }

    /// Stops reporting. Returns whether the kernel has a poll to remove; the slot then waits for
    /// [`WatchTable::released`].
    pub fn stop(&mut self, id: WatchId) -> bool {
        let Some(slot) = self.slot(id) else { return false };
        if let State::Active { fd, .. } = &slot.state {
            slot.state = State::Stopping { _fd: Arc::clone(fd) };
        }
        let armed = slot.armed;
        if !armed {
            self.released(id);
        }
        armed
    }

    /// Frees the slot of a stopped watch that the kernel has released.
    pub fn released(&mut self, id: WatchId) {
        if let Some(slot) = self.slot(id).filter(|slot| matches!(slot.state, State::Stopping { .. })) {
            slot.generation = (slot.generation + 1) & GENERATION_MASK;
            slot.state = State::Free;
            slot.armed = false;
        }
    }

    #[inline]
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub fn is_empty(&self) -> bool {
        self.slots.iter().all(|slot| matches!(slot.state, State::Free))
    }

    #[inline]
    pub fn take_ready(&mut self, events: &mut Vec<Event>) {
        for index in self.ready.drain(..) {
            let slot = &mut self.slots[index as usize];
            let what = slot.fired.take();
            if let (State::Active { token, .. }, Some(what)) = (&slot.state, what) {
                events.push(match what {
                    Ok(()) => Event::Readable(*token),
                    Err(errno) => Event::WatchFailed(*token, errno),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn watched(table: &mut WatchTable, token: u64) -> WatchId {
        table.insert(Arc::new(eventfd(0, EventfdFlags::empty()).unwrap()), WatchToken(token))
    }

    fn reported(table: &mut WatchTable) -> usize {
        let mut events = Vec::new();
        table.take_ready(&mut events);
        events.len()
    }

    #[test]
    fn watch_that_fired_twice_is_reported_once() {
        let mut table = WatchTable::default();
        let id = watched(&mut table, 7);
        table.fire(id, Ok(()));
        table.fire(id, Ok(()));
        assert_eq!((reported(&mut table), reported(&mut table)), (1, 0));
    }

    #[test]
    fn watch_stopped_after_it_fired_is_not_reported() {
        let mut table = WatchTable::default();
        let id = watched(&mut table, 7);
        table.fire(id, Ok(()));
        assert!(table.stop(id));
        assert_eq!(reported(&mut table), 0);
    }

    #[test]
    fn late_event_of_a_released_watch_does_not_reach_its_successor() {
        let mut table = WatchTable::default();
        let old = watched(&mut table, 7);
        table.stop(old);
        table.released(old);
        let new = watched(&mut table, 8);
        table.fire(old, Ok(()));
        assert_eq!((new.index, reported(&mut table)), (old.index, 0));
    }

    #[test]
    fn failed_watch_needs_no_removal_and_its_slot_is_free_at_once() {
        let mut table = WatchTable::default();
        let id = watched(&mut table, 7);
        table.fire(id, Err(Errno::PERM));
        assert!(!table.stop(id));
        assert!(table.is_empty());
    }
}
