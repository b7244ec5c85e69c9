//! A worker from outside: its thread, and what other threads ask of it.
//!
//! A worker shares no state with other threads. They send it a [`Command`] and signal its eventfd; what
//! has an answer is answered through a channel of its own.
//!
//! Not here: which queue goes to which worker (`attachments.rs`), the loop that obeys (`worker.rs`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use guest_mem::GuestMemory;
use rustix::event::{EventfdFlags, eventfd};
use tracing::error;
use virtqueue::{RingFeatures, RingLayout, packed};

use crate::balancer::Bell;
use crate::disk::{Disk, DiskConfig};
use crate::engine_source::EngineSource;
use crate::server::ServerError;
use crate::session::SessionShared;
use crate::signal::{adopt, signal};
use crate::submissions::SubmissionMeter;
use crate::worker::Worker;
use crate::worker_options::{WorkerId, WorkerOptions};
use crate::worker_thread::{self, warn_if_crowded};

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
    /// Where the queue counts.
    pub(crate) meter: Arc<QueueMeter>,
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
            meter: Arc::default(),
        })
    }
}

/// A queue that a worker cannot serve, given back.
pub(crate) struct Unsuitable {
    pub(crate) queue: Box<Queue>,
    pub(crate) why: String,
}

/// What other threads ask of a worker. Queues are named by the number that `Start` or `Adopt` answered with.
pub(crate) enum Command {
    /// Answers `None` if the queue cannot run (already logged).
    Start(Arc<QueueStart>, SyncSender<Option<u32>>),
    BeginStop(u32),
    /// Answered, with the ring's position, when nothing is in flight any more.
    Stop(u32, SyncSender<u32>),
    /// Answered, with the queue itself, when nothing is in flight any more.
    Release(u32, SyncSender<Box<Queue>>),
    /// Answers whether the queue is still here, and goes on; otherwise it has been sent.
    CancelRelease(u32, SyncSender<bool>),
    /// Serve a queue that another worker released.
    Adopt(Box<Queue>, SyncSender<Result<u32, Unsuitable>>),
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
    /// Gives up what can be given up, of all disks or of one: they were told to end at once.
    Cancel(Option<u64>),
    Quit,
}

/// How to reach a worker.
#[derive(Clone, Debug)]
pub(crate) struct Address {
    pub(crate) id: WorkerId,
    commands: Sender<Command>,
    doorbell: Arc<OwnedFd>,
}

impl Address {
    pub(crate) fn send(&self, command: Command) -> Result<(), WorkerGone> {
        self.commands.send(command).map_err(|_| WorkerGone)?;
        signal(&self.doorbell);
        Ok(())
    }

    pub(crate) fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, WorkerGone> {
        let (answer, answered) = sync_channel(1);
        self.send(command(answer))?;
        answered.recv().map_err(|_| WorkerGone)
    }
}

/// What all workers of a server have in common.
#[derive(Clone, Debug)]
pub(crate) struct Trade {
    /// Where every worker sleeps, and the engine of disks that name none.
    pub(crate) base: Arc<EngineSource>,
    /// Longest polling before a worker sleeps.
    pub(crate) poll: Duration,
    /// Only where the request path is measured.
    pub(crate) meter: Option<Arc<SubmissionMeter>>,
    /// Only where queues are balanced.
    pub(crate) bell: Option<Arc<Bell>>,
}

/// A worker's thread, ended when dropped.
#[derive(Debug)]
pub(crate) struct WorkerThread {
    pub(crate) address: Address,
    pub(crate) options: WorkerOptions,
    pub(crate) meter: Arc<WorkerMeter>,
    thread: Option<JoinHandle<()>>,
}

