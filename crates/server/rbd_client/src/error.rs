//! Why an image cannot be used. Each error is one line with the problem and a remedy.

use std::io;
use std::path::PathBuf;

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// The libraries are not there.
    #[error(
        "{library} cannot be loaded ({reason}): install Ceph's client libraries (on Debian the package librbd1)"
    )]
    NoLibrary {
        /** The library. */
        library: &'static str,
        /** The loader's message. */
        reason: String,
    },
    /// The cluster's configuration cannot be read.
    #[error("the cluster's configuration {} cannot be used: check --rbd-conf", path.display())]
    Configuration {
        /** Its path. */
        path: PathBuf,
        /** librados' error. */
        source: io::Error,
    },
    /// The cluster refuses the user, or has no key for it.
    #[error("the cluster refuses client.{id}: check --rbd-id, and that its keyring is readable")]
    Refused {
        /** The user. */
        id: String,
        /** librados' error. */
        source: io::Error,
    },
    /// No monitor answers.
    #[error("the cluster of {} does not answer: are its monitors running and reachable?", conf.display())]
    Away {
        /** The configuration with the monitors' addresses. */
        conf: PathBuf,
        /** librados' error. */
        source: io::Error,
    },
    /// There is no such pool.
    #[error("pool '{pool}' does not exist, or client.{id} may not use it")]
    NoPool {
        /** The pool. */
        pool: String,
        /** The user. */
        id: String,
    },
    /// There is no such image or snapshot.
    #[error("image {image} does not exist: check the name, or make it with `rbd create`")]
    NoImage {
        /** The image. */
        image: String,
    },
    /// Another client holds the exclusive lock.
    #[error(
        "image {image} is in use by another client, which has its exclusive lock: stop it, or use --readonly"
    )]
    Locked {
        /** The image. */
        image: String,
    },
    /// The image has no exclusive lock.
    #[error(
        "image {image} lacks the feature exclusive-lock, so nothing keeps a second client from writing it: add it with `rbd \
         feature enable {image} exclusive-lock`, or use --rbd-lock off"
    )]
    NoLock {
        /** The image. */
        image: String,
    },
    /// A snapshot is to be written.
    #[error("image {image} is a snapshot, which cannot be written: use --readonly")]
    Snapshot {
        /** The image. */
        image: String,
    },
    /// Any other error.
    #[error("image {image}: cannot {action}")]
    Other {
        /** The image. */
        image: String,
        /** The attempted action. */
        action: &'static str,
        /** librbd's error. */
        source: io::Error,
    },
}

impl RbdError {
    /// Whether a later attempt may succeed although nothing is changed in the configuration.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Away { .. } | Self::Locked { .. } => true,
            Self::Other { source, .. } => source.raw_os_error() == Some(libc::ETIMEDOUT),
            _ => false,
        }
    }
}
