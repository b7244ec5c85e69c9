//! Marks on images that must not be served by mistake: extended attributes of their files. File systems without such
//! attributes have no marks.
//!
//! - An image that has an overlay is not written. The mark has the overlay's path.
//! - An image that was committed is not served: its guest has gone on in the image below it. The mark has that one's path.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};
use tracing::warn;

use crate::error::ImageError;
use crate::file::Access;
use crate::opener::Opener;

const OVERLAY: &str = "user.bareblk.overlay";
const COMMITTED: &str = "user.bareblk.committed";
/// As long as a path may be.
const MAX_BYTES: usize = 4096;

/// Whether the file can have marks.
///
/// # Errors
/// It cannot.
pub(super) fn probe(file: &File) -> io::Result<()> {
    const PROBE: &str = "user.bareblk.probe";
    fsetxattr(file, PROBE, b"1", XattrFlags::empty())?;
    Ok(fremovexattr(file, PROBE)?)
}

/// # Errors
/// The file cannot have the mark.
pub(super) fn mark(file: &File, overlay: &Path) -> io::Result<()> {
    Ok(fsetxattr(file, OVERLAY, overlay.as_os_str().as_bytes(), XattrFlags::empty())?)
}

/// Removes the mark, if it names this overlay, and makes that durable.
pub(super) fn unmark(file: &File, overlay: &Path) {
    let remove = || fremovexattr(file, OVERLAY).map_err(io::Error::from).and_then(|()| file.sync_all());
    if path_in(file, OVERLAY).is_some_and(|marked| marked == overlay)
        && let Err(error) = remove()
    {
        warn!(
            overlay = %overlay.display(),
            "the backing file of this image stays marked as one with an overlay: {error}; run: setfattr -x {OVERLAY} FILE"
        );
    }
}

/// Marks a committed image, durably.
///
/// # Errors
/// The file may have the mark.
pub(super) fn mark_committed(file: &File, below: &Path) -> io::Result<()> {
    fsetxattr(file, COMMITTED, below.as_os_str().as_bytes(), XattrFlags::empty())?;
    file.sync_all()
}

/// # Errors
/// The file may have the mark.
pub(super) fn unmark_committed(file: &File) -> io::Result<()> {
    fremovexattr(file, COMMITTED)?;
    file.sync_all()
}

/// Refuses an image whose guest has gone on in the image below it.
///
/// # Errors
/// [`ImageError::Committed`].
pub(super) fn check_committed(path: &Path, file: &File) -> Result<(), ImageError> {
    match path_in(file, COMMITTED) {
        Some(below) => Err(ImageError::Committed { path: path.to_owned(), below }),
        None => Ok(()),
    }
}

fn path_in(file: &File, name: &str) -> Option<PathBuf> {
    let mut path = vec![0; MAX_BYTES];
    let len = fgetxattr(file, name, &mut path[..]).ok()?;
    path.truncate(len);
    Some(OsString::from_vec(path).into())
}

/// Refuses an image that was committed, and for writing one whose guest has gone on in an overlay. A mark whose overlay has
/// gone does not count.
///
/// # Errors
/// [`ImageError::HasOverlay`], [`ImageError::Committed`].
pub(super) fn check(opener: &dyn Opener, path: &Path, access: Access, file: &File) -> Result<(), ImageError> {
    check_committed(path, file)?;
    match access {
        Access::ReadOnly => Ok(()),
        Access::ReadWrite => check_other_overlay(opener, path, file, None),
    }
}

/// Refuses an image that has an overlay, except `own`. A mark whose overlay has gone does not count.
///
/// # Errors
/// [`ImageError::HasOverlay`].
pub(super) fn check_other_overlay(
    opener: &dyn Opener,
    path: &Path,
    file: &File,
    own: Option<&Path>,
) -> Result<(), ImageError> {
    let has_gone = |overlay: &Path| matches!(opener.file_kind(overlay), Err(error) if error.kind() == io::ErrorKind::NotFound);
    let overlay = path_in(file, OVERLAY).filter(|overlay| Some(&**overlay) != own && !has_gone(overlay));
    match overlay {
        Some(overlay) => Err(ImageError::HasOverlay { path: path.to_owned(), overlay }),
        None => Ok(()),
    }
}
