//! One open, locked image, and the disk properties that the rest of the server uses.
//!
//! `options -> open (or create) -> lock -> claim a device -> size, alignment, block size -> limits -> Image`
//!
//! If any step fails, a file that was created for the image is removed again.

mod clone;
mod create_qcow2;
mod export;
pub mod inspect;
pub mod location;
mod mapped;
mod merge;
mod overlay;
mod overlay_mark;
mod rbd;
mod resize;

use std::fs::{File, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{major, minor};
use sha2::{Digest, Sha256};

use self::location::{Location, RbdOptions};
use crate::backing::Backing;
use crate::cache_mode::CacheMode;
use crate::error::ImageError;
use crate::file::{Access, FileId, FileKind};
use crate::foreign;
use crate::geometry::{self, Alignment, MAX_BLOCK_SIZE_BYTES, MIN_BLOCK_SIZE_BYTES, Topology};
use crate::limits::{self, DiscardLimits, WriteZeroesLimits};
use crate::lock::{self, HolderList};
use crate::new_image::{NewBacking, NewImage};
use crate::opener::{OpenRequest, Opener};
use crate::range::{Bounds, CheckedRange, RangeError, SECTOR_BYTES};
use crate::sysfs_queue::QueueAttributes;

/// Bytes of the hash in a default serial number: 20 hex digits, `VIRTIO_BLK_ID_BYTES`, virtio 1.3 §5.2.6.
const SERIAL_HASH_BYTES: usize = 10;
/// Long enough for the I/O of a killed server to finish in the kernel.
const DEFAULT_LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// Long enough for a server to be restarted; as long as Linux guests wait for many disks before they report an error.
const DEFAULT_NBD_TIMEOUT: Duration = Duration::from_secs(30);

/// How long to retry a claim: an exiting process releases its lock and its claim at slightly different times.
const CLAIM_GRACE: Duration = Duration::from_secs(1);
const CLAIM_RETRY: Duration = Duration::from_millis(20);

/// The user's options.
#[derive(Debug, Clone)]
pub struct ImageOptions {
    /// The image: its path or, if it is on another machine, its URI.
    pub path: PathBuf,
    /// Where the image is.
    pub location: Location,
    /// For reading only, or for reading and writing.
    pub access: Access,
    /// Whether I/O bypasses the page cache.
    pub cache: CacheMode,
    /// Logical block size; `None`: the alignment that direct I/O needs, at least 512.
    pub block_size: Option<u32>,
    /// Offer discard if it works. Turning it off keeps a preallocated image allocated.
    pub discard: bool,
    /// Folders in which the files may be that a qcow2 image names: its backing files and its data file.
    pub backing_folders: Vec<PathBuf>,
    /// Create the image with this size. The file must not exist yet.
    pub create_bytes: Option<u64>,
    /// What lies below a qcow2 image that is created.
    pub new_backing: Option<NewBacking>,
    /// How long a request to an NBD server may stay without a reply.
    pub nbd_timeout: Duration,
    /// How to reach and open an RBD image.
    pub rbd: RbdOptions,
    /// How long to wait for other openers to release the image's lock. Zero: do not wait.
    pub lock_timeout: Duration,
}

impl ImageOptions {
    /// Options for an existing image, for reading and writing, with the defaults of the command line.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            location: Location::Host,
            access: Access::ReadWrite,
            cache: CacheMode::None,
            block_size: None,
            discard: true,
            backing_folders: Vec::new(),
            create_bytes: None,
            new_backing: None,
            nbd_timeout: DEFAULT_NBD_TIMEOUT,
            rbd: RbdOptions::default(),
            lock_timeout: DEFAULT_LOCK_TIMEOUT,
        }
    }

    /// Checks the options alone, before anything is opened or created: whether any image could be opened with
    /// them.
    ///
    /// # Errors
    /// [`ImageError`], as from [`Image::open`].
    pub fn check(&self) -> Result<(), ImageError> {
        refuse_impossible(self)
    }

    fn open_request(&self) -> OpenRequest {
        let direct = self.cache.is_direct();
        OpenRequest { access: self.access, direct, create: self.create_bytes, exclusive: false }
    }
}

