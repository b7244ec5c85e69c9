//! A worker that has no thread and is stepped by its caller. Only for benchmarks and fuzzing of the request path.
//!
//! `kick → InlineWorker::serve (wait, pass until idle, arm) → call`
//!
//! The loop is the same as in `worker/mod.rs`. The driver's side of the queue runs on the same thread, so that a
//! profiler can separate the device's time and instructions from the driver's.

#[cfg(feature = "test-util")]
pub(crate) mod server;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use guest_mem::GuestMemory;
use io_engine::Engine;
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::{RingFeatures, RingLayout, packed};

use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::disk::session_link::SessionLink;
use crate::data_path::disk::{Disk, DiskConfig};
use crate::data_path::queue::queue_start::QueueStart;
use crate::data_path::worker::Worker;
use crate::data_path::worker::command::Command;
use crate::data_path::worker::worker_options::WorkerId;
use crate::host::signal::{drain, signal};

/// One queue of one disk, served on the caller's thread.
pub struct InlineWorker {
    worker: Worker,
    commands: Sender<Command>,
    wakeup: Arc<OwnedFd>,
    disk: Arc<Disk>,
    session: Arc<SessionLink>,
    kick: Arc<OwnedFd>,
    call: Option<Arc<OwnedFd>>,
    /// The worker's id for the queue.
    queue: u32,
}

impl std::fmt::Debug for InlineWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InlineWorker").finish_non_exhaustive()
    }
}

impl InlineWorker {
    /// Starts queue 0 of `disk` at `layout`; `kick` and `call` are eventfds.
    ///
    /// # Errors
    /// The engine or the ring cannot be used, or the disk is invalid.
    pub fn start(
        engine: Box<dyn Engine>,
        disk: DiskConfig,
        memory: Arc<GuestMemory>,
        layout: RingLayout,
        ring: RingFeatures,
        kick: OwnedFd,
        call: OwnedFd,
    ) -> io::Result<Self> {
        let (commands, received) = channel();
        let wakeup = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let depth = u32::from(layout.queue_size);
        let engine = Mutex::new(Some(engine));
        let make = move || {
            let engine = engine.lock().unwrap_or_else(PoisonError::into_inner).take();
            engine.ok_or_else(|| io::ErrorKind::Unsupported.into())
        };
        let base = EngineSource::new("inline", depth, Box::new(make));
        let worker = Worker::new(WorkerId(0), base, received, Arc::clone(&wakeup), Duration::ZERO)?;
        let start = QueueStart::alone(disk, memory, layout, ring, kick, call)?;
        let mut inline = Self {
            worker,
            commands,
            wakeup,
            disk: Arc::clone(&start.disk),
            session: Arc::clone(&start.session),
            kick: Arc::clone(&start.kick),
            call: start.call.clone(),
            queue: 0,
        };
        inline.start_queue(start)?;
        Ok(inline)
    }

    /// Stops the queue. From now on the worker does not access the ring, and its memory may change.
    ///
    /// # Errors
    /// A request is still in flight.
    pub fn stop(&mut self) -> io::Result<()> {
        let (queue, (done, stopped)) = (self.queue, sync_channel(1));
        self.command(Command::Stop(queue, done))?;
        stopped.try_recv().map(drop).map_err(io::Error::other)
    }

    /// After [`InlineWorker::stop`]: starts a queue at the beginning of a ring, with the same disk, kick and call.
    /// Discards the state of the previous queue and its session.
    ///
    /// # Errors
    /// The ring cannot be used. No queue runs then.
    pub fn start_again(
        &mut self,
        memory: Arc<GuestMemory>,
        layout: RingLayout,
        ring: RingFeatures,
    ) -> io::Result<()> {
        drain(&self.kick);
        self.call.iter().for_each(drain);
        self.session.set_write_cache(self.disk.guest_cache().mode_at_first());
        self.start_queue(QueueStart {
            disk: Arc::clone(&self.disk),
            session: Arc::clone(&self.session),
            index: 0,
            memory,
            layout: Some(layout),
            ring,
            base: if ring.packed { packed::FRESH_BASE } else { 0 },
            cache_choice_unknown: false,
            kick: Arc::clone(&self.kick),
            call: self.call.clone(),
            err: None,
            meter: self.disk.totals().start_queue(),
            log: None,
            leaves_unbegun: false,
        })
    }

    fn start_queue(&mut self, start: QueueStart) -> io::Result<()> {
        let (done, started) = sync_channel(1);
        self.command(Command::Start(Arc::new(start), done))?;
        self.queue = started.try_recv().ok().flatten().ok_or(io::ErrorKind::InvalidInput)?;
        Ok(())
    }

    fn command(&mut self, command: Command) -> io::Result<()> {
        self.commands.send(command).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        self.serve_now();
        Ok(())
    }

    // The compiler must not inline this function: profilers identify the device's side by its name.
    /// Sleeps until a kick, then serves until the queue is empty and its kicks are enabled again.
    #[inline(never)]
    pub fn serve(&mut self) {
        self.worker.sleep();
        self.run_until_idle();
    }

    /// Like [`InlineWorker::serve`], but without sleeping: this needs no kick, and also serves a queue that takes no
    /// requests.
    pub fn serve_now(&mut self) {
        signal(&self.wakeup);
        self.serve();
    }

    fn run_until_idle(&mut self) {
        while self.worker.pass(Instant::now()) || self.worker.arm() {}
    }
}
