//! A session's socket: waits for messages, stores incomplete ones, and sends replies.
//!
//! `socket → PartialMessage (vhost_user) → descriptors charged to the disk → Message`
//!
//! - A message may arrive in any number of packets. If it is incomplete [`MESSAGE_TIMEOUT`] after its first byte, the
//!   session ends, so that no front-end can block a session's thread with half a message.
//! - The disk is charged for each descriptor on arrival, even if the message is incomplete.
//! - The session waits for its socket, its own wake-up and `pause` at the same time, even in the middle of a message.
//!   The received part is kept until the rest arrives, or is handed to another server (docs/decisions/0045).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_mem::{PassedFd, Quota, QuotaError};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, Shutdown};
use vhost::vhost_user::message::{FrontendReq, MAX_ATTACHED_FD_ENTRIES};
use vhost_user::{FrameError, Header, Outgoing, PartialMessage, message_bytes, wait};
use vm_memory::ByteValued;

use crate::host::listener::take_urgent_bytes_in_line;

/// Maximum number of descriptors per message: the number of regions that the `vhost` crate accepts in a SET_MEM_TABLE.
const MAX_FDS: usize = MAX_ATTACHED_FD_ENTRIES;
/// Time limit for a front-end to send a whole message, and to read a reply.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// One request of the front-end.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) request: FrontendReq,
    /// Whether the front-end set NEED_REPLY, and so waits for success or failure (feature REPLY_ACK).
    pub(crate) need_reply: bool,
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<PassedFd>,
}

/// Why the session cannot read another message or send a reply. Each of these errors ends the session.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("message still incomplete after {} s: only {bytes} bytes have arrived", timeout.as_secs())]
    TooSlow { bytes: usize, timeout: Duration },
    #[error("unknown request {code}")]
    UnknownRequest { code: u32 },
    #[error("the server refused the file descriptors of a message")]
    Quota(#[from] QuotaError),
    #[error("front-end has not read its reply within {} s", timeout.as_secs())]
    ReplyNotRead { timeout: Duration },
    #[error("front-end had not read its reply when a live upgrade began")]
    ReplyNotReadInTime,
    #[error("front-end does not read its back-end channel, which is full")]
    ChannelFull,
    #[error("the server ended the session in the middle of a message")]
    Woken,
    #[error("socket failed")]
    Io(#[from] io::Error),
}

/// The event that ended a wait for the next message.
#[derive(Debug)]
pub(crate) enum Incoming {
    Message(Message),
    /// The session's own wake-up fired.
    Woken,
    /// `pause` fired. A message may have arrived in part.
    Paused,
}

/// The two directions of a session's socket.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: Arc<OwnedFd>,
    wake: Arc<OwnedFd>,
    pause: Arc<OwnedFd>,
    half: Option<HalfMessage>,
    /// The disk's quota.
    quota: Arc<Quota>,
    /// Whether only this server has the connection. If so, dropping this value ends the connection.
    pub(super) is_ours: bool,
}

/// Why a wait ended.
enum Ready {
    Socket,
    Woken,
    Paused,
}

impl Wire {
    /// `wake` and `pause` are eventfds that end a wait.
    pub(crate) fn new(
        socket: Arc<OwnedFd>,
        wake: Arc<OwnedFd>,
        pause: Arc<OwnedFd>,
        quota: Arc<Quota>,
    ) -> Self {
        // Another server may have accepted the connection without this setting.
        take_urgent_bytes_in_line(&socket);
        Self { socket, wake, pause, half: None, quota, is_ours: false }
    }

    pub(crate) fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// The received part of an incomplete message.
    pub(crate) fn half(&self) -> Option<&HalfMessage> {
        self.half.as_ref()
    }

    /// Continues with the part of a message that another server received.
    pub(crate) fn go_on_with(&mut self, half: HalfMessage) {
        self.half = Some(half);
    }

