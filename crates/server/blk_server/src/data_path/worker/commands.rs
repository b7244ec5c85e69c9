//! Carries out the worker's commands: starts, stops and moves queues, and changes their memory.
//!
//! `wakeup → Command → …`; if no request may be in an engine: `drain → last completion → drained → answer`
//!
//! How a queue moves: `Release → drained → the queue itself as the answer → Adopt on the other worker → resume, check
//! the ring`. Meanwhile no request of the queue is in an engine; parked requests move with it. Requests that the driver
//! adds wait in the ring until that check. A release that takes too long is cancelled, and the queue stays.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use guest_mem::GuestMemory;
use io_engine::{FileId, WatchId, WatchToken};
use tracing::{debug, error};

use super::{NewMemory, Worker, WorkerQueue};
use crate::data_path::disk::Disk;
use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::queue::Queue;
use crate::data_path::queue::fault_log::report_ring_fault;
use crate::data_path::queue::queue_start::{Ending, QueueStart};
use crate::data_path::worker::command::{Command, Unsuitable};
use crate::data_path::worker::timers::Timer;
use crate::host::signal::drain;

/// Resources that a worker prepares for a queue before it serves the queue.
struct Prepared {
    engine: usize,
    file: FileId,
    watch: WatchId,
}

impl Worker {
    pub(super) fn take_commands(&mut self) {
        drain(&self.wakeup);
        // Commands after the one that ends the worker are dropped with the channel; their senders turn to another
        // worker.
        while !self.quit
            && let Ok(command) = self.commands.try_recv()
        {
            self.execute(command);
        }
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Start(start, done) => {
                let started = self.start(&start);
                let _ = done.send(started);
            }
            Command::BeginStop(id, ending) => self.begin_stop(id, ending),
            Command::Stop(id, done) => {
                self.begin_stop(id, Ending::Ring);
                self.with(id, |entry| entry.stop = Some(done));
                self.touched.push(id);
            }
            Command::Release(id, taken) => {
                self.with(id, |entry| {
                    entry.queue.drain();
                    entry.leave = Some(taken);
                });
                self.touched.push(id);
            }
            Command::CancelRelease(id, done) => {
                let _ = done.send(self.cancel_release(id));
            }
            Command::Ping(done) => drop(done.send(())),
            Command::Adopt(queue, done) => {
                let _ = done.send(self.adopt(queue));
            }
            Command::SetCall(id, call, done) => {
                self.with(id, |entry| entry.queue.set_call(call));
                let _ = done.send(());
            }
            Command::SetErr(id, err, done) => {
                self.with(id, |entry| entry.queue.set_err(err));
                let _ = done.send(());
            }
            Command::SetMemory { queue, memory, drain, done } => {
                self.set_memory(queue, memory, drain, done);
            }
            Command::Resume(disk, done) => {
                let _ = done.send(self.resume_parked(disk));
            }
            Command::Cancel(disk) => self.engines.cancel(disk),
            Command::Limits(disk) => self.renew_gates(disk),
            Command::StartEngine(source, done) => self.start_engine(&source, done),
            Command::Retire(done) => {
                self.quit = self.queues.iter().all(Option::is_none);
                let _ = done.send(self.quit);
            }
            Command::Quit => self.quit = true,
        }
    }

    fn begin_stop(&mut self, id: u32, ending: Ending) {
        self.with(id, |entry| entry.queue.begin_stop(ending));
        self.activate_if_busy(id);
    }

    /// Activates a queue that has work without a kick. It may rest until its gate opens.
    fn activate_if_busy(&mut self, id: u32) {
        let entry = self.queues.get(id as usize).and_then(Option::as_ref);
        if entry.is_some_and(|entry| entry.queue.has_retries() || entry.queue.must_redo()) {
            self.activate(id);
        }
    }

    fn resume_parked(&mut self, disk: u64) -> usize {
        let mut all = 0;
        for id in (0..).take(self.queues.len()) {
            self.with(id, |entry| {
                if entry.queue.disk().id() == disk {
                    all += entry.queue.resume_parked();
                }
            });
            self.activate_if_busy(id);
        }
        all
    }

    fn start_engine(&mut self, source: &Arc<EngineSource>, done: Option<SyncSender<std::io::Result<()>>>) {
        let started = self.engines.start_unused(source);
        if let Err(error) = &started {
            error!(
                engine = source.name,
                "this worker cannot start an engine that other workers need: {error}"
            );
        }
        if let Some(done) = done {
            let _ = done.send(started);
        }
    }

    fn start(&mut self, start: &QueueStart) -> Option<u32> {
        let id = self.free_place()?;
        let queue = self.make_queue(start, id);
        let (queue, engine) = match queue {
            Ok(made) => made,
            Err(what) => {
                report_ring_fault(&start.disk, start.index, start.err.as_ref(), &what);
                return None;
            }
        };
        debug!(disk = start.disk.name(), queue = start.index, "queue started");
        self.put(id, queue, engine);
        Some(id)
    }

    fn free_place(&mut self) -> Option<u32> {
        let index = self.queues.iter().position(Option::is_none).unwrap_or(self.queues.len());
        if index == self.queues.len() {
            self.queues.push(None);
        }
        u32::try_from(index).ok()
    }

    fn make_queue(&mut self, start: &QueueStart, id: u32) -> Result<(Queue, usize), String> {
        let prepared = self.prepare(&start.disk, &start.kick, id)?;
        let engine = prepared.engine;
        let queue = Queue::new(start, id, prepared.file, prepared.watch);
        match queue {
            Ok(queue) => Ok((queue, engine)),
            Err(what) => {
                self.give_up(&prepared, &start.disk);
                Err(what)
            }
        }
    }

    /// Finds the engine, attaches the image and watches the kick. Undoes these steps if a later one fails.
    fn prepare(&mut self, disk: &Disk, kick: &Arc<OwnedFd>, id: u32) -> Result<Prepared, String> {
        let engine = self.engines.enter(disk.engine().as_ref());
        let engine = engine.map_err(|error| format!("its engine cannot be started: {error}"))?;
        let file = self.engines.attach(engine, disk).map_err(|error| {
            self.engines.leave(engine);
            format!("the engine does not accept the image: {error}")
        })?;
        let token = WatchToken(u64::from(id));
        let watch = self.engines.base().watch(Arc::clone(kick), token).map_err(|error| {
            self.engines.detach(engine, disk);
            self.engines.leave(engine);
            format!("its kick descriptor cannot be polled: {error}")
        })?;
        Ok(Prepared { engine, file, watch })
    }

    fn give_up(&mut self, prepared: &Prepared, disk: &Disk) {
        self.engines.base().unwatch(prepared.watch);
        self.engines.detach(prepared.engine, disk);
        self.engines.leave(prepared.engine);
    }

    /// Adds the queue to those that the worker serves.
    fn put(&mut self, id: u32, queue: Queue, engine: usize) {
        if let Some(engine) = self.engines.get_mut(engine) {
            engine.engine.use_memory(queue.memory());
            engine.pool.reserve(usize::from(queue.size()));
        }
        self.timers.set(Timer::Retry, queue.retry_due());
        self.gated.reserve(self.queues.len());
        let disk = self.turns.join(queue.disk().id());
        self.queues[id as usize] = Some(WorkerQueue::new(queue, engine, disk));
        // Checks the ring without a kick, because the kick may have gone to the previous server or worker.
        self.activate(id);
    }

    /// Serves a queue that another worker released.
    fn adopt(&mut self, mut queue: Box<Queue>) -> Result<u32, Unsuitable> {
        let Some(id) = self.free_place() else {
            return Err(Unsuitable { queue, why: "it has too many queues".into() });
        };
        let disk = Arc::clone(queue.disk());
        let prepared = match self.prepare(&disk, &queue.kick, id) {
            Ok(prepared) => prepared,
            Err(why) => return Err(Unsuitable { queue, why }),
        };
        // For other queues, this worker may already have handled a fault of this queue's memory.
        self.seen_faults = self.seen_faults.wrapping_sub(1);
        queue.arrive(id, prepared.file, prepared.watch);
        debug!(disk = disk.name(), "queue taken over");
        self.put(id, *queue, prepared.engine);
        Ok(id)
    }

    /// Returns whether the queue is still on this worker. If so, it continues.
    fn cancel_release(&mut self, id: u32) -> bool {
        let Some(Some(entry)) = self.queues.get_mut(id as usize) else { return false };
        if entry.leave.take().is_none() {
            return false;
        }
        if entry.memory.is_none() {
            entry.queue.resume();
        }
        self.activate(id);
        true
    }

    fn set_memory(&mut self, id: u32, memory: Arc<GuestMemory>, drain: bool, done: SyncSender<()>) {
        if drain {
            self.with(id, |entry| {
                entry.queue.drain();
                entry.memory = Some(NewMemory { memory, done });
            });
            self.touched.push(id);
            return;
        }
        self.change_memory(id, memory);
        let _ = done.send(());
    }

    /// Announces the new memory to the engine first, so that regions in both tables stay registered. Ops may therefore
    /// be in the engine meanwhile, except if regions are removed: the queue has then been drained first.
    fn change_memory(&mut self, id: u32, memory: Arc<GuestMemory>) {
        let Some(Some(entry)) = self.queues.get_mut(id as usize) else { return };
        let Some(engine) = self.engines.get_mut(entry.engine) else { return };
        let old = Arc::clone(entry.queue.memory());
        engine.engine.use_memory(&memory);
        entry.queue.set_memory(Arc::clone(&memory));
        // A queue that broke keeps its old memory until it stops.
        let broke = Arc::ptr_eq(entry.queue.memory(), &old);
        engine.engine.forget_memory(if broke { &memory } else { &old });
        engine.pool.forget(&old);
        self.activate_if_busy(id);
    }

    /// Carries out the commands that had to wait until the queue [is quiet](Queue::is_quiet) and the driver can see all
    /// completions.
    pub(super) fn drained(&mut self, id: u32) {
        let Some(Some(entry)) = self.queues.get_mut(id as usize) else { return };
        if let Some(NewMemory { memory, done }) = entry.memory.take() {
            self.change_memory(id, memory);
            self.with(id, |entry| {
                if entry.leave.is_none() {
                    entry.queue.resume();
                }
            });
            let _ = done.send(());
            self.activate(id);
        }
        let goes = |entry: &mut WorkerQueue| entry.stop.is_some() || entry.leave.is_some();
        let Some(WorkerQueue { queue, engine, disk, stop, leave, is_gated, .. }) =
            self.queues[id as usize].take_if(goes)
        else {
            return;
        };
        if is_gated {
            self.gated.retain(|&gated| gated != id);
        }
        self.turns.leave(disk, id);
        self.forget(&queue, engine);
        match (stop, leave) {
            (Some(done), _) => end(queue, &done),
            // The receiver exists: see `released` in `assignment/moves.rs`.
            (None, Some(taken)) => drop(taken.send(Box::new(queue))),
            (None, None) => {}
        }
    }

    /// Frees the worker's resources for the queue.
    fn forget(&mut self, queue: &Queue, engine: usize) {
        self.engines.base().unwatch(queue.watch);
        if let Some(slot) = self.engines.get_mut(engine) {
            slot.engine.forget_memory(queue.memory());
            slot.pool.forget(queue.memory());
        }
        self.engines.detach(engine, queue.disk());
        self.engines.leave(engine);
    }
}

/// Ends the queue, and answers with its ring's position.
fn end(mut queue: Queue, done: &SyncSender<u32>) {
    drain(&queue.kick);
    let position = queue.leave();
    debug!(disk = queue.disk().name(), position, "queue stopped");
    // Frees memory and descriptors before the answer.
    drop(queue);
    let _ = done.send(position);
}
