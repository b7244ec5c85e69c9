//! What holds an image's data, and what an engine therefore works on.
//!
//! `Image → Backing → FileSpec (io_engine) → the engine for this kind of backing`

use std::fs::File;
use std::io;
use std::sync::{Arc, Weak};

/// What holds an image's data. Clones refer to the same open file.
#[derive(Clone, Debug)]
pub enum Backing {
    /// A regular file or a block device of this host.
    File(Arc<File>),
}

impl Backing {
    /// The open file; `None` for a disk on another machine.
    #[must_use]
    pub fn file(&self) -> Option<&Arc<File>> {
        match self {
            Self::File(file) => Some(file),
        }
    }

    /// Makes all completed writes durable. Blocks for as long as the storage takes.
    ///
    /// # Errors
    /// Errors of `fdatasync`.
    pub fn sync(&self) -> io::Result<()> {
        match self {
            Self::File(file) => file.sync_data(),
        }
    }

    /// A reference that does not keep the backing open.
    #[must_use]
    pub fn downgrade(&self) -> WeakBacking {
        match self {
            Self::File(file) => WeakBacking::File(Arc::downgrade(file)),
        }
    }
}

/// Tells whether a backing is still open, without keeping it open.
#[derive(Clone, Debug)]
pub enum WeakBacking {
    /// A file of this host.
    File(Weak<File>),
}

impl WeakBacking {
    /// Whether the backing has users.
    #[must_use]
    pub fn is_open(&self) -> bool {
        match self {
            Self::File(file) => file.strong_count() > 0,
        }
    }
}
