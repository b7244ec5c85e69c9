//! The fixed fields, as stored. Only version, magic and cluster size are checked here, because the others need them.

use crate::big_endian::{u32_at, u64_at};
use crate::error::{FormatError, Limit};

/// `QFI\xfb`.
const MAGIC: u32 = 0x5146_49fb;
/// QEMU's limit, too.
const MAX_CLUSTER_BITS: u32 = 21;
/// Bytes of the fixed fields of version 2, with which version 3 begins.
pub(super) const V2_BYTES: usize = 72;
/// At least so many in version 3.
pub(super) const V3_BYTES: usize = 104;
/// Reference counts of version 2 have 16 bits.
const V2_REFCOUNT_ORDER: u32 = 4;
/// Where the fixed field after [`V3_BYTES`] is.
const COMPRESSION_TYPE: usize = 104;

/// The fixed fields, named as in the format's description.
#[derive(Debug)]
pub(super) struct Fields {
    pub(super) version: u32,
    pub(super) backing_file_offset: u64,
    pub(super) backing_file_size: u32,
    pub(super) cluster_bits: u32,
    pub(super) size: u64,
    pub(super) crypt_method: u32,
    pub(super) l1_size: u32,
    pub(super) l1_table_offset: u64,
    pub(super) refcount_table_offset: u64,
    pub(super) refcount_table_clusters: u32,
    pub(super) nb_snapshots: u32,
    pub(super) snapshots_offset: u64,
    pub(super) incompatible_features: u64,
    pub(super) compatible_features: u64,
    pub(super) autoclear_features: u64,
    pub(super) refcount_order: u32,
    pub(super) header_length: u32,
    pub(super) compression_type: u8,
}

impl Fields {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let cluster_bits = cluster_bits(bytes)?;
        let version = u32_at(bytes, 4);
        let is_v3 = version == 3;
        if is_v3 {
            whole(bytes, V3_BYTES)?;
        }
        let (v3_u32, v3_u64) =
            (|at| if is_v3 { u32_at(bytes, at) } else { 0 }, |at| if is_v3 { u64_at(bytes, at) } else { 0 });
        let v2_bytes = u32::try_from(V2_BYTES).unwrap_or_default();
        let header_length = if is_v3 { v3_u32(100) } else { v2_bytes };
        let has_compression = usize::try_from(header_length).is_ok_and(|length| length > COMPRESSION_TYPE);
        Ok(Self {
            version,
            backing_file_offset: u64_at(bytes, 8),
            backing_file_size: u32_at(bytes, 16),
            cluster_bits,
            size: u64_at(bytes, 24),
            crypt_method: u32_at(bytes, 32),
            l1_size: u32_at(bytes, 36),
            l1_table_offset: u64_at(bytes, 40),
            refcount_table_offset: u64_at(bytes, 48),
            refcount_table_clusters: u32_at(bytes, 56),
            nb_snapshots: u32_at(bytes, 60),
            snapshots_offset: u64_at(bytes, 64),
            incompatible_features: v3_u64(72),
            compatible_features: v3_u64(80),
            autoclear_features: v3_u64(88),
            refcount_order: if is_v3 { v3_u32(96) } else { V2_REFCOUNT_ORDER },
            header_length,
            compression_type: bytes.get(COMPRESSION_TYPE).copied().filter(|_| has_compression).unwrap_or(0),
        })
    }

    pub(super) const fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }
}

/// Checks what tells how much of the file is the header.
pub(super) fn cluster_bits(bytes: &[u8]) -> Result<u32, FormatError> {
    let magic = bytes.first_chunk().map_or(0, |magic| u32::from_be_bytes(*magic));
    if magic != MAGIC {
        return Err(FormatError::NotQcow2 { magic });
    }
    whole(bytes, V2_BYTES)?;
    Limit::Range(2, 3).check("version", u32_at(bytes, 4).into())?;
    let bits = u32_at(bytes, 20);
    Limit::Range(9, MAX_CLUSTER_BITS.into()).check("cluster_bits", bits.into())?;
    Ok(bits)
}

fn whole(bytes: &[u8], len: usize) -> Result<(), FormatError> {
    if bytes.len() >= len {
        return Ok(());
    }
    let (len_bytes, file_bytes) = (len as u64, bytes.len() as u64);
    Err(FormatError::Outside { what: "header", offset: 0, len_bytes, file_bytes })
}
