//! vhost-user messages on the socket: bytes and passed descriptors to [`Message`], replies to bytes.
//!
//! `socket → header (12 bytes) → size checked → body, descriptors collected → Message`
//!
//! - A message may arrive in any number of packets; one that is not complete [`MESSAGE_TIMEOUT`] after
//!   its first byte ends the session, so nobody can block a session thread with half a message.
//! - Sizes, versions and descriptor counts are checked before anything is stored. Descriptors are charged to the disk as they
//!   arrive, those of half a message too.
//! - The session waits on its socket, its own wake-up and `pause` at once, also in the middle of a message: what arrived of it
//!   stays here until the rest comes, or travels to another server (docs/decisions/0045).
//!
//! Layout: vhost-user, "Header". The request numbers and body structs come from the `vhost` crate; its
//! header type is private and its endpoint blocks in half a message (docs/decisions/0002).
//! Not here: what a message does (`mod.rs`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_mem::{PassedFd, Quota, QuotaError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown,
};
use vhost::vhost_user::message::{FrontendReq, MAX_MSG_SIZE};
use vm_memory::ByteValued;

use crate::host::listener::take_urgent_bytes_in_line;

/// Request, flags, size: three 32-bit numbers in native byte order.
const HEADER_BYTES: usize = 12;
/// Header flags: version in bits 0–1, "is a reply", "wants a reply".
const VERSION_MASK: u32 = 0x3;
const VERSION: u32 = 0x1;
const FLAG_REPLY: u32 = 0x4;
const FLAG_NEED_REPLY: u32 = 0x8;
/// Most descriptors one message may carry: `SET_MEM_TABLE`'s regions (the `vhost` crate takes 32).
const MAX_FDS: usize = 32;
/// Most that the kernel takes from a sender at once (unix(7)). There is room for all: those without are closed by the kernel, on
/// this thread.
const SCM_MAX_FD: usize = 253;
/// How long a front-end may take from a message's first byte to its last, and to read a reply.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// One request of the front-end.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) request: FrontendReq,
    /// The front-end set NEED_REPLY: it waits for success or failure (feature REPLY_ACK).
    pub(crate) need_reply: bool,
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<PassedFd>,
}

/// Why no further message can be read, or a reply not be sent. Ends the session.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    /// The peer closed between two messages: the normal end.
    #[error("front-end disconnected")]
    Closed,
    #[error("front-end disconnected after {bytes} bytes of a message")]
    ClosedInside { bytes: usize },
    #[error("message incomplete after {} s: {bytes} bytes of it arrived", timeout.as_secs())]
    TooSlow { bytes: usize, timeout: Duration },
    #[error("message version {version}, only {VERSION} is known (flags {flags:#x})")]
    Version { version: u32, flags: u32 },
    #[error("message of {size} bytes, at most {max} are possible")]
    TooLarge { size: u32, max: usize },
    #[error("{bytes} bytes of request {code}, which has {whole}")]
    TooLong { code: u32, bytes: usize, whole: usize },
    #[error("unknown request {code}")]
    UnknownRequest { code: u32 },
    #[error("more than {max} file descriptors with one message")]
    TooManyFds { max: usize },
    #[error("file descriptors that came with a message are refused")]
    Quota(#[from] QuotaError),
    #[error("front-end does not read its replies")]
    ReplyNotRead,
    #[error("front-end does not read its replies, and another server is to take over")]
    ReplyNotReadInTime,
    #[error("front-end does not read its back-end channel, which is full")]
    ChannelFull,
    #[error("session told to end inside a message")]
    Woken,
    #[error("socket failed")]
    Io(#[from] io::Error),
}

impl From<Errno> for WireError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// What ended a wait for the next message.
#[derive(Debug)]
pub(crate) enum Incoming {
    Message(Message),
    /// The session's own wake-up fired.
    Woken,
    /// The other one: no message is being carried out, but one may have arrived in part.
    Paused,
}

/// Both directions of a session's socket.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: Arc<OwnedFd>,
    wake: Arc<OwnedFd>,
    pause: Arc<OwnedFd>,
    half: Option<HalfMessage>,
    /// Of the disk.
    quota: Arc<Quota>,
    /// The connection ends with this value: no other server has it.
    pub(super) is_ours: bool,
}

/// What a wait was ended by.
enum Ready {
    Socket,
    Woken,
    Paused,
}

impl Wire {
    /// `wake`: an eventfd that ends a wait. `pause`: another one.
    pub(crate) fn new(
        socket: Arc<OwnedFd>,
        wake: Arc<OwnedFd>,
        pause: Arc<OwnedFd>,
        quota: Arc<Quota>,
    ) -> Self {
        // Another server may have accepted it.
        take_urgent_bytes_in_line(&socket);
        Self { socket, wake, pause, half: None, quota, is_ours: false }
    }

    pub(crate) fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// What has arrived of a message whose rest has not.
    pub(crate) fn half(&self) -> Option<&HalfMessage> {
        self.half.as_ref()
    }

