//! Zeroes and discards of whole clusters.

use std::ops::Range;

use crate::tables::{L2Entry, RawL2Entry};
use crate::write::claim::MAX_BATCH;
use crate::write::error::WriteError;
use crate::write::interface::{Below, View, WriteAt};
use crate::write::link::Change;
use crate::write::writer::Writer;

/// Where the header's `autoclear_features` are.
const AUTOCLEAR_FEATURES: Range<usize> = 88..96;

impl<F: WriteAt> Writer<F> {
    /// The whole clusters of a range of guest bytes read as zeroes from now on. The last cluster of the disk is whole
    /// if the range reaches the disk's end.
    ///
    /// `unmap`: their host clusters are freed; otherwise kept where the format can. Also with `unmap`, what lies below
    /// does not show. Handles at most 1,024 clusters, and returns the guest's offset up to which it came.
    ///
    /// # Errors
    /// [`WriteError::NoZeroFlag`]: version 2 over a backing file. Otherwise the image fails; some of the clusters may
    /// read as zeroes already.
    pub fn zero(
        &mut self,
        range: Range<u64>,
        unmap: bool,
        below: &mut dyn Below,
        view: &mut dyn View,
    ) -> Result<u64, WriteError> {
        if self.geometry().version() < 3 && !below.is_zero() {
            return Err(WriteError::NoZeroFlag);
        }
        self.change(|writer| {
            writer.prepare(view)?;
            let all = writer.whole_clusters(&range);
            let end = all.end.min(all.start + MAX_BATCH as u64);
            writer.zero_batch(all.start..end, unmap, below.is_zero(), view)?;
            Ok(if end == all.end { range.end } else { writer.guest_offset(end) })
        })
    }

    fn whole_clusters(&self, range: &Range<u64>) -> Range<u64> {
        let (size_bytes, cluster_bytes) = (self.header.size_bytes, self.geometry().cluster_bytes());
        let start = range.start.div_ceil(cluster_bytes);
        let end = if range.end < size_bytes {
            range.end / cluster_bytes
        } else {
            size_bytes.div_ceil(cluster_bytes)
        };
        start..end.max(start)
    }

    fn zero_batch(
        &mut self,
        cluster_indices: Range<u64>,
        unmap: bool,
        is_zero_below: bool,
        view: &mut dyn View,
    ) -> Result<(), WriteError> {
        let mut changes = Vec::new();
        for cluster_index in cluster_indices {
            let (raw, entry) = self.entry(cluster_index)?;
            let (entry, unlinks) = self.zeroed(&entry, unmap, is_zero_below).unwrap_or((raw, 0..0));
            if entry == raw {
                view.l2_changed(cluster_index, raw);
            } else {
                changes.push(Change { cluster_index, entry, host: None, unlinks });
            }
        }
        if changes.is_empty() {
            return Ok(());
        }
        let tables = self.tables_needed(changes.iter().map(|change| change.cluster_index))?;
        self.refill(tables.len(), view)?;
        let batch = self.prepared(|writer, batch| {
            batch.changes = changes;
            writer.new_tables(&tables, batch)?;
            if batch.tables_have_data() { writer.blocks.sync() } else { Ok(()) }
        })?;
        self.publish(batch, view)
    }

    /// The entry that reads as zeroes, and the host clusters that lose a reference. `None`: it stays as it is.
    fn zeroed(&self, entry: &L2Entry, unmap: bool, is_zero_below: bool) -> Option<(RawL2Entry, Range<u64>)> {
        let geometry = self.geometry();
        let all = u32::MAX >> (u32::BITS - geometry.subclusters());
        if let L2Entry::Standard(cluster) = entry {
            let is_zero = cluster.zero == all || cluster.zero | cluster.allocated == 0 && is_zero_below;
            match cluster.host_offset {
                None if is_zero => return None,
                Some(host_offset) if !unmap && cluster.copied && geometry.version() >= 3 => {
                    return Some((RawL2Entry::zeroes(Some(host_offset), &geometry), 0..0));
                }
                _ => {}
            }
        }
        let zeroes = match geometry.version() {
            2 => RawL2Entry::default(),
            _ => RawL2Entry::zeroes(None, &geometry),
        };
        Some((zeroes, self.host_clusters(entry)))
    }

    /// Before the view's first entry, and so before the first write in place: what this program does not keep up to date
    /// is marked so, and the file ends with a cluster.
    pub(super) fn prepare(&mut self, view: &mut dyn View) -> Result<(), WriteError> {
        if self.is_prepared {
            return Ok(());
        }
        let autoclear = &mut self.header.autoclear;
        if self.header.geometry.version() >= 3 && (autoclear.bitmaps || autoclear.unknown != 0) {
            self.blocks.update("header", 0, |block| block[AUTOCLEAR_FEATURES].fill(0))?;
            self.blocks.sync()?;
            (autoclear.bitmaps, autoclear.unknown) = (false, 0);
        }
        let len_bytes = self.file_clusters() * self.geometry().cluster_bytes();
        if len_bytes != self.blocks.file_bytes() {
            self.blocks.set_len(len_bytes)?;
            view.file_grew(len_bytes);
        }
        self.is_prepared = true;
        Ok(())
    }
}
