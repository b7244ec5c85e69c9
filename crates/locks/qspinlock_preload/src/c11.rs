//! `mtx_*` and `cnd_*`: C11's names for the same objects.
//!
//! glibc's versions call glibc's own pthread functions directly, not through the program's symbols, on objects that are
//! the same unions. So these calls must be replaced together with the pthread calls. `call_once`, `tss_*` and `thrd_*`
//! do not use these objects.
//!
//! See also: the locks (`mutex.rs`), the condition variables (`cond.rs`).

use std::ffi::c_int;

use libc::{EBUSY, ENOMEM, ETIMEDOUT, pthread_cond_t, pthread_mutex_t, timespec};

use crate::cond::Cond;
use crate::mutex::Mutex;
use crate::patience::{Patience, Time};

const THRD_SUCCESS: c_int = 0;
const THRD_BUSY: c_int = 1;
const THRD_ERROR: c_int = 2;
const THRD_NOMEM: c_int = 3;
const THRD_TIMEDOUT: c_int = 4;

const MTX_RECURSIVE: c_int = 1;
const MTX_TIMED: c_int = 2;

/// Converts a POSIX error number to C11's.
fn thrd(error: c_int) -> c_int {
    match error {
        0 => THRD_SUCCESS,
        EBUSY => THRD_BUSY,
        ENOMEM => THRD_NOMEM,
        ETIMEDOUT => THRD_TIMEDOUT,
        _ => THRD_ERROR,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn mtx_init(mutex: *mut pthread_mutex_t, kind: c_int) -> c_int {
    // Every mutex supports timed locking.
    let kind = match kind & !MTX_TIMED {
        0 => libc::PTHREAD_MUTEX_NORMAL,
        MTX_RECURSIVE => libc::PTHREAD_MUTEX_RECURSIVE,
        _ => return THRD_ERROR,
    };
    // SAFETY: the caller's memory for a mutex.
    unsafe { Mutex::of(mutex) }.reset(kind);
    THRD_SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn mtx_destroy(mutex: *mut pthread_mutex_t) {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { Mutex::of(mutex) }.destroy();
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn mtx_lock(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    thrd(unsafe { Mutex::of(mutex) }.lock(Patience::Endless))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn mtx_trylock(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    thrd(unsafe { Mutex::of(mutex) }.lock(Patience::None))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn mtx_timedlock(mutex: *mut pthread_mutex_t, at: *const timespec) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    match unsafe { Time::new(libc::CLOCK_REALTIME, at) } {
        // SAFETY: the caller keeps the POSIX contract of this call.
        Ok(time) => thrd(unsafe { Mutex::of(mutex) }.lock(Patience::Until(time))),
        Err(error) => thrd(error),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn mtx_unlock(mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    thrd(unsafe { Mutex::of(mutex) }.unlock())
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn cnd_init(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: the caller's memory for a condition variable.
    unsafe { Cond::of(cond) }.reset(qspinlock::Clock::Realtime);
    THRD_SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn cnd_destroy(cond: *mut pthread_cond_t) {
    // SAFETY: the caller keeps the POSIX contract of this call.
    unsafe { Cond::of(cond) }.destroy();
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn cnd_signal(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    thrd(unsafe { Cond::of(cond) }.signal())
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn cnd_broadcast(cond: *mut pthread_cond_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    thrd(unsafe { Cond::of(cond) }.broadcast())
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn cnd_wait(cond: *mut pthread_cond_t, mutex: *mut pthread_mutex_t) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    let cond = unsafe { Cond::of(cond) };
    // SAFETY: the caller keeps the POSIX contract of this call.
    thrd(cond.wait(unsafe { Mutex::of(mutex) }, None))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn cnd_timedwait(
    cond: *mut pthread_cond_t,
    mutex: *mut pthread_mutex_t,
    at: *const timespec,
) -> c_int {
    // SAFETY: the caller keeps the POSIX contract of this call.
    let time = match unsafe { Time::new(libc::CLOCK_REALTIME, at) } {
        Ok(time) => time,
        Err(error) => return thrd(error),
    };
    // SAFETY: the caller keeps the POSIX contract of this call.
    let cond = unsafe { Cond::of(cond) };
    // SAFETY: the caller keeps the POSIX contract of this call.
    thrd(cond.wait(unsafe { Mutex::of(mutex) }, Some(time)))
}
