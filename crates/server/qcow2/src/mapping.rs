//! From a guest's range to runs of data, zeroes, nothing and compressed clusters.
//!
//! `guest offset, length → L1 entry → L2 entries, through the caller's L2Source → Run, merged over (sub)clusters`
//!
//! - A run ends before an entry that cannot be read or breaks the format. It is an error only if the run would begin
//!   there, so a serving path whose cache lacks the next table goes on with what it has.
//! - Nothing here allocates.

use crate::geometry::Geometry;
use crate::tables::{
    BadEntry, CompressedCluster, EntryProblem, L1Entry, L2Entry, RawL2Entry, StandardCluster, Table,
};

/// Adjacent guest bytes with one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Never 0, never more than was asked for.
    pub len_bytes: u64,
    /// The answer.
    pub kind: RunKind,
}

/// Where the bytes of a run are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunKind {
    /// In the image, or in its external data file.
    Data {
        /** Of the run's first byte. */
        host_offset: u64,
    },
    /// They are zeroes.
    Zero,
    /// In the backing file; zeroes where there is none.
    Unallocated,
    /// In one compressed cluster. The run's first byte has the same position in the decompressed cluster as the guest's
    /// offset in its own.
    Compressed(CompressedCluster),
}

impl RunKind {
    /// Whether a run of this kind and length goes on as `next`.
    fn goes_on(self, len_bytes: u64, next: Self) -> bool {
        match (self, next) {
            (Self::Data { host_offset }, Self::Data { host_offset: next }) => host_offset + len_bytes == next,
            (Self::Zero, Self::Zero) | (Self::Unallocated, Self::Unallocated) => true,
            _ => false,
        }
    }
}

/// Gives the entries of L2 tables, normally from a cache.
pub trait L2Source {
    /// Why an entry cannot be had: an error, or that it is not in the cache.
    type Error: From<BadEntry>;

    /// The entry `index` of the table at `table`, as stored.
    ///
    /// # Errors
    /// The entry cannot be had.
    fn entry(&mut self, table: u64, index: u32) -> Result<RawL2Entry, Self::Error>;
}

/// The first run of a guest's range.
///
/// `l1`: the table's entries as stored, in the host's byte order. What lies past the table is unallocated.
///
/// # Errors
/// The entry of `guest_offset` breaks the format, or the source does not have it.
///
/// # Panics
/// `len_bytes` is 0, or the range ends past 2^63.
pub fn next_run<S: L2Source>(
    geometry: &Geometry,
    l1: &[u64],
    source: &mut S,
    guest_offset: u64,
    len_bytes: u64,
) -> Result<Run, S::Error> {
    let mut run = run_of_table(geometry, l1, source, guest_offset, len_bytes)?;
    while run.len_bytes < len_bytes && geometry.is_table_start(guest_offset + run.len_bytes) {
        let (at, rest) = (guest_offset + run.len_bytes, len_bytes - run.len_bytes);
        match run_of_table(geometry, l1, source, at, rest) {
            Ok(next) if run.kind.goes_on(run.len_bytes, next.kind) => run.len_bytes += next.len_bytes,
            _ => break,
        }
    }
    Ok(run)
}

impl Geometry {
    const fn is_table_start(&self, guest_offset: u64) -> bool {
        guest_offset.is_multiple_of(self.l2_coverage_bytes())
    }
}

/// The first run of a range, at most to the end of the L2 table in which it begins.
fn run_of_table<S: L2Source>(
    geometry: &Geometry,
    l1: &[u64],
    source: &mut S,
    guest_offset: u64,
    len_bytes: u64,
) -> Result<Run, S::Error> {
    let index = geometry.l1_index(guest_offset);
    let raw = usize::try_from(index).ok().and_then(|index| l1.get(index)).copied().unwrap_or_default();
    let entry = L1Entry::decode(raw, geometry).map_err(|problem| BadEntry {
        table: Table::L1,
        index,
        value: raw,
        problem,
    })?;
    let Some(table) = entry.l2_table else {
        let coverage = geometry.l2_coverage_bytes();
        let len_bytes = len_bytes.min(coverage - guest_offset % coverage);
        return Ok(Run { len_bytes, kind: RunKind::Unallocated });
    };
    run_in_table(geometry, guest_offset, len_bytes, |index| source.entry(table, index))
}

