//! Shared by the integration tests: images to open, and an opener that fails on demand. No tests here.
#![allow(dead_code)] // each test binary uses its part

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use disk_image::{
    Access, FileId, FileKind, HostOpener, Image, ImageError, ImageOptions, LockHolder, OpenRequest, Opener,
    QueueAttributes,
};
use tempfile::TempDir;

/// Timeout for locks that will soon be free: a test that forks at this moment keeps a copy of every
/// descriptor until exec.
pub const SOON: Duration = Duration::from_secs(300);

/// A directory on a real file system (the temporary directory may be a tmpfs).
pub fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A directory with an image `disk.raw` of `size_bytes` in it.
pub fn image(size_bytes: u64) -> (TempDir, PathBuf) {
    let folder = folder();
    let path = folder.path().join("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(size_bytes).unwrap();
    (folder, path)
}

/// Options for reading and writing, without waiting for locks.
pub fn options(path: &Path) -> ImageOptions {
    ImageOptions { lock_timeout: Duration::ZERO, ..ImageOptions::new(path) }
}

pub fn read_only(path: &Path) -> ImageOptions {
    ImageOptions { access: Access::ReadOnly, ..options(path) }
}

pub fn open(options: &ImageOptions) -> Result<Image, ImageError> {
    Image::open(&HostOpener, options)
}

/// The error's text, checked to be one line.
pub fn refusal(options: &ImageOptions) -> String {
    refusal_by(&HostOpener, options)
}

pub fn refusal_by(opener: &dyn Opener, options: &ImageOptions) -> String {
    let line = Image::open(opener, options).unwrap_err().to_string();
    assert!(!line.contains('\n') && !line.ends_with('.'), "not one clear line: {line}");
    line
}

pub fn assert_says(line: &str, parts: &[&str]) {
    let missing: Vec<_> = parts.iter().filter(|part| !line.contains(**part)).collect();
    assert!(missing.is_empty(), "'{line}' does not say {missing:?}");
}

/// The host's opener, except for failures on demand (tests often run as root, whom permissions do not stop).
#[derive(Debug, Default)]
pub struct FailingOpener {
    pub write_open: Option<i32>,
    pub read_open: Option<i32>,
    pub canonical_path: Option<i32>,
    /// After a path was resolved to the first one, a link to the second one replaces the file there.
    pub replaced: Option<(PathBuf, PathBuf)>,
}

fn fail(errno: Option<i32>) -> io::Result<()> {
    errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
}

impl Opener for FailingOpener {
    fn file_kind(&self, path: &Path) -> io::Result<FileKind> {
        HostOpener.file_kind(path)
    }
    fn canonical_path(&self, path: &Path) -> io::Result<PathBuf> {
        fail(self.canonical_path)?;
        let real = HostOpener.canonical_path(path)?;
        if let Some((link, target)) = self.replaced.as_ref().filter(|(link, _)| *link == real) {
            std::fs::remove_file(link)?;
            std::os::unix::fs::symlink(target, link)?;
        }
        Ok(real)
    }
    fn file_id(&self, path: &Path) -> io::Result<FileId> {
        HostOpener.file_id(path)
    }
    fn open_image(&self, path: &Path, request: &OpenRequest) -> io::Result<OwnedFd> {
        fail(match request.access {
            Access::ReadWrite => self.write_open,
            Access::ReadOnly => self.read_open,
        })?;
        HostOpener.open_image(path, request)
    }
    fn reopen(&self, file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        HostOpener.reopen(file)
    }
    fn path_of(&self, file: BorrowedFd<'_>) -> io::Result<Option<PathBuf>> {
        HostOpener.path_of(file)
    }
    fn open_configuration(&self, path: &Path) -> io::Result<OwnedFd> {
        HostOpener.open_configuration(path)
    }
    fn queue_attributes(&self, major: u32, minor: u32) -> io::Result<QueueAttributes> {
        HostOpener.queue_attributes(major, minor)
    }
    fn lock_holders(&self, file: FileId) -> Vec<LockHolder> {
        HostOpener.lock_holders(file)
    }
    fn bind_socket(&self, path: &Path) -> io::Result<OwnedFd> {
        HostOpener.bind_socket(path)
    }
    fn set_socket_owner(&self, path: &Path, mode: u32, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        HostOpener.set_socket_owner(path, mode, uid, gid)
    }
    fn connect_socket(&self, path: &Path) -> io::Result<()> {
        HostOpener.connect_socket(path)
    }
    fn unlink(&self, path: &Path) -> io::Result<()> {
        HostOpener.unlink(path)
    }
}
