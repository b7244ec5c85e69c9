//! Finds and frees leaked clusters while the guest goes on: clusters with a count to which nothing refers.
//!
//! ```text
//! begin: two empty sets of clusters ─▶ scan.rs: what L2 entries lead to is used ─▶ counts: used clusters have one │ leaks?
//!        a change takes or unlinks a cluster: it is not free ─┘    sync → leaks punched → counts lowered ◀─ free ┘
//! ```
//!
//! - Each call is one small step. Changes come in between.
//! - **At the end of the scan, each cluster to which an entry leads is in one of the sets.** An entry that is changed after
//!   the scan has passed it leads to the same cluster, or to one that was taken from the reserve meanwhile. A copy of an L2
//!   table has the entries of the table before.
//! - A cluster is a leak if it has a count, is in none of the sets, is no table's ([`Metadata`]), and is not in the
//!   reserve. What was unlinked and not released when the scan began, or was unlinked since, counts as taken. So a leak has
//!   no user, and gets none.
//! - Any count is lowered to 0, because nothing refers to the cluster. A cluster that has fewer references than its count
//!   keeps it: for that, references would have to be counted while they change.
//! - Nothing is freed before the whole scan was sound: an entry that cannot be understood may mean any cluster. As in a
//!   repair, an entry that leads to the wrong cluster of data is not noticed.
//! - Clusters behind the end that the file had at the beginning are not looked at.
//! - After a write that has failed, an entry of which nothing is known here may reach the disk later. So nothing is freed
//!   until the tables are read again.
//! - Memory: two bits for each cluster of the file, at most 128 MiB; the numbers of all L2 tables if there are snapshots.
//!
//! [`Metadata`]: crate::write::metadata::Metadata

mod clusters;
mod error;
mod scan;
pub(in crate::write) mod state;

use crate::write::blocks::{AnyOffset, in_memory};
use crate::write::interface::{View, WriteAt};
use crate::write::space::reclaim::clusters::Clusters;
use crate::write::space::reclaim::state::{Phase, Reclaim, Scan, StepSize};
use crate::write::writer::{Unlinked, Writer};

pub use error::ReclaimError;

use error::damaged;

/// 32 TiB with clusters of 64 KiB.
const MAX_CLUSTERS: u64 = 1 << 29;
/// What one step frees.
const STEP_BYTES: u64 = 16 << 20;

/// How far a reclaim has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Of [`Reclaimed::total`].
    pub done: u64,
    /// All entries and counts that are looked at.
    pub total: u64,
    /// Leaked clusters that were freed.
    pub freed_clusters: u64,
    /// All tables were scanned. Ops that began before may use clusters to which no entry leads: their end must be awaited
    /// before the next step.
    pub has_scanned: bool,
    /// The reclaim has ended.
    pub has_ended: bool,
}

impl<F: WriteAt> Writer<F> {
    /// Begins to look for leaked clusters. `waiting`: what was unlinked in this file, and is not released yet.
    ///
    /// # Errors
    /// [`ReclaimError`]: the image, or its state, does not allow it.
    pub fn begin_reclaim(&mut self, waiting: &[&Unlinked]) -> Result<(), ReclaimError> {
        self.end_reclaim();
        self.check_reclaim()?;
        let end = self.file_clusters();
        if end > MAX_CLUSTERS {
            let (clusters, most) = (end, MAX_CLUSTERS);
            return Err(ReclaimError::TooLarge { clusters, most });
        }
        let (used, taken) = (Clusters::new(end), Clusters::new(end));
        let (Some(used), Some(mut taken)) = (used, taken) else {
            return Err(ReclaimError::NoMemory { bytes: end.div_ceil(4) });
        };
        waiting.iter().flat_map(|unlinked| unlinked.clusters()).for_each(|cluster| taken.insert(cluster));
        let scan = Scan::new(&AnyOffset(self.blocks.file()), &self.header)?;
        let leaks = in_memory((STEP_BYTES / self.geometry().cluster_bytes()).max(1));
        let (phase, step) = (Phase::Scan, StepSize { entries: 8192, counts: 1 << 14, leaks });
        let reclaim = Reclaim { scan, used, taken, end, phase, first_leak: None, freed: 0, step };
        self.reclaim = Some(Box::new(reclaim));
        Ok(())
    }

    /// Whether leaks can be told from other clusters.
    fn check_reclaim(&self) -> Result<(), ReclaimError> {
        self.check_goes_on()?;
        if self.has_failed_write {
            return Err(ReclaimError::FailedWrite);
        }
        if self.header.extensions.bitmaps.is_some() {
            return Err(ReclaimError::Bitmaps);
        }
        if self.metadata.has_doubled_l2 {
            return Err(ReclaimError::DoubledTable);
        }
        Ok(())
    }

