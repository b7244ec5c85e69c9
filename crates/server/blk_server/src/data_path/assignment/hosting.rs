//! The completion worker of a placed disk, as far as it was asked for by number: brought in with its queues, and changed.
//!
//! `queue started or moved → Command::Host → (the worker sees to the rest)`, `bind → Command::Host → wait until it is`
//!
//! Not here: the worker's part (`worker/hostings.rs`), who has the engine of a placement (`io_engine`).

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use super::{LOOK_AGAIN, WorkerSet};
use crate::data_path::assignment::deadline::Deadline;
use crate::data_path::disk::Disk;
use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::worker::command::{Address, Command, Hosting, WorkerGone};
use crate::data_path::worker::worker_options::WorkerId;
use crate::error::AdminError;

impl WorkerSet {
    /// One that was asked for by number takes part as long as a queue runs, whichever worker that is on.
    pub(super) fn call_completion_worker(&self, disk: &Disk) {
        let Some(source) = disk.engine() else { return };
        let Some(id) = source.placement().completion_worker() else { return };
        let table = self.table();
        let Some(worker) = table.address(id).filter(|_| Some(id) != table.leaving) else { return };
        drop(table);
        // Not waited for. One that retires drops the command: the others then choose among themselves.
        let _ = worker.send(Command::Host(Arc::clone(source), Hosting::Own(disk.name().to_owned())));
    }

    /// Makes another worker the completion worker of a disk, or leaves it to the workers. If a queue of the disk runs,
    /// it is that when this returns.
    pub(crate) fn bind(
        &self,
        disk: &Disk,
        worker: Option<WorkerId>,
        timeout: Duration,
    ) -> Result<(), AdminError> {
        let deadline = self.deadline(timeout);
        let _admin = self.admin(&deadline)?;
        let name = || disk.name().to_owned();
        let source = disk.engine().filter(|source| source.is_placed());
        let source = source.ok_or_else(|| AdminError::NotPlaced { disk: name() })?;
        let address = worker.map(|id| self.table().address(id).ok_or(AdminError::NoWorker { id }));
        let address = address.transpose()?;
        let before = source.placement().completion_worker();
        source.set_completion_worker(worker);
        let Some(address) = address.filter(|_| self.runs(disk)) else { return Ok(()) };
        let moved = self.move_hosting(disk, source, &address, &deadline);
        if moved.is_err() {
            source.set_completion_worker(before);
        }
        moved
    }

    fn move_hosting(
        &self,
        disk: &Disk,
        source: &Arc<EngineSource>,
        to: &Address,
        deadline: &Deadline<'_>,
    ) -> Result<(), AdminError> {
        let (id, name) = (to.id, || disk.name().to_owned());
        let stays = || match deadline.is_cut_short() {
            true => AdminError::Stopping,
            false => AdminError::CompletionWorkerStays { disk: name(), timeout: deadline.timeout() },
        };
        let (done, joined) = sync_channel(1);
        let sent = to.send(Command::Host(Arc::clone(source), Hosting::Asked(done)));
        sent.map_err(|WorkerGone| AdminError::NoWorker { id })?;
        let joined = deadline.receive(&joined).ok_or_else(stays)?;
        joined.map_err(|why| AdminError::Unsuitable { id, disk: name(), why: why.to_string() })?;
        while source.completion_worker() != Some(id) && self.runs(disk) {
            if deadline.is_over() {
                return Err(stays());
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Whether one of its queues does.
    fn runs(&self, disk: &Disk) -> bool {
        self.table().seats.iter().any(|seat| seat.disk.id() == disk.id())
    }
}
