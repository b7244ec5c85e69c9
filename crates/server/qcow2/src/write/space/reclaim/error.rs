//! Why leaked clusters are not freed.

use crate::error::FormatError;
use crate::tables::BadEntry;
use crate::write::error::WriteError;

/// Why leaked clusters are not freed. The texts name no file.
#[derive(Debug, thiserror::Error)]
pub enum ReclaimError {
    /// The image has bitmaps, whose clusters the scan does not look at.
    #[error(
        "its header has the extension 'bitmaps': stop its users and run bareblk image check --repair leaks"
    )]
    Bitmaps,
    /// Memory is limited.
    #[error(
        "its file has {clusters} clusters, allowed are at most {most}: stop its users and run bareblk image check --repair leaks"
    )]
    TooLarge {
        /** Of the file. */
        clusters: u64,
        /** The limit. */
        most: u64,
    },
    /// The memory is not there.
    #[error("{bytes} bytes of memory are needed: stop its users and run bareblk image check --repair leaks")]
    NoMemory {
        /** For two sets of clusters. */
        bytes: u64,
    },
    /// A change may be in the file, or arrive there.
    #[error(
        "a write to it has failed earlier, so a cluster that looks leaked may be in use: restart the server and start the job again"
    )]
    FailedWrite,
    /// It is not known where the other table is.
    #[error(
        "two L1 entries lead to one L2 table, allowed is one: nothing was freed, see bareblk image check"
    )]
    DoubledTable,
    /// An entry that may mean any cluster.
    #[error("table at {table_offset:#x}: {bad}: nothing was freed, see bareblk image check")]
    Entry {
        /** Where the table is. */
        table_offset: u64,
        /** The entry. */
        bad: BadEntry,
    },
    /// The image contradicts itself.
    #[error(
        "{field} at {place:#x} is {value:#x}, allowed is {allowed}: nothing was freed, see bareblk image check"
    )]
    Damaged {
        /** What the file's number is. */
        field: &'static str,
        /** The host offset that it belongs to. */
        place: u64,
        /** As stored. */
        value: u64,
        /** In words. */
        allowed: &'static str,
    },
    /// The tables were closed meanwhile.
    #[error("its tables were closed: start the job again")]
    Ended,
    /// The file, or its tables.
    #[error(transparent)]
    Write(#[from] WriteError),
}

pub(super) fn damaged(field: &'static str, place: u64, value: u64, allowed: &'static str) -> ReclaimError {
    ReclaimError::Damaged { field, place, value, allowed }
}

impl From<FormatError> for ReclaimError {
    fn from(error: FormatError) -> Self {
        Self::Write(WriteError::Format(error))
    }
}
