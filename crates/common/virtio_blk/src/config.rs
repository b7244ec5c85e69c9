//! The configuration space: the device's description of itself (`struct virtio_blk_config`).
//!
//! ```text
//!  0 capacity u64 | 8 size_max u32 | 12 seg_max u32 | 16 geometry {u16, u8, u8} | 20 blk_size u32
//! 24 topology {physical_block_exp u8, alignment_offset u8, min_io_size u16, opt_io_size u32}
//! 32 writeback u8 | 33 unused u8 | 34 num_queues u16
//! 36 max_discard_sectors u32 | 40 max_discard_seg u32 | 44 discard_sector_alignment u32
//! 48 max_write_zeroes_sectors u32 | 52 max_write_zeroes_seg u32 | 56 write_zeroes_may_unmap u8 | unused u8 × 3
//! 60 max_secure_erase_sectors u32 | 64 max_secure_erase_seg u32 | 68 secure_erase_sector_alignment u32
//! 72 zoned {u32 × 5, u8, unused u8 × 3}
//! ```
//!
//! Fields of features that we do not offer (size_max, geometry, secure erase, zoned) are zero.
//! Spec: virtio 1.3 §5.2.4.

use crate::features::WriteCache;

/// Length of the structure.
pub const CONFIG_BYTES: usize = 96;

/// Maximum number of bytes that a front-end may read in one request (vhost-user, `VHOST_USER_GET_CONFIG`).
pub const MAX_CONFIG_BYTES: u32 = 256;

/// Offset of `writeback`: the only byte that a driver may write.
pub const WRITEBACK_OFFSET_BYTES: u32 = 32;

/// `IOV_MAX` minus header and status: the largest number of buffers for which one system call suffices.
const MOST_SEGMENTS: u32 = 1022;

/// Maximum number of data buffers in a request of a queue with `queue_size` entries: a chain must not be longer than
/// the queue, and header and status need an entry each. A queue of 2 gets 1, the smallest useful value; data and status
/// then share a descriptor.
#[must_use]
pub fn seg_max(queue_size: u16) -> u32 {
    u32::from(queue_size).saturating_sub(2).clamp(1, MOST_SEGMENTS)
}

/// The fields that are not always zero, in 512-byte sectors unless stated otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Size of the disk.
    pub capacity_sectors: u64,
    /// See [`seg_max`].
    pub seg_max: u32,
    /// Logical block size in bytes.
    pub blk_size: u32,
    /// Logical blocks per physical block, as a power of two.
    pub physical_block_exp: u8,
    /// Offset of the first aligned logical block.
    pub alignment_offset: u8,
    /// Minimum I/O size, in logical blocks.
    pub min_io_size_blocks: u16,
    /// Optimal I/O size, in logical blocks.
    pub opt_io_size_blocks: u32,
    /// The current cache mode.
    pub writeback: WriteCache,
    /// Number of request queues.
    pub num_queues: u16,
    /// Maximum length of a DISCARD segment.
    pub max_discard_sectors: u32,
    /// Maximum number of segments of a DISCARD; at most [`crate::MAX_SEGMENTS`].
    pub max_discard_seg: u32,
    /// Alignment of DISCARD segments.
    pub discard_sector_alignment: u32,
    /// Maximum length of a WRITE_ZEROES segment.
    pub max_write_zeroes_sectors: u32,
    /// Maximum number of segments of a WRITE_ZEROES; at most [`crate::MAX_SEGMENTS`].
    pub max_write_zeroes_seg: u32,
    /// Whether a WRITE_ZEROES with `unmap` can deallocate blocks.
    pub write_zeroes_may_unmap: bool,
}

/// Why a read of the configuration space is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "read of {size_bytes} bytes at offset {offset_bytes} exceeds the configuration space, which has {max_bytes} bytes"
)]
pub struct ConfigReadError {
    /// The offset that the driver sent.
    pub offset_bytes: u32,
    /// The size that the driver sent.
    pub size_bytes: u32,
    /// [`MAX_CONFIG_BYTES`].
    pub max_bytes: u32,
}

/// Why a write to the configuration space is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigWriteError {
    /// The write covers more than the `writeback` byte.
    #[error(
        "write of {size_bytes} bytes at offset {offset_bytes} of the configuration space, but only the byte at offset {writable_offset_bytes} is writable"
    )]
    ReadOnly {
        /** The offset in the message. */
        offset_bytes: u32,
        /** The size in the message. */
        size_bytes: usize,
        /** [`WRITEBACK_OFFSET_BYTES`]. */
        writable_offset_bytes: u32,
    },
    /// The value is neither 0 (writethrough) nor 1 (writeback).
    #[error("the configuration field writeback is set to {value}, but must be 0 or 1")]
    Value {
        /** The value in the message. */
        value: u8,
    },
}

