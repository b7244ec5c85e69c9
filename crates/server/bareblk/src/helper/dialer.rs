//! The server's connections to NBD servers: made by this process or by the helper, with TLS by the crate `tls_client`.
//!
//! Each connection reads its credentials again, so that certificates and keys can be replaced while disks are served.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nbd_client::{Address, Dial, HostDialer, Secured, Tls};
use tls_client::{Connection, Credentials, Library, PskKey, TlsError, X509Pem};

use super::client::Helper;
use super::credentials;

/// Who connects to NBD servers and opens files with credentials.
#[derive(Debug)]
pub enum Dialer {
    /// This process.
    Host,
    /// The sandbox's helper.
    Helper(Arc<Helper>),
}

impl Dial for Dialer {
    fn dial(&self, address: &Address, timeout: Duration) -> io::Result<OwnedFd> {
        match self {
            Self::Host => HostDialer.dial(address, timeout),
            Self::Helper(helper) => helper.dial(address, timeout),
        }
    }

    fn start_tls(&self, socket: OwnedFd, tls: &Tls, timeout: Duration) -> io::Result<Secured> {
        let library = self.library()?;
        let (credentials, host) = self.credentials(library, tls).map_err(failed)?;
        let Connection { socket, end } =
            tls_client::connect(socket, host, &credentials, timeout).map_err(failed)?;
        Ok(Secured { socket, end: Box::new(move || end.error().map(ToString::to_string)) })
    }
}

impl Dialer {
    fn library(&self) -> io::Result<&'static Library> {
        match self {
            Self::Host => Library::load().map_err(failed),
            Self::Helper(_) => Library::get().ok_or_else(|| {
                io::Error::other(
                    "the server started without a disk that uses TLS, and the sandbox does not allow to load the \
                     library (GnuTLS) later: restart the server with this disk, or with another that uses TLS",
                )
            }),
        }
    }

    /// The credentials, and the host for which the server's certificate must be.
    fn credentials<'a>(
        &self,
        library: &'static Library,
        tls: &'a Tls,
    ) -> Result<(Credentials, Option<&'a str>), TlsError> {
        let read = |path: &Path| self.open(path).and_then(credentials::contents);
        match tls {
            Tls::Certificates { folder, host } => {
                let pem = X509Pem::read(folder, &read)?;
                Ok((Credentials::x509(library, &pem)?, host.as_deref()))
            }
            Tls::Psk { file, username } => {
                Ok((Credentials::psk(library, &PskKey::read(file, username, &read)?)?, None))
            }
        }
    }

    fn open(&self, path: &Path) -> io::Result<OwnedFd> {
        match self {
            Self::Host => credentials::open(path),
            Self::Helper(helper) => helper.open_credentials(path),
        }
    }
}

/// Only a server that did not answer in time may be tried again without a change.
fn failed(error: TlsError) -> io::Error {
    let kind = if matches!(error, TlsError::Deadline { .. }) {
        io::ErrorKind::TimedOut
    } else {
        io::ErrorKind::Other
    };
    io::Error::new(kind, error)
}
