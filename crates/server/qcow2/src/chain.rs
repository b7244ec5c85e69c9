//! An image with its backing files and data files, opened through the caller's [`Opener`].
//!
//! `path, format → open → Header → backing name → resolve → open → … → layers, the top first`
//!
//! - A name in an image is untrusted. This file resolves it; the opener decides whether the path is allowed.
//! - Formats are never guessed: each image with a backing file must name its format.
//! - No file appears twice, so there is no loop, and there are at most [`MAX_LAYERS`].

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::{FormatError, read_padded};
use crate::header::{Backing, Header};
use crate::image::Image;
use crate::mapping::RunKind;
use crate::read_at::ReadAt;

/// The most files with guest data, one on top of the other.
pub const MAX_LAYERS: usize = 16;

/// Opens the files of a chain, if they are allowed.
pub trait Opener {
    /// An open file.
    type File: ReadAt;

    /// Opens a file for reading.
    ///
    /// # Errors
    /// The file cannot be opened, or the path is not allowed.
    fn open(&mut self, path: &Path, role: Role) -> io::Result<Opened<Self::File>>;
}

/// Who names a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The user.
    Top,
    /// An image, as its backing file.
    Backing,
    /// An image, as its external data file.
    DataFile,
}

/// What an [`Opener`] returns.
#[derive(Debug)]
pub struct Opened<F> {
    /// The file.
    pub file: F,
    /// The same for all names of a file.
    pub id: FileId,
}

/// Identifies a file on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    /// The device of the file's file system.
    pub device: u64,
    /// The file's number there.
    pub inode: u64,
}

/// The formats that a layer may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFormat {
    /// The guest's bytes.
    Raw,
    /// This crate's.
    Qcow2,
}

impl DiskFormat {
    /// The format's name in images.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }

    /// From the format's name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "raw" => Some(Self::Raw),
            "qcow2" => Some(Self::Qcow2),
            _ => None,
        }
    }
}

/// Why a chain cannot be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// An image is not as it should be.
    #[error("image {}", image.display())]
    Image {
        /** Its path. */
        image: PathBuf,
        /** What is wrong. */
        source: FormatError,
    },
    /// A file cannot be opened.
    #[error("{}{} cannot be opened", path.display(), named_by(by))]
    Open {
        /** Its path. */
        path: PathBuf,
        /** The image that names it. */
        by: Option<PathBuf>,
        /** The opener's error. */
        source: io::Error,
    },
    /// The format would have to be guessed.
    #[error(
        "image {} does not say which format its backing file {name} has: `qemu-img rebase -u -b {name} -F FORMAT {}` \
         adds it", image.display(), image.display()
    )]
    NoBackingFormat {
        /** Its path. */
        image: PathBuf,
        /** The backing file. */
        name: String,
    },
    /// Another format.
    #[error("image {} has a backing file of format {format}, allowed are raw and qcow2", image.display())]
    BackingFormat {
        /** Its path. */
        image: PathBuf,
        /** As named. */
        format: String,
    },
    /// A name that is not one of a file.
    #[error("image {} names {name}, allowed are paths of files", image.display())]
    NotAPath {
        /** Its path. */
        image: PathBuf,
        /** As named. */
        name: String,
    },
    /// No name of the data file.
    #[error("image {} does not name its external data file", image.display())]
    NoDataFile {
        /** Its path. */
        image: PathBuf,
    },
    /// A file for the second time.
    #[error("image {} names {}, which the chain already contains", image.display(), path.display())]
    Twice {
        /** Its path. */
        image: PathBuf,
        /** The file. */
        path: PathBuf,
    },
    /// Too many backing files.
    #[error("image {} would be layer {}, allowed are {MAX_LAYERS}", path.display(), MAX_LAYERS + 1)]
    TooDeep {
        /** The first that is too many. */
        path: PathBuf,
    },
}

fn named_by(image: &Option<PathBuf>) -> String {
    image.as_ref().map(|image| format!(", which image {} names,", image.display())).unwrap_or_default()
}

/// An image, or one of its backing files.
#[derive(Debug)]
pub struct Layer<F> {
    /// Where it was opened.
    pub path: PathBuf,
    content: Content<F>,
}

#[derive(Debug)]
enum Content<F> {
    Raw { file: F, size_bytes: u64 },
    Qcow2 { image: Box<Image<F>>, data_file: Option<F> },
}

impl<F: ReadAt> Layer<F> {
    /// What the layer describes.
    pub fn size_bytes(&self) -> u64 {
        match &self.content {
            Content::Raw { size_bytes, .. } => *size_bytes,
            Content::Qcow2 { image, .. } => image.header().size_bytes,
        }
    }

