//! Where workers get an engine from: disks that name the same source share one engine in each worker.
//!
//! `DiskConfig::engine → Worker (one engine per source, made with the first queue, gone with the last) → io_engine`
//!
//! Not here: which engine suits which image (`io_engine::choose`).

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use io_engine::{Engine, LEAST_SHARE};

use crate::data_path::disk::placement::{Placed, Placement, PlacementReport, not_placed};
use crate::data_path::worker::worker_options::WorkerId;

/// A discard may need as many operations as it has segments.
pub(crate) const MIN_DEPTH: u32 = 16;
const _: () = assert!(MIN_DEPTH as usize >= virtio_blk::MAX_SEGMENTS);
const _: () = assert!(disk_image::limits::MAX_SEGMENTS as usize <= virtio_blk::MAX_SEGMENTS);

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
    placed: Option<PlacedSource>,
}

/// What a placed source has beside.
struct PlacedSource {
    placed: Placed,
    /// As it was asked for last.
    placement: Mutex<Placement>,
}

impl std::fmt::Debug for EngineSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self { name, depth, .. }, placement) = (self, self.placement());
        f.debug_struct("EngineSource")
            .field("name", name)
            .field("depth", depth)
            .field("placement", &placement)
            .finish()
    }
}

impl EngineSource {
    /// A source by this name.
    pub fn new(name: impl Into<String>, depth: u32, make: EngineFactory) -> Arc<Self> {
        Arc::new(Self { name: name.into(), make, depth, placed: None })
    }

    /// A source for one disk whose requests are carried out as `placement` says, by engines of `depth` from `make`:
    /// for [`Placement::Shared`], engines that can be shared ([`io_engine::Engine::check_shareable`]).
    pub fn placed(
        name: impl Into<String>,
        depth: u32,
        make: EngineFactory,
        placement: Placement,
    ) -> Arc<Self> {
        let name = name.into();
        match Placed::new(&placement, depth, make) {
            Err(make) => Self::new(name, depth, make),
            Ok(placed) => {
                let placed = Some(PlacedSource { placed, placement: Mutex::new(placement) });
                Arc::new(Self { name, make: Box::new(|| Err(not_placed())), depth, placed })
            }
        }
    }

    /// How requests are placed.
    #[must_use]
    pub fn placement(&self) -> Placement {
        let placed = self.placed.as_ref();
        placed.map_or(Placement::Queue, |placed| {
            *placed.placement.lock().unwrap_or_else(PoisonError::into_inner)
        })
    }

    /// How requests are placed, and what that came to.
    #[must_use]
    pub fn placement_report(&self) -> PlacementReport {
        let Some(placed) = &self.placed else { return PlacementReport::default() };
        PlacementReport {
            placement: self.placement(),
            completion_worker: placed.placed.completion_worker(),
            counters: placed.placed.counters(),
        }
    }

    /// The engine of one worker.
    pub(crate) fn engine(&self, worker: WorkerId) -> io::Result<Box<dyn Engine>> {
        match &self.placed {
            Some(placed) => placed.placed.engine(worker),
            None => (self.make)(),
        }
    }

    /// Whether workers depend on each other's engines of this source.
    pub(crate) fn is_placed(&self) -> bool {
        self.placed.is_some()
    }

    /// Most workers whose queues may be of this source: each needs its share of the depth, and so does a completion
    /// worker that has none of them. `None`: no limit.
    pub(crate) fn most_workers(&self) -> Option<usize> {
        let placement = self.placed.is_some().then(|| self.placement())?;
        let all = usize::try_from(self.depth).unwrap_or(usize::MAX) / LEAST_SHARE;
        Some(all.saturating_sub(usize::from(placement.completion_worker().is_some())).max(1))
    }

    /// The completion worker now.
    pub(crate) fn completion_worker(&self) -> Option<WorkerId> {
        self.placed.as_ref()?.placed.completion_worker()
    }

    /// Nothing with [`Placement::Queue`].
    pub(crate) fn set_completion_worker(&self, worker: Option<WorkerId>) {
        let Some(PlacedSource { placed, placement }) = &self.placed else { return };
        match &mut *placement.lock().unwrap_or_else(PoisonError::into_inner) {
            Placement::Queue => {}
            Placement::Shared { completion_worker, .. } | Placement::Completion { completion_worker, .. } => {
                *completion_worker = worker;
            }
        }
        placed.set_completion_worker(worker);
    }
}
