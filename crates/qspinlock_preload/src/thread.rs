//! Who the calling thread is, and its `errno`.
//!
//! Not here: nodes of threads (`qspinlock::Linux`).

use std::ffi::c_int;

/// A number that no other thread has at the same time, and that is not 0: where its control block is.
///
/// Unlike the kernel's number it is the same in a forked child, so what `pthread_atfork` locked before the fork can be
/// unlocked after it. Costs one instruction.
#[inline]
pub(crate) fn current() -> usize {
    let thread: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the x86-64 ABI keeps the control block's own address in its first word; only that is read.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) thread, options(nostack, preserves_flags, readonly, pure));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: reads the register of the thread, which user space may.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) thread, options(nostack, preserves_flags, nomem, pure));
    }
    thread
}

/// What `body` does, with `errno` as before: callers of pthread calls look at it after them.
///
/// No guard with a destructor, because threads may be cancelled inside.
pub(crate) fn keeping_errno<R>(body: impl FnOnce() -> R) -> R {
    let before = errno();
    let result = body();
    set_errno(before);
    result
}

pub(crate) fn errno() -> c_int {
    // SAFETY: takes nothing; where it points to is this thread's as long as it lives.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { *place }
}

fn set_errno(value: c_int) {
    // SAFETY: takes nothing; where it points to is this thread's as long as it lives.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { *place = value };
}
