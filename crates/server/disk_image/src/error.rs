//! Why an image cannot be served or resized. Each error is one line with the problem, the value, the limit and a
//! remedy.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::file::{FileKind, LockHolder};
use crate::geometry::{MAX_BLOCK_SIZE_BYTES, MIN_BLOCK_SIZE_BYTES};
use crate::lock::HolderList;

/// An error with its causes, in one line.
pub(crate) fn line(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |cause| (*cause).source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

/// Why an image could not be opened, or its size could not be reread.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The path does not exist.
    #[error("image {} does not exist: check the path, or make the image with --create SIZE", path.display())]
    Missing {
        /** The image's path. */
        path: PathBuf,
    },
    /// Neither a regular file nor a block device.
    #[error("image {} is a {kind}: give a regular file or a block device", path.display())]
    NotAnImage {
        /** The image's path. */
        path: PathBuf,
        /** The type of the path. */
        kind: FileKind,
    },
    /// The image cannot be read.
    #[error("image {} cannot be opened for reading: check its permissions and owner", path.display())]
    Unreadable {
        /** The image's path. */
        path: PathBuf,
        /** The kernel's error. */
        source: io::Error,
    },
    /// The image can be read, but not written.
    #[error("image {} cannot be opened for writing, only for reading: make it writable, or use --readonly", path.display())]
    Unwritable {
        /** The image's path. */
        path: PathBuf,
        /** The kernel's error. */
        source: io::Error,
    },
    /// The opener's policy refuses the path.
    #[error("image {} must not be opened", path.display())]
    NotAllowed {
        /** The image's path. */
        path: PathBuf,
        /** The policy's reason. */
        source: io::Error,
    },
    /// Any other failure to open the image.
    #[error("image {} cannot be opened", path.display())]
    Open {
        /** The image's path. */
        path: PathBuf,
        /** The kernel's error. */
        source: io::Error,
    },
    /// The server of a disk on another machine does not answer: a later attempt may succeed.
    #[error("disk {} cannot be reached", path.display())]
    Unreachable {
        /** The disk's URI. */
        path: PathBuf,
        /** What failed. */
        source: Box<dyn Error + Send + Sync>,
    },
    /// A disk on another machine cannot be served as configured.
    #[error("disk {} cannot be served", path.display())]
    Remote {
        /** The disk's URI. */
        path: PathBuf,
        /** What failed. */
        source: Box<dyn Error + Send + Sync>,
    },
    /// An image format whose tables, or backing files, cannot be used.
    #[error("image {} cannot be served as qcow2", path.display())]
    Chain {
        /** The image's path. */
        path: PathBuf,
        /** What is wrong, and with which file. */
        source: Box<qcow2::ChainError>,
    },
    /// A qcow2 image that is only read.
    #[error("image {} cannot be written: use --readonly, or mend it with qemu-img", path.display())]
    Qcow2Unwritable {
        /** The image's path. */
        path: PathBuf,
        /** Why. */
        source: Box<qcow2::WriteError>,
    },
    /// An image over which no other one can be put.
    #[error("no overlay can be made of image {}: {why}", path.display())]
    NoOverlay {
        /** The image's path. */
        path: PathBuf,
        /** The reason, for people. */
        why: &'static str,
    },
    /// A guest has gone on in an overlay of the image.
    #[error(
        "image {} must not be written: the overlay {} depends on it: serve the overlay with --format qcow2 and \
         --backing-folders, or use --readonly; once the overlay is committed, remove it, or the mark: \
         setfattr -x user.bareblk.overlay {}",
        path.display(),
        overlay.display(),
        path.display()
    )]
    HasOverlay {
        /** The image's path. */
        path: PathBuf,
        /** The overlay's path. */
        overlay: PathBuf,
    },
    /// The image's guest has gone on in the image below it.
    #[error(
        "image {} was committed to {}, which its guest uses now: serve that image, and delete this one once the guest works",
        path.display(), below.display()
    )]
    Committed {
        /** The image's path. */
        path: PathBuf,
        /** The path of the image below. */
        below: PathBuf,
    },
    /// The layers of the disk cannot be merged.
    #[error("image {} cannot be merged: {why}", path.display())]
    NotMerged {
        /** The image's path. */
        path: PathBuf,
        /** The reason, for people. */
        why: String,
    },
    /// Leaked clusters cannot be freed while the disk is served.
    #[error("leaked clusters of image {} are not freed: {why}", path.display())]
    NotReclaimed {
        /** The image's path. */
        path: PathBuf,
        /** The reason, for people. */
        why: &'static str,
    },
    /// An overlay cannot be written.
    #[error("the overlay of image {} cannot be written", path.display())]
    Overlay {
        /** The image's path. */
        path: PathBuf,
        /** Why. */
        source: Box<qcow2::WriteError>,
    },
    /// A qcow2 image in a device cannot grow.
    #[error(
        "image {} is qcow2 on a block device, which cannot grow, so it is served only for reading: use --readonly, or move it \
         into a file",
        path.display()
    )]
    Qcow2OnDevice {
        /** The image's path. */
        path: PathBuf,
    },
    /// A new image over a backing file that is longer.
    #[error(
        "image {} cannot be created with {size_bytes} bytes over {}, which has {least_bytes}: create it with that size or more",
        path.display(), backing.display()
    )]
    CreateSmaller {
        /** The image's path. */
        path: PathBuf,
        /** The requested size. */
        size_bytes: u64,
        /** The backing file. */
        backing: PathBuf,
        /** Its size. */
        least_bytes: u64,
    },
    /// The tables of a new image cannot be written.
    #[error("qcow2 image {} of {size_bytes} bytes cannot be created: check the file system's space and limits", path.display())]
    CreateQcow2 {
        /** The image's path. */
        path: PathBuf,
        /** The requested size. */
        size_bytes: u64,
        /** Why. */
        source: Box<qcow2::WriteError>,
    },
    /// The guest's disk is not a multiple of its block size.
    #[error(
        "image {} describes a disk of {size_bytes} bytes, which is not a multiple of the block size, {block_size_bytes}: \
         choose another --block-size, or enlarge it (qemu-img resize)",
        path.display()
    )]
    Qcow2Ragged {
        /** The image's path. */
        path: PathBuf,
        /** The disk's size. */
        size_bytes: u64,
        /** The logical block size. */
        block_size_bytes: u32,
    },
    /// The file system has no direct I/O.
    #[error(
        "image {} cannot be opened with O_DIRECT, because its file system refuses it: use --cache writeback, or \
         --cache writethrough instead of directsync", path.display()
    )]
    DirectRefused {
        /** The image's path. */
        path: PathBuf,
    },
    /// Direct I/O works, but only with an alignment that no guest accepts.
    #[error(
        "image {} needs direct I/O in units larger than the largest block size, {MAX_BLOCK_SIZE_BYTES} bytes (unit: \
         {offset_bytes} bytes; 0: unknown): use --cache writeback, or --cache writethrough instead of directsync",
        path.display()
    )]
    DirectTooCoarse {
        /** The image's path. */
        path: PathBuf,
        /** Smallest unit found to work; 0: none did. */
        offset_bytes: u32,
    },
    /// `--create` with `--readonly`.
    #[error("image {} cannot be both created and served read-only: leave out --create or --readonly", path.display())]
    CreateReadOnly {
        /** The image's path. */
        path: PathBuf,
    },
    /// `--create` with a path that exists.
    #[error(
        "image {} exists already and stays unchanged: leave out --create to serve it, or give another path",
        path.display()
    )]
    Exists {
        /** The image's path. */
        path: PathBuf,
    },
    /// `--create` failed; no file is left behind.
    #[error(
        "image {} of {size_bytes} bytes (--create) cannot be created: check its folder and the file system's limits",
        path.display()
    )]
    Create {
        /** The image's path. */
        path: PathBuf,
        /** The requested size. */
        size_bytes: u64,
        /** The kernel's error. */
        source: io::Error,
    },
    /// `--create` with size zero, or with a partial block at the end.
    #[error(
        "image {} cannot be created with {size_bytes} bytes (--create), which is not a multiple of the block \
         size {block_size_bytes}: use {}, or choose another --block-size",
        path.display(), size_bytes.next_multiple_of(u64::from(*block_size_bytes)).max(u64::from(*block_size_bytes))
    )]
    CreateRagged {
        /** The image's path. */
        path: PathBuf,
        /** The requested size. */
        size_bytes: u64,
        /** The requested block size, or the default. */
        block_size_bytes: u32,
    },
    /// The image is empty.
    #[error("image {} is empty (0 bytes): give it a size, a multiple of {MIN_BLOCK_SIZE_BYTES}", path.display())]
    Empty {
        /** The image's path. */
        path: PathBuf,
    },
    /// The image ends in a partial block.
    #[error(
        "image {} has {size_bytes} bytes, not a multiple of the block size {block_size_bytes}: {}",
        path.display(), RaggedAdvice { size_bytes: *size_bytes, block_size_bytes: *block_size_bytes, foreign_format: *foreign_format }
    )]
    Ragged {
        /** The image's path. */
        path: PathBuf,
        /** The image's size. */
        size_bytes: u64,
        /** The requested block size, or the default. */
        block_size_bytes: u32,
        /** The format that it seems to have instead of raw. */
        foreign_format: Option<&'static str>,
    },
    /// The image looks like another format, and the user did not confirm that it is raw.
    #[error(
        "image {} looks like {format}. It is not served as raw, because a write by the guest would destroy it: {}convert \
         it (qemu-img convert -O raw), or give --format raw if a guest wrote these bytes to a raw disk",
        path.display(), if *format == "qcow2" { "give --format qcow2, or " } else { "" }
    )]
    ForeignFormat {
        /** The image's path. */
        path: PathBuf,
        /** The format that it seems to have. */
        format: &'static str,
    },
    /// The value is not a valid block size.
    #[error(
        "block size {block_size_bytes} is not valid: choose a power of two from {MIN_BLOCK_SIZE_BYTES} to \
         {MAX_BLOCK_SIZE_BYTES}"
    )]
    BlockSize {
        /** The requested block size. */
        block_size_bytes: u32,
    },
    /// Direct I/O requests in blocks of this size would fail.
    #[error(
        "block size {block_size_bytes} is smaller than the {needed_bytes} bytes that direct I/O on image {} needs: \
         use --block-size {needed_bytes}, or --cache writeback", path.display()
    )]
    BlockSizeTooSmall {
        /** The image's path. */
        path: PathBuf,
        /** The requested block size. */
        block_size_bytes: u32,
        /** Alignment that direct I/O needs. */
        needed_bytes: u32,
    },
    /// Another program holds the image's lock.
    #[error(
        "image {} is locked by {}, and was not released within {} s: stop that program (a bareblk server can be \
         replaced with --take-over), or wait longer with --lock-timeout",
        path.display(), HolderList(holders), waited.as_secs()
    )]
    Locked {
        /** The image's path. */
        path: PathBuf,
        /** The holders that are visible in /proc. */
        holders: Vec<LockHolder>,
        /** The time limit that has passed. */
        waited: Duration,
    },
    /// The kernel or another program uses the block device.
    #[error(
        "block device {} is in use by the kernel (mounted, or part of a volume), or claimed by another program: \
         unmount or release it first", path.display()
    )]
    Claimed {
        /** The image's path. */
        path: PathBuf,
    },
    /// The file system does not support locks.
    #[error("image {} cannot be locked: move it to a file system that supports file locks", path.display())]
    Lock {
        /** The image's path. */
        path: PathBuf,
        /** The kernel's error. */
        source: io::Error,
    },
    /// A property of the opened file could not be read.
    #[error("{what} of image {} cannot be read", path.display())]
    Inspect {
        /** The image's path. */
        path: PathBuf,
        /** The property that cannot be read. */
        what: &'static str,
        /** The kernel's error. */
        source: io::Error,
    },
}