    /// One step: looks at some entries or counts, or frees some leaks.
    ///
    /// # Errors
    /// [`ReclaimError`]: the reclaim has ended. Nothing was freed if an entry or a count is the reason.
    pub fn reclaim(&mut self, view: &mut dyn View) -> Result<Reclaimed, ReclaimError> {
        let mut reclaim = self.reclaim.take().ok_or(ReclaimError::Ended)?;
        self.check_reclaim()?;
        self.unlinked.clusters().for_each(|cluster| reclaim.taken.insert(cluster));
        let has_ended = match reclaim.phase {
            Phase::Scan => {
                if self.scan(&mut reclaim)? {
                    reclaim.phase = Phase::Check(0);
                }
                false
            }
            Phase::Check(from) => self.check_counts(&mut reclaim, from)?,
            Phase::Free(from) => self.free_leaks(&mut reclaim, from, view)?,
        };
        let (scanned, entries) = reclaim.scan.progress(&self.header);
        let done = scanned
            + match reclaim.phase {
                _ if has_ended => 2 * reclaim.end,
                Phase::Scan => 0,
                Phase::Check(at) => at,
                Phase::Free(at) => reclaim.end + at,
            };
        let has_scanned = !matches!(reclaim.phase, Phase::Scan);
        let (total, freed_clusters) = (entries + 2 * reclaim.end, reclaim.freed);
        if !has_ended {
            self.reclaim = Some(reclaim);
        }
        Ok(Reclaimed { done, total, freed_clusters, has_scanned, has_ended })
    }

    /// Ends a reclaim. What it has freed stays free.
    pub fn end_reclaim(&mut self) {
        self.reclaim = None;
    }

    /// A change has taken these clusters, or unlinked them.
    pub(in crate::write) fn note_taken(&mut self, clusters: impl Iterator<Item = u64>) {
        if let Some(reclaim) = &mut self.reclaim {
            clusters.for_each(|cluster| reclaim.taken.insert(cluster));
        }
    }

    /// Every table and every cluster that an entry leads to must have a count. Returns whether there is nothing to free.
    fn check_counts(&mut self, reclaim: &mut Reclaim, from: u64) -> Result<bool, ReclaimError> {
        let end = reclaim.end.min(from + reclaim.step.counts);
        for cluster in from..end {
            let count = self.counts.of(&mut self.blocks, cluster)?;
            if count > 0 {
                if reclaim.first_leak.is_none() && self.is_leak(reclaim, cluster) {
                    reclaim.first_leak = Some(cluster);
                }
                continue;
            }
            let is_entrys = reclaim.used.contains(cluster) && !reclaim.taken.contains(cluster);
            if is_entrys || self.metadata.contains(cluster) {
                return Err(damaged("refcount", cluster << self.geometry().cluster_bits, 0, "at least 1"));
            }
        }
        reclaim.phase = Phase::Check(end);
        if end < reclaim.end {
            return Ok(false);
        }
        reclaim.phase = Phase::Free(reclaim.first_leak.unwrap_or(reclaim.end));
        Ok(reclaim.first_leak.is_none())
    }

    /// Whether nothing refers to a cluster that has a count.
    fn is_leak(&self, reclaim: &Reclaim, cluster: u64) -> bool {
        !reclaim.used.contains(cluster)
            && !reclaim.taken.contains(cluster)
            && !self.metadata.contains(cluster)
            && !self.reserve.contains(cluster)
    }

    /// Frees the first leaks from a cluster on. Returns whether all were freed.
    fn free_leaks(
        &mut self,
        reclaim: &mut Reclaim,
        from: u64,
        view: &mut dyn View,
    ) -> Result<bool, ReclaimError> {
        let end = reclaim.end.min(from + reclaim.step.counts);
        let (mut at, mut leaks) = (from, Vec::new());
        while at < end && leaks.len() < reclaim.step.leaks {
            if self.counts.of(&mut self.blocks, at)? > 0 && self.is_leak(reclaim, at) {
                leaks.push((at, 0));
            }
            at += 1;
        }
        if !leaks.is_empty() {
            self.change(|writer| {
                writer.prepare(view)?;
                writer.store_lowered(&leaks)
            })?;
        }
        reclaim.freed += leaks.len() as u64;
        reclaim.phase = Phase::Free(at);
        Ok(at == reclaim.end)
    }
}
