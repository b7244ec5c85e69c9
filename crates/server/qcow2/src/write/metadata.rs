//! The host clusters of all tables. No allocation, no copy and no release may touch one.
//!
//! Memory: at most [`MAX_CLUSTERS`] numbers, below 64 MiB; about 18 bytes for each L2 table of a usual image.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::error::{FormatError, Limit};
use crate::geometry::Geometry;
use crate::write::error::WriteError;

/// 1 Mi: L2 tables for 512 TiB of guest data, with clusters of 64 KiB.
const MAX_CLUSTERS: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Metadata {
    cluster_bits: u32,
    /// How many entries of the active L1 table and of the snapshots' lead to each L2 table.
    l2_tables: HashMap<u64, u32>,
    others: HashSet<u64>,
    /// Two entries of the active L1 table led to one L2 table when the image was opened.
    pub(super) has_doubled_l2: bool,
}

impl Metadata {
    pub(super) fn new(geometry: &Geometry) -> Self {
        let (l2_tables, others) = (HashMap::new(), HashSet::new());
        Self { cluster_bits: geometry.cluster_bits, l2_tables, others, has_doubled_l2: false }
    }

    pub(super) fn contains(&self, cluster: u64) -> bool {
        self.l2_tables.contains_key(&cluster) || self.others.contains(&cluster)
    }

    /// Adds the clusters of a table that is no L2 table.
    pub(super) fn add(&mut self, clusters: Range<u64>) -> Result<(), WriteError> {
        for cluster in clusters {
            self.check_room()?;
            if self.l2_tables.contains_key(&cluster) || !self.others.insert(cluster) {
                return Err(self.overlap(cluster));
            }
        }
        Ok(())
    }

    /// Forgets a table that is no L2 table.
    pub(super) fn remove(&mut self, clusters: Range<u64>) {
        clusters.for_each(|cluster| _ = self.others.remove(&cluster));
    }

    /// Adds a reference to an L2 table.
    pub(super) fn add_l2(&mut self, cluster: u64) -> Result<(), WriteError> {
        if let Some(references) = self.l2_tables.get_mut(&cluster) {
            *references = references.saturating_add(1);
            return Ok(());
        }
        self.check_room()?;
        if self.others.contains(&cluster) {
            return Err(self.overlap(cluster));
        }
        self.l2_tables.insert(cluster, 1);
        Ok(())
    }

    /// Looks for L2 tables with two references, before those of snapshots are added.
    pub(super) fn note_doubled_l2(&mut self) {
        self.has_doubled_l2 = self.l2_tables.values().any(|references| *references > 1);
    }

    /// Takes back a reference to an L2 table, which stays in the set.
    pub(super) fn unlink_l2(&mut self, cluster: u64) {
        if let Some(references) = self.l2_tables.get_mut(&cluster) {
            *references = references.saturating_sub(1);
        }
    }

    /// How many entries lead to an L2 table.
    pub(super) fn l2_references(&self, cluster: u64) -> u32 {
        self.l2_tables.get(&cluster).copied().unwrap_or_default()
    }

    /// Forgets an L2 table.
    pub(super) fn remove_l2(&mut self, cluster: u64) {
        self.l2_tables.remove(&cluster);
    }

    /// Before tables are written: whether so many clusters can be added.
    pub(super) fn has_room(&self, clusters: u64) -> bool {
        let count = (self.l2_tables.len() + self.others.len()) as u64;
        count.saturating_add(clusters) <= MAX_CLUSTERS as u64
    }

    fn check_room(&self) -> Result<(), WriteError> {
        if self.has_room(1) {
            return Ok(());
        }
        let (field, value) = ("number of clusters with tables", MAX_CLUSTERS as u64 + 1);
        Err(FormatError::Field { field, value, limit: Limit::AtMost(MAX_CLUSTERS as u64) }.into())
    }

    fn overlap(&self, cluster: u64) -> WriteError {
        let place = cluster << self.cluster_bits;
        WriteError::Damaged { field: "number of tables", place, value: 2, limit: Limit::Only(1) }
    }
}