/// Why an image was not resized.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// The image is served read-only.
    #[error("image {} is served read-only: its size cannot be changed", path.display())]
    ReadOnly {
        /** The image's path. */
        path: PathBuf,
    },
    /// The server cannot set a block device's size.
    #[error(
        "image {} is a block device of {size_bytes} bytes, not {wanted_bytes}: resize the device itself (for example \
         with lvextend), then resize the disk to the device's new size",
        path.display()
    )]
    BlockDevice {
        /** The image's path. */
        path: PathBuf,
        /** The device's size, read just now. It is in force unless it is smaller than the capacity. */
        size_bytes: u64,
        /** The requested size. */
        wanted_bytes: u64,
    },
    /// The server cannot set the size of a disk on another machine.
    #[error(
        "disk {} has {size_bytes} bytes at its server, not {wanted_bytes}: resize it there, then resize the disk to its new \
         size",
        path.display()
    )]
    Remote {
        /** The disk's URI. */
        path: PathBuf,
        /** The size, read just now. It is in force unless it is smaller than the capacity. */
        size_bytes: u64,
        /** The requested size. */
        wanted_bytes: u64,
    },
    /// The wanted size is zero, or ends in a partial block.
    #[error(
        "image {} cannot have {wanted_bytes} bytes, which is not a multiple of its block size \
         {block_size_bytes}: use {}",
        path.display(),
        wanted_bytes.checked_next_multiple_of(u64::from(*block_size_bytes)).unwrap_or(0)
            .max(u64::from(*block_size_bytes))
    )]
    Ragged {
        /** The image's path. */
        path: PathBuf,
        /** The requested size. */
        wanted_bytes: u64,
        /** The image's logical block size. */
        block_size_bytes: u32,
    },
    /// A disk that is served read-only keeps its size.
    #[error(
        "disk {} has {size_bytes} bytes, not {wanted_bytes}: a read-only qcow2 disk cannot be resized: serve it without \
         --readonly, or stop the server and use qemu-img resize",
        path.display()
    )]
    Qcow2ReadOnly {
        /** The image's path. */
        path: PathBuf,
        /** The disk's size. */
        size_bytes: u64,
        /** The requested size. */
        wanted_bytes: u64,
    },
    /// A qcow2 disk only grows while it is served.
    #[error(
        "disk {} has {from_bytes} bytes, not {wanted_bytes}: a qcow2 disk cannot shrink while it is served: stop the server, and \
         use qemu-img resize --shrink",
        path.display()
    )]
    Qcow2Smaller {
        /** The image's path. */
        path: PathBuf,
        /** The disk's size. */
        from_bytes: u64,
        /** The requested size. */
        wanted_bytes: u64,
    },
    /// What the backing file has behind the disk's end would have to be hidden.
    #[error(
        "disk {} has {from_bytes} bytes, and its backing file has {backing_bytes}: stop the server, and use qemu-img resize",
        path.display()
    )]
    LongerBacking {
        /** The image's path. */
        path: PathBuf,
        /** The disk's size. */
        from_bytes: u64,
        /** What the backing file describes. */
        backing_bytes: u64,
    },
    /// The tables of a qcow2 image cannot be changed.
    #[error("the disk in image {} cannot be resized to {wanted_bytes} bytes", path.display())]
    Qcow2Write {
        /** The image's path. */
        path: PathBuf,
        /** The requested size. */
        wanted_bytes: u64,
        /** Why. */
        source: Box<qcow2::WriteError>,
    },
    /// The data beyond the wanted size would be lost.
    #[error(
        "image {} has {from_bytes} bytes: with {wanted_bytes} bytes it would lose the data beyond that size",
        path.display()
    )]
    WouldShrink {
        /** The image's path. */
        path: PathBuf,
        /** The file's size, or the capacity if that is more. */
        from_bytes: u64,
        /** The requested size. */
        wanted_bytes: u64,
    },
    /// The kernel refused.
    #[error("image {} cannot be made {wanted_bytes} bytes long: check the file system's space and limits", path.display())]
    System {
        /** The image's path. */
        path: PathBuf,
        /** The requested size. */
        wanted_bytes: u64,
        /** The kernel's error. */
        #[source]
        source: io::Error,
    },
}