/// How the image's size has changed since it was last read, in sectors of 512 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CapacityChange {
    /// The size has not changed.
    Unchanged,
    /// Larger; the new capacity is in force.
    Grown {
        /** The previous capacity. */
        from: u64,
        /** The new capacity. */
        to: u64,
    },
    /// Smaller. The capacity does not change, because a disk must not shrink under its guest; reads of the missing part
    /// fail.
    Shrunk {
        /** The capacity, still in force. */
        from: u64,
        /** The new size. */
        to: u64,
    },
}

/// One raw disk image, open and locked. The lock is released when the last user of [`Image::file`] drops it.
#[derive(Debug)]
pub struct Image {
    /// Keeps the kernel from mounting a block device that we write to. Dropped before the lock.
    claim: Option<OwnedFd>,
    backing: Backing,
    path: PathBuf,
    access: Access,
    cache: CacheMode,
    kind: FileKind,
    bounds: Bounds,
    alignment: Alignment,
    topology: Topology,
    discard: Option<DiscardLimits>,
    write_zeroes: Option<WriteZeroesLimits>,
    foreign_format: Option<&'static str>,
    /// The previous server handed the image over.
    adopted: bool,
}

impl Image {
    /// Opens or creates an image, and locks it.
    ///
    /// Blocks for up to `options.lock_timeout` while another opener holds the lock.
    ///
    /// # Errors
    /// [`ImageError`], one variant per reason. A file created for this call is removed on failure.
    pub fn open(opener: &dyn Opener, options: &ImageOptions) -> Result<Self, ImageError> {
        refuse_impossible(options)?;
        let file = Arc::new(open_file(opener, options)?);
        let made = options.create_bytes.map(|_| NewImage::new(opener, &options.path, &file));
        let image = Self::examine(opener, options, file)?;
        made.into_iter().for_each(NewImage::keep);
        Ok(image)
    }

    fn examine(opener: &dyn Opener, options: &ImageOptions, file: Arc<File>) -> Result<Self, ImageError> {
        let unknown = |source| ImageError::Inspect { path: options.path.clone(), what: "the type", source };
        let metadata = file.metadata().map_err(unknown)?;
        accept_kind(&options.path, metadata.file_type().into())?;
        let adopted = opener.comes_locked(&options.path);
        if adopted {
            // The lock is held by an open file description that we share with the previous server. That server's other
            // open file descriptions do not conflict, so the opposite bytes are not tested.
            lock::join(&file, options.access)
                .map_err(|source| ImageError::Lock { path: options.path.clone(), source })?;
        } else {
            take_lock(opener, options, &file, FileId::from(&metadata))?;
            overlay_mark::check(opener, &options.path, options.access, &file)?;
        }
        Ok(Self { adopted, ..Self::examine_locked(opener, options, file)? })
    }

    /// `file` has its lock.
    fn examine_locked(
        opener: &dyn Opener,
        options: &ImageOptions,
        file: Arc<File>,
    ) -> Result<Self, ImageError> {
        let inspect = |what| move |source| ImageError::Inspect { path: options.path.clone(), what, source };
        let metadata = file.metadata().map_err(inspect("the type"))?;
        let kind = metadata.file_type().into();
        let claim = claim(opener, options, kind)?;
        let Layout { size_bytes, device, alignment, block_size_bytes, foreign_format } =
            Layout::read(opener, options, &file, &metadata)?;

        let fs_block_bytes = geometry::fs_block_bytes(&file);
        let whole_device = device.filter(|_| kind == FileKind::BlockDevice);
        let discard = match whole_device {
            _ if options.access == Access::ReadOnly || !options.discard => None,
            Some(device) => DiscardLimits::of_device(block_size_bytes, &device),
            None if kind == FileKind::BlockDevice => None,
            None => limits::can_punch_holes(&file, size_bytes)
                .then(|| DiscardLimits::of_file(block_size_bytes, fs_block_bytes)),
        };
        let writable = options.access == Access::ReadWrite;
        Ok(Self {
            claim,
            path: opener.canonical_path(&options.path).map_err(inspect("the real path"))?,
            access: options.access,
            cache: options.cache,
            kind,
            bounds: Bounds::new(size_bytes, block_size_bytes),
            alignment,
            topology: match whole_device {
                Some(device) => Topology::of_device(block_size_bytes, &device),
                None => Topology::of_file(block_size_bytes, fs_block_bytes),
            },
            discard,
            write_zeroes: writable.then(|| WriteZeroesLimits::new(discard.is_some())),
            foreign_format,
            adopted: false,
            backing: Backing::File(file),
        })
    }

