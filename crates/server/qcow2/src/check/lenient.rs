//! Decodes entries that break the format without the bits that break it, as QEMU does: what such an entry names is not
//! taken for a leak, which a repair would free.

use crate::geometry::Geometry;
use crate::tables::{COMPRESSED, EntryProblem, L1Entry, L2Entry, RawL2Entry};

/// A decoded entry, if it has a meaning, and the first thing that is wrong with it.
pub(crate) type Decoded<T> = (Option<T>, Option<EntryProblem>);

pub(crate) fn l1_entry(value: u64, geometry: &Geometry) -> Decoded<L1Entry> {
    match L1Entry::decode(value, geometry) {
        Ok(entry) => (Some(entry), None),
        Err(problem @ EntryProblem::Reserved { bits }) => {
            (L1Entry::decode(value & !bits, geometry).ok(), Some(problem))
        }
        Err(problem) => (None, Some(problem)),
    }
}

pub(crate) fn l2_entry(raw: RawL2Entry, geometry: &Geometry) -> Decoded<L2Entry> {
    let first = L2Entry::decode(raw, geometry).err();
    // Compressed clusters have no subclusters.
    let subclusters = if raw.cluster & COMPRESSED == 0 { raw.subclusters } else { 0 };
    let mut next = Some(RawL2Entry { subclusters, ..raw });
    // Each round clears bits.
    while let Some(raw) = next {
        let problem = match L2Entry::decode(raw, geometry) {
            Ok(entry) => return (Some(entry), first),
            Err(problem) => problem,
        };
        next = without(raw, problem).filter(|changed| *changed != raw);
    }
    (None, first)
}

/// What has data stays, so that data without a place have no meaning.
fn without(raw: RawL2Entry, problem: EntryProblem) -> Option<RawL2Entry> {
    let RawL2Entry { cluster, subclusters } = raw;
    match problem {
        EntryProblem::Reserved { bits } => Some(RawL2Entry { cluster: cluster & !bits, subclusters }),
        EntryProblem::AllocatedAndZero { both } => {
            Some(RawL2Entry { cluster, subclusters: subclusters & !(u64::from(both) << 32) })
        }
        _ => None,
    }
}
