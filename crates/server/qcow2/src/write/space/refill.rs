//! Adds host clusters to the reserve.
//!
//! ```text
//! free clusters ─▶ punched ─┐
//! the file's end ─▶ longer ─┴▶ counts 1 ─▶ sync ─▶ reserve
//!      └ no refcount block: the cluster becomes one ─▶ sync ─▶ refcount table
//!      └ no entry in the refcount table: a longer one ─▶ sync ─▶ header ─▶ sync ─▶ the old one is freed
//! ```
//!
//! - Free clusters inside of the file are looked for from its start, at most 64 Ki clusters each time; then past its end,
//!   where a crash may have left counts of clusters that the file does not have.
//! - If the file cannot grow, what was found inside of it may be enough.

use std::ops::Range;

use crate::error::Limit;
use crate::header::TableAt;
use crate::tables::refcounts::store_refcount;
use crate::write::blocks::in_memory;
use crate::write::error::{WriteError, full};
use crate::write::interface::{View, WriteAt};
use crate::write::space::reserve::runs;
use crate::write::writer::Writer;

/// Clusters whose counts are looked at for one refill, inside of the file and past its end.
const MAX_SCANNED: u64 = 1 << 16;
/// How often a plan that does not fit is tried again.
const MAX_ROUNDS: u32 = 64;
/// `refcount_table_offset`, which `refcount_table_clusters` follows.
const REFCOUNT_TABLE_OFFSET: usize = 48;
/// QEMU's limit of the refcount table.
const MAX_TABLE_BYTES: u64 = 8 << 20;
/// An entry has bits for 2^56 bytes of file.
const MAX_FILE_BITS: u32 = 56;

impl<F: WriteAt> Writer<F> {
    /// Makes the reserve as large as a change needs.
    pub(in crate::write) fn refill(&mut self, need: usize, view: &mut dyn View) -> Result<(), WriteError> {
        let have = self.reserve.clusters.len();
        if have >= need {
            return Ok(());
        }
        let (need, wanted) = (need - have, need.max(self.reserve.target) - have);
        let end_before = self.file_clusters();
        let found = self.find_free(need, wanted, view)?;
        if let Err(error) = self.prepare_clusters(&found, end_before) {
            let lowest = found.first().copied().unwrap_or(u64::MAX);
            self.reserve.lowest_free = self.reserve.lowest_free.min(lowest);
            return Err(error);
        }
        self.reserve.clusters.extend(found);
        self.reserve.tail = u64::MAX;
        self.reserve.target = (self.reserve.target * 2).min(self.reserve.most);
        Ok(())
    }

    /// Makes clusters durable that read as zeroes and have a count.
    fn prepare_clusters(&mut self, clusters: &[u64], end_before: u64) -> Result<(), WriteError> {
        for run in runs(clusters.iter().copied().filter(|cluster| *cluster < end_before)) {
            self.punch(&run)?;
        }
        let counts: Vec<(u64, u64)> = clusters.iter().map(|cluster| (*cluster, 1)).collect();
        self.counts.store(&mut self.blocks, &counts)?;
        self.blocks.sync()
    }

    /// Finds free clusters, ascending, and makes the file longer for those that it lacks: as many as `wanted`, or at
    /// least `need` if the file cannot grow.
    fn find_free(&mut self, need: usize, wanted: usize, view: &mut dyn View) -> Result<Vec<u64>, WriteError> {
        let (mut found, end) = (Vec::new(), self.file_clusters());
        let start = self.reserve.lowest_free.min(end);
        // What the search frees lowers it again.
        self.reserve.lowest_free = u64::MAX;
        let mut next_free = start;
        let mut search = |writer: &mut Self, found: &mut Vec<u64>| {
            next_free = writer.find_in(start..end.min(start + MAX_SCANNED), wanted, found, view)?;
            let inside = found.len();
            if inside == wanted {
                return Ok(());
            }
            let past = next_free.max(end.min(writer.reserve.tail));
            match writer.find_past_the_end(past, wanted, found, view) {
                Ok(at) if next_free == end => next_free = at,
                Err(error) if inside >= need && error.is_full() => found.truncate(inside),
                result => _ = result?,
            }
            Ok(())
        };
        let result = search(self, &mut found);
        // Those that were found are free after an error.
        let free =
            if result.is_ok() { next_free } else { found.first().map_or(next_free, |f| *f.min(&next_free)) };
        self.reserve.lowest_free = self.reserve.lowest_free.min(free);
        result.map(|()| found)
    }