    /// The image, unless it is raw.
    pub fn image(&self) -> Option<&Image<F>> {
        match &self.content {
            Content::Raw { .. } => None,
            Content::Qcow2 { image, .. } => Some(image),
        }
    }

    fn failed(&self) -> impl Fn(FormatError) -> ChainError + use<F> {
        let image = self.path.clone();
        move |source| ChainError::Image { image: image.clone(), source }
    }
}

/// A layer's files and tables, for a program that maps requests itself.
#[derive(Debug)]
pub struct LayerParts<F> {
    /// Where it was opened.
    pub path: PathBuf,
    /// What the layer describes.
    pub size_bytes: u64,
    /// The file.
    pub file: F,
    /// `None`: the layer is raw.
    pub mapped: Option<MappedParts<F>>,
}

/// The tables of a qcow2 layer.
#[derive(Debug)]
pub struct MappedParts<F> {
    /// The header.
    pub header: Header,
    /// The active L1 table, as stored, in the host's byte order.
    pub l1: Vec<u64>,
    /// The external data file.
    pub data_file: Option<F>,
}

impl<F: ReadAt> Layer<F> {
    fn into_parts(self) -> LayerParts<F> {
        let path = self.path;
        match self.content {
            Content::Raw { file, size_bytes } => LayerParts { path, size_bytes, file, mapped: None },
            Content::Qcow2 { image, data_file } => {
                let (file, header, l1) = image.into_parts();
                let size_bytes = header.size_bytes;
                LayerParts { path, size_bytes, file, mapped: Some(MappedParts { header, l1, data_file }) }
            }
        }
    }
}

/// An image with its backing files.
#[derive(Debug)]
pub struct Chain<F> {
    layers: Vec<Layer<F>>,
}

impl<F: ReadAt> Chain<F> {
    /// Opens the image at `path` and all files that it needs.
    ///
    /// # Errors
    /// A file cannot be opened, is not allowed, or is not as it should be.
    pub fn open<O: Opener<File = F>>(
        path: &Path,
        format: DiskFormat,
        opener: &mut O,
    ) -> Result<Self, ChainError> {
        let mut opening = Opening { opener, seen: Vec::new() };
        let mut layers: Vec<Layer<F>> = Vec::new();
        let mut next = Some((path.to_owned(), format));
        while let Some((path, format)) = next.take() {
            if layers.len() == MAX_LAYERS {
                return Err(ChainError::TooDeep { path });
            }
            let by = layers.last().map(|layer| layer.path.clone());
            let layer = opening.layer(path, format, by)?;
            next = layer
                .image()
                .and_then(|image| image.header().backing.as_ref())
                .map(|backing| backing_file(&layer.path, backing))
                .transpose()?;
            layers.push(layer);
        }
        Ok(Self { layers })
    }

    /// All layers, the top first. There is at least one.
    pub fn layers(&self) -> &[Layer<F>] {
        &self.layers
    }

    /// All layers, taken apart, the top first.
    #[must_use]
    pub fn into_parts(self) -> Vec<LayerParts<F>> {
        self.layers.into_iter().map(Layer::into_parts).collect()
    }

    /// The guest's disk.
    pub fn size_bytes(&self) -> u64 {
        self.layers.first().map_or(0, Layer::size_bytes)
    }

    /// Reads the guest's bytes.
    ///
    /// # Errors
    /// A layer cannot be read.
    ///
    /// # Panics
    /// The range ends past the disk.
    pub fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> Result<(), ChainError> {
        let end = offset.checked_add(buffer.len() as u64);
        assert!(end.is_some_and(|end| end <= self.size_bytes()), "a range past the end of the disk");
        read(&mut self.layers, offset, buffer)
    }
}

struct Opening<'a, O> {
    opener: &'a mut O,
    seen: Vec<FileId>,
}

impl<O: Opener> Opening<'_, O> {
    fn layer(
        &mut self,
        path: PathBuf,
        format: DiskFormat,
        by: Option<PathBuf>,
    ) -> Result<Layer<O::File>, ChainError> {
        let role = if by.is_some() { Role::Backing } else { Role::Top };
        let file = self.file(&path, role, by)?;
        let failed = |source| ChainError::Image { image: path.clone(), source };
        let content = match format {
            DiskFormat::Raw => {
                let size_bytes = file.len_bytes();
                let read = |source| failed(FormatError::Read { what: "length", offset: 0, source });
                Content::Raw { size_bytes: size_bytes.map_err(read)?, file }
            }
            DiskFormat::Qcow2 => {
                let image = Box::new(Image::open(file).map_err(failed)?);
                let data_file = self.data_file(&path, &image)?;
                Content::Qcow2 { image, data_file }
            }
        };
        Ok(Layer { path, content })
    }

    fn data_file(&mut self, path: &Path, image: &Image<O::File>) -> Result<Option<O::File>, ChainError> {
        let header = image.header();
        if !header.incompatible.external_data_file {
            return Ok(None);
        }
        let name = header.extensions.data_file.as_ref();
        let name = name.ok_or_else(|| ChainError::NoDataFile { image: path.to_owned() })?;
        let data_file = resolve(path, name)?;
        self.file(&data_file, Role::DataFile, Some(path.to_owned())).map(Some)
    }

    fn file(&mut self, path: &Path, role: Role, by: Option<PathBuf>) -> Result<O::File, ChainError> {
        let Opened { file, id } = match self.opener.open(path, role) {
            Ok(opened) => opened,
            Err(source) => return Err(ChainError::Open { path: path.to_owned(), by, source }),
        };
        match by {
            Some(image) if self.seen.contains(&id) => Err(ChainError::Twice { image, path: path.to_owned() }),
            _ => {
                self.seen.push(id);
                Ok(file)
            }
        }
    }
}

