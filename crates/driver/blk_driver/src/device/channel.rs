//! The back-end's channel: a second socket, on which the back-end sends requests such as configuration changes.
//!
//! `bytes, whenever they arrive → header checked → body dropped → request (answered if it requests that)`
//!
//! - Never waits: it reads the bytes that have arrived, and the rest later. A back-end that sends incomplete messages,
//!   garbage or descriptors loses the channel, not the device.
//! - The driver handles only CONFIG_CHANGE_MSG and refuses all other requests.
//!
//! Spec: vhost-user, "Back-end message types".

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use vhost::vhost_user::message::BackendReq;
use vhost_user::{FrameError, Header, MAX_BODY_BYTES, Outgoing, PartialMessage, message_bytes};

/// Limit of requests per call, so that a back-end that never stops cannot occupy the device's thread.
const MAX_AT_ONCE: usize = 64;

/// Why the channel is abandoned.
#[derive(Debug, thiserror::Error)]
pub(super) enum ChannelError {
    #[error("the back-end closed its channel")]
    Closed,
    #[error("message {code} with flags {flags:#x} is not a request")]
    NotARequest { code: u32, flags: u32 },
    #[error("request {code} has {size} bytes; at most {max} are allowed")]
    TooLarge { code: u32, size: u32, max: usize },
    #[error("the back-end does not read the driver's answers")]
    NotRead,
    #[error("the channel failed")]
    Io(#[source] io::Error),
    #[error(transparent)]
    Frame(FrameError),
}

impl From<FrameError> for ChannelError {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::Closed { .. } => Self::Closed,
            FrameError::Io(error) => Self::Io(error),
            other => Self::Frame(other),
        }
    }
}

/// Our end of the channel.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    /// The received part of a request.
    partial: PartialMessage,
}

impl Channel {
    /// Makes a channel: our end, and the end for the back-end.
    pub(super) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        Ok((Self { socket: ours, partial: begun() }, theirs))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads everything that has arrived. Returns whether the configuration changed, and whether the channel continues:
    /// a back-end may send a request and then close it.
    pub(super) fn take(&mut self) -> (bool, Result<(), ChannelError>) {
        let mut changed = false;
        for _ in 0..MAX_AT_ONCE {
            match self.next() {
                Ok(Some(code)) => changed |= code == u32::from(BackendReq::CONFIG_CHANGE_MSG),
                Ok(None) => break,
                Err(error) => return (changed, Err(error)),
            }
        }
        (changed, Ok(()))
    }

    /// The code of the next complete request. `None` if it has not arrived completely. Descriptors that arrive with it
    /// are closed.
    fn next(&mut self) -> Result<Option<u32>, ChannelError> {
        loop {
            let header = self.partial.header();
            header.map_or(Ok(()), check)?;
            if let Some(header) = header.filter(|_| self.partial.missing().is_ok_and(|bytes| bytes == 0)) {
                self.partial = begun();
                return self.answer(header).map(Some);
            }
            match self.partial.receive_some(&self.socket, drop) {
                Ok(false) => return Ok(None),
                // The driver needs no descriptors from the back-end.
                Ok(true) | Err(FrameError::FdsLost) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Answers if an answer is requested: success for a configuration change, failure for an unknown request.
    fn answer(&self, header: Header) -> Result<u32, ChannelError> {
        let code = header.code;
        if header.wants_reply() {
            let value = u64::from(code != u32::from(BackendReq::CONFIG_CHANGE_MSG));
            let bytes = message_bytes(code, Header::REPLY, &value.to_ne_bytes(), &[]);
            let mut outgoing = Outgoing::new(&bytes, &[]);
            // A stream socket accepts so few bytes completely or not at all.
            outgoing.send_some(&self.socket)?;
            if !outgoing.is_sent() {
                return Err(ChannelError::NotRead);
            }
        }
        Ok(code)
    }
}

/// An empty message that may carry any number of descriptors, because the driver closes all of them.
fn begun() -> PartialMessage {
    PartialMessage::new(usize::MAX)
}

fn check(header: Header) -> Result<(), ChannelError> {
    let Header { code, flags, size } = header;
    if !header.is_request() {
        return Err(ChannelError::NotARequest { code, flags });
    }
    let max = MAX_BODY_BYTES;
    let is_too_large = usize::try_from(size).map_or(true, |bytes| bytes > max);
    if is_too_large { Err(ChannelError::TooLarge { code, size, max }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (Channel, UnixStream) {
        let (channel, theirs) = Channel::pair().unwrap();
        (channel, theirs.into())
    }

    fn changed(channel: &mut Channel) -> bool {
        let (changed, going_on) = channel.take();
        going_on.unwrap();
        changed
    }

    fn message(code: u32, flags: u32, body: &[u8]) -> Vec<u8> {
        let size = u32::try_from(body.len()).unwrap();
        [[code, flags, size].map(u32::to_ne_bytes).concat(), body.to_vec()].concat()
    }

    #[test]
    fn change_is_seen_however_its_bytes_arrive() {
        let (mut channel, mut theirs) = pair();
        let bytes = message(2, 1, &[7; 300]);
        for byte in &bytes[..bytes.len() - 1] {
            theirs.write_all(&[*byte]).unwrap();
            assert!(!changed(&mut channel));
        }
        theirs.write_all(&bytes[bytes.len() - 1..]).unwrap();
        assert!(changed(&mut channel));
        assert!(!changed(&mut channel));
    }

    #[test]
    fn request_that_wants_an_answer_gets_one() {
        let (mut channel, mut theirs) = pair();
        theirs.write_all(&[message(2, 9, &[]), message(3, 9, &[0; 16])].concat()).unwrap();
        assert!(changed(&mut channel));
        let mut answers = [0; 40];
        theirs.read_exact(&mut answers).unwrap();
        let expected = [message(2, 5, &0_u64.to_ne_bytes()), message(3, 5, &1_u64.to_ne_bytes())].concat();
        assert_eq!(answers.as_slice(), expected);
    }

    #[test]
    fn garbage_a_huge_message_and_the_end_close_the_channel() {
        let error = |bytes: &[u8]| {
            let (mut channel, mut theirs) = pair();
            theirs.write_all(bytes).unwrap();
            drop(theirs);
            channel.take().1.unwrap_err()
        };
        assert!(matches!(error(&[0xff; 12]), ChannelError::NotARequest { .. }));
        assert!(matches!(error(&message(2, 5, &[])), ChannelError::NotARequest { .. }));
        let huge = [2_u32, 1, u32::MAX].map(u32::to_ne_bytes).concat();
        assert!(matches!(error(&huge), ChannelError::TooLarge { .. }));
        assert!(matches!(error(&[1]), ChannelError::Closed));
    }

    #[test]
    fn change_is_seen_though_the_channel_is_closed_right_after() {
        let (mut channel, mut theirs) = pair();
        theirs.write_all(&message(2, 1, &[])).unwrap();
        drop(theirs);
        assert!(matches!(channel.take(), (true, Err(ChannelError::Closed))));
    }

    #[test]
    fn back_end_that_never_stops_is_left_after_a_bounded_number_of_requests() {
        let (mut channel, mut theirs) = pair();
        theirs.write_all(&message(2, 1, &[]).repeat(MAX_AT_ONCE + 1)).unwrap();
        assert!(changed(&mut channel));
        assert!(changed(&mut channel), "one is left");
        assert!(!changed(&mut channel));
    }
}
