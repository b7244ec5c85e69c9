//! Eventfds of a front-end: kick, call and err descriptors, and this process's own wake-ups.
//!
//! Not here: when to signal (`queue.rs`, `session`).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};

/// Prepares a descriptor that a front-end passed: writing to it must never block a worker, whatever it
/// is and whatever its counter holds. Files and devices are refused, because `O_NONBLOCK` means nothing
/// to them: one on a file system in user space could hold a worker, and every disk it serves, for good.
///
/// # Errors
/// `fstat`'s and `fcntl`'s; `InvalidInput` for what is neither an eventfd nor a pipe nor a socket.
pub(crate) fn adopt(fd: OwnedFd) -> std::io::Result<Arc<OwnedFd>> {
    use FileType::{BlockDevice, CharacterDevice, Directory, RegularFile, Symlink};
    let kind = FileType::from_raw_mode(fstat(&fd)?.st_mode); // an eventfd has none
    if matches!(kind, RegularFile | Directory | BlockDevice | CharacterDevice | Symlink) {
        let what = format!("an eventfd is needed, this is a {kind:?}");
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, what));
    }
    let flags = fcntl_getfl(&fd)?;
    if !flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
    }
    Ok(Arc::new(fd))
}

/// Adds one. A counter that is full (2^64 − 2 unread signals) has woken its reader long ago, and a
/// front-end that passed something else than an eventfd hurts itself only: errors have no consequence.
#[inline]
pub(crate) fn signal(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Empties an eventfd that is about to be given back, if it holds anything.
pub(crate) fn drain(fd: impl AsFd) {
    let fd = fd.as_fd();
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let readable = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    if readable.is_ok_and(|count| count == 1) {
        let _ = rustix::io::read(fd, &mut [0u8; 8]);
    }
}
