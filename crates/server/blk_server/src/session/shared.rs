//! State that a session's thread shares with the server: freeze orders, the back-end channel, the session's end.

use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use guest_mem::PassedFd;
use rustix::event::{EventfdFlags, eventfd};
use tracing::{debug, warn};

use super::state::Handed;
use super::wire;
use crate::data_path::disk::session_link::SessionLink;
use crate::host::error_line::error_line;

/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const BACKEND_CONFIG_CHANGE: u32 = 2;

/// The verdict on a frozen session. If the channel closes without a verdict, the session continues in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Theirs;

/// An order to freeze a session.
#[derive(Debug)]
pub(crate) struct Order {
    /// The time that the session's queues may take to drain.
    pub(crate) timeout: Duration,
    pub(crate) frozen: SyncSender<Result<Handed, NotHanded>>,
    pub(crate) verdict: Receiver<Theirs>,
}

/// Why a session stays in this process.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotHanded {
    #[error("the front-end has truncated memory that it shares")]
    LostMemory,
    #[error(
        "queue {queue} still has requests in flight after {} s: check whether its storage hangs", timeout.as_secs_f64()
    )]
    NotDrained { queue: u16, timeout: Duration },
    #[error(
        "queue {queue} has {requests} parked requests, which it cannot hand over because \
         its front-end keeps no in-flight log: repair the storage first"
    )]
    Parked { queue: u16, requests: usize },
    #[error("{0}")]
    Storage(String),
}

/// Allows a rebuilt session to start its rings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Go;

#[derive(Debug, Default)]
struct State {
    ended: bool,
    backend_channel: Option<PassedFd>,
    /// A pending order to hand the session to another process.
    order: Option<Order>,
}

/// One exists per session. It contains the session's [`SessionLink`].
#[derive(Debug)]
pub(crate) struct SessionShared {
    link: Arc<SessionLink>,
    /// Whether the front-end has sent at least one message.
    heard: AtomicBool,
    pause: Arc<OwnedFd>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Deref for SessionShared {
    type Target = SessionLink;

    fn deref(&self) -> &SessionLink {
        &self.link
    }
}

impl SessionShared {
    pub(crate) fn new(id: u64) -> std::io::Result<Arc<Self>> {
        let pause = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (link, heard) = (SessionLink::new(id)?, AtomicBool::new(false));
        Ok(Arc::new(Self { link, heard, pause, state: Mutex::default(), changed: Condvar::new() }))
    }

    /// The part that workers and the disk use.
    pub(crate) fn link(&self) -> &Arc<SessionLink> {
        &self.link
    }

    /// The descriptor that an order signals. The signal ends a wait between messages.
    pub(crate) fn pause_fd(&self) -> &Arc<OwnedFd> {
        &self.pause
    }

    /// Orders the session's thread to freeze between two messages. There is at most one order at a time.
    pub(crate) fn order(&self, order: Order) {
        let mut state = self.lock();
        if !state.ended {
            state.order = Some(order);
        }
        drop(state);
        crate::host::signal::signal(&self.pause);
    }

    /// Takes the order that the session has not seen yet, if any.
    pub(crate) fn take_order(&self) -> Option<Order> {
        self.lock().order.take()
    }

    /// Records that the front-end has sent a message.
    pub(crate) fn note_heard(&self) {
        self.heard.store(true, Ordering::Relaxed);
    }

    /// Whether the front-end has never sent a message and the session is not ending.
    pub(crate) fn is_silent(&self) -> bool {
        !self.heard.load(Ordering::Relaxed) && self.end_reason().is_none()
    }

    /// The session's thread calls this after it has stopped its queues.
    pub(crate) fn ended(&self) {
        let mut state = self.lock();
        state.ended = true;
        // A waiting live upgrade then sees that there is no session to hand over.
        state.order = None;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until the session has ended. Returns false if it has not ended by `deadline`.
    pub(crate) fn wait_ended(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(self.lock(), left, |state| !state.ended);
        waited.map_or_else(|poisoned| poisoned.into_inner().0.ended, |(state, _)| state.ended)
    }

    pub(crate) fn set_backend_channel(&self, channel: Option<PassedFd>) {
        self.lock().backend_channel = channel;
    }

    pub(crate) fn backend_channel(&self) -> Option<Arc<OwnedFd>> {
        self.lock().backend_channel.as_ref().map(|channel| Arc::clone(channel.shared()))
    }

    pub(crate) fn has_heard(&self) -> bool {
        self.heard.load(Ordering::Relaxed)
    }

    /// Tells the front-end that the configuration space has changed, for example the disk's size. Never waits: if the
    /// channel is full, an unread message already makes the front-end read the configuration.
    pub(crate) fn announce_config_change(&self) {
        let Some(channel) = self.backend_channel() else {
            debug!(
                session = self.id(),
                "no back-end channel: the guest learns of the change at its next reset"
            );
            return;
        };
        if let Err(error) = wire::send_backend_request(&channel, BACKEND_CONFIG_CHANGE) {
            warn!(
                session = self.id(),
                "cannot announce the configuration change to the front-end: {}",
                error_line(&error)
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
