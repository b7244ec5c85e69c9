//! One message to the back-end and its reply, as bytes and descriptors, within a time limit.
//!
//! `request (header, body, descriptors) → sendmsg … recvmsg → header checked → body`
//!
//! - One deadline applies to the whole exchange, however few bytes come at a time; a stop request ends it at
//!   once.
//! - A reply's header never determines how much is stored or allocated: the caller's buffer is the limit.
//!   Descriptors that come with a reply are closed and are an error, except for the one that some replies may
//!   carry.
//! - After any error except [`MessageError::Refused`] the two sides may be out of step, so the connection is
//!   over.
//!
//! The `vhost` crate's `Frontend` is not used. Its sockets have a deadline only for a read, not for a
//! message, so a peer that sends one byte at a time can hold it for ever. Its SET_VRING_BASE has 16 bits, too
//! few for a packed ring (docs/decisions/0016). Layout: vhost-user, "Header". Not here: the meaning of the
//! messages (`front_end.rs`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
};
use vhost::vhost_user::message::FrontendReq;

use crate::error::MessageError;
use crate::kick::EventFd;

/// Request, flags, size: three 32-bit numbers in native byte order.
pub(super) const HEADER_BYTES: usize = 12;
/// Header flags: version in bits 0–1, "is a reply", "wants a reply".
const VERSION_MASK: u32 = 0x3;
const VERSION: u32 = 0x1;
const FLAG_REPLY: u32 = 0x4;
const FLAG_NEED_REPLY: u32 = 0x8;
/// Most descriptors in one message: SET_MEM_TABLE's regions (vhost-user, "Memory region description").
pub(super) const MAX_FDS: usize = 8;
/// Limits are capped at this, so that adding one to the clock never fails.
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
    /// Ends an exchange when it becomes readable. Used only until [`Wire::settle`], because it leaves the two
    /// sides out of step.
    stop: Option<Arc<EventFd>>,
    /// Limit for each message with its reply.
    limit: Duration,
    /// Deadline for all messages together.
    not_after: Option<Instant>,
}

/// What a reply may carry in addition to its bytes.
#[derive(Debug, Default)]
struct Luggage {
    may_have_fd: bool,
    fd: Option<OwnedFd>,
}

