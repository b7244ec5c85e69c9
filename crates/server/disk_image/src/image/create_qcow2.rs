//! Makes a new qcow2 image, also over a backing file: `empty file → tables → header, which makes it an image → synced`.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use qcow2::{DiskFormat, Header};

use super::{Image, ImageOptions, open_file, size_bytes};
use crate::cache_mode::CacheMode;
use crate::error::ImageError;
use crate::file::Access;
use crate::geometry::Alignment;
use crate::new_image::{NewBacking, NewImage};
use crate::opener::Opener;
use crate::volume::table_file::TableFile;

impl Image {
    /// Makes the qcow2 image of `options.create_bytes` at `options.path`, with the backing file of `options.new_backing`. The
    /// file is removed again unless the caller keeps it.
    ///
    /// # Errors
    /// [`ImageError`]. No file is left.
    pub fn create_qcow2(
        opener: Arc<dyn Opener>,
        options: &ImageOptions,
    ) -> Result<NewImage<Arc<dyn Opener>>, ImageError> {
        let path = || options.path.clone();
        let size_bytes = options.create_bytes.unwrap_or_default();
        let backing =
            options.new_backing.as_ref().map(|new| backing(opener.as_ref(), options, new)).transpose()?;
        if let Some((backing, least_bytes)) = &backing
            && size_bytes < *least_bytes
        {
            let (backing, least_bytes) = (backing.clone(), *least_bytes);
            return Err(ImageError::CreateSmaller { path: path(), size_bytes, backing, least_bytes });
        }
        let empty = ImageOptions { create_bytes: Some(0), cache: CacheMode::Writeback, ..options.clone() };
        let file = Arc::new(open_file(opener.as_ref(), &empty)?);
        let made = NewImage::new(opener, path(), &file);
        let named = backing.as_ref().zip(options.new_backing.as_ref());
        let named = named.map(|((real, _), new)| (real.as_os_str().as_bytes(), new.format));
        let new = qcow2::NewImage { size_bytes, backing: named };
        qcow2::create(&TableFile::new(file, Alignment::BUFFERED), &new).map_err(|source| {
            ImageError::CreateQcow2 { path: path(), size_bytes, source: Box::new(source) }
        })?;
        Ok(made)
    }
}

/// The backing file's real path and the size of what it describes.
fn backing(
    opener: &dyn Opener,
    options: &ImageOptions,
    new: &NewBacking,
) -> Result<(PathBuf, u64), ImageError> {
    let failed = |source| ImageError::Open { path: new.path.clone(), source };
    let real = opener.canonical_path(&new.path).map_err(failed)?;
    let read = ImageOptions {
        path: real.clone(),
        access: Access::ReadOnly,
        cache: CacheMode::Writeback,
        create_bytes: None,
        ..options.clone()
    };
    let file = open_file(opener, &read)?;
    let size = match new.format {
        DiskFormat::Raw => raw_bytes(&file).map_err(failed)?,
        DiskFormat::Qcow2 => {
            let header = Header::read(&TableFile::new(Arc::new(file), Alignment::BUFFERED));
            header.map_err(|error| failed(io::Error::other(error)))?.size_bytes
        }
    };
    Ok((real, size))
}

fn raw_bytes(file: &File) -> io::Result<u64> {
    size_bytes(file, file.metadata()?.file_type().into())
}
