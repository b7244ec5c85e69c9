//! The refcount table's entries, and the counts in a refcount block.

use crate::geometry::Geometry;
use crate::tables::{EntryProblem, aligned, reserved};

/// Bits 0 to 8 are reserved.
const RESERVED_MASK: u64 = 0x1ff;

/// A decoded entry of the refcount table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefcountTableEntry {
    /// Where the refcount block is. `None`: all counts of its range are 0.
    pub block: Option<u64>,
}

impl RefcountTableEntry {
    /// `raw` in the host's byte order.
    ///
    /// # Errors
    /// The entry breaks the format.
    pub fn decode(raw: u64, geometry: &Geometry) -> Result<Self, EntryProblem> {
        reserved(raw & RESERVED_MASK)?;
        let offset = aligned(raw, geometry)?;
        Ok(Self { block: (offset != 0).then_some(offset) })
    }
}

/// The reference count at `index` of a refcount block of this geometry. `None`: the block ends before it.
#[must_use]
pub fn refcount_at(block: &[u8], index: usize, geometry: &Geometry) -> Option<u64> {
    let order = geometry.refcount_order;
    if order < 3 {
        // Several counts in a byte; the first is in the least significant bits.
        let (bits, per_byte) = (1_u32 << order, 8_usize >> order);
        let shift = u32::try_from(index % per_byte).ok()? * bits;
        let byte = u64::from(*block.get(index / per_byte)?);
        return Some((byte >> shift) & ((1 << bits) - 1));
    }
    let bytes = 1_usize << (order - 3);
    let start = index.checked_mul(bytes)?;
    let count = block.get(start..start.checked_add(bytes)?)?;
    Some(count.iter().fold(0, |value, byte| (value << 8) | u64::from(*byte)))
}

/// Stores a reference count that fits into the geometry's width. An index past the end of the block changes nothing.
pub(crate) fn store_refcount(block: &mut [u8], index: usize, geometry: &Geometry, count: u64) {
    let order = geometry.refcount_order;
    if order < 3 {
        let (bits, per_byte) = (1_usize << order, 8_usize >> order);
        let (shift, mask) = (index % per_byte * bits, (1_u8 << bits) - 1);
        let Some(byte) = block.get_mut(index / per_byte) else { return };
        // Less than 8 bits.
        #[allow(clippy::cast_possible_truncation)]
        let count = count as u8 & mask;
        *byte = *byte & !(mask << shift) | count << shift;
        return;
    }
    let bytes = 1_usize << (order - 3);
    let start = index.saturating_mul(bytes);
    let Some(stored) = block.get_mut(start..start.saturating_add(bytes)) else { return };
    stored.copy_from_slice(&count.to_be_bytes()[8 - bytes..]);
}
