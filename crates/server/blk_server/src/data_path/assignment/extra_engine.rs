//! Starts engines on workers that serve none of the disk's queues, if the disk's engine source needs such an engine.
//!
//! `queue started or moved → Command::StartEngine → the engine runs while Engine::keeps_running returns true`

use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use super::WorkerSet;
use crate::data_path::assignment::deadline::Deadline;
use crate::data_path::disk::Disk;
use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::worker::command::Command;
use crate::data_path::worker::worker_options::WorkerId;
use crate::error::AdminError;

impl WorkerSet {
    /// Starts the extra engine of a disk with a running queue. Does not wait until the engine runs.
    pub(super) fn start_extra_engine(&self, disk: &Disk) {
        let Some(source) = disk.engine() else { return };
        let Some(id) = source.extra_worker(disk.name()) else { return };
        let table = self.table();
        let Some(worker) = table.address(id).filter(|_| Some(id) != table.leaving) else { return };
        drop(table);
        // A worker that is ending drops the command. The source works without the extra engine.
        let _ = worker.send(Command::StartEngine(source, None));
    }

    /// Starts the engine of a source on `worker`, even if the worker serves no queue of that source. Returns `None` if
    /// the worker does not answer within `deadline`. The inner result says whether the engine started.
    ///
    /// # Errors
    /// The worker no longer exists.
    pub(crate) fn start_engine(
        &self,
        source: &Arc<EngineSource>,
        worker: WorkerId,
        deadline: &Deadline<'_>,
    ) -> Result<Option<io::Result<()>>, AdminError> {
        let (done, started) = sync_channel(1);
        let gone = || AdminError::NoWorker { id: worker };
        let address = self.table().address(worker).ok_or_else(gone)?;
        address.send(Command::StartEngine(Arc::clone(source), Some(done))).map_err(|_| gone())?;
        Ok(deadline.receive(&started))
    }

    /// Whether any queue of the disk is running.
    pub(crate) fn runs(&self, disk: &Disk) -> bool {
        self.table().entries.iter().any(|entry| entry.disk.id() == disk.id())
    }
}
