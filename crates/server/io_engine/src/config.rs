//! How an engine is made: what all engines share, and the options of one engine in its variant.
//!
//! An option can only be given to the engine that has it. The command line refuses the others (`bareblk`).

use std::time::Duration;

use crate::choose::kind::EngineKind;
use crate::engines::io_uring::IoUringOptions;
use crate::engines::posix_aio::PosixAioOptions;

/// What all engines share.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Most ops in flight; with many files, half as many and 32 for each file, if that is more. The engine takes memory
    /// for them when files come.
    pub depth: u32,
    /// Files that the kernel keeps registered. Further files work, at a small cost per op.
    pub registered_files: u32,
    /// How long dropping the engine waits for ops in flight before it leaks their memory.
    pub drain_timeout: Duration,
    /// Where tests read every call to the kernel.
    #[cfg(any(test, feature = "test-util"))]
    pub recorder: Option<crate::Recorder>,
    /// Most threads at once for calls that wait, in each engine but io_uring; at least one for each file, beside half of
    /// them for all.
    pub threads: u32,
    /// The worker sleeps on several engines, so [`Engine::descriptor`](crate::Engine::descriptor) has to become readable
    /// with every completion. Costs `linux-aio` a little per op.
    pub pollable: bool,
    /// Several threads use the engine, one at a time ([`Engine::check_shareable`](crate::Engine::check_shareable)).
    /// `io_uring` then works without deferred task-run.
    pub several_threads: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            depth: 1024,
            registered_files: 1024,
            drain_timeout: Duration::from_secs(5),
            #[cfg(any(test, feature = "test-util"))]
            recorder: None,
            threads: 64,
            pollable: false,
            several_threads: false,
        }
    }
}

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
