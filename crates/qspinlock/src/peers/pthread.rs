//! The C library's mutex and spinlock.
//!
//! - Both lie in place, in their static form, as a C program's global would. POSIX does not allow to move one. On Linux
//!   (glibc, musl) a spinlock is one integer and a normal mutex a few of them and the owner's thread number: neither
//!   holds its own address or another's, there is nothing to be freed, and a lock that is moved is borrowed by nobody,
//!   so nobody waits on its old place. A robust or priority-inheriting mutex would be in a list of its owner's; these
//!   are neither.
//!
//! Not here: mutexes of other kinds, time limits.

use core::cell::UnsafeCell;
use core::fmt;

use super::OwnThread;

/// `pthread_mutex_t`, normal and private, as `PTHREAD_MUTEX_INITIALIZER` makes it.
pub struct PthreadMutex(UnsafeCell<libc::pthread_mutex_t>);

/// `pthread_spinlock_t`, private.
pub struct PthreadSpin(UnsafeCell<libc::pthread_spinlock_t>);

/// What `pthread_spin_init` stores: POSIX has no static form. A test compares.
const UNLOCKED: libc::pthread_spinlock_t =
    if cfg!(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "x86"))) { 1 } else { 0 };

// SAFETY: the C library's functions are made to be called from several threads with one lock.
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

// SAFETY: 1. exclusion and ordering are POSIX's; 2. guards stay with their thread, as a mutex with an owner asks;
// 3. moving and dropping: see the file's head; 4. nothing unwinds. A normal mutex's `lock` cannot fail: it has no
// priority ceiling, and locking it twice in one thread waits for ever.
unsafe impl lock_api::RawMutex for PthreadMutex {
    #[allow(clippy::declare_interior_mutable_const)] // as the trait has it
    const INIT: Self = Self(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER));

    type Guard = OwnThread;

    #[inline]
    fn lock(&self) -> OwnThread {
        // SAFETY: initialised by `INIT`, and borrowed as long as the call lasts.
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
        // SAFETY: as in `lock`; the caller holds it, and is the thread that locked it: the state did not leave it.
        unsafe { libc::pthread_mutex_unlock(self.0.get()) };
    }

    /// Takes the lock for a moment to find out, so that another thread's `try_lock` may fail because of it.
    fn is_locked(&self) -> bool {
        let state = self.try_lock();
        // SAFETY: acquired in the line before.
        state.map(|state| unsafe { self.unlock(state) }).is_none()
    }
}

// SAFETY: as for `PthreadMutex`.
unsafe impl lock_api::RawMutex for PthreadSpin {
    #[allow(clippy::declare_interior_mutable_const)] // as the trait has it
    const INIT: Self = Self(UnsafeCell::new(UNLOCKED));

    type Guard = OwnThread;

    #[inline]
    fn lock(&self) -> OwnThread {
        // SAFETY: initialised by `INIT`, and borrowed as long as the call lasts.
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

    /// Takes the lock for a moment to find out, so that another thread's `try_lock` may fail because of it.
    fn is_locked(&self) -> bool {
        let state = self.try_lock();
        // SAFETY: acquired in the line before.
        state.map(|state| unsafe { self.unlock(state) }).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constant_of_the_spinlock_is_what_the_c_library_stores() {
        let mut word: libc::pthread_spinlock_t = -1;
        // SAFETY: a word to be initialised, which nobody else knows.
        unsafe { libc::pthread_spin_init(&raw mut word, libc::PTHREAD_PROCESS_PRIVATE) };
        assert_eq!(word, UNLOCKED);
    }
}
