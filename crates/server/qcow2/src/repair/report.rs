//! What a repair is told to do, and what it tells.

use std::fmt;

use crate::check::{CheckReport, Finding};
use crate::tables::BadEntry;

/// What is repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Counts that are too high, and the copied bits that become wrong by that.
    Leaks,
    /// All that can be repaired without losing data.
    All,
}

/// What a repair tells while it runs.
#[derive(Debug)]
pub enum Event<'a> {
    /// The first check found something.
    Found(&'a Finding),
    /// The first check is over.
    Checked(CheckReport),
    /// What the sums do not say.
    Note(Note),
    /// The second check found something.
    Left(&'a Finding),
}

/// What the sums of a repair do not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Note {
    /// The entry of a cluster without data was wrong, and has no offset any more. The cluster reads as zeroes, or as the
    /// backing file where an extended entry does not say zeroes.
    Zeroed {
        /** Where its table is. */
        table_offset: u64,
        /** The entry. */
        bad: BadEntry,
    },
    /// Clusters that seem leaked were not freed.
    LeaksKept {
        /** Their number. */
        leaks: u64,
    },
    /// The image has a new refcount table.
    Rebuilt {
        /** Where it is. */
        table_offset: u64,
        /** Of the table, and of all blocks. */
        clusters: u64,
    },
    /// The image was marked dirty or corrupt, and is not any more.
    MarksCleared,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zeroed { table_offset, bad } => {
                write!(f, "table at {table_offset:#x}: {bad}; it had no data, and has no offset any more")
            }
            Self::LeaksKept { leaks } => {
                write!(
                    f,
                    "leaked clusters that are kept, because a damaged entry or table may refer to them: {leaks}"
                )
            }
            Self::Rebuilt { table_offset, clusters } => write!(
                f,
                "all reference counts are new: {clusters} clusters, with the refcount table at {table_offset:#x}"
            ),
            Self::MarksCleared => f.write_str("the image is not marked dirty or corrupt any more"),
        }
    }
}

/// The result of a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repaired {
    /// By how many there are fewer leaks.
    pub leaks_freed: u64,
    /// By how many there are fewer corruptions.
    pub corruptions_repaired: u64,
    /// The second check.
    pub after: CheckReport,
}
