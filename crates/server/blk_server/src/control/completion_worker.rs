//! Changes the completion worker of a disk whose placement has one.
//!
//! `set_completion_worker → the worker starts its engine → wait until that engine has the requests of all workers`
//!
//! `io_engine` makes the change itself.

use std::sync::Arc;
use std::time::Duration;

use io_engine::PlacedEngines;

use crate::data_path::assignment::WorkerSet;
use crate::data_path::assignment::deadline::Deadline;
use crate::data_path::disk::Disk;
use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::worker::worker_options::WorkerId;
use crate::error::AdminError;

/// How often the caller checks whether the completion worker has changed.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

impl WorkerSet {
    /// Makes another worker the completion worker of a disk; `None`: the workers choose. If a queue of the disk runs, the
    /// change is complete when this returns.
    pub(crate) fn set_completion_worker(
        &self,
        disk: &Disk,
        worker: Option<WorkerId>,
        timeout: Duration,
    ) -> Result<(), AdminError> {
        let deadline = self.deadline(timeout);
        let _admin = self.admin(&deadline)?;
        let source = disk.engine();
        let placed = source.as_ref().and_then(|source| Some((source, source.placed_engines()?)));
        let (source, engines) =
            placed.ok_or_else(|| AdminError::NotPlaced { disk: disk.name().to_owned() })?;
        if let Some(id) = worker.filter(|id| !self.has_worker(*id)) {
            return Err(AdminError::NoWorker { id });
        }
        let before = engines.placement().completion_worker();
        engines.set_completion_worker(worker);
        let Some(worker) = worker.filter(|_| self.runs(disk)) else { return Ok(()) };
        let changed = self.change(disk, (source, engines), worker, &deadline);
        if changed.is_err() {
            engines.set_completion_worker(before);
            // If this also changes the completion worker, no caller waits for that change.
            engines.limit_change(disk.name());
        }
        changed
    }

    fn change(
        &self,
        disk: &Disk,
        (source, engines): (&Arc<EngineSource>, &PlacedEngines),
        id: WorkerId,
        deadline: &Deadline<'_>,
    ) -> Result<(), AdminError> {
        let name = || disk.name().to_owned();
        let stays = || match deadline.is_cut_short() {
            true => AdminError::Stopping,
            false => AdminError::CompletionWorkerStays { disk: name(), timeout: deadline.timeout() },
        };
        let started = self.start_engine(source, id, deadline)?.ok_or_else(stays)?;
        started.map_err(|why| AdminError::Unsuitable { id, disk: name(), why: why.to_string() })?;
        while engines.completion_worker() != Some(id) && self.runs(disk) {
            if deadline.is_over() {
                return Err(stays());
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
        Ok(())
    }
}