    /// Waits for the socket, the wake-up or the pause, then reads once. Waits without limit for a message's first byte.
    /// Returns `None` if the message is still incomplete.
    pub(crate) fn receive(&mut self) -> Result<Option<Incoming>, WireError> {
        match self.wait()? {
            Ready::Woken => return Ok(Some(Incoming::Woken)),
            Ready::Paused => {
                // This eventfd belongs to the server and does not block.
                let _ = rustix::io::read(&self.pause, &mut [0_u8; 8]);
                return Ok(Some(Incoming::Paused));
            }
            Ready::Socket => {}
        }
        let half = self.half.get_or_insert_with(HalfMessage::begun);
        half.receive_some(&self.socket, &self.quota)?;
        if half.partial.missing()? > 0 {
            return Ok(None);
        }
        self.half.take().map(|whole| whole.into_message().map(Incoming::Message)).transpose()
    }

    /// Whether [`Wire::receive`] would return without waiting.
    #[cfg(feature = "test-util")]
    pub(crate) fn is_ready(&self) -> bool {
        let mut fds = [&self.wake, &self.pause, &self.socket].map(|fd| PollFd::new(fd, PollFlags::IN));
        wait(&mut fds, Some(Instant::now())).is_ok_and(|ready| ready > 0)
    }

    /// Only waiting counts against a message's time limit, not the server's own work.
    fn wait(&mut self) -> Result<Ready, WireError> {
        let began = Instant::now();
        let end = self.half.as_ref().map(|half| began + half.left);
        let mut fds = [
            PollFd::new(&self.wake, PollFlags::IN),
            PollFd::new(&self.pause, PollFlags::IN),
            PollFd::new(&self.socket, PollFlags::IN),
        ];
        let ready = wait(&mut fds, end)?;
        let [woken, paused, _] = fds.map(|fd| !fd.revents().is_empty());
        if let Some(half) = &mut self.half {
            half.left = half.left.saturating_sub(began.elapsed());
            if ready == 0 {
                let bytes = half.partial.bytes().len();
                return Err(WireError::TooSlow { bytes, timeout: MESSAGE_TIMEOUT });
            }
        }
        Ok(if woken {
            Ready::Woken
        } else if paused {
            Ready::Paused
        } else {
            Ready::Socket
        })
    }

    /// Answers `request` with `body`, then `rest`.
    pub(crate) fn reply(
        &self,
        request: FrontendReq,
        body: &impl ByteValued,
        rest: &[u8],
    ) -> Result<(), WireError> {
        self.send_all(&message_bytes(request.into(), Header::REPLY, body.as_slice(), rest), &[])
    }

    /// Answers `request` with `body` and a descriptor, which is attached to the first byte.
    pub(crate) fn reply_with_fd(
        &self,
        request: FrontendReq,
        body: &impl ByteValued,
        fd: &OwnedFd,
    ) -> Result<(), WireError> {
        self.send_all(&message_bytes(request.into(), Header::REPLY, body.as_slice(), &[]), &[fd.as_fd()])
    }

    /// Gives up after a time limit, so that a front-end that does not read cannot delay the session's end.
    fn send_all(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), WireError> {
        let end = Instant::now() + MESSAGE_TIMEOUT;
        let mut outgoing = Outgoing::new(bytes, fds);
        while !outgoing.is_sent() {
            let mut fds = [
                PollFd::new(&self.wake, PollFlags::IN),
                PollFd::new(&self.pause, PollFlags::IN),
                PollFd::new(&self.socket, PollFlags::OUT),
            ];
            if wait(&mut fds, Some(end))? == 0 {
                return Err(WireError::ReplyNotRead { timeout: MESSAGE_TIMEOUT });
            }
            match fds.map(|fd| !fd.revents().is_empty()) {
                [_, _, true] => {}
                [true, ..] => return Err(WireError::Woken),
                // A new server could not send the rest of a reply, and waiting for this front-end would stop all
                // guests.
                _ => return Err(WireError::ReplyNotReadInTime),
            }
            outgoing.send_some(&self.socket)?;
        }
        Ok(())
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if self.is_ours {
            hang_up(&self.socket, &self.quota);
        }
    }
}

