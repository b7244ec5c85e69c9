//! Limits for DISCARD and WRITE_ZEROES on this image, derived from its file system or device.
//!
//! - Discard is offered if punching holes works: a file system is probed (without touching data), and a
//!   device reports it in sysfs.
//! - Writing zeroes is always offered on a writable image: the engine writes zeroes itself if there is no faster way.
//!
//! Spec: virtio 1.3 §5.2.4 (`max_discard_sectors` and so on).

use std::fs::File;

use rustix::fs::FallocateFlags;

use crate::range::SECTOR_BYTES;
use crate::sysfs_queue::QueueAttributes;

/// Segments per request, for both operations: limits the work and the memory that one request can cause.
pub const MAX_SEGMENTS: u32 = 16;
/// Largest discard of one segment. File systems free extents while holding the inode's lock, so other
/// requests wait.
pub const MAX_DISCARD_BYTES: u64 = 1 << 30;
/// Largest write-zeroes of one segment. The zeroes may have to be written as data, so a request writes at most 16 × 64
/// MiB.
pub const MAX_WRITE_ZEROES_BYTES: u64 = 64 << 20;

/// The probe punches beyond the end of the file, at least this far from any data.
const PROBE_DISTANCE_BYTES: u64 = 1 << 20;
const PROBE_LEN_BYTES: u64 = 4096;

/// Limits of a discard request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiscardLimits {
    /// Per segment.
    pub max_sectors: u32,
    /// Per request.
    pub max_segments: u32,
    /// A discard that is not aligned to this frees less than it covers.
    pub sector_alignment: u32,
}

/// Limits of a write-zeroes request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteZeroesLimits {
    /// Per segment.
    pub max_sectors: u32,
    /// Per request.
    pub max_segments: u32,
    /// The guest may also ask to deallocate the range.
    pub may_unmap: bool,
}

impl DiscardLimits {
    /// Limits for a file, which frees whole file-system blocks.
    pub(crate) fn of_file(block_size_bytes: u32, fs_block_bytes: u64) -> Self {
        Self::new(MAX_DISCARD_BYTES, fs_block_bytes.max(u64::from(block_size_bytes)))
    }

    /// Limits for a device. `None` if the device cannot discard; if it does not zero what it frees, which Linux
    /// requires for the hole-punching call that is safe with the page cache; or if its blocks are larger than the
    /// blocks offered to the guest.
    pub(crate) fn of_device(block_size_bytes: u32, device: &QueueAttributes) -> Option<Self> {
        let too_coarse = u64::from(block_size_bytes) < device.logical_block_bytes;
        if device.discard_max_bytes == 0 || device.write_zeroes_max_bytes == 0 || too_coarse {
            return None;
        }
        let granularity_bytes = device.discard_granularity_bytes.max(u64::from(block_size_bytes));
        Some(Self::new(device.discard_max_bytes, granularity_bytes))
    }

    fn new(max_bytes: u64, granularity_bytes: u64) -> Self {
        let whole = |bytes: u64| bytes / granularity_bytes * granularity_bytes;
        let max_bytes = whole(max_bytes.min(MAX_DISCARD_BYTES)).max(granularity_bytes);
        Self {
            max_sectors: sectors(max_bytes),
            max_segments: MAX_SEGMENTS,
            sector_alignment: sectors(granularity_bytes),
        }
    }
}

impl WriteZeroesLimits {
    pub(crate) fn new(may_unmap: bool) -> Self {
        Self { max_sectors: sectors(MAX_WRITE_ZEROES_BYTES), max_segments: MAX_SEGMENTS, may_unmap }
    }
}

