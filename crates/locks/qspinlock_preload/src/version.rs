//! Shows whether a program runs under this library: if so, `dlsym(RTLD_DEFAULT, "qspinlock_preload_version")` is not
//! NULL.

use std::ffi::{CStr, c_char};

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => c"",
};

/// The library's version, as text.
#[unsafe(no_mangle)]
extern "C" fn qspinlock_preload_version() -> *const c_char {
    VERSION.as_ptr()
}
