//! One qcow2 file: header, active L1 table, a bounded cache of L2 tables.

use std::collections::HashMap;

use crate::big_endian::u64_at;
use crate::compressed::Decompressor;
use crate::error::{FormatError, read_padded, read_whole};
use crate::geometry::Geometry;
use crate::header::{Header, TableAt};
use crate::mapping::{L2Source, Run, next_run};
use crate::read_at::ReadAt;
use crate::snapshots::Snapshots;
use crate::tables::{CompressedCluster, RawL2Entry};

/// Parts of L2 tables are read and kept in this size.
const SLICE_BYTES: usize = 4096;
/// 1 MiB.
const MAX_SLICES: usize = 256;

/// A qcow2 file, for reading.
#[derive(Debug)]
pub struct Image<F> {
    file: F,
    header: Header,
    l1: Vec<u64>,
    slices: Slices,
    decompressor: Decompressor,
    /// Compressed data and the cluster that was decompressed last.
    scratch: [Vec<u8>; 2],
}

impl<F: ReadAt> Image<F> {
    /// Reads the header and what the disk needs of the L1 table, at most 34 MiB.
    ///
    /// # Errors
    /// The image cannot be used, or not be read.
    pub fn open(file: F) -> Result<Self, FormatError> {
        let header = Header::read(&file)?;
        let l1 = read_l1(&file, needed_l1(&header))?;
        let (slices, decompressor) = (Slices::default(), Decompressor::new(header.compression));
        Ok(Self { file, header, l1, slices, decompressor, scratch: [Vec::new(), Vec::new()] })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The file.
    pub fn file(&self) -> &F {
        &self.file
    }

    /// The active L1 table as far as the disk needs it, as stored, in the host's byte order.
    pub fn l1(&self) -> &[u64] {
        &self.l1
    }

    /// File, header and L1 table.
    pub fn into_parts(self) -> (F, Header, Vec<u64>) {
        (self.file, self.header, self.l1)
    }

    /// The internal snapshots.
    pub fn snapshots(&self) -> Snapshots<'_, F> {
        Snapshots::new(&self.file, &self.header)
    }

    /// The first run of a range of the guest's disk.
    ///
    /// # Errors
    /// The tables break the format, or cannot be read.
    ///
    /// # Panics
    /// The range is empty, or ends past the disk.
    pub fn next_run(&mut self, guest_offset: u64, len_bytes: u64) -> Result<Run, FormatError> {
        let end = guest_offset.checked_add(len_bytes);
        assert!(end.is_some_and(|end| end <= self.header.size_bytes), "a range past the end of the disk");
        let mut source =
            SliceReader { file: &self.file, geometry: &self.header.geometry, slices: &mut self.slices };
        next_run(&self.header.geometry, &self.l1, &mut source, guest_offset, len_bytes)
    }

    /// The bytes of a compressed cluster.
    ///
    /// # Errors
    /// The cluster cannot be read or decompressed.
    pub fn decompress(&mut self, cluster: CompressedCluster) -> Result<&[u8], FormatError> {
        let offset = cluster.host_offset;
        let [data, output] = &mut self.scratch;
        data.resize(usize::try_from(cluster.len_bytes()).unwrap_or(usize::MAX), 0);
        // The file may end before the last sector does.
        read_padded(&self.file, "compressed cluster", offset, data)?;
        output.resize(usize::try_from(self.header.geometry.cluster_bytes()).unwrap_or(usize::MAX), 0);
        let decompressed = self.decompressor.decompress(data, output);
        decompressed.map_err(|source| FormatError::Compressed { offset, source })?;
        Ok(output)
    }
}

/// A table may have more entries than the disk needs. They would only cost memory.
fn needed_l1(header: &Header) -> TableAt {
    let needed = header.geometry.l1_entries_for(header.size_bytes);
    let count = u32::try_from(needed).unwrap_or(u32::MAX).min(header.l1.count);
    TableAt { count, ..header.l1 }
}

/// The file must have the whole table.
pub(crate) fn read_l1(file: &impl ReadAt, at: TableAt) -> Result<Vec<u64>, FormatError> {
    // The file's length comes first: a hostile header must not cost memory.
    let len_bytes = u64::from(at.count) * 8;
    let what = "L1 table";
    let file_bytes =
        file.len_bytes().map_err(|source| FormatError::Read { what, offset: at.offset, source })?;
    if at.count > 0 && at.offset + len_bytes > file_bytes {
        return Err(FormatError::Outside { what, offset: at.offset, len_bytes, file_bytes });
    }
    let mut bytes = vec![0; usize::try_from(len_bytes).unwrap_or(usize::MAX)];
    read_whole(file, what, at.offset, &mut bytes)?;
    Ok(bytes.as_chunks::<8>().0.iter().map(|entry| u64::from_be_bytes(*entry)).collect())
}

/// Parts of L2 tables by their offset in the file.
#[derive(Debug, Default)]
struct Slices {
    kept: HashMap<u64, Box<[u8]>>,
}

struct SliceReader<'a, F> {
    file: &'a F,
    geometry: &'a Geometry,
    slices: &'a mut Slices,
}

impl<F: ReadAt> SliceReader<'_, F> {
    fn slice(&mut self, offset: u64, len_bytes: usize) -> Result<&[u8], FormatError> {
        let kept = &mut self.slices.kept;
        if !kept.contains_key(&offset) {
            let mut bytes = vec![0; len_bytes].into_boxed_slice();
            read_whole(self.file, "L2 table", offset, &mut bytes)?;
            if kept.len() == MAX_SLICES {
                kept.clear();
            }
            kept.insert(offset, bytes);
        }
        Ok(kept.get(&offset).map_or(&[], |slice| slice))
    }
}

impl<F: ReadAt> L2Source for SliceReader<'_, F> {
    type Error = FormatError;

    fn entry(&mut self, table: u64, index: u32) -> Result<RawL2Entry, FormatError> {
        let cluster_bytes = usize::try_from(self.geometry.cluster_bytes()).unwrap_or(usize::MAX);
        let slice_bytes = SLICE_BYTES.min(cluster_bytes);
        let at = u64::from(index) * self.geometry.l2_entry_bytes();
        let start = at - at % slice_bytes as u64;
        let extended = self.geometry.has_extended_l2();
        let slice = self.slice(table + start, slice_bytes)?;
        let at = usize::try_from(at - start).unwrap_or(usize::MAX);
        let subclusters = if extended { u64_at(slice, at + 8) } else { 0 };
        Ok(RawL2Entry { cluster: u64_at(slice, at), subclusters })
    }
}
