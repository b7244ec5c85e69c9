//! A message that arrives in any number of pieces, with its descriptors.
//!
//! - [`PartialMessage`] checks sizes, versions and counts before it stores anything: it keeps at most one message's
//!   bytes.
//! - It never receives bytes of the next message.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::descriptors::receive;
use crate::error::FrameError;
use crate::header::{HEADER_BYTES, Header};

/// The received part of a message: header and body. The caller owns its descriptors.
#[derive(Debug)]
pub struct PartialMessage {
    bytes: Vec<u8>,
    fds: usize,
    max_fds: usize,
}

impl PartialMessage {
    /// An empty message, which may carry up to `max_fds` descriptors.
    #[must_use]
    pub fn new(max_fds: usize) -> Self {
        Self { bytes: Vec::new(), fds: 0, max_fds }
    }

    /// Continues with bytes that another process received, and with the number of their descriptors. Checks them as if
    /// they had arrived from the peer.
    ///
    /// # Errors
    /// [`FrameError`] if no valid message begins like this.
    pub fn from_parts(bytes: Vec<u8>, fds: usize, max_fds: usize) -> Result<Self, FrameError> {
        let partial = Self { bytes, fds, max_fds };
        partial.check_fds()?;
        partial.missing()?;
        Ok(partial)
    }

    /// The bytes that have arrived.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The header, as soon as it is complete.
    #[must_use]
    pub fn header(&self) -> Option<Header> {
        self.bytes.first_chunk::<HEADER_BYTES>().map(|bytes| Header::from_bytes(*bytes))
    }

    /// How many bytes the next step needs: the rest of the header, or of the body. 0 if the message is complete.
    ///
    /// # Errors
    /// [`FrameError::Version`], [`FrameError::TooLarge`], [`FrameError::TooLong`].
    pub fn missing(&self) -> Result<usize, FrameError> {
        let Some(header) = self.header() else { return Ok(HEADER_BYTES - self.bytes.len()) };
        let (whole, bytes) = (HEADER_BYTES + header.checked_body_bytes()?, self.bytes.len());
        whole.checked_sub(bytes).ok_or(FrameError::TooLong { code: header.code, bytes, whole })
    }

    /// Receives once, no more than is missing, and never waits. `take` gets every descriptor that arrives, even if this
    /// returns an error. Returns false if nothing has arrived.
    ///
    /// # Errors
    /// [`FrameError`].
    pub fn receive_some(&mut self, socket: impl AsFd, take: impl FnMut(OwnedFd)) -> Result<bool, FrameError> {
        self.receive(socket, RecvFlags::DONTWAIT, take)
    }

    /// Like [`PartialMessage::receive_some`], but waits up to the socket's own read timeout. Returns false if nothing
    /// arrived in time.
    ///
    /// # Errors
    /// [`FrameError`].
    pub fn receive_waiting(
        &mut self,
        socket: impl AsFd,
        take: impl FnMut(OwnedFd),
    ) -> Result<bool, FrameError> {
        self.receive(socket, RecvFlags::empty(), take)
    }

    fn receive(
        &mut self,
        socket: impl AsFd,
        flags: RecvFlags,
        mut take: impl FnMut(OwnedFd),
    ) -> Result<bool, FrameError> {
        let (begin, missing) = (self.bytes.len(), self.missing()?);
        if missing == 0 {
            return Ok(true);
        }
        self.bytes.resize(begin + missing, 0);
        let fds = &mut self.fds;
        let received = receive(socket, &mut self.bytes[begin..], flags, |fd| {
            *fds += 1;
            take(fd);
        });
        self.bytes.truncate(begin + received.map_or(0, |received| received.bytes));
        match received {
            Ok(received) if received.fds_lost => Err(FrameError::FdsLost),
            Ok(received) if received.bytes == 0 => Err(FrameError::Closed { bytes: begin }),
            Ok(_) => self.check_fds().map(|()| true),
            Err(Errno::AGAIN) => Ok(false),
            Err(Errno::CONNRESET) => Err(FrameError::Closed { bytes: begin }),
            Err(errno) => Err(errno.into()),
        }
    }

    fn check_fds(&self) -> Result<(), FrameError> {
        let (count, max) = (self.fds, self.max_fds);
        if count <= max { Ok(()) } else { Err(FrameError::TooManyFds { count, max }) }
    }

