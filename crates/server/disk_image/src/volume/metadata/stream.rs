//! A step of a job that makes the top independent of the layers below it.
//!
//! `clusters that the top lacks → is there data below? → claimed`; what the tables below call zeroes stays unallocated
//!
//! A cluster that the top has keeps what it has. So the job needs no second look at what guests change meanwhile.

use std::io;
use std::ops::Range;

use qcow2::{Allocation, View, WriteError, Writer};

use super::below::Lower;
use crate::volume::Place;
use crate::volume::link::Progress;
use crate::volume::table_file::TableFile;

/// What one step copies. A guest's request waits for at most one step.
pub(super) const STEP_BYTES: u64 = 1 << 20;
/// Clusters that one step looks up.
pub(super) const STEP_CLUSTERS: u64 = 4096;

/// Copies the first clusters from `from` on that the top lacks.
pub(super) fn stream(
    writer: &mut Writer<TableFile>,
    lower: &mut Lower<'_>,
    view: &mut dyn View,
    from: u64,
) -> Result<Progress, WriteError> {
    let (cluster_bytes, size_bytes) = (writer.header().geometry.cluster_bytes(), writer.header().size_bytes);
    let (mut at, mut found, mut zero_to) = (from, Vec::new(), from);
    let last = from.saturating_add(STEP_CLUSTERS * cluster_bytes).min(size_bytes);
    let mut copied_bytes = 0;
    while at < last && copied_bytes < STEP_BYTES {
        let end = (at - at % cluster_bytes + cluster_bytes).min(size_bytes);
        let (has, _) = writer.allocation(at / cluster_bytes)?;
        if matches!(has, Allocation::Unallocated | Allocation::Data { needs_below: true })
            && (matches!(has, Allocation::Data { .. }) || has_data(lower, at..end, &mut zero_to)?)
        {
            found.push(at..end);
            copied_bytes += end - at;
        }
        at = end;
    }
    if !found.is_empty() {
        writer.claim(&joined(found), lower, view)?;
    }
    Ok(Progress { to: at, copied_bytes, ..Progress::default() })
}

/// Whether the layers below have more than zeroes in a range. `zero_to`: up to here they have nothing else.
fn has_data(lower: &mut Lower<'_>, range: Range<u64>, zero_to: &mut u64) -> Result<bool, WriteError> {
    let mut at = range.start.max(*zero_to);
    while at < range.end {
        let extent = lower.extent(at, lower.volume.size_bytes() - at).map_err(unreadable(at))?;
        if extent.place != Place::Zeroes {
            return Ok(true);
        }
        at += extent.len_bytes;
        *zero_to = at;
    }
    Ok(false)
}

fn unreadable(offset: u64) -> impl FnOnce(io::Error) -> WriteError {
    move |source| qcow2::FormatError::Read { what: "backing file", offset, source }.into()
}

/// Sorts ranges, and joins those that touch.
pub(super) fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_overlap_or_touch_are_one() {
        let ranges = vec![5..6, 0..2, 1..3, 3..4, 8..9];
        assert_eq!(joined(ranges), [0..4, 5..6, 8..9]);
        assert_eq!(joined(Vec::new()), Vec::<Range<u64>>::new());
    }
}
