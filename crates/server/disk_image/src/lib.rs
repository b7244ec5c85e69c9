//! One disk image, a raw file, a block device or a qcow2 image: opens and locks it, reads its size and limits, checks ranges.
//!
//! `path -> opener -> lock -> geometry, limits -> Image -> check(sector, len) -> CheckedRange -> engine`
//!
//! - All access by path goes through one [`Opener`], so that a sandbox can move it to another process.
//! - The lock is compatible with QEMU's: of two servers, or a server and `qemu-img`, at most one can write.
//! - Only [`Image::check`] and [`LayerFile::check`] make a [`CheckedRange`], so an engine that takes one cannot access
//!   anything outside the image.
//!
//! See also: reading and writing (`io_engine`), the meaning of a request (`virtio_blk`), the format (`qcow2`).
#![forbid(unsafe_code)]

pub mod file;

mod backing;

pub mod opener;

pub mod host_opener;

pub mod sysfs_queue;

pub mod lock;

pub mod cache_mode;

mod foreign;

mod new_image;

pub mod geometry;

pub mod limits;

pub mod image;

pub mod range;

pub mod error;

pub mod volume;

pub use backing::{Backing, WeakBacking};
pub use cache_mode::{CacheMode, ParseCacheModeError};
pub use error::{CloneError, ImageError, ResizeError};
pub use file::{Access, FileId, FileKind, LockHolder};
pub use geometry::{Alignment, Topology};
pub use host_opener::HostOpener;
pub use image::inspect::Inspection;
pub use image::location::{Location, LocationError, RbdOptions};
pub use image::{CapacityChange, Image, ImageOptions};
pub use limits::{DiscardLimits, WriteZeroesLimits};
pub use new_image::{NewBacking, NewImage};
pub use opener::{MAX_SOCKET_PATH_BYTES, OpenRequest, Opener};
pub use range::{CheckedRange, RangeError, SECTOR_BYTES};
pub use sysfs_queue::QueueAttributes;
pub use volume::{LayerFile, Volume};
