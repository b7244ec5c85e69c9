//! The queue of events from the device's thread to its user: bounded, and pollable.
//!
//! - At most [`MAX_EVENTS`] are queued. Beyond that, the oldest configuration change is dropped, because a later one
//!   replaces it. If there is none, the oldest event is dropped.
//! - The descriptor is readable exactly while events are queued: both change under one lock.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::info::Event;
use crate::kick::{Doorbell, EventFd};

/// Limit of queued events. It bounds the memory if the user never reads events while the back-end keeps reconnecting.
const MAX_EVENTS: usize = 64;

#[derive(Debug)]
pub(super) struct Events {
    queue: Mutex<VecDeque<Event>>,
    arrived: Condvar,
    signal: EventFd,
}

impl Events {
    pub(super) fn new() -> io::Result<Self> {
        let queue = Mutex::new(VecDeque::with_capacity(MAX_EVENTS));
        Ok(Self { queue, arrived: Condvar::new(), signal: EventFd::new()? })
    }

    pub(super) fn push(&self, event: Event) {
        let mut queue = self.lock();
        if queue.len() >= MAX_EVENTS {
            let oldest_change = queue.iter().position(|event| matches!(event, Event::ConfigChanged(_)));
            queue.remove(oldest_change.unwrap_or(0));
        }
        queue.push_back(event);
        self.signal.ring();
        self.arrived.notify_one();
    }

    /// Returns the oldest event; waits up to `limit` for one.
    pub(super) fn next(&self, limit: Duration) -> Option<Event> {
        let deadline = Instant::now().checked_add(limit);
        let mut queue = self.lock();
        while queue.is_empty() {
            let left = deadline.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return None;
            }
            queue = self.arrived.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let event = queue.pop_front();
        if queue.is_empty() {
            let _ = rustix::io::read(&self.signal, &mut [0_u8; 8]);
        }
        event
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.signal.as_fd()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Event>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags};

    use super::super::info::DeviceInfo;
    use super::*;

    fn change(capacity_sectors: u64) -> Event {
        Event::ConfigChanged(DeviceInfo { capacity_sectors, ..DeviceInfo::default() })
    }

    fn is_readable(events: &Events) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(events.fd(), PollFlags::IN)];
        vhost_user::wait(&mut fds, Some(Instant::now())).unwrap() == 1
    }

    fn drain(events: &Events) -> Vec<Event> {
        std::iter::from_fn(|| events.next(Duration::ZERO)).collect()
    }

    #[test]
    fn events_come_in_order_and_the_descriptor_is_readable_meanwhile() {
        let events = Events::new().unwrap();
        assert!(!is_readable(&events));
        events.push(Event::Disconnected);
        events.push(change(8));
        assert!(is_readable(&events));
        assert_eq!(events.next(Duration::ZERO), Some(Event::Disconnected));
        assert!(is_readable(&events));
        assert_eq!(events.next(Duration::ZERO), Some(change(8)));
        assert!(!is_readable(&events));
        assert_eq!(events.next(Duration::ZERO), None);
    }

    #[test]
    fn flood_of_changes_keeps_the_newest_and_everything_else() {
        let events = Events::new().unwrap();
        events.push(Event::Disconnected);
        (0..1000).for_each(|number| events.push(change(number)));
        let kept = drain(&events);
        assert_eq!(kept.len(), MAX_EVENTS);
        assert_eq!((kept.first(), kept.last()), (Some(&Event::Disconnected), Some(&change(999))));
    }

    #[test]
    fn flood_without_changes_loses_the_oldest() {
        let events = Events::new().unwrap();
        events.push(Event::GaveUp { reason: "first".into() });
        (0..MAX_EVENTS).for_each(|_| events.push(Event::Disconnected));
        assert!(drain(&events).iter().all(|event| *event == Event::Disconnected));
    }
}
