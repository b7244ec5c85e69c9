//! Older names of the same calls, which the C library keeps for programs that were linked long ago.
//!
//! The calls are implemented in `mutex.rs` and `rwlock.rs`.

use std::ffi::c_int;

use libc::{pthread_mutex_t, pthread_mutexattr_t, pthread_rwlock_t, pthread_rwlockattr_t};

use crate::{mutex, rwlock};

macro_rules! old_name {
    ($($old:ident = $new:path, ($($arg:ident: $type:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $old($($arg: $type),*) -> c_int {
            // SAFETY: the caller keeps the POSIX contract of this call.
            unsafe { $new($($arg),*) }
        }
    )*};
}

old_name! {
    __pthread_mutex_init = mutex::pthread_mutex_init,
        (mutex: *mut pthread_mutex_t, attr: *const pthread_mutexattr_t);
    __pthread_mutex_destroy = mutex::pthread_mutex_destroy, (mutex: *mut pthread_mutex_t);
    __pthread_mutex_lock = mutex::pthread_mutex_lock, (mutex: *mut pthread_mutex_t);
    __pthread_mutex_trylock = mutex::pthread_mutex_trylock, (mutex: *mut pthread_mutex_t);
    __pthread_mutex_unlock = mutex::pthread_mutex_unlock, (mutex: *mut pthread_mutex_t);

    __pthread_rwlock_init = rwlock::pthread_rwlock_init,
        (lock: *mut pthread_rwlock_t, attr: *const pthread_rwlockattr_t);
    __pthread_rwlock_destroy = rwlock::pthread_rwlock_destroy, (lock: *mut pthread_rwlock_t);
    __pthread_rwlock_rdlock = rwlock::pthread_rwlock_rdlock, (lock: *mut pthread_rwlock_t);
    __pthread_rwlock_tryrdlock = rwlock::pthread_rwlock_tryrdlock, (lock: *mut pthread_rwlock_t);
    __pthread_rwlock_wrlock = rwlock::pthread_rwlock_wrlock, (lock: *mut pthread_rwlock_t);
    __pthread_rwlock_trywrlock = rwlock::pthread_rwlock_trywrlock, (lock: *mut pthread_rwlock_t);
    __pthread_rwlock_unlock = rwlock::pthread_rwlock_unlock, (lock: *mut pthread_rwlock_t);
}
