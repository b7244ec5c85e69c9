//! Pauses disks: all their queues are drained and have no worker while the caller works on the images.
//!
//! `no live upgrade → new queues wait → Release to all at once → all drained → act → Adopt by the same workers → new queues start`
//!
//! - All queues pause, or none: if one does not drain in time, the others return to their workers immediately.
//! - No live upgrade may begin meanwhile, because the new server would start queues.
//! - The lock of each queue's place is held throughout. A session's message about the ring waits for the lock, and so
//!   does a move. A worker with a paused queue cannot be removed.

use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use super::entry::{Place, QueueEntry};
use super::moves::{released, take_back};
use super::{LOOK_AGAIN, Table, WorkerSet, others_change, wait_for_start};
use crate::data_path::assignment::deadline::Deadline;
use crate::data_path::disk::Disk;
use crate::data_path::queue::Queue;
use crate::data_path::worker::command::Command;
use crate::error::AdminError;

/// A queue that its worker is releasing.
struct Leaving<'a> {
    entry: &'a QueueEntry,
    place: MutexGuard<'a, Place>,
    id: u32,
    queue: Receiver<Box<Queue>>,
}

/// A drained queue without a worker. Returns to its worker when dropped.
struct Paused<'a> {
    set: &'a WorkerSet,
    entry: &'a QueueEntry,
    place: MutexGuard<'a, Place>,
    queue: Option<Box<Queue>>,
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.take() {
            take_back(self.entry, &mut self.place, queue);
            self.set.start_extra_engine(&self.entry.disk);
        }
    }
}

/// Keeps queues of these disks from starting.
struct Barrier<'a> {
    set: &'a WorkerSet,
    disks: &'a [Arc<Disk>],
}

impl<'a> Barrier<'a> {
    fn new(set: &'a WorkerSet, disks: &'a [Arc<Disk>], deadline: &Deadline<'_>) -> Result<Self, AdminError> {
        let mut table = set.table_once(deadline, |table| !table.is_upgrading)?;
        table.paused.extend(disks.iter().map(|disk| disk.id()));
        Ok(Self { set, disks })
    }

    fn disk(&self, id: u64) -> Option<&Disk> {
        self.disks.iter().find(|disk| disk.id() == id).map(|disk| &**disk)
    }
}

impl Drop for Barrier<'_> {
    fn drop(&mut self) {
        let mut table = self.set.table();
        for disk in self.disks {
            if let Some(at) = table.paused.iter().position(|paused| *paused == disk.id()) {
                table.paused.swap_remove(at);
            }
        }
        drop(table);
        self.set.unpaused.notify_all();
    }
}

impl WorkerSet {
    /// Runs `act` while the disks' queues take no requests and have none in flight. `timeout` limits the wait for
    /// requests in flight.
    ///
    /// # Errors
    /// [`AdminError`]; `act` has then not run.
    pub(crate) fn while_paused<T>(
        &self,
        disks: &[Arc<Disk>],
        timeout: Duration,
        act: impl FnOnce() -> T,
    ) -> Result<T, AdminError> {
        let deadline = self.deadline(timeout);
        // Dropped last, so that waiting queues start only after the paused ones have continued.
        let barrier = Barrier::new(self, disks, &deadline)?;
        let entries = self.entries_behind(&barrier, &deadline)?;
        let mut stays = None;
        let mut leaving = Vec::new();
        for entry in &entries {
            let Some(place) = deadline.lock(&entry.place) else {
                stays = Some(&**entry);
                break;
            };
            leaving.extend(leave(entry, place));
        }
        let mut paused = Vec::new();
        // Runs after a failure too: a queue that has left its worker must return.
        for Leaving { entry, mut place, id, queue } in leaving {
            match released(&place.worker, id, &queue, &deadline) {
                Some(queue) => {
                    place.id = None;
                    paused.push(Paused { set: self, entry, place, queue: Some(queue) });
                }
                None => stays = stays.or(Some(entry)),
            }
        }
        match stays {
            None => Ok(act()),
            Some(entry) => Err(not_drained(entry, &deadline)),
        }
    }

    /// Locks the table once the condition is met.
    pub(super) fn table_once(
        &self,
        deadline: &Deadline<'_>,
        condition: impl Fn(&Table) -> bool,
    ) -> Result<MutexGuard<'_, Table>, AdminError> {
        loop {
            let table = self.table();
            if condition(&table) {
                return Ok(table);
            }
            drop(table);
            if deadline.is_over() {
                return Err(others_change(deadline));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// The running queues of the disks. Waits for queues that a worker is starting now.
    fn entries_behind(
        &self,
        barrier: &Barrier<'_>,
        deadline: &Deadline<'_>,
    ) -> Result<Vec<Arc<QueueEntry>>, AdminError> {
        loop {
            let table = self.table();
            let mut starting = table.starting.iter();
            let starting = starting.find_map(|&(disk, queue)| Some((barrier.disk(disk)?, queue)));
            let Some((disk, queue)) = starting else {
                let entries = table.entries.iter().filter(|entry| barrier.disk(entry.disk.id()).is_some());
                return Ok(entries.map(Arc::clone).collect());
            };
            drop(table);
            wait_for_start(deadline, disk, queue)?;
        }
    }
}

/// Makes the worker release the queue. Returns `None` if the queue has ended.
fn leave<'a>(entry: &'a QueueEntry, place: MutexGuard<'a, Place>) -> Option<Leaving<'a>> {
    let id = place.id?;
    let (sender, queue) = sync_channel(1);
    let _ = place.worker.send(Command::Release(id, sender));
    Some(Leaving { entry, place, id, queue })
}

fn not_drained(entry: &QueueEntry, deadline: &Deadline<'_>) -> AdminError {
    if deadline.is_cut_short() {
        return AdminError::Stopping;
    }
    let (disk, queue, stays) = (entry.disk.name().to_owned(), entry.index, entry.worker());
    AdminError::NotDrained { disk, queue, timeout: deadline.timeout(), stays }
}
