//! The workers of a server from outside: which queue goes where, and what other threads ask of a worker.
//!
//! A worker shares no state with other threads. They send it a [`Command`] and signal its eventfd; what
//! has an answer is answered through a channel of its own.
//!
//! Not here: the loop that obeys (`worker.rs`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use guest_mem::GuestMemory;
use io_engine::Engine;
use rustix::event::{EventfdFlags, eventfd};
use tracing::error;
use virtqueue::{RingFeatures, RingLayout, packed};

use crate::disk::{Disk, DiskConfig};
use crate::session::SessionShared;
use crate::signal::{adopt, signal};
use crate::submissions::SubmissionMeter;
use crate::worker::Worker;

/// The worker's thread has ended.
#[derive(Debug, thiserror::Error)]
#[error("the worker is gone")]
pub(crate) struct WorkerGone;

/// Everything a worker needs to run a queue.
pub(crate) struct QueueStart {
    pub(crate) disk: Arc<Disk>,
    pub(crate) session: Arc<SessionShared>,
    pub(crate) index: u16,
    pub(crate) memory: Arc<GuestMemory>,
    /// `None`: an address lies in no region.
    pub(crate) layout: Option<RingLayout>,
    pub(crate) ring: RingFeatures,
    /// As the front-end sent it: 16 bits of a split ring's index, two positions of a packed ring.
    pub(crate) base: u32,
    /// If the ring turns out to be in use, its guest may have switched the cache off before this process.
    pub(crate) cache_choice_unknown: bool,
    pub(crate) kick: Arc<OwnedFd>,
    pub(crate) call: Option<Arc<OwnedFd>>,
    pub(crate) err: Option<Arc<OwnedFd>>,
}

impl QueueStart {
    /// Queue 0 of a disk that has no front-end; its write cache starts as the image's cache mode says.
    pub(crate) fn alone(
        disk: DiskConfig,
        memory: Arc<GuestMemory>,
        layout: RingLayout,
        ring: RingFeatures,
        kick: OwnedFd,
        call: OwnedFd,
    ) -> io::Result<Self> {
        let disk = Arc::new(Disk::new(disk).map_err(io::Error::other)?);
        let session = SessionShared::new(0)?;
        session.set_write_cache(disk.guest_cache().mode_at_first());
        Ok(Self {
            disk,
            session,
            index: 0,
            memory,
            layout: Some(layout),
            ring,
            base: if ring.packed { packed::FRESH_BASE } else { 0 },
            cache_choice_unknown: false,
            kick: adopt(kick)?,
            call: Some(adopt(call)?),
            err: None,
        })
    }
}

/// What other threads ask of a worker. Queues are named by the number that `Start` answered with.
pub(crate) enum Command {
    /// Answers `None` if the queue cannot run (already logged).
    Start(Box<QueueStart>, SyncSender<Option<u32>>),
    BeginStop(u32),
    /// Answered, with the ring's position, when nothing is in flight any more.
    Stop(u32, SyncSender<u32>),
    SetCall(u32, Option<Arc<OwnedFd>>, SyncSender<()>),
    SetErr(u32, Option<Arc<OwnedFd>>, SyncSender<()>),
    /// `drain`: only when nothing is in flight, because regions go away.
    SetMemory {
        queue: u32,
        memory: Arc<GuestMemory>,
        layout: Option<RingLayout>,
        drain: bool,
        done: SyncSender<()>,
    },
    /// Gives up what can be given up: the server was told to end at once.
    CancelAll,
    Quit,
}

/// How to reach a worker.
#[derive(Clone, Debug)]
struct Address {
    commands: Sender<Command>,
    doorbell: Arc<OwnedFd>,
}

impl Address {
    fn send(&self, command: Command) -> Result<(), WorkerGone> {
        self.commands.send(command).map_err(|_| WorkerGone)?;
        signal(&self.doorbell);
        Ok(())
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, WorkerGone> {
        let (answer, answered) = sync_channel(1);
        self.send(command(answer))?;
        answered.recv().map_err(|_| WorkerGone)
    }
}

/// A running queue, from outside its worker.
#[derive(Debug)]
pub(crate) struct QueueHandle {
    worker: Address,
    id: u32,
}

impl QueueHandle {
    pub(crate) fn set_call(&self, call: Option<Arc<OwnedFd>>) -> Result<(), WorkerGone> {
        self.worker.ask(|done| Command::SetCall(self.id, call, done))
    }

