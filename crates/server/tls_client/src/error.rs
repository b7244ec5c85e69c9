//! Why there is no TLS connection. Each error is one line with the problem and a remedy; none contains a key.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a TLS connection cannot be made, or why it ended.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// GnuTLS is not installed.
    #[error(
        "TLS needs the library libgnutls.so.30, which cannot be loaded: install the package libgnutls30 \
         (from Debian 13 on libgnutls30t64)"
    )]
    NoLibrary {
        /** The loader's error. */
        source: libloading::Error,
    },
    /// GnuTLS lacks a function.
    #[error("the library libgnutls.so.30 is too old for TLS: install GnuTLS 3.6.3 or newer")]
    OldLibrary {
        /** The loader's error. */
        source: libloading::Error,
    },
    /// A file with credentials cannot be read.
    #[error("{} cannot be read: check the path and its permissions", path.display())]
    File {
        /** The file. */
        path: PathBuf,
        /** The kernel's error. */
        source: io::Error,
    },
    /// Only one of the client's two files exists.
    #[error("{} exists, but {} does not: give both, or none", there.display(), missing.display())]
    HalfAPair {
        /** The file that exists. */
        there: PathBuf,
        /** The file that does not. */
        missing: PathBuf,
    },
    /// The CA's certificates cannot be used.
    #[error("the CA's certificate (ca-cert.pem) cannot be used: {reason}: give certificates in PEM format")]
    BadCa {
        /** GnuTLS's message. */
        reason: String,
    },
    /// The client's certificate or key cannot be used.
    #[error(
        "the client's certificate and key (client-cert.pem, client-key.pem) cannot be used: {reason}: give a \
         certificate and its own key in PEM format, the key without a password"
    )]
    BadClientCertificate {
        /** GnuTLS's message. */
        reason: String,
    },
    /// The PSK file has no key for the user.
    #[error("{} has no key for the user '{username}': add a line '{username}:KEY' (psktool)", path.display())]
    NoPsk {
        /** The file. */
        path: PathBuf,
        /** The user. */
        username: String,
    },
    /// The key in the PSK file is malformed.
    #[error(
        "{}, line {line}: the key of the user '{username}' is not an even number of hexadecimal digits (at least 2)",
        path.display()
    )]
    BadPsk {
        /** The file. */
        path: PathBuf,
        /** Counted from 1. */
        line: usize,
        /** The user. */
        username: String,
    },
    /// A name that cannot be passed to GnuTLS.
    #[error("the name {name:?} contains a zero byte: remove it")]
    BadName {
        /** The user or the host. */
        name: String,
    },
    /// The handshake took too long.
    #[error(
        "the server did not complete the TLS handshake within {} s: check that this port of the server speaks TLS",
        timeout.as_secs_f32()
    )]
    Deadline {
        /** The time that was allowed. */
        timeout: Duration,
    },
    /// The server sent something other than TLS.
    #[error("the server's bytes are not TLS: {reason}: check the address, and that the server uses TLS")]
    NotTls {
        /** GnuTLS's message. */
        reason: String,
    },
    /// The server's certificate is not accepted.
    #[error("the server's certificate is refused: {0}")]
    Certificate(/** What is wrong with it. */ CertificateFault),
    /// The server refused the client.
    #[error("the server refuses the TLS connection ({alert}): check {check}")]
    Refused {
        /** The name of the server's alert. */
        alert: String,
        /** What to check. */
        check: &'static str,
    },
    /// The server proves itself by something else than the client asked for.
    #[error("the server has no credentials of the kind that this client uses: check {check}")]
    OtherKind {
        /** What to check. */
        check: &'static str,
    },
    /// The server closed the connection during the handshake.
    #[error("the server closed the connection during the TLS handshake: check {check}, and the server's log")]
    Closed {
        /** What to check. */
        check: &'static str,
    },
    /// The connection ended without the alert `close_notify`.
    #[error(
        "the TLS connection was cut: it ended without close_notify: check that the server runs, and that it accepts \
         the client's certificate"
    )]
    Cut,
    /// Another failure of TLS.
    #[error("TLS failed: {reason}")]
    Failed {
        /** GnuTLS's message. */
        reason: String,
    },
    /// A system call failed.
    #[error("cannot {action}")]
    System {
        /** The attempted action. */
        action: &'static str,
        /** The kernel's error. */
        source: io::Error,
    },
}

impl TlsError {
    pub(crate) fn system(action: &'static str, source: impl Into<io::Error>) -> Self {
        Self::System { action, source: source.into() }
    }
}

/// Why the server's certificate is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CertificateFault {
    /// The CA did not sign it.
    #[error(
        "it is not signed by the CA in ca-cert.pem: give the CA's certificate that belongs to the server"
    )]
    UnknownIssuer,
    /// Revoked.
    #[error("its CA has revoked it: the server needs a new certificate")]
    Revoked,
    /// Its time is over.
    #[error("it, or its CA's certificate, has expired: renew it, or correct this host's clock")]
    Expired,
    /// Its time has not begun.
    #[error("it, or its CA's certificate, is not valid yet: check the clocks of both hosts")]
    NotYetValid,
    /// For another host.
    #[error("it is not for the host '{host}': use a name that the certificate contains, or issue a new one")]
    WrongHost {
        /** The expected host. */
        host: String,
    },
    /// Not for servers.
    #[error("it may not be used by a server (extended key usage): issue one with the usage 'TLS server'")]
    WrongPurpose,
    /// An insecure algorithm.
    #[error("it uses an insecure algorithm or a short key: issue a new one")]
    Insecure,
    /// Anything else.
    #[error("it is not valid (GnuTLS status {status:#x})")]
    Other {
        /** Bits of `gnutls_certificate_status_t`. */
        status: u32,
    },
}
