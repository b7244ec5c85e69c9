//! Entries of L1 and L2 tables, decoded with all reserved bits checked.

pub mod refcounts;

use std::fmt;

use crate::geometry::Geometry;

/// Bits 9 to 55: the offset of a table or a cluster.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit 63: the reference count is exactly one.
pub(crate) const COPIED: u64 = 1 << 63;
/// Bit 62 of an L2 entry.
pub(crate) const COMPRESSED: u64 = 1 << 62;
/// Bit 0 of a standard L2 entry.
const ZERO: u64 = 1;
/// The unit in which an entry counts the data of a compressed cluster.
const COMPRESSED_SECTOR_BYTES: u64 = 512;
/// Bits of a host offset.
const HOST_OFFSET_BITS: u32 = 56;

/// The kind of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// The first level of the mapping.
    L1,
    /// The second level.
    L2,
    /// The first level of reference counts.
    Refcount,
    /// The clusters of a bitmap.
    Bitmap,
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::L1 => "L1 entry",
            Self::L2 => "L2 entry",
            Self::Refcount => "refcount table entry",
            Self::Bitmap => "bitmap table entry",
        })
    }
}

/// An entry that breaks the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{table} {index} is {value:#018x}: {problem}")]
pub struct BadEntry {
    /// Of which table.
    pub table: Table,
    /// The entry's position in its table.
    pub index: u64,
    /// As stored; of an extended L2 entry the first half.
    pub value: u64,
    /// What is wrong.
    pub problem: EntryProblem,
}

/// What is wrong with an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EntryProblem {
    /// Bits without a meaning.
    #[error("reserved bits {bits:#x} are set")]
    Reserved {
        /** Those that are set. */
        bits: u64,
    },
    /// An offset inside a cluster.
    #[error("offset {offset:#x} is not a multiple of the cluster size {cluster_bytes}")]
    Unaligned {
        /** The offset. */
        offset: u64,
        /** The cluster size. */
        cluster_bytes: u64,
    },
    /// A table past the file's end.
    #[error("the L2 table at {offset:#x} is outside of the file, which ends at {file_bytes:#x}")]
    Outside {
        /** The offset. */
        offset: u64,
        /** The file's length. */
        file_bytes: u64,
    },
    /// The flag of a table or cluster that is not there.
    #[error("bit 63 is set without an offset")]
    CopiedNothing,
    /// Subclusters with data, in a cluster without an offset.
    #[error("subclusters {allocated:#010x} are allocated without an offset")]
    AllocatedNowhere {
        /** A bit for each. */
        allocated: u32,
    },
    /// Subclusters that have data and read as zeroes.
    #[error("subclusters {both:#010x} are allocated and read as zeroes")]
    AllocatedAndZero {
        /** A bit for each. */
        both: u32,
    },
    /// A compressed cluster where the format allows none.
    #[error("a compressed cluster, although the data are in an external file")]
    CompressedOutside,
    /// A cluster of an external file at another offset than the guest's.
    #[error("external data at {offset:#x} instead of the guest's offset {guest_offset:#x}")]
    NotIdentity {
        /** As stored. */
        offset: u64,
        /** The only one that is allowed. */
        guest_offset: u64,
    },
}

/// A decoded L1 entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct L1Entry {
    /// Where the L2 table is. `None`: nothing of its range is allocated.
    pub l2_table: Option<u64>,
    /// The L2 table belongs only to the active L1 table.
    pub copied: bool,
}

impl L1Entry {
    /// `raw` in the host's byte order.
    ///
    /// # Errors
    /// The entry breaks the format.
    pub fn decode(raw: u64, geometry: &Geometry) -> Result<Self, EntryProblem> {
        reserved(raw & !(OFFSET_MASK | COPIED))?;
        let (offset, copied) = (aligned(raw & OFFSET_MASK, geometry)?, raw & COPIED != 0);
        if copied && offset == 0 {
            return Err(EntryProblem::CopiedNothing);
        }
        Ok(Self { l2_table: (offset != 0).then_some(offset), copied })
    }
}