/// Why an image was not cloned.
#[derive(Debug, thiserror::Error)]
pub enum CloneError {
    /// The disk is on another machine.
    #[error("disk {} is on another machine: take the snapshot there, while the disk is paused (bareblk ctl pause)", image.display())]
    Remote {
        /** The disk's URI. */
        image: PathBuf,
    },
    /// The disk is several files.
    #[error(
        "image {} is qcow2 and served read-only: make an overlay of it instead (qemu-img create -b IMAGE -F qcow2 -f qcow2)",
        image.display()
    )]
    Qcow2 {
        /** The image's path. */
        image: PathBuf,
    },
    /// Only files can share blocks.
    #[error("image {} is a block device: only files on a file system with reflinks can be cloned", image.display())]
    BlockDevice {
        /** The image's path. */
        image: PathBuf,
    },
    /// The file system has no reflinks.
    #[error(
        "the file system of image {} cannot clone files: use XFS (with reflink=1) or btrfs, or copy the image while the \
         disk is paused (bareblk ctl pause)",
        image.display()
    )]
    NoReflink {
        /** The image's path. */
        image: PathBuf,
    },
    /// Blocks can be shared only within a file system.
    #[error("the clone of image {} must be on the image's own file system: choose a path there", image.display())]
    OtherFileSystem {
        /** The image's path. */
        image: PathBuf,
    },
    /// The kernel refused.
    #[error("image {} cannot be cloned", image.display())]
    System {
        /** The image's path. */
        image: PathBuf,
        /** The kernel's error. */
        #[source]
        source: io::Error,
    },
}

/// The remedy for a partial block at the end: add bytes, unless that would damage an image of another format.
struct RaggedAdvice {
    size_bytes: u64,
    block_size_bytes: u32,
    foreign_format: Option<&'static str>,
}

impl std::fmt::Display for RaggedAdvice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(format) = self.foreign_format {
            let serve = if format == "qcow2" { "give --format qcow2, or " } else { "" };
            return write!(f, "it looks like a {format} image; {serve}convert it (qemu-img convert -O raw)");
        }
        let wanted_bytes = self.size_bytes.next_multiple_of(u64::from(self.block_size_bytes));
        write!(f, "make it {wanted_bytes} bytes long (truncate -s), or choose another --block-size")
    }
}
