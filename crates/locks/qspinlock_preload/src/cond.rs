//! `pthread_cond_*`: a list of waiters, each asleep on its own stack.
//!
//! ```text
//! word     0      1       2 3      4 5      6       7     8   9     10 11
//!         | lock | epoch | oldest | newest | clock | zero | – | zero | owing |     all zero: the static initialiser
//! ```
//!
//! `wait: join the list → unlock the mutex → sleep until posted → lock the mutex`
//! `signal: remove the oldest from the list (broadcast: all) → post`
//!
//! Why no wake is lost:
//! 1. A waiter is in the list before it unlocks the mutex. A thread that changes the condition with the mutex
//!    held, and signals then or later, finds the waiter in the list (the mutex orders its lookup after the
//!    insertion).
//! 2. A signal picks the oldest waiter in the list, so never one that came after the signal. Unlike with futexes
//!    and counters, a later waiter cannot take the wake of an earlier one.
//! 3. A waiter is either picked, or leaves because it timed out or was cancelled: one compare-exchange on its
//!    own word decides. A picked waiter is posted exactly once and leaves only after it has taken the post,
//!    even if it times out meanwhile (then it returns as woken) or is cancelled; until then its stack, which
//!    holds the list's node, stays valid.
//! 4. If a signal picked a waiter while others waited, and that waiter is cancelled, it passes the signal on.
//!
//! When the variable may be destroyed: as soon as all waiters are picked, as POSIX requires.
//! - A waiter that was picked by a broadcast, or as the only waiter, never touches the variable again, not even
//!   to find out that it was picked.
//! - A waiter that leaves is still in the list until it has removed itself; destroying waits for that.
//! - A waiter that a signal picked from several may have to pass the signal on, which is not known before it
//!   runs. So it is counted in `owing` until its last access to the variable, and destroying waits for that,
//!   too. Destroying never waits for the mutex.
//!
//! Words 7 and 9 stay zero: glibc has its "process-shared" flag in the lowest bit of one of them (9 before
//! 2.41, 7 since). If this flag is set, the C library manages the condition variable, and this library forwards
//! calls on it. Such variables work only with mutexes that the C library operates, too (`EINVAL` with others); this
//! library's condition variables work with any mutex.
//!
//! See also: the list (`cond/waiters.rs`), sleeping and cancellation (`cond/waiter.rs`).

mod owing;
mod waiter;
mod waiters;

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use libc::{EBUSY, EINVAL, ENOTSUP, ETIMEDOUT};
use libc::{clockid_t, pthread_cond_t, pthread_condattr_t, pthread_mutex_t, timespec};
use qspinlock::Clock;

use crate::mutex::Mutex;
use crate::patience::{Patience, Time};
use crate::real;
use owing::Owing;
use waiter::{Cleanup, Picked, Waiter, cancelled_only_asleep};
use waiters::Waiters;

/// A `pthread_cond_t`.
#[repr(C)]
pub(crate) struct Cond {
    waiters: Waiters,
    /// The clock of the timeouts: [`MONOTONIC`], otherwise the date.
    clock: AtomicU32,
    shared_since_2_41: AtomicU32,
    _unused: AtomicU32,
    shared_before_2_41: AtomicU32,
    owing: Owing,
}

const _: () = assert!(size_of::<Cond>() == size_of::<pthread_cond_t>());
const _: () = assert!(align_of::<Cond>() <= align_of::<pthread_cond_t>());
const _: () = assert!(std::mem::offset_of!(Cond, shared_since_2_41) == 28);
const _: () = assert!(std::mem::offset_of!(Cond, shared_before_2_41) == 36);

const SHARED: u32 = 1;
const MONOTONIC: u32 = 1;

impl Cond {
    /// # Safety
    /// `cond` points to a condition variable, initialised by either library or statically, for as long as the
    /// reference is used.
    #[inline]
    pub(crate) unsafe fn of<'a>(cond: *mut pthread_cond_t) -> &'a Self {
        // SAFETY: 1. the caller promises that; 2. size and alignment fit (above), and all fields are
        // atomics, for which any bytes are valid, and which may change behind a shared reference.
        unsafe { &*cond.cast::<Self>() }
    }

