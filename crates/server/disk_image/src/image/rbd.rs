//! Opens an image in a Ceph cluster.
//!
//! `name → RbdImage (rbd_client) → checks: size, block size → Image`
//!
//! - The first bytes are not read, so the image is not checked for another format.
//! - The exclusive lock is taken when a guest's requests begin (`Backing::begin_use`).

use std::path::Path;
use std::sync::Arc;

use rbd_client::{Host, OpenOptions, RbdError, RbdImage, RbdSpec};

use super::location::RbdOptions;
use super::{Image, ImageOptions, refuse_impossible};
use crate::backing::Backing;
use crate::error::ImageError;
use crate::file::{Access, FileKind};
use crate::geometry::{Alignment, MIN_BLOCK_SIZE_BYTES, Topology};
use crate::limits::{DiscardLimits, WriteZeroesLimits};
use crate::range::Bounds;

/// What a discard frees: less than this stays allocated.
const DISCARD_GRANULARITY_BYTES: u64 = 4096;

impl Image {
    /// Opens the image that `spec` names. Blocks for seconds if the cluster does not answer. `host`: see
    /// [`OpenOptions`].
    ///
    /// # Errors
    /// [`ImageError::Unreachable`] if a later attempt may succeed, else another [`ImageError`].
    pub fn open_rbd(
        spec: &RbdSpec,
        options: &ImageOptions,
        host: Option<Arc<dyn Host>>,
    ) -> Result<Self, ImageError> {
        refuse_impossible(options)?;
        let path = || options.path.clone();
        if options.create_bytes.is_some() {
            let source = "leave out --create, and create it with `rbd create`".into();
            return Err(ImageError::Remote { path: path(), source });
        }
        let writable = options.access == Access::ReadWrite;
        let RbdOptions { cluster, lock } = options.rbd.clone();
        let lock_timeout = options.lock_timeout;
        let open = OpenOptions { cluster, read_only: !writable, lock, lock_timeout, host };
        let image = RbdImage::open(spec, &open).map_err(|error| failed(&options.path, error))?;
        let (size_bytes, block_size_bytes) =
            (image.size_bytes(), options.block_size.unwrap_or(MIN_BLOCK_SIZE_BYTES));
        if size_bytes == 0 {
            return Err(ImageError::Empty { path: path() });
        }
        if !size_bytes.is_multiple_of(block_size_bytes.into()) {
            return Err(ImageError::Ragged {
                path: path(),
                size_bytes,
                block_size_bytes,
                foreign_format: None,
            });
        }
        let discard = (writable && options.discard)
            .then(|| DiscardLimits::of_file(block_size_bytes, DISCARD_GRANULARITY_BYTES));
        Ok(Self {
            claim: None,
            backing: Backing::Rbd(image),
            path: path(),
            access: options.access,
            cache: options.cache,
            kind: FileKind::Regular,
            bounds: Bounds::new(size_bytes, block_size_bytes),
            alignment: Alignment::BUFFERED,
            topology: Topology::of_file(block_size_bytes, DISCARD_GRANULARITY_BYTES),
            discard,
            write_zeroes: writable.then(|| WriteZeroesLimits::new(true)),
            foreign_format: None,
            adopted: false,
        })
    }
}

fn failed(path: &Path, error: RbdError) -> ImageError {
    let (path, may_pass) = (path.to_owned(), error.may_pass());
    let source = error.into();
    if may_pass { ImageError::Unreachable { path, source } } else { ImageError::Remote { path, source } }
}
