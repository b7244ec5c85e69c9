//! Header extensions: the backing file's format, names of features, the data file's name, bitmaps; others are kept.

use crate::big_endian::u32_at;
use crate::error::FormatError;

const END: u32 = 0;
pub(crate) const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const BITMAPS: u32 = 0x2385_2875;
const ENCRYPTION: u32 = 0x0537_be77;
const DATA_FILE: u32 = 0x4441_5441;

/// The longest name of a format is `qcow2`; QEMU allows 15 bytes.
const MAX_FORMAT_BYTES: usize = 15;
/// As for the backing file's name.
const MAX_NAME_BYTES: usize = 1023;
const FEATURE_BYTES: usize = 48;
const BITMAPS_BYTES: usize = 24;
/// QEMU's limit.
const MAX_BITMAPS: u32 = 65_535;
/// QEMU's limit.
const MAX_BITMAP_DIRECTORY_BYTES: u64 = 1024 * MAX_BITMAPS as u64;

/// All extensions of a header.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extensions {
    /// The backing file's format.
    pub backing_format: Option<String>,
    /// What the image's writer calls feature bits.
    pub feature_names: Vec<Feature>,
    /// The external data file's name, any bytes but 0.
    pub data_file: Option<Vec<u8>>,
    /// Where the bitmaps are.
    pub bitmaps: Option<BitmapsExtension>,
    /// Extensions that this program does not know, in the file's order.
    pub unknown: Vec<UnknownExtension>,
}

/// A name in the image's table of feature names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Feature {
    /// 0: incompatible, 1: compatible, 2: autoclear; others are reserved.
    pub kind: u8,
    /// Its bit; above 63 reserved.
    pub bit: u8,
    /// Its name.
    pub name: String,
}

/// Where the bitmaps are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// At least 1.
    pub count: u32,
    /// Of the directory.
    pub directory_bytes: u64,
    /// A multiple of the cluster size.
    pub directory_offset: u64,
}

/// An extension that this program does not know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownExtension {
    /// Its number.
    pub kind: u32,
    /// Its data, without padding.
    pub data: Vec<u8>,
}

impl Extensions {
    /// `area`: from the end of the fixed fields to the backing file's name, or to the end of the cluster.
    pub(super) fn parse(mut area: &[u8], cluster_bits: u32) -> Result<Self, FormatError> {
        let mut extensions = Self::default();
        let mut seen = Vec::new();
        while !area.is_empty() {
            let Some((head, rest)) = area.split_first_chunk::<8>() else {
                return Err(wrong("at the end", format!("{} bytes, at least 8 are needed", area.len())));
            };
            let [kind, len] = halves(head);
            if kind == END {
                break;
            }
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            let Some(data) = rest.get(..len) else {
                return Err(wrong(name(kind), format!("{len} bytes, room is for {}", rest.len())));
            };
            if is_known(kind) {
                if seen.contains(&kind) {
                    return Err(wrong(name(kind), "present twice, allowed is once".into()));
                }
                seen.push(kind);
            }
            extensions.take(kind, data, cluster_bits)?;
            area = rest.get(len.next_multiple_of(8)..).unwrap_or_default();
        }
        Ok(extensions)
    }

    /// It names clusters that nothing else names, so its image is not read without it.
    pub(super) fn refuse_encryption(&self) -> Result<(), FormatError> {
        if self.unknown.iter().any(|extension| extension.kind == ENCRYPTION) {
            return Err(wrong(
                name(ENCRYPTION),
                "present with crypt_method 0, allowed is only 2 (LUKS)".into(),
            ));
        }
        Ok(())
    }

    fn take(&mut self, kind: u32, data: &[u8], cluster_bits: u32) -> Result<(), FormatError> {
        match kind {
            BACKING_FORMAT => self.backing_format = Some(format_name(data)?),
            FEATURE_NAMES => self.feature_names = features(data)?,
            DATA_FILE => self.data_file = Some(file_name(data)?),
            BITMAPS => self.bitmaps = Some(bitmaps(data, cluster_bits)?),
            // Also encryption, whose image is refused because of `crypt_method`.
            _ => self.unknown.push(UnknownExtension { kind, data: data.to_vec() }),
        }
        Ok(())
    }
}

