//! Changes the size of an image that is being served: sets a regular file's size, and only re-reads a block
//! device's.
//!
//! `size -> whole blocks? -> smaller, and forced? -> bounds and file -> capacity before`
//!
//! - Growing changes the file first, then the bounds. Shrinking changes the bounds first, so that no request
//!   checked from now on reaches beyond the new end. A request that was checked before may still arrive: a
//!   read fails; a write makes the file longer again by the bytes it wrote; the capacity stays.
//! - The added part is a hole. To keep an image preallocated, allocate it from outside (`fallocate`) and let
//!   the server read the size again ([`Image::refresh_capacity`]).
//! - Resizing and re-reading the size must not run at the same time (`blk_server` ensures this).

use std::io;
use std::path::PathBuf;

use super::{Image, size_bytes};
use crate::opener::FileKind;
use crate::range::SECTOR_BYTES;

/// Why an image was not resized.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The image is served read-only.
    #[error("image {} is served read-only: its size cannot be changed", path.display())]
    ReadOnly {
        /** The image. */
        path: PathBuf,
    },
    /// A block device's size cannot be set here.
    #[error(
        "image {} is a block device of {size_bytes} bytes, not {wanted_bytes}: resize the device itself (lvextend, \
         say), then tell the server",
        path.display()
    )]
    BlockDevice {
        /** The image. */
        path: PathBuf,
        /** Read just now, and in force unless it is smaller than before. */
        size_bytes: u64,
        /** As given. */
        wanted_bytes: u64,
    },
    /// The wanted size is zero, or ends in a partial block.
    #[error(
        "image {} cannot have {wanted_bytes} bytes, not whole blocks of its block size {block_size_bytes}: give {}",
        path.display(),
        wanted_bytes.checked_next_multiple_of(u64::from(*block_size_bytes)).unwrap_or(0)
            .max(u64::from(*block_size_bytes))
    )]
    Ragged {
        /** The image. */
        path: PathBuf,
        /** As given. */
        wanted_bytes: u64,
        /** The image's logical block size. */
        block_size_bytes: u32,
    },
    /// The data beyond the wanted size would be lost.
    #[error("image {} has {from_bytes} bytes, {wanted_bytes} are fewer: what lies behind would be lost", path.display())]
    WouldShrink {
        /** The image. */
        path: PathBuf,
        /** The file's size, or the capacity if that is more. */
        from_bytes: u64,
        /** As given. */
        wanted_bytes: u64,
    },
    /// The kernel refused.
    #[error("image {} cannot be made {wanted_bytes} bytes long: check the file system's space and limits", path.display())]
    System {
        /** The image. */
        path: PathBuf,
        /** As given. */
        wanted_bytes: u64,
        /** From the kernel. */
        #[source]
        source: io::Error,
    },
}

impl Image {
    /// Sets the image's size, in force at once; smaller only with `force`. Returns the previous capacity, in
    /// sectors of 512 bytes.
    ///
    /// Waits for the file system, but does not sync: a guest's flush makes the size durable together with its
    /// data, and a sync here could consume the report of a failed write that the guest should get.
    ///
    /// # Errors
    /// [`ResizeError`]; the file's size is unchanged then.
    pub fn resize(&self, wanted_bytes: u64, force: bool) -> Result<u64, ResizeError> {
        let path = || self.path.clone();
        let system = |source| ResizeError::System { path: path(), wanted_bytes, source };
        let before_bytes = self.bounds.capacity_bytes();
        let file_bytes = size_bytes(&self.file, self.kind).map_err(system)?;
        if self.kind == FileKind::BlockDevice {
            self.bounds.grow(file_bytes);
            return match file_bytes {
                size_bytes if size_bytes == wanted_bytes => Ok(before_bytes / SECTOR_BYTES),
                size_bytes => Err(ResizeError::BlockDevice { path: path(), size_bytes, wanted_bytes }),
            };
        }
        if self.read_only() {
            return Err(ResizeError::ReadOnly { path: path() });
        }
        if wanted_bytes == 0 || self.bounds.whole_blocks(wanted_bytes) != wanted_bytes {
            let block_size_bytes = self.block_size();
            return Err(ResizeError::Ragged { path: path(), wanted_bytes, block_size_bytes });
        }
        let from_bytes = file_bytes.max(before_bytes);
        if wanted_bytes < from_bytes && !force {
            return Err(ResizeError::WouldShrink { path: path(), from_bytes, wanted_bytes });
        }
        self.bounds.cut(wanted_bytes);
        let resized = self.file.set_len(wanted_bytes);
        self.bounds.grow(if resized.is_ok() { wanted_bytes } else { before_bytes });
        resized.map(|()| before_bytes / SECTOR_BYTES).map_err(system)
    }
}
