//! The kernel's attributes of a block device: `/sys/dev/block/MAJOR:MINOR/queue/*`.
//!
//! Names and units: Linux `Documentation/ABI/stable/sysfs-block`.

use std::io;
use std::path::{Path, PathBuf};

/// A block device's limits, in bytes; 0 if the kernel reports none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueAttributes {
    /// The smallest unit that the device addresses.
    pub logical_block_bytes: u64,
    /// The smallest unit that the device can write without reading first.
    pub physical_block_bytes: u64,
    /// Preferred smallest request.
    pub minimum_io_bytes: u64,
    /// Preferred largest request.
    pub optimal_io_bytes: u64,
    /// Offset of the device's start from the start of a physical block.
    pub alignment_offset_bytes: u64,
    /// Largest discard; 0: cannot discard.
    pub discard_max_bytes: u64,
    /// Unit of discards: discarding less than a unit frees nothing.
    pub discard_granularity_bytes: u64,
    /// Largest write of zeroes without data; 0: not supported.
    pub write_zeroes_max_bytes: u64,
}

impl QueueAttributes {
    /// Reads the attributes from a device's directory in sysfs.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if there is no such device, or neither it nor its parent has a queue.
    pub fn read(device: &Path) -> io::Result<Self> {
        // `device` is a link in sysfs; a partition's parent directory can only be found from the link's target.
        let device = std::fs::canonicalize(device)?;
        let queue = queue_folder(&device)?;
        let attribute = |name: &str| number(&queue.join(name));
        Ok(Self {
            logical_block_bytes: attribute("logical_block_size"),
            physical_block_bytes: attribute("physical_block_size"),
            minimum_io_bytes: attribute("minimum_io_size"),
            optimal_io_bytes: attribute("optimal_io_size"),
            alignment_offset_bytes: number(&device.join("alignment_offset")),
            discard_max_bytes: attribute("discard_max_bytes"),
            discard_granularity_bytes: attribute("discard_granularity"),
            write_zeroes_max_bytes: attribute("write_zeroes_max_bytes"),
        })
    }
}

/// A partition has no queue of its own; the queue is in its disk's directory, one level up.
fn queue_folder(device: &Path) -> io::Result<PathBuf> {
    let own = device.join("queue");
    let parents = device.parent().map(|disk| disk.join("queue"));
    [Some(own), parents].into_iter().flatten().find(|folder| folder.is_dir()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("no block queue for {}", device.display()))
    })
}

/// Old kernels lack some attributes, and a misaligned device's `alignment_offset` is -1: both count as 0.
fn number(file: &Path) -> u64 {
    std::fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sysfs_disk_with_partition() -> tempfile::TempDir {
        let sysfs = tempfile::tempdir().unwrap();
        let disk = sysfs.path().join("sda");
        std::fs::create_dir_all(disk.join("queue")).unwrap();
        std::fs::create_dir_all(disk.join("sda1")).unwrap();
        std::fs::write(disk.join("queue/logical_block_size"), "512\n").unwrap();
        std::fs::write(disk.join("queue/discard_max_bytes"), "2147450880\n").unwrap();
        std::fs::write(disk.join("sda1/alignment_offset"), "3072\n").unwrap();
        std::fs::write(disk.join("alignment_offset"), "-1\n").unwrap();
        std::os::unix::fs::symlink("sda/sda1", sysfs.path().join("8:1")).unwrap();
        std::os::unix::fs::symlink("sda", sysfs.path().join("8:0")).unwrap();
        sysfs
    }

    #[test]
    fn partition_has_its_disks_queue_and_its_own_alignment_offset() {
        let sysfs = sysfs_disk_with_partition();
        let attributes = QueueAttributes::read(&sysfs.path().join("8:1")).unwrap();
        assert_eq!(attributes.logical_block_bytes, 512);
        assert_eq!(attributes.discard_max_bytes, 2_147_450_880);
        assert_eq!(attributes.alignment_offset_bytes, 3072);
    }

    #[test]
    fn missing_and_negative_attributes_count_as_zero() {
        let sysfs = sysfs_disk_with_partition();
        let attributes = QueueAttributes::read(&sysfs.path().join("8:0")).unwrap();
        assert_eq!(attributes.alignment_offset_bytes, 0);
        assert_eq!(attributes.optimal_io_bytes, 0);
    }

    #[test]
    fn device_number_without_a_block_device_is_not_found() {
        let sysfs = sysfs_disk_with_partition();
        let error = QueueAttributes::read(&sysfs.path().join("0:42")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
