//! Assigns queues to workers, and moves them between workers.
//!
//! `start_queue (attached worker, or the least busy) → QueueEntry ─ move: release, drained, adopted ─→ another worker`
//!
//! - A [`QueueEntry`] represents a running queue to other threads. A thread holds the entry's lock while it sends the
//!   worker commands for the queue. A session's message may therefore wait for a move, at most as long as the queue may
//!   take to drain, and a move may wait for a message.
//! - The operator and the balancer change workers and queues one change at a time (`admin`). Each change has one
//!   [`Deadline`], and ends early if the server stops.
//! - A queue that a worker is starting has no entry yet. `attach` waits until it has one.
//! - Lock order: `admin`, `table`, then the lock of an entry. A thread holds `table` only for look-ups, and meanwhile
//!   waits neither for a worker nor for an entry's lock.

pub(crate) mod balanced;
pub(crate) mod deadline;

mod entry;
mod extra_engine;
pub(crate) mod frozen;
pub(crate) mod liveness;
mod moves;
mod paused;
mod spread;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use guest_mem::GuestMemory;
use tracing::info;

use deadline::Deadline;
use entry::{Place, QueueEntry};
use moves::move_queue;

use crate::data_path::counters::WorkerCounters;
use crate::data_path::disk::Disk;
use crate::data_path::queue::queue_start::{Ending, QueueStart};
use crate::data_path::report::{QueueReport, WorkerReport};
use crate::data_path::worker::command::{Address, Command, WorkerGone};
use crate::data_path::worker::worker_options::{WorkerId, WorkerOptions};
use crate::data_path::worker::worker_thread::warn_if_crowded;
use crate::data_path::worker::workers::{SharedSettings, WorkerThread};
use crate::error::AdminError;
use crate::error::ServerError;

/// Pause between two look-ups of the entry of a queue that is being started.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// A session's handle of its queue.
#[derive(Debug)]
pub(crate) struct QueueHandle {
    entry: Arc<QueueEntry>,
    set: Arc<WorkerSet>,
}

impl QueueHandle {
    pub(crate) fn set_call(&self, call: Option<Arc<OwnedFd>>) -> Result<(), WorkerGone> {
        self.ask(|id, done| Command::SetCall(id, call, done)).map(drop)
    }

    pub(crate) fn set_err(&self, err: Option<Arc<OwnedFd>>) -> Result<(), WorkerGone> {
        // Waits for the worker's answer, so that a front-end that repeats the message cannot pile up descriptors in the
        // worker's channel.
        self.ask(|id, done| Command::SetErr(id, err, done)).map(drop)
    }

    /// `memory` must contain the ring at its previous addresses.
    pub(crate) fn set_memory(&self, memory: Arc<GuestMemory>, drain: bool) -> Result<(), WorkerGone> {
        self.ask(|queue, done| Command::SetMemory { queue, memory, drain, done }).map(drop)
    }

    /// Makes the queue take no more requests. [`QueueHandle::stop`] waits until it has stopped.
    pub(crate) fn begin_stop(&self, ending: Ending) {
        let place = self.entry.place();
        if let Some(id) = place.id {
            let _ = place.worker.send(Command::BeginStop(id, ending));
        }
    }

    /// Stops the queue. Returns the ring's position once the queue [is quiet](crate::data_path::queue::Queue::is_quiet).
    pub(crate) fn stop(self) -> Option<u32> {
        let mut place = self.entry.place();
        // Clears the id, because a move may be waiting for the lock, and the id may soon refer to another queue.
        let position = match place.id.take() {
            Some(id) => place.worker.ask(|done| Command::Stop(id, done)).ok(),
            None => place.ended_at,
        };
        drop(place);
        self.forget();
        position
    }

    /// Removes the queue from the set. It has stopped, or another process owns its ring.
    pub(crate) fn forget(self) {
        self.set.table().entries.retain(|entry| !Arc::ptr_eq(entry, &self.entry));
    }

    /// Returns `None` if the queue has ended.
    fn ask<T>(
        &self,
        command: impl FnOnce(u32, std::sync::mpsc::SyncSender<T>) -> Command,
    ) -> Result<Option<T>, WorkerGone> {
        let place = self.entry.place();
        let Some(id) = place.id else { return Ok(None) };
        place.worker.ask(|done| command(id, done)).map(Some)
    }
}

