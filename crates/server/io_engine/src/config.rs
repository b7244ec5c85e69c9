//! Settings that all engines share. `engine_options.rs` has the options of single engines.

use std::time::Duration;

/// Settings that all engines share.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Maximum number of ops in flight. With many files: half of this plus 32 per file, if that is more. The engine
    /// allocates memory for them when files are attached.
    pub depth: u32,
    /// Number of files that the kernel keeps registered. Further files also work, at a small cost per op.
    pub registered_files: u32,
    /// How long a dropped engine waits for ops in flight before it leaks their memory.
    pub drain_timeout: Duration,
    /// A test's recorder, which records every call to the kernel.
    #[cfg(any(test, feature = "test-util"))]
    pub recorder: Option<crate::Recorder>,
    /// Maximum number of threads for blocking calls in each engine except io_uring. With many files: half of this plus
    /// one per file, if that is more.
    pub threads: u32,
    /// True if the worker sleeps on several engines. Every completion must then make
    /// [`Engine::descriptor`](crate::Engine::descriptor) readable. Costs `linux-aio` a little per op.
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
