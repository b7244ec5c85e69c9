//! Connects the session to a queue that another thread owns.
//!
//! `session: offer_restart / gone → mailbox, signal → owner: its next call takes the mail → outcome →
//! session`
//!
//! - The owner needs one load per call; all other state is behind a mutex that is locked only after an event.
//! - An offer carries a new, empty ring, made by the session. The back-end can be started on that ring at once, long
//!   before the owner's next call (the owner may sleep, or be idle for hours). The owner fills the ring and rings the
//!   new doorbell.
//! - A second offer replaces one that was not taken. The ring of an offer is never the one in use: while the
//!   owner moves from one ring to the other, and reads the old one to its end, the session delays the next
//!   offer.
//! - A back-end that continues with the same ring (in-flight log) does not concern the owner: the back-end gets the
//!   ring of the last offer, taken or not, or the first ring if there was no offer.
//! - The owner is woken through the completion signal, which every back-end of the queue gets.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use guest_mem::{GuestMemory, MemoryView};
use virtqueue::{DriverQueue, RingFault, RingFeatures, RingLayout};

use super::area::{AreaLayout, Side};
use crate::kick::{Doorbell, EventFd};

/// How long an offer waits for an owner that is still moving to an earlier offer's ring. The owner needs microseconds,
/// unless it failed meanwhile.
const MOVE_LIMIT: Duration = Duration::from_secs(1);

/// How the owner handled an offer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RestartOutcome {
    /// Requests that were complete in the old ring.
    pub completed: u64,
    /// Requests that were sent again.
    pub resubmitted: u64,
}

/// A queue's ring, as announced to the back-end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingPlace {
    /// Addresses and size.
    pub layout: RingLayout,
    /// The value for `VHOST_USER_SET_VRING_BASE`.
    pub base: u32,
}

/// An offer of another, empty ring.
#[derive(Debug)]
pub(crate) struct Offer {
    pub ring: DriverQueue,
    pub side: Side,
    pub bell: Arc<dyn Doorbell>,
}

/// A message to the owner.
#[derive(Debug)]
pub(crate) enum Mail {
    /// Move to another ring.
    Restart(Box<Offer>),
    /// The driver will not connect to another back-end.
    Gone,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct QueueLink {
    /// Whether there is mail. The owner reads only this field in each call.
    mail: AtomicBool,
    mailbox: Mutex<Mailbox>,
    changed: Condvar,
    area: AreaLayout,
    /// The area's region only.
    memory: Arc<GuestMemory>,
    features: RingFeatures,
    call: Arc<EventFd>,
    /// The doorbell of the session: rung after an outcome, for a broken ring, and for a dropped queue.
    notice: Option<Arc<dyn Doorbell>>,
}

#[derive(Debug)]
struct Mailbox {
    offer: Option<Box<Offer>>,
    /// The ring that was last announced to back-ends.
    place: RingPlace,
    gone: bool,
    /// The ring that the owner uses.
    side: Side,
    /// The owner has taken an offer and has not reported the outcome yet: it uses both rings.
    moving: bool,
    outcome: Option<RestartOutcome>,
    /// The device broke the ring.
    broken: bool,
    /// The queue was dropped, so it has no owner any more.
    dropped: bool,
}

impl QueueLink {
    pub(crate) fn new(
        area: AreaLayout,
        memory: Arc<GuestMemory>,
        features: RingFeatures,
        first: RingPlace,
        call: Arc<EventFd>,
        notice: Option<Arc<dyn Doorbell>>,
    ) -> Self {
        let mailbox = Mailbox {
            offer: None,
            place: first,
            gone: false,
            side: Side::A,
            moving: false,
            outcome: None,
            broken: false,
            dropped: false,
        };
        let (mail, mailbox) = (AtomicBool::new(false), Mutex::new(mailbox));
        Self { mail, mailbox, changed: Condvar::new(), area, memory, features, call, notice }
    }

    // --- The session's side.

    /// The eventfd that every back-end of this queue signals: `VHOST_USER_SET_VRING_CALL`.
    pub(crate) fn call(&self) -> &Arc<EventFd> {
        &self.call
    }

    /// The ring that was last announced to a back-end, for the first back-end and for one that continues with it.
    ///
    /// The base is a split ring's current position, as its device has published it; a packed ring's position is in its
    /// log.
    pub(crate) fn place(&self) -> RingPlace {
        let place = self.lock().place;
        let view = MemoryView::new(Arc::clone(&self.memory));
        match place.layout.used_index(&view) {
            Ok(used_index) if !self.features.packed => RingPlace { base: used_index.into(), ..place },
            _ => place,
        }
    }