#[derive(Debug, Default)]
struct Table {
    /// Sorted by id.
    workers: Vec<WorkerThread>,
    /// A worker that is being removed and gets no more queues.
    leaving: Option<WorkerId>,
    next_id: u32,
    entries: Vec<Arc<QueueEntry>>,
    /// Queues that a worker is starting, each as disk id and queue index.
    starting: Vec<(u64, u16)>,
    /// Ids of the paused disks, whose queues wait before they start.
    paused: Vec<u64>,
    /// A live upgrade is taking place, so no disk can be paused. No live upgrade begins while a disk is paused.
    is_upgrading: bool,
    /// The worker to which the operator attached a queue, by disk id and queue index. The queue starts there again.
    attached: HashMap<(u64, u16), WorkerId>,
}

impl Table {
    fn next_id(&mut self) -> WorkerId {
        self.next_id += 1;
        WorkerId(self.next_id - 1)
    }

    fn address(&self, id: WorkerId) -> Option<Address> {
        self.workers.iter().map(|worker| &worker.address).find(|address| address.id == id).cloned()
    }

    /// The worker to which the queue is attached. If there is none: among the workers that may serve the disk, the one
    /// with the fewest queues of that disk, then with the fewest queues overall.
    fn worker_for(&self, disk: &Disk, queue: u16) -> Option<Address> {
        if let Some(&id) = self.attached.get(&(disk.id(), queue)).filter(|&&id| Some(id) != self.leaving) {
            return self.address(id);
        }
        let places: Vec<_> =
            self.entries.iter().map(|entry| (entry.disk.id() == disk.id(), entry.worker())).collect();
        let queues = |id, own_only: bool| {
            places.iter().filter(|&&(own, worker)| worker == id && (own || !own_only)).count()
        };
        let addresses = self.workers.iter().map(|worker| &worker.address);
        let staying: Vec<_> = addresses.filter(|address| Some(address.id) != self.leaving).collect();
        let serving = staying.iter().filter(|address| queues(address.id, true) > 0).count();
        let full = disk.most_workers().is_some_and(|most| serving >= most);
        let may = staying.into_iter().filter(|address| !full || queues(address.id, true) > 0);
        may.min_by_key(|address| (queues(address.id, true), queues(address.id, false), address.id)).cloned()
    }
}

/// All workers of a server, and their queues.
#[derive(Debug)]
pub(crate) struct WorkerSet {
    shared: SharedSettings,
    admin: Mutex<()>,
    table: Mutex<Table>,
    /// Wakes threads that wait for the end of a pause in order to start a queue.
    unpaused: Condvar,
    /// True once the server stops: changes then end early.
    stopping: AtomicBool,
}

impl WorkerSet {
    /// # Errors
    /// A thread or an engine cannot start, or a thread cannot run with its options.
    pub(crate) fn start(workers: &[WorkerOptions], shared: SharedSettings) -> Result<Arc<Self>, ServerError> {
        warn_if_crowded(workers);
        let mut table = Table::default();
        for options in workers {
            let id = table.next_id();
            table.workers.push(WorkerThread::start(id, options.clone(), &shared)?);
        }
        let (table, stopping) = (Mutex::new(table), AtomicBool::new(false));
        let (admin, unpaused) = (Mutex::default(), Condvar::new());
        Ok(Arc::new(Self { shared, admin, table, unpaused, stopping }))
    }

    /// The workers of a server that steps its only worker itself.
    #[cfg(feature = "test-util")]
    pub(crate) fn of_one(worker: WorkerThread, shared: SharedSettings) -> Arc<Self> {
        let mut table = Table::default();
        table.next_id();
        table.workers.push(worker);
        let (table, stopping) = (Mutex::new(table), AtomicBool::new(false));
        Arc::new(Self { shared, admin: Mutex::default(), table, unpaused: Condvar::new(), stopping })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes current and later changes end instead of waiting.
    pub(crate) fn stop_changes(&self) {
        // Relaxed: see `Deadline::is_cut_short`.
        self.stopping.store(true, Relaxed);
    }

    pub(crate) fn deadline(&self, timeout: Duration) -> Deadline<'_> {
        Deadline::new(timeout, &self.stopping)
    }

