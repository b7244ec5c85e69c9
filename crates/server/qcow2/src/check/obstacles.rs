//! What a check finds out for a repair: what forbids to change counts, or to change them where they are.

/// Each is `false` if the image does not have it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Obstacles {
    /// A table or an entry may refer to any cluster: it leads past the end of the file or to another one's cluster, cannot
    /// be read or decoded. So a cluster without known references may be in use.
    pub(crate) unknown_references: bool,
    /// A table could not be read, which may be different the next time.
    pub(crate) unreadable: bool,
    /// The refcount table or a block is outside of the file, or its place is not known, or something else uses it, too.
    pub(crate) unusable_counts: bool,
    /// A cluster has references, but its count has no block.
    pub(crate) missing_blocks: bool,
}
