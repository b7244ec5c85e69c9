//! Frees host clusters to which no entry leads any more.
//!
//! `unlinked → the users of the view end what they began before → sync: no durable entry → punched → counts lowered`

use std::collections::BTreeMap;

use crate::error::Limit;
use crate::write::error::WriteError;
use crate::write::interface::WriteAt;
use crate::write::space::reserve::runs;
use crate::write::writer::{Unlinked, Writer};

impl<F: WriteAt> Writer<F> {
    /// The host clusters that the changes so far unlinked. Call it after each change, also after one that failed:
    /// nothing else bounds their number. `None`: nothing new.
    pub fn take_unlinked(&mut self) -> Option<Unlinked> {
        let unlinked = std::mem::take(&mut self.unlinked);
        self.note_taken(unlinked.clusters());
        (!unlinked.is_empty()).then_some(unlinked)
    }

    /// Frees clusters, once everything that may use them has ended: reads and writes that began before their entries
    /// changed.
    ///
    /// # Errors
    /// The image fails. What was not freed is leaked.
    pub fn release(&mut self, unlinked: Unlinked) -> Result<(), WriteError> {
        self.change(|writer| writer.release_now(&unlinked))
    }

    fn release_now(&mut self, unlinked: &Unlinked) -> Result<(), WriteError> {
        if let Some(cluster) = unlinked.data.iter().find(|cluster| self.metadata.contains(**cluster)) {
            let place = cluster << self.geometry().cluster_bits;
            let limit = Limit::Words("0 for a table's cluster");
            return Err(WriteError::Damaged { field: "number of L2 entries", place, value: 1, limit });
        }
        let mut references = BTreeMap::new();
        for cluster in unlinked.data.iter().chain(&unlinked.tables) {
            *references.entry(*cluster).or_insert(0) += 1;
        }
        let counts = self.counts.lowered(&mut self.blocks, references.into_iter())?;
        self.store_lowered(&counts)
    }

    /// Stores lower counts, ascending by cluster. Those that become 0 are punched first, once no durable entry leads there.
    pub(super) fn store_lowered(&mut self, counts: &[(u64, u64)]) -> Result<(), WriteError> {
        let free = |(cluster, count): &(u64, u64)| (*count == 0).then_some(*cluster);
        self.check_tables(counts.iter().filter_map(free))?;
        self.blocks.sync()?;
        for run in runs(counts.iter().filter_map(free)) {
            self.punch(&run)?;
        }
        // First, because each of the counts may be stored although another one fails.
        for cluster in counts.iter().filter_map(free) {
            self.metadata.remove_l2(cluster);
            self.reserve.lowest_free = self.reserve.lowest_free.min(cluster);
        }
        self.counts.store(&mut self.blocks, counts)
    }

    /// A table that is to be freed must not be in use.
    fn check_tables(&self, clusters: impl Iterator<Item = u64>) -> Result<(), WriteError> {
        for cluster in clusters {
            let used = self.metadata.l2_references(cluster).into();
            if used != 0 {
                let place = cluster << self.geometry().cluster_bits;
                let limit = Limit::AtMost(0);
                let field = "number of L1 entries that lead to the L2 table without a count";
                return Err(WriteError::Damaged { field, place, value: used, limit });
            }
        }
        Ok(())
    }

    /// Frees the reserve and all that was not taken to be released, and cuts off what is free at the file's end. What
    /// was taken must have been released. The writer may go on afterwards; a reclaim ends.
    ///
    /// # Errors
    /// The image fails. What was not freed is leaked.
    pub fn close(&mut self) -> Result<(), WriteError> {
        self.end_reclaim();
        self.change(|writer| {
            let unlinked = std::mem::take(&mut writer.unlinked);
            writer.release_now(&unlinked)?;
            let reserve = writer.reserve.take_all();
            let counts: Vec<(u64, u64)> = reserve.iter().map(|cluster| (*cluster, 0)).collect();
            writer.counts.store(&mut writer.blocks, &counts)?;
            writer.blocks.sync()?;
            let mut end = writer.file_clusters();
            while end > 0 && reserve.contains(&(end - 1)) {
                end -= 1;
            }
            if end < writer.file_clusters() {
                writer.blocks.set_len(end * writer.geometry().cluster_bytes())?;
                writer.blocks.sync()?;
            }
            if let Some(lowest) = reserve.first() {
                writer.reserve.lowest_free = writer.reserve.lowest_free.min(*lowest);
            }
            Ok(())
        })
    }
}
