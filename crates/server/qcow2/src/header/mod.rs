//! The header: fixed fields, header extensions and the backing file's name, all in the first cluster.
//!
//! `first cluster → fields, each against its limit → features → extensions.rs → Header`
//!
//! - A limit is the format's own, or QEMU's where the format leaves a table's size open.
//! - Nothing outside of the first cluster is interpreted here.

pub mod extensions;
pub mod features;
mod fields;

use crate::error::{FormatError, Limit, read_whole};
use crate::geometry::Geometry;
use crate::read_at::ReadAt;

use extensions::Extensions;
use features::{Autoclear, Compatible, Incompatible};
use fields::Fields;

/// QEMU's limit: an L1 table has at most 32 MiB.
const MAX_L1_ENTRIES: u64 = (32 << 20) / 8;
/// QEMU's limit.
const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// QEMU's limit.
const MAX_SNAPSHOTS: u64 = 65_536;
/// The format's limit.
const MAX_BACKING_NAME_BYTES: u64 = 1023;
const MAX_REFCOUNT_ORDER: u64 = 6;
const MAX_OFFSET: u64 = i64::MAX as u64;

/// A checked header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The units.
    pub geometry: Geometry,
    /// The guest's disk.
    pub size_bytes: u64,
    /// The next layer.
    pub backing: Option<Backing>,
    /// The active L1 table. `count`: its entries.
    pub l1: TableAt,
    /// The refcount table. `count`: its clusters.
    pub refcount_table: TableAt,
    /// The snapshot table. `count`: its entries.
    pub snapshots: TableAt,
    /// Features that a reader must know.
    pub incompatible: Incompatible,
    /// Features that a reader may ignore.
    pub compatible: Compatible,
    /// Features whose bits a writer that does not know them must clear.
    pub autoclear: Autoclear,
    /// Of compressed clusters.
    pub compression: Compression,
    /// Of the fixed fields.
    pub header_bytes: u32,
    /// Header extensions.
    pub extensions: Extensions,
}

impl Header {
    /// Whether `other`, a later header, has the same disk, made of the same files, which may have grown. A writer changes the
    /// places of tables and the autoclear bits, too. The header of an image that no longer needs its backing file may no longer
    /// name it.
    #[must_use]
    pub fn is_same_disk(&self, other: &Self) -> bool {
        let what = |header: &Self| (header.geometry, header.compression);
        let has_same_backing = self.backing == other.backing || other.backing.is_none();
        what(self) == what(other) && has_same_backing && self.size_bytes <= other.size_bytes
    }
}

/// A table's place in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableAt {
    /// A multiple of the cluster size.
    pub offset: u64,
    /// What is counted depends on the table.
    pub count: u32,
}

/// The next layer, as the image names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backing {
    /// Where the name is in the file.
    pub name_offset: u64,
    /// The name's bytes, any but 0.
    pub name: Vec<u8>,
    /// The format's name. `None`: the image does not say.
    pub format: Option<String>,
}

/// How compressed clusters are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// A raw deflate stream.
    Zlib,
    /// A Zstandard frame.
    Zstd,
}

impl Compression {
    /// As `qemu-img` calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }
}

impl Header {
    /// Reads the first cluster, at most 2 MiB, and checks it.
    ///
    /// # Errors
    /// The image cannot be used, or not be read.
    pub fn read(file: &(impl ReadAt + ?Sized)) -> Result<Self, FormatError> {
        let what = "header";
        let mut start = [0; fields::V2_BYTES];
        let read =
            file.read_at(0, &mut start).map_err(|source| FormatError::Read { what, offset: 0, source })?;
        let cluster_bits = fields::cluster_bits(&start[..read])?;
        let file_bytes = file.len_bytes().map_err(|source| FormatError::Read { what, offset: 0, source })?;
        let len_bytes = file_bytes.min(1 << cluster_bits);
        let mut cluster = vec![0; usize::try_from(len_bytes).unwrap_or(usize::MAX)];
        read_whole(file, what, 0, &mut cluster)?;
        Self::parse(&cluster)
    }

    /// `cluster`: the first cluster, or the whole file if that is shorter.
    ///
    /// # Errors
    /// The image cannot be used.
    pub fn parse(cluster: &[u8]) -> Result<Self, FormatError> {
        let fields = Fields::parse(cluster)?;
        let header_bytes = header_length(&fields)?;
        let extensions_end = match fields.backing_file_offset {
            0 => fields.cluster_bytes(),
            offset => offset,
        };
        let end = usize::try_from(extensions_end).unwrap_or(usize::MAX).min(cluster.len());
        let start = usize::try_from(header_bytes).unwrap_or(usize::MAX);
        let extensions = Extensions::parse(cluster.get(start..end).unwrap_or_default(), fields.cluster_bits)?;
        let (incompatible, compatible, autoclear) = features::parse(&fields, &extensions)?;
        let geometry = geometry(&fields, incompatible)?;
        tables(&fields, &geometry)?;
        let compression = compression(&fields, incompatible)?;
        Ok(Self {
            geometry,
            size_bytes: fields.size,
            backing: backing(cluster, &fields, &extensions)?,
            l1: TableAt { offset: fields.l1_table_offset, count: fields.l1_size },
            refcount_table: TableAt {
                offset: fields.refcount_table_offset,
                count: fields.refcount_table_clusters,
            },
            snapshots: TableAt { offset: fields.snapshots_offset, count: fields.nb_snapshots },
            incompatible,
            compatible,
            autoclear,
            compression,
            header_bytes,
            extensions,
        })
    }
}

