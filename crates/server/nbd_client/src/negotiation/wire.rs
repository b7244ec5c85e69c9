//! Sends and receives whole messages on a socket, up to a deadline. Only for negotiation: the engine moves requests.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

/// A socket with a deadline for everything together.
#[derive(Debug)]
pub(crate) struct Wire<'a> {
    socket: BorrowedFd<'a>,
    deadline: Instant,
}

impl<'a> Wire<'a> {
    pub fn new(socket: &'a impl AsFd, timeout: Duration) -> Self {
        Self { socket: socket.as_fd(), deadline: Instant::now() + timeout }
    }

    pub fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match send(self.socket, bytes) {
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    pub fn receive(&self, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match recv(self.socket, &mut *bytes, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((_, received)) => bytes = bytes.get_mut(received..).unwrap_or_default(),
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    pub fn receive_array<const N: usize>(&self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.receive(&mut bytes)?;
        Ok(bytes)
    }

    fn wait(&self, what: PollFlags) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::from_borrowed_fd(self.socket, what)], Some(&timeout)) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Sends what the socket has room for, without waiting. Uses `sendmsg`, because a worker's sandbox allows no other call.
pub(crate) fn send(socket: impl AsFd, bytes: &[u8]) -> rustix::io::Result<usize> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut SendAncillaryBuffer::default(), flags)
}