impl L1Entry {
    /// The entry of an L2 table that belongs only to the active L1 table.
    pub(crate) const fn own(l2_table: u64) -> u64 {
        l2_table | COPIED
    }
}

/// An L2 entry as stored, in the host's byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RawL2Entry {
    /// The cluster.
    pub cluster: u64,
    /// The subclusters. 0 without extended L2 entries.
    pub subclusters: u64,
}

impl RawL2Entry {
    /// From the bytes of a table, or of a part that begins with an entry. `None`: the bytes end before this entry.
    #[must_use]
    pub fn at(table: &[u8], index: usize, geometry: &Geometry) -> Option<Self> {
        let words = table.as_chunks::<8>().0;
        if geometry.extended_l2 {
            let [cluster, subclusters] = *words.as_chunks::<2>().0.get(index)?;
            let [cluster, subclusters] = [cluster, subclusters].map(u64::from_be_bytes);
            return Some(Self { cluster, subclusters });
        }
        Some(Self { cluster: u64::from_be_bytes(*words.get(index)?), subclusters: 0 })
    }

    /// A whole cluster of data that belongs only to the active L2 table.
    pub(crate) const fn data(host_offset: u64, geometry: &Geometry) -> Self {
        let subclusters = if geometry.extended_l2 { u32::MAX as u64 } else { 0 };
        Self { cluster: host_offset | COPIED, subclusters }
    }

    /// Zeroes, in an image that has a flag for them. `kept`: the host cluster, which belongs only to the active table.
    pub(crate) const fn zeroes(kept: Option<u64>, geometry: &Geometry) -> Self {
        let host = match kept {
            Some(host_offset) => host_offset | COPIED,
            None => 0,
        };
        if geometry.extended_l2 {
            return Self { cluster: host, subclusters: (u32::MAX as u64) << 32 };
        }
        Self { cluster: host | ZERO, subclusters: 0 }
    }

    /// The same entry with a bit that makes decoding fail.
    pub(crate) const fn refused(self) -> Self {
        let bit = if self.cluster & COMPRESSED != 0 { COPIED } else { ZERO << 1 };
        Self { cluster: self.cluster | bit, subclusters: self.subclusters }
    }

    /// The same entry for a cluster that must be claimed before it is written.
    #[must_use]
    pub const fn shared(self) -> Self {
        if self.cluster & COMPRESSED != 0 { self } else { Self { cluster: self.cluster & !COPIED, ..self } }
    }

    /// Stores the entry at `at` bytes into a part of a table.
    pub(crate) fn store(self, table: &mut [u8], at: usize, geometry: &Geometry) {
        let words = [self.cluster.to_be_bytes(), self.subclusters.to_be_bytes()];
        let bytes = words[..if geometry.extended_l2 { 2 } else { 1 }].as_flattened();
        if let Some(place) = table.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    /// Whether the guest's data may be written where they are: the whole cluster has data, and belongs only to the
    /// active L2 table. Any other cluster is claimed first. False for an entry that breaks the format.
    #[must_use]
    pub fn is_in_place(self, geometry: &Geometry) -> bool {
        let all = if geometry.extended_l2 { u32::MAX } else { 1 };
        match L2Entry::decode(self, geometry) {
            Ok(L2Entry::Standard(cluster)) => cluster.copied && cluster.allocated == all,
            _ => false,
        }
    }
}

/// A decoded L2 entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum L2Entry {
    /// Data, zeroes or nothing.
    Standard(StandardCluster),
    /// Compressed data.
    Compressed(CompressedCluster),
}

/// A cluster that is not compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StandardCluster {
    /// The host cluster. It may be there although the guest sees zeroes.
    pub host_offset: Option<u64>,
    /// The host cluster belongs only to the active L2 table.
    pub copied: bool,
    /// Which subclusters have data; bit 0 is the first. Without extended L2 entries, bit 0 is the whole cluster.
    pub allocated: u32,
    /// Which subclusters read as zeroes.
    pub zero: u32,
}

