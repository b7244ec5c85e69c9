//! The files with credentials, as bytes: a folder of PEM files, or a file of pre-shared keys.
//!
//! A sandboxed server opens no files: its [`ReadFile`] gets the contents from another process. Keys are erased when
//! these types are dropped.
//!
//! Source: the NBD URI specification (github.com/NetworkBlockDevice/nbd, `doc/uri.md`), `tls-certificates` and
//! `tls-psk-file`.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use crate::error::TlsError;

const CA_CERT: &str = "ca-cert.pem";
const CLIENT_CERT: &str = "client-cert.pem";
const CLIENT_KEY: &str = "client-key.pem";

/// Returns the contents of a file.
pub type ReadFile<'a> = &'a dyn Fn(&Path) -> io::Result<Vec<u8>>;

/// Certificates in PEM format.
#[derive(Debug, Clone)]
pub struct X509Pem {
    /// One or more certificates of CAs, one of which must have signed the server's certificate.
    pub ca_cert: Vec<u8>,
    /// Given to servers that ask for a certificate.
    pub client: Option<ClientPem>,
}

/// The client's own certificate.
#[derive(Clone)]
pub struct ClientPem {
    /// The certificate, and those between it and the CA.
    pub cert: Vec<u8>,
    /// Its private key, without a password.
    pub key: Zeroizing<Vec<u8>>,
}

impl fmt::Debug for ClientPem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientPem").finish_non_exhaustive()
    }
}

impl X509Pem {
    /// The files that [`Self::read`] reads.
    #[must_use]
    pub fn files(folder: &Path) -> [PathBuf; 3] {
        [CA_CERT, CLIENT_CERT, CLIENT_KEY].map(|name| folder.join(name))
    }

    /// Reads `ca-cert.pem`, and, if they exist, `client-cert.pem` and `client-key.pem`.
    ///
    /// # Errors
    /// A file cannot be read, or only one of the client's files exists.
    pub fn read(folder: &Path, read: ReadFile<'_>) -> Result<Self, TlsError> {
        let [ca, cert, key] = Self::files(folder);
        let ca_cert = named(&ca, read)?;
        let client = match (named_if_there(&cert, read)?, named_if_there(&key, read)?) {
            (Some(cert), Some(key)) => Some(ClientPem { cert, key: Zeroizing::new(key) }),
            (None, None) => None,
            (Some(_), None) => return Err(TlsError::HalfAPair { there: cert, missing: key }),
            (None, Some(secret)) => {
                drop(Zeroizing::new(secret));
                return Err(TlsError::HalfAPair { there: key, missing: cert });
            }
        };
        Ok(Self { ca_cert, client })
    }
}

fn named(path: &Path, read: ReadFile<'_>) -> Result<Vec<u8>, TlsError> {
    read(path).map_err(|source| TlsError::File { path: path.to_owned(), source })
}

fn named_if_there(path: &Path, read: ReadFile<'_>) -> Result<Option<Vec<u8>>, TlsError> {
    match named(path, read) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(TlsError::File { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// A user's pre-shared key.
#[derive(Clone)]
pub struct PskKey {
    /// The user.
    pub username: String,
    /// The key's bytes.
    pub key: Zeroizing<Vec<u8>>,
}

impl fmt::Debug for PskKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PskKey").field("username", &self.username).finish_non_exhaustive()
    }
}

impl PskKey {
    /// Reads the user's key from a file of `psktool`.
    ///
    /// # Errors
    /// The file cannot be read; and those of [`Self::find`].
    pub fn read(path: &Path, username: &str, read: ReadFile<'_>) -> Result<Self, TlsError> {
        let contents = Zeroizing::new(named(path, read)?);
        Self::find(&contents, username, path)
    }

    /// Finds the user's key in the contents of the file `path`: lines `USER:KEY`, the key in hexadecimal digits. Of
    /// several lines of one user, the first counts.
    ///
    /// # Errors
    /// There is no line for the user, or its key is malformed.
    pub fn find(contents: &[u8], username: &str, path: &Path) -> Result<Self, TlsError> {
        for (index, line) in contents.split(|&byte| byte == b'\n').enumerate() {
            let Some(colon) = line.iter().rposition(|&byte| byte == b':') else { continue };
            if &line[..colon] != username.as_bytes() {
                continue;
            }
            let key = unhex(line[colon + 1..].trim_ascii());
            let bad = || TlsError::BadPsk { path: path.into(), line: index + 1, username: username.into() };
            return Ok(Self { username: username.to_owned(), key: key.ok_or_else(bad)? });
        }
        Err(TlsError::NoPsk { path: PathBuf::from(path), username: username.to_owned() })
    }
}

fn unhex(digits: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    if digits.is_empty() || !digits.len().is_multiple_of(2) {
        return None;
    }
    // The whole capacity at once: a vector that grows would leave copies behind.
    let mut key = Zeroizing::new(Vec::with_capacity(digits.len() / 2));
    for pair in digits.chunks_exact(2) {
        key.push(nibble(pair[0])? << 4 | nibble(pair[1])?);
    }
    Some(key)
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}
