//! `pthread_mutex_*` on a queued lock in the mutex's own bytes.
//!
//! ```text
//! offset   0      4       8       16     20           40 (aarch64: 48)
//!         | lock | count | owner | kind | not used … |       all zero: the static initialiser of a plain mutex
//! ```
//!
//! - `kind` is at glibc's position, because static initialisers and the C library's `pthread_mutex_init`
//!   write it. Bits beyond the four kinds (robust, priorities, process-shared) mean that the C library operates
//!   the mutex.
//! - Only recursive and error-checking mutexes use `owner` and `count`. A thread that reads its own number in
//!   `owner` wrote it itself, so it can read `owner` without the lock.
//!
//! See also: waiting (`patience.rs`, `qspinlock`), condition variables (`cond.rs`).

use std::ffi::c_int;
use std::sync::atomic::{
    AtomicI32, AtomicU32, AtomicUsize,
    Ordering::{Relaxed, Release},
};

use libc::{EAGAIN, EBUSY, EDEADLK, EINVAL, ENOTSUP, EPERM};
use libc::{clockid_t, pthread_mutex_t, pthread_mutexattr_t, timespec};

use crate::patience::{Lock, Patience, Time, release, release_fairly, take};
use crate::{real, thread};

const REST_BYTES: usize = size_of::<pthread_mutex_t>() - 20;

/// A `pthread_mutex_t`.
#[repr(C)]
pub(crate) struct Mutex {
    lock: Lock,
    /// How often a recursive mutex is locked.
    count: AtomicU32,
    /// The thread that holds a recursive or error-checking mutex; 0 for none.
    owner: AtomicUsize,
    kind: AtomicI32,
    /// The C library's fields, if it operates the mutex.
    _rest: [AtomicU32; REST_BYTES / 4],
}

const _: () = assert!(std::mem::offset_of!(Mutex, kind) == 16 && size_of::<Lock>() == 4);
const _: () = assert!(size_of::<Mutex>() == size_of::<pthread_mutex_t>());
const _: () = assert!(align_of::<Mutex>() == align_of::<pthread_mutex_t>());

/// Bits of `kind` that request or forbid lock elision. Hints only.
const ELISION_BITS: c_int = 256 | 512;
const DESTROYED: c_int = -1;

/// The kind of a mutex.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// "Normal" or "adaptive": does not record its owner.
    Plain,
    Recursive,
    /// "Error-checking".
    Checked,
    /// Robust, with priorities, or process-shared: passed on to the C library.
    Passed,
    Destroyed,
}

impl Mutex {
    /// # Safety
    /// `mutex` points to a mutex, initialised by either library or statically, for as long as the reference
    /// is used.
    #[inline]
    pub(crate) unsafe fn of<'a>(mutex: *mut pthread_mutex_t) -> &'a Self {
        // SAFETY: 1. the caller promises that; 2. size and alignment are the same (above), and all fields
        // are atomics, for which any bytes are valid, and which may change behind a shared reference.
        unsafe { &*mutex.cast::<Self>() }
    }

