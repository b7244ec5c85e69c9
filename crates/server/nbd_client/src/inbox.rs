//! What other threads hand to a link's worker: a new connection, or a flush.
//!
//! `deliver, flush → the inbox, a flag, an eventfd → the worker takes it`

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};

use crate::pause::Pause;

/// A connection on which requests may be sent.
#[derive(Debug)]
pub(crate) struct Connection {
    pub socket: OwnedFd,
    pub structured: bool,
}

/// A flush that another thread waits for.
#[derive(Debug)]
pub struct FlushRequest {
    done: SyncSender<io::Result<()>>,
}

impl FlushRequest {
    /// Tells the waiting thread the result.
    pub fn end(self, result: io::Result<()>) {
        let _ = self.done.try_send(result);
    }
}

/// What other threads have for the worker.
#[derive(Debug, Default)]
struct Inbox {
    connection: Option<Connection>,
    flushes: Vec<FlushRequest>,
    /// A thread is connecting.
    connecting: bool,
    /// When the latest connection was delivered.
    delivered_at: Option<Instant>,
    /// The pause before the latest thread's first attempt.
    pause: Pause,
}

/// The part of a link that other threads use.
#[derive(Debug)]
pub(crate) struct Shared {
    wake: OwnedFd,
    /// The inbox has something.
    news: AtomicBool,
    /// The link has a connection, or one lies in its inbox.
    connected: AtomicBool,
    inbox: Mutex<Inbox>,
}

impl Shared {
    pub fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (news, connected) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { wake, news, connected, inbox: Mutex::default() })
    }

    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Whether the inbox has something new.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.news.load(Ordering::Acquire) && self.news.swap(false, Ordering::Acquire)
    }

    pub fn take_connection(&self) -> Option<Connection> {
        self.inbox().connection.take()
    }

    pub fn take_flushes(&self) -> Vec<FlushRequest> {
        std::mem::take(&mut self.inbox().flushes)
    }

    /// Records that the link's connection is gone.
    pub fn disconnected(&self) {
        self.connected.store(false, Ordering::Release);
    }

    /// Records that a thread connects from now on, and returns the pause before its first attempt. `None`: a thread
    /// connects already, or a connection has been delivered.
    pub fn begin_connecting(&self) -> Option<Pause> {
        let mut inbox = self.inbox();
        if inbox.connecting || inbox.connection.is_some() {
            return None;
        }
        inbox.connecting = true;
        if let Some(delivered_at) = inbox.delivered_at.take() {
            inbox.pause = inbox.pause.after_connection(delivered_at.elapsed());
        }
        Some(inbox.pause)
    }

    /// Records that the thread could not be started.
    pub fn not_connecting(&self) {
        self.inbox().connecting = false;
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the link has a connection.
    pub fn has_connection(&self) -> bool {
        self.connected.load(Ordering::Acquire)
    }

    /// Whether a thread is connecting for this link.
    pub fn wants_connection(&self) -> bool {
        self.inbox().connecting
    }

    /// Hands a connection to the worker of a new link.
    pub fn deliver(&self, connection: Connection) {
        self.put(&mut self.inbox(), connection);
    }

    /// Hands a connection to the worker if a thread is connecting for the link. Otherwise the link has one already, with
    /// requests in flight perhaps.
    pub fn offer(&self, connection: Connection) -> Result<(), Connection> {
        let mut inbox = self.inbox();
        if !inbox.connecting {
            return Err(connection);
        }
        self.put(&mut inbox, connection);
        Ok(())
    }

    fn put(&self, inbox: &mut Inbox, connection: Connection) {
        inbox.connection = Some(connection);
        inbox.connecting = false;
        inbox.delivered_at = Some(Instant::now());
        self.connected.store(true, Ordering::Release);
        self.wake();
    }

    /// Lets the worker flush, and waits for the result.
    pub fn flush(&self, deadline: Instant) -> io::Result<()> {
        let (done, flushed) = sync_channel(1);
        self.inbox().flushes.push(FlushRequest { done });
        self.wake();
        let left = deadline.saturating_duration_since(Instant::now());
        flushed.recv_timeout(left).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    fn wake(&self) {
        // Release: the worker that sees the flag finds the inbox filled.
        self.news.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}
