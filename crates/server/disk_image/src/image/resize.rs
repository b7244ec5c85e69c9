//! Changes the size of an image that is being served: sets a regular file's size, and only re-reads a block
//! device's.
//!
//! `size -> whole blocks? -> smaller, and forced? -> bounds and file -> previous capacity`
//!
//! - Growing changes the file first, then the bounds. Shrinking changes the bounds first, so that no request checked
//!   from now on reaches beyond the new end. A request that was checked earlier may still run: a read fails; a write
//!   extends the file again as far as it reaches; the capacity does not change.
//! - The added part is a hole. To keep an image preallocated, allocate it from outside (`fallocate`) and let
//!   the server read the size again ([`Image::refresh_capacity`]).
//! - Resizing and re-reading the size must not run at the same time (`blk_server` ensures this).

use std::io;

use super::{CapacityChange, Image, size_bytes};
use crate::backing::Backing;
use crate::error::{ImageError, ResizeError};
use crate::file::FileKind;
use crate::range::{Bounds, SECTOR_BYTES};

impl Image {
    /// The same qcow2 image with a larger disk. No request may be in flight, and no metadata thread have the tables. This image
    /// stays valid.
    ///
    /// # Errors
    /// [`ResizeError`]. The header may have the new size already, which the next start uses.
    pub fn grown(&self, wanted_bytes: u64) -> Result<Self, ResizeError> {
        let (path, from_bytes) = (self.path.clone(), self.bounds.capacity_bytes());
        let block_size_bytes = self.block_size();
        let Some(volume) = self.backing.volume().filter(|volume| volume.is_writable()) else {
            return Err(ResizeError::ReadOnly { path });
        };
        if !wanted_bytes.is_multiple_of(block_size_bytes.into()) {
            return Err(ResizeError::Ragged { path, wanted_bytes, block_size_bytes });
        }
        if wanted_bytes < from_bytes {
            return Err(ResizeError::Qcow2Smaller { path, from_bytes, wanted_bytes });
        }
        if volume.size_of_layer(1) > from_bytes {
            return Err(ResizeError::LongerBacking {
                path,
                from_bytes,
                backing_bytes: volume.size_of_layer(1),
            });
        }
        let grown = volume.grown(wanted_bytes);
        let grown = grown.map_err(|source| ResizeError::Qcow2Write {
            path,
            wanted_bytes,
            source: Box::new(source),
        })?;
        Ok(Self {
            bounds: Bounds::new(grown.size_bytes(), block_size_bytes),
            ..self.with_volume(&self.path, grown, self.discard)
        })
    }

    /// The size now, which another program may have changed.
    fn stored_bytes(&self) -> io::Result<u64> {
        match &self.backing {
            Backing::File(file) => size_bytes(file, self.kind),
            Backing::Nbd(export) => export.refresh_size().map_err(io::Error::other),
            Backing::Rbd(image) => image.refresh_size(),
            Backing::Mapped(volume) => Ok(volume.size_bytes()),
        }
    }

    /// Reads the image's size again. Growth takes effect at once, in whole blocks; shrinking is only
    /// reported.
    ///
    /// # Errors
    /// [`ImageError::Inspect`] if the size cannot be read.
    pub fn refresh_capacity(&self) -> Result<CapacityChange, ImageError> {
        let size_bytes = self.stored_bytes().map_err(|source| ImageError::Inspect {
            path: self.path.clone(),
            what: "the size",
            source,
        })?;
        let from = self.bounds.grow(size_bytes) / SECTOR_BYTES;
        let to = self.bounds.whole_blocks(size_bytes) / SECTOR_BYTES;
        Ok(match to.cmp(&from) {
            std::cmp::Ordering::Equal => CapacityChange::Unchanged,
            std::cmp::Ordering::Greater => CapacityChange::Grown { from, to },
            std::cmp::Ordering::Less => CapacityChange::Shrunk { from, to },
        })
    }

    /// Sets the image's size with immediate effect. Shrinks only with `force`. Returns the previous capacity, in
    /// sectors of 512 bytes.
    ///
    /// Waits for the file system, but does not sync: a guest's flush makes the size durable together with its data, and
    /// a sync here could consume the error of a failed write, which the guest's flush should report.
    ///
    /// # Errors
    /// [`ResizeError`]; the file's size is then unchanged.
    pub fn resize(&self, wanted_bytes: u64, force: bool) -> Result<u64, ResizeError> {
        let path = || self.path.clone();
        let system = |source| ResizeError::System { path: path(), wanted_bytes, source };
        let before_bytes = self.bounds.capacity_bytes();
        let stored_bytes = self.stored_bytes().map_err(system)?;
        let set_elsewhere = |size_bytes: u64| match self.backing {
            Backing::Nbd(_) => Some(ResizeError::Remote { path: path(), size_bytes, wanted_bytes }),
            Backing::Mapped(_) => Some(ResizeError::Qcow2ReadOnly { path: path(), size_bytes, wanted_bytes }),
            Backing::File(_) if self.kind == FileKind::BlockDevice => {
                Some(ResizeError::BlockDevice { path: path(), size_bytes, wanted_bytes })
            }
            Backing::File(_) | Backing::Rbd(_) => None,
        };
        if let Some(differs) = set_elsewhere(stored_bytes) {
            self.bounds.grow(stored_bytes);
            return if stored_bytes == wanted_bytes { Ok(before_bytes / SECTOR_BYTES) } else { Err(differs) };
        }
        if self.read_only() {
            return Err(ResizeError::ReadOnly { path: path() });
        }
        if wanted_bytes == 0 || self.bounds.whole_blocks(wanted_bytes) != wanted_bytes {
            let block_size_bytes = self.block_size();
            return Err(ResizeError::Ragged { path: path(), wanted_bytes, block_size_bytes });
        }
        let from_bytes = stored_bytes.max(before_bytes);
        if wanted_bytes < from_bytes && !force {
            return Err(ResizeError::WouldShrink { path: path(), from_bytes, wanted_bytes });
        }
        self.bounds.cut(wanted_bytes);
        let resized = match &self.backing {
            Backing::File(file) => file.set_len(wanted_bytes),
            Backing::Nbd(_) | Backing::Mapped(_) => Err(io::ErrorKind::Unsupported.into()),
            Backing::Rbd(image) => image.resize(wanted_bytes),
        };
        self.bounds.grow(if resized.is_ok() { wanted_bytes } else { before_bytes });
        resized.map(|()| before_bytes / SECTOR_BYTES).map_err(system)
    }
}
