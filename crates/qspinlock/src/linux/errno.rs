//! `errno` of the calling thread, as it was before.
//!
//! Functions of pthreads return their errors and leave `errno` alone, and programs rely on it: they unlock before they
//! look at what went wrong. A lock that sleeps below another interface must not spoil that, nor a handler of signals.
//!
//! Not here: errors of ours, of which there are none.

/// Puts `errno` back when dropped.
pub(super) struct KeptErrno(pub(super) i32);

impl KeptErrno {
    pub(super) fn new() -> Self {
        // SAFETY: takes nothing and cannot fail.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: the thread's own cell, which lives as long as the thread.
        Self(unsafe { *errno })
    }
}

impl Drop for KeptErrno {
    fn drop(&mut self) {
        // SAFETY: takes nothing and cannot fail.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: the thread's own cell, which lives as long as the thread.
        unsafe { *errno = self.0 };
    }
}
