//! A mark on an image that has an overlay, so that no server writes it by mistake: an extended attribute of its file with
//! the overlay's path. File systems without such attributes have no mark.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};

use crate::error::ImageError;
use crate::file::Access;
use crate::opener::Opener;

const NAME: &str = "user.bareblk.overlay";
/// As long as a path may be.
const MAX_BYTES: usize = 4096;

/// # Errors
/// The file cannot have the mark.
pub(super) fn mark(file: &File, overlay: &Path) -> io::Result<()> {
    Ok(fsetxattr(file, NAME, overlay.as_os_str().as_bytes(), XattrFlags::empty())?)
}

fn overlay_of(file: &File) -> Option<PathBuf> {
    let mut path = vec![0; MAX_BYTES];
    let len = fgetxattr(file, NAME, &mut path[..]).ok()?;
    path.truncate(len);
    Some(OsString::from_vec(path).into())
}

/// Refuses an image for writing whose guest has gone on in an overlay. A mark whose overlay has gone does not count.
///
/// # Errors
/// [`ImageError::HasOverlay`].
pub(super) fn check(opener: &dyn Opener, path: &Path, access: Access, file: &File) -> Result<(), ImageError> {
    if access == Access::ReadOnly {
        return Ok(());
    }
    let overlay = overlay_of(file).filter(
        |overlay| !matches!(opener.file_kind(overlay), Err(error) if error.kind() == io::ErrorKind::NotFound),
    );
    match overlay {
        Some(overlay) => Err(ImageError::HasOverlay { path: path.to_owned(), overlay }),
        None => Ok(()),
    }
}
