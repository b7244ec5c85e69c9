//! Counters of references, for a window of the file's clusters.

/// 64 MiB of counters.
const WINDOW_CLUSTERS: u64 = 1 << 24;
/// The lower bits of a counter are the number of references, the upper ones what refers to the cluster.
const COUNT_MASK: u32 = (1 << 27) - 1;

/// What refers to a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum User {
    /// The refcount table or a refcount block, which nothing may share.
    Refcounts,
    /// Another table that nothing may share.
    Table,
    /// L1 entries. Snapshots share L2 tables.
    L2Table,
    /// L2 entries.
    Data,
    /// L2 entries of compressed clusters, of which several fit into one cluster.
    Compressed,
}

impl User {
    const fn bit(self) -> u32 {
        1 << match self {
            Self::Refcounts => 27,
            Self::Table => 28,
            Self::L2Table => 29,
            Self::Data => 30,
            Self::Compressed => 31,
        }
    }
}

/// Counters for a window.
#[derive(Debug)]
pub(crate) struct Counts {
    /// The window's first cluster.
    start: u64,
    counters: Vec<u32>,
    /// Clusters of the file.
    clusters: u64,
    /// The first cluster after the window that has a reference.
    next: Option<u64>,
}

impl Counts {
    pub(super) fn new(clusters: u64) -> Self {
        let window = usize::try_from(clusters.min(WINDOW_CLUSTERS)).unwrap_or(usize::MAX);
        Self { start: 0, counters: vec![0; window], clusters, next: None }
    }

    /// Empties the window and moves it to begin at `start`.
    pub(super) fn move_to(&mut self, start: u64) {
        (self.start, self.next) = (start, None);
        self.counters.fill(0);
    }

    /// Where the next window begins that has references.
    pub(super) fn next_window(&self) -> Option<u64> {
        self.next.map(|cluster| self.window_of(cluster))
    }

    /// The start of a cluster's window.
    pub(super) fn window_of(&self, cluster: u64) -> u64 {
        cluster - cluster % WINDOW_CLUSTERS
    }

    /// Windows do not overlap, so references are findings only while the first one is counted.
    pub(super) fn is_first(&self) -> bool {
        self.start == 0
    }

    /// The first cluster after the window, which is not shorter at the end of the file.
    pub(crate) fn window_end(&self) -> u64 {
        self.start + WINDOW_CLUSTERS
    }

    /// The clusters of the window that the file has.
    pub(crate) fn range(&self) -> std::ops::Range<u64> {
        self.start..(self.start + self.counters.len() as u64).min(self.clusters)
    }

    /// Counts a reference.
    pub(super) fn add(&mut self, cluster: u64, user: User) {
        if cluster < self.start {
            return;
        }
        let counter = usize::try_from(cluster - self.start).ok().and_then(|at| self.counters.get_mut(at));
        match counter {
            Some(counter) => {
                let count = ((*counter & COUNT_MASK) + 1).min(COUNT_MASK);
                *counter = (*counter & !COUNT_MASK) | user.bit() | count;
            }
            None => self.next = Some(self.next.map_or(cluster, |next| next.min(cluster))),
        }
    }

    /// Whether a cluster of the window has references.
    pub(crate) fn is_used(&self, cluster: u64) -> bool {
        self.of(cluster).0 != 0
    }

    /// The number of references of a cluster of the window. `None`: there are too many for the counter.
    pub(crate) fn exact(&self, cluster: u64) -> Option<u64> {
        let references = self.of(cluster).0;
        (references < COUNT_MASK.into()).then_some(references)
    }

    /// The number of references, and whether something uses the cluster that must not share it.
    pub(crate) fn of(&self, cluster: u64) -> (u64, bool) {
        let (count, users) = self.counter(cluster);
        let is_shared_table = users & (User::Refcounts.bit() | User::Table.bit()) != 0 && count > 1;
        (count.into(), is_shared_table || users.count_ones() > 1)
    }

    /// Whether a cluster has users of this kind. Only in the window.
    pub(super) fn has(&self, cluster: u64, user: User) -> bool {
        self.range().contains(&cluster) && self.counter(cluster).1 & user.bit() != 0
    }

    /// The number of references, and the bits of the users.
    fn counter(&self, cluster: u64) -> (u32, u32) {
        let at = usize::try_from(cluster - self.start).unwrap_or(usize::MAX);
        let counter = self.counters.get(at).copied().unwrap_or_default();
        (counter & COUNT_MASK, counter & !COUNT_MASK)
    }
}