    /// Offers another, empty ring. In its next call, the owner moves to that ring, resends every unacknowledged
    /// request, and rings `bell`. The session can announce the ring to the back-end at once.
    ///
    /// # Errors
    /// [`RingFault`], but never for an existing queue.
    pub(crate) fn offer_restart(&self, bell: Arc<dyn Doorbell>) -> Result<RingPlace, RingFault> {
        let waited = self.changed.wait_timeout_while(self.lock(), MOVE_LIMIT, |mailbox| mailbox.moving);
        let mut mailbox = waited.unwrap_or_else(PoisonError::into_inner).0;
        let side = mailbox.side.other();
        let layout = self.area.ring(side);
        let view = MemoryView::new(Arc::clone(&self.memory));
        let ring = self.area.make_ring(side, &view, self.features)?;
        let base = ring.initial_base();
        mailbox.offer = Some(Box::new(Offer { ring, side, bell }));
        mailbox.outcome = None;
        let place = RingPlace { layout, base };
        mailbox.place = place;
        self.wake_owner(mailbox);
        Ok(place)
    }

    /// Tells the owner that no back-end will follow: every request in flight ends with `Lost`.
    pub(crate) fn gone(&self) {
        let mut mailbox = self.lock();
        mailbox.gone = true;
        self.wake_owner(mailbox);
    }

    fn wake_owner(&self, mailbox: MutexGuard<'_, Mailbox>) {
        // Release: pairs with the acquire in `has_mail`. The mailbox itself is under the mutex.
        self.mail.store(true, Ordering::Release);
        drop(mailbox);
        self.call.ring();
    }

    /// How the owner handled the last offer; `None` until it has done so.
    pub(crate) fn outcome(&self) -> Option<RestartOutcome> {
        self.lock().outcome
    }

    /// Waits up to `limit` for [`QueueLink::outcome`]. Also `None` if the queue was dropped.
    #[cfg(test)]
    pub(crate) fn wait_outcome(&self, limit: Duration) -> Option<RestartOutcome> {
        let undecided = |mailbox: &mut Mailbox| mailbox.outcome.is_none() && !mailbox.dropped;
        let waited = self.changed.wait_timeout_while(self.lock(), limit, undecided);
        waited.unwrap_or_else(PoisonError::into_inner).0.outcome
    }

    /// Whether the device broke the ring. A queue with a broken ring cannot continue, not even with a new back-end.
    pub(crate) fn is_broken(&self) -> bool {
        self.lock().broken
    }

    /// Whether the queue was dropped.
    pub(crate) fn is_dropped(&self) -> bool {
        self.lock().dropped
    }

    // --- The owner's side.

    /// Whether [`QueueLink::take_mail`] would return something; costs one load.
    #[inline]
    pub(crate) fn has_mail(&self) -> bool {
        // Acquire: pairs with the release in `wake_owner`.
        self.mail.load(Ordering::Acquire)
    }

    /// Takes the mail, if there is any.
    pub(crate) fn take_mail(&self) -> Option<Mail> {
        let mut mailbox = self.lock();
        // Relaxed: all stores happen under the mutex.
        self.mail.store(false, Ordering::Relaxed);
        let offer = mailbox.offer.take();
        if mailbox.gone {
            return Some(Mail::Gone);
        }
        let offer = offer?;
        (mailbox.side, mailbox.moving) = (offer.side, true);
        Some(Mail::Restart(offer))
    }

    /// Reports that the owner has followed an offer.
    pub(crate) fn report(&self, outcome: RestartOutcome) {
        self.tell_session(|mailbox| (mailbox.outcome, mailbox.moving) = (Some(outcome), false));
    }

    /// Reports that the device broke the ring.
    pub(crate) fn report_broken(&self) {
        self.tell_session(|mailbox| mailbox.broken = true);
    }

    /// Reports that the queue is dropped.
    pub(crate) fn report_dropped(&self) {
        self.tell_session(|mailbox| (mailbox.dropped, mailbox.moving) = (true, false));
    }

    fn tell_session(&self, change: impl FnOnce(&mut Mailbox)) {
        change(&mut self.lock());
        self.changed.notify_all();
        if let Some(bell) = &self.notice {
            bell.ring();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Mailbox> {
        self.mailbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