    /// Checks a guest's range: whole logical blocks, inside the capacity. Runs for each request.
    ///
    /// # Errors
    /// [`RangeError`]: overflow, past the end, or not in whole blocks.
    #[inline]
    pub fn check(&self, sector: u64, len_bytes: u64) -> Result<CheckedRange, RangeError> {
        self.bounds.check(sector, len_bytes)
    }

    /// What holds the image's data. The lock is held until the backing's last user drops it.
    #[must_use]
    pub fn backing(&self) -> &Backing {
        &self.backing
    }

    /// The open file; `None` for a disk on another machine.
    #[must_use]
    pub fn file(&self) -> Option<&Arc<File>> {
        self.backing.file()
    }

    /// The file that holds the image's lock, for a server that takes the disk over. `None`: that server opens the image
    /// itself.
    #[must_use]
    pub fn file_with_lock(&self) -> Option<&Arc<File>> {
        match &self.backing {
            Backing::File(file) => Some(file),
            Backing::Mapped(volume) => volume.writable_file(),
            Backing::Nbd(_) | Backing::Rbd(_) => None,
        }
    }

    /// The descriptor that keeps the kernel from mounting a block device that we write to.
    #[must_use]
    pub fn claim(&self) -> Option<&OwnedFd> {
        self.claim.as_ref()
    }

    /// Opens the same file again, with its own open file description, the same access and the same lock. A disk on
    /// another machine needs no second opening.
    ///
    /// # Errors
    /// [`Opener::reopen`]'s; the lock's.
    pub fn reopen(&self, opener: &dyn Opener) -> io::Result<Backing> {
        match &self.backing {
            Backing::File(file) => {
                let file = File::from(opener.reopen(file.as_fd())?);
                lock::join(&file, self.access)?;
                Ok(Backing::File(Arc::new(file)))
            }
            // The workers of a mapped disk share its descriptions: docs/decisions/0065-written-qcow2.md.
            shared @ (Backing::Nbd(_) | Backing::Rbd(_) | Backing::Mapped(_)) => Ok(shared.clone()),
        }
    }

