//! One file of a volume, and the checked ranges of it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::geometry::Alignment;
use crate::range::{Bounds, CheckedRange, SECTOR_BYTES};

/// A file of a volume, open and locked. Only the top layer's file may be open for writing, and only its length grows.
#[derive(Debug)]
pub struct LayerFile {
    path: PathBuf,
    file: Arc<File>,
    alignment: Alignment,
    /// The file's length, up to the end of its last block.
    bounds: Bounds,
    len_bytes: AtomicU64,
}

impl LayerFile {
    pub(crate) fn new(path: PathBuf, file: Arc<File>, alignment: Alignment, len_bytes: u64) -> Self {
        let block_bytes = alignment.offset_bytes.max(512);
        let bounds = Bounds::new(padded(len_bytes, block_bytes), block_bytes);
        Self { path, file, alignment, bounds, len_bytes: AtomicU64::new(len_bytes) }
    }

    /// Makes a greater length known. A worker that sees an entry that was changed afterwards sees the length, too.
    pub(crate) fn grow(&self, len_bytes: u64) {
        self.len_bytes.fetch_max(len_bytes, Ordering::Relaxed);
        self.bounds.grow(padded(len_bytes, self.bounds.block_size_bytes()));
    }

    /// The file's path, with links resolved.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file, which holds the lock.
    #[must_use]
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// The required alignment of each transfer.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// The file's length when it was opened, or the length to which this program has extended it.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Relaxed)
    }

    /// The same, up to the end of the last block. A read to there gets fewer bytes.
    pub(crate) fn padded_bytes(&self) -> u64 {
        self.bounds.capacity_bytes()
    }

    /// The unit in which the file can be read.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.bounds.block_size_bytes().into()
    }

    /// Checks a range: whole blocks, inside the file. `None`: it is not.
    #[inline]
    #[must_use]
    pub fn check(&self, offset_bytes: u64, len_bytes: u64) -> Option<CheckedRange> {
        if !offset_bytes.is_multiple_of(SECTOR_BYTES) {
            return None;
        }
        self.bounds.check(offset_bytes / SECTOR_BYTES, len_bytes).ok()
    }

    /// The whole blocks that contain a range, as far as the file goes. `None`: the range begins past the file's end.
    #[must_use]
    pub fn blocks_around(&self, offset_bytes: u64, len_bytes: u64) -> Option<CheckedRange> {
        let block_bytes = self.block_bytes();
        let start = offset_bytes - offset_bytes % block_bytes;
        let end = offset_bytes.checked_add(len_bytes)?.checked_next_multiple_of(block_bytes)?;
        let end = end.min(self.padded_bytes());
        self.check(start, end.checked_sub(start)?).filter(|range| range.end_bytes() > offset_bytes)
    }
}

/// Up to the end of the last block. The kernel's limit of file sizes leaves room for it.
fn padded(len_bytes: u64, block_bytes: u32) -> u64 {
    len_bytes.min(i64::MAX as u64 - u64::from(block_bytes)).next_multiple_of(block_bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(len_bytes: u64, offset_bytes: u32) -> LayerFile {
        let alignment = Alignment { memory_bytes: 1, offset_bytes };
        LayerFile::new("x".into(), Arc::new(tempfile::tempfile().unwrap()), alignment, len_bytes)
    }

    #[test]
    fn blocks_around_bytes_end_with_the_files_last_block() {
        let around = |offset, len| {
            let range = file(10_000, 4096).blocks_around(offset, len);
            range.map(|range| (range.offset_bytes(), range.end_bytes()))
        };
        assert_eq!(around(4095, 2), Some((0, 8192)));
        assert_eq!(around(9000, 9000), Some((8192, 12_288)));
        assert_eq!((around(12_288, 1), around(u64::MAX, 1), around(1, u64::MAX)), (None, None, None));
    }

    #[test]
    fn parts_of_blocks_and_what_is_past_the_last_block_are_refused() {
        let file = file(1000, 1);
        assert!(file.check(512, 512).is_some() && file.check(0, 1024).is_some());
        assert!(
            file.check(512, 100).is_none()
                && file.check(100, 512).is_none()
                && file.check(1024, 512).is_none()
        );
        assert!(file.check(u64::MAX - 511, 512).is_none());
    }
}