/// Whether holes can be punched into this file (open for writing). Tries to punch one beyond the file's end, where
/// there is no data; a file system that cannot punch holes refuses before it looks at the range.
pub(crate) fn can_punch_holes(file: &File, size_bytes: u64) -> bool {
    let behind_bytes = (size_bytes | (PROBE_DISTANCE_BYTES - 1)) + 1 + PROBE_DISTANCE_BYTES;
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let probed = rustix::fs::fallocate(file, punch, behind_bytes, PROBE_LEN_BYTES);
    if let Err(error) = probed {
        tracing::debug!(%error, "the file system cannot punch holes, so discard is not offered");
    }
    probed.is_ok()
}

fn sectors(bytes: u64) -> u32 {
    u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn ssd() -> QueueAttributes {
        QueueAttributes {
            discard_max_bytes: 10 << 20,
            discard_granularity_bytes: 3 << 20,
            write_zeroes_max_bytes: 1 << 20,
            ..QueueAttributes::default()
        }
    }

    #[test]
    fn devices_discard_limit_is_kept_in_whole_granules() {
        let limits = DiscardLimits::of_device(512, &ssd()).unwrap();
        assert_eq!(limits.max_sectors, (9 << 20) / 512);
        assert_eq!(limits.sector_alignment, (3 << 20) / 512);
        assert_eq!(limits.max_segments, 16);
    }

    #[test]
    fn unbounded_device_is_bounded_by_us() {
        let device = QueueAttributes { discard_max_bytes: u64::MAX, discard_granularity_bytes: 512, ..ssd() };
        assert_eq!(DiscardLimits::of_device(512, &device).unwrap().max_sectors, (1 << 30) / 512);
    }

    #[test]
    fn device_that_cannot_discard_or_not_as_zeroes_is_not_offered() {
        let no_discard = QueueAttributes { discard_max_bytes: 0, ..ssd() };
        let no_zeroes = QueueAttributes { write_zeroes_max_bytes: 0, ..ssd() };
        assert_eq!(DiscardLimits::of_device(512, &no_discard), None);
        assert_eq!(DiscardLimits::of_device(512, &no_zeroes), None);
    }

    #[test]
    fn device_with_larger_sectors_than_our_blocks_is_not_offered() {
        let device = QueueAttributes { logical_block_bytes: 4096, ..ssd() };
        assert_eq!(DiscardLimits::of_device(512, &device), None);
        assert!(DiscardLimits::of_device(4096, &device).is_some());
    }

    #[test]
    fn granularity_beyond_our_bound_still_allows_one_granule() {
        let device =
            QueueAttributes { discard_max_bytes: 8 << 30, discard_granularity_bytes: 2 << 30, ..ssd() };
        let limits = DiscardLimits::of_device(512, &device).unwrap();
        assert_eq!(limits.max_sectors, limits.sector_alignment);
    }

    #[test]
    fn files_discard_alignment_is_the_larger_of_both_blocks() {
        assert_eq!(DiscardLimits::of_file(512, 4096).sector_alignment, 8);
        assert_eq!(DiscardLimits::of_file(4096, 1024).sector_alignment, 8);
    }

    fn probe_keeps_everything(folder: &std::path::Path) {
        let mut file = tempfile::tempfile_in(folder).unwrap();
        file.write_all(&[0xa5; 10_000]).unwrap();
        file.sync_all().unwrap();
        let before = file.metadata().unwrap();
        assert!(can_punch_holes(&file, before.len()));
        let after = file.metadata().unwrap();
        assert_eq!((after.len(), after.blocks()), (before.len(), before.blocks()));
        let mut data = vec![0; 10_000];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut data, 0).unwrap();
        assert!(data.iter().all(|byte| *byte == 0xa5));
    }

    #[test]
    fn hole_probe_in_the_temporary_folder_keeps_data_and_size() {
        probe_keeps_everything(&std::env::temp_dir());
    }

    #[test]
    fn hole_probe_on_tmpfs_keeps_data_and_size() {
        probe_keeps_everything("/dev/shm".as_ref());
    }

    #[test]
    fn file_open_for_reading_cannot_be_punched() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(!can_punch_holes(&File::open(file.path()).unwrap(), 0));
    }
}
