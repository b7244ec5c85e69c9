//! A front-end's end of a connection, which can send arbitrary bytes and receives any message.
//!
//! For tests, fuzzers and experiments: it enforces no order of messages and negotiates nothing.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::descriptors::{SCM_MAX_FD, send};
use crate::error::FrameError;
use crate::header::{Header, message_bytes};
use crate::partial::PartialMessage;

/// A connection to a back-end.
#[derive(Debug)]
pub struct FrontEnd {
    socket: UnixStream,
}

/// One message from the back-end.
#[derive(Debug)]
pub struct Reply {
    /// The code of the request that this answers.
    pub code: u32,
    /// The flags of the received header.
    pub flags: u32,
    /// The message without its header.
    pub body: Vec<u8>,
    /// The received descriptors, in their order of arrival.
    pub fds: Vec<OwnedFd>,
}

impl Reply {
    /// The first eight bytes of the body as an integer; 0 if the body is shorter.
    #[must_use]
    pub fn u64(&self) -> u64 {
        self.body.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    }
}

impl FrontEnd {
    /// Connects to a back-end. Later calls fail if the back-end neither reads nor sends anything for `timeout`.
    ///
    /// # Errors
    /// Those of `connect`.
    pub fn connect(path: &Path, timeout: Duration) -> io::Result<Self> {
        Self::new(UnixStream::connect(path)?, timeout)
    }

    /// Uses a connected socket and sets its timeouts.
    ///
    /// # Errors
    /// Those of `setsockopt`.
    pub fn new(socket: UnixStream, timeout: Duration) -> io::Result<Self> {
        socket.set_read_timeout(Some(timeout))?;
        socket.set_write_timeout(Some(timeout))?;
        Ok(Self { socket })
    }

    /// The socket, for data that is not a message. It has the timeouts of this front-end.
    #[must_use]
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Sends a message with a correct header.
    ///
    /// # Errors
    /// [`FrameError`].
    pub fn send(&self, code: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), FrameError> {
        self.send_bytes(&message_bytes(code, flags, body, &[]), fds)
    }

    /// Sends arbitrary bytes, and descriptors with the first byte.
    ///
    /// # Errors
    /// [`FrameError`].
    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), FrameError> {
        let mut sent = 0;
        while sent < bytes.len() {
            let fds = if sent == 0 { fds } else { &[] };
            match send(&self.socket, &bytes[sent..], fds, SendFlags::empty()) {
                Ok(more) => sent += more,
                Err(Errno::AGAIN) => return Err(timed_out()),
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(FrameError::Closed { bytes: 0 }),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Receives one message.
    ///
    /// # Errors
    /// [`FrameError`].
    pub fn receive(&self) -> Result<Reply, FrameError> {
        let (mut partial, mut fds) = (PartialMessage::new(SCM_MAX_FD), Vec::new());
        while partial.missing()? > 0 {
            if !partial.receive_waiting(&self.socket, |fd| fds.push(fd))? {
                return Err(timed_out());
            }
        }
        let Header { code, flags, .. } = partial.header().ok_or(FrameError::Closed { bytes: 0 })?;
        Ok(Reply { code, flags, body: partial.into_body(), fds })
    }

    /// Sends a request without descriptors and receives the next message.
    ///
    /// # Errors
    /// [`FrameError`].
    pub fn ask(&self, code: u32, body: &[u8]) -> Result<Reply, FrameError> {
        self.send(code, Header::REQUEST, body, &[])?;
        self.receive()
    }
}

fn timed_out() -> FrameError {
    FrameError::Io(io::ErrorKind::TimedOut.into())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::code;
    use crate::descriptors::receive;

    fn pair() -> (FrontEnd, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        (FrontEnd::new(here, Duration::from_secs(60)).unwrap(), there)
    }

    #[test]
    fn request_goes_out_and_its_reply_comes_back_with_descriptors() {
        let (front_end, there) = pair();
        let answer = message_bytes(code::GET_INFLIGHT_FD, Header::REPLY, &7_u64.to_ne_bytes(), &[1]);
        send(&there, &answer, &[there.as_fd(), there.as_fd()], SendFlags::empty()).unwrap();
        let reply = front_end.ask(code::GET_INFLIGHT_FD, &[3]).unwrap();
        assert_eq!((reply.code, reply.flags, reply.u64()), (31, 5, 7));
        assert_eq!((reply.body.len(), reply.fds.len()), (9, 2));
        let mut bytes = [0; 64];
        let asked = receive(&there, &mut bytes, rustix::net::RecvFlags::empty(), drop).unwrap();
        assert_eq!(bytes[..asked.bytes], message_bytes(code::GET_INFLIGHT_FD, Header::REQUEST, &[3], &[]));
    }

    #[test]
    fn back_end_that_says_nothing_or_goes_is_an_error() {
        let (here, there) = UnixStream::pair().unwrap();
        let front_end = FrontEnd::new(here, Duration::from_millis(1)).unwrap();
        let silent = front_end.receive().unwrap_err();
        assert!(
            matches!(&silent, FrameError::Io(error) if error.kind() == io::ErrorKind::TimedOut),
            "{silent}"
        );
        drop(there);
        assert!(matches!(front_end.receive(), Err(FrameError::Closed { bytes: 0 })));
    }
}
