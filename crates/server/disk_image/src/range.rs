//! Ranges of the image that are checked once and trusted afterwards.
//!
//! `(sector, len) from a guest -> Image::check -> CheckedRange -> io_engine`   (this file: check and type)
//!
//! Every check reads the current bounds, because an image may grow while it is served, or shrink if the administrator
//! forces it.
//!
//! Spec: virtio 1.3 §5.2.6 (sectors are 512 bytes whatever the block size).

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of one sector: virtio 1.3 §5.2.4, "capacity, in 512-byte sectors".
pub const SECTOR_BYTES: u64 = 512;

/// A range of bytes inside the image's capacity, in whole logical blocks. May be empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckedRange {
    offset_bytes: u64,
    len_bytes: u64,
}

impl CheckedRange {
    /// Offset of the range's start from the image's first byte.
    #[inline]
    #[must_use]
    pub fn offset_bytes(self) -> u64 {
        self.offset_bytes
    }

    /// Length in bytes.
    #[inline]
    #[must_use]
    pub fn len_bytes(self) -> u64 {
        self.len_bytes
    }

    /// Offset of the first byte after the range. Cannot overflow.
    #[inline]
    #[must_use]
    pub fn end_bytes(self) -> u64 {
        self.offset_bytes + self.len_bytes
    }

    /// The rest of the range after its first `done_bytes`. The rest may start inside a block. `None` if the range is
    /// shorter.
    #[must_use]
    pub fn after(self, done_bytes: u64) -> Option<Self> {
        let len_bytes = self.len_bytes.checked_sub(done_bytes)?;
        Some(Self { offset_bytes: self.offset_bytes + done_bytes, len_bytes })
    }
}

/// Why a guest's range was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// The range's end does not fit in 64 bits.
    #[error("range of {len_bytes} bytes at sector {sector} ends past 2^64 bytes")]
    Overflow {
        /** The request's first sector. */
        sector: u64,
        /** The request's length. */
        len_bytes: u64,
    },
    /// The range ends past the image's end.
    #[error(
        "range of {len_bytes} bytes at sector {sector} ends past the image's end at sector {capacity_sectors}"
    )]
    PastEnd {
        /** The request's first sector. */
        sector: u64,
        /** The request's length. */
        len_bytes: u64,
        /** The capacity at the time of the check. */
        capacity_sectors: u64,
    },
    /// The range does not start and end at block boundaries.
    #[error(
        "range of {len_bytes} bytes at sector {sector} is not aligned to blocks of {block_size_bytes} bytes"
    )]
    Misaligned {
        /** The request's first sector. */
        sector: u64,
        /** The request's length. */
        len_bytes: u64,
        /** The image's logical block size. */
        block_size_bytes: u32,
    },
}

/// The bounds for range checks. The block size is a power of two; the capacity is a whole number of blocks.
#[derive(Debug)]
pub(crate) struct Bounds {
    capacity_bytes: AtomicU64,
    block_size_bytes: u32,
}

impl Bounds {
    /// The caller has checked that `block_size_bytes` is a power of two. The capacity is rounded down to
    /// whole blocks.
    pub(crate) fn new(capacity_bytes: u64, block_size_bytes: u32) -> Self {
        assert!(block_size_bytes.is_power_of_two(), "block size {block_size_bytes} is not a power of two");
        let bounds = Self { capacity_bytes: AtomicU64::new(0), block_size_bytes };
        bounds.grow(capacity_bytes);
        bounds
    }

    #[inline]
    pub(crate) fn check(&self, sector: u64, len_bytes: u64) -> Result<CheckedRange, RangeError> {
        let overflow = RangeError::Overflow { sector, len_bytes };
        let offset_bytes = sector.checked_mul(SECTOR_BYTES).ok_or(overflow)?;
        let end_bytes = offset_bytes.checked_add(len_bytes).ok_or(overflow)?;
        // Relaxed: the value is independent of all other memory.
        let capacity_bytes = self.capacity_bytes.load(Ordering::Relaxed);
        if end_bytes > capacity_bytes {
            let capacity_sectors = capacity_bytes / SECTOR_BYTES;
            return Err(RangeError::PastEnd { sector, len_bytes, capacity_sectors });
        }
        if (offset_bytes | len_bytes) & self.block_mask() != 0 {
            return Err(RangeError::Misaligned {
                sector,
                len_bytes,
                block_size_bytes: self.block_size_bytes,
            });
        }
        Ok(CheckedRange { offset_bytes, len_bytes })
    }

    #[inline]
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn block_size_bytes(&self) -> u32 {
        self.block_size_bytes
    }

    /// Raises the capacity to `size_bytes`, in whole blocks; a smaller size changes nothing. Returns the
    /// previous capacity.
    pub(crate) fn grow(&self, size_bytes: u64) -> u64 {
        self.capacity_bytes.fetch_max(self.whole_blocks(size_bytes), Ordering::Relaxed)
    }

