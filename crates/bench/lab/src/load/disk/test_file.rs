//! The file that loads write to. It is filled before the first round and removed after the last.
//!
//! - It is filled with random bytes and synced, so its blocks are allocated, and storage that compresses gains nothing.
//! - Call [`TestFile::settle`] after a load through the page cache: dirty pages must not be written back during the
//!   next sample, and direct writes must not find cached pages to invalidate.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, OFlags, fadvise};
use tempfile::TempDir;

use crate::error::LabError;
use crate::runner::Xorshift;
use crate::stop::Stop;

const PIECE_BYTES: usize = 1 << 20;

/// The test file.
#[derive(Debug)]
pub(crate) struct TestFile {
    path: PathBuf,
    file: File,
    size_bytes: u64,
    _folder: TempDir,
}

impl TestFile {
    /// Makes and fills the file in a new folder in `parent`; dropping it removes both.
    pub fn fill(
        parent: &Path,
        size_bytes: u64,
        stop: &Stop,
        tell: &mut dyn FnMut(f64),
    ) -> Result<Self, LabError> {
        let failed = |source| LabError::Storage { path: parent.to_path_buf(), size_bytes, source };
        let folder = tempfile::Builder::new().prefix(".bareblk-lab-").tempdir_in(parent).map_err(failed)?;
        let path = folder.path().join("disk.raw");
        let file = File::options().read(true).write(true).create_new(true).open(&path).map_err(failed)?;
        let made = Self { path, file, size_bytes, _folder: folder };
        made.write_all(stop, tell).map_err(failed)?;
        if stop.is_asked() {
            return Err(LabError::Interrupted);
        }
        made.settle().map_err(failed)?;
        Ok(made)
    }

    fn write_all(&self, stop: &Stop, tell: &mut dyn FnMut(f64)) -> io::Result<()> {
        let mut random = Xorshift::new(1);
        let piece: Vec<u8> = (0..PIECE_BYTES / 8).flat_map(|_| random.next().to_le_bytes()).collect();
        let mut written_bytes = 0_u64;
        let mut file = &self.file;
        while written_bytes < self.size_bytes && !stop.is_asked() {
            let left_bytes = usize::try_from(self.size_bytes - written_bytes).unwrap_or(usize::MAX);
            let len_bytes = left_bytes.min(PIECE_BYTES);
            file.write_all(&piece[..len_bytes])?;
            written_bytes += len_bytes as u64;
            #[allow(clippy::cast_precision_loss)] // a share
            tell(written_bytes as f64 / self.size_bytes as f64);
        }
        Ok(())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Checks whether the file can be opened with O_DIRECT.
    pub fn check_direct(&self) -> io::Result<()> {
        let direct = i32::try_from(OFlags::DIRECT.bits()).unwrap_or(0);
        File::options().read(true).write(true).custom_flags(direct).open(&self.path).map(drop)
    }

    /// Writes everything to the storage and empties the page cache (tmpfs files stay in it).
    pub fn settle(&self) -> io::Result<()> {
        self.file.sync_data()?;
        fadvise(&self.file, 0, None, Advice::DontNeed)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_filled_and_gone_when_dropped() {
        let parent = tempfile::tempdir().unwrap();
        let mut shares = Vec::new();
        let size_bytes = (2 << 20) + 4096;
        let file =
            TestFile::fill(parent.path(), size_bytes, &Stop::default(), &mut |share| shares.push(share))
                .unwrap();
        assert_eq!(std::fs::metadata(file.path()).unwrap().len(), size_bytes);
        assert_eq!((shares.len(), shares[2]), (3, 1.0));
        drop(file);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn interrupted_filling_leaves_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let stop = Stop::default();
        let asked = TestFile::fill(parent.path(), 8 << 20, &stop, &mut |_| stop.ask());
        assert!(matches!(asked, Err(LabError::Interrupted)), "{asked:?}");
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn folder_that_is_not_there_is_named() {
        let asked = TestFile::fill(Path::new("/no/such"), 1 << 20, &Stop::default(), &mut |_| {});
        let line = asked.unwrap_err().to_string();
        assert!(line.contains("/no/such") && line.contains("1 MiB") && line.contains("--storage"), "{line}");
    }
}
