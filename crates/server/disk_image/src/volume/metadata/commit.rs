//! The metadata thread's part of a job that copies the top into the layer below it, while guests write.
//!
//! ```text
//! scan what is allocated in the top → dirty ─▶ window: protected → grace: ops that began before have ended → copied → clean
//!                              ▲ a guest's claim or zeroes ends the protection ─┘
//! ```
//!
//! - To protect a cluster is to show workers an entry that is not written in place. So a guest's next write to it claims it
//!   first, as any first write does, and this thread notes the change. The file does not change.
//! - This thread copies, so no claim is made in between. After the grace period no write from before the protection is in
//!   flight.
//! - The layer below changes only where the top hides it. So guests read the same at any time, and the job may end at any
//!   time; what was copied is then copied again by the next one.
//! - Memory: two bits for each cluster of the disk, the window, and one cluster.
//! - A step copies at least as much as guests have made dirty since the last one. So the job catches up, unless it pauses
//!   between steps while guests rewrite clusters faster than it copies them.

use qcow2::{Allocation, RawL2Entry, Writer};

use super::below::{Lower, Memory};
use super::stream::{STEP_BYTES, STEP_CLUSTERS};
use crate::error::line;
use crate::volume::Volume;
use crate::volume::commit_target::CommitTarget;
use crate::volume::link::{Link, Peer, Progress};
use crate::volume::table_file::TableFile;

/// What is protected at a time before it is copied.
const WINDOW_BYTES: u64 = 16 << 20;

/// A set of clusters: a bit for each.
#[derive(Debug)]
struct Clusters {
    words: Box<[u64]>,
    count: u64,
}

/// A job.
#[derive(Debug)]
pub(super) struct Commit {
    target: Box<CommitTarget>,
    cluster_bytes: u64,
    size_bytes: u64,
    /// The first cluster that has not been looked at.
    next: u64,
    /// Clusters whose content the layer below may lack.
    dirty: Clusters,
    /// Clusters that guests cannot write without a claim.
    protected: Clusters,
    /// Clusters that are copied next, the last first, and the epoch since which they are protected.
    window: Vec<u64>,
    since: u64,
    /// Where the next window begins.
    cursor: u64,
    /// Clusters that guests have made dirty since the last step.
    changed: u64,
    content: Vec<u8>,
}

impl Commit {
    /// `None`: there is no memory for so large a disk. The target is closed.
    pub fn new(mut target: Box<CommitTarget>, writer: &Writer<TableFile>) -> Option<Self> {
        let (geometry, size_bytes) = (writer.header().geometry, writer.header().size_bytes);
        let cluster_bytes = geometry.cluster_bytes();
        let clusters = size_bytes.div_ceil(cluster_bytes);
        let (Some(dirty), Some(protected)) = (Clusters::new(clusters), Clusters::new(clusters)) else {
            let _ = target.close();
            return None;
        };
        Some(Self {
            target,
            cluster_bytes,
            size_bytes,
            next: 0,
            dirty,
            protected,
            window: Vec::new(),
            since: 0,
            cursor: 0,
            changed: 0,
            content: vec![0; usize::try_from(cluster_bytes).unwrap_or(usize::MAX)],
        })
    }

    pub fn into_target(self) -> Box<CommitTarget> {
        self.target
    }

    /// The entry of a cluster has changed, or a guest may write to the cluster in place from now on.
    pub fn changed(&mut self, cluster: u64) {
        self.protected.remove(cluster);
        // What has not been looked at will be.
        if cluster < self.next && self.dirty.insert(cluster) {
            self.changed += 1;
        }
    }

    /// Changes entries for the view that were read from the file.
    pub fn protect_read(&self, first: u64, entries: &mut [RawL2Entry]) {
        for (cluster, entry) in (first..).zip(entries) {
            if self.protected.contains(cluster) {
                *entry = entry.shared();
            }
        }
    }

    /// Looks for clusters, protects some, or copies some.
    pub fn step(
        &mut self,
        writer: &mut Writer<TableFile>,
        volume: &Volume,
        link: &Link,
        peers: &mut Vec<Peer>,
        memory: &mut Memory,
    ) -> Result<Progress, String> {
        self.look(writer).map_err(|error| line(&error))?;
        if self.window.is_empty() {
            self.protect(writer, volume).map_err(|error| line(&error))?;
            self.since = link.epochs.begin_next();
            // An engine that has joined before may have an op that began before.
            link.add_new(peers);
        }
        let waits_for_requests =
            !self.window.is_empty() && !peers.iter().all(|peer| peer.is_since(self.since));
        let copied = if waits_for_requests { 0 } else { self.copy(writer, volume, memory)? };
        Ok(Progress {
            to: (self.next * self.cluster_bytes).min(self.size_bytes),
            copied_bytes: copied * self.cluster_bytes,
            pending_bytes: self.dirty.count * self.cluster_bytes,
            waits_for_requests,
            ..Progress::default()
        })
    }

    fn clusters(&self) -> u64 {
        self.size_bytes.div_ceil(self.cluster_bytes)
    }

    fn window_clusters(&self) -> u64 {
        (WINDOW_BYTES / self.cluster_bytes).max(1)
    }

