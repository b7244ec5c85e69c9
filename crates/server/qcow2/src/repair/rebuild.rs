//! Builds a new refcount table with all its blocks behind the end of the file, which nothing uses. The clusters of the old
//! ones are free afterwards.
//!
//! `references → which blocks are needed → file longer → blocks, table → sync → header → sync`
//!
//! - Before the header changes, the file is only longer. A crash leaves the old or the new table.
//! - A block without counts above 0 is left out, so that a sparse file costs little space.

use std::ops::Range;

use crate::check::refcounts::Refcounts;
use crate::check::walk::Walk;
use crate::check::{Scope, each_window};
use crate::error::FormatError;
use crate::geometry::Geometry;
use crate::header::TableAt;
use crate::image::Image;
use crate::repair::counts::most;
use crate::repair::error::{RepairError, expect_known};
use crate::repair::header::name_refcount_table;
use crate::repair::report::{Event, Note};
use crate::repair::sectors::{Target, grow, sync, write_changed};
use crate::tables::refcounts::{RefcountTableEntry, store_refcount};

/// QEMU's limit of the refcount table.
const MAX_TABLE_BYTES: u64 = 8 << 20;

/// Replaces the refcount table. All references must be known.
pub(super) fn rebuild<F: Target>(file: &F, tell: &mut dyn FnMut(Event<'_>)) -> Result<(), RepairError> {
    let image = Image::open(file)?;
    let plan = Plan::of(&image)?;
    expect_nothing_there(&image, &plan)?;
    let bits = image.header().geometry.cluster_bits();
    let len_bytes = plan.clusters.end << bits;
    grow(file, len_bytes)?;
    write_blocks(&image, &plan)?;
    let table = plan.table_bytes();
    let table_offset = plan.table_cluster() << bits;
    write_changed(file, "refcount table", table_offset, &vec![0; table.len()], &table)?;
    sync(file)?;
    let count = u32::try_from(plan.clusters.end - plan.table_cluster()).unwrap_or(u32::MAX);
    name_refcount_table(file, TableAt { offset: table_offset, count })?;
    let clusters = plan.clusters.end - plan.clusters.start;
    tell(Event::Note(Note::Rebuilt { table_offset, clusters }));
    Ok(())
}

/// Which blocks there will be, and where.
struct Plan {
    geometry: Geometry,
    /// The blocks, then the table.
    clusters: Range<u64>,
    /// The ranges of clusters whose counts have a block, ascending: one entry of the table for each.
    blocks: Vec<u64>,
}

impl Plan {
    fn of<F: Target>(image: &Image<F>) -> Result<Self, RepairError> {
        let geometry = image.header().geometry;
        let read = |source| FormatError::Read { what: "length", offset: 0, source };
        let file_bytes = image.file().len_bytes().map_err(read)?;
        let start = file_bytes.div_ceil(geometry.cluster_bytes());
        // Before the ranges are in memory, of which there may be as many as entries of the table.
        expect_room(&geometry, start + 1)?;
        Self::place(geometry, start, &used_blocks(image)?)
    }

    /// The new clusters need counts, too: tried again until their own blocks are among them.
    fn place(geometry: Geometry, start: u64, used: &[u64]) -> Result<Self, RepairError> {
        let (per_cluster, block_bits) = (geometry.cluster_bytes() / 8, geometry.refcount_block_bits());
        let (mut block_count, mut table_clusters) = (0, 1);
        loop {
            let end = start + block_count + table_clusters;
            expect_room(&geometry, end)?;
            let own = start >> block_bits..=(end - 1) >> block_bits;
            let before = used.iter().copied().filter(|index| index < own.start());
            let blocks: Vec<u64> = before.chain(own.clone()).collect();
            let need = (blocks.len() as u64, own.end() / per_cluster + 1);
            if need == (block_count, table_clusters) {
                return Ok(Self { geometry, clusters: start..end, blocks });
            }
            // Neither falls when the other rises.
            (block_count, table_clusters) = need;
        }
    }

    fn table_cluster(&self) -> u64 {
        self.clusters.start + self.blocks.len() as u64
    }

    fn table_bytes(&self) -> Vec<u8> {
        let table_clusters = self.clusters.end - self.table_cluster();
        let len_bytes = table_clusters << self.geometry.cluster_bits();
        let mut bytes = vec![0; usize::try_from(len_bytes).unwrap_or(usize::MAX)];
        let entries = bytes.as_chunks_mut::<8>().0;
        for (index, cluster) in self.blocks.iter().zip(self.clusters.start..) {
            if let Some(entry) = usize::try_from(*index).ok().and_then(|index| entries.get_mut(index)) {
                *entry = (cluster << self.geometry.cluster_bits()).to_be_bytes();
            }
        }
        bytes
    }

    /// The clusters whose counts are in a block.
    fn range(&self, index: u64) -> Range<u64> {
        let bits = self.geometry.refcount_block_bits();
        index << bits..(index + 1) << bits
    }
}

/// Whether a table may describe a file of so many clusters.
fn expect_room(geometry: &Geometry, clusters: u64) -> Result<(), RepairError> {
    let last = (clusters - 1) >> geometry.refcount_block_bits();
    let last = last / (geometry.cluster_bytes() / 8);
    let most = (MAX_TABLE_BYTES / geometry.cluster_bytes()).max(1);
    if clusters >= 1 << (63 - geometry.cluster_bits()) || last >= most {
        return Err(RepairError::TooLong { clusters });
    }
    Ok(())
}

/// A file that is longer may have what the old table and its entries lead to, until the header names the new table. A
/// power loss would leave it there.
fn expect_nothing_there<F: Target>(image: &Image<F>, plan: &Plan) -> Result<(), RepairError> {
    let (at, geometry) = (image.header().refcount_table, plan.geometry);
    let (old, failed) =
        Refcounts::read(image.file(), image.header(), plan.clusters.start << geometry.cluster_bits());
    failed.map_or(Ok(()), Err)?;
    let table = at.offset >> geometry.cluster_bits();
    let blocks = (0..old.entries()).filter_map(|index| {
        let block = RefcountTableEntry::decode(old.entry(index), &geometry).ok()?.block?;
        Some(block >> geometry.cluster_bits())
    });
    let mut clusters = (table..table + u64::from(at.count)).chain(blocks);
    if clusters.any(|cluster| plan.clusters.contains(&cluster)) {
        Err(RepairError::Overtaken)
    } else {
        Ok(())
    }
}

/// The ranges of clusters that have references, ascending. Refuses counts that cannot be stored.
fn used_blocks<F: Target>(image: &Image<F>) -> Result<Vec<u64>, RepairError> {
    let (geometry, mut used) = (image.header().geometry, Vec::new());
    each_window(image, Scope::WithoutRefcounts, &mut |_| {}, |walk| {
        expect_known(walk.obstacles)?;
        for cluster in walk.counts.range().filter(|cluster| walk.counts.is_used(*cluster)) {
            expect_storable(cluster, walk.counts.exact(cluster), most(&geometry))?;
            let index = cluster >> geometry.refcount_block_bits();
            if used.last() != Some(&index) {
                used.push(index);
            }
        }
        Ok::<_, RepairError>(())
    })?;
    Ok(used)
}

pub(super) fn expect_storable(cluster: u64, references: Option<u64>, most: u64) -> Result<(), RepairError> {
    match references {
        None => Err(RepairError::Uncountable { cluster }),
        Some(references) if references > most => {
            Err(RepairError::TooManyReferences { cluster, references, most })
        }
        Some(_) => Ok(()),
    }
}

fn write_blocks<F: Target>(image: &Image<F>, plan: &Plan) -> Result<(), RepairError> {
    let mut next = plan.blocks.iter().copied().zip(plan.clusters.start..).peekable();
    each_window(image, Scope::WithoutRefcounts, &mut |_| {}, |walk| {
        expect_known(walk.obstacles)?;
        // The windows come in ascending order, and a block is not in two of them.
        let end = walk.counts.window_end();
        while let Some((index, cluster)) = next.next_if(|(index, _)| plan.range(*index).start < end) {
            write_block(image.file(), plan, index, cluster, Some(walk))?;
        }
        Ok::<_, RepairError>(())
    })?;
    // Only of new clusters.
    next.try_for_each(|(index, cluster)| write_block(image.file(), plan, index, cluster, None))
}

fn write_block<F: Target>(
    file: &F,
    plan: &Plan,
    index: u64,
    cluster: u64,
    walk: Option<&Walk<'_, F>>,
) -> Result<(), RepairError> {
    let (geometry, range) = (plan.geometry, plan.range(index));
    let empty = vec![0; usize::try_from(geometry.cluster_bytes()).unwrap_or(usize::MAX)];
    let mut block = empty.clone();
    let mut store = |cluster: u64, count| {
        let at = usize::try_from(cluster - range.start).unwrap_or(usize::MAX);
        store_refcount(&mut block, at, &geometry, count);
    };
    if let Some(walk) = walk {
        let old = walk.counts.range();
        for cluster in range.start.max(old.start)..range.end.min(old.end) {
            store(cluster, walk.counts.of(cluster).0);
        }
    }
    for new in range.start.max(plan.clusters.start)..range.end.min(plan.clusters.end) {
        store(new, 1);
    }
    let offset = cluster << geometry.cluster_bits();
    write_changed(file, "refcount block", offset, &empty, &block).map(drop)
}
