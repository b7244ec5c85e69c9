//! All queues of a disk at once: to workers that somebody named, or spread over some number of them; their held
//! requests tried again.
//!
//! - Named workers are wishes, as for a queue attached by hand; a number is only a limit, within which the balancer may
//!   move queues.
//!
//! Not here: one queue (`assignment/mod.rs`).

use std::cmp::Reverse;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use super::{Seat, WorkerSet, move_queue};
use crate::data_path::disk::Disk;
use crate::data_path::worker::command::{Address, Command};
use crate::data_path::worker::worker_options::WorkerId;
use crate::error::AdminError;

impl WorkerSet {
    /// Queue after queue to these workers in turn. Those that were handed over before one that fails stay there.
    pub(crate) fn attach_all(
        &self,
        disk: &Disk,
        workers: &[WorkerId],
        timeout: Duration,
    ) -> Result<(), AdminError> {
        let deadline = self.deadline(timeout);
        let _admin = self.admin(&deadline)?;
        let missing = workers.iter().find(|&&id| self.table().address(id).is_none());
        if let Some(&id) = missing {
            return Err(AdminError::NoWorker { id });
        }
        disk.set_most_workers(None);
        let queues = (0..disk.queues()).zip(workers.iter().cycle());
        queues.into_iter().try_for_each(|(queue, &worker)| self.attach_one(disk, queue, worker, &deadline))
    }

    /// Has the disk's parked requests tried again. Returns how many there are.
    pub(crate) fn resume(&self, disk: &Disk, timeout: Duration) -> Result<usize, AdminError> {
        let deadline = self.deadline(timeout);
        // A queue on its way between two workers would be missed.
        let _admin = self.admin(&deadline)?;
        let workers: Vec<_> = self.table().workers.iter().map(|worker| worker.address.clone()).collect();
        let mut all = 0;
        for worker in workers {
            let (done, resumed) = sync_channel(1);
            // One that has ended has no queues.
            if worker.send(Command::Resume(disk.id(), done)).is_err() {
                continue;
            }
            let silent = AdminError::WorkerSilent { id: worker.id, timeout };
            all += deadline.receive(&resumed).ok_or(silent)?;
        }
        Ok(all)
    }

    /// Forgets where queues of the disk were attached, and spreads those that run over `most` workers, or all.
    pub(crate) fn spread(
        &self,
        disk: &Disk,
        most: Option<NonZeroUsize>,
        timeout: Duration,
    ) -> Result<(), AdminError> {
        let deadline = self.deadline(timeout);
        let _admin = self.admin(&deadline)?;
        disk.set_most_workers(most);
        self.forget_disk(disk.id());
        let moves = self.moves_to_spread(disk);
        moves.into_iter().try_for_each(|(seat, to)| move_queue(&seat, &to, &deadline))
    }

    /// Most queues stay where they are: the workers with most of the disk's queues keep it.
    fn moves_to_spread(&self, disk: &Disk) -> Vec<(Arc<Seat>, Address)> {
        let table = self.table();
        let all: Vec<WorkerId> = table.seats.iter().map(|seat| seat.worker()).collect();
        let mut own: Vec<_> =
            table.seats.iter().filter(|seat| seat.disk.id() == disk.id()).map(Arc::clone).collect();
        own.sort_by_key(|seat| seat.index);
        let queues = |id: WorkerId| all.iter().filter(|&&worker| worker == id).count();
        let own_queues = |id: WorkerId| own.iter().filter(|seat| seat.worker() == id).count();
        let mut workers: Vec<_> = table.workers.iter().map(|worker| worker.address.clone()).collect();
        workers.sort_by_key(|worker| (Reverse(own_queues(worker.id)), queues(worker.id), worker.id));
        workers.truncate(disk.most_workers().unwrap_or(usize::MAX));
        // With how many queues of the disk each may still be given.
        let (count, workers_count) = (own.len(), workers.len().max(1));
        let share = |place: usize| count / workers_count + usize::from(place < count % workers_count);
        let mut left: Vec<_> = workers.into_iter().enumerate().map(|(at, one)| (one, share(at))).collect();
        let mut moving = Vec::new();
        for seat in own {
            let stays = left.iter_mut().find(|(worker, left)| worker.id == seat.worker() && *left > 0);
            match stays {
                Some((_, left)) => *left -= 1,
                None => moving.push(seat),
            }
        }
        let moves = moving.into_iter().filter_map(|seat| {
            let (to, left) = left.iter_mut().max_by_key(|(worker, left)| (*left, Reverse(worker.id)))?;
            *left = left.saturating_sub(1);
            Some((seat, to.clone()))
        });
        moves.collect()
    }
}
