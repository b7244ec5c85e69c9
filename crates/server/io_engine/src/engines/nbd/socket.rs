//! `sendmsg` and `recvmsg` on guest memory, without waiting.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;

/// Maximum number of pieces in one call (`UIO_MAXIOV`).
pub(super) const MAX_PIECES: usize = 1024;

/// Sends the pieces. Returns the number of bytes that the kernel took.
///
/// # Safety
/// Each piece must be mapped and readable, or registered with the SIGBUS handler as guest memory is.
pub(super) unsafe fn send(socket: &OwnedFd, pieces: &mut [libc::iovec]) -> Result<usize, Errno> {
    let message = message(pieces);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: 1. the message points to `pieces`, which outlive the call; 2. the caller guarantees the pieces.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
    usize::try_from(sent).map_err(|_| latest_errno())
}

/// Receives into the pieces. Returns the number of bytes; 0: the peer has ended the connection.
///
/// # Safety
/// Each piece must be mapped and writable, and no reference in this program may point to it.
pub(super) unsafe fn receive(socket: &OwnedFd, pieces: &mut [libc::iovec]) -> Result<usize, Errno> {
    let mut message = message(pieces);
    // SAFETY: 1. the message points to `pieces`, which outlive the call; 2. the caller guarantees the pieces.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    usize::try_from(received).map_err(|_| latest_errno())
}

fn message(pieces: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: 1. all zeroes are a valid `msghdr`: no name, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    message
}

fn latest_errno() -> Errno {
    let error = std::io::Error::last_os_error();
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