    fn raw(&self) -> *mut pthread_cond_t {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// Whether the C library operates this condition variable.
    #[inline]
    fn is_passed(&self) -> bool {
        (self.shared_since_2_41.load(Relaxed) | self.shared_before_2_41.load(Relaxed)) & SHARED != 0
    }

    fn clock_id(&self) -> clockid_t {
        if self.clock.load(Relaxed) == MONOTONIC { libc::CLOCK_MONOTONIC } else { libc::CLOCK_REALTIME }
    }

    /// Initialises the variable like the static initialiser, except for the clock.
    pub(crate) fn reset(&self, clock: Clock) {
        // SAFETY: only the initialising thread uses the variable, and zeros are valid for all fields.
        unsafe { self.raw().write_bytes(0, 1) };
        self.clock.store(u32::from(clock == Clock::Monotonic), Relaxed);
    }

    pub(crate) fn signal(&self) -> c_int {
        if self.is_passed() {
            // SAFETY: the caller guarantees that the object is the C library's.
            return unsafe { real::cond_signal(self.raw()) };
        }
        if let Some(picked) = self.waiters.pick_oldest(|epoch| self.owing.add(epoch)) {
            picked.post();
        }
        0
    }

    pub(crate) fn broadcast(&self) -> c_int {
        if self.is_passed() {
            // SAFETY: the caller guarantees that the object is the C library's.
            return unsafe { real::cond_broadcast(self.raw()) };
        }
        for picked in self.waiters.pick_all() {
            picked.post();
        }
        0
    }

    /// Waits until `until`, or forever. Nothing here has a destructor: threads may be cancelled while they
    /// sleep.
    pub(crate) fn wait(&self, mutex: &Mutex, until: Option<Time>) -> c_int {
        if self.is_passed() {
            return self.wait_passed(mutex, until);
        }
        if let Some(Err(error)) = until.map(|time| time.deadline()) {
            return error;
        }
        cancelled_only_asleep(|| self.wait_in_list(mutex, until))
    }

    fn wait_in_list(&self, mutex: &Mutex, until: Option<Time>) -> c_int {
        let waiter = Waiter::new();
        self.waiters.push(&waiter);
        let unlocked = mutex.unlock_before_sleep();
        if unlocked != 0 {
            self.leave(&waiter);
            return unlocked;
        }
        let timed_out = self.sleep(&waiter, mutex, until);
        match mutex.lock(Patience::Woken) {
            0 if timed_out => ETIMEDOUT,
            result => result,
        }
    }

    /// Returns true if the wait ended without the waiter being picked.
    fn sleep(&self, waiter: &Waiter, mutex: &Mutex, until: Option<Time>) -> bool {
        let cancelled = Cancelled { cond: self, mutex, waiter };
        let mut cleanup = Cleanup::new();
        cleanup.push(on_cancel, std::ptr::from_ref(&cancelled).cast_mut().cast());
        let posted = waiter.sleep(until);
        cleanup.pop();
        if posted {
            self.give_word(waiter.how_picked());
        }
        !posted && self.leave(waiter)
    }

    /// Ends a wait that was not posted. Returns false if the waiter was picked meanwhile; it has then taken its post.
    fn leave(&self, waiter: &Waiter) -> bool {
        match self.withdraw(waiter) {
            None => true,
            Some(picked) => {
                self.give_word(picked);
                false
            }
        }
    }

    /// Removes the waiter from the list; if it was picked, takes its post instead.
    fn withdraw(&self, waiter: &Waiter) -> Option<Picked> {
        match waiter.leave() {
            Ok(()) => {
                self.waiters.remove(waiter);
                None
            }
            Err(picked) => {
                waiter.take_post();
                Some(picked)
            }
        }
    }

    /// Makes the waiter's last access to the variable, if the waiter is counted in `owing`.
    #[inline]
    fn give_word(&self, picked: Picked) {
        if picked == Picked::FromSeveral {
            self.owing.take();
        }
    }

    #[cold]
    fn wait_passed(&self, mutex: &Mutex, until: Option<Time>) -> c_int {
        if !mutex.is_passed() {
            return EINVAL; // the C library would misread the mutex's bytes
        }
        let Some(time) = until else {
            // SAFETY: the caller guarantees that both objects are the C library's.
            return unsafe { real::cond_wait(self.raw(), mutex.raw()) };
        };
        // SAFETY: as above; the time is on this stack.
        unsafe { real::cond_clockwait(self.raw(), mutex.raw(), time.clock_id(), &raw const time.at) }
    }

    pub(crate) fn destroy(&self) -> c_int {
        if self.is_passed() {
            // SAFETY: the caller guarantees that the object is the C library's.
            return unsafe { real::cond_destroy(self.raw()) };
        }
        if !self.waiters.settle() {
            return EBUSY;
        }
        self.owing.wait(Waiters::epoch());
        0
    }
}

/// The data that the cleanup of a cancelled wait needs.
struct Cancelled<'a> {
    cond: &'a Cond,
    mutex: &'a Mutex,
    waiter: &'a Waiter,
}

