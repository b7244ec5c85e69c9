//! Guards a file created for an image until the image is in use: if creation is abandoned, the file is removed. What a new
//! image is made over.

use std::fs::File;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;

use qcow2::DiskFormat;

use crate::opener::Opener;

/// What lies below a new qcow2 image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewBacking {
    /// The backing file.
    pub path: PathBuf,
    /// Its format.
    pub format: DiskFormat,
}

/// Removes a new file when dropped, unless it is kept.
#[derive(Debug)]
pub struct NewImage<O: Deref<Target: Opener>> {
    opener: O,
    path: PathBuf,
    /// Holds the lock, so that no other program can be using the file when it is removed.
    _file: Arc<File>,
    kept: bool,
}

impl<O: Deref<Target: Opener>> NewImage<O> {
    /// Guards the file at `path`, which is open as `file`. `opener` may be borrowed or shared.
    pub fn new(opener: O, path: impl Into<PathBuf>, file: &Arc<File>) -> Self {
        Self { opener, path: path.into(), _file: Arc::clone(file), kept: false }
    }

    /// Keeps the file.
    pub fn keep(mut self) {
        self.kept = true;
    }
}

impl<O: Deref<Target: Opener>> Drop for NewImage<O> {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = self.opener.unlink(&self.path)
        {
            tracing::warn!(%error, path = %self.path.display(), "the unused new image could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostOpener;

    #[test]
    fn only_a_file_that_is_kept_survives_its_guard() {
        let folder = tempfile::tempdir().unwrap();
        let (kept, dropped) = (folder.path().join("kept"), folder.path().join("dropped"));
        let guard = |path| NewImage::new(&HostOpener, path, &Arc::new(File::create(path).unwrap()));
        guard(&kept).keep();
        drop(guard(&dropped));
        assert_eq!((kept.exists(), dropped.exists()), (true, false));
    }
}
