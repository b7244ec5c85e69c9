//! Commands for a worker, and how other threads send them.
//!
//! A worker shares no state with other threads, which send it a [`Command`] and signal its wakeup fd. The command
//! contains a channel for the answer. `worker/commands.rs` carries commands out.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender, sync_channel};

use guest_mem::GuestMemory;

use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::queue::Queue;
use crate::data_path::queue::queue_start::{Ending, QueueStart};
use crate::data_path::worker::worker_options::WorkerId;
use crate::host::signal::signal;

/// Steps a worker that has no thread, if this is the worker's wakeup fd.
#[cfg(feature = "test-util")]
type StepWorker = fn(&Arc<OwnedFd>);

#[cfg(feature = "test-util")]
thread_local! {
    /// Runs one step of the worker. Set only on a thread that steps its worker itself.
    pub(crate) static STEPS_WORKER: std::cell::Cell<Option<StepWorker>> = const { std::cell::Cell::new(None) };
}

/// The worker's thread has ended.
#[derive(Debug, thiserror::Error)]
#[error("the worker's thread has ended")]
pub(crate) struct WorkerGone;

/// A queue that the worker returns because it cannot serve it.
pub(crate) struct Unsuitable {
    pub(crate) queue: Box<Queue>,
    pub(crate) why: String,
}

/// A command for a worker. `Start` and `Adopt` answer with the queue's id, which other commands use.
pub(crate) enum Command {
    /// Answers `None` if the queue cannot run; the worker has logged why.
    Start(Arc<QueueStart>, SyncSender<Option<u32>>),
    BeginStop(u32, Ending),
    /// Answers with the ring's position once the queue [is quiet](Queue::is_quiet).
    Stop(u32, SyncSender<u32>),
    /// Answers with the queue itself, including its parked requests, once it [is quiet](Queue::is_quiet).
    Release(u32, SyncSender<Box<Queue>>),
    /// Answers whether the queue is still on this worker and continues. If not, the worker has sent it to the receiver
    /// of `Release`.
    CancelRelease(u32, SyncSender<bool>),
    /// The worker answers at once, unless it hangs.
    Ping(SyncSender<()>),
    /// Serves a queue that another worker released.
    Adopt(Box<Queue>, SyncSender<Result<u32, Unsuitable>>),
    SetCall(u32, Option<Arc<OwnedFd>>, SyncSender<()>),
    SetErr(u32, Option<Arc<OwnedFd>>, SyncSender<()>),
    /// Changes to a memory that contains the ring at its previous addresses. `drain`: waits until the queue
    /// [is quiet](Queue::is_quiet), because regions are removed.
    SetMemory {
        queue: u32,
        memory: Arc<GuestMemory>,
        drain: bool,
        done: SyncSender<()>,
    },
    /// Cancels the cancellable requests of one disk, or of all disks.
    Cancel(Option<u64>),
    /// The disk's limits have changed.
    Limits(u64),
    /// Starts the worker's engine of this source, even if no queue of the worker uses it. Answers whether the engine
    /// runs.
    StartEngine(Arc<EngineSource>, Option<SyncSender<io::Result<()>>>),
    /// Retries the disk's parked requests. Answers with their number.
    Resume(u64, SyncSender<usize>),
    /// Ends the worker if it has no queues. Answers whether it ends.
    Retire(SyncSender<bool>),
    Quit,
}

/// The address to which other threads send a worker's commands.
#[derive(Clone, Debug)]
pub(crate) struct Address {
    pub(crate) id: WorkerId,
    commands: Sender<Command>,
    wakeup: Arc<OwnedFd>,
}

impl Address {
    pub(crate) fn new(id: WorkerId, commands: Sender<Command>, wakeup: Arc<OwnedFd>) -> Self {
        Self { id, commands, wakeup }
    }

    pub(crate) fn send(&self, command: Command) -> Result<(), WorkerGone> {
        self.commands.send(command).map_err(|_| WorkerGone)?;
        signal(&self.wakeup);
        Ok(())
    }

    pub(crate) fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, WorkerGone> {
        let (answer, answered) = sync_channel(1);
        self.send(command(answer))?;
        #[cfg(feature = "test-util")]
        if let Some(step) = STEPS_WORKER.get() {
            step(&self.wakeup);
        }
        answered.recv().map_err(|_| WorkerGone)
    }
}
