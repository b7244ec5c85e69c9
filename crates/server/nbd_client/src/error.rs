//! Why an export cannot be used. Each error is one line with the problem and a remedy.

use std::io;
use std::time::Duration;

use crate::uri::Address;

/// Why an export cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// No connection.
    #[error("cannot connect to the NBD server at {address}")]
    Connect {
        /** Where the server should listen. */
        address: Address,
        /** The kernel's error. */
        source: io::Error,
    },
    /// The connection ended or hung during negotiation.
    #[error("the NBD server at {address} did not complete the negotiation within {} s", timeout.as_secs())]
    Lost {
        /** Where the server listens. */
        address: Address,
        /** The time limit. */
        timeout: Duration,
        /** The kernel's error. */
        source: io::Error,
    },
    /// The server has no such export.
    #[error("the NBD server at {address} has no export '{export}'{said}: check the URI's path")]
    NoExport {
        /** Where the server listens. */
        address: Address,
        /** The export's name. */
        export: String,
        /** The server's own words, if any. */
        said: String,
    },
    /// The server demands TLS.
    #[error(
        "the NBD server at {address} demands TLS{said}: use nbds:// or nbds+unix:// with the server's credentials"
    )]
    TlsRequired {
        /** Where the server listens. */
        address: Address,
        /** The server's own words, if any. */
        said: String,
    },
    /// The server does not offer TLS.
    #[error(
        "the NBD server at {address} refuses TLS{said}: enable TLS there, or use nbd:// or nbd+unix:// if you trust the \
         network"
    )]
    NoTls {
        /** Where the server listens. */
        address: Address,
        /** The server's own words, if any. */
        said: String,
    },
    /// The TLS handshake failed, or the server ended the connection afterwards because of TLS.
    #[error("no TLS connection with the NBD server at {address}")]
    Tls {
        /** Where the server listens. */
        address: Address,
        /** What went wrong. */
        source: io::Error,
    },
    /// The server refuses the export.
    #[error("the NBD server at {address} refuses export '{export}': {reason}{said}")]
    Refused {
        /** Where the server listens. */
        address: Address,
        /** The export's name. */
        export: String,
        /** The kind of refusal. */
        reason: &'static str,
        /** The server's own words, if any. */
        said: String,
    },
    /// The server is about to end.
    #[error("the NBD server at {address} is shutting down")]
    ShuttingDown {
        /** Where the server listens. */
        address: Address,
    },
    /// The peer breaks the protocol.
    #[error("the peer at {address} does not follow the NBD protocol: {problem}")]
    Protocol {
        /** Where the peer listens. */
        address: Address,
        /** What is wrong, with the value and the limit. */
        problem: String,
    },
    /// The export has properties that cannot be served.
    #[error("export '{export}' of the NBD server at {address} cannot be served: {problem}")]
    Unusable {
        /** Where the server listens. */
        address: Address,
        /** The export's name. */
        export: String,
        /** What is wrong, with the value and the limit. */
        problem: String,
    },
}

impl NbdError {
    /// Whether a later attempt may succeed although nothing is changed in the configuration.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            // An error without a number is the refusal of the sandbox's helper.
            Self::Connect { source, .. } => {
                source.kind() != io::ErrorKind::PermissionDenied || source.raw_os_error().is_some()
            }
            Self::Tls { source, .. } => source.kind() == io::ErrorKind::TimedOut,
            Self::Lost { .. } | Self::ShuttingDown { .. } => true,
            _ => false,
        }
    }
}

/// The server has answered a flush with this error number: writes may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the NBD server cannot flush: error {0}")]
pub struct FlushRefused(pub u32);
