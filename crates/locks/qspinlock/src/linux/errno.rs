//! Saves the calling thread's `errno` and restores it.
//!
//! pthread functions return their errors and leave `errno` alone, and programs rely on that: they unlock
//! before they read the `errno` of an earlier failure. A lock that sleeps behind another interface, or in a
//! signal handler, must not change it.
//!
//! These locks report no errors through `errno`.

/// Restores `errno` when dropped.
pub(super) struct KeptErrno(pub(super) i32);

impl KeptErrno {
    pub(super) fn new() -> Self {
        // SAFETY: takes no arguments and cannot fail.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: the thread's own cell, which lives as long as the thread.
        Self(unsafe { *errno })
    }
}

impl Drop for KeptErrno {
    fn drop(&mut self) {
        // SAFETY: takes no arguments and cannot fail.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: the thread's own cell, which lives as long as the thread.
        unsafe { *errno = self.0 };
    }
}
