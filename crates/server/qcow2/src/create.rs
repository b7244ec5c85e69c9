//! Makes an image without data, also over a backing file, and removes the backing file's name from an image.
//!
//! `header, extensions, backing file's name │ refcount table │ refcount block │ L1 table`: each begins a cluster

use std::ops::Range;

use crate::error::{FormatError, read_whole};
use crate::header::Header;
use crate::header::extensions::BACKING_FORMAT;
use crate::write::{WriteAt, WriteError};
use crate::{DiskFormat, Limit};

/// As `qemu-img create` chooses.
const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// Counts of 16 bits.
const REFCOUNT_ORDER: u32 = 4;
/// The unit of writes.
const BLOCK_BYTES: usize = 4096;
/// Where the header's `backing_file_offset` and `backing_file_size` are.
const BACKING_NAME: Range<usize> = 8..20;
/// Clusters before the L1 table.
const L1_CLUSTER: u64 = 3;
const HEADER_BYTES: u32 = 112;

/// A new image.
#[derive(Debug, Clone, Copy)]
pub struct NewImage<'a> {
    /// The guest's disk.
    pub size_bytes: u64,
    /// The backing file's name, as the image stores it, and its format.
    pub backing: Option<(&'a [u8], DiskFormat)>,
}

/// Makes an image of version 3 with clusters of 64 KiB in an empty file, and syncs it. The header is written last: before,
/// the file is no image.
///
/// # Errors
/// The format cannot describe such an image; the file cannot be written.
pub fn create(file: &impl WriteAt, new: &NewImage<'_>) -> Result<(), WriteError> {
    let l2_coverage = CLUSTER * (CLUSTER / 8);
    let l1_entries = new.size_bytes.div_ceil(l2_coverage);
    let header = header(new, l1_entries)?;
    let clusters = L1_CLUSTER + (l1_entries * 8).div_ceil(CLUSTER).max(1);
    let io = |action, what, offset| move |source| WriteError::Io { action, what, offset, source };
    file.set_len(clusters * CLUSTER).map_err(io("set", "file's length", 0))?;
    let mut table = vec![0; 4096];
    table[..8].copy_from_slice(&(2 * CLUSTER).to_be_bytes());
    file.write_at(CLUSTER, &table).map_err(io("write", "refcount table", CLUSTER))?;
    let mut counts: Vec<u8> = (0..clusters).flat_map(|_| 1_u16.to_be_bytes()).collect();
    counts.resize(counts.len().next_multiple_of(4096), 0);
    file.write_at(2 * CLUSTER, &counts).map_err(io("write", "refcount block", 2 * CLUSTER))?;
    file.sync_data().map_err(WriteError::Sync)?;
    file.write_at(0, &header).map_err(io("write", "header", 0))?;
    file.sync_data().map_err(WriteError::Sync)
}

/// Removes the backing file's name from the header, and syncs the image. Unallocated clusters then read as zeroes. No writer
/// may have the image open. At any instant the header has the name or none, because both fields are in one sector.
///
/// # Errors
/// The header cannot be read or written. It has the name, or none.
pub fn remove_backing(file: &impl WriteAt) -> Result<(), WriteError> {
    let mut block = [0; BLOCK_BYTES];
    read_whole(file, "header", 0, &mut block)?;
    block[BACKING_NAME].fill(0);
    file.write_at(0, &block).map_err(WriteError::Header)?;
    file.sync_data().map_err(WriteError::Sync)
}

