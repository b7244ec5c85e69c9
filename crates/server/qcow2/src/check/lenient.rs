//! Decodes entries that break the format without the bits that break it, as QEMU does: what such an entry names is not
//! taken for a leak, which a repair would free.

use crate::geometry::Geometry;
use crate::tables::{EntryProblem, L1Entry, L2Entry, RawL2Entry};

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
    let mut first = None;
    let mut next = Some(raw);
    // Each round clears bits, and there are two words.
    while let Some(raw) = next {
        let problem = match L2Entry::decode(raw, geometry) {
            Ok(entry) => return (Some(entry), first),
            Err(problem) => problem,
        };
        first = first.or(Some(problem));
        next = without(raw, problem).filter(|changed| *changed != raw);
    }
    (None, first)
}

fn without(raw: RawL2Entry, problem: EntryProblem) -> Option<RawL2Entry> {
    let RawL2Entry { cluster, subclusters } = raw;
    match problem {
        EntryProblem::Reserved { bits } if cluster & bits == bits => {
            Some(RawL2Entry { cluster: cluster & !bits, subclusters })
        }
        // Compressed clusters have no subclusters.
        EntryProblem::Reserved { .. } | EntryProblem::AllocatedNowhere { .. } => {
            Some(RawL2Entry { cluster, subclusters: 0 })
        }
        EntryProblem::AllocatedAndZero { both } => {
            Some(RawL2Entry { cluster, subclusters: subclusters & !u64::from(both) })
        }
        _ => None,
    }
}
