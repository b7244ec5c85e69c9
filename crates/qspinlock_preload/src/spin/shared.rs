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

use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use qspinlock::FOREIGN;

use crate::thread::keeping_errno;

const HELD: u32 = FOREIGN | 1;
const WANTED: u32 = FOREIGN | 2;
/// Looks before it sleeps, with pauses of 1, 2, 4, … hints between them.
const LOOKS: u32 = 10;

#[repr(transparent)]
pub(crate) struct SharedSpin(AtomicU32);

impl SharedSpin {
    pub(crate) const FREE: u32 = FOREIGN;

    pub(crate) fn is_held(&self) -> bool {
        self.0.load(Relaxed) != Self::FREE
    }

    #[inline]
    pub(crate) fn try_acquire(&self) -> bool {
        // Acquire pairs with the release in `release`.
        self.0.compare_exchange(Self::FREE, HELD, Acquire, Relaxed).is_ok()
    }

    #[inline]
    pub(crate) fn acquire(&self) {
        if !self.try_acquire() && !self.look_and_take() {
            keeping_errno(|| self.sleep_and_take());
        }
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

    /// False if nobody holds it.
    #[inline]
    pub(crate) fn release(&self) -> bool {
        if !self.is_held() {
            return false;
        }
        // Release pairs with the acquires above.
        if self.0.swap(Self::FREE, Release) == WANTED {
            futex(&self.0, libc::FUTEX_WAKE, 1);
        }
        true
    }
}

/// Not private: the sleepers may be another process's.
fn futex(word: &AtomicU32, operation: i32, value: u32) {
    let no_timeout = std::ptr::null::<libc::timespec>();
    // SAFETY: `word` lives through a wait; a wake only compares the address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, no_timeout) };
}