    /// Goes on with what another server received.
    pub(crate) fn go_on_with(&mut self, half: HalfMessage) -> Result<(), WireError> {
        half.missing()?;
        self.half = Some(half);
        Ok(())
    }

    /// Waits for the socket, the wake-up or the pause, then reads once: without limit before a message's first byte.
    /// `None`: a part of a message arrived, and the rest has not.
    pub(crate) fn receive(&mut self) -> Result<Option<Incoming>, WireError> {
        match self.wait()? {
            Ready::Woken => return Ok(Some(Incoming::Woken)),
            Ready::Paused => {
                // Our own, which does not block.
                let _ = rustix::io::read(&self.pause, &mut [0_u8; 8]);
                return Ok(Some(Incoming::Paused));
            }
            Ready::Socket => {}
        }
        let half = self.half.get_or_insert_with(HalfMessage::begun);
        half.receive_some(&self.socket, &self.quota)?;
        if half.missing()? > 0 {
            return Ok(None);
        }
        self.half.take().map(|whole| whole.into_message().map(Incoming::Message)).transpose()
    }

    /// Whether [`Wire::receive`] would return without waiting.
    #[cfg(feature = "test-util")]
    pub(crate) fn is_ready(&self) -> bool {
        let mut fds = [&self.wake, &self.pause, &self.socket].map(|fd| PollFd::new(fd, PollFlags::IN));
        retry_interrupted(|| poll(&mut fds, Some(&timespec(Duration::ZERO)))).is_ok_and(|ready| ready > 0)
    }

