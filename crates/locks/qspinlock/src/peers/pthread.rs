//! The C library's mutex and spinlock.
//!
//! - Both are stored in place, in their static form, like a C program's global. POSIX does not allow moving
//!   one. On Linux (glibc, musl) a spinlock is one integer, and a normal mutex is a few integers and the
//!   owner's thread id: neither holds its own address or another one, and neither needs to be freed. A lock
//!   that is moved is not borrowed, so no thread waits on its old address. Robust and priority-inheriting
//!   mutexes would be in a list of their owner; these mutexes are neither.
//!
//! Other kinds of mutexes and time limits are not supported.

use core::cell::UnsafeCell;
use core::fmt;

/// State of an acquisition that only the acquiring thread may release.
pub type OwnThread = lock_api::GuardNoSend;

/// `pthread_mutex_t`, normal and private, as `PTHREAD_MUTEX_INITIALIZER` makes it.
pub struct PthreadMutex(UnsafeCell<libc::pthread_mutex_t>);

/// `pthread_spinlock_t`, private.
pub struct PthreadSpin(UnsafeCell<libc::pthread_spinlock_t>);

/// The value that `pthread_spin_init` stores: POSIX has no static initializer. A test compares the two.
const UNLOCKED: libc::pthread_spinlock_t =
    if cfg!(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "x86"))) { 1 } else { 0 };

// SAFETY: the C library's functions may be called from several threads on one lock.
unsafe impl Send for PthreadMutex {}
// SAFETY: as above.
unsafe impl Sync for PthreadMutex {}
// SAFETY: as above.
unsafe impl Send for PthreadSpin {}
// SAFETY: as above.
unsafe impl Sync for PthreadSpin {}

impl fmt::Debug for PthreadMutex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PthreadMutex").finish_non_exhaustive()
    }
}

impl fmt::Debug for PthreadSpin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PthreadSpin").finish_non_exhaustive()
    }
}

// SAFETY: 1. exclusion and ordering are POSIX's; 2. guards stay with their thread, as a mutex with an owner
// requires; 3. moving and dropping: see the file's head; 4. nothing unwinds. `lock` of a normal mutex cannot
// fail: it has no priority ceiling, and relocking it in one thread waits forever.
unsafe impl lock_api::RawMutex for PthreadMutex {
    #[allow(clippy::declare_interior_mutable_const)] // as in the trait
    const INIT: Self = Self(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

    type Guard = OwnThread;

    #[inline]
    fn lock(&self) -> OwnThread {
        // SAFETY: initialised by `INIT`, and borrowed for the whole call.
        unsafe { libc::pthread_mutex_lock(self.0.get()) };
        OwnThread::new()
    }

    #[inline]
    fn try_lock(&self) -> Option<OwnThread> {
        // SAFETY: as in `lock`.
        let result = unsafe { libc::pthread_mutex_trylock(self.0.get()) };
        (result == 0).then_some(OwnThread::new())
    }

    #[inline]
    unsafe fn unlock(&self, _: OwnThread) {
        // SAFETY: as in `lock`; the caller holds it, and is the thread that locked it, which the state cannot leave.
        unsafe { libc::pthread_mutex_unlock(self.0.get()) };
    }

    /// Tries to take the lock to find out, so another thread's `try_lock` may fail because of this call.
    fn is_locked(&self) -> bool {
        let state = self.try_lock();
        // SAFETY: acquired on the line above.
        state.map(|state| unsafe { self.unlock(state) }).is_none()
    }
}

// SAFETY: as for `PthreadMutex`.
unsafe impl lock_api::RawMutex for PthreadSpin {
    #[allow(clippy::declare_interior_mutable_const)] // as in the trait
    const INIT: Self = Self(UnsafeCell::new(UNLOCKED));

    type Guard = OwnThread;

    #[inline]
    fn lock(&self) -> OwnThread {
        // SAFETY: initialised by `INIT`, and borrowed for the whole call.
        unsafe { libc::pthread_spin_lock(self.0.get()) };
        OwnThread::new()
    }

    #[inline]
    fn try_lock(&self) -> Option<OwnThread> {
        // SAFETY: as in `lock`.
        let result = unsafe { libc::pthread_spin_trylock(self.0.get()) };
        (result == 0).then_some(OwnThread::new())
    }

    #[inline]
    unsafe fn unlock(&self, _: OwnThread) {
        // SAFETY: as in `lock`; the caller holds it.
        unsafe { libc::pthread_spin_unlock(self.0.get()) };
    }

    /// Tries to take the lock to find out, so another thread's `try_lock` may fail because of this call.
    fn is_locked(&self) -> bool {
        let state = self.try_lock();
        // SAFETY: acquired on the line above.
        state.map(|state| unsafe { self.unlock(state) }).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constant_of_the_spinlock_is_what_the_c_library_stores() {
        let mut word: libc::pthread_spinlock_t = -1;
        // SAFETY: an uninitialised word that no other thread knows.
        unsafe { libc::pthread_spin_init(&raw mut word, libc::PTHREAD_PROCESS_PRIVATE) };
        assert_eq!(word, UNLOCKED);
    }
}
