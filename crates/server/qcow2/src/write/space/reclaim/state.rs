//! What a reclaim knows between two steps.

use std::collections::HashSet;

use crate::header::{Header, TableAt};
use crate::read_at::ReadAt;
use crate::snapshots::Snapshots;
use crate::write::space::reclaim::clusters::Clusters;
use crate::write::space::reclaim::error::ReclaimError;

/// The most that one step does.
#[derive(Debug)]
pub(in crate::write) struct StepSize {
    /// Entries that it looks at: an L2 table of 64 KiB.
    pub(in crate::write) entries: u64,
    /// Counts that it looks at.
    pub(in crate::write) counts: u64,
    /// Leaks that it frees.
    pub(in crate::write) leaks: usize,
}

/// What a reclaim does next.
#[derive(Debug, Clone, Copy)]
pub(super) enum Phase {
    /// Looks at L2 entries.
    Scan,
    /// Looks at the counts of all clusters from this one on.
    Check(u64),
    /// Frees leaks from this cluster on.
    Free(u64),
}

#[derive(Debug)]
pub(in crate::write) struct Reclaim {
    pub(super) scan: Scan,
    /// Clusters to which an entry led when the scan passed it.
    pub(super) used: Clusters,
    /// Clusters that changes took or unlinked since the beginning, or that wait to be released.
    pub(super) taken: Clusters,
    /// Clusters that the file had at the beginning.
    pub(super) end: u64,
    pub(super) phase: Phase,
    pub(super) first_leak: Option<u64>,
    pub(super) freed: u64,
    pub(in crate::write) step: StepSize,
}

/// Where a scan is.
#[derive(Debug)]
pub(super) struct Scan {
    /// Those of the snapshots.
    pub(super) l1_tables: Vec<TableAt>,
    /// 0: the active one; then those of the snapshots.
    table: usize,
    pub(super) l1_index: u64,
    pub(super) l2_index: u64,
    /// Offsets of the snapshots' L2 tables that were visited.
    pub(super) visited: HashSet<u64>,
    /// L1 entries of the tables before.
    before: u64,
}

impl Scan {
    pub(super) fn new(file: &impl ReadAt, header: &Header) -> Result<Self, ReclaimError> {
        let l1_tables: Result<Vec<TableAt>, _> =
            Snapshots::new(file, header).map(|snapshot| snapshot.map(|snapshot| snapshot.l1)).collect();
        let (l1_tables, visited) = (l1_tables?, HashSet::new());
        Ok(Self { l1_tables, table: 0, l1_index: 0, l2_index: 0, visited, before: 0 })
    }

    /// The L1 table at which the scan is. `None`: it has visited all.
    pub(super) fn l1(&self, header: &Header) -> Option<TableAt> {
        match self.table.checked_sub(1) {
            None => Some(header.l1),
            Some(snapshot) => self.l1_tables.get(snapshot).copied(),
        }
    }

    /// Whether the L1 table is a snapshot's.
    pub(super) fn is_snapshots(&self) -> bool {
        self.table > 0
    }

    pub(super) fn next_entry(&mut self) {
        (self.l1_index, self.l2_index) = (self.l1_index + 1, 0);
    }

    pub(super) fn next_table(&mut self) {
        self.before += self.l1_index;
        (self.table, self.l1_index, self.l2_index) = (self.table + 1, 0, 0);
    }

    /// Entries that were passed, and all. Each L1 entry counts as a whole L2 table.
    pub(super) fn progress(&self, header: &Header) -> (u64, u64) {
        let all =
            self.l1_tables.iter().map(|at| u64::from(at.count)).sum::<u64>() + u64::from(header.l1.count);
        let entries = u64::from(header.geometry.l2_entries());
        ((self.before + self.l1_index) * entries + self.l2_index, all * entries)
    }
}