/// Path and format of the next layer.
fn backing_file(image: &Path, backing: &Backing) -> Result<(PathBuf, DiskFormat), ChainError> {
    let Some(format) = &backing.format else {
        let name = backing.name.escape_ascii().to_string();
        return Err(ChainError::NoBackingFormat { image: image.to_owned(), name });
    };
    let unknown = || ChainError::BackingFormat { image: image.to_owned(), format: format.clone() };
    Ok((resolve(image, &backing.name)?, DiskFormat::of_name(format).ok_or_else(unknown)?))
}

/// A name is relative to the folder of the image. QEMU takes `word:rest` for a protocol, and so this is refused, as are names
/// of folders.
fn resolve(image: &Path, name: &[u8]) -> Result<PathBuf, ChainError> {
    let mut parts = name.split(|byte| *byte == b'/');
    let is_folder = matches!(parts.clone().next_back(), None | Some(b"" | b"." | b".."));
    if is_folder || parts.next().is_some_and(|part| part.contains(&b':')) {
        let name = name.escape_ascii().to_string();
        return Err(ChainError::NotAPath { image: image.to_owned(), name });
    }
    Ok(image.parent().unwrap_or(Path::new("")).join(OsStr::from_bytes(name)))
}

/// Reads from the first layer, and from the others what it lacks. At most [`MAX_LAYERS`] calls are inside each other.
fn read<F: ReadAt>(layers: &mut [Layer<F>], offset: u64, buffer: &mut [u8]) -> Result<(), ChainError> {
    let Some((layer, below)) = layers.split_first_mut() else {
        buffer.fill(0);
        return Ok(());
    };
    // A backing file may be shorter than what lies on it.
    let inside = layer.size_bytes().saturating_sub(offset).min(buffer.len() as u64);
    let (mut buffer, past) = buffer.split_at_mut(usize::try_from(inside).unwrap_or(usize::MAX));
    past.fill(0);
    let mut at = offset;
    while !buffer.is_empty() {
        let (done, is_below) = layer.read_run(at, buffer)?;
        let (run, rest) = std::mem::take(&mut buffer).split_at_mut(done);
        if is_below {
            read(below, at, run)?;
        }
        (at, buffer) = (at + done as u64, rest);
    }
    Ok(())
}

impl<F: ReadAt> Layer<F> {
    /// Reads the first run. Returns its length, and whether its bytes are in the layers below.
    fn read_run(&mut self, at: u64, buffer: &mut [u8]) -> Result<(usize, bool), ChainError> {
        let failed = self.failed();
        let (image, data_file) = match &mut self.content {
            Content::Raw { file, .. } => {
                read_padded(file, "data", at, buffer).map_err(failed)?;
                return Ok((buffer.len(), false));
            }
            Content::Qcow2 { image, data_file } => (image, data_file),
        };
        let run = image.next_run(at, buffer.len() as u64).map_err(&failed)?;
        let len = usize::try_from(run.len_bytes).unwrap_or(usize::MAX).min(buffer.len());
        let run_buffer = &mut buffer[..len];
        match run.kind {
            // The end of a file that is shorter than its last cluster reads as zeroes.
            RunKind::Data { host_offset } => {
                let file = data_file.as_ref().unwrap_or(image.file());
                read_padded(file, "data", host_offset, run_buffer).map_err(failed)?;
            }
            RunKind::Zero => run_buffer.fill(0),
            RunKind::Unallocated => return Ok((len, true)),
            RunKind::Compressed(cluster) => {
                let start = usize::try_from(image.header().geometry.in_cluster(at)).unwrap_or(usize::MAX);
                let whole = image.decompress(cluster).map_err(failed)?;
                run_buffer.copy_from_slice(&whole[start..start + len]);
            }
        }
        Ok((len, false))
    }
}
