//! Takes and releases a queued lock for C callers: defines how long a call waits, and which error number it returns.
//!
//! See also: how threads wait (`qspinlock`, `cond/waiter.rs`).

use std::ffi::c_int;

use libc::{EBUSY, EINVAL, EPERM, ETIMEDOUT};
use qspinlock::{Clock, Deadline, Hybrid, Policy, PvQSpinLock};

use crate::thread::keeping_errno;

/// The lock inside spin locks and mutexes.
pub(crate) type Lock = PvQSpinLock<Hybrid>;

const NS_PER_S: i64 = 1_000_000_000;

/// How long a call waits.
#[derive(Clone, Copy)]
pub(crate) enum Patience {
    /// The call waits until it has the lock.
    Endless,
    /// The call waits until it has the lock, and its thread was just woken by another thread. The other thread may
    /// still hold the lock and need this thread's processor to release it, so this thread soon sleeps again.
    Woken,
    /// The call does not wait.
    None,
    /// The call waits until a clock reading.
    Until(Time),
}

/// A clock and its reading, as the caller passed them.
#[derive(Clone, Copy)]
pub(crate) struct Time {
    pub(crate) clock: Clock,
    pub(crate) at: libc::timespec,
}

impl Time {
    /// # Errors
    /// `EINVAL` for a clock that locks do not support.
    ///
    /// # Safety
    /// `at` points to a timespec.
    pub(crate) unsafe fn new(clock: libc::clockid_t, at: *const libc::timespec) -> Result<Self, c_int> {
        let clock = clock_of(clock)?;
        // SAFETY: the caller keeps this function's contract, which is that of the call.
        Ok(Self { clock, at: unsafe { *at } })
    }

    /// # Errors
    /// `EINVAL` for an invalid time.
    pub(crate) fn deadline(&self) -> Result<Deadline, c_int> {
        if !(0..NS_PER_S).contains(&self.at.tv_nsec) {
            return Err(EINVAL);
        }
        let ns = self.at.tv_sec.saturating_mul(NS_PER_S).saturating_add(self.at.tv_nsec);
        // A negative time is before the clock's first second, so it has passed.
        Ok(Deadline { clock: self.clock, at_ns: u64::try_from(ns).unwrap_or(0) })
    }

    pub(crate) fn clock_id(&self) -> libc::clockid_t {
        match self.clock {
            Clock::Monotonic => libc::CLOCK_MONOTONIC,
            Clock::Realtime => libc::CLOCK_REALTIME,
        }
    }
}

fn clock_of(clock: libc::clockid_t) -> Result<Clock, c_int> {
    match clock {
        libc::CLOCK_MONOTONIC => Ok(Clock::Monotonic),
        libc::CLOCK_REALTIME => Ok(Clock::Realtime),
        _ => Err(EINVAL),
    }
}

/// Takes `lock`, or returns the error. Checks the time only if it has to wait, as POSIX allows.
#[inline]
pub(crate) fn take(lock: &Lock, patience: Patience) -> c_int {
    if lock.try_acquire_unwanted() {
        return 0;
    }
    take_slowly(lock, patience)
}

#[cold]
#[inline(never)]
pub(crate) fn take_slowly(lock: &Lock, patience: Patience) -> c_int {
    match patience {
        Patience::None if lock.try_acquire() => 0,
        Patience::None => EBUSY,
        Patience::Endless => {
            keeping_errno(|| lock.acquire());
            0
        }
        Patience::Woken => {
            keeping_errno(|| as_woken(lock).acquire());
            0
        }
        Patience::Until(time) => match time.deadline() {
            _ if lock.try_acquire() => 0,
            Err(error) => error,
            Ok(deadline) if keeping_errno(|| lock.acquire_before(deadline)) => 0,
            Ok(_) => ETIMEDOUT,
        },
    }
}

/// [`Hybrid`], except for how long a waiter polls before it sleeps.
struct Woken;

impl Policy for Woken {
    const SLEEPS: bool = Hybrid::SLEEPS;
    const PASS_LIMIT: u32 = Hybrid::PASS_LIMIT;
    const SERVES_THE_AWAKE: bool = Hybrid::SERVES_THE_AWAKE;
    const NEWCOMER_LOOKS: u32 = 1;
    const WAITER_LOOKS: u32 = 1;
    const WAITER_LOOKS_BEHIND_A_SLEEPER: u32 = 1;
    const HEIR_LOOKS: u32 = 1;
}

/// The same lock for a thread that waits differently. Policies are code, not data: how long a waiter polls
/// affects only that waiter; everything that affects other threads is equal in both policies.
fn as_woken(lock: &Lock) -> &PvQSpinLock<Woken> {
    // SAFETY: a lock is one atomic word, whatever the policy (`repr(transparent)`), and this is the same
    // lock.
    unsafe { &*std::ptr::from_ref(lock).cast() }
}

/// Releases `lock`, whichever thread holds it; `EPERM` if none does.
///
/// # Safety
/// The program asserts that the calling thread may release it.
#[inline]
pub(crate) unsafe fn release(lock: &Lock) -> c_int {
    // SAFETY: the caller promises that; if the lock is not held, nothing happens.
    if unsafe { lock.try_release_unwanted() } {
        return 0;
    }
    // SAFETY: the caller keeps this function's contract, which is that of the call.
    unsafe { release_slowly(lock) }
}

/// # Safety
/// The contract of [`release`] applies.
#[cold]
#[inline(never)]
pub(crate) unsafe fn release_slowly(lock: &Lock) -> c_int {
    if !lock.is_held() {
        return EPERM;
    }
    // SAFETY: it is held, and the caller may release it.
    unsafe { lock.release() };
    0
}

/// [`release`] for a thread that is going to sleep: the oldest waiter gets the lock at once. Few threads could
/// pass this waiter meanwhile, and a thread that backs off because the lock is busy would wait for nothing.
///
/// # Safety
/// The contract of [`release`] applies.
pub(crate) unsafe fn release_fairly(lock: &Lock) -> c_int {
    if !lock.is_held() {
        return EPERM;
    }
    // SAFETY: it is held, and the caller may release it.
    unsafe { lock.release_fairly() };
    0
}
