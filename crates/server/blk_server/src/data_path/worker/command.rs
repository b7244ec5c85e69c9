//! What other threads ask of a worker, and how they reach it.
//!
//! A worker shares no state with other threads. They send it a [`Command`] and signal its wakeup fd; an answer comes through
//! a channel of its own.
//!
//! Not here: the worker's thread (`workers.rs`), what the worker does with a command (`worker/commands.rs`).

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

/// Has a worker without a thread carry out what it was sent, if this wakeup fd is its own.
#[cfg(feature = "test-util")]
type StepWorker = fn(&Arc<OwnedFd>);

#[cfg(feature = "test-util")]
thread_local! {
    /// Set where a worker has no thread of its own.
    pub(crate) static STEPS_WORKER: std::cell::Cell<Option<StepWorker>> = const { std::cell::Cell::new(None) };
}

/// The worker's thread has ended.
#[derive(Debug, thiserror::Error)]
#[error("the worker is gone")]
pub(crate) struct WorkerGone;

/// A queue that a worker cannot serve, given back.
pub(crate) struct Unsuitable {
    pub(crate) queue: Box<Queue>,
    pub(crate) why: String,
}

/// What other threads ask of a worker. Queues are named by the number that `Start` or `Adopt` answered with.
pub(crate) enum Command {
    /// Answers `None` if the queue cannot run (already logged).
    Start(Arc<QueueStart>, SyncSender<Option<u32>>),
    BeginStop(u32, Ending),
    /// Answered, with the ring's position, when nothing is in flight any more.
    Stop(u32, SyncSender<u32>),
    /// Answered, with the queue itself, when nothing is in flight any more.
    Release(u32, SyncSender<Box<Queue>>),
    /// Answers whether the queue is still here, and goes on; otherwise it has been sent.
    CancelRelease(u32, SyncSender<bool>),
    /// Answered at once, by a worker that does not hang.
    Ping(SyncSender<()>),
    /// Serve a queue that another worker released.
    Adopt(Box<Queue>, SyncSender<Result<u32, Unsuitable>>),
    SetCall(u32, Option<Arc<OwnedFd>>, SyncSender<()>),
    SetErr(u32, Option<Arc<OwnedFd>>, SyncSender<()>),
    /// A memory that holds the ring where it was. `drain`: only when nothing is in flight, because regions go away.
    SetMemory {
        queue: u32,
        memory: Arc<GuestMemory>,
        drain: bool,
        done: SyncSender<()>,
    },
    /// Gives up what can be given up, of all disks or of one: they were told to end at once.
    Cancel(Option<u64>),
    /// Starts the worker's engine of the source, whether or not queues here use it. The answer says whether it runs.
    StartEngine(Arc<EngineSource>, Option<SyncSender<io::Result<()>>>),
    /// Tries the disk's parked requests again; answers how many there are.
    Resume(u64, SyncSender<usize>),
    /// Ends if it has no queues, and answers whether it does.
    Retire(SyncSender<bool>),
    Quit,
}

/// How to reach a worker.
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
