//! One outgoing message, sent in as many pieces as the socket needs.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::descriptors::send;
use crate::error::FrameError;

/// The part of a message that the socket has not accepted yet.
#[derive(Debug)]
pub struct Outgoing<'a> {
    bytes: &'a [u8],
    fds: &'a [BorrowedFd<'a>],
}

impl<'a> Outgoing<'a> {
    /// A message, and the descriptors that its first byte carries.
    #[must_use]
    pub fn new(bytes: &'a [u8], fds: &'a [BorrowedFd<'a>]) -> Self {
        Self { bytes, fds }
    }

    /// Whether the socket has accepted everything.
    #[must_use]
    pub fn is_sent(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Sends as much as the socket accepts now, perhaps nothing. Never waits.
    ///
    /// # Errors
    /// [`FrameError::Closed`] if the peer has closed the connection, otherwise [`FrameError::Io`].
    pub fn send_some(&mut self, socket: impl AsFd) -> Result<(), FrameError> {
        match send(socket, self.bytes, self.fds, SendFlags::DONTWAIT) {
            Ok(sent) => (self.bytes, self.fds) = (self.bytes.get(sent..).unwrap_or_default(), &[]),
            Err(Errno::AGAIN) => {}
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                return Err(FrameError::Closed { bytes: 0 });
            }
            Err(errno) => return Err(errno.into()),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use rustix::net::RecvFlags;

    use super::*;
    use crate::descriptors::receive;

    #[test]
    fn message_longer_than_the_socket_takes_arrives_whole_with_its_descriptors_once() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let message: Vec<u8> = (0..1_u32 << 18).flat_map(u32::to_ne_bytes).collect();
        let fds = [here.as_fd()];
        let mut outgoing = Outgoing::new(&message, &fds);
        outgoing.send_some(&here).unwrap();
        assert!(!outgoing.is_sent(), "a socket that takes a MiB at once proves nothing here");
        let (mut arrived, mut passed) = (vec![0; 1], 0);
        receive(&there, &mut arrived, RecvFlags::empty(), |_| passed += 1).unwrap();
        while !outgoing.is_sent() {
            let mut piece = vec![0; 1 << 14];
            let got = receive(&there, &mut piece, RecvFlags::empty(), |_| passed += 1).unwrap();
            arrived.extend_from_slice(&piece[..got.bytes]);
            outgoing.send_some(&here).unwrap();
        }
        drop(here);
        there.read_to_end(&mut arrived).unwrap();
        assert!(arrived == message);
        assert_eq!(passed, 1);
    }

    #[test]
    fn full_socket_is_no_error_and_a_closed_one_is() {
        let (here, there) = UnixStream::pair().unwrap();
        while send(&here, &[0; 4096], &[], SendFlags::DONTWAIT).is_ok() {}
        let mut outgoing = Outgoing::new(&[1], &[]);
        outgoing.send_some(&here).unwrap();
        assert!(!outgoing.is_sent());
        drop(there);
        assert!(matches!(outgoing.send_some(&here), Err(FrameError::Closed { bytes: 0 })));
    }
}