    /// Acquires the lock that serialises changes to workers and queues.
    pub(crate) fn admin(&self, deadline: &Deadline<'_>) -> Result<MutexGuard<'_, ()>, AdminError> {
        deadline.lock(&self.admin).ok_or_else(|| others_change(deadline))
    }

    /// Returns `None` if the queue cannot run. The worker has then logged why and signalled the err fd.
    pub(crate) fn start_queue(
        self: &Arc<Self>,
        start: QueueStart,
    ) -> Result<Option<QueueHandle>, WorkerGone> {
        let _starting = Starting::begin(self, (start.disk.id(), start.index));
        let start = Arc::new(start);
        loop {
            let worker = self.table().worker_for(&start.disk, start.index).ok_or(WorkerGone)?;
            // A worker that retired meanwhile dropped the command. Another worker exists.
            let Ok(id) = worker.ask(|done| Command::Start(Arc::clone(&start), done)) else { continue };
            if id.is_some() {
                self.start_extra_engine(&start.disk);
            }
            return Ok(id.map(|id| self.add_entry(&start, Place { worker, id: Some(id), ended_at: None })));
        }
    }

    /// Moves a queue, and starts its disk's extra engine, which may have ended meanwhile.
    fn move_queue(
        &self,
        entry: &QueueEntry,
        to: &Address,
        deadline: &Deadline<'_>,
    ) -> Result<(), AdminError> {
        let moved = move_queue(entry, to, deadline);
        self.start_extra_engine(&entry.disk);
        moved
    }

    fn add_entry(self: &Arc<Self>, start: &QueueStart, place: Place) -> QueueHandle {
        let entry = Arc::new(QueueEntry {
            disk: Arc::clone(&start.disk),
            index: start.index,
            size: start.layout.map_or(0, |layout| layout.queue_size),
            meter: Arc::clone(&start.meter),
            worker: AtomicU32::new(place.worker.id.0),
            place: Mutex::new(place),
        });
        self.table().entries.push(Arc::clone(&entry));
        QueueHandle { entry, set: Arc::clone(self) }
    }

    /// Cancels the cancellable requests of one disk, or of all disks.
    pub(crate) fn cancel(&self, disk: Option<u64>) {
        for worker in &self.table().workers {
            let _ = worker.address.send(Command::Cancel(disk));
        }
    }

    /// Makes the disk's running queues apply its current limits.
    pub(crate) fn renew_gates(&self, disk: u64) {
        for worker in &self.table().workers {
            let _ = worker.address.send(Command::Limits(disk));
        }
    }

    /// Removes the attachments of the disk's queues.
    pub(crate) fn forget_disk(&self, disk: u64) {
        self.table().attached.retain(|&(known, _), _| known != disk);
    }

    pub(crate) fn queue_reports(&self, disk: u64) -> Vec<QueueReport> {
        let entries: Vec<_> =
            self.table().entries.iter().filter(|entry| entry.disk.id() == disk).map(Arc::clone).collect();
        let mut queues: Vec<_> = entries
            .iter()
            .map(|entry| QueueReport {
                index: entry.index,
                worker: entry.worker(),
                size: entry.size,
                counters: entry.meter.read(),
            })
            .collect();
        queues.sort_by_key(|queue| queue.index);
        queues
    }

    pub(crate) fn worker_reports(&self) -> Vec<WorkerReport> {
        let table = self.table();
        let places: Vec<_> = table.entries.iter().map(|entry| entry.worker()).collect();
        let known = |worker: &WorkerThread| {
            let id = worker.address.id;
            let queues = places.iter().filter(|&&place| place == id).count();
            let report = WorkerReport {
                id,
                options: worker.options.clone(),
                node: worker.node,
                queues,
                counters: WorkerCounters::default(),
            };
            (report, Arc::clone(&worker.meter))
        };
        let known: Vec<_> = table.workers.iter().map(known).collect();
        // Reads the kernel's counters without the lock.
        drop(table);
        known.into_iter().map(|(report, meter)| WorkerReport { counters: meter.read(), ..report }).collect()
    }

    pub(crate) fn has_worker(&self, id: WorkerId) -> bool {
        self.table().address(id).is_some()
    }

    pub(crate) fn worker_count(&self) -> usize {
        self.table().workers.len()
    }

    pub(crate) fn add_worker(&self, options: WorkerOptions) -> Result<WorkerId, AdminError> {
        // Starts the worker without holding a lock: a worker in a frozen control group may take forever to start.
        let id = self.table().next_id();
        let worker = WorkerThread::start(id, options, &self.shared)?;
        let mut table = self.table();
        let place = table.workers.partition_point(|other| other.address.id < id);
        table.workers.insert(place, worker);
        drop(table);
        info!(worker = id.0, "worker added");
        Ok(id)
    }

    /// Moves the worker's queues to other workers, then ends the worker.
    pub(crate) fn remove_worker(&self, id: WorkerId, timeout: Duration) -> Result<(), AdminError> {
        let deadline = self.deadline(timeout);
        let _admin = self.admin(&deadline)?;
        let address = self.begin_leaving(id)?;
        let moved = self.move_all(&address, &deadline);
        let mut table = self.table();
        table.leaving = None;
        moved?;
        table.attached.retain(|_, worker| *worker != id);
        let at = table.workers.iter().position(|worker| worker.address.id == id);
        let ended = at.map(|at| table.workers.remove(at));
        drop(table);
        // Joins the thread, which ends at once.
        drop(ended);
        info!(worker = id.0, "worker removed");
        Ok(())
    }

    fn begin_leaving(&self, id: WorkerId) -> Result<Address, AdminError> {
        let mut table = self.table();
        let address = table.address(id).ok_or(AdminError::NoWorker { id })?;
        if table.workers.len() == 1 {
            return Err(AdminError::LastWorker { id });
        }
        table.leaving = Some(id);
        Ok(address)
    }

    /// Repeats until the worker has no queues and ends, because a queue may have been moving to it.
    fn move_all(&self, from: &Address, deadline: &Deadline<'_>) -> Result<(), AdminError> {
        loop {
            let entries: Vec<_> = self.table().entries.clone();
            for entry in entries.iter().filter(|entry| entry.worker() == from.id) {
                let to = self.table().worker_for(&entry.disk, entry.index);
                let to = to.ok_or(AdminError::LastWorker { id: from.id })?;
                self.move_queue(entry, &to, deadline)?;
            }
            if from.ask(Command::Retire).unwrap_or(true) {
                return Ok(());
            }
        }
    }

    /// Moves the queue to `worker`, or records that it must start on that worker.
    pub(crate) fn attach(
        &self,
        disk: &Disk,
        queue: u16,
        worker: WorkerId,
        timeout: Duration,
    ) -> Result<Attached, AdminError> {
        let deadline = self.deadline(timeout);
        let _admin = self.admin(&deadline)?;
        if queue >= disk.queues() {
            let (disk, queues) = (disk.name().to_owned(), disk.queues());
            return Err(AdminError::NoQueue { disk, queue, queues });
        }
        self.attach_one(disk, queue, worker, &deadline)
    }

    /// The caller holds `admin`.
    fn attach_one(
        &self,
        disk: &Disk,
        queue: u16,
        worker: WorkerId,
        deadline: &Deadline<'_>,
    ) -> Result<Attached, AdminError> {
        let name = (disk.id(), queue);
        let mut table = self.table();
        let to = table.address(worker).ok_or(AdminError::NoWorker { id: worker })?;
        let before = table.attached.insert(name, worker);
        drop(table);
        let moved = self.entry_of(disk, queue, deadline).and_then(|entry| match entry {
            Some(entry) => self.move_queue(&entry, &to, deadline).map(|()| Attached::Running),
            None => Ok(Attached::WillStart),
        });
        if moved.is_err() {
            let mut table = self.table();
            match before {
                Some(before) => table.attached.insert(name, before),
                None => table.attached.remove(&name),
            };
        }
        moved
    }

    /// The queue's entry, if it runs. Waits for a queue that is being started, because its start may have missed a new
    /// entry in `attached`.
    fn entry_of(
        &self,
        disk: &Disk,
        queue: u16,
        deadline: &Deadline<'_>,
    ) -> Result<Option<Arc<QueueEntry>>, AdminError> {
        loop {
            let table = self.table();
            if !table.starting.contains(&(disk.id(), queue)) {
                let entry =
                    table.entries.iter().find(|entry| entry.disk.id() == disk.id() && entry.index == queue);
                return Ok(entry.map(Arc::clone));
            }
            drop(table);
            wait_for_start(deadline, disk, queue)?;
        }
    }
}

/// Waits for a moment, so that the caller checks again whether this queue has started. Fails at the deadline.
fn wait_for_start(deadline: &Deadline<'_>, disk: &Disk, queue: u16) -> Result<(), AdminError> {
    if deadline.is_cut_short() {
        return Err(AdminError::Stopping);
    }
    if deadline.is_over() {
        let (disk, timeout) = (disk.name().to_owned(), deadline.timeout());
        return Err(AdminError::NotStarted { disk, queue, timeout });
    }
    std::thread::sleep(LOOK_AGAIN);
    Ok(())
}

fn others_change(deadline: &Deadline<'_>) -> AdminError {
    match deadline.is_cut_short() {
        true => AdminError::Stopping,
        false => AdminError::OthersChange { timeout: deadline.timeout() },
    }
}

/// The result of attaching a queue to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attached {
    /// The queue runs on the worker.
    Running,
    /// The queue does not run. It will start on the worker.
    WillStart,
}

/// Marks a queue as being started until it has its entry.
struct Starting<'a> {
    set: &'a WorkerSet,
    queue: (u64, u16),
}

impl<'a> Starting<'a> {
    /// Waits until the queue's disk is not paused.
    fn begin(set: &'a WorkerSet, queue: (u64, u16)) -> Self {
        let waited = set.unpaused.wait_while(set.table(), |table| table.paused.contains(&queue.0));
        waited.unwrap_or_else(PoisonError::into_inner).starting.push(queue);
        Self { set, queue }
    }
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        self.set.table().starting.retain(|other| *other != self.queue);
    }
}
