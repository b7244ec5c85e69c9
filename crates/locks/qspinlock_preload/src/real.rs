//! The C library's own calls, for objects that are not replaced.
//!
//! - The library looks them up when it is loaded, or in the first call if that comes earlier. A lookup may allocate.
//!   Only objects that are passed on need a lookup, so an allocator may use plain locks.
//! - A call that the C library does not have returns `ENOSYS`.
//!
//! The callers decide which objects to pass on.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{
    AtomicPtr,
    Ordering::{Acquire, Release},
};

use libc::{clockid_t, pthread_cond_t, pthread_condattr_t, pthread_mutex_t, pthread_mutexattr_t, timespec};
use libc::{pthread_rwlock_t, pthread_rwlockattr_t};

use crate::thread::keeping_errno;

/// Condition variables on x86-64 have had two symbol versions; this is the later one.
const COND: Option<&CStr> = if cfg!(target_arch = "x86_64") { Some(c"GLIBC_2.3.2") } else { None };
const ANY: Option<&CStr> = None;

struct Symbol {
    name: &'static CStr,
    version: Option<&'static CStr>,
    address: AtomicPtr<c_void>,
}

impl Symbol {
    const fn new(name: &'static CStr, version: Option<&'static CStr>) -> Self {
        Self { name, version, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The symbol's address; NULL if the C library does not have the symbol.
    fn address(&self) -> *mut c_void {
        let known = self.address.load(Acquire); // pairs with the release below; the code was loaded before us
        if known.is_null() { self.look_up() } else { known }
    }

    #[cold]
    fn look_up(&self) -> *mut c_void {
        let found = keeping_errno(|| match self.version {
            None => self.by_name(),
            Some(version) => {
                // SAFETY: both strings are NUL-terminated; this library makes the call, so `RTLD_NEXT` means the
                // libraries after it.
                let found = unsafe { libc::dlvsym(libc::RTLD_NEXT, self.name.as_ptr(), version.as_ptr()) };
                if found.is_null() { self.by_name() } else { found }
            }
        });
        self.address.store(found, Release);
        found
    }

    fn by_name(&self) -> *mut c_void {
        // SAFETY: as above.
        unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) }
    }
}

macro_rules! real {
    ($($call:ident = $name:literal, $version:ident, ($($arg:ident: $type:ty),*);)*) => {
        #[allow(non_upper_case_globals)]
        mod symbols {
            $(pub(super) static $call: super::Symbol = super::Symbol::new($name, super::$version);)*
        }

        $(
            /// The C library's call of that name.
            ///
            /// # Safety
            /// See the C library's documentation.
            pub(crate) unsafe fn $call($($arg: $type),*) -> c_int {
                let address = symbols::$call.address();
                if address.is_null() {
                    return libc::ENOSYS;
                }
                // SAFETY: the C library's function of that name has these parameters, and this result.
                let call = unsafe {
                    std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($type),*) -> c_int>(address)
                };
                // SAFETY: the caller keeps this function's contract, which is that of the call.
                unsafe { call($($arg),*) }
            }
        )*

        /// Runs before `main`, before any lock is used.
        extern "C" fn look_all_up() {
            $(symbols::$call.address();)*
        }
    };
}

real! {
    mutex_init = c"pthread_mutex_init", ANY, (mutex: *mut pthread_mutex_t, attr: *const pthread_mutexattr_t);
    mutex_destroy = c"pthread_mutex_destroy", ANY, (mutex: *mut pthread_mutex_t);
    mutex_lock = c"pthread_mutex_lock", ANY, (mutex: *mut pthread_mutex_t);
    mutex_trylock = c"pthread_mutex_trylock", ANY, (mutex: *mut pthread_mutex_t);
    mutex_clocklock = c"pthread_mutex_clocklock", ANY,
        (mutex: *mut pthread_mutex_t, clock: clockid_t, at: *const timespec);
    mutex_unlock = c"pthread_mutex_unlock", ANY, (mutex: *mut pthread_mutex_t);

    cond_init = c"pthread_cond_init", COND, (cond: *mut pthread_cond_t, attr: *const pthread_condattr_t);
    cond_destroy = c"pthread_cond_destroy", COND, (cond: *mut pthread_cond_t);
    cond_wait = c"pthread_cond_wait", COND, (cond: *mut pthread_cond_t, mutex: *mut pthread_mutex_t);
    cond_timedwait = c"pthread_cond_timedwait", COND,
        (cond: *mut pthread_cond_t, mutex: *mut pthread_mutex_t, at: *const timespec);
    cond_clockwait = c"pthread_cond_clockwait", ANY,
        (cond: *mut pthread_cond_t, mutex: *mut pthread_mutex_t, clock: clockid_t, at: *const timespec);
    cond_signal = c"pthread_cond_signal", COND, (cond: *mut pthread_cond_t);
    cond_broadcast = c"pthread_cond_broadcast", COND, (cond: *mut pthread_cond_t);

    rwlock_init = c"pthread_rwlock_init", ANY, (lock: *mut pthread_rwlock_t, attr: *const pthread_rwlockattr_t);
    rwlock_destroy = c"pthread_rwlock_destroy", ANY, (lock: *mut pthread_rwlock_t);
    rwlock_rdlock = c"pthread_rwlock_rdlock", ANY, (lock: *mut pthread_rwlock_t);
    rwlock_tryrdlock = c"pthread_rwlock_tryrdlock", ANY, (lock: *mut pthread_rwlock_t);
    rwlock_clockrdlock = c"pthread_rwlock_clockrdlock", ANY,
        (lock: *mut pthread_rwlock_t, clock: clockid_t, at: *const timespec);
    rwlock_wrlock = c"pthread_rwlock_wrlock", ANY, (lock: *mut pthread_rwlock_t);
    rwlock_trywrlock = c"pthread_rwlock_trywrlock", ANY, (lock: *mut pthread_rwlock_t);
    rwlock_clockwrlock = c"pthread_rwlock_clockwrlock", ANY,
        (lock: *mut pthread_rwlock_t, clock: clockid_t, at: *const timespec);
    rwlock_unlock = c"pthread_rwlock_unlock", ANY, (lock: *mut pthread_rwlock_t);
}

// SAFETY: the loader calls each function in this section once, when this library and its dependencies are
// ready.
#[unsafe(link_section = ".init_array")]
#[used]
static LOOK_ALL_UP: extern "C" fn() = look_all_up;
