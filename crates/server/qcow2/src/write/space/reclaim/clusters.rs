//! A set of host clusters: one bit for each.

use crate::write::blocks::in_memory;

#[derive(Debug)]
pub(super) struct Clusters(Box<[u64]>);

impl Clusters {
    /// An empty set. `None`: there is no memory for so many clusters.
    pub(super) fn new(clusters: u64) -> Option<Self> {
        let count = in_memory(clusters.div_ceil(64));
        let mut words = Vec::new();
        words.try_reserve_exact(count).ok()?;
        words.resize(count, 0);
        Some(Self(words.into_boxed_slice()))
    }

    /// Adds a cluster. One past the end is ignored.
    pub(super) fn insert(&mut self, cluster: u64) {
        if let Some(word) = self.0.get_mut(in_memory(cluster / 64)) {
            *word |= 1 << (cluster % 64);
        }
    }

    pub(super) fn contains(&self, cluster: u64) -> bool {
        self.0.get(in_memory(cluster / 64)).is_some_and(|word| word & 1 << (cluster % 64) != 0)
    }
}