impl DeviceConfig {
    /// The structure as it lies in configuration space, little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let mut put =
            |offset: usize, field: &[u8]| bytes[offset..offset + field.len()].copy_from_slice(field);
        put(0, &self.capacity_sectors.to_le_bytes());
        put(12, &self.seg_max.to_le_bytes());
        put(20, &self.blk_size.to_le_bytes());
        put(24, &[self.physical_block_exp, self.alignment_offset]);
        put(26, &self.min_io_size_blocks.to_le_bytes());
        put(28, &self.opt_io_size_blocks.to_le_bytes());
        put(WRITEBACK_OFFSET_BYTES as usize, &[self.writeback.to_byte()]);
        put(34, &self.num_queues.to_le_bytes());
        put(36, &self.max_discard_sectors.to_le_bytes());
        put(40, &self.max_discard_seg.to_le_bytes());
        put(44, &self.discard_sector_alignment.to_le_bytes());
        put(48, &self.max_write_zeroes_sectors.to_le_bytes());
        put(52, &self.max_write_zeroes_seg.to_le_bytes());
        put(56, &[u8::from(self.write_zeroes_may_unmap)]);
        bytes
    }

    /// Parses a device's configuration space; `bytes` may be shorter than the structure, and missing fields
    /// are zero. The device sends zero for features that were not negotiated. The caller decides whether a
    /// field is valid, and whether its value makes sense.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let u8_at = |at: usize| bytes.get(at).copied().unwrap_or(0);
        let u16_at = |at| u16::from_le_bytes([u8_at(at), u8_at(at + 1)]);
        let u32_at = |at| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
        let writeback = u8_at(WRITEBACK_OFFSET_BYTES as usize) != 0;
        Self {
            capacity_sectors: u64::from(u32_at(0)) | u64::from(u32_at(4)) << 32,
            seg_max: u32_at(12),
            blk_size: u32_at(20),
            physical_block_exp: u8_at(24),
            alignment_offset: u8_at(25),
            min_io_size_blocks: u16_at(26),
            opt_io_size_blocks: u32_at(28),
            writeback: if writeback { WriteCache::Writeback } else { WriteCache::Writethrough },
            num_queues: u16_at(34),
            max_discard_sectors: u32_at(36),
            max_discard_seg: u32_at(40),
            discard_sector_alignment: u32_at(44),
            max_write_zeroes_sectors: u32_at(48),
            max_write_zeroes_seg: u32_at(52),
            write_zeroes_may_unmap: u8_at(56) != 0,
        }
    }

    /// `size_bytes` from `offset_bytes` on; zeroes after the end of the structure.
    ///
    /// # Errors
    /// [`ConfigReadError`] if the range ends past [`MAX_CONFIG_BYTES`].
    pub fn read(&self, offset_bytes: u32, size_bytes: u32) -> Result<Vec<u8>, ConfigReadError> {
        let max_bytes = MAX_CONFIG_BYTES;
        let fits = offset_bytes.checked_add(size_bytes).is_some_and(|end| end <= max_bytes);
        if !fits {
            return Err(ConfigReadError { offset_bytes, size_bytes, max_bytes });
        }
        let all = self.to_bytes().into_iter().chain(std::iter::repeat(0));
        Ok(all.skip(offset_bytes as usize).take(size_bytes as usize).collect())
    }

    /// Writes the `writeback` byte and returns the mode that it sets. The caller checks that the driver accepted
    /// `VIRTIO_BLK_F_CONFIG_WCE`.
    ///
    /// # Errors
    /// [`ConfigWriteError`]; nothing is changed then.
    pub fn write(&mut self, offset_bytes: u32, bytes: &[u8]) -> Result<WriteCache, ConfigWriteError> {
        let (WRITEBACK_OFFSET_BYTES, &[value]) = (offset_bytes, bytes) else {
            let (size_bytes, writable_offset_bytes) = (bytes.len(), WRITEBACK_OFFSET_BYTES);
            return Err(ConfigWriteError::ReadOnly { offset_bytes, size_bytes, writable_offset_bytes });
        };
        self.writeback = match value {
            0 => WriteCache::Writethrough,
            1 => WriteCache::Writeback,
            value => return Err(ConfigWriteError::Value { value }),
        };
        Ok(self.writeback)
    }
}

#[cfg(test)]
mod tests;
