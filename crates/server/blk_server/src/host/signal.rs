//! Eventfds: a front-end's kick, call and err descriptors, and this process's own wake-ups.
//!
//! Signalling a front-end may block, so `io_engine::signal_shared` does it.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use guest_mem::PassedFd;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::ReadWriteFlags;

/// Prepares a descriptor that a front-end passed. It must be an eventfd: writing to anything else, or closing it, may
/// block a worker (a full pipe, a socket that lingers, a file on FUSE).
///
/// # Errors
/// `InvalidInput` if the descriptor is not an eventfd; errors of `fcntl`.
pub(crate) fn adopt_passed(fd: PassedFd) -> std::io::Result<PassedFd> {
    prepare(fd.shared())?;
    Ok(fd)
}

/// Like [`adopt_passed`], for the server's own descriptor, which is not charged to a disk.
///
/// # Errors
/// The errors of [`adopt_passed`].
pub(crate) fn adopt(fd: OwnedFd) -> std::io::Result<Arc<OwnedFd>> {
    prepare(&fd)?;
    Ok(Arc::new(fd))
}

fn prepare(fd: &OwnedFd) -> std::io::Result<()> {
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
    let is_eventfd = link.to_bytes().starts_with(b"anon_inode:[eventfd");
    if !is_eventfd {
        let what = format!("the descriptor must be an eventfd, but this is {}", link.to_string_lossy());
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, what));
    }
    let flags = fcntl_getfl(fd)?;
    if !flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
    }
    Ok(())
}

/// Adds one to an eventfd of this process that never blocks. Ignores errors: if the counter is full, the reader has
/// already been woken.
#[inline]
pub(crate) fn signal(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Resets an eventfd before the server returns it to the front-end. Never blocks, whatever the fd's current flags are.
pub(crate) fn drain(fd: impl AsFd) {
    const CURRENT_POSITION: u64 = u64::MAX;
    let mut counter = [0u8; 8];
    let mut slices = [IoSliceMut::new(&mut counter)];
    let _ = rustix::io::preadv2(fd, &mut slices, CURRENT_POSITION, ReadWriteFlags::NOWAIT);
}
