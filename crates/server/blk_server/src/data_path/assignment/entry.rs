//! A running queue, as threads other than its worker see it.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::data_path::counters::QueueMeter;
use crate::data_path::disk::Disk;
use crate::data_path::worker::command::Address;
use crate::data_path::worker::worker_options::WorkerId;

/// A running queue, as other threads see it.
#[derive(Debug)]
pub(super) struct QueueEntry {
    pub(super) disk: Arc<Disk>,
    pub(super) index: u16,
    pub(super) size: u16,
    pub(super) meter: Arc<QueueMeter>,
    /// A copy of the worker's id in `place`, readable without the lock.
    pub(super) worker: AtomicU32,
    pub(super) place: Mutex<Place>,
}

/// The worker that serves a queue, and the id by which the worker knows the queue.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) worker: Address,
    /// `None`: the queue has ended.
    pub(super) id: Option<u32>,
    /// The ring's position, if the queue ended because no worker could serve it.
    pub(super) ended_at: Option<u32>,
}

impl QueueEntry {
    pub(super) fn worker(&self) -> WorkerId {
        // Relaxed: whatever the memory order, the id may change before the caller uses it.
        WorkerId(self.worker.load(Relaxed))
    }

    pub(super) fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
