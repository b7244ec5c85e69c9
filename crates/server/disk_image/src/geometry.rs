//! The disk's geometry: direct-I/O alignment, logical block size, topology.
//!
//! `statx, or sysfs, or aligned reads -> Alignment -> block size offered to the guest -> Topology`
//!
//! - The default block size follows direct I/O's requirement even if the page cache is used: after a restart with
//!   another cache mode, the guest must find the same disk.
//! - A probe by reading can be too optimistic, because a hole may be read without any check. Therefore the alignment of
//!   the device under the file system, if there is one, counts as well.
//!
//! Spec: virtio 1.3 §5.2.4 (`blk_size`, `topology`); statx(2) STATX_DIOALIGN, Linux 6.1.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{AtFlags, StatxFlags};

use crate::range::SECTOR_BYTES;
use crate::sysfs_queue::QueueAttributes;

/// The smallest block size that virtio can express.
pub const MIN_BLOCK_SIZE_BYTES: u32 = 512;
/// Linux before 6.15 refuses disks with blocks larger than a page, and so do most guests.
pub const MAX_BLOCK_SIZE_BYTES: u32 = 4096;

/// Offset alignments to try by reading, if the kernel does not report one.
const PROBED_ALIGNMENTS_BYTES: [u32; 4] = [512, 1024, 2048, 4096];

/// The alignment that the file requires of a transfer; (1, 1) with the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    /// Alignment of each buffer's address.
    pub memory_bytes: u32,
    /// Alignment of the file offset and of each buffer's length.
    pub offset_bytes: u32,
}

impl Alignment {
    /// The page cache has no requirements.
    pub const BUFFERED: Self = Self { memory_bytes: 1, offset_bytes: 1 };
}

/// virtio-blk's `topology`: layout hints for the guest, in logical blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    /// Logical blocks per physical block, as a power of two.
    pub physical_block_exp: u8,
    /// The first logical block that starts a physical block.
    pub alignment_offset: u8,
    /// Preferred smallest request.
    pub min_io_blocks: u16,
    /// Preferred largest request; 0: no preference.
    pub opt_io_blocks: u32,
}

/// The alignment for direct I/O that the kernel reports, if any. `Some` with zeroes means that direct I/O is not
/// possible.
pub(crate) fn told_alignment(file: &File) -> Option<Alignment> {
    let statx = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let told = StatxFlags::from_bits_retain(statx.stx_mask).contains(StatxFlags::DIOALIGN);
    told.then_some(Alignment {
        memory_bytes: statx.stx_dio_mem_align,
        offset_bytes: statx.stx_dio_offset_align,
    })
}

/// The alignment for direct I/O, found by reading from `file`, which is open with `O_DIRECT`. `None` if the file
/// refuses even the largest alignment.
pub(crate) fn probe_alignment(
    file: &File,
    size_bytes: u64,
    device: Option<&QueueAttributes>,
) -> io::Result<Option<Alignment>> {
    let sector = device.map_or(0, |device| bytes32(device.logical_block_bytes));
    for candidate in PROBED_ALIGNMENTS_BYTES.into_iter().filter(|candidate| *candidate >= sector) {
        if reads_at(file, size_bytes, candidate)? {
            // The memory alignment is assumed to be the same as the offset's. This holds for every kernel that reports
            // neither.
            return Ok(Some(Alignment { memory_bytes: candidate, offset_bytes: candidate }));
        }
    }
    Ok(None)
}

/// Whether a direct read succeeds if its offset, length and address are multiples of `alignment_bytes`, but not of any
/// larger power of two.
fn reads_at(file: &File, size_bytes: u64, alignment_bytes: u32) -> io::Result<bool> {
    let alignment = alignment_bytes as usize;
    let mut memory = vec![0_u8; 4 * alignment];
    let start = memory.as_ptr().align_offset(2 * alignment) + alignment;
    let Some(buffer) = memory.get_mut(start..start + alignment) else { return Ok(false) };
    let offset_bytes = u64::from(alignment_bytes);
    let offset_bytes = if size_bytes >= 2 * offset_bytes { offset_bytes } else { 0 };
    match file.read_at(buffer, offset_bytes) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(false),
        Err(error) => Err(error),
    }
}

/// The default block size: the alignment that direct I/O needs, if it is known.
pub(crate) fn default_block_size(direct: Option<Alignment>, device: Option<&QueueAttributes>) -> u32 {
    let told = direct.map(|alignment| alignment.offset_bytes).filter(|bytes| *bytes > 0);
    let bytes = told.or_else(|| device.map(|device| bytes32(device.logical_block_bytes))).unwrap_or(0);
    bytes.clamp(MIN_BLOCK_SIZE_BYTES, MAX_BLOCK_SIZE_BYTES)
}

/// Whether `bytes` is a valid logical block size.
pub(crate) fn is_block_size(bytes: u32) -> bool {
    bytes.is_power_of_two() && (MIN_BLOCK_SIZE_BYTES..=MAX_BLOCK_SIZE_BYTES).contains(&bytes)
}

