//! How the session reaches a queue that another thread owns.
//!
//! `session: offer_restart / gone → mailbox, signal → owner: its next call takes the mail → outcome → session`
//!
//! - The owner pays one load per call; everything else is behind a mutex that is touched when something happened.
//! - An offer carries a new, empty ring, made by the session: the back-end may be started on it at once, long before
//!   the owner looks (it may be asleep, or idle for hours). The owner fills it and rings the new doorbell.
//! - A second offer replaces one that nobody took. The ring of an offer is never the one in use: while the owner goes
//!   from one to the other, and reads the old one to its end, the session waits with the next offer.
//! - A back-end that goes on with the ring as it is (in-flight log) is none of the owner's business: it gets the ring of the
//!   last offer, taken or not, or the first one.
//! - The owner is woken through the completion signal, which every back-end of the queue is given.
//!
//! Not here: what the owner does (`restart.rs`), messages (`device.rs`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use guest_mem::{GuestMemory, MemoryView};
use virtqueue::{DriverQueue, RingFault, RingFeatures, RingLayout};

use crate::area::{AreaLayout, Side};
use crate::kick::{Doorbell, EventFd};

/// How long an offer waits for an owner on its way: it needs microseconds, unless it came to grief on it.
const MOVE_LIMIT: Duration = Duration::from_secs(1);

/// What the owner did with an offer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RestartOutcome {
    /// Requests that the old ring showed as done.
    pub completed: u64,
    /// Requests that were sent again.
    pub resubmitted: u64,
}

/// Where a back-end finds a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingPlace {
    /// Addresses and size.
    pub layout: RingLayout,
    /// For `VHOST_USER_SET_VRING_BASE`.
    pub base: u32,
}

/// Another ring, empty.
#[derive(Debug)]
pub(crate) struct Offer {
    pub ring: DriverQueue,
    pub side: Side,
    pub bell: Arc<dyn Doorbell>,
}

/// What the owner finds.
#[derive(Debug)]
pub(crate) enum Mail {
    /// Go on with another ring.
    Restart(Box<Offer>),
    /// Nobody will come back.
    Gone,
}

/// See the file's head.
#[derive(Debug)]
pub(crate) struct QueueLink {
    /// There is mail. The one thing that the owner looks at in each call.
    mail: AtomicBool,
    mailbox: Mutex<Mailbox>,
    changed: Condvar,
    area: AreaLayout,
    /// The area's region and no other.
    memory: Arc<GuestMemory>,
    features: RingFeatures,
    call: Arc<EventFd>,
    /// Rung for the session: an outcome, a broken ring, an owner that left.
    notice: Option<Arc<dyn Doorbell>>,
}

#[derive(Debug)]
struct Mailbox {
    offer: Option<Box<Offer>>,
    /// What back-ends were told last.
    place: RingPlace,
    gone: bool,
    /// The ring that the owner uses.
    side: Side,
    /// The owner took an offer and has not reported yet: it uses both rings.
    moving: bool,
    outcome: Option<RestartOutcome>,
    /// The device broke the ring.
    broken: bool,
    /// There is no owner any more.
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

    /// What every back-end of this queue signals: `VHOST_USER_SET_VRING_CALL`.
    pub(crate) fn call(&self) -> &Arc<EventFd> {
        &self.call
    }

    /// Where the ring is that the last back-end was to use: for the first one, and for one that goes on with it.
    ///
    /// The base is where a split ring stands, as far as its device has said so; a packed one's is in its log.
    pub(crate) fn place(&self) -> RingPlace {
        let place = self.lock().place;
        let view = MemoryView::new(Arc::clone(&self.memory));
        match place.layout.used_index(&view) {
            Ok(used_index) if !self.features.packed => RingPlace { base: used_index.into(), ..place },
            _ => place,
        }
    }

    /// Makes another ring, empty, which the owner goes over to in its next call: all that was not acknowledged is
    /// sent again, and `bell` rung. The back-end can be told of it at once.
    ///
    /// # Errors
    /// [`RingFault`]: never for a queue that was made.
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

    /// The back-end is gone for good: all that is in flight ends with `Lost`.
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

    /// What the owner did with the last offer, once it has.
    pub(crate) fn outcome(&self) -> Option<RestartOutcome> {
        self.lock().outcome
    }

    /// Waits for [`QueueLink::outcome`], at most for `limit`. `None` too if the owner has left.
    #[cfg(test)]
    pub(crate) fn wait_outcome(&self, limit: Duration) -> Option<RestartOutcome> {
        let undecided = |mailbox: &mut Mailbox| mailbox.outcome.is_none() && !mailbox.dropped;
        let waited = self.changed.wait_timeout_while(self.lock(), limit, undecided);
        waited.unwrap_or_else(PoisonError::into_inner).0.outcome
    }

    /// Whether the device broke the ring: the queue does not go on, a new back-end would not help it.
    pub(crate) fn is_broken(&self) -> bool {
        self.lock().broken
    }

    /// Whether the queue was dropped.
    pub(crate) fn is_dropped(&self) -> bool {
        self.lock().dropped
    }

    // --- The owner's side.

    /// One load: whether [`QueueLink::take_mail`] has something.
    #[inline]
    pub(crate) fn has_mail(&self) -> bool {
        // Acquire: pairs with the release in `wake_owner`.
        self.mail.load(Ordering::Acquire)
    }

    /// What has come.
    pub(crate) fn take_mail(&self) -> Option<Mail> {
        let mut mailbox = self.lock();
        // Relaxed: under the mutex, as all stores.
        self.mail.store(false, Ordering::Relaxed);
        let offer = mailbox.offer.take();
        if mailbox.gone {
            return Some(Mail::Gone);
        }
        let offer = offer?;
        (mailbox.side, mailbox.moving) = (offer.side, true);
        Some(Mail::Restart(offer))
    }

    /// An offer was followed.
    pub(crate) fn report(&self, outcome: RestartOutcome) {
        self.tell_session(|mailbox| (mailbox.outcome, mailbox.moving) = (Some(outcome), false));
    }

    /// The device broke the ring.
    pub(crate) fn report_broken(&self) {
        self.tell_session(|mailbox| mailbox.broken = true);
    }

    /// The queue is dropped.
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
