//! The units of an image: clusters, subclusters, entries of tables, and the arithmetic on guest offsets.

/// Subclusters of a cluster in images with extended L2 entries.
const SUBCLUSTERS: u32 = 32;

/// The units of an image. Only a checked header makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    pub(crate) version: u32,
    pub(crate) cluster_bits: u32,
    pub(crate) refcount_order: u32,
    pub(crate) extended_l2: bool,
    pub(crate) external_data: bool,
}

impl Geometry {
    /// 2 or 3.
    #[must_use]
    pub const fn version(&self) -> u32 {
        self.version
    }

    /// 9 to 21.
    #[must_use]
    pub const fn cluster_bits(&self) -> u32 {
        self.cluster_bits
    }

    /// 512 bytes to 2 MiB.
    #[must_use]
    pub const fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Whether an L2 entry has 16 bytes and describes 32 subclusters.
    #[must_use]
    pub const fn has_extended_l2(&self) -> bool {
        self.extended_l2
    }

    /// Whether guest data are in a second file, at the guest's offsets.
    #[must_use]
    pub const fn has_external_data(&self) -> bool {
        self.external_data
    }

    /// Whether an L2 entry's bit 0 says that the cluster reads as zeroes.
    #[must_use]
    pub const fn has_zero_flag(&self) -> bool {
        self.version >= 3 && !self.extended_l2
    }

    /// 32, or 1 without extended L2 entries.
    #[must_use]
    pub const fn subclusters(&self) -> u32 {
        if self.extended_l2 { SUBCLUSTERS } else { 1 }
    }

    /// The unit in which data are allocated.
    #[must_use]
    pub const fn subcluster_bits(&self) -> u32 {
        if self.extended_l2 { self.cluster_bits - SUBCLUSTERS.trailing_zeros() } else { self.cluster_bits }
    }

    /// 16, or 8 without extended L2 entries.
    #[must_use]
    pub const fn l2_entry_bytes(&self) -> u64 {
        if self.extended_l2 { 16 } else { 8 }
    }

    /// The number of L2 entries in a table is 2 to the power of this.
    #[must_use]
    pub const fn l2_entries_bits(&self) -> u32 {
        self.cluster_bits - if self.extended_l2 { 4 } else { 3 }
    }

    /// Entries of an L2 table, which fills one cluster.
    #[must_use]
    pub const fn l2_entries(&self) -> u32 {
        1 << self.l2_entries_bits()
    }

    /// Guest bytes that one L2 table describes.
    #[must_use]
    pub const fn l2_coverage_bytes(&self) -> u64 {
        1 << (self.cluster_bits + self.l2_entries_bits())
    }

    /// The L1 entry of a guest offset.
    #[must_use]
    pub const fn l1_index(&self, guest_offset: u64) -> u64 {
        guest_offset >> (self.cluster_bits + self.l2_entries_bits())
    }

    /// The entry of a guest offset in its L2 table.
    #[must_use]
    pub const fn l2_index(&self, guest_offset: u64) -> u32 {
        // Below `l2_entries`, which is at most 2^18.
        #[allow(clippy::cast_possible_truncation)]
        let low = (guest_offset >> self.cluster_bits) as u32;
        low & (self.l2_entries() - 1)
    }

    /// An offset inside its cluster.
    #[must_use]
    pub const fn in_cluster(&self, offset: u64) -> u64 {
        offset & (self.cluster_bytes() - 1)
    }

    /// The subcluster of an offset in its cluster.
    #[must_use]
    pub const fn subcluster_index(&self, offset: u64) -> u32 {
        // At most 31.
        #[allow(clippy::cast_possible_truncation)]
        let index = (self.in_cluster(offset) >> self.subcluster_bits()) as u32;
        index
    }

    /// L1 entries that a disk of this size needs.
    #[must_use]
    pub const fn l1_entries_for(&self, size_bytes: u64) -> u64 {
        size_bytes.div_ceil(self.l2_coverage_bytes())
    }

    /// 1 to 64.
    #[must_use]
    pub const fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// Clusters whose reference counts are in one refcount block, which fills one cluster.
    #[must_use]
    pub const fn refcount_block_entries(&self) -> u64 {
        1 << self.refcount_block_bits()
    }

    /// The same as a power of 2.
    #[must_use]
    pub const fn refcount_block_bits(&self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }
}