    /// Adds free clusters from `start`, up to which the file may be too short. Returns where the search ended.
    fn find_past_the_end(
        &mut self,
        start: u64,
        wanted: usize,
        found: &mut Vec<u64>,
        view: &mut dyn View,
    ) -> Result<u64, WriteError> {
        let range = start..start.saturating_add(MAX_SCANNED + wanted as u64);
        let at = self.find_in(range, wanted, found, view)?;
        if found.len() < wanted {
            return Err(full("file"));
        }
        // If what follows fails, the next search begins there, and the file does not grow again.
        self.reserve.tail = self.reserve.tail.min(start);
        self.grow(at.max(self.file_clusters()), view)?;
        Ok(at)
    }

    /// Adds free clusters of a range. Returns where it ended.
    fn find_in(
        &mut self,
        range: Range<u64>,
        wanted: usize,
        found: &mut Vec<u64>,
        view: &mut dyn View,
    ) -> Result<u64, WriteError> {
        for cluster in range.clone() {
            if found.len() == wanted {
                return Ok(cluster);
            }
            if self.is_free(cluster, view)? {
                found.push(cluster);
            }
        }
        Ok(range.end)
    }

    pub(super) fn is_free(&mut self, cluster: u64, view: &mut dyn View) -> Result<bool, WriteError> {
        let count = self.counts.of(&mut self.blocks, cluster)?;
        if count == 0 && self.metadata.contains(cluster) {
            let place = cluster << self.geometry().cluster_bits;
            let limit = Limit::AtLeast(1);
            return Err(WriteError::Damaged { field: "refcount of a table", place, value: count, limit });
        }
        if count != 0 || self.reserve.contains(cluster) {
            return Ok(false);
        }
        if self.counts.index_of(cluster) >= self.counts.table().len() as u64 {
            self.grow_table(cluster, view)?;
        }
        if self.counts.has_block(cluster) {
            return Ok(self.counts.of(&mut self.blocks, cluster)? == 0);
        }
        if !self.metadata.has_room(1) {
            return Err(full("set of refcount blocks"));
        }
        self.add_block(cluster)?;
        Ok(false)
    }

    /// A block of counts that begins with, or contains, the count of its own cluster.
    fn add_block(&mut self, cluster: u64) -> Result<(), WriteError> {
        let (offset, index) = (cluster << self.geometry().cluster_bits, self.counts.index_of(cluster));
        let block = self.block_with(cluster, cluster..cluster + 1);
        self.blocks.write("refcount block", offset, &block)?;
        self.blocks.sync()?;
        self.counts.add_block(&mut self.blocks, index, offset)?;
        self.metadata.add(cluster..cluster + 1)
    }

    /// The content of the block that contains the count of `cluster`; those of `used` are 1.
    fn block_with(&self, cluster: u64, used: Range<u64>) -> Vec<u8> {
        let geometry = self.geometry();
        let mut block = vec![0; in_memory(geometry.cluster_bytes())];
        let index = self.counts.index_of(cluster);
        for used in used.filter(|used| self.counts.index_of(*used) == index) {
            let in_block = in_memory(used & (geometry.refcount_block_entries() - 1));
            store_refcount(&mut block, in_block, &geometry, 1);
        }
        block
    }

    /// Makes the file longer.
    pub(super) fn grow(&mut self, clusters: u64, view: &mut dyn View) -> Result<(), WriteError> {
        let len_bytes = clusters.checked_mul(self.geometry().cluster_bytes());
        let allowed = len_bytes.filter(|len_bytes| *len_bytes <= 1 << MAX_FILE_BITS);
        let len_bytes = allowed.ok_or_else(|| full("file"))?;
        self.blocks.set_len(len_bytes)?;
        view.file_grew(len_bytes);
        Ok(())
    }

