//! Where an image is: on this host, or on another machine.

use std::path::Path;

/// Where an image is. The text that names the image determines this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A file or block device of this host.
    Host,
}

/// Why a text names no image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocationError {}

impl Location {
    /// Parses the text that names an image. A path that begins like a URI needs `./` before it.
    ///
    /// # Errors
    /// [`LocationError`]: the text begins like a URI and is none.
    pub fn parse(_image: &Path) -> Result<Self, LocationError> {
        Ok(Self::Host)
    }

    /// Whether the image is on another machine.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        match self {
            Self::Host => false,
        }
    }
}