/// From the header's first byte to the first extension.
fn header_length(fields: &Fields) -> Result<u32, FormatError> {
    let length = u64::from(fields.header_length);
    if fields.version == 3 {
        Limit::MultipleOf(8).check("header_length", length)?;
        Limit::Range(fields::V3_BYTES as u64, fields.cluster_bytes()).check("header_length", length)?;
    }
    if fields.backing_file_offset != 0 {
        let name = Limit::Range(length, fields.cluster_bytes());
        name.check("backing_file_offset", fields.backing_file_offset)?;
    }
    Ok(fields.header_length)
}

fn geometry(fields: &Fields, incompatible: Incompatible) -> Result<Geometry, FormatError> {
    if incompatible.extended_l2 {
        let limit = Limit::Words("14 to 21 with extended L2 entries");
        if fields.cluster_bits < 14 {
            return Err(FormatError::Field {
                field: "cluster_bits",
                value: fields.cluster_bits.into(),
                limit,
            });
        }
    }
    Limit::AtMost(MAX_REFCOUNT_ORDER).check("refcount_order", fields.refcount_order.into())?;
    Ok(Geometry {
        version: fields.version,
        cluster_bits: fields.cluster_bits,
        refcount_order: fields.refcount_order,
        extended_l2: incompatible.extended_l2,
        external_data: incompatible.external_data_file,
    })
}

/// Sizes and places of the tables, against limits that do not depend on the file's length.
fn tables(fields: &Fields, geometry: &Geometry) -> Result<(), FormatError> {
    let cluster_bytes = geometry.cluster_bytes();
    Limit::AtMost(MAX_OFFSET).check("size", fields.size)?;
    let most = MAX_L1_ENTRIES.saturating_mul(geometry.l2_coverage_bytes()).min(MAX_OFFSET);
    Limit::AtMost(most).check("size", fields.size)?;
    let l1_entries = u64::from(fields.l1_size);
    Limit::Range(geometry.l1_entries_for(fields.size), MAX_L1_ENTRIES).check("l1_size", l1_entries)?;
    if l1_entries > 0 {
        place("l1_table_offset", fields.l1_table_offset, l1_entries * 8, cluster_bytes)?;
    }
    let clusters = u64::from(fields.refcount_table_clusters);
    let most = (MAX_REFCOUNT_TABLE_BYTES / cluster_bytes).max(1);
    Limit::Range(1, most).check("refcount_table_clusters", clusters)?;
    place("refcount_table_offset", fields.refcount_table_offset, clusters * cluster_bytes, cluster_bytes)?;
    let snapshots = u64::from(fields.nb_snapshots);
    Limit::AtMost(if geometry.external_data { 0 } else { MAX_SNAPSHOTS }).check("nb_snapshots", snapshots)?;
    if snapshots > 0 {
        place("snapshots_offset", fields.snapshots_offset, 0, cluster_bytes)?;
    }
    Ok(())
}

/// A table begins at a cluster after the first, and ends below 2^63.
fn place(field: &'static str, offset: u64, len_bytes: u64, cluster_bytes: u64) -> Result<(), FormatError> {
    Limit::NonzeroMultipleOf(cluster_bytes).check(field, offset)?;
    Limit::AtMost(MAX_OFFSET - len_bytes).check(field, offset)
}

fn compression(fields: &Fields, incompatible: Incompatible) -> Result<Compression, FormatError> {
    let value = u64::from(fields.compression_type);
    let limit = if incompatible.compression_type {
        Limit::Words("1 (zstd) with the feature 'compression type'")
    } else {
        Limit::Words("0 (zlib) without the feature 'compression type'")
    };
    match (incompatible.compression_type, value) {
        (false, 0) => Ok(Compression::Zlib),
        (true, 1) => Ok(Compression::Zstd),
        _ => Err(FormatError::Field { field: "compression_type", value, limit }),
    }
}

fn backing(cluster: &[u8], fields: &Fields, extensions: &Extensions) -> Result<Option<Backing>, FormatError> {
    let (offset, len_bytes) = (fields.backing_file_offset, u64::from(fields.backing_file_size));
    if offset == 0 {
        return Ok(None);
    }
    let room = (fields.cluster_bytes().min(cluster.len() as u64)).saturating_sub(offset);
    Limit::Range(1, room.min(MAX_BACKING_NAME_BYTES)).check("backing_file_size", len_bytes)?;
    if fields.autoclear_features & features::RAW_EXTERNAL_DATA != 0 {
        let limit = Limit::Words("0 with the feature 'raw external data'");
        return Err(FormatError::Field { field: "backing_file_offset", value: offset, limit });
    }
    let range = usize::try_from(offset).ok().zip(usize::try_from(offset + len_bytes).ok());
    let name = range.and_then(|(start, end)| cluster.get(start..end)).unwrap_or_default().to_vec();
    if let Some(at) = name.iter().position(|byte| *byte == 0) {
        let limit = Limit::Words("a name without zero bytes");
        return Err(FormatError::Field { field: "backing file name's byte", value: at as u64, limit });
    }
    Ok(Some(Backing { name_offset: offset, name, format: extensions.backing_format.clone() }))
}