/// The C library calls this while it unwinds a cancelled thread, before the program's own handlers.
unsafe extern "C-unwind" fn on_cancel(cancelled: *mut c_void) {
    // SAFETY: `sleep` pushed it, and its frame still exists.
    let Cancelled { cond, mutex, waiter } = unsafe { &*cancelled.cast::<Cancelled<'_>>() };
    if cond.withdraw(waiter) == Some(Picked::FromSeveral) {
        cond.signal();
        cond.give_word(Picked::FromSeveral);
    }
    mutex.lock(Patience::Woken);
}

// SAFETY (all calls below): the caller keeps POSIX's contract; above all, pointers point to initialised
// objects.

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_cond_init(
    cond: *mut pthread_cond_t,
    attr: *const pthread_condattr_t,
) -> c_int {
    // SAFETY: the caller's memory for a condition variable, with any bytes.
    let made = unsafe { Cond::of(cond) };
    let (mut shared, mut clock) = (libc::PTHREAD_PROCESS_PRIVATE, libc::CLOCK_REALTIME);
    if !attr.is_null() {
        // SAFETY: the caller's attributes, and integers that the call may write to; likewise below.
        unsafe { libc::pthread_condattr_getpshared(attr, &raw mut shared) };
        // SAFETY: as above.
        unsafe { libc::pthread_condattr_getclock(attr, &raw mut clock) };
    }
    if shared == libc::PTHREAD_PROCESS_PRIVATE {
        made.reset(if clock == libc::CLOCK_MONOTONIC { Clock::Monotonic } else { Clock::Realtime });
        return 0;
    }
    // SAFETY: the caller keeps the POSIX contract of this call.
    let result = unsafe { real::cond_init(cond, attr) };
    // Guards against a C library that keeps its flag at an offset unknown to this library.
    if result == 0 && !made.is_passed() { ENOTSUP } else { result }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_cond_destroy(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { Cond::of(cond) }.destroy()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_cond_signal(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { Cond::of(cond) }.signal()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_cond_broadcast(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { Cond::of(cond) }.broadcast()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_cond_wait(
    cond: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    let cond = unsafe { Cond::of(cond) };
    // SAFETY: the caller keeps the POSIX contract of this call.
    cond.wait(unsafe { Mutex::of(mutex) }, None)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_cond_timedwait(
    cond: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    let waited_for = unsafe { Cond::of(cond) };
    // SAFETY: the caller keeps the POSIX contract of this call.
    let mutex_to_unlock = unsafe { Mutex::of(mutex) };
    if waited_for.is_passed() && mutex_to_unlock.is_passed() {
        // Only the C library knows where it stores the variable's clock.
        // SAFETY: the caller guarantees that both objects are the C library's.
        return unsafe { real::cond_timedwait(cond, mutex, at) };
    }
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { pthread_cond_clockwait(cond, mutex, waited_for.clock_id(), at) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_cond_clockwait(
    cond: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
    clock: clockid_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    let time = match unsafe { Time::new(clock, at) } {
        Ok(time) => time,
        Err(error) => return error,
    };
    // SAFETY: the caller keeps the POSIX contract of this call.
    let cond = unsafe { Cond::of(cond) };
    // SAFETY: the caller keeps the POSIX contract of this call.
    cond.wait(unsafe { Mutex::of(mutex) }, Some(time))
}
