//! Why a change fails.

use std::io;

use crate::error::{FormatError, Limit};

/// Why an image is not changed.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The image has a feature with which it is only read.
    #[error("images with {feature} are not written")]
    Unsupported {
        /** In words. */
        feature: &'static str,
    },
    /// Whole clusters cannot read as zeroes without data: version 2 with a backing file. Claim them and write zeroes.
    #[error("version 2 has no entry for zeroes over a backing file")]
    NoZeroFlag,
    /// A table cannot be read, or breaks the format.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The file cannot be changed. Nothing was published; the change may be tried again.
    #[error("cannot {action} the {what} at {offset:#x}")]
    Io {
        /** `write`, `punch`, `set` or `grow`. */
        action: &'static str,
        /** Which part of the image. */
        what: &'static str,
        /** Where it begins. */
        offset: u64,
        /** The kernel's error. */
        source: io::Error,
    },
    /// What was written may be lost. The writer changes nothing any more.
    #[error("cannot sync the image")]
    Sync(#[source] io::Error),
    /// It is unknown which table or size the header has. The writer changes nothing any more.
    #[error("cannot write the header")]
    Header(#[source] io::Error),
    /// The image contradicts itself. The writer changes nothing any more.
    #[error(
        "{field} of {place:#x} is {value}, allowed is {limit}: the image is damaged and not changed any more"
    )]
    Damaged {
        /** What the file's number is. */
        field: &'static str,
        /** The host offset, or the index, that it belongs to. */
        place: u64,
        /** As stored. */
        value: u64,
        /** What is allowed. */
        limit: Limit,
    },
    /// An earlier error ended all changes.
    #[error("an earlier error ended all changes: {reason}")]
    Stopped {
        /** That error. */
        reason: String,
    },
}

/// There is no room for more of `what`.
pub(super) fn full(what: &'static str) -> WriteError {
    WriteError::Io { action: "grow", what, offset: 0, source: io::ErrorKind::StorageFull.into() }
}

impl WriteError {
    /// The file system, or the user's part of it, is full.
    pub(super) fn is_full(&self) -> bool {
        let kind = self.io_error().map(io::Error::kind);
        matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
    }

    /// The kernel's error, where a file or the backing file failed: for the guest's request, or for parking it.
    #[must_use]
    pub fn io_error(&self) -> Option<&io::Error> {
        match self {
            Self::Io { source, .. } | Self::Sync(source) | Self::Header(source) => Some(source),
            Self::Format(FormatError::Read { source, .. }) => Some(source),
            _ => None,
        }
    }
}
