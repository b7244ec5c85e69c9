//! One message to the back-end and its reply, within a time limit.
//!
//! `request → Outgoing (vhost_user) … PartialMessage (vhost_user) → header checked → body`
//!
//! - One deadline applies to the whole exchange, however few bytes arrive at a time; a stop request ends it at once.
//! - A reply's header never determines how much is stored: the caller limits the body's length. Descriptors in a reply
//!   are closed and cause an error, except for the one that some replies may carry.
//! - After any error except [`MessageError::Refused`], the two sides may be out of step, so the connection ends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use vhost::vhost_user::message::FrontendReq;
use vhost_user::{FrameError, Header, PartialMessage, message_bytes, wait};

use crate::error::MessageError;
use crate::kick::EventFd;

/// Limits are capped at this, so that adding a limit to the clock's value never fails.
const LONGEST_LIMIT: Duration = Duration::from_secs(365 * 24 * 3600);
/// How often to retry a socket whose backlog is full: the kernel does not report when there is room.
const CONNECT_INTERVAL: Duration = Duration::from_millis(10);

/// A request without its header.
#[derive(Clone, Copy)]
pub(super) struct Outgoing<'a> {
    pub(super) request: FrontendReq,
    /// Ask for success or failure (REPLY_ACK).
    pub(super) need_reply: bool,
    pub(super) body: &'a [u8],
    pub(super) fds: &'a [BorrowedFd<'a>],
}

/// The connection to one back-end.
#[derive(Debug)]
pub(super) struct Wire {
    socket: OwnedFd,
    /// Ends an exchange when it becomes readable. Used only until [`Wire::settle`], because an interrupted exchange
    /// leaves the two sides out of step.
    stop: Option<Arc<EventFd>>,
    /// Limit for each message with its reply.
    limit: Duration,
    /// Deadline for all messages together.
    not_after: Option<Instant>,
}

/// The form of a valid reply.
#[derive(Clone, Copy)]
struct Expected {
    body_bytes: usize,
    /// A second valid size.
    or_bytes: Option<usize>,
    max_fds: usize,
}

/// A message with its reply, and their time limit.
struct Exchange {
    request: FrontendReq,
    start: Instant,
    deadline: Instant,
}

