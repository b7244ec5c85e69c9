//! What a check finds, and its sums.

use std::fmt;

use crate::error::FormatError;
use crate::tables::{BadEntry, Table};

/// The result of a check.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Errors that lose data, or would lose them at the next write.
    pub corruptions: u64,
    /// Clusters that nothing uses and that are not free.
    pub leaks: u64,
    /// Tables that could not be read.
    pub check_errors: u64,
    /// The end of the last cluster that is not free.
    pub image_end_bytes: u64,
    /// Clusters of the guest's disk.
    pub total_clusters: u64,
    /// Those that have a host cluster.
    pub allocated_clusters: u64,
    /// Those whose host cluster does not follow the host cluster before.
    pub fragmented_clusters: u64,
    /// Those that are compressed.
    pub compressed_clusters: u64,
}

/// What a finding means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// It loses data, or would at the next write.
    Corruption,
    /// It wastes space.
    Leak,
    /// It could not be checked.
    CheckError,
}

/// One finding.
#[derive(Debug)]
pub enum Finding {
    /// A reference count that is not the number of references.
    Refcount {
        /** The host cluster's number. */
        cluster: u64,
        /** As stored. */
        refcount: u64,
        /** As counted. */
        references: u64,
    },
    /// A cluster of a table that something else uses, too.
    Overlap {
        /** The host cluster's number. */
        cluster: u64,
        /** As counted. */
        references: u64,
    },
    /// An entry that breaks the format.
    Entry {
        /** Where its table is. */
        table_offset: u64,
        /** The entry. */
        bad: BadEntry,
    },
    /// A reference to what the file does not have.
    Outside {
        /** Of which kind. */
        what: &'static str,
        /** Where it should be. */
        offset: u64,
        /** Its length. */
        len_bytes: u64,
    },
    /// A copied bit that does not fit to the reference count.
    Copied {
        /** Of which table. */
        table: Table,
        /** The entry's position in its table. */
        index: u64,
        /** As stored. */
        value: u64,
        /** As stored. */
        refcount: u64,
    },
    /// The table of snapshots or bitmaps breaks the format.
    Broken(FormatError),
    /// The file cannot be read.
    Unreadable(FormatError),
}

impl Finding {
    /// What the finding means.
    #[must_use]
    pub fn severity(&self) -> Severity {
        match self {
            Self::Refcount { refcount, references, .. } if refcount > references => Severity::Leak,
            Self::Unreadable(_) => Severity::CheckError,
            _ => Severity::Corruption,
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refcount { cluster, refcount, references } => {
                write!(f, "cluster {cluster}: refcount {refcount}, references {references}")
            }
            Self::Overlap { cluster, references } => {
                write!(f, "cluster {cluster}: a table's, but used {references} times or for data, too")
            }
            Self::Entry { table_offset, bad } => write!(f, "table at {table_offset:#x}: {bad}"),
            Self::Outside { what, offset, len_bytes } => {
                write!(f, "{what} at {offset:#x} with {len_bytes} bytes: past the end of the file")
            }
            Self::Copied { table, index, value, refcount } => {
                write!(f, "{table} {index} is {value:#018x}: the copied bit is wrong, refcount {refcount}")
            }
            Self::Broken(error) | Self::Unreadable(error) => write!(f, "{error}"),
        }
    }
}