/// Where the data of a compressed cluster are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressedCluster {
    /// Their first byte, at any position of a sector.
    pub host_offset: u64,
    /// The sectors of 512 bytes that they touch.
    pub sectors: u32,
}

impl CompressedCluster {
    /// From the first byte to the end of the last sector. The data may end earlier.
    #[must_use]
    pub const fn len_bytes(&self) -> u64 {
        self.sectors as u64 * COMPRESSED_SECTOR_BYTES - self.host_offset % COMPRESSED_SECTOR_BYTES
    }
}

impl L2Entry {
    /// Decodes an entry.
    ///
    /// # Errors
    /// The entry breaks the format.
    pub fn decode(raw: RawL2Entry, geometry: &Geometry) -> Result<Self, EntryProblem> {
        if raw.cluster & COMPRESSED != 0 {
            return compressed(raw, geometry).map(Self::Compressed);
        }
        standard(raw, geometry).map(Self::Standard)
    }
}

fn standard(raw: RawL2Entry, geometry: &Geometry) -> Result<StandardCluster, EntryProblem> {
    let zero_flag = if geometry.has_zero_flag() { ZERO } else { 0 };
    reserved(raw.cluster & !(OFFSET_MASK | COPIED | zero_flag))?;
    let (offset, copied) = (aligned(raw.cluster & OFFSET_MASK, geometry)?, raw.cluster & COPIED != 0);
    // An external file may have data at offset 0.
    let is_there = offset != 0 || (copied && geometry.external_data);
    if copied && !is_there {
        return Err(EntryProblem::CopiedNothing);
    }
    let host_offset = is_there.then_some(offset);
    if geometry.extended_l2 {
        return subclusters(raw.subclusters, host_offset, copied);
    }
    let zero = u32::from(raw.cluster & zero_flag != 0);
    Ok(StandardCluster { host_offset, copied, allocated: u32::from(is_there) & !zero, zero })
}

fn subclusters(bitmap: u64, host_offset: Option<u64>, copied: bool) -> Result<StandardCluster, EntryProblem> {
    // Two halves of 32 bits.
    #[allow(clippy::cast_possible_truncation)]
    let (allocated, zero) = (bitmap as u32, (bitmap >> 32) as u32);
    if allocated & zero != 0 {
        return Err(EntryProblem::AllocatedAndZero { both: allocated & zero });
    }
    if allocated != 0 && host_offset.is_none() {
        return Err(EntryProblem::AllocatedNowhere { allocated });
    }
    Ok(StandardCluster { host_offset, copied, allocated, zero })
}

fn compressed(raw: RawL2Entry, geometry: &Geometry) -> Result<CompressedCluster, EntryProblem> {
    if geometry.external_data {
        return Err(EntryProblem::CompressedOutside);
    }
    // The cluster size decides how many of the 62 bits count sectors.
    let offset_bits = 62 - (geometry.cluster_bits - 8);
    let descriptor = raw.cluster & (COMPRESSED - 1);
    let offset = descriptor & ((1 << offset_bits) - 1);
    reserved(offset & !((1 << HOST_OFFSET_BITS) - 1))?;
    reserved(raw.cluster & COPIED)?;
    reserved(raw.subclusters)?;
    // At most 13 bits.
    #[allow(clippy::cast_possible_truncation)]
    let more = (descriptor >> offset_bits) as u32;
    Ok(CompressedCluster { host_offset: offset, sectors: more + 1 })
}

fn reserved(bits: u64) -> Result<(), EntryProblem> {
    if bits == 0 { Ok(()) } else { Err(EntryProblem::Reserved { bits }) }
}

fn aligned(offset: u64, geometry: &Geometry) -> Result<u64, EntryProblem> {
    if geometry.in_cluster(offset) != 0 {
        return Err(EntryProblem::Unaligned { offset, cluster_bytes: geometry.cluster_bytes() });
    }
    Ok(offset)
}
