//! Claims: makes the guest's clusters writable in place. A claim never changes what the guest reads.
//!
//! ```text
//! entries that are not in place → reserve → content, where it is not zeroes, to new host clusters → one sync → entries
//! ```

pub(super) mod data_run;
pub(super) mod merge;

use std::ops::Range;

use crate::error::{FormatError, read_padded};
use crate::tables::{CompressedCluster, L2Entry, RawL2Entry, StandardCluster};
use crate::write::blocks::{AnyOffset, in_memory};
use crate::write::claim::data_run::DataRun;
use crate::write::error::WriteError;
use crate::write::interface::{Below, View, WriteAt};
use crate::write::link::{Batch, Change};
use crate::write::writer::Writer;

/// Clusters of one batch.
pub(super) const MAX_BATCH: usize = 1024;

/// Reads that are announced at once.
const ANNOUNCED_BYTES: usize = 4 << 20;

/// A cluster whose content is wanted.
pub(super) struct Wanted {
    pub(super) cluster_index: u64,
    pub(super) entry: L2Entry,
}

impl<F: WriteAt> Writer<F> {
    /// Makes every cluster of these ranges of guest bytes writable in place. What the guest reads does not change.
    ///
    /// [`View::l2_changed`] is called for each of the clusters, also where nothing had to change. Up to 1,024 clusters
    /// are one batch: their copies are made durable by one sync, their entries in the same 4 KiB are one write.
    ///
    /// # Errors
    /// The image or what lies below it fails. Some of the clusters may be writable already.
    pub fn claim(
        &mut self,
        ranges: &[Range<u64>],
        below: &mut dyn Below,
        view: &mut dyn View,
    ) -> Result<(), WriteError> {
        self.change(|writer| {
            writer.prepare(view)?;
            let mut batch = Vec::new();
            for range in ranges {
                for cluster_index in writer.touched_clusters(range) {
                    batch.push(cluster_index);
                    if batch.len() == MAX_BATCH {
                        writer.claim_batch(std::mem::take(&mut batch), below, view)?;
                    }
                }
            }
            writer.claim_batch(batch, below, view)
        })
    }

    /// Clusters of the guest that a range of bytes touches, up to the disk's end.
    fn touched_clusters(&self, range: &Range<u64>) -> Range<u64> {
        let cluster_bytes = self.geometry().cluster_bytes();
        let (start, end) = (range.start, range.end.min(self.header.size_bytes));
        if start < end { start / cluster_bytes..end.div_ceil(cluster_bytes) } else { 0..0 }
    }

