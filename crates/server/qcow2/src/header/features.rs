//! Feature bits: what a reader must know, may ignore, or must clear before it writes.

use crate::error::{FormatError, Limit};
use crate::header::extensions::{Extensions, Feature};
use crate::header::fields::Fields;

pub(crate) const DIRTY: u64 = 1;
pub(crate) const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA_FILE: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
const KNOWN_INCOMPATIBLE: u64 = DIRTY | CORRUPT | EXTERNAL_DATA_FILE | COMPRESSION_TYPE | EXTENDED_L2;
const LAZY_REFCOUNTS: u64 = 1;
const BITMAPS: u64 = 1;
pub(super) const RAW_EXTERNAL_DATA: u64 = 1 << 1;
pub(crate) const KNOWN_AUTOCLEAR: u64 = BITMAPS | RAW_EXTERNAL_DATA;

/// Features that a reader must know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Incompatible {
    /// Reference counts may be wrong; the image must not be written before they are repaired.
    pub dirty: bool,
    /// Any table may be wrong; the image must not be written.
    pub corrupt: bool,
    /// Guest data are in a second file.
    pub external_data_file: bool,
    /// Compressed clusters are not compressed with zlib.
    pub compression_type: bool,
    /// L2 entries have 16 bytes and describe subclusters.
    pub extended_l2: bool,
}

/// Features that a reader may ignore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compatible {
    /// Writers may delay reference counts while the dirty bit is set.
    pub lazy_refcounts: bool,
    /// Bits that this program does not know.
    pub unknown: u64,
}

/// Features whose bits a writer that does not know them must clear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Autoclear {
    /// The bitmaps are consistent.
    pub bitmaps: bool,
    /// The external data file is a raw image without regard to this file.
    pub raw_external_data: bool,
    /// Bits that this program does not know.
    pub unknown: u64,
}

pub(super) fn parse(
    fields: &Fields,
    extensions: &Extensions,
) -> Result<(Incompatible, Compatible, Autoclear), FormatError> {
    let incompatible = fields.incompatible_features;
    if incompatible & !KNOWN_INCOMPATIBLE != 0 {
        let names = names(incompatible & !KNOWN_INCOMPATIBLE, &extensions.feature_names);
        return Err(FormatError::UnknownFeatures { names });
    }
    match fields.crypt_method {
        0 => extensions.refuse_encryption()?,
        method @ 1..=2 => return Err(FormatError::Encrypted { method }),
        other => Limit::AtMost(2).check("crypt_method", other.into())?,
    }
    let incompatible = Incompatible {
        dirty: incompatible & DIRTY != 0,
        corrupt: incompatible & CORRUPT != 0,
        external_data_file: incompatible & EXTERNAL_DATA_FILE != 0,
        compression_type: incompatible & COMPRESSION_TYPE != 0,
        extended_l2: incompatible & EXTENDED_L2 != 0,
    };
    let compatible = Compatible {
        lazy_refcounts: fields.compatible_features & LAZY_REFCOUNTS != 0,
        unknown: fields.compatible_features & !LAZY_REFCOUNTS,
    };
    let autoclear = autoclear(fields.autoclear_features, incompatible, extensions)?;
    Ok((incompatible, compatible, autoclear))
}

fn autoclear(
    value: u64,
    incompatible: Incompatible,
    extensions: &Extensions,
) -> Result<Autoclear, FormatError> {
    let wrong = |words| FormatError::Field { field: "autoclear_features", value, limit: Limit::Words(words) };
    if value & BITMAPS != 0 && extensions.bitmaps.is_none() {
        return Err(wrong("bit 0 only with the header extension 'bitmaps'"));
    }
    if value & RAW_EXTERNAL_DATA != 0 && !incompatible.external_data_file {
        return Err(wrong("bit 1 only with an external data file"));
    }
    Ok(Autoclear {
        bitmaps: value & BITMAPS != 0,
        raw_external_data: value & RAW_EXTERNAL_DATA != 0,
        unknown: value & !KNOWN_AUTOCLEAR,
    })
}

/// The unknown incompatible features, as the image names them.
fn names(bits: u64, known: &[Feature]) -> String {
    let named = |bit: u8| known.iter().find(|feature| feature.kind == 0 && feature.bit == bit);
    let text = |bit: u8| match named(bit) {
        Some(feature) => format!("{bit} ('{}')", feature.name.escape_debug()),
        None => bit.to_string(),
    };
    let set = (0..64).filter(|bit| bits & (1 << bit) != 0);
    set.map(text).collect::<Vec<_>>().join(", ")
}