impl Topology {
    /// Topology of a file. Its file system's block is the smallest unit that it writes without reading first.
    pub(crate) fn of_file(block_size_bytes: u32, fs_block_bytes: u64) -> Self {
        let physical = fs_block_bytes.min(u64::from(MAX_BLOCK_SIZE_BYTES));
        let shape = QueueAttributes {
            physical_block_bytes: physical,
            minimum_io_bytes: physical,
            ..QueueAttributes::default()
        };
        Self::of_device(block_size_bytes, &shape)
    }

    /// Topology of a block device, in the offered blocks. Values that do not fit a field are left out.
    pub(crate) fn of_device(block_size_bytes: u32, device: &QueueAttributes) -> Self {
        let blocks = |bytes: u64| bytes / u64::from(block_size_bytes);
        let physical_blocks = match blocks(device.physical_block_bytes) {
            n if n.is_power_of_two() => n,
            _ => 1,
        };
        let min_io_blocks = blocks(device.minimum_io_bytes).max(physical_blocks);
        Self {
            physical_block_exp: u8::try_from(physical_blocks.ilog2()).unwrap_or(0),
            alignment_offset: u8::try_from(blocks(device.alignment_offset_bytes)).unwrap_or(0),
            min_io_blocks: u16::try_from(min_io_blocks).unwrap_or(1),
            opt_io_blocks: u32::try_from(blocks(device.optimal_io_bytes)).unwrap_or(0),
        }
    }
}

/// The file system's block size, in which it allocates space.
pub(crate) fn fs_block_bytes(file: &File) -> u64 {
    let told = rustix::fs::fstatvfs(file).map(|fs| fs.f_frsize).unwrap_or(0);
    if told.is_power_of_two() { told.max(SECTOR_BYTES) } else { u64::from(MAX_BLOCK_SIZE_BYTES) }
}

/// Converts a block size to 32 bits. Block sizes are small; an absurdly large value counts as "not reported".
fn bytes32(bytes: u64) -> u32 {
    u32::try_from(bytes).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk_512e() -> QueueAttributes {
        QueueAttributes {
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            minimum_io_bytes: 65_536,
            optimal_io_bytes: 1 << 20,
            alignment_offset_bytes: 3072,
            ..QueueAttributes::default()
        }
    }

    #[test]
    fn topology_of_a_512e_disk_counts_in_logical_blocks() {
        let topology = Topology::of_device(512, &disk_512e());
        let expected =
            Topology { physical_block_exp: 3, alignment_offset: 6, min_io_blocks: 128, opt_io_blocks: 2048 };
        assert_eq!(topology, expected);
    }

    #[test]
    fn physical_block_smaller_than_ours_has_exponent_zero() {
        let disk = QueueAttributes { physical_block_bytes: 512, minimum_io_bytes: 512, ..disk_512e() };
        let topology = Topology::of_device(4096, &disk);
        assert_eq!((topology.physical_block_exp, topology.min_io_blocks), (0, 1));
    }

    #[test]
    fn hints_too_large_for_their_fields_are_left_out() {
        let disk = QueueAttributes { minimum_io_bytes: 1 << 30, optimal_io_bytes: 1 << 50, ..disk_512e() };
        let topology = Topology::of_device(512, &disk);
        assert_eq!((topology.min_io_blocks, topology.opt_io_blocks), (1, 0));
    }

    #[test]
    fn file_system_block_becomes_the_files_physical_block() {
        assert_eq!(Topology::of_file(512, 4096).physical_block_exp, 3);
        assert_eq!(Topology::of_file(512, 1 << 21).min_io_blocks, 8);
    }

    #[test]
    fn default_block_size_follows_the_kernel_then_the_device_then_512() {
        let told = Alignment { memory_bytes: 4, offset_bytes: 2048 };
        let disk_4kn = QueueAttributes { logical_block_bytes: 4096, ..disk_512e() };
        assert_eq!(default_block_size(Some(told), Some(&disk_4kn)), 2048);
        assert_eq!(default_block_size(None, Some(&disk_4kn)), 4096);
        assert_eq!(default_block_size(None, None), 512);
    }

    #[test]
    fn kernel_that_tells_of_no_direct_io_leaves_the_default_to_the_device() {
        let none = Alignment { memory_bytes: 0, offset_bytes: 0 };
        assert_eq!(default_block_size(Some(none), None), 512);
    }

    #[test]
    fn probe_never_goes_below_the_devices_sector() {
        let file = tempfile::tempfile().unwrap(); // buffered: every read is accepted
        file.set_len(65_536).unwrap();
        let disk_4kn = QueueAttributes { logical_block_bytes: 4096, ..disk_512e() };
        let probed = |device| probe_alignment(&file, 65_536, device).unwrap().unwrap().offset_bytes;
        assert_eq!((probed(None), probed(Some(&disk_4kn))), (512, 4096));
    }

    #[test]
    fn block_sizes_are_powers_of_two_from_512_to_a_page() {
        let sizes = [0, 256, 512, 1000, 1024, 4096, 8192];
        assert_eq!(sizes.map(is_block_size), [false, false, true, false, true, true, false]);
    }
}
