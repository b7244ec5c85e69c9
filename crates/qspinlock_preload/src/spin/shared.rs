//! A spin lock between processes: no queue, because nodes are a process's own, and no memory but its word.
//!
//! ```text
//! FREE ─▶ HELD ─▶ WANTED (held, and somebody may sleep) ─▶ FREE, and one is woken
//! ```
//!
//! Who wants it looks for a while, less and less often, then sleeps on the word itself; who has slept takes it as
//! `WANTED`, because others may sleep still. Not fair. A process that dies with it leaves it held, as with glibc's.
//!
//! Not here: how it is told apart from a private one (`spin.rs`).

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
/// Looks before it sleeps, with pauses of 1, 2, 4, … hints between them.
const LOOKS: u32 = 10;

#[repr(transparent)]
pub(super) struct SharedSpin(AtomicU32);

impl SharedSpin {
    pub(super) const FREE: u32 = FOREIGN;

    pub(super) fn is_held(&self) -> bool {
        self.0.load(Relaxed) != Self::FREE
    }

    /// Without an end or not at all: spin locks cannot be timed.
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
        // Acquire, as in `try_acquire`. The exchange comes before each sleep: who unlocks after it sees that somebody
        // may sleep, and who unlocked before it makes this thread the holder.
        while self.0.swap(WANTED, Acquire) != Self::FREE {
            futex(&self.0, libc::FUTEX_WAIT, WANTED);
        }
    }

    /// `EPERM` if nobody holds it.
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

/// Not private: the sleepers may be another process's.
fn futex(word: &AtomicU32, operation: i32, value: u32) {
    let no_timeout = std::ptr::null::<libc::timespec>();
    // SAFETY: `word` lives through a wait; a wake only compares the address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, no_timeout) };
}
