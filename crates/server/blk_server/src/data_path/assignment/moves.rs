//! Moves one queue: its worker drains and releases it, another worker adopts it.
//!
//! A queue that the other worker refuses goes back to its worker.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, sync_channel};

use tracing::error;

use super::deadline::Deadline;
use super::entry::{Place, QueueEntry};
use crate::data_path::queue::Queue;
use crate::data_path::worker::command::{Address, Command, Unsuitable, WorkerGone};
use crate::error::AdminError;

/// Drains the queue and gives it to another worker. The queue stays with its worker if it does not drain in time, or if
/// the other worker refuses it.
pub(super) fn move_queue(
    entry: &QueueEntry,
    to: &Address,
    deadline: &Deadline<'_>,
) -> Result<(), AdminError> {
    let not_drained = || {
        let (disk, queue, stays) = (entry.disk.name().to_owned(), entry.index, entry.worker());
        match deadline.is_cut_short() {
            true => AdminError::Stopping,
            false => AdminError::NotDrained { disk, queue, timeout: deadline.timeout(), stays },
        }
    };
    let mut place = deadline.lock(&entry.place).ok_or_else(not_drained)?;
    let Some(id) = place.id.filter(|_| place.worker.id != to.id) else { return Ok(()) };
    let (ping, answered) = sync_channel(1);
    let _ = to.send(Command::Ping(ping));
    let queue = release(&place.worker, id, deadline).ok_or_else(not_drained)?;
    // A worker that hangs, for example in an image's file system, looks idle, and would not serve the queue.
    let adopted = match deadline.receive(&answered) {
        Some(()) => adopt(to, queue),
        None => Err(Unsuitable { queue, why: "the worker does not answer".into() }),
    };
    let Unsuitable { queue, why } = match adopted {
        Ok(id) => {
            entry.worker.store(to.id.0, Relaxed);
            *place = Place { worker: to.clone(), id: Some(id), ended_at: None };
            return Ok(());
        }
        Err(unsuitable) => unsuitable,
    };
    take_back(entry, &mut place, queue);
    Err(AdminError::Unsuitable { id: to.id, disk: entry.disk.name().to_owned(), why })
}

/// Takes the queue from its worker. Returns `None` if the queue was not drained in time and continues there.
fn release(worker: &Address, id: u32, deadline: &Deadline<'_>) -> Option<Box<Queue>> {
    let (sender, queue) = sync_channel(1);
    worker.send(Command::Release(id, sender)).ok()?;
    released(worker, id, &queue, deadline)
}

/// Waits until the worker releases the queue. Returns `None` if the queue was not drained in time and continues there.
pub(super) fn released(
    worker: &Address,
    id: u32,
    queue: &Receiver<Box<Queue>>,
    deadline: &Deadline<'_>,
) -> Option<Box<Queue>> {
    if let Some(queue) = deadline.receive(queue) {
        return Some(queue);
    }
    // The worker may have sent the queue just now. Only the worker can tell.
    match worker.ask(|done| Command::CancelRelease(id, done)) {
        Ok(false) => queue.recv().ok(),
        _ => None,
    }
}

/// Returns a queue to its worker.
pub(super) fn take_back(entry: &QueueEntry, place: &mut Place, queue: Box<Queue>) {
    place.id = match adopt(&place.worker, queue) {
        Ok(id) => Some(id),
        Err(mut unsuitable) => {
            error!(
                disk = entry.disk.name(),
                queue = entry.index,
                "the worker cannot take the queue back: {}",
                unsuitable.why
            );
            unsuitable.queue.break_moved();
            place.ended_at = Some(unsuitable.queue.leave());
            None
        }
    };
}

fn adopt(worker: &Address, queue: Box<Queue>) -> Result<u32, Unsuitable> {
    // The worker still exists, because only a change retires a worker. The current change holds `admin`, or the place
    // of a queue of the worker, for which `remove_worker` waits.
    worker.ask(|done| Command::Adopt(queue, done)).unwrap_or_else(|WorkerGone| {
        error!("a worker's thread ended while a queue was being moved to it, so the server aborts");
        std::process::abort()
    })
}
