//! The segments of a DISCARD or WRITE_ZEROES request (`struct virtio_blk_discard_write_zeroes`).
//!
//! ```text
//! sector u64 | num_sectors u32 | flags u32 (bit 0: unmap)
//! ```
//!
//! Spec: virtio 1.3 §5.2.6.

use std::fmt;

use guest_mem::{AccessError, MemoryView};

use crate::data::Data;

/// Maximum number of segments in one request: the upper limit for the advertised `max_discard_seg` and
/// `max_write_zeroes_seg`. This limits the work that one request can cause; QEMU's own devices advertise 1.
pub const MAX_SEGMENTS: usize = 16;

/// Length of one segment in memory.
pub const SEGMENT_BYTES: usize = 16;

/// The only flag that virtio defines.
pub(crate) const UNMAP: u32 = 1;

/// One run of sectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// First sector of 512 bytes; not yet checked.
    pub sector: u64,
    /// Number of sectors of 512 bytes; zero is legal.
    pub sectors: u32,
    /// WRITE_ZEROES only: the device may deallocate the blocks.
    pub unmap: bool,
}

/// Buffer for a request's segments. A request source needs only one buffer, because it parses one request at a time.
///
/// The segments are stored outside the request: inside, they would make every request 264 bytes wide, including reads
/// and writes, which have no segments.
#[derive(Debug, Default)]
pub struct SegmentBuffer([Segment; MAX_SEGMENTS]);

impl SegmentBuffer {
    /// Copies a request's segments, for an owner that may have to repeat the request.
    pub fn keep(&mut self, segments: &Segments<'_>) {
        self.0 = [Segment::default(); MAX_SEGMENTS];
        self.0.iter_mut().zip(segments.as_slice()).for_each(|(place, segment)| *place = *segment);
    }

    /// The copied segments, padded with empty segments.
    #[must_use]
    pub fn kept(&self) -> Segments<'_> {
        Segments(&self.0)
    }
}

/// All segments of one request, read once: at most [`MAX_SEGMENTS`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Segments<'c>(&'c [Segment]);

impl<'c> Segments<'c> {
    /// Number of segments.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no segments; a parsed request always has at least one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The segments in order.
    #[must_use]
    pub fn as_slice(&self) -> &'c [Segment] {
        self.0
    }

    /// Iterates over the segments in order.
    pub fn iter(&self) -> std::slice::Iter<'c, Segment> {
        self.as_slice().iter()
    }
}

impl<'c> IntoIterator for &Segments<'c> {
    type Item = &'c Segment;
    type IntoIter = std::slice::Iter<'c, Segment>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Debug for Segments<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

/// Reads the first [`MAX_SEGMENTS`] whole segments of `data`. `None` if a segment has an unknown flag.
pub(crate) fn take_segments<'c>(
    data: &mut Data<'_>,
    view: &MemoryView,
    SegmentBuffer(buffer): &'c mut SegmentBuffer,
) -> Result<Option<Segments<'c>>, AccessError> {
    let (mut count, mut known) = (0, true);
    for place in &mut *buffer {
        if data.len_bytes() < SEGMENT_BYTES as u64 {
            break;
        }
        let mut bytes = [0; SEGMENT_BYTES];
        data.take(view, &mut bytes)?;
        let (segment, flags) = decode(bytes);
        known &= flags & !UNMAP == 0;
        *place = segment;
        count += 1;
    }
    let segments = buffer.get(..count).unwrap_or_default();
    Ok(known.then_some(Segments(segments)))
}

#[allow(clippy::cast_possible_truncation)] // separates the fields
fn decode(bytes: [u8; SEGMENT_BYTES]) -> (Segment, u32) {
    let fields = u128::from_le_bytes(bytes);
    let flags = (fields >> 96) as u32;
    let segment =
        Segment { sector: fields as u64, sectors: (fields >> 64) as u32, unmap: flags & UNMAP != 0 };
    (segment, flags)
}

/// The bytes as stored in memory.
pub(crate) fn encode(segment: &Segment) -> [u8; SEGMENT_BYTES] {
    let flags = if segment.unmap { UNMAP } else { 0 };
    let fields = u128::from(segment.sector) | u128::from(segment.sectors) << 64 | u128::from(flags) << 96;
    fields.to_le_bytes()
}
