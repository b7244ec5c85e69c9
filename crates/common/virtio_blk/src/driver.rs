//! The driver's side of a request: the bytes that a driver puts into its buffers.
//!
//! Spec: virtio 1.3 §5.2.6.

use crate::ranges::{self, Segment};
use crate::request::HEADER_BYTES;

/// The first 16 bytes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// A value from [`crate::kind`].
    pub kind: u32,
    /// First sector of 512 bytes; 0 if the kind has none.
    pub sector: u64,
}

impl RequestHeader {
    /// The bytes as stored in memory.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        (u128::from(self.kind) | u128::from(self.sector) << 64).to_le_bytes()
    }
}

impl Segment {
    /// Returns the segment's bytes as two words, the lower one first.
    #[must_use]
    pub fn to_words(&self) -> [u64; 2] {
        let fields = u128::from_le_bytes(ranges::encode(self));
        #[allow(clippy::cast_possible_truncation)] // separates the words
        let words = [fields as u64, (fields >> 64) as u64];
        words
    }
}

/// The data of a DISCARD or WRITE_ZEROES, as stored in memory.
#[must_use]
pub fn encode_segments(segments: &[Segment]) -> Vec<u8> {
    segments.iter().flat_map(ranges::encode).collect()
}