    /// The image's absolute path at the time of opening, with symbolic links resolved.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.access == Access::ReadOnly
    }

    /// The cache mode that the image was opened with.
    #[must_use]
    pub fn cache(&self) -> CacheMode {
        self.cache
    }

    /// Whether the image is a block device.
    #[must_use]
    pub fn is_block_device(&self) -> bool {
        self.kind == FileKind::BlockDevice
    }

    /// The logical block size offered to the guest, in bytes.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.bounds.block_size_bytes()
    }

    /// The capacity, in sectors of 512 bytes.
    #[must_use]
    pub fn capacity_sectors(&self) -> u64 {
        self.bounds.capacity_bytes() / SECTOR_BYTES
    }

    /// The required alignment of each transfer's memory and file offset.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// The format that the image seems to have instead of raw, such as "qcow2". This is a guess from the
    /// first bytes, which a guest may have written itself.
    #[must_use]
    pub fn foreign_format(&self) -> Option<&'static str> {
        self.foreign_format
    }

    /// Whether the previous server handed the open image over.
    #[must_use]
    pub fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Topology hints for the guest.
    #[must_use]
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// `None`: discard is not offered (switched off, read-only, or it would free nothing).
    #[must_use]
    pub fn discard_limits(&self) -> Option<DiscardLimits> {
        self.discard
    }

    /// `None`: the image is read-only.
    #[must_use]
    pub fn write_zeroes_limits(&self) -> Option<WriteZeroesLimits> {
        self.write_zeroes
    }

    /// The default serial number: 20 hex digits of the SHA-256 of the image's path.
    #[must_use]
    pub fn default_serial(&self) -> String {
        use std::os::unix::ffi::OsStrExt;
        let digest = Sha256::digest(self.path.as_os_str().as_bytes());
        digest.iter().take(SERIAL_HASH_BYTES).map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Properties that an open file's contents and file system determine.
struct Layout {
    size_bytes: u64,
    /// The block device that the file is, or that its file system is on.
    device: Option<QueueAttributes>,
    alignment: Alignment,
    block_size_bytes: u32,
    foreign_format: Option<&'static str>,
}

impl Layout {
    fn read(
        opener: &dyn Opener,
        options: &ImageOptions,
        file: &File,
        metadata: &Metadata,
    ) -> Result<Self, ImageError> {
        let kind = metadata.file_type().into();
        let unreadable =
            |source| ImageError::Inspect { path: options.path.clone(), what: "the size", source };
        let size_bytes = size_bytes(file, kind).map_err(unreadable)?;
        if size_bytes == 0 {
            return Err(ImageError::Empty { path: options.path.clone() });
        }
        let device = device_under(opener, kind, metadata);
        let alignment = alignment(options, file, size_bytes, device.as_ref())?;
        let block_size_bytes = block_size(options, file, alignment, device.as_ref())?;
        let foreign_format = foreign::format_of(file);
        refuse_ragged(options, size_bytes, block_size_bytes, foreign_format)?;
        Ok(Self { size_bytes, device, alignment, block_size_bytes, foreign_format })
    }
}

/// Refuses options that no image can satisfy, before anything is opened or created.
fn refuse_impossible(options: &ImageOptions) -> Result<(), ImageError> {
    let path = || options.path.clone();
    if let Some(block_size_bytes) = options.block_size
        && !geometry::is_block_size(block_size_bytes)
    {
        return Err(ImageError::BlockSize { block_size_bytes });
    }
    match options.create_bytes {
        None => Ok(()),
        Some(_) if options.access == Access::ReadOnly => Err(ImageError::CreateReadOnly { path: path() }),
        Some(size_bytes) => {
            let block_size_bytes = options.block_size.unwrap_or(MIN_BLOCK_SIZE_BYTES);
            refuse_ragged(options, size_bytes, block_size_bytes, None)
        }
    }
}

fn refuse_ragged(
    options: &ImageOptions,
    size_bytes: u64,
    block_size_bytes: u32,
    foreign_format: Option<&'static str>,
) -> Result<(), ImageError> {
    if size_bytes > 0 && size_bytes.is_multiple_of(u64::from(block_size_bytes)) {
        return Ok(());
    }
    let path = options.path.clone();
    Err(match options.create_bytes {
        Some(_) => ImageError::CreateRagged { path, size_bytes, block_size_bytes },
        None => ImageError::Ragged { path, size_bytes, block_size_bytes, foreign_format },
    })
}

fn accept_kind(path: &Path, kind: FileKind) -> Result<FileKind, ImageError> {
    match kind {
        FileKind::Regular | FileKind::BlockDevice => Ok(kind),
        _ => Err(ImageError::NotAnImage { path: path.to_owned(), kind }),
    }
}

fn open_file(opener: &dyn Opener, options: &ImageOptions) -> Result<File, ImageError> {
    if options.create_bytes.is_none() {
        // Check the type before the open, because an open can have effects on other devices (rewind a tape).
        let kind = opener.file_kind(&options.path).map_err(|error| explain(opener, options, error))?;
        accept_kind(&options.path, kind)?;
    }
    let fd = opener.open_image(&options.path, &options.open_request());
    fd.map(File::from).map_err(|error| explain(opener, options, error))
}

/// Converts the kernel's error number to an error that tells the user what to do.
fn explain(opener: &dyn Opener, options: &ImageOptions, source: io::Error) -> ImageError {
    use io::ErrorKind::{AlreadyExists, ExecutableFileBusy, InvalidInput, NotFound};
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem, ResourceBusy};
    let path = options.path.clone();
    match (source.kind(), options.create_bytes) {
        // An error without the kernel's number comes from the opener's own policy.
        (PermissionDenied, _) if source.raw_os_error().is_none() => ImageError::NotAllowed { path, source },
        (InvalidInput, _) if options.cache.is_direct() => ImageError::DirectRefused { path },
        (AlreadyExists, Some(_)) => ImageError::Exists { path },
        (_, Some(size_bytes)) => ImageError::Create { path, size_bytes, source },
        (ResourceBusy, None) => ImageError::Claimed { path },
        (NotFound, None) => ImageError::Missing { path },
        (PermissionDenied | ReadOnlyFilesystem | ExecutableFileBusy, None) if readable(opener, options) => {
            ImageError::Unwritable { path, source }
        }
        (PermissionDenied, None) => ImageError::Unreadable { path, source },
        _ => ImageError::Open { path, source },
    }
}

/// Whether the image could be opened with `--readonly`.
fn readable(opener: &dyn Opener, options: &ImageOptions) -> bool {
    let request = OpenRequest { access: Access::ReadOnly, ..options.open_request() };
    options.access == Access::ReadWrite && opener.open_image(&options.path, &request).is_ok()
}

