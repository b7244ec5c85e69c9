//! Credentials in GnuTLS's form. All connections of a disk share them, so that the keys are in memory once, and GnuTLS
//! erases them when the last user drops them.

use std::ffi::{CString, c_uint};
use std::fmt;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use crate::error::TlsError;
use crate::files::{ClientPem, PskKey, X509Pem};
use crate::library::{CRD_CERTIFICATE, CRD_PSK, Datum, Handle, Library, PEM, PSK_KEY_RAW};

/// How the server and the client prove who they are.
#[derive(Clone)]
pub struct Credentials(Arc<Owned>);

/// The kinds of credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    X509,
    Psk,
}

impl Kind {
    /// What to check after the server has refused the connection.
    pub fn advice(self) -> &'static str {
        match self {
            Self::X509 => "the client's certificate, and that the server accepts certificates (X.509)",
            Self::Psk => "the user name and the key, and that the server accepts pre-shared keys (PSK)",
        }
    }
}

struct Owned {
    library: &'static Library,
    kind: Kind,
    handle: Handle,
}

// SAFETY: 1. GnuTLS binds credentials to no thread; 2. they change only in `x509` and `psk`, before they are shared.
unsafe impl Send for Owned {}
// SAFETY: 1. sessions on several threads only read credentials, which GnuTLS allows ("thread safety" in its manual).
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        let free = match self.kind {
            Kind::X509 => self.library.certificate_free_credentials,
            Kind::Psk => self.library.psk_free_client_credentials,
        };
        // SAFETY: 1. made by the function of the same kind; 2. unused: sessions keep this alive.
        unsafe { free(self.handle) };
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Credentials").field(&self.0.kind).finish()
    }
}

impl Credentials {
    /// Certificates: the server must have one of the CA.
    ///
    /// # Errors
    /// GnuTLS does not accept a certificate or the key.
    pub fn x509(library: &'static Library, pem: &X509Pem) -> Result<Self, TlsError> {
        let made = Self::allocate(library, Kind::X509)?;
        let ca = datum(&pem.ca_cert);
        // SAFETY: 1. handle: just made; 2. datum: valid for this call, which copies it.
        let count = unsafe { (library.certificate_set_x509_trust_mem)(made.0.handle, &raw const ca, PEM) };
        if count <= 0 {
            let reason =
                if count == 0 { "it contains no certificate".to_owned() } else { library.text(count) };
            return Err(TlsError::BadCa { reason });
        }
        if let Some(client) = &pem.client {
            made.add_client(client)?;
        }
        Ok(made)
    }

    fn add_client(&self, client: &ClientPem) -> Result<(), TlsError> {
        let (library, handle) = (self.0.library, self.0.handle);
        let (cert, key) = (datum(&client.cert), datum(&client.key));
        let (cert, key) = (&raw const cert, &raw const key);
        // SAFETY: 1. handle: just made, and not shared yet; 2. data: valid for this call, which copies them; 3. no
        // password is given.
        let code = unsafe { (library.certificate_set_x509_key_mem2)(handle, cert, key, PEM, null(), 0) };
        if code < 0 {
            return Err(TlsError::BadClientCertificate { reason: library.text(code) });
        }
        Ok(())
    }

    /// A key that the server knows, too.
    ///
    /// # Errors
    /// The user name contains a zero byte, or GnuTLS does not accept it or the key.
    pub fn psk(library: &'static Library, key: &PskKey) -> Result<Self, TlsError> {
        let name = || TlsError::BadName { name: key.username.clone() };
        let username = CString::new(key.username.as_str()).map_err(|_| name())?;
        let made = Self::allocate(library, Kind::Psk)?;
        let secret = datum(&key.key);
        let secret = &raw const secret;
        // SAFETY: 1. handle: just made; 2. strings: valid for this call, which copies them.
        let code = unsafe {
            (library.psk_set_client_credentials)(made.0.handle, username.as_ptr(), secret, PSK_KEY_RAW)
        };
        library.check(code)?;
        Ok(made)
    }

    fn allocate(library: &'static Library, kind: Kind) -> Result<Self, TlsError> {
        let allocate = match kind {
            Kind::X509 => library.certificate_allocate_credentials,
            Kind::Psk => library.psk_allocate_client_credentials,
        };
        let mut handle = null_mut();
        // SAFETY: 1. the handle is stored in a local variable.
        library.check(unsafe { allocate(&raw mut handle) })?;
        Ok(Self(Arc::new(Owned { library, kind, handle })))
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.0.library
    }

    pub(crate) fn kind(&self) -> Kind {
        self.0.kind
    }

    /// Valid while `self` or a clone exists.
    pub(crate) fn handle(&self) -> Handle {
        self.0.handle
    }

    /// `gnutls_credentials_type_t`.
    pub(crate) fn number(&self) -> c_uint {
        match self.0.kind {
            Kind::X509 => CRD_CERTIFICATE,
            Kind::Psk => CRD_PSK,
        }
    }
}

fn datum(bytes: &[u8]) -> Datum {
    // GnuTLS refuses what is cut, but no file of certificates is that long.
    Datum { data: bytes.as_ptr(), size: c_uint::try_from(bytes.len()).unwrap_or(c_uint::MAX) }
}