impl WorkerThread {
    /// # Errors
    /// If the thread, or its engine, does not start.
    pub(crate) fn start(id: WorkerId, options: WorkerOptions, trade: &Trade) -> io::Result<Self> {
        let (commands, received) = channel();
        let doorbell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let meter = Arc::<WorkerMeter>::default();
        let (started, start_result) = sync_channel(1);
        let (bell, counters, trade) = (Arc::clone(&doorbell), Arc::clone(&meter), trade.clone());
        let body = move || {
            let _guard = AbortOnPanic;
            match Worker::new(id, trade.base, received, bell, trade.poll) {
                Ok(worker) => {
                    let mut worker = worker.with_meters(counters, trade.meter).with_bell(trade.bell);
                    let _ = started.send(Ok(()));
                    worker.run();
                }
                Err(error) => drop(started.send(Err(error))),
            }
        };
        let thread = std::thread::Builder::new().name(format!("bareblk-work-{id}")).spawn(body)?;
        start_result.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))?;
        Ok(Self { address: Address { id, commands, doorbell }, options, meter, thread: Some(thread) })
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
    /// One worker for each of `options`, at least one; all count in `meter`, if there is one.
    ///
    /// # Errors
    /// If a thread or an engine does not start, or a thread cannot run as its options say.
    pub(crate) fn start(
        source: &Arc<EngineSource>,
        options: &[WorkerOptions],
        poll: Duration,
        meter: Option<&Arc<SubmissionMeter>>,
    ) -> Result<Self, ServerError> {
        let one = [WorkerOptions::default()];
        let options = if options.is_empty() { &one } else { options };
        warn_if_crowded(options);
        // Those that run end with the set, should a later one not start.
        let mut set = Self { workers: Vec::new() };
        for (id, options) in (0..).map(WorkerId).zip(options) {
            set.workers.push(start_worker(id, options.clone(), Arc::clone(source), poll, meter.cloned())?);
        }
        Ok(set)
    }

    /// `None`: the queue cannot run; logged, and its err fd signalled.
    pub(crate) fn start_queue(&self, start: QueueStart) -> Result<Option<QueueHandle>, WorkerGone> {
        let worker = self.workers.get(usize::from(start.index) % self.workers.len());
        let (worker, _) = worker.ok_or(WorkerGone)?;
        let id = worker.ask(|done| Command::Start(Box::new(start), done))?;
        Ok(id.map(|id| QueueHandle { worker: worker.clone(), id }))
    }

    /// Gives up what can be given up, of one disk or of all.
    pub(crate) fn cancel(&self, disk: Option<u64>) {
        for (worker, _) in &self.workers {
            let _ = worker.send(Command::Cancel(disk));
        }
    }

    /// Forgets where queues of a disk that goes were attached.
    #[allow(clippy::unused_self)] // until queues can be attached
    pub(crate) fn forget_disk(&self, _disk: u64) {}

    #[allow(clippy::unused_self)] // until queues count
    pub(crate) fn queue_reports(&self, _disk: u64) -> Vec<QueueReport> {
        Vec::new()
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
    id: WorkerId,
    options: WorkerOptions,
    source: Arc<EngineSource>,
    poll: Duration,
    meter: Option<Arc<SubmissionMeter>>,
) -> Result<(Address, Option<JoinHandle<()>>), ServerError> {
    let (commands, received) = channel();
    let doorbell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let doorbell = Arc::new(doorbell.map_err(|errno| ServerError::Thread(errno.into()))?);
    let (started, start_result) = sync_channel(1);
    let bell = Arc::clone(&doorbell);
    let body = move || {
        let _guard = AbortOnPanic;
        // The engine is made here and not before: its memory comes from the node where this thread runs.
        let start = || {
            worker_thread::apply(&options).map_err(|source| ServerError::Worker { id, source })?;
            let engine = (source.make)().map_err(ServerError::Engine)?;
            let depth = usize::try_from(source.depth).unwrap_or(usize::MAX);
            Worker::new(engine, received, bell, depth, poll).map_err(ServerError::Engine)
        };
        match start() {
            Ok(worker) => {
                worker_thread::log_start(id, &options);
                let _ = started.send(Ok(()));
                worker.with_meter(meter).run();
            }
            Err(error) => drop(started.send(Err(error))),
        }
    };
    let thread = std::thread::Builder::new().name(format!("bareblk-work-{id}"));
    let thread = thread.spawn(body).map_err(ServerError::Thread)?;
    let gone = |_| Err(ServerError::Thread(std::io::ErrorKind::BrokenPipe.into()));
    start_result.recv().unwrap_or_else(gone)?;
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
