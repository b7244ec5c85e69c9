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

use disk_image::{HostOpener, Opener};
use guest_mem::{Budget, GuestMemory, Limits};
use rustix::event::{EventfdFlags, eventfd};
use sandbox::Role;
use tracing::error;
use virtqueue::{LogArea, RingFeatures, RingLayout, packed};

use crate::balancer::Bell;
use crate::disk::{Disk, DiskConfig};
use crate::engine_source::EngineSource;
use crate::meters::{QueueMeter, WorkerMeter};
use crate::queue::Queue;
use crate::server::ServerError;
use crate::session::SessionShared;
use crate::signal::{adopt, signal};
use crate::submissions::SubmissionMeter;
use crate::worker::Worker;
use crate::worker_options::{WorkerId, WorkerOptions};
use crate::worker_thread;

#[cfg(feature = "test-util")]
thread_local! {
    /// Has a worker without a thread carry out what it was sent, if this wakeup fd is its own.
    pub(crate) static STEPS_WORKER: std::cell::Cell<Option<fn(&Arc<OwnedFd>)>> = const { std::cell::Cell::new(None) };
}

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
    /// What is in flight is noted there, for the server after this one.
    pub(crate) log: Option<LogArea>,
    /// A stop leaves what the last server had begun and this one has not to the next (GET_VRING_BASE_INFLIGHT).
    pub(crate) leaves_unbegun: bool,
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
        let opener: Arc<dyn Opener> = Arc::new(HostOpener);
        let budget = Budget::new(Limits::of_process());
        let disk = Arc::new(Disk::new(disk, &opener, &budget).map_err(io::Error::other)?);
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
            log: None,
            leaves_unbegun: false,
        })
    }
}

/// A queue that a worker cannot serve, given back.
pub(crate) struct Unsuitable {
    pub(crate) queue: Box<Queue>,
    pub(crate) why: String,
}

/// With what a queue stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The front-end wants it to, and to hear where its ring stands.
    Ring,
    /// Its session, whose front-end is told nothing any more.
    Session,
}

/// Who sees to it that a worker that is to host becomes completion worker, or that another one goes on.
pub(crate) enum Hosting {
    /// Whoever asked. Told whether the worker can take part.
    Asked(SyncSender<io::Result<()>>),
    /// Nobody else: the worker itself, for the disk of this name.
    Own(String),
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
    /// Take part in a placement for others, whether or not queues of the source are here.
    Host(Arc<EngineSource>, Hosting),
    /// Tries the disk's held requests again; answers how many there are.
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
    doorbell: Arc<OwnedFd>,
}

impl Address {
    #[cfg(feature = "test-util")]
    pub(crate) fn new(id: WorkerId, commands: Sender<Command>, doorbell: Arc<OwnedFd>) -> Self {
        Self { id, commands, doorbell }
    }

    pub(crate) fn send(&self, command: Command) -> Result<(), WorkerGone> {
        self.commands.send(command).map_err(|_| WorkerGone)?;
        signal(&self.doorbell);
        Ok(())
    }

    pub(crate) fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, WorkerGone> {
        let (answer, answered) = sync_channel(1);
        self.send(command(answer))?;
        #[cfg(feature = "test-util")]
        if let Some(step) = STEPS_WORKER.get() {
            step(&self.doorbell);
        }
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
    /// NUMA node of its CPUs.
    pub(crate) node: Option<u32>,
    pub(crate) meter: Arc<WorkerMeter>,
    thread: Option<JoinHandle<()>>,
}

impl WorkerThread {
    /// A worker that its owner steps.
    #[cfg(feature = "test-util")]
    pub(crate) fn without_thread(address: Address, options: WorkerOptions) -> Self {
        Self { address, options, node: None, meter: Arc::default(), thread: None }
    }

    /// # Errors
    /// If the thread, or its engine, does not start, or cannot run as its options say.
    pub(crate) fn start(id: WorkerId, options: WorkerOptions, trade: &Trade) -> Result<Self, ServerError> {
        let (commands, received) = channel();
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let doorbell = Arc::new(doorbell.map_err(|errno| ServerError::Thread(errno.into()))?);
        let meter = Arc::<WorkerMeter>::default();
        let (started, start_result) = sync_channel(1);
        let (bell, counters, trade) = (Arc::clone(&doorbell), Arc::clone(&meter), trade.clone());
        let as_told = options.clone();
        let body = move || {
            let _guard = AbortOnPanic;
            // The engine is made here and not before: its memory comes from the node where this thread runs.
            let start = || {
                worker_thread::apply(&as_told).map_err(|source| ServerError::Worker { id, source })?;
                let worker = Worker::new(id, trade.base, received, bell, trade.poll);
                let worker = worker.map_err(ServerError::Engine)?;
                let node = worker_thread::log_start(id, &as_told);
                worker_thread::prepare_signals(id);
                // Where it runs is settled; the thread does nothing but serve from now on.
                sandbox::enter(Role::Worker).map_err(|source| ServerError::Sandbox { id, source })?;
                Ok((worker, node))
            };
            match start() {
                Ok((worker, node)) => {
                    let mut worker = worker.with_meters(counters, trade.meter).with_bell(trade.bell);
                    let _ = started.send(Ok(node));
                    worker.run();
                }
                Err(error) => drop(started.send(Err(error))),
            }
        };
        let thread = std::thread::Builder::new().name(format!("bareblk-work-{id}"));
        let thread = thread.spawn(body).map_err(ServerError::Thread)?;
        let gone = |_| Err(ServerError::Thread(io::ErrorKind::BrokenPipe.into()));
        let node = start_result.recv().unwrap_or_else(gone)?;
        let address = Address { id, commands, doorbell };
        Ok(Self { address, options, node, meter, thread: Some(thread) })
    }

    /// Waits for the end of a worker that was told to.
    pub(crate) fn join(&mut self) {
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for WorkerThread {
    fn drop(&mut self) {
        let _ = self.address.send(Command::Quit);
        self.join();
    }
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