fn is_known(kind: u32) -> bool {
    matches!(kind, BACKING_FORMAT | FEATURE_NAMES | BITMAPS | ENCRYPTION | DATA_FILE)
}

fn name(kind: u32) -> &'static str {
    match kind {
        BACKING_FORMAT => "backing file format",
        FEATURE_NAMES => "feature names",
        BITMAPS => "bitmaps",
        ENCRYPTION => "encryption",
        DATA_FILE => "data file name",
        _ => "of an unknown kind",
    }
}

fn wrong(extension: &'static str, problem: String) -> FormatError {
    FormatError::Extension { extension, problem }
}

fn halves(head: &[u8; 8]) -> [u32; 2] {
    [u32_at(head, 0), u32_at(head, 4)]
}

fn format_name(data: &[u8]) -> Result<String, FormatError> {
    let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    if data.len() > MAX_FORMAT_BYTES {
        let problem = format!("{} bytes, at most {MAX_FORMAT_BYTES} are allowed", data.len());
        return Err(wrong(name(BACKING_FORMAT), problem));
    }
    if data.is_empty() || !data.iter().all(is_name) {
        let problem = format!("'{}' is not the name of a format", data.escape_ascii());
        return Err(wrong(name(BACKING_FORMAT), problem));
    }
    Ok(String::from_utf8_lossy(data).into_owned())
}

fn file_name(data: &[u8]) -> Result<Vec<u8>, FormatError> {
    if data.is_empty() || data.len() > MAX_NAME_BYTES {
        let problem = format!("{} bytes, allowed are 1 to {MAX_NAME_BYTES}", data.len());
        return Err(wrong(name(DATA_FILE), problem));
    }
    if data.contains(&0) {
        return Err(wrong(name(DATA_FILE), format!("'{}' contains a zero byte", data.escape_ascii())));
    }
    Ok(data.to_vec())
}

fn features(data: &[u8]) -> Result<Vec<Feature>, FormatError> {
    let (entries, rest) = data.as_chunks::<FEATURE_BYTES>();
    if !rest.is_empty() {
        let problem = format!("{} bytes, allowed are multiples of {FEATURE_BYTES}", data.len());
        return Err(wrong(name(FEATURE_NAMES), problem));
    }
    let feature = |entry: &[u8; FEATURE_BYTES]| {
        let [kind, bit, padded @ ..] = entry;
        let name = padded.split(|byte| *byte == 0).next().unwrap_or_default();
        Feature { kind: *kind, bit: *bit, name: String::from_utf8_lossy(name).into_owned() }
    };
    Ok(entries.iter().map(feature).collect())
}

fn bitmaps(data: &[u8], cluster_bits: u32) -> Result<BitmapsExtension, FormatError> {
    let refused = |problem| Err(wrong(name(BITMAPS), problem));
    let ([first, size, offset], []) = data.as_chunks::<8>() else {
        return refused(format!("{} bytes, allowed is {BITMAPS_BYTES}", data.len()));
    };
    let [count, reserved] = halves(first);
    let (directory_bytes, directory_offset) = (u64::from_be_bytes(*size), u64::from_be_bytes(*offset));
    let cluster_bytes = 1_u64 << cluster_bits;
    if !(1..=MAX_BITMAPS).contains(&count) {
        return refused(format!("nb_bitmaps is {count}, allowed is 1 to {MAX_BITMAPS}"));
    }
    if reserved != 0 {
        return refused(format!("the reserved field is {reserved}, allowed is 0"));
    }
    if !(1..=MAX_BITMAP_DIRECTORY_BYTES).contains(&directory_bytes) {
        return refused(format!(
            "bitmap_directory_size is {directory_bytes}, allowed is 1 to {MAX_BITMAP_DIRECTORY_BYTES}"
        ));
    }
    let highest = i64::MAX as u64 - MAX_BITMAP_DIRECTORY_BYTES;
    if directory_offset == 0 || directory_offset % cluster_bytes != 0 || directory_offset > highest {
        return refused(format!(
            "bitmap_directory_offset is {directory_offset}, allowed is a multiple of {cluster_bytes} above 0"
        ));
    }
    Ok(BitmapsExtension { count, directory_bytes, directory_offset })
}