    pub(crate) fn set_err(&self, err: Option<Arc<OwnedFd>>) -> Result<(), WorkerGone> {
        // Answered, so that a peer that repeats it cannot pile up descriptors in the worker's channel.
        self.worker.ask(|done| Command::SetErr(self.id, err, done))
    }

    pub(crate) fn set_memory(
        &self,
        memory: Arc<GuestMemory>,
        layout: Option<RingLayout>,
        drain: bool,
    ) -> Result<(), WorkerGone> {
        let queue = self.id;
        self.worker.ask(|done| Command::SetMemory { queue, memory, layout, drain, done })
    }

    /// Takes nothing more from the ring from now on; [`QueueHandle::stop`] waits.
    pub(crate) fn begin_stop(&self) {
        let _ = self.worker.send(Command::BeginStop(self.id));
    }

    /// Returns the ring's position once everything submitted is complete.
    pub(crate) fn stop(self) -> Option<u32> {
        self.worker.ask(|done| Command::Stop(self.id, done)).ok()
    }
}

/// All workers of a server, and which queue goes where.
#[derive(Debug)]
pub(crate) struct WorkerSet {
    workers: Vec<(Address, Option<JoinHandle<()>>)>,
}

impl WorkerSet {
    /// One worker per engine; all count in `meter`, if there is one.
    ///
    /// # Errors
    /// If a thread or an engine does not start.
    pub(crate) fn start(
        engines: Vec<Box<dyn Engine>>,
        depth: usize,
        poll: Duration,
        meter: Option<&Arc<SubmissionMeter>>,
    ) -> std::io::Result<Self> {
        let workers = engines.into_iter().enumerate();
        let started =
            workers.map(|(number, engine)| start_worker(number, engine, depth, poll, meter.cloned()));
        Ok(Self { workers: started.collect::<Result<_, _>>()? })
    }

    /// `None`: the queue cannot run; logged, and its err fd signalled.
    pub(crate) fn start_queue(&self, start: QueueStart) -> Result<Option<QueueHandle>, WorkerGone> {
        let worker = self.workers.get(usize::from(start.index) % self.workers.len());
        let (worker, _) = worker.ok_or(WorkerGone)?;
        let id = worker.ask(|done| Command::Start(Box::new(start), done))?;
        Ok(id.map(|id| QueueHandle { worker: worker.clone(), id }))
    }

    pub(crate) fn cancel_all(&self) {
        for (worker, _) in &self.workers {
            let _ = worker.send(Command::CancelAll);
        }
    }
}

impl Drop for WorkerSet {
    fn drop(&mut self) {
        for (worker, thread) in &mut self.workers {
            let _ = worker.send(Command::Quit);
            let _ = thread.take().map(JoinHandle::join);
        }
    }
}

fn start_worker(
    number: usize,
    engine: Box<dyn Engine>,
    depth: usize,
    poll: Duration,
    meter: Option<Arc<SubmissionMeter>>,
) -> std::io::Result<(Address, Option<JoinHandle<()>>)> {
    let (commands, received) = channel();
    let doorbell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (started, start_result) = sync_channel(1);
    let bell = Arc::clone(&doorbell);
    let body = move || {
        let _guard = AbortOnPanic;
        match Worker::new(engine, received, bell, depth, poll) {
            Ok(worker) => {
                let _ = started.send(Ok(()));
                worker.with_meter(meter).run();
            }
            Err(error) => drop(started.send(Err(error))),
        }
    };
    let thread = std::thread::Builder::new().name(format!("bareblk-work-{number}")).spawn(body)?;
    start_result.recv().unwrap_or_else(|_| Err(std::io::ErrorKind::BrokenPipe.into()))?;
    Ok((Address { commands, doorbell }, Some(thread)))
}

/// A worker or session that panicked would leave guests waiting for ever; a server that is gone is
/// restarted.
pub(crate) struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            error!("a thread failed in a way that is a bug of this program; the server ends");
            std::process::abort();
        }
    }
}