    /// Only waiting counts against a message's time, not what the server does meanwhile.
    fn wait(&mut self) -> Result<Ready, WireError> {
        let began = Instant::now();
        let timeout = self.half.as_ref().map(|half| timespec(half.left));
        let mut fds = [
            PollFd::new(&self.wake, PollFlags::IN),
            PollFd::new(&self.pause, PollFlags::IN),
            PollFd::new(&self.socket, PollFlags::IN),
        ];
        let ready = retry_interrupted(|| poll(&mut fds, timeout.as_ref()))?;
        let [woken, paused, _] = fds.map(|fd| !fd.revents().is_empty());
        if let Some(half) = &mut self.half {
            half.left = half.left.saturating_sub(began.elapsed());
            if ready == 0 {
                return Err(WireError::TooSlow { bytes: half.bytes.len(), timeout: MESSAGE_TIMEOUT });
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

    /// Answers `request` with `body` and what follows it.
    pub(crate) fn reply(
        &self,
        request: FrontendReq,
        body: &impl ByteValued,
        rest: &[u8],
    ) -> Result<(), WireError> {
        let bytes = message_bytes(u32::from(request), VERSION | FLAG_REPLY, body.as_slice(), rest);
        self.send_all(&bytes)
    }

    /// The same with a descriptor, which goes with the first byte.
    pub(crate) fn reply_with_fd(
        &self,
        request: FrontendReq,
        body: &impl ByteValued,
        fd: &OwnedFd,
    ) -> Result<(), WireError> {
        let bytes = message_bytes(u32::from(request), VERSION | FLAG_REPLY, body.as_slice(), &[]);
        self.send_all_with(&bytes, &[fd.as_fd()])
    }

    fn send_all(&self, bytes: &[u8]) -> Result<(), WireError> {
        self.send_all_with(bytes, &[])
    }

    /// Whoever does not read its replies holds up nobody who wants the session to end.
    fn send_all_with(&self, mut bytes: &[u8], mut fds_left: &[BorrowedFd<'_>]) -> Result<(), WireError> {
        let deadline = Instant::now() + MESSAGE_TIMEOUT;
        while !bytes.is_empty() {
            let mut fds = [
                PollFd::new(&self.wake, PollFlags::IN),
                PollFd::new(&self.pause, PollFlags::IN),
                PollFd::new(&self.socket, PollFlags::OUT),
            ];
            if retry_interrupted(|| poll(&mut fds, Some(&until(deadline))))? == 0 {
                return Err(WireError::ReplyNotRead);
            }
            match fds.map(|fd| !fd.revents().is_empty()) {
                [_, _, true] => {}
                [true, ..] => return Err(WireError::Woken),
                // Half a reply cannot travel, and all guests would have to wait for it.
                _ => return Err(WireError::ReplyNotReadInTime),
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds_left.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(fds_left));
            }
            let (slices, flags) = ([IoSlice::new(bytes)], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
            match rustix::net::sendmsg(&self.socket, &slices, &mut ancillary, flags) {
                Ok(sent) => (bytes, fds_left) = (&bytes[sent..], &[]),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(WireError::Closed),
                Err(errno) => return Err(errno.into()),
            }
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

/// Ends a connection. What lies unread in it may be descriptors, which are closed with the socket: not by this thread, because
/// that may wait.
pub(crate) fn hang_up(socket: &Arc<OwnedFd>, quota: &Quota) {
    // From here on nothing arrives.
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
    let unread = rustix::net::recv(socket, &mut [0_u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    if !matches!(unread, Ok((0, _))) {
        quota.close(socket);
    }
}

/// Sends a request of ours on the back-end channel, without asking for an answer and without waiting.
pub(crate) fn send_backend_request(socket: impl AsFd, code: u32) -> Result<(), WireError> {
    let bytes = message_bytes(code, VERSION, &[], &[]);
    // A stream socket takes so few bytes whole or not at all.
    match rustix::net::send(socket, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        Ok(_) => Ok(()),
        Err(Errno::AGAIN) => Err(WireError::ChannelFull),
        Err(errno) => Err(errno.into()),
    }
}

fn message_bytes(code: u32, flags: u32, body: &[u8], rest: &[u8]) -> Vec<u8> {
    let size = u32::try_from(body.len() + rest.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len() + rest.len());
    for word in [code, flags, size] {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes.extend_from_slice(body);
    bytes.extend_from_slice(rest);
    bytes
}

/// What has arrived of a message: header and body in one.
#[derive(Debug)]
pub(crate) struct HalfMessage {
    /// For the rest to arrive.
    pub(crate) left: Duration,
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<PassedFd>,
}

impl HalfMessage {
    fn begun() -> Self {
        Self { left: MESSAGE_TIMEOUT, bytes: Vec::new(), fds: Vec::new() }
    }

    /// As another server had it, checked as if it had come from the front-end.
    pub(crate) fn of_parts(left: Duration, bytes: Vec<u8>, fds: Vec<PassedFd>) -> Result<Self, WireError> {
        if fds.len() > MAX_FDS {
            return Err(WireError::TooManyFds { max: MAX_FDS });
        }
        Ok(Self { left: left.min(MESSAGE_TIMEOUT), bytes, fds })
    }

    /// How many bytes come next: the rest of the header, or the rest of the body. 0: it is whole.
    fn missing(&self) -> Result<usize, WireError> {
        let Some(&[code, flags, size]) = self.header().as_ref() else {
            return Ok(HEADER_BYTES - self.bytes.len());
        };
        if flags & VERSION_MASK != VERSION {
            return Err(WireError::Version { version: flags & VERSION_MASK, flags });
        }
        let body_bytes = usize::try_from(size).unwrap_or(usize::MAX);
        if body_bytes > MAX_MSG_SIZE {
            return Err(WireError::TooLarge { size, max: MAX_MSG_SIZE });
        }
        let whole = HEADER_BYTES + body_bytes;
        whole.checked_sub(self.bytes.len()).ok_or(WireError::TooLong { code, bytes: self.bytes.len(), whole })
    }

    /// Request, flags, size.
    fn header(&self) -> Option<[u32; 3]> {
        let bytes = self.bytes.first_chunk::<HEADER_BYTES>()?;
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Some([word(0), word(4), word(8)])
    }

    /// Once, no more than is missing.
    fn receive_some(&mut self, socket: &OwnedFd, quota: &Arc<Quota>) -> Result<(), WireError> {
        let (begin, missing) = (self.bytes.len(), self.missing()?);
        self.bytes.resize(begin + missing, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut slices = [IoSliceMut::new(&mut self.bytes[begin..])];
        let received = rustix::net::recvmsg(socket, &mut slices, &mut ancillary, flags);
        let mut refused = None;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                // To the last, also after one that was refused: what is left in the iterator is closed here.
                for fd in fds {
                    match quota.admit(fd) {
                        Ok(fd) => self.fds.push(fd),
                        Err(error) => refused = Some(error),
                    }
                }
            }
        }
        if let Some(error) = refused {
            return Err(error.into());
        }
        let (bytes, flags) = match received {
            Ok(received) => (received.bytes, received.flags),
            Err(Errno::CONNRESET) => (0, ReturnFlags::empty()),
            Err(errno) => return Err(errno.into()),
        };
        self.bytes.truncate(begin + bytes);
        if flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_FDS {
            return Err(WireError::TooManyFds { max: MAX_FDS });
        }
        match (bytes, begin) {
            (0, 0) => Err(WireError::Closed),
            (0, _) => Err(WireError::ClosedInside { bytes: begin }),
            _ => Ok(()),
        }
    }

    fn into_message(mut self) -> Result<Message, WireError> {
        let [code, flags, _] = self.header().unwrap_or_default();
        let request = FrontendReq::try_from(code).map_err(|_| WireError::UnknownRequest { code })?;
        Ok(Message {
            request,
            need_reply: flags & FLAG_NEED_REPLY != 0,
            body: self.bytes.split_off(HEADER_BYTES),
            fds: self.fds,
        })
    }
}

fn until(deadline: Instant) -> Timespec {
    timespec(deadline.saturating_duration_since(Instant::now()))
}

fn timespec(left: Duration) -> Timespec {
    let tv_sec = i64::try_from(left.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: i64::from(left.subsec_nanos()) }
}

fn retry_interrupted<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use guest_mem::{Budget, Limits};
    use rustix::event::{EventfdFlags, eventfd};
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