fn take_lock(opener: &dyn Opener, options: &ImageOptions, file: &File, id: FileId) -> Result<(), ImageError> {
    let path = || options.path.clone();
    let waited = options.lock_timeout;
    let on_wait = || {
        let holders = opener.lock_holders(id);
        tracing::warn!(
            path = %options.path.display(),
            holders = %HolderList(&holders),
            timeout = ?waited,
            "waiting for the image's lock; Ctrl-C gives up; to change a running server use `bareblk ctl`, to replace \
             it use --take-over"
        );
    };
    match lock::acquire(file, options.access, waited, on_wait) {
        // A new image that was not wanted in the end, and was removed during the wait.
        Ok(true) if file.metadata().is_ok_and(|metadata| metadata.nlink() == 0) => {
            Err(ImageError::Missing { path: path() })
        }
        Ok(true) => Ok(()),
        Ok(false) => Err(ImageError::Locked { path: path(), holders: opener.lock_holders(id), waited }),
        Err(source) => Err(ImageError::Lock { path: path(), source }),
    }
}

/// Keeps the kernel from mounting a block device that we write to; `None` if no claim is needed. Called after the lock
/// is taken: a server that ends releases its lock and its claim together.
fn claim(opener: &dyn Opener, options: &ImageOptions, kind: FileKind) -> Result<Option<OwnedFd>, ImageError> {
    if kind != FileKind::BlockDevice || options.access == Access::ReadOnly {
        return Ok(None);
    }
    let (access, start) = (Access::ReadOnly, Instant::now());
    let request = OpenRequest { access, direct: false, create: None, exclusive: true };
    loop {
        match opener.open_image(&options.path, &request) {
            Ok(claim) => return Ok(Some(claim)),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && start.elapsed() < CLAIM_GRACE => {
                std::thread::sleep(CLAIM_RETRY);
            }
            Err(error) => return Err(explain(opener, options, error)),
        }
    }
}

fn size_bytes(mut file: &File, kind: FileKind) -> io::Result<u64> {
    match kind {
        // `stat` reports size 0 for every block device. No other code uses the file position.
        FileKind::BlockDevice => file.seek(SeekFrom::End(0)),
        _ => Ok(file.metadata()?.len()),
    }
}

/// The block device that the image is, or that its file system is on, if there is one.
fn device_under(opener: &dyn Opener, kind: FileKind, metadata: &Metadata) -> Option<QueueAttributes> {
    let device = if kind == FileKind::BlockDevice { metadata.rdev() } else { metadata.dev() };
    opener.queue_attributes(major(device), minor(device)).ok()
}

fn alignment(
    options: &ImageOptions,
    file: &File,
    size_bytes: u64,
    device: Option<&QueueAttributes>,
) -> Result<Alignment, ImageError> {
    if !options.cache.is_direct() {
        return Ok(Alignment::BUFFERED);
    }
    let path = || options.path.clone();
    let alignment = match geometry::told_alignment(file) {
        Some(Alignment { offset_bytes: 0, .. }) => return Err(ImageError::DirectRefused { path: path() }),
        Some(told) => told,
        None => geometry::probe_alignment(file, size_bytes, device)
            .map_err(|source| ImageError::Inspect { path: path(), what: "the beginning", source })?
            .ok_or_else(|| ImageError::DirectTooCoarse { path: path(), offset_bytes: 0 })?,
    };
    if alignment.offset_bytes > MAX_BLOCK_SIZE_BYTES {
        let offset_bytes = alignment.offset_bytes;
        return Err(ImageError::DirectTooCoarse { path: path(), offset_bytes });
    }
    Ok(alignment)
}

fn block_size(
    options: &ImageOptions,
    file: &File,
    alignment: Alignment,
    device: Option<&QueueAttributes>,
) -> Result<u32, ImageError> {
    let needed_bytes = alignment.offset_bytes;
    match options.block_size {
        Some(block_size_bytes) if block_size_bytes < needed_bytes => {
            Err(ImageError::BlockSizeTooSmall { path: options.path.clone(), block_size_bytes, needed_bytes })
        }
        Some(block_size_bytes) => Ok(block_size_bytes),
        None => {
            let direct = Some(alignment).filter(|_| options.cache.is_direct());
            Ok(geometry::default_block_size(direct.or_else(|| geometry::told_alignment(file)), device))
        }
    }
}
