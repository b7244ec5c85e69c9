//! Opens and locks the image that the user names.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use disk_image::{Access, FileKind, HostOpener, OpenRequest, Opener, lock};
use qcow2::Image;

/// Opens an image that other programs may write.
pub fn open(path: &Path) -> Result<Image<File>> {
    image(file(path)?, path)
}

/// Opens an image that no other program writes as long as it is open: a writer would change tables between two looks at
/// them.
pub fn open_unwritten(path: &Path) -> Result<Image<File>> {
    let file = file(path)?;
    let locked = lock::acquire(&file, Access::ReadOnly, Duration::ZERO, || {});
    if !locked.with_context(|| format!("image {} cannot be locked", path.display()))? {
        bail!("image {} is in use by a program that may write it: stop that program first", path.display());
    }
    image(file, path)
}

fn file(path: &Path) -> Result<File> {
    let cannot = || format!("image {} cannot be opened", path.display());
    let kind = FileKind::from(std::fs::metadata(path).with_context(cannot)?.file_type());
    if !matches!(kind, FileKind::Regular | FileKind::BlockDevice) {
        bail!("image {} is a {kind}: give a file or a block device", path.display());
    }
    let request = OpenRequest { access: Access::ReadOnly, direct: false, create: None, exclusive: false };
    Ok(HostOpener.open_image(path, &request).with_context(cannot)?.into())
}

fn image(file: File, path: &Path) -> Result<Image<File>> {
    Image::open(file).with_context(|| format!("image {}", path.display()))
}
