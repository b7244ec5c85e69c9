//! Which fds are watched, and which have fired since the last report.
//!
//! A slot is free again only when the kernel has released it. Until then, late events find an old generation and are
//! dropped.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::engine::{Event, WatchId, WatchToken};

/// The top bit marks watches in io_uring's `user_data`.
const GENERATION_MASK: u32 = 0x7fff_ffff;

/// A poll that ends without an error met a full completion ring, and works when it is armed again. A poll that keeps
/// ending is on a descriptor that is always ready (a regular file, `/dev/null`: a front-end may pass any fd as a kick
/// fd). Arming it again and again would be a busy loop.
const MAX_ENDED_AT_ONCE: u8 = 200;

#[derive(Debug)]
enum State {
    Free,
    Active {
        fd: Arc<OwnedFd>,
        token: WatchToken,
    },
    /// Stopped. The slot holds the fd until the kernel confirms, because the kernel may still look it up.
    Stopping {
        _fd: Arc<OwnedFd>,
    },
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    state: State,
    /// In `ready`, with what to report.
    fired: Option<Result<(), Errno>>,
    /// The kernel has a poll for it, or gets one with the next submission.
    armed: bool,
    /// Polls in a row that ended with their first event.
    ended_at_once: u8,
    /// The engine arms it again, however often its polls end.
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

    /// Marks a descriptor of our own process: no other process keeps the engine busy with it.
    pub fn trust(&mut self, id: WatchId) {
        if let Some(slot) = self.slot(id) {
            slot.trusted = true;
        }
    }

    fn slot(&mut self, id: WatchId) -> Option<&mut Slot> {
        self.slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation)
    }

    /// The fd to arm again, if the watch is still wanted.
    pub fn active_fd(&mut self, id: WatchId) -> Option<Arc<OwnedFd>> {
        match &self.slot(id)?.state {
            State::Active { fd, .. } => Some(Arc::clone(fd)),
            _ => None,
        }
    }

    /// Notes that a poll reported an event; `ended`: and ended without an error. Returns whether to arm it again: not
    /// after too many polls that ended at once.
    pub fn may_go_on(&mut self, id: WatchId, ended: bool) -> bool {
        let Some(slot) = self.slot(id) else { return false };
        slot.ended_at_once = if ended { slot.ended_at_once.saturating_add(1) } else { 0 };
        slot.trusted || slot.ended_at_once < MAX_ENDED_AT_ONCE
    }

    /// Notes that the fd was written to (`Ok`), or that it cannot be watched. Reported once.
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
