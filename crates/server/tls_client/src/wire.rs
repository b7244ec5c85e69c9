//! Transfers on sockets that never wait, whatever the socket's mode is: the caller may have other users of the socket.
//!
//! Only `sendmsg` and `recvfrom`, which are on the list of the thread's role.

use std::io::IoSlice;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

/// Sends as much as fits. `None`: nothing fits now.
pub(crate) fn send_some(socket: impl AsFd, bytes: &[u8]) -> Result<Option<usize>, Errno> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    unless_it_waits(|| sendmsg(&socket, &[IoSlice::new(bytes)], &mut SendAncillaryBuffer::default(), flags))
}

/// Receives what is there; 0 is the end of the stream. `None`: nothing is there now.
pub(crate) fn receive_some(socket: impl AsFd, room: &mut [u8]) -> Result<Option<usize>, Errno> {
    unless_it_waits(|| recv(&socket, &mut *room, RecvFlags::DONTWAIT).map(|(count, _)| count))
}

fn unless_it_waits(mut transfer: impl FnMut() -> Result<usize, Errno>) -> Result<Option<usize>, Errno> {
    loop {
        match transfer() {
            Ok(count) => return Ok(Some(count)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}
