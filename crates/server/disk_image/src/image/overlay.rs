//! New qcow2 images over an image that a guest uses: snapshots by overlay.
//!
//! `write_overlay: empty file → image without data over this one`, `open_overlay: that image, this one for reading`
//!
//! - The caller stops all writes to this image, and makes them durable, before the overlay is opened.
//! - This image stays open and locked. The overlay opens it again, for reading, with a lock that allows readers only. When
//!   this image is dropped, other programs may read the file, but still may not write it.
//! - The overlay shares the open files below this image.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use qcow2::{DiskFormat, NewImage, create};
use tracing::warn;

use super::mapped::{self, Served};
use super::{Image, ImageOptions, overlay_mark};
use crate::backing::Backing;
use crate::error::ImageError;
use crate::file::FileId;
use crate::geometry::Alignment;
use crate::opener::Opener;
use crate::volume::TABLE_CACHE_BYTES;
use crate::volume::table_file::TableFile;

impl Image {
    /// The format under which an overlay names this image.
    ///
    /// # Errors
    /// [`ImageError::NoOverlay`].
    pub fn check_overlay(&self) -> Result<DiskFormat, ImageError> {
        let refused = |why| Err(ImageError::NoOverlay { path: self.path.clone(), why });
        match &self.backing {
            _ if self.read_only() => refused("it is served read-only"),
            // Its name may be another device's after a reboot.
            _ if self.is_block_device() => {
                refused("it is a block device: make a snapshot with LVM or the storage")
            }
            Backing::File(_) => Ok(DiskFormat::Raw),
            Backing::Mapped(_) => Ok(DiskFormat::Qcow2),
            Backing::Nbd(_) | Backing::Rbd(_) => {
                refused("it is on another machine, which makes snapshots itself")
            }
        }
    }

    /// Makes an image without data over this one, in an empty file, and syncs it.
    ///
    /// # Errors
    /// [`ImageError::NoOverlay`], [`ImageError::Overlay`].
    pub fn write_overlay(&self, file: File) -> Result<(), ImageError> {
        let backing = Some((self.path.as_os_str().as_bytes(), self.check_overlay()?));
        let new = NewImage { size_bytes: self.bounds.capacity_bytes(), backing };
        let file = TableFile::new(Arc::new(file), Alignment::BUFFERED);
        create(&file, &new)
            .map_err(|source| ImageError::Overlay { path: self.path.clone(), source: Box::new(source) })
    }

    /// Opens the overlay at `options.path`, and marks this image's file. The guest sees the same block size.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn open_overlay(&self, opener: &dyn Opener, options: &ImageOptions) -> Result<Self, ImageError> {
        let options = ImageOptions {
            block_size: Some(self.block_size()),
            access: self.access,
            cache: self.cache,
            create_bytes: None,
            ..options.clone()
        };
        let no_overlay = |why| ImageError::NoOverlay { path: self.path.clone(), why };
        let below = self.file_with_lock().ok_or_else(|| no_overlay("its file is not open for writing"))?;
        let what = "the identity";
        let inspect = |source| ImageError::Inspect { path: self.path.clone(), what, source };
        let id = FileId::from(&below.metadata().map_err(inspect)?);
        let served = Served { path: &self.path, id, volume: self.backing.volume().map(|volume| &**volume) };
        let overlay = mapped::open_over(opener, &options, TABLE_CACHE_BYTES, served)?;
        if let Err(error) = overlay_mark::mark(below, &overlay.path) {
            warn!(
                image = %self.path.display(),
                "cannot mark the image, so a start with the old configuration will not be refused, and would make the \
                 overlay useless: {error}"
            );
        }
        Ok(overlay)
    }
}
