//! Examines an image without locking it, so that settings can be checked while a server uses the image.

use std::fs::File;
use std::sync::Arc;

use super::{Image, ImageOptions, Layout, accept_kind, open_file, refuse_impossible};
use crate::error::ImageError;
use crate::file::FileId;
use crate::geometry::Alignment;
use crate::opener::Opener;

/// The properties of an image that is examined, not served.
#[derive(Debug)]
pub struct Inspection {
    /// The open file, without a lock.
    pub file: Arc<File>,
    /// Identifies the file, for [`Opener::lock_holders`].
    pub id: FileId,
    /// The file's size.
    pub size_bytes: u64,
    /// The logical block size that a guest would get.
    pub block_size_bytes: u32,
    /// The alignment that transfers would need.
    pub alignment: Alignment,
    /// See [`Image::foreign_format`].
    pub foreign_format: Option<&'static str>,
}

impl Image {
    /// Opens an existing image as [`Image::open`] does, but takes no lock and claims no device.
    ///
    /// # Errors
    /// [`ImageError`], as from [`Image::open`], except those about locks and claims.
    pub fn inspect(opener: &dyn Opener, options: &ImageOptions) -> Result<Inspection, ImageError> {
        refuse_impossible(options)?;
        let file = Arc::new(open_file(opener, options)?);
        let path = || options.path.clone();
        let metadata = file.metadata().map_err(|source| ImageError::Inspect {
            path: path(),
            what: "the type",
            source,
        })?;
        accept_kind(&options.path, metadata.file_type().into())?;
        let Layout { size_bytes, alignment, block_size_bytes, foreign_format, .. } =
            Layout::read(opener, options, &file, &metadata)?;
        let id = FileId::from(&metadata);
        Ok(Inspection { file, id, size_bytes, block_size_bytes, alignment, foreign_format })
    }
}
