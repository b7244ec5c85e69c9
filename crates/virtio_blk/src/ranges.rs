//! The segments of a DISCARD or WRITE_ZEROES request (`struct virtio_blk_discard_write_zeroes`).
//!
//! ```text
//! sector u64 | num_sectors u32 | flags u32 (bit 0: unmap)
//! ```
//!
//! Spec: virtio 1.3 §5.2.6. Not here: whether the sectors exist (`disk_image`).

use std::fmt;

use guest_mem::{AccessError, MemoryView};

use crate::data::Data;

/// Most segments in one request: what `max_discard_seg` and `max_write_zeroes_seg` may advertise.
/// Bounds what one request makes us do; QEMU's own devices advertise 1.
pub const MAX_SEGMENTS: usize = 16;

/// Length of one segment in memory.
pub const SEGMENT_BYTES: usize = 16;

/// The only flag there is.
pub(crate) const UNMAP: u32 = 1;

/// One run of sectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// First sector of 512 bytes: not yet checked.
    pub sector: u64,
    /// Number of sectors of 512 bytes; zero is legal.
    pub sectors: u32,
    /// WRITE_ZEROES only: the blocks may be given back.
    pub unmap: bool,
}

/// All segments of one request, read once.
///
/// On the heap, because in place they would make every parsed request 264 bytes wide, and those of reads and writes
/// are moved as well; what a discard does costs more than an allocation.
#[derive(Clone, PartialEq, Eq)]
pub struct Segments {
    /// At most [`MAX_SEGMENTS`].
    items: Box<[Segment]>,
}

impl Segments {
    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there is none; never, in a parsed request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// In order.
    #[must_use]
    pub fn as_slice(&self) -> &[Segment] {
        &self.items
    }

    /// In order.
    pub fn iter(&self) -> std::slice::Iter<'_, Segment> {
        self.as_slice().iter()
    }
}

impl<'s> IntoIterator for &'s Segments {
    type Item = &'s Segment;
    type IntoIter = std::slice::Iter<'s, Segment>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

/// Reads the first [`MAX_SEGMENTS`] whole segments of `data`. `None` if one has a flag that is not known.
pub(crate) fn take_segments(data: &mut Data<'_>, view: &MemoryView) -> Result<Option<Segments>, AccessError> {
    let mut items = Vec::with_capacity(MAX_SEGMENTS);
    let mut known = true;
    while items.len() < MAX_SEGMENTS && data.len_bytes() >= SEGMENT_BYTES as u64 {
        let mut bytes = [0; SEGMENT_BYTES];
        data.take(view, &mut bytes)?;
        let (segment, flags) = decode(bytes);
        known &= flags & !UNMAP == 0;
        items.push(segment);
    }
    Ok(known.then_some(Segments { items: items.into() }))
}

#[allow(clippy::cast_possible_truncation)] // takes the fields apart
fn decode(bytes: [u8; SEGMENT_BYTES]) -> (Segment, u32) {
    let fields = u128::from_le_bytes(bytes);
    let flags = (fields >> 96) as u32;
    let segment =
        Segment { sector: fields as u64, sectors: (fields >> 64) as u32, unmap: flags & UNMAP != 0 };
    (segment, flags)
}

/// As it lies in memory.
pub(crate) fn encode(segment: &Segment) -> [u8; SEGMENT_BYTES] {
    let flags = if segment.unmap { UNMAP } else { 0 };
    let fields = u128::from(segment.sector) | u128::from(segment.sectors) << 64 | u128::from(flags) << 96;
    fields.to_le_bytes()
}
