//! Where workers get an engine from: disks that name the same source share one engine in each worker.
//!
//! `DiskConfig::engine → Worker (one engine per source, made with the first queue, gone with the last) → io_engine`
//!
//! Not here: which engine suits which image (`io_engine::choose`).

use std::io;
use std::sync::Arc;

use io_engine::Engine;

/// Makes an engine; called on the thread of the worker that will use it.
pub type EngineFactory = Box<dyn Fn() -> io::Result<Box<dyn Engine>> + Send + Sync>;

/// Disks with clones of the same `Arc` share an engine, and its depth, in each worker.
pub struct EngineSource {
    /// For logs and reports: "io_uring", say.
    pub name: String,
    /// Called once per worker that serves a disk of this source.
    pub make: EngineFactory,
    /// Most requests in flight per worker: the depth that `make` makes engines with.
    pub depth: u32,
}

impl std::fmt::Debug for EngineSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, depth, .. } = self;
        f.debug_struct("EngineSource").field("name", name).field("depth", depth).finish_non_exhaustive()
    }
}

impl EngineSource {
    /// A source by this name.
    pub fn new(name: impl Into<String>, depth: u32, make: EngineFactory) -> Arc<Self> {
        Arc::new(Self { name: name.into(), make, depth })
    }
}