/// The first cluster.
fn header(new: &NewImage<'_>, l1_entries: u64) -> Result<Vec<u8>, FormatError> {
    let l1_size = u32::try_from(l1_entries).map_err(|_| {
        let (field, value) = ("l1_size", l1_entries);
        FormatError::Field { field, value, limit: Limit::AtMost(u32::MAX.into()) }
    })?;
    let (name, format) = new.backing.map_or((&[][..], ""), |(name, format)| (name, format.name()));
    let name_offset = if new.backing.is_some() { u64::from(HEADER_BYTES) + 16 + 8 } else { 0 };
    let name_bytes = u32::try_from(name.len()).unwrap_or(u32::MAX);
    let mut header = Vec::new();
    header.extend(b"QFI\xfb");
    header.extend(3_u32.to_be_bytes());
    header.extend(name_offset.to_be_bytes());
    header.extend(name_bytes.to_be_bytes());
    header.extend(CLUSTER_BITS.to_be_bytes());
    header.extend(new.size_bytes.to_be_bytes());
    header.extend(0_u32.to_be_bytes()); // crypt_method
    header.extend(l1_size.to_be_bytes());
    header.extend((L1_CLUSTER * CLUSTER).to_be_bytes());
    header.extend(CLUSTER.to_be_bytes()); // refcount_table_offset
    header.extend(1_u32.to_be_bytes()); // refcount_table_clusters
    header.extend([0; 4 + 8]); // snapshots
    header.extend([0; 3 * 8]); // features
    header.extend(REFCOUNT_ORDER.to_be_bytes());
    header.extend(HEADER_BYTES.to_be_bytes());
    header.resize(HEADER_BYTES as usize, 0); // compression_type
    if new.backing.is_some() {
        header.extend(BACKING_FORMAT.to_be_bytes());
        header.extend(u32::try_from(format.len()).unwrap_or(u32::MAX).to_be_bytes());
        header.extend(format.as_bytes());
        header.resize(HEADER_BYTES as usize + 16, 0);
    }
    header.extend([0; 8]); // the last extension
    header.extend(name);
    let room = usize::try_from(CLUSTER).unwrap_or(usize::MAX);
    header.resize(header.len().max(room), 0);
    // Size and name have limits.
    Header::parse(&header)?;
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::check;
    use crate::image::Image;
    use crate::write::Writer;
    use crate::write::tests::plain::Plain;

    fn made(size_bytes: u64, backing_name: &[u8]) -> Result<Plain, WriteError> {
        let file = Plain::default();
        create(&file, &NewImage { size_bytes, backing: Some((backing_name, DiskFormat::Qcow2)) })?;
        Ok(file)
    }

    #[test]
    fn overlay_is_sound_and_names_its_backing_file() {
        for size_bytes in [512, (64 << 30) - 512, 8 << 40] {
            let image = Image::open(made(size_bytes, b"/images/below.qcow2").unwrap()).unwrap();
            let backing = image.header().backing.as_ref().unwrap();
            assert_eq!(backing.name, b"/images/below.qcow2");
            assert_eq!(backing.format.as_deref(), Some("qcow2"));
            assert_eq!(image.header().size_bytes, size_bytes);
            let report = check(&image, &mut |found| panic!("{found}")).unwrap();
            assert_eq!((report.corruptions, report.leaks), (0, 0));
            let (file, ..) = image.into_parts();
            Writer::open(file).unwrap();
        }
    }

    #[test]
    fn image_without_its_backing_file_is_sound_and_reads_as_zeroes() {
        let file = made(1 << 30, b"/images/below.raw").unwrap();
        remove_backing(&file).unwrap();
        let image = Image::open(file).unwrap();
        assert_eq!(image.header().backing, None);
        let report = check(&image, &mut |found| panic!("{found}")).unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 0));
    }

    #[test]
    fn image_without_a_backing_file_is_sound() {
        let file = Plain::default();
        create(&file, &NewImage { size_bytes: 5 << 30, backing: None }).unwrap();
        let image = Image::open(file).unwrap();
        assert_eq!((image.header().size_bytes, &image.header().backing), (5 << 30, &None));
        let report = check(&image, &mut |found| panic!("{found}")).unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 0));
    }

    #[test]
    fn names_and_sizes_beyond_the_format_are_refused() {
        assert!(matches!(made(512, &[b'n'; 1024]), Err(WriteError::Format(_))));
        assert!(matches!(made(512, b""), Err(WriteError::Format(_))));
        assert!(matches!(made(u64::MAX, b"n"), Err(WriteError::Format(_))));
        made(512, &[b'n'; 1023]).unwrap();
    }
}