    pub(in crate::write) fn punch(&mut self, clusters: &Range<u64>) -> Result<(), WriteError> {
        let bits = self.geometry().cluster_bits;
        self.blocks.punch(clusters.start << bits..clusters.end << bits)
    }
}

/// A longer refcount table, and blocks for itself, behind all that has counts.
pub(in crate::write) struct NewTable {
    /// The blocks, then the table.
    clusters: Range<u64>,
    blocks: u64,
    pub(in crate::write) entries: u64,
}

impl<F: WriteAt> Writer<F> {
    /// Moves the refcount table to a longer one that has an entry for `cluster`.
    ///
    /// `blocks, table → sync → the header's two fields, in one sector → sync → counts of the old table`
    fn grow_table(&mut self, cluster: u64, view: &mut dyn View) -> Result<(), WriteError> {
        let new = self.plan_table(cluster)?;
        if !self.metadata.has_room(new.clusters.end - new.clusters.start) {
            return Err(full("refcount table"));
        }
        self.grow(new.clusters.end, view)?;
        let bits = self.geometry().cluster_bits;
        let mut table = self.counts.table().to_vec();
        table.resize(in_memory(new.entries), 0);
        let first = self.counts.index_of(new.clusters.start);
        for (index, place) in (first..).zip(new.clusters.start..).take(in_memory(new.blocks)) {
            let block = self.block_with(index << self.geometry().refcount_block_bits(), new.clusters.clone());
            self.blocks.write("refcount block", place << bits, &block)?;
            table[in_memory(index)] = place << bits;
        }
        let offset = (new.clusters.start + new.blocks) << bits;
        let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        self.blocks.write("refcount table", offset, &bytes)?;
        self.blocks.sync()?;
        self.name_table(offset, new.clusters.end - new.clusters.start - new.blocks)?;
        self.blocks.sync()?;
        let (old_offset, old_clusters) = self.counts.place();
        self.counts.moved_to(offset, table);
        self.metadata.add(new.clusters)?;
        let old = old_offset >> bits..(old_offset >> bits) + old_clusters;
        let counts = self.counts.lowered(&mut self.blocks, old.clone().map(|cluster| (cluster, 1)))?;
        self.metadata.remove(old.clone());
        self.reserve.lowest_free = self.reserve.lowest_free.min(old.start);
        self.counts.store(&mut self.blocks, &counts)
    }

    /// Where the longer table is: half as long again, or as long as the file needs.
    pub(in crate::write) fn plan_table(&self, cluster: u64) -> Result<NewTable, WriteError> {
        let geometry = self.geometry();
        let (entries_before, per_block) =
            (self.counts.table().len() as u64, geometry.refcount_block_entries());
        let start = self.file_clusters().max(entries_before.saturating_mul(per_block)).max(cluster + 1);
        let (per_cluster, before) = (geometry.cluster_bytes() / 8, self.counts.place().1);
        let most = (MAX_TABLE_BYTES / geometry.cluster_bytes()).max(1);
        let (mut clusters, mut blocks) = ((before + (before / 2).max(1)).min(most), 1);
        for _ in 0..MAX_ROUNDS {
            let last = self.counts.index_of(start + clusters + blocks - 1);
            let (need_clusters, need_blocks) =
                ((last + 1).div_ceil(per_cluster), last - self.counts.index_of(start) + 1);
            if need_clusters > most {
                break;
            }
            if need_clusters <= clusters && need_blocks <= blocks {
                let clusters_range = start..start + blocks + clusters;
                return Ok(NewTable { clusters: clusters_range, blocks, entries: clusters * per_cluster });
            }
            (clusters, blocks) = (clusters.max(need_clusters), blocks.max(need_blocks));
        }
        Err(full("refcount table"))
    }

    fn name_table(&mut self, offset: u64, clusters: u64) -> Result<(), WriteError> {
        let count = u32::try_from(clusters).unwrap_or(u32::MAX);
        self.update_header(|block| {
            block[REFCOUNT_TABLE_OFFSET..][..8].copy_from_slice(&offset.to_be_bytes());
            block[REFCOUNT_TABLE_OFFSET + 8..][..4].copy_from_slice(&count.to_be_bytes());
        })?;
        self.header.refcount_table = TableAt { offset, count };
        Ok(())
    }
}
