//! Why a repair stops.

use std::io;

use crate::error::FormatError;

/// Why an image is not repaired, or not to the end. It is not worse than before.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// Header or L1 table break the format, or cannot be read.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The check could not read everything.
    #[error("{count} tables cannot be read, so nothing is repaired")]
    Unreadable {
        /** Findings of the check. */
        count: u64,
    },
    /// New reference counts would free what damaged entries mean.
    #[error(
        "the reference counts must be built anew, but damaged entries may refer to any cluster: `qemu-img check -r all` \
         does it, and frees what they may mean"
    )]
    NotRebuilt,
    /// A count of the image's width cannot be so high.
    #[error(
        "cluster {cluster} has {references} references, but a reference count of this image is at most {most}"
    )]
    TooManyReferences {
        /** The host cluster's number. */
        cluster: u64,
        /** As counted. */
        references: u64,
        /** With all bits set. */
        most: u64,
    },
    /// The file is longer than a refcount table can describe.
    #[error("a refcount table for {clusters} clusters would be longer than 8 MiB")]
    TooLong {
        /** Of the file. */
        clusters: u64,
    },
    /// The file cannot be changed.
    #[error("cannot {action} the {what} at {offset:#x}")]
    Io {
        /** `write` or `grow`. */
        action: &'static str,
        /** Which part of the image. */
        what: &'static str,
        /** Where it begins. */
        offset: u64,
        /** The kernel's error. */
        source: io::Error,
    },
    /// What was written may be lost.
    #[error("cannot sync the image")]
    Sync(#[source] io::Error),
}