/// One exchange.
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
                // The backlog is full (unix(7)); a Unix socket is never "in progress".
                Err(Errno::AGAIN) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let next = deadline.min(Instant::now() + CONNECT_INTERVAL);
            if wait(&mut [PollFd::new(&*stop, PollFlags::IN)], next)? > 0 {
                return Err(io::ErrorKind::Interrupted.into());
            }
        }
    }

    /// Marks the connection as established: from now on only each message's own limit applies.
    pub(super) fn settle(&mut self) {
        self.not_after = None;
        self.stop = None;
    }

    /// For the last messages of a dropped device: all of them together get the limit of one.
    pub(super) fn hurry(&mut self) {
        self.not_after = Some(Instant::now() + self.limit);
    }

    /// To poll for the connection's end, and to ask for the peer's credentials.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends `message`.
    pub(super) fn send(&self, message: &Outgoing<'_>) -> Result<(), MessageError> {
        self.send_until(message, &self.exchange(message.request))
    }

    /// Sends `message` and receives its reply into `reply`. Returns the reply's length: `reply.len()`, or
    /// `or_bytes` for a reply that may be shorter.
    pub(super) fn ask(
        &self,
        message: &Outgoing<'_>,
        reply: &mut [u8],
        or_bytes: Option<usize>,
    ) -> Result<usize, MessageError> {
        let exchange = self.exchange(message.request);
        self.send_until(message, &exchange)?;
        self.receive(reply, or_bytes, &mut Luggage::default(), &exchange)
    }

    /// Like [`Wire::ask`], for a reply that may carry a descriptor.
    pub(super) fn ask_for_fd(
        &self,
        message: &Outgoing<'_>,
        reply: &mut [u8],
        or_bytes: Option<usize>,
    ) -> Result<Option<OwnedFd>, MessageError> {
        let exchange = self.exchange(message.request);
        self.send_until(message, &exchange)?;
        let mut luggage = Luggage { may_have_fd: true, fd: None };
        self.receive(reply, or_bytes, &mut luggage, &exchange)?;
        Ok(luggage.fd)
    }

    fn exchange(&self, request: FrontendReq) -> Exchange {
        let start = Instant::now();
        Exchange { request, start, deadline: earlier(start + self.limit, self.not_after) }
    }

    fn send_until(&self, message: &Outgoing<'_>, exchange: &Exchange) -> Result<(), MessageError> {
        let bytes = message_bytes(message);
        let mut sent = 0;
        while sent < bytes.len() {
            self.wait_for(PollFlags::OUT, exchange)?;
            // The descriptors are sent with the first byte.
            let fds = if sent == 0 { message.fds } else { &[] };
            sent += self.send_some(&bytes[sent..], fds, exchange)?;
        }
        Ok(())
    }

    fn send_some(
        &self,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
        exchange: &Exchange,
    ) -> Result<usize, MessageError> {
        let request = exchange.request;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(MessageError::Io { request, source: io::ErrorKind::InvalidInput.into() });
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut ancillary, flags) {
            Ok(sent) => Ok(sent),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Err(MessageError::Closed { request }),
            Err(errno) => Err(MessageError::Io { request, source: errno.into() }),
        }
    }

    fn receive(
        &self,
        reply: &mut [u8],
        or_bytes: Option<usize>,
        luggage: &mut Luggage,
        exchange: &Exchange,
    ) -> Result<usize, MessageError> {
        let request = exchange.request;
        let mut header = [0; HEADER_BYTES];
        self.fill(&mut header, luggage, exchange)?;
        let [code, flags, size_bytes] = words(header);
        let is_reply = flags & (VERSION_MASK | FLAG_REPLY) == VERSION | FLAG_REPLY;
        if code != u32::from(request) || !is_reply {
            return Err(MessageError::NotAReply { request, code, flags });
        }
        let wanted_bytes = reply.len();
        let len = usize::try_from(size_bytes).unwrap_or(usize::MAX);
        if len != wanted_bytes && Some(len) != or_bytes {
            return Err(MessageError::Size { request, size_bytes, wanted_bytes });
        }
        self.fill(&mut reply[..len.min(wanted_bytes)], luggage, exchange)?;
        Ok(len)
    }

    fn fill(
        &self,
        mut out: &mut [u8],
        luggage: &mut Luggage,
        exchange: &Exchange,
    ) -> Result<(), MessageError> {
        while !out.is_empty() {
            self.wait_for(PollFlags::IN, exchange)?;
            let received = self.receive_some(out, luggage, exchange)?;
            out = &mut out[received..];
        }
        Ok(())
    }

    fn receive_some(
        &self,
        out: &mut [u8],
        luggage: &mut Luggage,
        exchange: &Exchange,
    ) -> Result<usize, MessageError> {
        let request = exchange.request;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut slices = [IoSliceMut::new(out)];
        let received = match rustix::net::recvmsg(&self.socket, &mut slices, &mut ancillary, flags) {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(0),
            Err(Errno::CONNRESET) => return Err(MessageError::Closed { request }),
            Err(errno) => return Err(MessageError::Io { request, source: errno.into() }),
            Ok(received) => received,
        };
        let came_along = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        for fd in came_along.flatten() {
            if !luggage.may_have_fd || luggage.fd.replace(fd).is_some() {
                return Err(MessageError::Descriptors { request });
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(MessageError::Descriptors { request });
        }
        if received.bytes == 0 {
            return Err(MessageError::Closed { request });
        }
        Ok(received.bytes)
    }

    fn wait_for(&self, what: PollFlags, exchange: &Exchange) -> Result<(), MessageError> {
        let request = exchange.request;
        let socket = PollFd::new(&self.socket, what);
        let mut both = match &self.stop {
            Some(stop) => [socket, PollFd::new(&**stop, PollFlags::IN)],
            None => [socket.clone(), socket],
        };
        let ready = wait(&mut both, exchange.deadline);
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

fn earlier(deadline: Instant, not_after: Option<Instant>) -> Instant {
    not_after.map_or(deadline, |end| end.min(deadline))
}

fn message_bytes(message: &Outgoing<'_>) -> Vec<u8> {
    let flags = if message.need_reply { VERSION | FLAG_NEED_REPLY } else { VERSION };
    header_and(u32::from(message.request), flags, message.body)
}

fn header_and(code: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    for word in [code, flags, size] {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes.extend_from_slice(body);
    bytes
}

/// The reply to a back-end's request on its channel: one number.
pub(super) fn channel_reply(code: u32, value: u64) -> Vec<u8> {
    header_and(code, VERSION | FLAG_REPLY, &value.to_ne_bytes())
}

/// Whether `flags` are valid for a back-end's own request, and whether it wants a reply.
pub(super) fn channel_request_flags(flags: u32) -> Option<bool> {
    let is_request = flags & (VERSION_MASK | FLAG_REPLY) == VERSION;
    is_request.then_some(flags & FLAG_NEED_REPLY != 0)
}

/// The three numbers of a header: request, flags, size.
pub(super) fn words(header: [u8; HEADER_BYTES]) -> [u32; 3] {
    let mut words = [0; 3];
    for (word, bytes) in words.iter_mut().zip(header.chunks_exact(4)) {
        *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

/// Polls until `deadline`; returns how many descriptors are ready, 0 when the time is up.
pub(super) fn wait(fds: &mut [PollFd<'_>], deadline: Instant) -> io::Result<usize> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let tv_sec = i64::try_from(left.as_secs()).unwrap_or(i64::MAX);
        let limit = Timespec { tv_sec, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(fds, Some(&limit)) {
            Err(Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}