    fn look(&mut self, writer: &mut Writer<TableFile>) -> Result<(), qcow2::WriteError> {
        let end = self.clusters().min(self.next + STEP_CLUSTERS);
        while self.next < end && self.dirty.count < self.window_clusters() {
            if writer.allocation(self.next)?.0 != Allocation::Unallocated {
                self.dirty.insert(self.next);
            }
            self.next += 1;
        }
        Ok(())
    }

    fn protect(&mut self, writer: &mut Writer<TableFile>, volume: &Volume) -> Result<(), qcow2::WriteError> {
        let most = self.window_clusters();
        while (self.window.len() as u64) < most.min(self.dirty.count) {
            let found = self.dirty.next(self.cursor).or_else(|| self.dirty.next(0));
            // Dirty and protected: it is in the window already.
            let Some(cluster) = found.filter(|cluster| !self.protected.contains(*cluster)) else { break };
            volume.set_l2(cluster, writer.allocation(cluster)?.1.shared());
            self.protected.insert(cluster);
            self.window.push(cluster);
            self.cursor = cluster + 1;
        }
        self.window.reverse();
        Ok(())
    }

    /// Returns how many clusters were copied.
    fn copy(
        &mut self,
        writer: &mut Writer<TableFile>,
        volume: &Volume,
        memory: &mut Memory,
    ) -> Result<u64, String> {
        let most = (STEP_BYTES / self.cluster_bytes).max(1) + std::mem::take(&mut self.changed);
        let mut copied = 0;
        while copied < most {
            let Some(cluster) = self.window.pop() else { break };
            // A guest has written to it meanwhile, or writes now.
            if !self.protected.contains(cluster) {
                continue;
            }
            self.copy_cluster(cluster, writer, volume, memory)?;
            self.dirty.remove(cluster);
            copied += 1;
        }
        Ok(copied)
    }

    fn copy_cluster(
        &mut self,
        cluster: u64,
        writer: &mut Writer<TableFile>,
        volume: &Volume,
        memory: &mut Memory,
    ) -> Result<(), String> {
        let offset = cluster * self.cluster_bytes;
        match writer.allocation(cluster).map_err(|error| line(&error))?.0 {
            Allocation::Unallocated => Ok(()),
            Allocation::Zero => {
                let range = offset..(offset + self.cluster_bytes).min(self.size_bytes);
                self.target.zero(range, volume.file_below_top(), &mut Lower { volume, first: 2, memory })
            }
            Allocation::Data { .. } => {
                let mut lower = Lower { volume, first: 1, memory };
                let read = writer.read_cluster(cluster, &mut lower, &mut self.content);
                read.map_err(|error| line(&error))?;
                let mut lower = Lower { volume, first: 2, memory };
                self.target.write(offset, &self.content, volume.file_below_top(), &mut lower)
            }
        }
    }
}

impl Clusters {
    /// `None`: there is no memory for so many.
    fn new(clusters: u64) -> Option<Self> {
        let count = usize::try_from(clusters.div_ceil(64)).ok()?;
        let mut words = Vec::new();
        words.try_reserve_exact(count).ok()?;
        words.resize(count, 0);
        Some(Self { words: words.into_boxed_slice(), count: 0 })
    }

    fn word(&mut self, cluster: u64) -> Option<(&mut u64, u64)> {
        let word = usize::try_from(cluster / 64).ok().and_then(|at| self.words.get_mut(at))?;
        Some((word, 1 << (cluster % 64)))
    }

    fn contains(&self, cluster: u64) -> bool {
        let word = usize::try_from(cluster / 64).ok().and_then(|at| self.words.get(at));
        word.is_some_and(|word| word & 1 << (cluster % 64) != 0)
    }

    /// Returns whether the cluster is new.
    fn insert(&mut self, cluster: u64) -> bool {
        let Some((word, bit)) = self.word(cluster) else { return false };
        let is_new = *word & bit == 0;
        *word |= bit;
        self.count += u64::from(is_new);
        is_new
    }

    fn remove(&mut self, cluster: u64) {
        let Some((word, bit)) = self.word(cluster) else { return };
        let was_there = *word & bit != 0;
        *word &= !bit;
        self.count -= u64::from(was_there);
    }

    /// The first cluster from this one on.
    fn next(&self, from: u64) -> Option<u64> {
        let first = usize::try_from(from / 64).ok()?;
        let words = self.words.get(first..)?;
        let masked = words.iter().enumerate().map(|(at, word)| match at {
            0 => (at, word & u64::MAX << (from % 64)),
            _ => (at, *word),
        });
        let (at, word) = masked.into_iter().find(|(_, word)| *word != 0)?;
        Some((first + at) as u64 * 64 + u64::from(word.trailing_zeros()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_finds_its_clusters_in_order() {
        let mut set = Clusters::new(200).unwrap();
        for cluster in [3, 64, 130, 199, 64] {
            set.insert(cluster);
        }
        assert_eq!(set.count, 4);
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(cluster) = set.next(from) {
            found.push(cluster);
            from = cluster + 1;
        }
        assert_eq!(found, [3, 64, 130, 199]);
        set.remove(130);
        set.remove(131);
        assert_eq!((set.next(65), set.count, set.contains(64)), (Some(199), 3, true));
        assert!(!set.insert(1000) && !set.contains(1000) && set.next(1000).is_none());
    }
}
