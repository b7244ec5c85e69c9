//! Opens a qcow2 image with the files that it names as one disk.
//!
//! `path → header → names of backing files and data files → allowed? → open, lock → can it be written? → Volume → Image`
//!
//! - The author of an image has chosen the names in it. They count only below folders that the operator has named.
//! - A relative name is relative to the folder by which the image is named, as in QEMU. Symbolic links are resolved only to
//!   check the folder.
//! - Only the image itself is opened for writing, with the lock of a raw image. Every file that an image names is opened for
//!   reading only (`ctl commit` opens the one below again, `image/merge.rs`).
//! - Nothing is written here. The first change is the metadata thread's (`Backing::start_metadata_thread`).

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use qcow2::{
    Chain, ChainError, DiskFormat, Header, LayerParts, MAX_LAYERS, MappedParts, Opened, ReadAt, Role, Writer,
};

use super::{
    Image, ImageOptions, accept_kind, alignment, block_size, device_under, open_file, overlay_mark,
    refuse_impossible, size_bytes, take_lock,
};
use crate::backing::Backing;
use crate::error::ImageError;
use crate::file::{Access, FileId, FileKind};
use crate::geometry::{self, Alignment, MIN_BLOCK_SIZE_BYTES, Topology};
use crate::limits::{self, DiscardLimits, WriteZeroesLimits};
use crate::lock;
use crate::opener::Opener;
use crate::range::Bounds;
use crate::volume::parts::{Parts, divide};
use crate::volume::table_file::TableFile;
use crate::volume::{
    LEAST_WRITABLE_CACHE_BYTES, Layer, LayerFile, Mapping, TABLE_CACHE_BYTES, Tables, Volume,
};

impl Image {
    /// Opens a qcow2 image and all files that it needs. The names in images count only below `options.backing_folders`.
    /// A writable image needs its metadata thread before the guest's first request ([`Backing::start_metadata_thread`]).
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn open_qcow2(opener: &dyn Opener, options: &ImageOptions) -> Result<Self, ImageError> {
        Self::open_qcow2_with(opener, options, TABLE_CACHE_BYTES)
    }

    /// Opens a qcow2 image as [`Image::open_qcow2`] does, but takes no locks.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn inspect_qcow2(opener: &dyn Opener, options: &ImageOptions) -> Result<Self, ImageError> {
        open(opener, options, TABLE_CACHE_BYTES, Locks::Off)
    }

    /// The same, with this much memory for L2 tables.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn open_qcow2_with(
        opener: &dyn Opener,
        options: &ImageOptions,
        table_cache_bytes: u64,
    ) -> Result<Self, ImageError> {
        open(opener, options, table_cache_bytes, Locks::On)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Locks {
    /// Refuses a file on which another opener holds a conflicting lock.
    On,
    /// This process has the conflicting lock itself.
    Joined,
    Off,
}

/// An image that this process serves, and over which another one is opened. The operator has named it.
#[derive(Clone, Copy)]
pub(super) struct Served<'a> {
    pub path: &'a Path,
    pub id: FileId,
    /// `None`: it is raw.
    pub volume: Option<&'a Volume>,
}

/// Opens an image over one that this process serves, whose writes have ended.
pub(super) fn open_over(
    opener: &dyn Opener,
    options: &ImageOptions,
    table_cache_bytes: u64,
    served: Served<'_>,
) -> Result<Image, ImageError> {
    open_chain(opener, options, table_cache_bytes, Locks::On, Some(served))
}

fn open(
    opener: &dyn Opener,
    options: &ImageOptions,
    table_cache_bytes: u64,
    locks: Locks,
) -> Result<Image, ImageError> {
    open_chain(opener, options, table_cache_bytes, locks, None)
}

