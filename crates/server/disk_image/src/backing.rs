//! What holds an image's data, and what an engine therefore works on.
//!
//! `Image → Backing → FileSpec (io_engine) → the engine for this kind of backing`

use std::fs::File;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Instant;

use nbd_client::{Export, FlushRefused};
use rbd_client::RbdImage;

use crate::volume::Volume;
use crate::volume::link::Link;
use crate::volume::metadata::MetadataThread;

/// What holds an image's data. Clones refer to the same open file.
#[derive(Clone, Debug)]
pub enum Backing {
    /// A regular file or a block device of this host.
    File(Arc<File>),
    /// An export of an NBD server.
    Nbd(Arc<Export>),
    /// An image in a Ceph cluster.
    Rbd(Arc<RbdImage>),
    /// Files of this host, through the tables of an image format.
    Mapped(Arc<Volume>),
}

impl Backing {
    /// The open file, if the storage is one file whose bytes are the disk's.
    #[must_use]
    pub fn file(&self) -> Option<&Arc<File>> {
        match self {
            Self::File(file) => Some(file),
            Self::Nbd(_) | Self::Rbd(_) | Self::Mapped(_) => None,
        }
    }

    /// The layers, if the storage is mapped through tables.
    #[must_use]
    pub fn volume(&self) -> Option<&Arc<Volume>> {
        match self {
            Self::Mapped(volume) => Some(volume),
            Self::File(_) | Self::Nbd(_) | Self::Rbd(_) => None,
        }
    }

    /// Length of the longest call that the storage accepts; `None`: it has no limit of its own.
    #[must_use]
    pub fn longest_call_bytes(&self) -> Option<u64> {
        match self {
            Self::File(_) | Self::Rbd(_) | Self::Mapped(_) => None,
            Self::Nbd(export) => Some(export.info().max_block_bytes.into()),
        }
    }

    /// Maximum number of workers that may use the storage at a time; `None`: no limit.
    #[must_use]
    pub fn most_workers(&self) -> Option<usize> {
        match self {
            Self::File(_) | Self::Rbd(_) | Self::Mapped(_) => None,
            Self::Nbd(export) => (!export.info().can_multi_conn()).then_some(1),
        }
    }

    /// Whether the storage is on another machine.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Nbd(_) | Self::Rbd(_))
    }

    /// Whether the storage has refused this server for good, because another client has taken the disk over.
    #[inline]
    #[must_use]
    pub fn is_refused(&self) -> bool {
        match self {
            Self::File(_) | Self::Nbd(_) | Self::Mapped(_) => false,
            Self::Rbd(image) => image.is_refused(),
        }
    }

    /// To be called before a guest's requests begin: takes the lock of storage that has one. Blocks while the storage does
    /// not answer, and for the lock's time limit while another client has the lock and `is_wanted`.
    ///
    /// # Errors
    /// Another client has the lock; the other machine's errors.
    pub fn begin_use(&self, is_wanted: &dyn Fn() -> bool) -> io::Result<()> {
        match self {
            Self::Rbd(image) => image.take_lock(is_wanted).map_err(io::Error::other),
            Self::File(_) | Self::Nbd(_) | Self::Mapped(_) => Ok(()),
        }
    }

    /// To be called after a guest's last request, when all writes are durable: releases the storage's lock. Each
    /// [`Backing::begin_use`] needs one. Blocks for as long as the storage takes.
    ///
    /// # Errors
    /// The other machine's errors.
    pub fn end_use(&self) -> io::Result<()> {
        match self {
            Self::File(_) | Self::Nbd(_) | Self::Mapped(_) => Ok(()),
            Self::Rbd(image) => image.release_lock(),
        }
    }

    /// Runs `call`, which uses this storage and may block, on a new thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start_thread(&self, call: impl FnOnce() + Send + 'static) -> io::Result<()> {
        match self {
            Self::File(_) | Self::Nbd(_) | Self::Mapped(_) => {
                std::thread::Builder::new().name("bareblk-storage".into()).spawn(call).map(drop)
            }
            Self::Rbd(image) => image.start_thread(Box::new(call)),
        }
    }

    /// Starts the thread that changes the tables of a writable mapped disk: once, before the guest's first request. `enter`
    /// runs first on it and on its readers, to take their role; false: it could not. `None`: the disk needs no such thread. The thread
    /// ends when the storage has no users, or with what is returned.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start_metadata_thread(
        &self,
        enter: impl Fn() -> bool + Clone + Send + 'static,
    ) -> io::Result<Option<MetadataThread>> {
        match self {
            Self::Mapped(volume) => MetadataThread::start(volume, enter),
            Self::File(_) | Self::Nbd(_) | Self::Rbd(_) => Ok(None),
        }
    }

    /// Whether the threads of [`Backing::start_thread`] get their rights from the storage's own thread, not from the calling
    /// one.
    #[must_use]
    pub fn has_threads_of_its_own(&self) -> bool {
        matches!(self, Self::Rbd(_))
    }

    /// Whether this error of [`Backing::sync`] means that writes may be lost. Otherwise, a later sync can still succeed.
    #[must_use]
    pub fn may_have_lost_writes(&self, error: &io::Error) -> bool {
        match self {
            Self::File(_) | Self::Rbd(_) | Self::Mapped(_) => true,
            Self::Nbd(_) => {
                let is_late = error.kind() == io::ErrorKind::TimedOut;
                error.get_ref().is_some_and(|error| error.is::<FlushRefused>())
                    || error.raw_os_error().is_some() && !is_late
            }
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
            Self::Mapped(volume) if volume.is_writable() => volume.sync_top(),
            Self::Mapped(_) => Ok(()),
        }
    }

    /// A reference that does not keep the backing open.
    #[must_use]
    pub fn downgrade(&self) -> WeakBacking {
        match self {
            Self::File(file) => WeakBacking::File(Arc::downgrade(file)),
            Self::Nbd(export) => WeakBacking::Nbd(Arc::downgrade(export)),
            Self::Rbd(image) => WeakBacking::Rbd(Arc::downgrade(image)),
            Self::Mapped(volume) => {
                WeakBacking::Mapped(Arc::downgrade(volume), volume.link().map(Arc::downgrade))
            }
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
    /// Files of this host, through tables, and the metadata thread, which keeps the image open until it has closed it.
    Mapped(Weak<Volume>, Option<Weak<Link>>),
}

impl WeakBacking {
    /// Whether the backing has users.
    #[must_use]
    pub fn is_open(&self) -> bool {
        match self {
            Self::File(file) => file.strong_count() > 0,
            Self::Nbd(export) => export.strong_count() > 0,
            Self::Rbd(image) => image.strong_count() > 0,
            Self::Mapped(volume, link) => {
                volume.strong_count() > 0 || link.as_ref().is_some_and(|link| link.strong_count() > 0)
            }
        }
    }
}