    /// Lowers the capacity to `size_bytes`, in whole blocks; a larger size changes nothing. Ranges that were
    /// checked before may lie beyond the new end.
    pub(crate) fn cut(&self, size_bytes: u64) {
        self.capacity_bytes.fetch_min(self.whole_blocks(size_bytes), Ordering::Relaxed);
    }

    /// `size_bytes` without the last, partial block.
    pub(crate) fn whole_blocks(&self, size_bytes: u64) -> u64 {
        size_bytes & !self.block_mask()
    }

    #[inline]
    fn block_mask(&self) -> u64 {
        u64::from(self.block_size_bytes) - 1
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn last_block_is_inside_and_the_one_after_is_not() {
        let bounds = Bounds::new(1 << 20, 512);
        let last = bounds.check(2047, 512).unwrap();
        assert_eq!((last.offset_bytes(), last.end_bytes()), (1_048_064, 1 << 20));
        let past = RangeError::PastEnd { sector: 2048, len_bytes: 512, capacity_sectors: 2048 };
        assert_eq!(bounds.check(2048, 512), Err(past));
    }

    #[test]
    fn sector_whose_byte_offset_wraps_to_zero_is_refused() {
        let sector = 1 << 55; // times 512 is 2^64
        let refused = Bounds::new(1 << 20, 512).check(sector, 512);
        assert_eq!(refused, Err(RangeError::Overflow { sector, len_bytes: 512 }));
    }

    #[test]
    fn length_that_wraps_the_end_is_refused() {
        let len_bytes = u64::MAX - 511;
        let refused = Bounds::new(1 << 20, 512).check(1, len_bytes);
        assert_eq!(refused, Err(RangeError::Overflow { sector: 1, len_bytes }));
    }

    #[test]
    fn half_a_block_is_refused_with_4k_blocks() {
        let bounds = Bounds::new(1 << 20, 4096);
        let refused = RangeError::Misaligned { sector: 8, len_bytes: 512, block_size_bytes: 4096 };
        assert_eq!(bounds.check(8, 512), Err(refused));
        assert!(matches!(bounds.check(1, 4096), Err(RangeError::Misaligned { .. })));
    }

    #[test]
    fn rest_of_a_range_ends_where_the_range_does() {
        let range = Bounds::new(1 << 20, 512).check(2, 2048).unwrap();
        let rest = range.after(700).unwrap();
        assert_eq!((rest.offset_bytes(), rest.end_bytes()), (1724, range.end_bytes()));
        assert_eq!((range.after(2048).unwrap().len_bytes(), range.after(2049)), (0, None));
    }

    #[test]
    fn empty_range_at_the_end_is_inside() {
        assert_eq!(Bounds::new(4096, 512).check(8, 0).map(CheckedRange::len_bytes), Ok(0));
    }

    #[test]
    fn ragged_growth_is_rounded_down_and_shrinking_changes_nothing() {
        let bounds = Bounds::new(8192, 4096);
        assert_eq!(bounds.grow(20_000), 8192);
        assert_eq!(bounds.grow(100), 16_384);
        assert_eq!(bounds.capacity_bytes(), 16_384);
    }

    /// Draws half of the values from near 0 and `u64::MAX`, because both small and huge values matter.
    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![
            0..5000_u64,
            any::<u64>(),
            (0..5000_u64).prop_map(|n| u64::MAX - n),
            (0..64_u32).prop_map(|n| 1 << n)
        ]
    }

    proptest! {
        #[test]
        fn accepted_exactly_when_exact_arithmetic_says_inside_and_whole(
            sector in number(), len_bytes in number(), size_bytes in 0..=i64::MAX as u64, exp in 9..=12_u32,
        ) {
            let bounds = Bounds::new(size_bytes, 1 << exp);
            let block = 1_u128 << exp;
            let (offset, len) = (u128::from(sector) * 512, u128::from(len_bytes));
            let capacity = u128::from(size_bytes) / block * block;
            let inside = offset + len <= capacity && offset % block == 0 && len % block == 0;
            let checked = bounds.check(sector, len_bytes);
            prop_assert_eq!(checked.is_ok(), inside);
            if let Ok(range) = checked {
                prop_assert_eq!(u128::from(range.offset_bytes()), offset);
                prop_assert_eq!(u128::from(range.end_bytes()), offset + len);
            }
        }

        #[test]
        fn every_whole_range_inside_is_accepted(blocks in 1..1000_u64, start in 0..1000_u64, len in 0..1000_u64) {
            let bounds = Bounds::new(blocks * 4096, 4096);
            let (start, len) = (start.min(blocks), len.min(blocks - start.min(blocks)));
            prop_assert!(bounds.check(start * 8, len * 4096).is_ok());
        }
    }
}
