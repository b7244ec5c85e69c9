//! The back-end's own requests: a second socket, on which it reports that the configuration changed.
//!
//! `bytes, whenever they come → header checked → body skipped → request (answered if it asks for that)`
//!
//! - Never waits: it takes the bytes that have arrived, and the rest later. A back-end that sends half a
//!   message, garbage, or descriptors loses the channel, not the device.
//! - The driver handles only CONFIG_CHANGE_MSG and refuses all other requests.
//!
//! Spec: vhost-user, "Back-end message types". Not here: the effect of a change (`thread.rs`).

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair,
};
use vhost::vhost_user::message::{BackendReq, MAX_MSG_SIZE};

use super::wire::{HEADER_BYTES, channel_reply, channel_request_flags, words};

/// Most requests per call: a back-end that never stops must not keep the device's thread here.
const MAX_AT_ONCE: usize = 64;

/// Why the channel is abandoned.
#[derive(Debug, thiserror::Error)]
pub(super) enum ChannelError {
    #[error("the back-end closed its channel")]
    Closed,
    #[error("message {code} with flags {flags:#x} is not a request")]
    NotARequest { code: u32, flags: u32 },
    #[error("request {code} of {size} bytes, at most {max} are possible")]
    TooLarge { code: u32, size: u32, max: usize },
    #[error("the back-end does not read our answers")]
    NotRead,
    #[error("the channel failed")]
    Io(#[from] io::Error),
}

/// Our end of the channel.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    header: [u8; HEADER_BYTES],
    /// Bytes of `header` received so far.
    header_bytes: usize,
    /// Bytes of the body still to come.
    body_bytes: usize,
}

impl Channel {
    /// Our end, and the end for the back-end.
    pub(super) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        Ok((Self { socket: ours, header: [0; HEADER_BYTES], header_bytes: 0, body_bytes: 0 }, theirs))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Takes everything that has arrived. Returns whether the configuration changed, and whether the channel
    /// continues: a back-end may send a request and then close it.
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

    /// The code of the next complete request.
    fn next(&mut self) -> Result<Option<u32>, ChannelError> {
        while self.header_bytes < HEADER_BYTES {
            let mut rest = [0; HEADER_BYTES];
            let wanted = HEADER_BYTES - self.header_bytes;
            let Some(received) = self.receive(&mut rest[..wanted])? else { return Ok(None) };
            self.header[self.header_bytes..][..received].copy_from_slice(&rest[..received]);
            self.header_bytes += received;
            if self.header_bytes == HEADER_BYTES {
                self.body_bytes = self.checked_size()?;
            }
        }
        while self.body_bytes > 0 {
            let mut skipped = [0; 256];
            let wanted = self.body_bytes.min(skipped.len());
            let Some(received) = self.receive(&mut skipped[..wanted])? else { return Ok(None) };
            self.body_bytes -= received;
        }
        self.header_bytes = 0;
        self.answer().map(Some)
    }

    fn checked_size(&self) -> Result<usize, ChannelError> {
        let [code, flags, size] = words(self.header);
        if channel_request_flags(flags).is_none() {
            return Err(ChannelError::NotARequest { code, flags });
        }
        let fits = usize::try_from(size).ok().filter(|&bytes| bytes <= MAX_MSG_SIZE);
        fits.ok_or(ChannelError::TooLarge { code, size, max: MAX_MSG_SIZE })
    }

    /// Answers, if an answer is wanted: success for a change of configuration, failure for an unknown
    /// request.
    fn answer(&self) -> Result<u32, ChannelError> {
        let [code, flags, _] = words(self.header);
        if channel_request_flags(flags) == Some(true) {
            let value = u64::from(code != u32::from(BackendReq::CONFIG_CHANGE_MSG));
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, &channel_reply(code, value), flags) {
                Ok(_) => {}
                Err(Errno::AGAIN) => return Err(ChannelError::NotRead),
                Err(errno) => return Err(ChannelError::Io(errno.into())),
            }
        }
        Ok(code)
    }

    /// `None`: nothing has arrived. Descriptors that come along are closed.
    fn receive(&self, out: &mut [u8]) -> Result<Option<usize>, ChannelError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(out)], &mut ancillary, flags) {
            Ok(received) if received.bytes == 0 => Err(ChannelError::Closed),
            Ok(received) => Ok(Some(received.bytes)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(Errno::CONNRESET) => Err(ChannelError::Closed),
            Err(errno) => Err(ChannelError::Io(errno.into())),
        }
    }
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