    fn claim_batch(
        &mut self,
        mut cluster_indices: Vec<u64>,
        below: &mut dyn Below,
        view: &mut dyn View,
    ) -> Result<(), WriteError> {
        cluster_indices.sort_unstable();
        cluster_indices.dedup();
        let mut wanted = Vec::new();
        for cluster_index in cluster_indices {
            let (raw, entry) = self.entry(cluster_index)?;
            if raw.is_in_place(&self.geometry()) {
                view.l2_changed(cluster_index, raw);
            } else {
                wanted.push(Wanted { cluster_index, entry });
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let tables = self.tables_needed(wanted.iter().map(|wanted| wanted.cluster_index))?;
        self.refill(wanted.len() + tables.len(), view)?;
        let mut run = std::mem::take(&mut self.run);
        let batch = self.prepared(|writer, batch| {
            writer.new_tables(&tables, batch)?;
            let mut must_sync = batch.tables_have_data();
            for some in wanted.chunks(writer.most_announced()) {
                writer.announce(some, below);
                for wanted in some {
                    must_sync |= writer.place_content(wanted, below, batch, &mut run)?;
                }
            }
            run.write(&mut writer.blocks)?;
            if must_sync { writer.blocks.sync() } else { Ok(()) }
        });
        run.clear();
        self.run = run;
        self.publish(batch?, view)
    }

    fn most_announced(&self) -> usize {
        (ANNOUNCED_BYTES >> self.geometry().cluster_bits).max(1)
    }

    /// Announces the reads of clusters of which the image has nothing.
    fn announce(&self, some: &[Wanted], below: &mut dyn Below) {
        let is_below = |entry: &L2Entry| match entry {
            L2Entry::Standard(cluster) => cluster.allocated == 0 && cluster.zero == 0,
            L2Entry::Compressed(_) => false,
        };
        for wanted in some.iter().filter(|wanted| is_below(&wanted.entry)) {
            let start = self.guest_offset(wanted.cluster_index);
            below.will_read(start..start + self.geometry().cluster_bytes());
        }
    }

    /// Adds the change of one cluster, and its data to the run. Returns whether a sync must come before the entry changes.
    fn place_content(
        &mut self,
        wanted: &Wanted,
        below: &mut dyn Below,
        batch: &mut Batch,
        run: &mut DataRun,
    ) -> Result<bool, WriteError> {
        let geometry = self.geometry();
        let (cluster_index, unlinks) = (wanted.cluster_index, self.host_clusters(&wanted.entry));
        if let Some(kept) = kept_zeroes(&wanted.entry, geometry.has_extended_l2()) {
            let zeroes = vec![0; in_memory(geometry.cluster_bytes())];
            self.blocks.write("data", kept, &zeroes)?;
            let entry = RawL2Entry::data(kept, &geometry);
            batch.changes.push(Change { cluster_index, entry, host: None, unlinks: 0..0 });
            return Ok(true);
        }
        let cluster_bytes = geometry.cluster_bytes();
        let content = run.slot(cluster_bytes, &mut self.blocks)?;
        let has_data = self.read_content(wanted, below, content)?;
        let mut host = self.take_host()?;
        host.has_data = has_data;
        let offset = host.cluster << geometry.cluster_bits;
        let entry = RawL2Entry::data(offset, &geometry);
        batch.changes.push(Change { cluster_index, entry, host: Some(host), unlinks });
        if has_data {
            run.add(offset, cluster_bytes, &mut self.blocks)?;
        }
        Ok(has_data)
    }

    /// Reads what the guest reads. Returns false if all of it is zeroes; `content` is then anything.
    pub(super) fn read_content(
        &mut self,
        wanted: &Wanted,
        below: &mut dyn Below,
        content: &mut [u8],
    ) -> Result<bool, WriteError> {
        let may_have_data = match wanted.entry {
            L2Entry::Compressed(cluster) => self.decompress(cluster, content).map(|()| true),
            L2Entry::Standard(cluster) => self.merge(&cluster, wanted.cluster_index, content, below),
        }?;
        Ok(may_have_data && content.iter().any(|byte| *byte != 0))
    }

    fn decompress(&mut self, cluster: CompressedCluster, content: &mut [u8]) -> Result<(), WriteError> {
        let (data, offset) = (&mut self.compressed, cluster.host_offset);
        data.resize(in_memory(cluster.len_bytes()), 0);
        read_padded(&AnyOffset(self.blocks.file()), "compressed cluster", offset, data)?;
        let decompressed = self.decompressor.decompress(data, content);
        Ok(decompressed.map_err(|source| FormatError::Compressed { offset, source })?)
    }

    /// Joins the host's data, zeroes, and what lies below. Returns false, and leaves `content` as it is, if all of it is
    /// zeroes.
    fn merge(
        &mut self,
        cluster: &StandardCluster,
        cluster_index: u64,
        content: &mut [u8],
        below: &mut dyn Below,
    ) -> Result<bool, WriteError> {
        let geometry = self.geometry();
        let is_zero_below = below.is_zero();
        let all = u32::MAX >> (u32::BITS - geometry.subclusters());
        let is_zero = cluster.allocated == 0 && (cluster.zero == all || is_zero_below);
        if is_zero {
            return Ok(false);
        }
        if let (Some(host_offset), true) = (cluster.host_offset, cluster.allocated != 0) {
            self.blocks.read("data", host_offset, content)?;
        }
        let guest_offset = self.guest_offset(cluster_index);
        let unit = 1 << geometry.subcluster_bits();
        for (index, part) in content.chunks_mut(unit).enumerate() {
            if cluster.allocated & (1 << index) != 0 {
                continue;
            }
            if cluster.zero & (1 << index) != 0 || is_zero_below {
                part.fill(0);
                continue;
            }
            let offset = guest_offset + (index * unit) as u64;
            let failed = |source| FormatError::Read { what: "backing file", offset, source };
            below.read_at(offset, part).map_err(failed)?;
        }
        Ok(true)
    }
}

/// The host cluster of a preallocated zero cluster (QEMU: ZERO_ALLOC) that only the active table uses.
fn kept_zeroes(entry: &L2Entry, extended_l2: bool) -> Option<u64> {
    let all = if extended_l2 { u32::MAX } else { 1 };
    match entry {
        L2Entry::Standard(cluster) if cluster.copied && cluster.zero == all => cluster.host_offset,
        _ => None,
    }
}
