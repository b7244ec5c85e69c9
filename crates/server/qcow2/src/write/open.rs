//! What the writer checks before the first change: the image's features, and that no two tables overlap.

use crate::error::{FormatError, Limit};
use crate::geometry::Geometry;
use crate::header::{Header, TableAt};
use crate::snapshots::Snapshots;
use crate::tables::{BadEntry, L1Entry, Table};
use crate::write::blocks::{AnyOffset, Blocks};
use crate::write::error::WriteError;
use crate::write::interface::WriteAt;
use crate::write::metadata::Metadata;
use crate::write::space::counts::Counts;

/// The writer's blocks are part of one cluster.
const MIN_CLUSTER_BITS: u32 = 12;
/// Of all internal snapshots together; as many as the active L1 table may have.
const MAX_SNAPSHOT_L1_ENTRIES: u64 = (32 << 20) / 8;

/// Refuses what is only read.
pub(super) fn check_features(header: &Header) -> Result<(), WriteError> {
    let refused = [
        (header.geometry.cluster_bits < MIN_CLUSTER_BITS, "clusters below 4 KiB"),
        (header.incompatible.dirty, "the feature bit 'dirty', before they are repaired"),
        (header.incompatible.corrupt, "the feature bit 'corrupt', before they are repaired"),
        (header.geometry.external_data, "an external data file"),
    ];
    match refused.into_iter().find(|(is_refused, _)| *is_refused) {
        Some((_, feature)) => Err(WriteError::Unsupported { feature }),
        None => Ok(()),
    }
}

/// All clusters of tables.
pub(super) fn metadata<F: WriteAt>(
    blocks: &Blocks<F>,
    header: &Header,
    counts: &Counts,
) -> Result<Metadata, WriteError> {
    let mut found = Found { blocks, geometry: header.geometry, metadata: Metadata::new(&header.geometry) };
    let cluster_bytes = header.geometry.cluster_bytes();
    found.add("header", 0, 1)?;
    let (refcount_table, clusters) = counts.place();
    found.add("refcount table", refcount_table, clusters * cluster_bytes)?;
    for block in counts.table().iter().filter(|block| **block != 0) {
        found.add("refcount block", *block, 1)?;
    }
    found.l1_table(header.l1)?;
    found.metadata.note_doubled_l2();
    found.snapshots(header)?;
    Ok(found.metadata)
}

struct Found<'a, F> {
    blocks: &'a Blocks<F>,
    geometry: Geometry,
    metadata: Metadata,
}

impl<F: WriteAt> Found<'_, F> {
    /// Every cluster of a table must begin inside of the file.
    fn inside(&self, what: &'static str, offset: u64, len_bytes: u64) -> Result<(), WriteError> {
        let (file_bytes, cluster_bytes) = (self.blocks.file_bytes(), self.geometry.cluster_bytes());
        let clusters = file_bytes.div_ceil(cluster_bytes);
        let end = offset.checked_add(len_bytes).map(|end| end.div_ceil(cluster_bytes));
        if end.is_some_and(|end| end <= clusters) {
            return Ok(());
        }
        Err(FormatError::Outside { what, offset, len_bytes, file_bytes }.into())
    }

    fn add(&mut self, what: &'static str, offset: u64, len_bytes: u64) -> Result<(), WriteError> {
        self.inside(what, offset, len_bytes)?;
        let end = (offset + len_bytes).div_ceil(self.geometry.cluster_bytes());
        self.metadata.add(offset >> self.geometry.cluster_bits..end)
    }

    fn l1_table(&mut self, at: TableAt) -> Result<(), WriteError> {
        let entries = u64::from(at.count);
        self.add("L1 table", at.offset, entries * 8)?;
        let blocks = self.blocks;
        blocks.words("L1 table", at.offset, entries, |index, value| {
            let bad = |problem| BadEntry { table: Table::L1, index, value, problem };
            let entry = L1Entry::decode(value, &self.geometry).map_err(bad).map_err(FormatError::Entry)?;
            let Some(table) = entry.l2_table else { return Ok(()) };
            self.inside("L2 table", table, 1)?;
            self.metadata.add_l2(table >> self.geometry.cluster_bits)
        })
    }

    fn snapshots(&mut self, header: &Header) -> Result<(), WriteError> {
        if header.snapshots.count == 0 {
            return Ok(());
        }
        let (blocks, mut entries) = (self.blocks, 0);
        let file = AnyOffset(blocks.file());
        let mut snapshots = Snapshots::new(&file, header);
        for snapshot in snapshots.by_ref() {
            let at = snapshot?.l1;
            entries += u64::from(at.count);
            Limit::AtMost(MAX_SNAPSHOT_L1_ENTRIES).check("l1_size of all snapshots", entries)?;
            self.l1_table(at)?;
        }
        self.add("snapshot table", header.snapshots.offset, snapshots.table_bytes())
    }
}
