//! Opens and locks the image that the user names.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use disk_image::{Access, FileId, FileKind, HostOpener, LockHolder, OpenRequest, Opener, lock};
use qcow2::Image;

/// Opens an image that other programs may write.
pub fn open(path: &Path) -> Result<Image<File>> {
    image(file(path)?, path)
}

/// Opens an image that no other program writes as long as it is open: a writer would change tables between two looks at
/// them.
pub fn open_unwritten(path: &Path) -> Result<Image<File>> {
    let file = file(path)?;
    if !is_locked(&file, Access::ReadOnly, path)? {
        bail!("image {} is in use by a program that may write it: stop it first", path.display());
    }
    image(file, path)
}

/// Opens a file that no other program uses as long as it is open, and locks it as `bareblk serve` does.
pub fn open_for_repair(path: &Path) -> Result<File> {
    let kind = kind(path)?;
    if kind != FileKind::Regular {
        bail!("image {} is a {kind}: only a file can be repaired", path.display());
    }
    let file = open_as(path, Access::ReadWrite)?;
    if !is_locked(&file, Access::ReadWrite, path)? {
        let holders = holders(&file);
        let them = if holders.len() > 1 { "them" } else { "it" };
        bail!("image {} is in use by {}: stop {them} first", path.display(), holders.join(", "));
    }
    Ok(file)
}

fn is_locked(file: &File, access: Access, path: &Path) -> Result<bool> {
    let locked = lock::acquire(file, access, Duration::ZERO, || {});
    locked.with_context(|| format!("image {} cannot be locked", path.display()))
}

/// The programs that hold the lock, as far as this user may see them.
fn holders(file: &File) -> Vec<String> {
    let metadata = file.metadata().ok();
    let holders = metadata.map(|metadata| HostOpener.lock_holders(FileId::from(&metadata)));
    let names: Vec<String> = holders.iter().flatten().map(LockHolder::to_string).collect();
    if names.is_empty() { vec!["a program that /proc does not show".to_owned()] } else { names }
}

fn file(path: &Path) -> Result<File> {
    let kind = kind(path)?;
    if !matches!(kind, FileKind::Regular | FileKind::BlockDevice) {
        bail!("image {} is a {kind}: give a file or a block device", path.display());
    }
    open_as(path, Access::ReadOnly)
}

fn kind(path: &Path) -> Result<FileKind> {
    let metadata = std::fs::metadata(path).with_context(|| cannot_open(path))?;
    Ok(FileKind::from(metadata.file_type()))
}

fn open_as(path: &Path, access: Access) -> Result<File> {
    let request = OpenRequest { access, direct: false, create: None, exclusive: false };
    Ok(HostOpener.open_image(path, &request).with_context(|| cannot_open(path))?.into())
}

fn cannot_open(path: &Path) -> String {
    format!("image {} cannot be opened", path.display())
}

fn image(file: File, path: &Path) -> Result<Image<File>> {
    Image::open(file).with_context(|| format!("image {}", path.display()))
}
