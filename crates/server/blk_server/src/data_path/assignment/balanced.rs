//! What the balancer can do with the workers: read their counters, and move queues between them.

use std::sync::Arc;
use std::time::Duration;

use super::WorkerSet;
use super::entry::QueueEntry;
use crate::data_path::counters::QueueCounters;
use crate::data_path::report::WorkerReport;
use crate::data_path::worker::worker_options::WorkerId;
use crate::error::AdminError;

/// A snapshot of all counters.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    pub(crate) workers: Vec<WorkerReport>,
    pub(crate) queues: Vec<QueueReading>,
}

/// A snapshot of one queue's counters.
#[derive(Clone, Debug)]
pub(crate) struct QueueReading {
    pub(crate) name: QueueName,
    pub(crate) worker: WorkerId,
    pub(crate) counters: QueueCounters,
    /// Whether an operator attached the queue to its worker.
    pub(crate) attached: bool,
    /// Maximum number of workers that may serve the queue's disk.
    pub(crate) most_workers: Option<usize>,
}

/// Identifies a queue of the server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct QueueName {
    pub(crate) disk: String,
    pub(crate) queue: u16,
}

/// The balancer's interface to the server.
pub(crate) trait Balanced: Send {
    /// Reads the counters.
    fn read(&self) -> Reading;

    /// Moves the queue to the worker. If its requests in flight do not complete within `timeout`, the queue stays on
    /// its worker.
    ///
    /// # Errors
    /// Why the queue could not be moved, in words for the operator.
    fn move_queue(
        &self,
        disk: &str,
        queue: u16,
        to: WorkerId,
        timeout: Duration,
    ) -> Result<(), Box<dyn std::error::Error>>;
}

/// The balancer's moves are not recorded: a restarted queue gets the least loaded worker.
impl Balanced for Arc<WorkerSet> {
    fn read(&self) -> Reading {
        let workers = self.worker_reports();
        let table = self.table();
        let attached = |entry: &Arc<QueueEntry>| table.attached.contains_key(&(entry.disk.id(), entry.index));
        let entries: Vec<_> =
            table.entries.iter().map(|entry| (Arc::clone(entry), attached(entry))).collect();
        drop(table);
        let queues = entries.into_iter().map(|(entry, attached)| QueueReading {
            name: QueueName { disk: entry.disk.name().to_owned(), queue: entry.index },
            worker: entry.worker(),
            counters: entry.meter.read(),
            attached,
            most_workers: entry.disk.most_workers(),
        });
        Reading { workers, queues: queues.collect() }
    }

    fn move_queue(
        &self,
        disk: &str,
        queue: u16,
        to: WorkerId,
        timeout: Duration,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let deadline = self.deadline(timeout);
        let _admin = self.admin(&deadline)?;
        let table = self.table();
        let to = table.address(to).ok_or(AdminError::NoWorker { id: to })?;
        let entry = table.entries.iter().find(|entry| entry.disk.name() == disk && entry.index == queue);
        let entry = entry.map(Arc::clone).ok_or("the queue has stopped")?;
        if table.attached.contains_key(&(entry.disk.id(), queue)) {
            return Err("the operator has just attached it to a worker".into());
        }
        drop(table);
        Ok(WorkerSet::move_queue(self, &entry, &to, &deadline)?)
    }
}
