//! The names of the engines. `choose/mod.rs` selects one for a file.

/// An engine's name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// io_uring: one ring for all operations.
    IoUring,
    /// Linux AIO (`io_submit`); `O_DIRECT` only.
    LinuxAio,
    /// The C library's `aio_read` and `aio_write`.
    PosixAio,
    /// A thread pool that makes blocking calls.
    Threads,
    /// Calls in the worker itself if they do not block.
    Sync,
    /// Copies from or to a mapping of the file.
    Mmap,
    /// Exports of NBD servers; no other disks.
    Nbd,
    /// Images in a Ceph cluster; no other disks.
    Rbd,
}

impl EngineKind {
    /// Every engine.
    pub const ALL: [Self; 8] = [
        Self::IoUring,
        Self::LinuxAio,
        Self::PosixAio,
        Self::Threads,
        Self::Sync,
        Self::Mmap,
        Self::Nbd,
        Self::Rbd,
    ];
    /// The engines for files and block devices of this host.
    pub const FOR_FILES: [Self; 6] =
        [Self::IoUring, Self::LinuxAio, Self::PosixAio, Self::Threads, Self::Sync, Self::Mmap];

    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::LinuxAio => "linux-aio",
            Self::PosixAio => "posix-aio",
            Self::Threads => "threads",
            Self::Sync => "sync",
            Self::Mmap => "mmap",
            Self::Nbd => "nbd",
            Self::Rbd => "rbd",
        }
    }
}

impl std::fmt::Display for EngineKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