/// Ends a connection. Unread bytes may carry descriptors, which the kernel closes with the socket. This may block, so
/// another thread closes the socket.
pub(crate) fn hang_up(socket: &Arc<OwnedFd>, quota: &Quota) {
    // Nothing can arrive from now on.
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
    let unread = rustix::net::recv(socket, &mut [0_u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    if !matches!(unread, Ok((0, _))) {
        quota.close(socket);
    }
}

/// Sends a back-end request on its channel. Requests no answer and never blocks.
pub(crate) fn send_backend_request(channel: impl AsFd, code: u32) -> Result<(), WireError> {
    let bytes = message_bytes(code, Header::REQUEST, &[], &[]);
    let mut outgoing = Outgoing::new(&bytes, &[]);
    // A stream socket accepts a message this short completely or not at all.
    outgoing.send_some(channel)?;
    if outgoing.is_sent() { Ok(()) } else { Err(WireError::ChannelFull) }
}

/// The received part of a message, with its descriptors.
#[derive(Debug)]
pub(crate) struct HalfMessage {
    /// How much time is left for the rest to arrive.
    pub(crate) left: Duration,
    partial: PartialMessage,
    pub(crate) fds: Vec<PassedFd>,
}

impl HalfMessage {
    fn begun() -> Self {
        Self { left: MESSAGE_TIMEOUT, partial: PartialMessage::new(MAX_FDS), fds: Vec::new() }
    }

    /// Checks the part from another server as if the front-end had sent it.
    pub(crate) fn from_parts(left: Duration, bytes: Vec<u8>, fds: Vec<PassedFd>) -> Result<Self, FrameError> {
        let partial = PartialMessage::from_parts(bytes, fds.len(), MAX_FDS)?;
        Ok(Self { left: left.min(MESSAGE_TIMEOUT), partial, fds })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.partial.bytes()
    }

    /// Receives once, at most the missing part of the message.
    fn receive_some(&mut self, socket: &OwnedFd, quota: &Arc<Quota>) -> Result<(), WireError> {
        let (fds, mut refused) = (&mut self.fds, None);
        let arrived = self.partial.receive_some(socket, |fd| match quota.admit(fd) {
            Ok(fd) => fds.push(fd),
            Err(error) => refused = Some(error),
        });
        if let Some(error) = refused {
            return Err(error.into());
        }
        // The socket was ready. Waiting again could keep this thread busy forever.
        if arrived? { Ok(()) } else { Err(io::Error::from(io::ErrorKind::WouldBlock).into()) }
    }

    fn into_message(self) -> Result<Message, WireError> {
        let header = self.partial.header();
        let (code, need_reply) = header.map_or((0, false), |header| (header.code, header.wants_reply()));
        let request = FrontendReq::try_from(code).map_err(|_| WireError::UnknownRequest { code })?;
        Ok(Message { request, need_reply, body: self.partial.into_body(), fds: self.fds })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use guest_mem::{Budget, Limits};
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::net::SendFlags;
    use vhost::vhost_user::message::VhostUserU64;

    use super::*;

    #[test]
    fn reply_that_is_not_read_does_not_outwait_a_pause() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let [wake, pause] = [(); 2].map(|()| Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()));
        let budget = Budget::new(Limits::of_process());
        let wire = Wire::new(Arc::new(ours.into()), wake, Arc::clone(&pause), Quota::of(&budget));
        while rustix::net::send(wire.socket(), &[0; 4096], SendFlags::DONTWAIT).is_ok() {}
        crate::host::signal::signal(&pause);
        let error = wire.reply(FrontendReq::GET_FEATURES, &VhostUserU64::new(0), &[]).unwrap_err();
        assert!(matches!(error, WireError::ReplyNotReadInTime), "{error}");
    }
}
