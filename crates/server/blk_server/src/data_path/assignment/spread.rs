//! Operations on all queues of a disk: attach them, spread them, or resume their parked requests.
//!
//! If the operator names workers, the queues stay there. If the operator gives only a number of workers, that is a
//! limit within which the balancer may move queues.

use std::cmp::Reverse;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use super::WorkerSet;
use super::entry::QueueEntry;
use super::moves::move_queue;
use crate::data_path::disk::Disk;
use crate::data_path::worker::command::{Address, Command};
use crate::data_path::worker::worker_options::WorkerId;
use crate::error::AdminError;

impl WorkerSet {
    /// Attaches the disk's queues to these workers round-robin. After a failure, queues that were already moved stay on
    /// their new workers.
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
        let mut queues = (0..disk.queues()).zip(workers.iter().cycle());
        queues.try_for_each(|(queue, &worker)| self.attach_one(disk, queue, worker, &deadline).map(drop))
    }

    /// Retries the disk's parked requests. Returns their number.
    pub(crate) fn resume(&self, disk: &Disk, timeout: Duration) -> Result<usize, AdminError> {
        let deadline = self.deadline(timeout);
        // Keeps queues from moving, so that none is missed.
        let _admin = self.admin(&deadline)?;
        let workers: Vec<_> = self.table().workers.iter().map(|worker| worker.address.clone()).collect();
        let mut all = 0;
        for worker in workers {
            let (done, resumed) = sync_channel(1);
            // A worker that has ended has no queues.
            if worker.send(Command::Resume(disk.id(), done)).is_err() {
                continue;
            }
            let silent = AdminError::WorkerSilent { id: worker.id, timeout };
            all += deadline.receive(&resumed).ok_or(silent)?;
        }
        Ok(all)
    }

    /// Removes the attachments of the disk's queues, and spreads its running queues over at most `most` workers, or
    /// over all.
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
        moves.into_iter().try_for_each(|(entry, to)| move_queue(&entry, &to, &deadline))
    }

    /// Plans few moves: the workers with most of the disk's queues keep serving it.
    fn moves_to_spread(&self, disk: &Disk) -> Vec<(Arc<QueueEntry>, Address)> {
        let table = self.table();
        let all: Vec<WorkerId> = table.entries.iter().map(|entry| entry.worker()).collect();
        let mut own: Vec<_> =
            table.entries.iter().filter(|entry| entry.disk.id() == disk.id()).map(Arc::clone).collect();
        own.sort_by_key(|entry| entry.index);
        let queues = |id: WorkerId| all.iter().filter(|&&worker| worker == id).count();
        let own_queues = |id: WorkerId| own.iter().filter(|entry| entry.worker() == id).count();
        let mut workers: Vec<_> = table.workers.iter().map(|worker| worker.address.clone()).collect();
        workers.sort_by_key(|worker| (Reverse(own_queues(worker.id)), queues(worker.id), worker.id));
        workers.truncate(disk.most_workers().unwrap_or(usize::MAX));
        // The number of queues that each worker may still get.
        let (count, workers_count) = (own.len(), workers.len().max(1));
        let share = |place: usize| count / workers_count + usize::from(place < count % workers_count);
        let mut left: Vec<_> = workers.into_iter().enumerate().map(|(at, one)| (one, share(at))).collect();
        let mut moving = Vec::new();
        for entry in own {
            let stays = left.iter_mut().find(|(worker, left)| worker.id == entry.worker() && *left > 0);
            match stays {
                Some((_, left)) => *left -= 1,
                None => moving.push(entry),
            }
        }
        let moves = moving.into_iter().filter_map(|entry| {
            let (to, left) = left.iter_mut().max_by_key(|(worker, left)| (*left, Reverse(worker.id)))?;
            *left = left.saturating_sub(1);
            Some((entry, to.clone()))
        });
        moves.collect()
    }
}