    /// The body of a complete message.
    #[must_use]
    pub fn into_body(mut self) -> Vec<u8> {
        self.bytes.split_off(HEADER_BYTES.min(self.bytes.len()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::net::SendFlags;

    use super::*;
    use crate::descriptors::send;
    use crate::header::message_bytes;

    /// Maximum number of descriptors in these tests.
    const FEW: usize = 2;

    fn put(socket: &UnixStream, bytes: &[u8], fds: usize) {
        let fds = vec![socket.as_fd(); fds];
        assert_eq!(send(socket, bytes, &fds, SendFlags::empty()), Ok(bytes.len()));
    }

    /// Receives what has arrived of one message, and counts its descriptors.
    fn got(socket: &UnixStream) -> (PartialMessage, usize, Result<bool, FrameError>) {
        let (mut partial, mut fds) = (PartialMessage::new(FEW), 0);
        loop {
            match partial.receive_some(socket, |_| fds += 1) {
                Ok(true) if partial.missing().is_ok_and(|missing| missing > 0) => {}
                result => return (partial, fds, result),
            }
        }
    }

    fn refusal(bytes: &[u8], fds: usize) -> FrameError {
        let (here, there) = UnixStream::pair().unwrap();
        put(&here, bytes, fds);
        let (partial, _, result) = got(&there);
        result.err().or_else(|| partial.missing().err()).unwrap()
    }

    #[test]
    fn message_that_comes_byte_by_byte_is_whole_at_the_last_one_with_all_descriptors() {
        let (here, there) = UnixStream::pair().unwrap();
        let (mut partial, mut fds) = (PartialMessage::new(FEW), 0);
        let bytes = message_bytes(8, Header::REQUEST, &[1, 2], &[3]);
        for (at, byte) in bytes.iter().enumerate() {
            assert!(partial.missing().unwrap() > 0);
            assert!(!partial.receive_some(&there, |_| fds += 1).unwrap(), "nothing has come");
            put(&here, &[*byte], usize::from(at == 0 || at == 13));
            assert!(partial.receive_some(&there, |_| fds += 1).unwrap());
        }
        assert_eq!((partial.missing().unwrap(), fds), (0, 2));
        assert_eq!(partial.header(), Some(Header { code: 8, flags: 1, size: 3 }));
        assert_eq!(partial.into_body(), [1, 2, 3]);
    }

    #[test]
    fn byte_of_the_next_message_stays_in_the_socket() {
        let (here, there) = UnixStream::pair().unwrap();
        put(&here, &message_bytes(1, Header::REQUEST, &[5; 4], &[]).repeat(2), 0);
        for _ in 0..2 {
            let (partial, _, result) = got(&there);
            assert!(result.unwrap());
            assert_eq!(partial.into_body(), [5; 4]);
        }
        assert!(!got(&there).2.unwrap());
    }

    #[test]
    fn end_says_how_much_of_a_message_had_come() {
        for bytes in [0, 1, 12, 19] {
            let (here, there) = UnixStream::pair().unwrap();
            let message = message_bytes(2, Header::REQUEST, &[0; 8], &[]);
            put(&here, &message[..bytes], 0);
            drop(here);
            let (_, _, result) = got(&there);
            assert!(matches!(result, Err(FrameError::Closed { bytes: had }) if had == bytes), "{result:?}");
        }
    }

    #[test]
    fn version_and_size_are_refused_before_the_body_is_stored() {
        assert!(matches!(refusal(&message_bytes(1, 2, &[], &[]), 0), FrameError::Version { version: 2, .. }));
        let huge = Header { code: 1, flags: 1, size: u32::MAX }.to_bytes();
        assert!(matches!(refusal(&huge, 0), FrameError::TooLarge { size: u32::MAX, .. }));
    }

    #[test]
    fn too_many_descriptors_are_refused_in_one_piece_or_in_several_and_none_is_lost() {
        let message = message_bytes(1, Header::REQUEST, &[0; 8], &[]);
        assert!(matches!(refusal(&message, FEW + 1), FrameError::TooManyFds { count: 3, max: 2 }));
        let (here, there) = UnixStream::pair().unwrap();
        message.chunks(4).for_each(|piece| put(&here, piece, 1));
        let (_, fds, result) = got(&there);
        assert!(matches!(result, Err(FrameError::TooManyFds { .. })), "{result:?}");
        assert_eq!(fds, FEW + 1, "each has an owner");
    }

    #[test]
    fn parts_from_another_process_are_checked_and_continued() {
        let (here, there) = UnixStream::pair().unwrap();
        let message = message_bytes(2, Header::REQUEST, &[9; 8], &[]);
        let mut partial = PartialMessage::from_parts(message[..15].to_vec(), 1, FEW).unwrap();
        put(&here, &message[15..], 1);
        assert!(partial.receive_some(&there, drop).unwrap());
        assert_eq!(partial.into_body(), [9; 8]);
        let refusal = |bytes: &[u8], fds| PartialMessage::from_parts(bytes.to_vec(), fds, FEW).unwrap_err();
        assert!(matches!(refusal(&message[..3], 3), FrameError::TooManyFds { .. }));
        let long = [&message[..], &[0]].concat();
        assert!(matches!(refusal(&long, 0), FrameError::TooLong { code: 2, bytes: 21, whole: 20 }));
        assert!(matches!(refusal(&[0; 12], 0), FrameError::Version { .. }));
    }
}
