//! Host clusters that are ready for use: their counts are 1 and durable, the file has them, and they durably read as
//! zeroes. `refill.rs` adds to them.
//!
//! - A crash leaks the reserve, which `qemu-img check` calls leaks, not errors.
//! - It grows from 64 clusters to 64 MiB, doubling each time that it is used up, so that a busy guest waits for few
//!   syncs. With clusters of 2 MiB it begins with 32.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::geometry::Geometry;
use crate::write::blocks::in_memory;

const FIRST_CLUSTERS: usize = 64;
const MAX_BYTES: u64 = 64 << 20;

#[derive(Debug)]
pub(in crate::write) struct Reserve {
    pub(in crate::write) clusters: BTreeSet<u64>,
    /// How many the next refill aims at.
    pub(in crate::write) target: usize,
    pub(in crate::write) most: usize,
    /// No cluster before this one is free.
    pub(in crate::write) lowest_free: u64,
    /// Where clusters begin by which the file has grown, but which are not ready. `u64::MAX`: there are none.
    pub(in crate::write) tail: u64,
}

impl Reserve {
    pub(in crate::write) fn new(geometry: &Geometry) -> Self {
        let most = in_memory(MAX_BYTES / geometry.cluster_bytes());
        let target = FIRST_CLUSTERS.min(most);
        Self { clusters: BTreeSet::new(), target, most, lowest_free: 1, tail: u64::MAX }
    }

    pub(in crate::write) fn contains(&self, cluster: u64) -> bool {
        self.clusters.contains(&cluster)
    }

    /// The lowest cluster of the reserve.
    pub(in crate::write) fn take(&mut self) -> Option<u64> {
        self.clusters.pop_first()
    }

    /// Takes back a cluster that still reads as zeroes.
    pub(in crate::write) fn put_back(&mut self, cluster: u64) {
        self.clusters.insert(cluster);
    }

    /// Empties the reserve.
    pub(in crate::write) fn take_all(&mut self) -> BTreeSet<u64> {
        self.target = FIRST_CLUSTERS.min(self.most);
        std::mem::take(&mut self.clusters)
    }
}

/// Joins adjacent clusters.
pub(in crate::write) fn runs(clusters: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for cluster in clusters {
        match runs.last_mut() {
            Some(run) if run.end == cluster => run.end += 1,
            _ => runs.push(cluster..cluster + 1),
        }
    }
    runs
}
