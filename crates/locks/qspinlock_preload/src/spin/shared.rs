//! A spin lock for threads of several processes. It has no queue, because nodes belong to one process, and uses no
//! memory but its word.
//!
//! ```text
//! FREE ─▶ HELD ─▶ WANTED (held, and threads may sleep) ─▶ FREE, and one thread is woken
//! ```
//!
//! A waiter polls for a while, less and less often, then sleeps on the word itself. A thread that has slept
//! takes the lock as `WANTED`, because others may still sleep. The lock is not fair. If a process dies
//! while it holds the lock, the lock stays held, like a spin lock of glibc.
//!
//! See also: how calls tell this lock from a private lock (`spin.rs`).

use std::ffi::c_int;
use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use libc::{EBUSY, EPERM};
use qspinlock::FOREIGN;

use crate::patience::Patience;
use crate::thread::keeping_errno;

const HELD: u32 = FOREIGN | 1;
const WANTED: u32 = FOREIGN | 2;
/// Number of polls before a waiter sleeps, with 1, 2, 4, … spin hints in between.
const LOOKS: u32 = 10;

#[repr(transparent)]
pub(super) struct SharedSpin(AtomicU32);

impl SharedSpin {
    pub(super) const FREE: u32 = FOREIGN;

    pub(super) fn is_held(&self) -> bool {
        self.0.load(Relaxed) != Self::FREE
    }

    /// Waits without a limit or not at all: spin locks have no timed calls.
    pub(super) fn lock(&self, patience: Patience) -> c_int {
        if self.try_acquire() {
            return 0;
        }
        if matches!(patience, Patience::None) {
            return EBUSY;
        }
        if !self.look_and_take() {
            keeping_errno(|| self.sleep_and_take());
        }
        0
    }

    fn try_acquire(&self) -> bool {
        // Acquire pairs with the release in `unlock`.
        self.0.compare_exchange(Self::FREE, HELD, Acquire, Relaxed).is_ok()
    }

    #[cold]
    fn look_and_take(&self) -> bool {
        (0..LOOKS).any(|look| {
            for _ in 0..1 << look {
                std::hint::spin_loop();
            }
            !self.is_held() && self.try_acquire()
        })
    }

    #[cold]
    fn sleep_and_take(&self) {
        // Acquire, as in `try_acquire`. The exchange precedes each sleep: a thread that unlocks after the exchange
        // sees that threads may sleep; if the unlock came before it, this thread becomes the holder.
        while self.0.swap(WANTED, Acquire) != Self::FREE {
            futex(&self.0, libc::FUTEX_WAIT, WANTED);
        }
    }

    /// Returns `EPERM` if no thread holds the lock.
    pub(super) fn unlock(&self) -> c_int {
        if !self.is_held() {
            return EPERM;
        }
        // Release pairs with the acquires above.
        if self.0.swap(Self::FREE, Release) == WANTED {
            futex(&self.0, libc::FUTEX_WAKE, 1);
        }
        0
    }
}

/// A futex that is not private: the sleepers may be in another process.
fn futex(word: &AtomicU32, operation: i32, value: u32) {
    let no_timeout = std::ptr::null::<libc::timespec>();
    // SAFETY: `word` outlives a wait; a wake only compares the address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, no_timeout) };
}
