//! Reads and stores reference counts: the refcount table in memory (at most 8 MiB), its blocks through [`Blocks`].

use crate::error::{FormatError, Limit};
use crate::geometry::Geometry;
use crate::header::Header;
use crate::tables::refcounts::{RefcountTableEntry, refcount_at, store_refcount};
use crate::tables::{BadEntry, Table};
use crate::write::blocks::{BLOCK_BYTES, Blocks, block_of, in_memory};
use crate::write::error::WriteError;
use crate::write::interface::WriteAt;

#[derive(Debug)]
pub(in crate::write) struct Counts {
    geometry: Geometry,
    /// Offset of the refcount table.
    offset: u64,
    /// Offsets of the blocks. 0: none.
    table: Vec<u64>,
}

impl Counts {
    pub(in crate::write) fn read<F: WriteAt>(
        blocks: &Blocks<F>,
        header: &Header,
    ) -> Result<Self, WriteError> {
        let (geometry, at) = (header.geometry, header.refcount_table);
        let len_bytes = u64::from(at.count) * geometry.cluster_bytes();
        let file_bytes = blocks.file_bytes();
        if at.offset.saturating_add(len_bytes) > file_bytes.next_multiple_of(geometry.cluster_bytes()) {
            let what = "refcount table";
            return Err(FormatError::Outside { what, offset: at.offset, len_bytes, file_bytes }.into());
        }
        let mut table = Vec::with_capacity(in_memory(len_bytes / 8));
        blocks.words("refcount table", at.offset, len_bytes / 8, |index, value| {
            let bad = |problem| BadEntry { table: Table::Refcount, index, value, problem };
            let entry =
                RefcountTableEntry::decode(value, &geometry).map_err(bad).map_err(FormatError::Entry)?;
            table.push(entry.block.unwrap_or_default());
            Ok(())
        })?;
        Ok(Self { geometry, offset: at.offset, table })
    }

    /// Offsets of the table's blocks. 0: none.
    pub(in crate::write) fn table(&self) -> &[u64] {
        &self.table
    }

    /// Where the table is, and how many clusters it has.
    pub(in crate::write) fn place(&self) -> (u64, u64) {
        (self.offset, self.table.len() as u64 * 8 / self.geometry.cluster_bytes())
    }

    /// Another table, which the file has already.
    pub(in crate::write) fn moved_to(&mut self, offset: u64, table: Vec<u64>) {
        (self.offset, self.table) = (offset, table);
    }

    /// The entry of the table that a cluster's count needs.
    pub(in crate::write) const fn index_of(&self, cluster: u64) -> u64 {
        cluster >> self.geometry.refcount_block_bits()
    }

    /// Whether the cluster's count has a place in the file.
    pub(in crate::write) fn has_block(&self, cluster: u64) -> bool {
        self.block_offset(cluster).is_some()
    }

    fn block_offset(&self, cluster: u64) -> Option<u64> {
        let index = usize::try_from(self.index_of(cluster)).ok()?;
        self.table.get(index).copied().filter(|offset| *offset != 0)
    }

    /// The 4 KiB that contain a cluster's count, and its index there.
    fn place_of(&self, cluster: u64) -> Option<(u64, usize)> {
        let in_block = cluster & (self.geometry.refcount_block_entries() - 1);
        let per_block = (BLOCK_BYTES as u64 * 8) >> self.geometry.refcount_order;
        let part = in_block / per_block * BLOCK_BYTES as u64;
        Some((self.block_offset(cluster)? + part, in_memory(in_block % per_block)))
    }

    /// The stored count of a cluster; 0 where there is no block.
    pub(in crate::write) fn of<F: WriteAt>(
        &self,
        blocks: &mut Blocks<F>,
        cluster: u64,
    ) -> Result<u64, WriteError> {
        let Some((offset, index)) = self.place_of(cluster) else { return Ok(0) };
        Ok(refcount_at(blocks.block("refcount block", offset)?, index, &self.geometry).unwrap_or_default())
    }

    /// Stores counts, ascending by cluster, with one write for each 4 KiB of them. Each cluster's count has a block.
    pub(in crate::write) fn store<F: WriteAt>(
        &self,
        blocks: &mut Blocks<F>,
        counts: &[(u64, u64)],
    ) -> Result<(), WriteError> {
        let offset_of = |cluster| self.place_of(cluster).map(|(offset, _)| offset);
        for group in counts.chunk_by(|(one, _), (other, _)| offset_of(*one) == offset_of(*other)) {
            let Some(offset) = group.first().and_then(|(cluster, _)| offset_of(*cluster)) else { continue };
            blocks.update("refcount block", offset, |block| {
                for (cluster, count) in group {
                    let index = self.place_of(*cluster).map_or(usize::MAX, |(_, index)| index);
                    store_refcount(block, index, &self.geometry, *count);
                }
            })?;
        }
        Ok(())
    }

    /// Names a block in the table, which is long enough. The block must be durable.
    pub(in crate::write) fn add_block<F: WriteAt>(
        &mut self,
        blocks: &mut Blocks<F>,
        index: u64,
        block: u64,
    ) -> Result<(), WriteError> {
        let at = self.offset + index * 8;
        let start = in_memory(at - block_of(at));
        blocks.update("refcount table", block_of(at), |bytes| {
            bytes[start..start + 8].copy_from_slice(&block.to_be_bytes());
        })?;
        if let Some(entry) = self.table.get_mut(in_memory(index)) {
            *entry = block;
        }
        Ok(())
    }

    /// Lower counts for clusters that lose so many references each, ascending.
    pub(in crate::write) fn lowered<F: WriteAt>(
        &self,
        blocks: &mut Blocks<F>,
        references: impl Iterator<Item = (u64, u64)>,
    ) -> Result<Vec<(u64, u64)>, WriteError> {
        let mut counts = Vec::new();
        for (cluster, lost) in references {
            let value = self.of(blocks, cluster)?;
            let Some(left) = value.checked_sub(lost) else {
                let place = cluster << self.geometry.cluster_bits;
                let limit = Limit::AtLeast(lost);
                return Err(WriteError::Damaged { field: "refcount", place, value, limit });
            };
            counts.push((cluster, left));
        }
        Ok(counts)
    }
}
