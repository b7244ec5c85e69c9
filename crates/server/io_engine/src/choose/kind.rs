//! The engines by name.
//!
//! Not here: which one is right for a file (`choose/mod.rs`).

/// An engine, as on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// One ring with the kernel for everything.
    IoUring,
    /// `io_submit`; past the page cache only.
    LinuxAio,
    /// The C library's `aio_read` and `aio_write`.
    PosixAio,
    /// A pool of threads with plain calls.
    Threads,
    /// Plain calls in the worker itself, where they do not wait.
    Sync,
    /// A copy from or to a mapping of the file.
    Mmap,
}

impl EngineKind {
    /// Every engine.
    pub const ALL: [Self; 6] =
        [Self::IoUring, Self::LinuxAio, Self::PosixAio, Self::Threads, Self::Sync, Self::Mmap];

    /// As on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::LinuxAio => "linux-aio",
            Self::PosixAio => "posix-aio",
            Self::Threads => "threads",
            Self::Sync => "sync",
            Self::Mmap => "mmap",
        }
    }
}

impl std::fmt::Display for EngineKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
