//! Lets a program find out that it runs under this library: `dlsym(RTLD_DEFAULT,
//! "qspinlock_preload_version")`.
//!
//! A program needs no function of this file.

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
