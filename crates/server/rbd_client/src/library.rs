//! The functions of librados and librbd, found at run time.

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::RbdError;

/// `rados_t`, `rados_ioctx_t`, `rbd_image_t`, `rbd_completion_t`.
pub(crate) type Handle = *mut c_void;
/// `rbd_callback_t`.
pub(crate) type Callback = unsafe extern "C" fn(Handle, *mut c_void);
/// `rbd_update_callback_t`.
pub(crate) type UpdateCallback = unsafe extern "C" fn(*mut c_void);

/// `rbd_image_watcher_t`.
#[repr(C)]
pub(crate) struct Watcher {
    pub address: *mut c_char,
    id: i64,
    cookie: u64,
}

impl Watcher {
    pub const NONE: Self = Self { address: std::ptr::null_mut(), id: 0, cookie: 0 };
}

const RADOS: &str = "librados.so.2";
const RBD: &str = "librbd.so.1";

macro_rules! functions {
    ($($library:ident $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The loaded libraries.
        #[derive(Debug)]
        #[allow(missing_docs)]
        pub struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn find() -> Result<Self, RbdError> {
                let rados = open(RADOS)?;
                let rbd = open(RBD)?;
                let found = Self {
                    $($name: {
                        let (library, file) = if stringify!($library) == "rados" { (&rados, RADOS) } else { (&rbd, RBD) };
                        // SAFETY: 1. type: the header of Ceph 16 declares the function so, and the soname promises it.
                        let symbol = unsafe { library.get(concat!(stringify!($name), "\0")) };
                        *symbol.map_err(|error| RbdError::NoLibrary { library: file, reason: error.to_string() })?
                    },)*
                };
                // Never closed: their threads run until the process ends.
                std::mem::forget((rados, rbd));
                Ok(found)
            }
        }
    };
}

functions! {
    rados rados_create(*mut Handle, *const c_char) -> c_int;
    rados rados_conf_read_file(Handle, *const c_char) -> c_int;
    rados rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    rados rados_connect(Handle) -> c_int;
    rados rados_shutdown(Handle);
    rados rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    rados rados_ioctx_destroy(Handle);
    rados rados_ioctx_set_namespace(Handle, *const c_char);
    rados rados_set_pool_full_try(Handle);
    rados rados_getxattr(Handle, *const c_char, *const c_char, *mut c_char, usize) -> c_int;
    rados rados_setxattr(Handle, *const c_char, *const c_char, *const c_char, usize) -> c_int;
    rbd rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd rbd_close(Handle) -> c_int;
    rbd rbd_get_size(Handle, *mut u64) -> c_int;
    rbd rbd_get_features(Handle, *mut u64) -> c_int;
    rbd rbd_resize(Handle, u64) -> c_int;
    rbd rbd_flush(Handle) -> c_int;
    rbd rbd_lock_acquire(Handle, c_int) -> c_int;
    rbd rbd_lock_release(Handle) -> c_int;
    rbd rbd_watchers_list(Handle, *mut Watcher, *mut usize) -> c_int;
    rbd rbd_watchers_list_cleanup(*mut Watcher, usize);
    rbd rbd_get_id(Handle, *mut c_char, usize) -> c_int;
    rbd rbd_lock_get_owners(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
    rbd rbd_is_exclusive_lock_owner(Handle, *mut c_int) -> c_int;
    rbd rbd_lock_break(Handle, c_int, *const c_char) -> c_int;
    rbd rbd_update_watch(Handle, *mut u64, UpdateCallback, *mut c_void) -> c_int;
    rbd rbd_update_unwatch(Handle, u64) -> c_int;
    rbd rbd_aio_create_completion(*mut c_void, Callback, *mut Handle) -> c_int;
    rbd rbd_aio_get_return_value(Handle) -> isize;
    rbd rbd_aio_release(Handle);
    rbd rbd_aio_readv(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd rbd_aio_writev(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd rbd_aio_flush(Handle, Handle) -> c_int;
    rbd rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    rbd rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
}

fn open(name: &'static str) -> Result<libloading::Library, RbdError> {
    // SAFETY: 1. loading runs the library's initialisers: these are Ceph's client libraries, which programs load so.
    let opened = unsafe { libloading::Library::new(name) };
    opened.map_err(|error| RbdError::NoLibrary { library: name, reason: error.to_string() })
}

static LOADED: OnceLock<Library> = OnceLock::new();
static LOADING: Mutex<()> = Mutex::new(());

impl Library {
    /// Loads the libraries, unless they are loaded already. Needs access to the file system.
    ///
    /// # Errors
    /// [`RbdError::NoLibrary`].
    pub fn load() -> Result<&'static Self, RbdError> {
        let _turn = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = LOADED.get() {
            return Ok(library);
        }
        let found = Self::find()?;
        Ok(LOADED.get_or_init(|| found))
    }
}

/// Whether the libraries are loaded. Their destructors do not expect threads that still run: a process that has them ends
/// with `_exit`.
#[must_use]
pub fn is_loaded() -> bool {
    LOADED.get().is_some()
}
