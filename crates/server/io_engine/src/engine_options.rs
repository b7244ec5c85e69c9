//! Which engine to make, and the options that it alone has. The settings that all engines share are in `config.rs`.

use crate::choose::kind::EngineKind;
use crate::engines::io_uring::IoUringOptions;
use crate::engines::posix_aio::PosixAioOptions;

/// One engine, with the options that it alone has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineOptions {
    /// One ring with the kernel for everything.
    IoUring(IoUringOptions),
    /// `io_submit`; past the page cache only.
    LinuxAio,
    /// The C library's `aio_read` and `aio_write`.
    PosixAio(PosixAioOptions),
    /// A pool of threads with plain calls.
    Threads,
    /// Plain calls in the worker itself, where they do not wait.
    Sync,
    /// A copy from or to a mapping of the file.
    Mmap,
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
        }
    }
}

impl From<EngineKind> for EngineOptions {
    /// The engine with its usual options.
    fn from(kind: EngineKind) -> Self {
        match kind {
            EngineKind::IoUring => Self::IoUring(IoUringOptions::default()),
            EngineKind::LinuxAio => Self::LinuxAio,
            EngineKind::PosixAio => Self::PosixAio(PosixAioOptions::default()),
            EngineKind::Threads => Self::Threads,
            EngineKind::Sync => Self::Sync,
            EngineKind::Mmap => Self::Mmap,
        }
    }
}
