//! `pthread_rwlock_*` on a queued reader/writer lock in the lock's own bytes. Readers are shared.
//!
//! ```text
//! offset   0               8       16    28       32    48      52
//!         | counts, queue | owner | –   | shared | –   | flags | … |      all zero: the static initialiser
//! ```
//!
//! - `shared` and `flags` are at glibc's positions: static initialisers and the C library's
//!   `pthread_rwlock_init` write them. The C library operates process-shared locks.
//! - With the default kinds, a thread may read-lock again while writers wait, as with glibc; so a stream of
//!   readers keeps writers out. With `PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP` all threads wait in line.
//! - `owner` is the writer's thread. A thread that reads its own number there wrote it itself.
//!
//! See also: waiting (`qspinlock`).

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use libc::{EBUSY, EDEADLK, ENOTSUP, EPERM, ETIMEDOUT};
use libc::{clockid_t, pthread_rwlock_t, pthread_rwlockattr_t, timespec};
use qspinlock::{Deadline, QRwLock};

use crate::patience::{Patience, Time};
use crate::thread::keeping_errno;
use crate::{real, thread};

/// A `pthread_rwlock_t`.
#[repr(C)]
struct RwLock {
    lock: QRwLock,
    /// The writer; 0 for none.
    owner: AtomicUsize,
    _reserved: [AtomicU32; 3],
    shared: AtomicU32,
    _padding: [AtomicU32; 4],
    flags: AtomicU32,
    _rest: AtomicU32,
}

const _: () = assert!(std::mem::offset_of!(RwLock, shared) == 28);
const _: () = assert!(std::mem::offset_of!(RwLock, flags) == 48);
const _: () = assert!(size_of::<RwLock>() == size_of::<pthread_rwlock_t>());
const _: () = assert!(align_of::<RwLock>() == align_of::<pthread_rwlock_t>());

/// `PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP`.
const IN_LINE: u32 = 2;

/// The kind of access that a thread requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    /// For a reader that may already be inside.
    ReadAgain,
    Read,
    Write,
}

impl RwLock {
    /// # Safety
    /// `lock` points to a lock, initialised by either library or statically, for as long as the reference is
    /// used.
    #[inline]
    unsafe fn of<'a>(lock: *mut pthread_rwlock_t) -> &'a Self {
        // SAFETY: 1. the caller promises that; 2. size and alignment are the same (above), and all fields
        // are atomics, for which any bytes are valid, and which may change behind a shared reference.
        unsafe { &*lock.cast::<Self>() }
    }

