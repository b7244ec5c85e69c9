//! TLS for connections to a server: what a URI demands, and the query keys that say it.
//!
//! `nbds://HOST/EXPORT?tls-certificates=DIR`, `nbds://USER@HOST/EXPORT?tls-psk-file=PATH`
//!
//! Not here: the TLS protocol. [`Dial::start_tls`](crate::Dial::start_tls) does the handshake.

use std::path::PathBuf;

/// How to encrypt connections to a server, and how both sides prove who they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tls {
    /// Certificates (X.509).
    Certificates {
        /** The folder with `ca-cert.pem` and, if the server asks for them, `client-cert.pem` and `client-key.pem`. */
        folder: PathBuf,
        /** The server's certificate must be for this name or address. `None`: any certificate of the CA will do. */
        host: Option<String>,
    },
    /// A pre-shared key.
    Psk {
        /** The file with lines `USER:KEY`. */
        file: PathBuf,
        /** Whose key is used. */
        username: String,
    },
}

/// The query keys for TLS, as a URI has them.
#[derive(Debug, Default)]
pub(crate) struct TlsKeys {
    pub certificates: Option<PathBuf>,
    pub psk_file: Option<PathBuf>,
    pub username: Option<String>,
    pub hostname: Option<String>,
}

impl TlsKeys {
    pub fn is_empty(&self) -> bool {
        let Self { certificates, psk_file, username, hostname } = self;
        certificates.is_none() && psk_file.is_none() && username.is_none() && hostname.is_none()
    }

    /// `user`: from the URI's authority. `host`: the server's name, if the URI has one. An error says what to write.
    pub fn tls(self, user: Option<String>, host: Option<&str>) -> Result<Tls, &'static str> {
        let username = match (self.username, user) {
            (Some(key), Some(user)) if key != user => {
                return Err("tls-username= and USER@ name different users: give one of them");
            }
            (key, user) => key.or(user),
        };
        match (self.certificates, self.psk_file) {
            (Some(_), Some(_)) => {
                Err("tls-certificates= and tls-psk-file= contradict each other: give one of them")
            }
            (None, None) => Err(
                "TLS needs credentials: add tls-certificates=DIR (certificates) or tls-psk-file=PATH (a key)",
            ),
            (Some(folder), None) => {
                if !folder.is_absolute() {
                    return Err("the path in tls-certificates= must begin with /");
                }
                if username.is_some() {
                    return Err(
                        "a user means nothing with tls-certificates=: remove it, or use tls-psk-file=PATH",
                    );
                }
                Ok(Tls::Certificates { folder, host: self.hostname.or_else(|| host.map(str::to_owned)) })
            }
            (None, Some(file)) => {
                if !file.is_absolute() {
                    return Err("the path in tls-psk-file= must begin with /");
                }
                if self.hostname.is_some() {
                    return Err(
                        "tls-hostname= means nothing with tls-psk-file=, which has no certificate: remove it",
                    );
                }
                let username = username.ok_or("the user of the key is missing: add tls-username=NAME")?;
                Ok(Tls::Psk { file, username })
            }
        }
    }
}
