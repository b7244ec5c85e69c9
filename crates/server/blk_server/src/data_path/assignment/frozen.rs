//! Queues that no worker has: drained and taken from their workers, until they are given back or are another process's.
//!
//! `freeze: Release to all, side by side → all drained → the queues themselves ─ thaw → Adopt, where each was`
//!
//! - All of them or none: one that does not drain in time has those before it given back.
//! - Whoever freezes holds [`Changes`]: nobody moves queues meanwhile, and no worker goes.
//!
//! Not here: what of a queue the next process needs (`queue/changes.rs`).

use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tracing::error;

use super::{Place, QueueHandle, Seat, WorkerSet, adopt};
use crate::data_path::assignment::deadline::Deadline;
use crate::data_path::queue::Queue;
use crate::data_path::worker::command::{Address, Command};
use crate::error::AdminError;

/// A queue that was drained.
pub(crate) struct FrozenQueue {
    seat: Arc<Seat>,
    queue: Box<Queue>,
}

impl FrozenQueue {
    pub(crate) fn index(&self) -> u16 {
        self.seat.index
    }

    pub(crate) fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }
}

/// It was not drained in time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NotFrozen {
    pub(crate) queue: u16,
}

/// For as long as it lives, queues and workers stay where they are.
#[derive(Debug)]
pub(crate) struct Changes<'a> {
    _admin: MutexGuard<'a, ()>,
}

/// One on its way out.
struct Leaving<'a> {
    seat: &'a Arc<Seat>,
    place: MutexGuard<'a, Place>,
    id: u32,
    queue: Receiver<Box<Queue>>,
}

impl WorkerSet {
    /// Waits for changes that are being made.
    pub(crate) fn hold_changes(&self, timeout: Duration) -> Result<Changes<'_>, AdminError> {
        self.admin(&self.deadline(timeout)).map(|admin| Changes { _admin: admin })
    }

    /// A queue that has ended, because no worker could serve it, is not among them.
    pub(crate) fn freeze<'q>(
        &self,
        queues: impl Iterator<Item = &'q QueueHandle>,
        timeout: Duration,
    ) -> Result<Vec<FrozenQueue>, NotFrozen> {
        let deadline = self.deadline(timeout);
        let mut leaving = Vec::new();
        let mut stays = None;
        for QueueHandle { seat, .. } in queues {
            let Some(place) = deadline.lock(&seat.place) else {
                stays = Some(seat.index);
                break;
            };
            let Some(id) = place.id else { continue };
            let (sender, queue) = sync_channel(1);
            let _ = place.worker.send(Command::Release(id, sender));
            leaving.push(Leaving { seat, place, id, queue });
        }
        let mut frozen = Vec::new();
        for Leaving { seat, mut place, id, queue } in leaving {
            match released(&place.worker, id, &queue, &deadline) {
                Some(queue) => {
                    place.id = None;
                    frozen.push(FrozenQueue { seat: Arc::clone(seat), queue });
                }
                None => stays = stays.or(Some(seat.index)),
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

    /// They go on where they were.
    pub(crate) fn thaw(&self, queues: Vec<FrozenQueue>) {
        for FrozenQueue { seat, queue } in queues {
            take_back(&seat, &mut seat.place(), queue);
            self.start_extra_engine(&seat.disk);
        }
    }
}

/// What a worker was asked to release. `None`: not drained in time; the queue goes on.
pub(super) fn released(
    worker: &Address,
    id: u32,
    queue: &Receiver<Box<Queue>>,
    deadline: &Deadline<'_>,
) -> Option<Box<Queue>> {
    if let Some(queue) = deadline.receive(queue) {
        return Some(queue);
    }
    // It may have been sent just now: the worker alone knows.
    match worker.ask(|done| Command::CancelRelease(id, done)) {
        Ok(false) => queue.recv().ok(),
        _ => None,
    }
}

/// Gives the queue to the worker that had it.
pub(super) fn take_back(seat: &Seat, place: &mut Place, queue: Box<Queue>) {
    place.id = match adopt(&place.worker, queue) {
        Ok(id) => Some(id),
        Err(mut unsuitable) => {
            error!(disk = seat.disk.name(), queue = seat.index, "not taken back: {}", unsuitable.why);
            unsuitable.queue.break_moved();
            place.ended_at = Some(unsuitable.queue.leave());
            None
        }
    };
}
