//! Why a repair stops.

use std::io;

use crate::check::obstacles::Obstacles;
use crate::error::FormatError;

/// Why an image is not repaired, or not to the end. It is not worse than before.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// Header or L1 table break the format, or cannot be read.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The check could not read everything.
    #[error("nothing is repaired, because tables cannot be read: {count}")]
    Unreadable {
        /** Findings of the check. */
        count: u64,
    },
    /// Not all references are known any more, so that clusters in use would be freed.
    #[error("a table cannot be read any more that the check could read, so the repair stops")]
    NoLongerReadable,
    /// New reference counts would free what damaged entries mean.
    #[error(
        "the reference counts must be built anew, but damaged entries may refer to any cluster: `qemu-img check -r all` \
         does it, and frees what they may mean"
    )]
    NotRebuilt,
    /// A power loss would leave old counts that lead to the new ones.
    #[error(
        "the reference counts must be built anew behind the end of the file, where the damaged ones lead to: \
         `qemu-img check -r all` does it"
    )]
    Overtaken,
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
    /// The check counts up to a limit.
    #[error("cluster {cluster} has more references than a check counts")]
    Uncountable {
        /** The host cluster's number. */
        cluster: u64,
    },
    /// The file is longer than a refcount table can describe.
    #[error("a refcount table for {clusters} clusters would be longer than 8 MiB")]
    TooLong {
        /** Of the file. */
        clusters: u64,
    },
    /// The file cannot be changed.
    #[error("cannot write the {what} at {offset:#x}")]
    Io {
        /** Which part of the image. */
        what: &'static str,
        /** Where it begins. */
        offset: u64,
        /** The kernel's error. */
        source: io::Error,
    },
    /// The file cannot become longer.
    #[error("cannot grow the file to {len_bytes:#x}")]
    Grow {
        /** The new length. */
        len_bytes: u64,
        /** The kernel's error. */
        source: io::Error,
    },
    /// What was written may be lost.
    #[error("cannot sync the image")]
    Sync(#[source] io::Error),
}

/// A walk has read all tables, as the check did before.
pub(super) fn expect_read(obstacles: Obstacles) -> Result<(), RepairError> {
    if obstacles.unreadable { Err(RepairError::NoLongerReadable) } else { Ok(()) }
}

/// A walk knows all references, as the check did before.
pub(super) fn expect_known(obstacles: Obstacles) -> Result<(), RepairError> {
    if obstacles.unknown_references { Err(RepairError::NoLongerReadable) } else { expect_read(obstacles) }
}
