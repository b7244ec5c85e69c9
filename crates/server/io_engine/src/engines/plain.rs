//! Makes one call immediately, on the current thread, for engines without a kernel queue.

use std::os::fd::RawFd;

use rustix::io::Errno;

use crate::backend::{Buffers, Call, Verb};

/// Makes the call and returns a byte count, 0, or a negated errno. Adds `extra_flags` (`RWF_*`) to those of a read or
/// write.
///
/// # Safety
/// The memory that `call.buffers` points to must stay allocated during the call, and no other code may rely on its
/// contents.
pub(crate) unsafe fn execute(fd: RawFd, call: &Call, extra_flags: i32) -> i32 {
    let flags = call.flags | extra_flags;
    #[allow(clippy::cast_possible_wrap)] // file offsets and lengths are below 2^63
    let (offset, length) = (call.offset_bytes as i64, call.len_bytes as i64);
    let one;
    let (first, count) = match call.buffers {
        Buffers::None => (std::ptr::null(), 0),
        Buffers::One { base, len_bytes } => {
            one = libc::iovec { iov_base: base.cast(), iov_len: len_bytes as usize };
            (&raw const one, 1)
        }
        #[allow(clippy::cast_possible_wrap)] // at most 1024
        Buffers::Many { first, count } => (first, count as i32),
    };
    let result = match call.verb {
        // SAFETY: 1. array and buffers: the caller guarantees them, and `one` lives until the end of this function.
        Verb::Read => unsafe { libc::preadv2(fd, first, count, offset, flags) },
        // SAFETY: as above.
        Verb::Write => unsafe { libc::pwritev2(fd, first, count, offset, flags) },
        // SAFETY: 1. no memory is involved.
        Verb::Sync => unsafe { libc::fdatasync(fd) as isize },
        // SAFETY: 1. no memory is involved.
        Verb::Allocate => unsafe { libc::fallocate(fd, call.flags, offset, length) as isize },
        Verb::Discard => return -Errno::OPNOTSUPP.raw_os_error(),
    };
    if result < 0 { -last_errno() } else { i32::try_from(result).unwrap_or(i32::MAX) }
}

fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(Errno::IO.raw_os_error())
}