    /// The pointer for the C library.
    pub(crate) fn raw(&self) -> *mut pthread_mutex_t {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    #[inline]
    fn kind(&self) -> Kind {
        match self.kind.load(Relaxed) & !ELISION_BITS {
            libc::PTHREAD_MUTEX_NORMAL | libc::PTHREAD_MUTEX_ADAPTIVE_NP => Kind::Plain,
            libc::PTHREAD_MUTEX_RECURSIVE => Kind::Recursive,
            libc::PTHREAD_MUTEX_ERRORCHECK => Kind::Checked,
            kind if kind == DESTROYED & !ELISION_BITS => Kind::Destroyed,
            _ => Kind::Passed,
        }
    }

    /// Whether the kind is normal, by far the most frequent kind. Needs a single comparison.
    #[inline]
    fn is_default(&self) -> bool {
        self.kind.load(Relaxed) == libc::PTHREAD_MUTEX_NORMAL
    }

    /// Whether the C library operates this mutex.
    pub(crate) fn is_passed(&self) -> bool {
        self.kind() == Kind::Passed
    }

    #[inline]
    pub(crate) fn lock(&self, patience: Patience) -> c_int {
        if self.is_default() && self.lock.try_acquire_unwanted() {
            return 0;
        }
        match patience {
            Patience::Endless => self.lock_other_endlessly(),
            _ => self.lock_other(patience),
        }
    }

    /// A separate function, because preparing a `Patience` for a call stores to memory before the exchange,
    /// which waits for that store.
    #[inline(never)]
    fn lock_other_endlessly(&self) -> c_int {
        self.lock_other(Patience::Endless)
    }

    #[inline(never)]
    fn lock_other(&self, patience: Patience) -> c_int {
        match (self.kind(), patience) {
            (Kind::Plain, _) => take(&self.lock, patience),
            (Kind::Passed, _) => self.lock_passed(patience),
            (Kind::Destroyed, _) => EINVAL,
            (Kind::Recursive, _) if self.is_mine() => self.lock_again(),
            (Kind::Checked, Patience::None) if self.is_mine() => EBUSY,
            (Kind::Checked, _) if self.is_mine() => EDEADLK,
            _ => self.lock_as_owner(patience),
        }
    }

    #[inline]
    fn is_mine(&self) -> bool {
        self.owner.load(Relaxed) == thread::current()
    }

    fn lock_again(&self) -> c_int {
        let Some(more) = self.count.load(Relaxed).checked_add(1) else { return EAGAIN };
        self.count.store(more, Relaxed);
        0
    }

    #[inline]
    fn lock_as_owner(&self, patience: Patience) -> c_int {
        let result = take(&self.lock, patience);
        if result == 0 {
            self.owner.store(thread::current(), Relaxed);
            self.count.store(1, Relaxed);
        }
        result
    }

    #[inline]
    pub(crate) fn unlock(&self) -> c_int {
        // SAFETY: plain mutexes do not know their holder; any thread may claim to be the holder.
        if self.is_default() && unsafe { self.lock.try_release_unwanted() } {
            return 0;
        }
        self.unlock_other(release)
    }

    /// Unlocks before the calling thread sleeps.
    pub(crate) fn unlock_before_sleep(&self) -> c_int {
        self.unlock_other(release_fairly)
    }

    fn unlock_other(&self, release: unsafe fn(&Lock) -> c_int) -> c_int {
        match self.kind() {
            // SAFETY: as above.
            Kind::Plain => unsafe { release(&self.lock) },
            // SAFETY: the caller guarantees that the mutex is the C library's.
            Kind::Passed => unsafe { real::mutex_unlock(self.raw()) },
            Kind::Destroyed => EINVAL,
            _ if !self.is_mine() => EPERM,
            _ => self.unlock_as_owner(release),
        }
    }

    #[inline]
    fn unlock_as_owner(&self, release: unsafe fn(&Lock) -> c_int) -> c_int {
        let left = self.count.load(Relaxed).saturating_sub(1);
        self.count.store(left, Relaxed);
        if left > 0 {
            return 0;
        }
        self.owner.store(0, Relaxed);
        // SAFETY: this thread holds it, as its number in `owner` shows.
        unsafe { release(&self.lock) }
    }

    #[cold]
    fn lock_passed(&self, patience: Patience) -> c_int {
        let raw = self.raw();
        match patience {
            // SAFETY: the mutex is the C library's, as the caller guarantees; here and below.
            Patience::Endless | Patience::Woken => unsafe { real::mutex_lock(raw) },
            // SAFETY: as above.
            Patience::None => unsafe { real::mutex_trylock(raw) },
            // SAFETY: as above; the time is on this stack.
            Patience::Until(time) => unsafe {
                real::mutex_clocklock(raw, time.clock_id(), &raw const time.at)
            },
        }
    }

    /// Initialises the mutex like the static initialisers.
    pub(crate) fn reset(&self, kind: c_int) {
        // SAFETY: only the initialising thread uses the mutex, and zeros are valid for all of its fields.
        unsafe { self.raw().write_bytes(0, 1) };
        self.kind.store(kind, Release); // pairs with whatever the program does to publish the mutex
    }

    pub(crate) fn destroy(&self) -> c_int {
        match self.kind() {
            // SAFETY: the caller guarantees that the mutex is the C library's.
            Kind::Passed => unsafe { real::mutex_destroy(self.raw()) },
            _ if self.lock.is_held() => EBUSY,
            _ => {
                self.kind.store(DESTROYED, Relaxed); // no other thread uses it any more
                0
            }
        }
    }
}

// SAFETY (all calls below): the caller keeps POSIX's contract; above all, `mutex` points to an initialised
// mutex.

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_mutex_init(
    mutex: *mut pthread_mutex_t,
    attr: *const pthread_mutexattr_t,
) -> c_int {
    // SAFETY: the caller's memory for a mutex, with any bytes.
    let made = unsafe { Mutex::of(mutex) };
    if attr.is_null() {
        made.reset(libc::PTHREAD_MUTEX_NORMAL);
        return 0;
    }
    // Only the C library can read attributes. For replaced mutexes it writes zeros and a kind.
    // SAFETY: the caller keeps the POSIX contract of this call.
    let result = unsafe { real::mutex_init(mutex, attr) };
    if result != 0 {
        return result;
    }
    // SAFETY: the caller keeps the POSIX contract of this call.
    if unsafe { is_special(attr) } != made.is_passed() {
        return ENOTSUP; // guards against a C library that encodes kinds in a way unknown to this library
    }
    if !made.is_passed() {
        made.reset(made.kind.load(Relaxed));
    }
    0
}

/// Whether the attributes request a mutex that is not replaced.
///
/// # Safety
/// `attr` points to initialised attributes.
unsafe fn is_special(attr: *const pthread_mutexattr_t) -> bool {
    let (mut shared, mut robust, mut protocol) = (0, 0, 0);
    // SAFETY: the caller's attributes, and integers that the call may write to; likewise below.
    unsafe { libc::pthread_mutexattr_getpshared(attr, &raw mut shared) };
    // SAFETY: as above.
    unsafe { libc::pthread_mutexattr_getrobust(attr, &raw mut robust) };
    // SAFETY: as above.
    unsafe { libc::pthread_mutexattr_getprotocol(attr, &raw mut protocol) };
    (shared, robust, protocol)
        != (libc::PTHREAD_PROCESS_PRIVATE, libc::PTHREAD_MUTEX_STALLED, libc::PTHREAD_PRIO_NONE)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_mutex_destroy(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { Mutex::of(mutex) }.destroy()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_mutex_lock(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { Mutex::of(mutex) }.lock(Patience::Endless)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_mutex_trylock(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { Mutex::of(mutex) }.lock(Patience::None)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_mutex_timedlock(
    mutex: *mut pthread_mutex_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { pthread_mutex_clocklock(mutex, libc::CLOCK_REALTIME, at) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_mutex_clocklock(
    mutex: *mut pthread_mutex_t,
    clock: clockid_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    match unsafe { Time::new(clock, at) } {
        // SAFETY: the caller keeps the POSIX contract of this call.
        Ok(time) => unsafe { Mutex::of(mutex) }.lock(Patience::Until(time)),
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn pthread_mutex_unlock(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { Mutex::of(mutex) }.unlock()
}
