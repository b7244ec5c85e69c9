//! Sources of engines: disks with the same source share one engine per worker.
//!
//! `DiskConfig::engine → Worker (one engine per source, from its first queue to its last) → io_engine`

use std::io;
use std::sync::Arc;

use io_engine::{Engine, PlacedEngines, Placement, PlacementReport};

use crate::data_path::worker::worker_options::WorkerId;

/// A discard needs as many ops as it has segments.
pub(crate) const MIN_DEPTH: u32 = 16;
const _: () = assert!(MIN_DEPTH as usize >= virtio_blk::MAX_SEGMENTS);
const _: () = assert!(disk_image::limits::MAX_SEGMENTS as usize <= virtio_blk::MAX_SEGMENTS);

/// Makes an engine, on the thread of the worker that will use it.
pub type EngineFactory = Box<dyn Fn() -> io::Result<Box<dyn Engine>> + Send + Sync>;

/// Disks with clones of the same `Arc` share an engine and its depth in each worker.
pub struct EngineSource {
    /// The engine's name in logs and reports, such as "io_uring".
    pub name: String,
    /// Depth of the engines: the maximum number of requests in flight per worker.
    pub depth: u32,
    engines: Engines,
}

enum Engines {
    /// Each worker has an independent engine.
    Own(EngineFactory),
    /// The workers' engines depend on each other.
    Placed(PlacedEngines),
}

impl std::fmt::Debug for EngineSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, depth, .. } = self;
        f.debug_struct("EngineSource").field("name", name).field("depth", depth).finish_non_exhaustive()
    }
}

impl EngineSource {
    /// Creates a source. `make` creates its engines, which have this depth.
    pub fn new(name: impl Into<String>, depth: u32, make: EngineFactory) -> Arc<Self> {
        Arc::new(Self { name: name.into(), depth, engines: Engines::Own(make) })
    }

    /// A source for one disk with a placement; see [`PlacedEngines::new`].
    pub fn placed(
        name: impl Into<String>,
        depth: u32,
        make: EngineFactory,
        placement: Placement,
    ) -> Arc<Self> {
        let engines = PlacedEngines::new(placement, depth, make).map_or_else(Engines::Own, Engines::Placed);
        Arc::new(Self { name: name.into(), depth, engines })
    }

    /// Returns the disk's placement with its counters.
    #[must_use]
    pub fn placement_report(&self) -> PlacementReport {
        self.placed_engines().map_or_else(PlacementReport::default, PlacedEngines::report)
    }

    /// `None`: each worker has an independent engine.
    pub(crate) fn placed_engines(&self) -> Option<&PlacedEngines> {
        match &self.engines {
            Engines::Own(_) => None,
            Engines::Placed(engines) => Some(engines),
        }
    }

    /// Makes the engine of one worker.
    pub(crate) fn engine(&self, worker: WorkerId) -> io::Result<Box<dyn Engine>> {
        match &self.engines {
            Engines::Own(make) => make(),
            Engines::Placed(engines) => engines.engine(worker),
        }
    }

    /// Maximum number of workers that may serve queues of this source. `None`: no limit.
    pub(crate) fn most_workers(&self) -> Option<usize> {
        self.placed_engines().map(PlacedEngines::most_workers)
    }

    /// The worker that needs an engine of this source while queues of `disk` run, even if it serves none of them. The
    /// caller need not wait until the engine runs.
    pub(crate) fn extra_worker(&self, disk: &str) -> Option<WorkerId> {
        let engines = self.placed_engines()?;
        let worker = engines.placement().completion_worker()?;
        engines.limit_change(disk);
        Some(worker)
    }
}