    fn raw(&self) -> *mut pthread_rwlock_t {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// Whether the C library operates this lock.
    #[inline]
    fn is_passed(&self) -> bool {
        self.shared.load(Relaxed) != 0
    }

    #[inline]
    fn is_mine(&self) -> bool {
        self.owner.load(Relaxed) == thread::current()
    }

    #[inline]
    fn read(&self, patience: Patience) -> c_int {
        if self.is_passed() {
            return self.read_passed(patience);
        }
        let access = if self.flags.load(Relaxed) == IN_LINE { Access::Read } else { Access::ReadAgain };
        self.take(access, patience)
    }

    #[inline]
    fn write(&self, patience: Patience) -> c_int {
        if self.is_passed() {
            return self.write_passed(patience);
        }
        let result = self.take(Access::Write, patience);
        if result == 0 {
            self.owner.store(thread::current(), Relaxed);
        }
        result
    }

    #[inline]
    fn take(&self, access: Access, patience: Patience) -> c_int {
        if self.try_take(access) { 0 } else { self.take_slowly(access, patience) }
    }

    #[inline]
    fn try_take(&self, access: Access) -> bool {
        match access {
            Access::ReadAgain => self.lock.try_read_recursive(),
            Access::Read => self.lock.try_read(),
            Access::Write => self.lock.try_write(),
        }
    }

    #[cold]
    #[inline(never)]
    fn take_slowly(&self, access: Access, patience: Patience) -> c_int {
        match patience {
            Patience::None => EBUSY,
            _ if self.is_mine() => EDEADLK,
            Patience::Endless | Patience::Woken => {
                keeping_errno(|| self.wait(access));
                0
            }
            Patience::Until(time) => match time.deadline() {
                Err(error) => error,
                Ok(deadline) if keeping_errno(|| self.wait_until(access, deadline)) => 0,
                Ok(_) => ETIMEDOUT,
            },
        }
    }

    fn wait(&self, access: Access) {
        match access {
            Access::ReadAgain => self.lock.read_recursive(),
            Access::Read => self.lock.read(),
            Access::Write => self.lock.write(),
        }
    }

    fn wait_until(&self, access: Access, deadline: Deadline) -> bool {
        match access {
            Access::ReadAgain => self.lock.read_recursive_before(deadline),
            Access::Read => self.lock.read_before(deadline),
            Access::Write => self.lock.write_before(deadline),
        }
    }

    #[inline]
    fn unlock(&self) -> c_int {
        if self.is_passed() {
            // SAFETY: the caller guarantees that the object is the C library's.
            return unsafe { real::rwlock_unlock(self.raw()) };
        }
        if self.is_mine() {
            self.owner.store(0, Relaxed);
            // SAFETY: this thread holds the lock for writing: it wrote its number after it took the lock.
            unsafe { self.lock.release_write() };
            return 0;
        }
        if !self.lock.is_held() || self.lock.is_held_exclusively() {
            return EPERM; // not held, or held by another thread for writing
        }
        // SAFETY: readers hold the lock. If this thread is not one of them, the program is wrong; the mistake cannot
        // be detected, and acts as if one of the readers had unlocked.
        unsafe { self.lock.release_read() };
        0
    }

    #[cold]
    fn read_passed(&self, patience: Patience) -> c_int {
        let raw = self.raw();
        match patience {
            // SAFETY: the lock is the C library's, as the caller guarantees; here and below.
            Patience::Endless | Patience::Woken => unsafe { real::rwlock_rdlock(raw) },
            // SAFETY: as above.
            Patience::None => unsafe { real::rwlock_tryrdlock(raw) },
            // SAFETY: as above; the time is on this stack.
            Patience::Until(time) => unsafe {
                real::rwlock_clockrdlock(raw, time.clock_id(), &raw const time.at)
            },
        }
    }

    #[cold]
    fn write_passed(&self, patience: Patience) -> c_int {
        let raw = self.raw();
        match patience {
            // SAFETY: the lock is the C library's, as the caller guarantees; here and below.
            Patience::Endless | Patience::Woken => unsafe { real::rwlock_wrlock(raw) },
            // SAFETY: as above.
            Patience::None => unsafe { real::rwlock_trywrlock(raw) },
            // SAFETY: as above; the time is on this stack.
            Patience::Until(time) => unsafe {
                real::rwlock_clockwrlock(raw, time.clock_id(), &raw const time.at)
            },
        }
    }
}

// SAFETY (all calls below): the caller keeps POSIX's contract; above all, `lock` points to an initialised
// lock.

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_rwlock_init(
    lock: *mut pthread_rwlock_t,
    attr: *const pthread_rwlockattr_t,
) -> c_int {
    let (mut shared, mut flags) = (libc::PTHREAD_PROCESS_PRIVATE, 0);
    if !attr.is_null() {
        // SAFETY: the caller's attributes, and integers that the call may write to; likewise below.
        unsafe { libc::pthread_rwlockattr_getpshared(attr, &raw mut shared) };
        // SAFETY: as above.
        unsafe { libc::pthread_rwlockattr_getkind_np(attr, &raw mut flags) };
    }
    // SAFETY: the caller's memory for a lock, with any bytes.
    let made = unsafe { RwLock::of(lock) };
    if shared != libc::PTHREAD_PROCESS_PRIVATE {
        // SAFETY: the caller keeps the POSIX contract of this call.
        let result = unsafe { real::rwlock_init(lock, attr) };
        // Guards against a C library that keeps its flag at an offset unknown to this library.
        return if result == 0 && !made.is_passed() { ENOTSUP } else { result };
    }
    // SAFETY: only the initialising thread uses the lock, and zeros are valid for all of its fields.
    unsafe { lock.write_bytes(0, 1) };
    made.flags.store(flags.unsigned_abs(), Relaxed);
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_rwlock_destroy(lock: *mut pthread_rwlock_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    let destroyed = unsafe { RwLock::of(lock) };
    if destroyed.is_passed() {
        // SAFETY: the caller guarantees that the object is the C library's.
        return unsafe { real::rwlock_destroy(lock) };
    }
    if destroyed.lock.is_held() { EBUSY } else { 0 }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_rwlock_rdlock(lock: *mut pthread_rwlock_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { RwLock::of(lock) }.read(Patience::Endless)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_rwlock_tryrdlock(lock: *mut pthread_rwlock_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { RwLock::of(lock) }.read(Patience::None)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_rwlock_timedrdlock(
    lock: *mut pthread_rwlock_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { pthread_rwlock_clockrdlock(lock, libc::CLOCK_REALTIME, at) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_rwlock_clockrdlock(
    lock: *mut pthread_rwlock_t,
    clock: clockid_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    match unsafe { Time::new(clock, at) } {
        // SAFETY: the caller keeps the POSIX contract of this call.
        Ok(time) => unsafe { RwLock::of(lock) }.read(Patience::Until(time)),
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_rwlock_wrlock(lock: *mut pthread_rwlock_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { RwLock::of(lock) }.write(Patience::Endless)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_rwlock_trywrlock(lock: *mut pthread_rwlock_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { RwLock::of(lock) }.write(Patience::None)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_rwlock_timedwrlock(
    lock: *mut pthread_rwlock_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { pthread_rwlock_clockwrlock(lock, libc::CLOCK_REALTIME, at) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_rwlock_clockwrlock(
    lock: *mut pthread_rwlock_t,
    clock: clockid_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    match unsafe { Time::new(clock, at) } {
        // SAFETY: the caller keeps the POSIX contract of this call.
        Ok(time) => unsafe { RwLock::of(lock) }.write(Patience::Until(time)),
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_rwlock_unlock(lock: *mut pthread_rwlock_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { RwLock::of(lock) }.unlock()
}