fn open_chain(
    opener: &dyn Opener,
    options: &ImageOptions,
    table_cache_bytes: u64,
    locks: Locks,
    served: Option<Served<'_>>,
) -> Result<Image, ImageError> {
    refuse_impossible(options)?;
    let top = OpenFile::open_top(opener, options, locks)?;
    let (adopted, top_alignment, top_file) = (top.adopted, top.alignment, Arc::clone(&top.file));
    let block_size_bytes = block_size(options, &top.file, top.alignment, None)?;
    let fs_block_bytes = geometry::fs_block_bytes(&top.file);
    let unreal = |source| ImageError::Inspect { path: options.path.clone(), what: "the real path", source };
    let real = opener.canonical_path(&options.path).map_err(unreal)?;
    let mut files = ChainFiles { opener, options, locks, served, top: Some(top) };
    let (parts, lower) = files.layers()?;
    let size_bytes = parts.first().map_or(0, |top| top.size_bytes);
    let is_writable = options.access == Access::ReadWrite;
    let block_size_bytes = match options.block_size {
        // If the size is not a multiple of the block size, the smallest possible block is used. A write must consist of
        // whole blocks of the file.
        None if !size_bytes.is_multiple_of(block_size_bytes.into()) => {
            MIN_BLOCK_SIZE_BYTES.max(if is_writable { top_alignment.offset_bytes } else { 1 })
        }
        _ => block_size_bytes,
    };
    if size_bytes == 0 {
        return Err(ImageError::Empty { path: options.path.clone() });
    }
    if !size_bytes.is_multiple_of(block_size_bytes.into()) {
        let path = options.path.clone();
        return Err(ImageError::Qcow2Ragged { path, size_bytes, block_size_bytes });
    }
    let volume = volume(parts, lower, options, table_cache_bytes, adopted)?;
    let cluster_bytes = volume.compression(0).map_or(0, |(_, cluster_bytes)| cluster_bytes);
    let can_discard = is_writable && options.discard && volume.can_zero(true);
    // The previous server still writes a file that it hands over, so it is not probed; that server made the same offer.
    let frees = || adopted || limits::can_punch_holes(&top_file, volume.files()[0].len_bytes());
    let discard = (can_discard && frees()).then(|| DiscardLimits::of_file(block_size_bytes, cluster_bytes));
    Ok(Image {
        claim: None,
        backing: Backing::Mapped(Arc::new(volume)),
        path: real,
        access: options.access,
        cache: options.cache,
        kind: FileKind::Regular,
        bounds: Bounds::new(size_bytes, block_size_bytes),
        // The engine reads whole blocks of the files and copies what is needed.
        alignment: Alignment::BUFFERED,
        topology: Topology::of_file(block_size_bytes, fs_block_bytes),
        discard,
        write_zeroes: is_writable.then(|| WriteZeroesLimits::new(discard.is_some())),
        foreign_format: None,
        adopted,
    })
}

fn chain_error(options: &ImageOptions, source: ChainError) -> ImageError {
    ImageError::Chain { path: options.path.clone(), source: Box::new(source) }
}

/// Opens the files of a chain.
struct ChainFiles<'a> {
    opener: &'a dyn Opener,
    options: &'a ImageOptions,
    locks: Locks,
    served: Option<Served<'a>>,
    /// The image itself, which is open.
    top: Option<OpenFile>,
}

impl qcow2::Opener for ChainFiles<'_> {
    type File = OpenFile;

    fn open(&mut self, path: &Path, role: Role) -> io::Result<Opened<OpenFile>> {
        let file = match self.top.take() {
            Some(top) if role == Role::Top => top,
            _ => self.open_named(path)?,
        };
        let id = qcow2::FileId { device: file.id.dev, inode: file.id.ino };
        Ok(Opened { file, id })
    }
}

impl<'a> ChainFiles<'a> {
    /// The layers that had to be opened, and those that are known.
    fn layers(&mut self) -> Result<(Vec<LayerParts<OpenFile>>, Option<Lower<'a>>), ImageError> {
        if let Some(volume) = self.served.and_then(|served| served.volume) {
            let (top, image) = self.top_and_served()?;
            return Ok((vec![top], Some(Lower { volume, image: image.into_layer_file() })));
        }
        let options = self.options;
        let chain = Chain::open(&options.path, DiskFormat::Qcow2, self);
        Ok((chain.map_err(|source| chain_error(options, source))?.into_parts(), None))
    }

