//! Frozen queues: drained and removed from their workers, until they return to these workers or another process serves
//! them.
//!
//! `freeze: Release to all at once → all drained → the queues themselves ─ thaw → Adopt by the same workers`
//!
//! - Freezing succeeds for all queues or for none: if one does not drain in time, the others return to their workers.
//! - The caller holds [`Changes`], which prevents moves of queues, pauses of disks, and the end of workers.

use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use super::entry::{Place, QueueEntry};
use super::moves::{released, take_back};
use super::{QueueHandle, WorkerSet};
use crate::data_path::queue::Queue;
use crate::data_path::worker::command::Command;
use crate::error::AdminError;

/// A drained queue without a worker.
pub(crate) struct FrozenQueue {
    entry: Arc<QueueEntry>,
    queue: Box<Queue>,
}

impl FrozenQueue {
    pub(crate) fn index(&self) -> u16 {
        self.entry.index
    }

    pub(crate) fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }
}

/// A queue was not drained in time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NotFrozen {
    pub(crate) queue: u16,
}

/// While this value exists, queues and workers cannot change, and no disk can be paused.
#[derive(Debug)]
pub(crate) struct Changes<'a> {
    set: &'a WorkerSet,
    _admin: MutexGuard<'a, ()>,
}

impl Drop for Changes<'_> {
    fn drop(&mut self) {
        self.set.table().is_upgrading = false;
    }
}

/// A queue that its worker is releasing.
struct Leaving<'a> {
    entry: &'a Arc<QueueEntry>,
    place: MutexGuard<'a, Place>,
    id: u32,
    queue: Receiver<Box<Queue>>,
}

impl WorkerSet {
    /// Waits until other changes and pauses are finished.
    pub(crate) fn hold_changes(&self, timeout: Duration) -> Result<Changes<'_>, AdminError> {
        let deadline = self.deadline(timeout);
        let admin = self.admin(&deadline)?;
        self.table_once(&deadline, |table| table.paused.is_empty())?.is_upgrading = true;
        Ok(Changes { set: self, _admin: admin })
    }

    /// Freezes the given queues, except those that have no worker.
    pub(crate) fn freeze<'q>(
        &self,
        queues: impl Iterator<Item = &'q QueueHandle>,
        timeout: Duration,
    ) -> Result<Vec<FrozenQueue>, NotFrozen> {
        let deadline = self.deadline(timeout);
        let mut leaving = Vec::new();
        let mut stays = None;
        for QueueHandle { entry, .. } in queues {
            let Some(place) = deadline.lock(&entry.place) else {
                stays = Some(entry.index);
                break;
            };
            let Some(id) = place.id else { continue };
            let (sender, queue) = sync_channel(1);
            let _ = place.worker.send(Command::Release(id, sender));
            leaving.push(Leaving { entry, place, id, queue });
        }
        let mut frozen = Vec::new();
        for Leaving { entry, mut place, id, queue } in leaving {
            match released(&place.worker, id, &queue, &deadline) {
                Some(queue) => {
                    place.id = None;
                    frozen.push(FrozenQueue { entry: Arc::clone(entry), queue });
                }
                None => stays = stays.or(Some(entry.index)),
            }
        }
        match stays {
            None => Ok(frozen),
            Some(queue) => {
                self.thaw(frozen);
                Err(NotFrozen { queue })
            }
        }
    }

    /// Returns the queues to their workers.
    pub(crate) fn thaw(&self, queues: Vec<FrozenQueue>) {
        for FrozenQueue { entry, queue } in queues {
            take_back(&entry, &mut entry.place(), queue);
            self.start_extra_engine(&entry.disk);
        }
    }
}
