//! The top layer of a writable disk, for its metadata thread: changes in memory of what the thread has changed in the file.

use std::path::Path;
use std::sync::atomic::Ordering;

use qcow2::RawL2Entry;

use super::{Mapping, Volume};

impl Volume {
    /// For the metadata thread: the top layer's file has grown.
    pub(crate) fn grow_top(&self, len_bytes: u64) {
        let top = self.layers.first().and_then(|layer| self.files.get(layer.file));
        top.into_iter().for_each(|file| file.grow(len_bytes));
    }

    /// Makes all completed writes of a writable disk durable.
    pub(crate) fn sync_top(&self) -> std::io::Result<()> {
        let top = self.layers.first().and_then(|layer| self.files.get(layer.file));
        top.map_or(Ok(()), |file| file.file().sync_data())
    }

    /// For the log.
    pub(crate) fn top_path(&self) -> &Path {
        self.layers.first().map_or(Path::new(""), |layer| &layer.path)
    }

    /// For the metadata thread: changes an L1 entry of the top layer.
    pub(crate) fn set_l1(&self, index: u64, entry: u64) {
        let slot = self.top().zip(usize::try_from(index).ok()).and_then(|(top, index)| top.l1.get(index));
        if let Some(slot) = slot {
            slot.store(entry, Ordering::Release);
        }
    }

    /// For the metadata thread: changes the entry of a cluster of the top layer, if its slice is in memory.
    pub(crate) fn set_l2(&self, cluster_index: u64, entry: RawL2Entry) {
        let Some(top) = self.top() else { return };
        let (bits, extended) = (top.slice_entries_bits(), top.geometry.has_extended_l2());
        #[allow(clippy::cast_possible_truncation)] // entries of a slice
        let in_slice = (cluster_index & ((1 << bits) - 1)) as usize;
        let word = if extended { 2 * in_slice } else { in_slice };
        top.slices.set(cluster_index >> bits, word, [entry.cluster, entry.subclusters], extended);
    }

    /// For the metadata thread: forgets the slice with the entry of a cluster of the top layer.
    pub(crate) fn forget_l2(&self, cluster_index: u64) {
        if let Some(top) = self.top() {
            top.slices.forget(cluster_index >> top.slice_entries_bits());
        }
    }

    /// The first cluster of a slice of the top layer, and the number of its entries.
    pub(crate) fn clusters_of_slice(&self, number: u64) -> (u64, usize) {
        let bits = self.top().map_or(0, Mapping::slice_entries_bits);
        (number << bits, 1 << bits)
    }

    /// Whether a slice of the top layer may be asked for.
    pub(crate) fn has_slice(&self, number: u64) -> bool {
        let (first, _) = self.clusters_of_slice(number);
        self.top().is_some_and(|top| first < self.size_bytes().div_ceil(top.geometry.cluster_bytes()))
    }
}
