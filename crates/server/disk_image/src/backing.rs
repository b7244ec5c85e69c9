//! What holds an image's data, and what an engine therefore works on.
//!
//! `Image → Backing → FileSpec (io_engine) → the engine for this kind of backing`

use std::fs::File;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Instant;

use nbd_client::Export;
use rbd_client::RbdImage;

/// What holds an image's data. Clones refer to the same open file.
#[derive(Clone, Debug)]
pub enum Backing {
    /// A regular file or a block device of this host.
    File(Arc<File>),
    /// An export of an NBD server.
    Nbd(Arc<Export>),
    /// An image in a Ceph cluster.
    Rbd(Arc<RbdImage>),
}

impl Backing {
    /// The open file; `None` for a disk on another machine.
    #[must_use]
    pub fn file(&self) -> Option<&Arc<File>> {
        match self {
            Self::File(file) => Some(file),
            Self::Nbd(_) | Self::Rbd(_) => None,
        }
    }

    /// Length of the longest call that the storage accepts; `None`: it has no limit of its own.
    #[must_use]
    pub fn longest_call_bytes(&self) -> Option<u64> {
        match self {
            Self::File(_) | Self::Rbd(_) => None,
            Self::Nbd(export) => Some(export.info().max_block_bytes.into()),
        }
    }

    /// Maximum number of workers that may use the storage at a time; `None`: no limit.
    #[must_use]
    pub fn most_workers(&self) -> Option<usize> {
        match self {
            Self::File(_) | Self::Rbd(_) => None,
            Self::Nbd(export) => (!export.info().can_multi_conn()).then_some(1),
        }
    }

    /// Makes all completed writes durable. Blocks for as long as the storage takes.
    ///
    /// # Errors
    /// Errors of `fdatasync`, or of the other machine and the connection to it.
    pub fn sync(&self) -> io::Result<()> {
        match self {
            Self::File(file) => file.sync_data(),
            Self::Nbd(export) => export.flush(Instant::now() + export.request_timeout()),
            Self::Rbd(image) => image.flush(),
        }
    }

    /// A reference that does not keep the backing open.
    #[must_use]
    pub fn downgrade(&self) -> WeakBacking {
        match self {
            Self::File(file) => WeakBacking::File(Arc::downgrade(file)),
            Self::Nbd(export) => WeakBacking::Nbd(Arc::downgrade(export)),
            Self::Rbd(image) => WeakBacking::Rbd(Arc::downgrade(image)),
        }
    }
}

/// Tells whether a backing is still open, without keeping it open.
#[derive(Clone, Debug)]
pub enum WeakBacking {
    /// A file of this host.
    File(Weak<File>),
    /// An export of an NBD server.
    Nbd(Weak<Export>),
    /// An image in a Ceph cluster.
    Rbd(Weak<RbdImage>),
}

impl WeakBacking {
    /// Whether the backing has users.
    #[must_use]
    pub fn is_open(&self) -> bool {
        match self {
            Self::File(file) => file.strong_count() > 0,
            Self::Nbd(export) => export.strong_count() > 0,
            Self::Rbd(image) => image.strong_count() > 0,
        }
    }
}
