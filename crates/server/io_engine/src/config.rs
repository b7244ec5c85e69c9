//! The settings that all engines share. The options of one engine are in `engine_options.rs`.

use std::time::Duration;

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
