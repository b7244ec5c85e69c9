//! Where an image is: on this host, or on another machine.

use std::path::Path;

use nbd_client::{NbdUri, UriError};

/// Where an image is. The text that names the image determines this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A file or block device of this host.
    Host,
    /// An export of an NBD server.
    Nbd(NbdUri),
}

/// Why a text that begins like a URI names no image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocationError {
    /// An NBD URI with a mistake.
    #[error(transparent)]
    Nbd(#[from] UriError),
}

impl Location {
    /// Parses the text that names an image. A file whose path begins like a URI can be named with `./` before it.
    ///
    /// # Errors
    /// [`LocationError`]: the text begins like a URI and is none.
    pub fn parse(image: &Path) -> Result<Self, LocationError> {
        match image.to_str().filter(|text| NbdUri::is_meant(text)) {
            Some(text) => Ok(Self::Nbd(text.parse()?)),
            None => Ok(Self::Host),
        }
    }

    /// Whether the image is on another machine.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        *self != Self::Host
    }
}
