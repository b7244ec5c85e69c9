//! The calling thread's identity, and its `errno`.
//!
//! See also: nodes of threads (`qspinlock::Linux`).

use std::ffi::c_int;

/// The address of the thread's control block: unique among living threads, and never 0.
///
/// Unlike the kernel's thread id, it stays the same in a forked child, so a child can unlock what
/// `pthread_atfork` handlers locked before the fork. Reading it costs one instruction.
#[inline]
pub(crate) fn current() -> usize {
    let thread: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the x86-64 ABI keeps the control block's own address in its first word; only that is read.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) thread, options(nostack, preserves_flags, readonly, pure));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: reads the thread register, which user space may read.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) thread, options(nostack, preserves_flags, nomem, pure));
    }
    thread
}

/// Runs `body` and restores `errno`: programs read it after pthread calls.
///
/// Uses no guard with a destructor, because threads may be cancelled inside `body`.
pub(crate) fn keeping_errno<R>(body: impl FnOnce() -> R) -> R {
    let before = errno();
    let result = body();
    set_errno(before);
    result
}

pub(crate) fn errno() -> c_int {
    // SAFETY: takes no arguments; the pointer stays valid as long as this thread lives.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { *place }
}

fn set_errno(value: c_int) {
    // SAFETY: takes no arguments; the pointer stays valid as long as this thread lives.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { *place = value };
}