    /// The top layer, and the served image below it, whose layers are known. So what the pause of a guest takes does not depend
    /// on their number.
    fn top_and_served(&mut self) -> Result<(LayerParts<OpenFile>, OpenFile), ImageError> {
        let path = &self.options.path;
        let (Some(top), Some(served)) = (self.top.take(), self.served) else {
            unreachable!("the top is opened over a served image")
        };
        let failed = |source| chain_error(self.options, ChainError::Image { image: path.clone(), source });
        let (file, header, l1) = qcow2::Image::open(top).map_err(failed)?.into_parts();
        let name = header.backing.as_ref().map(|backing| backing.name.as_slice());
        if name != Some(served.path.as_os_str().as_bytes()) {
            return Err(ImageError::NoOverlay { path: path.clone(), why: "another program has changed it" });
        }
        if served.volume.is_some_and(|volume| volume.layers() >= MAX_LAYERS) {
            return Err(chain_error(self.options, ChainError::TooDeep { path: served.path.to_owned() }));
        }
        let below = self.open_named(served.path).map_err(|source| {
            let (path, by) = (served.path.to_owned(), Some(path.clone()));
            chain_error(self.options, ChainError::Open { path, by, source })
        })?;
        let (path, size_bytes) = (path.clone(), header.size_bytes);
        let mapped = Some(MappedParts { header, l1, data_file: None });
        Ok((LayerParts { path, size_bytes, file, mapped }, below))
    }

    /// Opens a file that an image names.
    fn open_named(&self, path: &Path) -> io::Result<OpenFile> {
        let real = self.opener.canonical_path(path)?;
        self.allow(&real)?;
        let served = self.served.filter(|served| served.path == real).map(|served| served.id);
        let locks = if served.is_some() { Locks::Joined } else { self.locks };
        let options = ImageOptions { path: real, access: Access::ReadOnly, ..self.options.clone() };
        let file = OpenFile::open(self.opener, &options, locks).map_err(io::Error::other)?;
        overlay_mark::check_committed(path, &file.file).map_err(io::Error::other)?;
        if served.is_some_and(|served| served != file.id) {
            return Err(io::Error::other("another file has taken the name of the one that is served"));
        }
        // Another process may have changed a link after the check.
        if let Some(opened) = self.opener.path_of(file.file.as_fd())? {
            self.allow(&opened)?;
        }
        Ok(file)
    }

    fn allow(&self, real: &Path) -> io::Result<()> {
        let allows = |folder: &PathBuf| {
            self.opener.canonical_path(folder).is_ok_and(|folder| real.starts_with(folder))
        };
        if self.served.is_some_and(|served| served.path == real)
            || self.options.backing_folders.iter().any(allows)
        {
            return Ok(());
        }
        let text = "it must be in a folder of --backing-folders";
        Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
    }
}

/// A file that is open and locked.
#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: Arc<File>,
    id: FileId,
    alignment: Alignment,
    len_bytes: u64,
    is_regular: bool,
    /// The previous server handed the file over.
    adopted: bool,
}

impl OpenFile {
    /// Opens the image itself, which the previous server may have handed over with its lock.
    fn open_top(opener: &dyn Opener, options: &ImageOptions, locks: Locks) -> Result<Self, ImageError> {
        let top = Self::open(opener, options, locks)?;
        if locks == Locks::On && !top.adopted {
            overlay_mark::check(opener, &options.path, options.access, &top.file)?;
        }
        if options.access == Access::ReadWrite && !top.is_regular {
            return Err(ImageError::Qcow2OnDevice { path: options.path.clone() });
        }
        Ok(top)
    }

    fn table_file(&self) -> TableFile {
        TableFile::new(Arc::clone(&self.file), self.alignment)
    }

