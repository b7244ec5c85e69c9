//! GnuTLS, loaded at run time: the functions that this crate calls, with the types of `gnutls/gnutls.h`.
//!
//! - Loaded once, never closed: GnuTLS registers handlers with the C library.
//! - A confined process cannot load libraries, because it may not map executable memory. So a server loads GnuTLS before
//!   it calls `sandbox::confine`. [`Library::get`] tells whether it did.
//!
//! Not here: what a sequence of calls must look like (`session.rs`, `credentials.rs`).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::error::TlsError;

const SONAME: &str = "libgnutls.so.30";

/// `gnutls_session_t` and `gnutls_…_credentials_t`.
pub(crate) type Handle = *mut c_void;

/// `gnutls_datum_t`.
#[repr(C)]
pub(crate) struct Datum {
    pub data: *const u8,
    pub size: c_uint,
}

/// `gnutls_typed_vdata_st`.
#[repr(C)]
pub(crate) struct VerifyDatum {
    pub kind: c_uint,
    pub data: *const c_char,
    /// 0: the data end with a zero byte.
    pub size: c_uint,
}

/// `gnutls_pull_func`.
pub(crate) type Pull = unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> isize;
/// `gnutls_push_func`.
pub(crate) type Push = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> isize;

/// `GNUTLS_CLIENT | GNUTLS_NONBLOCK`.
pub(crate) const CLIENT_NONBLOCK: c_uint = 1 << 1 | 1 << 3;
/// `GNUTLS_X509_FMT_PEM`.
pub(crate) const PEM: c_uint = 1;
/// `GNUTLS_CRD_CERTIFICATE`, `GNUTLS_CRD_PSK`.
pub(crate) const CRD_CERTIFICATE: c_uint = 1;
pub(crate) const CRD_PSK: c_uint = 4;
/// `GNUTLS_PSK_KEY_RAW`.
pub(crate) const PSK_KEY_RAW: c_uint = 0;
/// `GNUTLS_NAME_DNS`.
pub(crate) const NAME_DNS: c_uint = 1;
/// `GNUTLS_DT_DNS_HOSTNAME`, `GNUTLS_DT_KEY_PURPOSE_OID`.
pub(crate) const DT_DNS_HOSTNAME: c_uint = 1;
pub(crate) const DT_KEY_PURPOSE_OID: c_uint = 2;
/// `GNUTLS_KP_TLS_WWW_SERVER`.
pub(crate) const PURPOSE_SERVER: &CStr = c"1.3.6.1.5.5.7.3.1";
/// `GNUTLS_SHUT_WR`.
pub(crate) const SHUT_WR: c_uint = 1;

/// `GNUTLS_E_…`.
pub(crate) mod code {
    use std::ffi::c_int;

    pub(crate) const UNSUPPORTED_VERSION_PACKET: c_int = -8;
    pub(crate) const UNEXPECTED_PACKET_LENGTH: c_int = -9;
    pub(crate) const FATAL_ALERT_RECEIVED: c_int = -12;
    pub(crate) const UNEXPECTED_PACKET: c_int = -15;
    pub(crate) const UNEXPECTED_HANDSHAKE_PACKET: c_int = -19;
    pub(crate) const AGAIN: c_int = -28;
    pub(crate) const INSUFFICIENT_CREDENTIALS: c_int = -32;
    pub(crate) const INTERRUPTED: c_int = -52;
    pub(crate) const PREMATURE_TERMINATION: c_int = -110;
    pub(crate) const CERTIFICATE_VERIFICATION_ERROR: c_int = -348;
    pub(crate) const RECORD_OVERFLOW: c_int = -417;
}

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of GnuTLS that this crate calls.
        #[derive(Debug)]
        pub struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn find_all(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: 1. type: the field's type is that of the function of this name in `gnutls/gnutls.h`;
                    // 2. alive: the library is never closed.
                    $($name: *unsafe { library.get(concat!("gnutls_", stringify!($name), "\0")) }?,)*
                })
            }
        }
    };
}

functions! {
    init: fn(*mut Handle, c_uint) -> c_int;
    deinit: fn(Handle);
    set_default_priority_append: fn(Handle, *const c_char, *mut *const c_char, c_uint) -> c_int;
    credentials_set: fn(Handle, c_uint, *mut c_void) -> c_int;
    server_name_set: fn(Handle, c_uint, *const c_void, usize) -> c_int;
    session_set_verify_cert2: fn(Handle, *const VerifyDatum, c_uint, c_uint);
    session_get_verify_cert_status: fn(Handle) -> c_uint;
    transport_set_ptr: fn(Handle, *mut c_void);
    transport_set_push_function: fn(Handle, Push);
    transport_set_pull_function: fn(Handle, Pull);
    handshake: fn(Handle) -> c_int;
    auth_get_type: fn(Handle) -> c_uint;
    record_send: fn(Handle, *const c_void, usize) -> isize;
    record_recv: fn(Handle, *mut c_void, usize) -> isize;
    bye: fn(Handle, c_uint) -> c_int;
    alert_get: fn(Handle) -> c_uint;
    alert_get_name: fn(c_uint) -> *const c_char;
    alert_send_appropriate: fn(Handle, c_int) -> c_int;
    error_is_fatal: fn(c_int) -> c_int;
    strerror: fn(c_int) -> *const c_char;
    certificate_allocate_credentials: fn(*mut Handle) -> c_int;
    certificate_free_credentials: fn(Handle);
    certificate_set_x509_trust_mem: fn(Handle, *const Datum, c_uint) -> c_int;
    certificate_set_x509_key_mem2: fn(Handle, *const Datum, *const Datum, c_uint, *const c_char, c_uint) -> c_int;
    psk_allocate_client_credentials: fn(*mut Handle) -> c_int;
    psk_free_client_credentials: fn(Handle);
    psk_set_client_credentials: fn(Handle, *const c_char, *const Datum, c_uint) -> c_int;
}

static LOADED: OnceLock<Library> = OnceLock::new();

impl Library {
    /// Loads GnuTLS, if it is not loaded yet. Must not be called in a confined process that has not loaded it.
    ///
    /// # Errors
    /// GnuTLS is not installed, or too old.
    pub fn load() -> Result<&'static Self, TlsError> {
        if let Some(library) = Self::get() {
            return Ok(library);
        }
        // SAFETY: 1. the library's initialisation may run on any thread: it sets up GnuTLS's own state, once.
        let library = unsafe { libloading::Library::new(SONAME) };
        let library = library.map_err(|source| TlsError::NoLibrary { source })?;
        let found = Self::find_all(&library).map_err(|source| TlsError::OldLibrary { source })?;
        std::mem::forget(library); // never closed, so the functions' addresses stay valid
        Ok(LOADED.get_or_init(|| found))
    }

    /// GnuTLS, if it is loaded.
    #[must_use]
    pub fn get() -> Option<&'static Self> {
        LOADED.get()
    }

    /// GnuTLS's words for an error.
    pub(crate) fn text(&self, code: c_int) -> String {
        // SAFETY: 1. any number is allowed.
        let text = unsafe { (self.strerror)(code) };
        // SAFETY: 1. `strerror` returns a constant string, also for unknown numbers.
        let text = unsafe { CStr::from_ptr(text) };
        text.to_string_lossy().trim_end_matches('.').to_owned()
    }

    /// Turns negative results into errors.
    pub(crate) fn check(&self, code: c_int) -> Result<(), TlsError> {
        if code < 0 { Err(TlsError::Failed { reason: self.text(code) }) } else { Ok(()) }
    }
}
