//! One `sendmsg` or `recvmsg` call with file descriptors.
//!
//! - The buffer holds as many descriptors as the kernel passes at once, so that the kernel never closes any on the
//!   receiving thread for lack of room.
//! - Every received descriptor is close-on-exec, and has an owner as soon as it arrives.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Maximum number of descriptors that the kernel passes at once (unix(7)).
pub const SCM_MAX_FD: usize = 253;

/// The result of one [`receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Number of bytes received; 0 if the connection ended.
    pub bytes: usize,
    /// The datagram was longer than the buffer.
    pub truncated: bool,
    /// The kernel closed descriptors, because this process cannot hold any more.
    pub fds_lost: bool,
}

/// Sends as many of `bytes` as the socket takes, and copies of `fds`. Never raises SIGPIPE.
///
/// # Errors
/// `sendmsg`'s, except `EINTR`; `EINVAL` for more than [`SCM_MAX_FD`] descriptors.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let (slices, flags) = ([IoSlice::new(bytes)], flags | SendFlags::NOSIGNAL);
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(&socket, &slices, &mut ancillary, flags))
}

/// Makes one call that receives at most `out.len()` bytes. `take` gets each descriptor that arrives, in order, even an
/// unexpected one.
///
/// # Errors
/// `recvmsg`'s, except `EINTR`.
pub fn receive(
    socket: impl AsFd,
    out: &mut [u8],
    flags: RecvFlags,
    take: impl FnMut(OwnedFd),
) -> Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let (mut slices, flags) = ([IoSliceMut::new(out)], flags | RecvFlags::CMSG_CLOEXEC);
    let received =
        rustix::io::retry_on_intr(|| rustix::net::recvmsg(&socket, &mut slices, &mut ancillary, flags))?;
    let fds = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    fds.flatten().for_each(take);
    Ok(Received {
        bytes: received.bytes,
        truncated: received.flags.contains(ReturnFlags::TRUNC),
        fds_lost: received.flags.contains(ReturnFlags::CTRUNC),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use rustix::io::{FdFlags, fcntl_getfd};

    use super::*;

    fn inode(fd: impl AsFd) -> u64 {
        rustix::fs::fstat(fd).unwrap().st_ino
    }

    #[test]
    fn as_many_descriptors_as_the_kernel_passes_arrive_in_order_and_close_on_exec() {
        let (here, there) = UnixStream::pair().unwrap();
        let files: Vec<_> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
        let fds: Vec<_> = files.iter().cycle().take(SCM_MAX_FD).map(AsFd::as_fd).collect();
        assert_eq!(send(&here, &[7], &fds, SendFlags::empty()), Ok(1));
        let (mut bytes, mut passed) = ([0; 2], Vec::new());
        let received = receive(&there, &mut bytes, RecvFlags::empty(), |fd| passed.push(fd)).unwrap();
        assert_eq!(received, Received { bytes: 1, truncated: false, fds_lost: false });
        assert_eq!(passed.iter().map(inode).collect::<Vec<_>>(), fds.iter().map(inode).collect::<Vec<_>>());
        assert!(passed.iter().all(|fd| fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC)));
    }

    #[test]
    fn one_descriptor_more_is_refused_before_anything_is_sent() {
        let (here, there) = UnixStream::pair().unwrap();
        let fds = vec![here.as_fd(); SCM_MAX_FD + 1];
        assert_eq!(send(&here, &[7], &fds, SendFlags::empty()), Err(Errno::INVAL));
        let nothing = receive(&there, &mut [0], RecvFlags::DONTWAIT, |_| panic!("a descriptor"));
        assert_eq!(nothing, Err(Errno::AGAIN));
    }

    #[test]
    fn peer_that_is_gone_is_an_error_without_a_signal_and_then_an_end() {
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        assert_eq!(send(&here, &[7], &[], SendFlags::empty()), Err(Errno::PIPE));
        let end = receive(&here, &mut [0], RecvFlags::empty(), drop).unwrap();
        assert_eq!(end.bytes, 0);
    }

    #[test]
    fn datagram_that_is_longer_than_the_buffer_is_reported_as_cut() {
        let (here, there) = UnixDatagram::pair().unwrap();
        send(&here, &[7; 3], &[], SendFlags::empty()).unwrap();
        let received = receive(&there, &mut [0; 2], RecvFlags::empty(), drop).unwrap();
        assert!(received.truncated && !received.fds_lost, "{received:?}");
    }
}