    fn open(opener: &dyn Opener, options: &ImageOptions, locks: Locks) -> Result<Self, ImageError> {
        let inspect = |what| move |source| ImageError::Inspect { path: options.path.clone(), what, source };
        let file = open_file(opener, options)?;
        let metadata = file.metadata().map_err(inspect("the type"))?;
        let kind = accept_kind(&options.path, metadata.file_type().into())?;
        let id = FileId::from(&metadata);
        let adopted = locks == Locks::On && opener.comes_locked(&options.path);
        if adopted || locks == Locks::Joined {
            // As for a raw image: the open file descriptions of the previous server, or of this process, do not conflict.
            lock::join(&file, options.access)
                .map_err(|source| ImageError::Lock { path: options.path.clone(), source })?;
        } else if locks == Locks::On {
            take_lock(opener, options, &file, id)?;
        }
        let len_bytes = size_bytes(&file, kind).map_err(inspect("the size"))?;
        let device = device_under(opener, kind, &metadata);
        let alignment = alignment(options, &file, len_bytes, device.as_ref())?;
        let is_regular = kind == FileKind::Regular;
        Ok(Self {
            path: options.path.clone(),
            file: Arc::new(file),
            id,
            alignment,
            len_bytes,
            is_regular,
            adopted,
        })
    }

    fn into_layer_file(self) -> LayerFile {
        LayerFile::new(self.path, self.file, self.alignment, self.len_bytes)
    }
}

impl ReadAt for OpenFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.table_file().read_at(offset, buffer)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len_bytes)
    }
}

/// The layers below the top, which another volume has.
struct Lower<'a> {
    volume: &'a Volume,
    /// Its top, open for reading.
    image: LayerFile,
}

fn volume(
    parts: Vec<LayerParts<OpenFile>>,
    lower: Option<Lower<'_>>,
    options: &ImageOptions,
    table_cache_bytes: u64,
    adopted: bool,
) -> Result<Volume, ImageError> {
    let need = |part: &LayerParts<OpenFile>| {
        let header = part.mapped.as_ref().map(|mapped| &mapped.header);
        header.map_or(0, |header| {
            header.geometry.l1_entries_for(header.size_bytes).saturating_mul(header.geometry.cluster_bytes())
        })
    };
    let known = lower.iter().flat_map(|lower| lower.volume.needs());
    let needs: Vec<u64> = parts.iter().map(need).chain(known).collect();
    let mut shares = divide(table_cache_bytes, &needs);
    let writable = match parts.first() {
        Some(top) if options.access == Access::ReadWrite => Some(tables(top, adopted)?),
        _ => None,
    };
    if let (Some(_), Some(share)) = (&writable, shares.first_mut()) {
        *share = (*share).max(LEAST_WRITABLE_CACHE_BYTES);
    }
    let mut new = Parts::default();
    let mut shares = shares.into_iter();
    for (part, share) in parts.into_iter().zip(shares.by_ref()) {
        add_layer(part, share, &mut new.files, &mut new.layers);
    }
    if let Some(Lower { volume, image }) = lower {
        new.copy_below(volume, image, shares.as_slice());
    }
    Ok(Volume::new(new.files, new.layers, writable))
}

/// Checks that the image can be written, unless the previous server still writes it.
fn tables(top: &LayerParts<OpenFile>, adopted: bool) -> Result<(Header, Tables), ImageError> {
    let Some(mapped) = &top.mapped else { unreachable!("the top layer is opened as qcow2") };
    let header = mapped.header.clone();
    if adopted {
        return Ok((header, Tables::Theirs));
    }
    let unwritable =
        |source| ImageError::Qcow2Unwritable { path: top.path.clone(), source: Box::new(source) };
    let writer = Writer::new(top.file.table_file(), mapped.header.clone(), mapped.l1.clone());
    Ok((header, Tables::Read(Box::new(writer.map_err(unwritable)?))))
}

fn add_layer(
    part: LayerParts<OpenFile>,
    cache_bytes: u64,
    files: &mut Vec<LayerFile>,
    layers: &mut Vec<Layer>,
) {
    let LayerParts { path, size_bytes, file, mapped } = part;
    let at = files.len();
    files.push(file.into_layer_file());
    let mut layer =
        Layer { path, size_bytes, file: at, data: at, mapping: None, is_told: AtomicBool::new(false) };
    if let Some(MappedParts { header, l1, data_file }) = mapped {
        if let Some(data_file) = data_file {
            layer.data = files.len();
            files.push(data_file.into_layer_file());
        }
        layer.mapping = Some(Mapping::new(header.geometry, header.compression, &l1, cache_bytes));
    }
    layers.push(layer);
}
