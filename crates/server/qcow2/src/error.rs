//! Why an image cannot be used. The texts name no file: [`ChainError`](crate::ChainError) does.

use std::fmt;
use std::io;

use ruzstd::decoding::errors::FrameDecoderError;

use crate::read_at::ReadAt;
use crate::tables::BadEntry;

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// Another format, or none.
    #[error("not a qcow2 image: it begins with {magic:#010x} instead of 0x514649fb")]
    NotQcow2 {
        /** The first four bytes. */
        magic: u32,
    },
    /// A number that the format, or this program, does not allow.
    #[error("{field} is {value}, allowed is {limit}")]
    Field {
        /** As the format's description calls it. */
        field: &'static str,
        /** As stored. */
        value: u64,
        /** What is allowed. */
        limit: Limit,
    },
    /// Features without which the image cannot be understood.
    #[error("incompatible features that this program does not know: {names}")]
    UnknownFeatures {
        /** Number and, if the image has it, name of each. */
        names: String,
    },
    /// Encrypted data.
    #[error("crypt_method is {method} ({}), allowed is 0: encrypted images are not supported", if *method == 1 { "AES" } else { "LUKS" })]
    Encrypted {
        /** 1 for AES, 2 for LUKS. */
        method: u32,
    },
    /// A header extension that is not as it should be.
    #[error("header extension {extension}: {problem}")]
    Extension {
        /** Its name. */
        extension: &'static str,
        /** What is wrong, with the value and the limit. */
        problem: String,
    },
    /// An entry of a table.
    #[error(transparent)]
    Entry(#[from] BadEntry),
    /// A part of the image that the file does not have.
    #[error("the {what} at {offset:#x} has {len_bytes} bytes, but the file ends at {file_bytes:#x}")]
    Outside {
        /** Which part. */
        what: &'static str,
        /** Where it begins. */
        offset: u64,
        /** Its length. */
        len_bytes: u64,
        /** The file's length. */
        file_bytes: u64,
    },
    /// An entry of the snapshot table.
    #[error("snapshot {index}: {field} is {value}, allowed is {limit}")]
    Snapshot {
        /** From 0. */
        index: u32,
        /** As the format's description calls it. */
        field: &'static str,
        /** As stored. */
        value: u64,
        /** What is allowed. */
        limit: Limit,
    },
    /// A compressed cluster.
    #[error("the compressed cluster at {offset:#x} cannot be decompressed")]
    Compressed {
        /** Where its data begin. */
        offset: u64,
        /** What is wrong. */
        source: DecompressError,
    },
    /// The file cannot be read.
    #[error("cannot read the {what} at {offset:#x}")]
    Read {
        /** Which part. */
        what: &'static str,
        /** Where it begins. */
        offset: u64,
        /** The kernel's error. */
        source: io::Error,
    },
}

/// Why a cluster cannot be decompressed.
#[derive(Debug, thiserror::Error)]
pub enum DecompressError {
    /// The data end early.
    #[error("its data end after {have_bytes} of {want_bytes} bytes")]
    Truncated {
        /** What they contain. */
        have_bytes: usize,
        /** One cluster. */
        want_bytes: usize,
    },
    /// The data do not end with the cluster.
    #[error("its data contain more than {want_bytes} bytes")]
    TooLong {
        /** One cluster. */
        want_bytes: usize,
    },
    /// No deflate stream.
    #[error("its data are no deflate stream")]
    Deflate(#[source] flate2::DecompressError),
    /// No Zstandard frame, or one that needs too much memory.
    #[error("its data are no Zstandard frame that can be read")]
    Zstd(#[source] Box<FrameDecoderError>),
}

/// What a field may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Two numbers and those between.
    Range(u64, u64),
    /// No more than this.
    AtMost(u64),
    /// No less than this.
    AtLeast(u64),
    /// Only this.
    Only(u64),
    /// Multiples of this.
    MultipleOf(u64),
    /// Multiples of this, except 0.
    NonzeroMultipleOf(u64),
    /// A condition in words.
    Words(&'static str),
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(low, high) => write!(f, "{low} to {high}"),
            Self::AtMost(high) => write!(f, "at most {high}"),
            Self::AtLeast(low) => write!(f, "at least {low}"),
            Self::Only(value) => write!(f, "{value}"),
            Self::MultipleOf(unit) => write!(f, "a multiple of {unit}"),
            Self::NonzeroMultipleOf(unit) => write!(f, "a multiple of {unit} above 0"),
            Self::Words(words) => f.write_str(words),
        }
    }
}

impl Limit {
    /// Whether the field may have this value. Conditions in words are decided by the caller.
    fn allows(self, value: u64) -> bool {
        match self {
            Self::Range(low, high) => (low..=high).contains(&value),
            Self::AtMost(high) => value <= high,
            Self::AtLeast(low) => value >= low,
            Self::Only(only) => value == only,
            Self::MultipleOf(unit) => value.is_multiple_of(unit),
            Self::NonzeroMultipleOf(unit) => value != 0 && value.is_multiple_of(unit),
            Self::Words(_) => false,
        }
    }

    /// Refuses a field of the header that is outside the limit.
    pub(crate) fn check(self, field: &'static str, value: u64) -> Result<(), FormatError> {
        if self.allows(value) { Ok(()) } else { Err(FormatError::Field { field, value, limit: self }) }
    }

    /// The same for a snapshot.
    pub(crate) fn check_snapshot(
        self,
        index: u32,
        field: &'static str,
        value: u64,
    ) -> Result<(), FormatError> {
        if self.allows(value) {
            return Ok(());
        }
        Err(FormatError::Snapshot { index, field, value, limit: self })
    }
}

/// Reads a part of the image that the file must have.
pub(crate) fn read_whole(
    file: &(impl ReadAt + ?Sized),
    what: &'static str,
    offset: u64,
    buffer: &mut [u8],
) -> Result<(), FormatError> {
    let failed = |source| FormatError::Read { what, offset, source };
    let read = file.read_at(offset, buffer).map_err(failed)?;
    if read == buffer.len() {
        return Ok(());
    }
    let file_bytes = file.len_bytes().map_err(failed)?;
    Err(FormatError::Outside { what, offset, len_bytes: buffer.len() as u64, file_bytes })
}

/// Reads a part of the image of which the file may lack the end, which then reads as zeroes.
pub(crate) fn read_padded(
    file: &(impl ReadAt + ?Sized),
    what: &'static str,
    offset: u64,
    buffer: &mut [u8],
) -> Result<(), FormatError> {
    let read = file.read_at(offset, buffer).map_err(|source| FormatError::Read { what, offset, source })?;
    buffer[read..].fill(0);
    Ok(())
}