/// The first run of a guest's range in an L2 table that the caller has; at most to the table's end.
///
/// # Errors
/// The entry of `guest_offset` breaks the format, or `entry` does not have it.
///
/// # Panics
/// `len_bytes` is 0, or the range ends past 2^63.
pub fn run_in_table<E: From<BadEntry>>(
    geometry: &Geometry,
    guest_offset: u64,
    len_bytes: u64,
    mut entry: impl FnMut(u32) -> Result<RawL2Entry, E>,
) -> Result<Run, E> {
    assert!(len_bytes > 0, "a range of no bytes");
    assert!(guest_offset.checked_add(len_bytes).is_some_and(|end| end <= 1 << 63), "a range past 2^63");
    let first = geometry.l2_index(guest_offset);
    let mut run = piece(geometry, guest_offset, first, entry(first)?)?;
    for index in first + 1..geometry.l2_entries() {
        let at = guest_offset + run.len_bytes;
        if run.len_bytes >= len_bytes || geometry.in_cluster(at) != 0 {
            break;
        }
        let Ok(raw) = entry(index) else { break };
        match piece(geometry, at, index, raw) {
            Ok(next) if run.kind.goes_on(run.len_bytes, next.kind) => run.len_bytes += next.len_bytes,
            _ => break,
        }
    }
    run.len_bytes = run.len_bytes.min(len_bytes);
    Ok(run)
}

/// From `guest_offset` as far as the subclusters of one cluster have the same answer.
fn piece(geometry: &Geometry, guest_offset: u64, index: u32, raw: RawL2Entry) -> Result<Run, BadEntry> {
    let bad = |problem| BadEntry { table: Table::L2, index: index.into(), value: raw.cluster, problem };
    let in_cluster = geometry.in_cluster(guest_offset);
    let cluster = match L2Entry::decode(raw, geometry).map_err(bad)? {
        L2Entry::Compressed(compressed) => {
            let kind = RunKind::Compressed(compressed);
            return Ok(Run { len_bytes: geometry.cluster_bytes() - in_cluster, kind });
        }
        L2Entry::Standard(cluster) => cluster,
    };
    identity(geometry, cluster.host_offset, guest_offset - in_cluster).map_err(bad)?;
    let first = geometry.subcluster_index(guest_offset);
    let (kind, same) = state(&cluster, first, in_cluster);
    let end = (first + same).min(geometry.subclusters());
    let len_bytes = (u64::from(end) << geometry.subcluster_bits()) - in_cluster;
    Ok(Run { len_bytes, kind })
}

/// An external data file has the guest's data at the guest's offsets.
fn identity(geometry: &Geometry, host_offset: Option<u64>, guest_offset: u64) -> Result<(), EntryProblem> {
    match host_offset {
        Some(offset) if geometry.external_data && offset != guest_offset => {
            Err(EntryProblem::NotIdentity { offset, guest_offset })
        }
        _ => Ok(()),
    }
}

/// What a subcluster is, and how many subclusters from there on are the same. The caller cuts the number off at the
/// cluster's end.
fn state(cluster: &StandardCluster, first: u32, in_cluster: u64) -> (RunKind, u32) {
    let (allocated, zero) = (cluster.allocated >> first, cluster.zero >> first);
    match cluster.host_offset {
        Some(host_offset) if allocated & 1 != 0 => {
            (RunKind::Data { host_offset: host_offset + in_cluster }, allocated.trailing_ones())
        }
        _ if zero & 1 != 0 => (RunKind::Zero, zero.trailing_ones()),
        _ => (RunKind::Unallocated, (allocated | zero).trailing_zeros()),
    }
}
