//! Reads stored reference counts: the refcount table as a whole, refcount blocks through a small cache.

use std::collections::HashMap;

use crate::big_endian::u64_at;
use crate::error::{FormatError, read_padded};
use crate::geometry::Geometry;
use crate::header::Header;
use crate::read_at::ReadAt;
use crate::tables::refcounts::{RefcountTableEntry, refcount_at};

/// Memory for blocks.
const CACHE_BYTES: usize = 4 << 20;

/// The stored reference counts of an image.
#[derive(Debug)]
pub(crate) struct Refcounts<'a, F> {
    file: &'a F,
    geometry: Geometry,
    file_bytes: u64,
    table: Vec<u8>,
    blocks: HashMap<u64, Box<[u8]>>,
}

impl<'a, F: ReadAt> Refcounts<'a, F> {
    /// Reads the table. What the file does not have of it is empty.
    pub(crate) fn read(file: &'a F, header: &Header, file_bytes: u64) -> (Self, Option<FormatError>) {
        let (at, geometry) = (header.refcount_table, header.geometry);
        let table_bytes = u64::from(at.count) * geometry.cluster_bytes();
        let there = table_bytes.min(file_bytes.saturating_sub(at.offset));
        let mut table = vec![0; usize::try_from(there).unwrap_or_default()];
        let failed = read_padded(file, "refcount table", at.offset, &mut table).err();
        (Self { file, geometry, file_bytes, table, blocks: HashMap::new() }, failed)
    }

    /// The table's entries, as stored.
    pub(crate) fn entries(&self) -> u64 {
        self.table.len() as u64 / 8
    }

    pub(crate) fn entry(&self, index: u64) -> u64 {
        usize::try_from(index).map_or(0, |index| u64_at(&self.table, index * 8))
    }

    /// Whether any count in the entry's range may be above 0.
    pub(super) fn has_block(&self, index: u64) -> bool {
        self.block_offset(index).is_some()
    }

    /// Blocks that break the format, or that the file does not have, are empty: the walk reports them.
    pub(crate) fn block_offset(&self, index: u64) -> Option<u64> {
        let entry = RefcountTableEntry::decode(self.entry(index), &self.geometry).ok()?;
        entry.block.filter(|offset| *offset < self.file_bytes)
    }

    /// The stored count of a cluster.
    pub(crate) fn of(&mut self, cluster: u64) -> Result<u64, FormatError> {
        let entries = self.geometry.refcount_block_entries();
        let Some(offset) = self.block_offset(cluster / entries) else { return Ok(0) };
        let geometry = self.geometry;
        let index = usize::try_from(cluster % entries).unwrap_or(usize::MAX);
        Ok(refcount_at(self.block(offset)?, index, &geometry).unwrap_or_default())
    }

    fn block(&mut self, offset: u64) -> Result<&[u8], FormatError> {
        let block_bytes = usize::try_from(self.geometry.cluster_bytes()).unwrap_or(usize::MAX);
        if !self.blocks.contains_key(&offset) {
            let mut block = vec![0; block_bytes].into_boxed_slice();
            read_padded(self.file, "refcount block", offset, &mut block)?;
            if self.blocks.len() >= CACHE_BYTES / block_bytes {
                self.blocks.clear();
            }
            self.blocks.insert(offset, block);
        }
        Ok(self.blocks.get(&offset).map_or(&[], |block| block))
    }
}
