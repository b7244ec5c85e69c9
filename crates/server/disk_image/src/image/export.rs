//! Opens an export of an NBD server as an image.
//!
//! `URI → Export (nbd_client) → checks: size, block size, access → Image`
//!
//! - There is no lock: NBD has none. Whether two clients may write to one export is up to its server.
//! - The first bytes are not read, so the image is not checked for another format.

use std::path::Path;
use std::sync::Arc;

use nbd_client::{Dial, Export, ExportOptions, NbdError, NbdUri};

use super::{Image, ImageOptions, refuse_impossible};
use crate::backing::Backing;
use crate::error::ImageError;
use crate::file::{Access, FileKind};
use crate::geometry::{Alignment, MIN_BLOCK_SIZE_BYTES, Topology};
use crate::limits::{DiscardLimits, WriteZeroesLimits};
use crate::range::Bounds;

impl Image {
    /// Opens the export that `uri` names. Blocks for a few seconds if the server does not answer.
    ///
    /// # Errors
    /// [`ImageError::Unreachable`] if a later attempt may succeed, else another [`ImageError`].
    pub fn open_export(
        dial: Arc<dyn Dial>,
        uri: &NbdUri,
        options: &ImageOptions,
    ) -> Result<Self, ImageError> {
        refuse_impossible(options)?;
        let path = || options.path.clone();
        let remote = |problem: &str| ImageError::Remote { path: path(), source: problem.into() };
        if options.create_bytes.is_some() {
            return Err(remote(
                "NBD cannot create an export: leave out --create, and create it at its server",
            ));
        }
        let request_timeout = options.nbd_timeout;
        let export =
            Export::connect(uri, ExportOptions { request_timeout, ..ExportOptions::default() }, dial);
        let export = export.map_err(|error| failed(&options.path, error))?;
        let info = export.info();
        if info.is_read_only() && options.access == Access::ReadWrite {
            return Err(remote("its server exports it read-only: use --readonly, or make it writable there"));
        }
        let needed_bytes = info.min_block_bytes.max(MIN_BLOCK_SIZE_BYTES);
        let block_size_bytes = options.block_size.unwrap_or(needed_bytes);
        if block_size_bytes < needed_bytes {
            return Err(ImageError::BlockSizeTooSmall { path: path(), block_size_bytes, needed_bytes });
        }
        let size_bytes = info.size_bytes;
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
        let writable = options.access == Access::ReadWrite;
        let preferred_bytes = u64::from(info.preferred_block_bytes);
        let discard = (writable && options.discard && info.can_trim())
            .then(|| DiscardLimits::of_file(block_size_bytes, preferred_bytes));
        Ok(Self {
            claim: None,
            backing: Backing::Nbd(export),
            path: path(),
            access: options.access,
            cache: options.cache,
            kind: FileKind::Regular,
            bounds: Bounds::new(size_bytes, block_size_bytes),
            // Buffers may lie anywhere, but a request has whole blocks of the server.
            alignment: Alignment { memory_bytes: 1, offset_bytes: info.min_block_bytes },
            topology: Topology::of_file(block_size_bytes, preferred_bytes),
            discard,
            write_zeroes: writable.then(|| WriteZeroesLimits::new(info.can_write_zeroes())),
            foreign_format: None,
            adopted: false,
        })
    }
}

fn failed(path: &Path, error: NbdError) -> ImageError {
    let (path, may_pass) = (path.to_owned(), error.may_pass());
    let source = error.into();
    if may_pass { ImageError::Unreachable { path, source } } else { ImageError::Remote { path, source } }
}