impl Wire {
    /// Connects to the socket at `path` within `limit`, which also applies to each message. `not_after` is a
    /// deadline for everything until [`Wire::settle`].
    pub(super) fn connect(
        path: &Path,
        limit: Duration,
        not_after: Option<Instant>,
        stop: Arc<EventFd>,
    ) -> io::Result<Self> {
        let limit = limit.min(LONGEST_LIMIT);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let (address, deadline) = (SocketAddrUnix::new(path)?, earlier(Instant::now() + limit, not_after));
        loop {
            match connect(&socket, &address) {
                Ok(()) => return Ok(Self { socket, stop: Some(stop), limit, not_after }),
                // The backlog is full (unix(7)); connecting a Unix socket is never "in progress".
                Err(Errno::AGAIN) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let next = deadline.min(Instant::now() + CONNECT_INTERVAL);
            if wait(&mut [PollFd::new(&*stop, PollFlags::IN)], Some(next))? > 0 {
                return Err(io::ErrorKind::Interrupted.into());
            }
        }
    }

    /// Marks the connection as established: from now on only each message's own limit applies.
    pub(super) fn settle(&mut self) {
        self.not_after = None;
        self.stop = None;
    }

    /// Limits the last messages of a dropped device to the time of one message in total.
    pub(super) fn hurry(&mut self) {
        self.not_after = Some(Instant::now() + self.limit);
    }

    /// The socket, to poll for the connection's end and to get the peer's credentials.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends `message`.
    pub(super) fn send(&self, message: &Outgoing<'_>) -> Result<(), MessageError> {
        self.send_until(message, &self.exchange(message.request))
    }

    /// Sends `message` and receives its reply, whose body must have `body_bytes` or `or_bytes` bytes.
    pub(super) fn ask(
        &self,
        message: &Outgoing<'_>,
        body_bytes: usize,
        or_bytes: Option<usize>,
    ) -> Result<Vec<u8>, MessageError> {
        let expected = Expected { body_bytes, or_bytes, max_fds: 0 };
        self.exchanged(message, expected).map(|(body, _)| body)
    }

    /// Like [`Wire::ask`], for a reply that may carry a descriptor.
    pub(super) fn ask_for_fd(
        &self,
        message: &Outgoing<'_>,
        body_bytes: usize,
        or_bytes: Option<usize>,
    ) -> Result<(Vec<u8>, Option<OwnedFd>), MessageError> {
        self.exchanged(message, Expected { body_bytes, or_bytes, max_fds: 1 })
    }

    fn exchanged(
        &self,
        message: &Outgoing<'_>,
        expected: Expected,
    ) -> Result<(Vec<u8>, Option<OwnedFd>), MessageError> {
        let exchange = self.exchange(message.request);
        self.send_until(message, &exchange)?;
        self.receive(expected, &exchange)
    }

    fn exchange(&self, request: FrontendReq) -> Exchange {
        let start = Instant::now();
        Exchange { request, start, deadline: earlier(start + self.limit, self.not_after) }
    }

    fn send_until(&self, message: &Outgoing<'_>, exchange: &Exchange) -> Result<(), MessageError> {
        let flags = if message.need_reply { Header::REQUEST_WITH_ACK } else { Header::REQUEST };
        let bytes = message_bytes(message.request.into(), flags, message.body, &[]);
        let mut outgoing = vhost_user::Outgoing::new(&bytes, message.fds);
        while !outgoing.is_sent() {
            self.wait_for(PollFlags::OUT, exchange)?;
            outgoing.send_some(&self.socket).map_err(|error| exchange.failed(error))?;
        }
        Ok(())
    }

    fn receive(
        &self,
        expected: Expected,
        exchange: &Exchange,
    ) -> Result<(Vec<u8>, Option<OwnedFd>), MessageError> {
        let (mut reply, mut passed) = (PartialMessage::new(expected.max_fds), None);
        loop {
            if let Some(header) = reply.header() {
                exchange.check(header, expected)?;
            }
            if reply.missing().map_err(|error| exchange.failed(error))? == 0 {
                return Ok((reply.into_body(), passed));
            }
            self.wait_for(PollFlags::IN, exchange)?;
            let arrived = reply.receive_some(&self.socket, |fd| passed = Some(fd));
            arrived.map_err(|error| exchange.failed(error))?;
        }
    }

    fn wait_for(&self, what: PollFlags, exchange: &Exchange) -> Result<(), MessageError> {
        let request = exchange.request;
        let socket = PollFd::new(&self.socket, what);
        let mut both = match &self.stop {
            Some(stop) => [socket, PollFd::new(&**stop, PollFlags::IN)],
            None => [socket.clone(), socket],
        };
        let ready = wait(&mut both, Some(exchange.deadline));
        match ready.map_err(|source| MessageError::Io { request, source })? {
            0 => {
                let limit = exchange.deadline.saturating_duration_since(exchange.start);
                Err(MessageError::TimedOut { request, limit })
            }
            _ if self.stop.is_some() && !both[1].revents().is_empty() => {
                Err(MessageError::Stopped { request })
            }
            _ => Ok(()),
        }
    }
}

impl Exchange {
    fn check(&self, header: Header, expected: Expected) -> Result<(), MessageError> {
        let (request, Header { code, flags, size }) = (self.request, header);
        if !header.is_reply_to(request.into()) {
            return Err(MessageError::NotAReply { request, code, flags });
        }
        let (bytes, wanted_bytes) = (usize::try_from(size).ok(), expected.body_bytes);
        if bytes != Some(wanted_bytes) && (bytes.is_none() || bytes != expected.or_bytes) {
            return Err(MessageError::Size { request, size_bytes: size, wanted_bytes });
        }
        Ok(())
    }

    fn failed(&self, error: FrameError) -> MessageError {
        let request = self.request;
        match error {
            FrameError::Closed { .. } => MessageError::Closed { request },
            FrameError::TooManyFds { .. } | FrameError::FdsLost => MessageError::Descriptors { request },
            FrameError::Io(source) => MessageError::Io { request, source },
            other => MessageError::Io { request, source: io::Error::other(other) },
        }
    }
}

fn earlier(deadline: Instant, not_after: Option<Instant>) -> Instant {
    not_after.map_or(deadline, |end| end.min(deadline))
}
