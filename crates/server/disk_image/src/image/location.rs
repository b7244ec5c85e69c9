//! Where an image is: on this host, or on another machine.

use std::path::Path;

use nbd_client::{NbdUri, UriError};
use rbd_client::{ClusterOptions, RbdSpec, SpecError};

/// Where an image is. The text that names the image determines this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A file or block device of this host.
    Host,
    /// An export of an NBD server.
    Nbd(NbdUri),
    /// An image in a Ceph cluster.
    Rbd(RbdSpec),
}

/// Why a text that begins like a URI names no image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocationError {
    /// An NBD URI with a mistake.
    #[error(transparent)]
    Nbd(#[from] UriError),
    /// The name of an RBD image with a mistake.
    #[error(transparent)]
    Rbd(#[from] SpecError),
}

impl Location {
    /// Parses the text that names an image. A file whose path begins like a URI can be named with `./` before it.
    ///
    /// # Errors
    /// [`LocationError`]: the text begins like a URI and is none.
    pub fn parse(image: &Path) -> Result<Self, LocationError> {
        match image.to_str() {
            Some(text) if NbdUri::is_meant(text) => Ok(Self::Nbd(text.parse()?)),
            Some(text) if RbdSpec::is_meant(text) => Ok(Self::Rbd(text.parse()?)),
            _ => Ok(Self::Host),
        }
    }

    /// Whether the image is on another machine.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        *self != Self::Host
    }
}

/// How to reach and open an RBD image.
#[derive(Clone, Debug)]
pub struct RbdOptions {
    /// The cluster.
    pub cluster: ClusterOptions,
    /// Take the image's exclusive lock, unless it is served read-only.
    pub lock: bool,
}

impl Default for RbdOptions {
    fn default() -> Self {
        Self { cluster: ClusterOptions::default(), lock: true }
    }
}
