//! Selects an engine and its own options. `config.rs` has the settings that all engines share.

use crate::choose::kind::EngineKind;
use crate::engines::io_uring::IoUringOptions;
use crate::engines::posix_aio::PosixAioOptions;

/// An engine with its own options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineOptions {
    /// io_uring: one ring for all operations.
    IoUring(IoUringOptions),
    /// Linux AIO (`io_submit`); `O_DIRECT` only.
    LinuxAio,
    /// The C library's `aio_read` and `aio_write`.
    PosixAio(PosixAioOptions),
    /// A thread pool that makes blocking calls.
    Threads,
    /// Calls in the worker itself if they do not block.
    Sync,
    /// Copies from or to a mapping of the file.
    Mmap,
    /// Exports of NBD servers.
    Nbd,
    /// Images in a Ceph cluster.
    Rbd,
}

impl EngineOptions {
    /// Which engine.
    #[must_use]
    pub fn kind(&self) -> EngineKind {
        match self {
            Self::IoUring(_) => EngineKind::IoUring,
            Self::LinuxAio => EngineKind::LinuxAio,
            Self::PosixAio(_) => EngineKind::PosixAio,
            Self::Threads => EngineKind::Threads,
            Self::Sync => EngineKind::Sync,
            Self::Mmap => EngineKind::Mmap,
            Self::Nbd => EngineKind::Nbd,
            Self::Rbd => EngineKind::Rbd,
        }
    }
}

impl From<EngineKind> for EngineOptions {
    /// The engine with default options.
    fn from(kind: EngineKind) -> Self {
        match kind {
            EngineKind::IoUring => Self::IoUring(IoUringOptions::default()),
            EngineKind::LinuxAio => Self::LinuxAio,
            EngineKind::PosixAio => Self::PosixAio(PosixAioOptions::default()),
            EngineKind::Threads => Self::Threads,
            EngineKind::Sync => Self::Sync,
            EngineKind::Mmap => Self::Mmap,
            EngineKind::Nbd => Self::Nbd,
            EngineKind::Rbd => Self::Rbd,
        }
    }
}
