//! A worker without a thread, stepped by its caller: for benchmarks of the request path and nothing else.
//!
//! `kick → InlineWorker::serve (wait, pass until idle, arm) → call`: the very loop of `worker.rs`, with the
//! driver half of the queue on the same thread, so that time and instructions can be told apart.
//!
//! Not here: a way to serve a disk; that is `server.rs`.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use guest_mem::GuestMemory;
use io_engine::Engine;
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::{RingFeatures, RingLayout};

use crate::disk::DiskConfig;
use crate::engine_source::EngineSource;
use crate::signal::signal;
use crate::worker::Worker;
use crate::worker_options::WorkerId;
use crate::workers::{Command, QueueStart};

/// One queue of one disk, served on the caller's thread.
pub struct InlineWorker {
    worker: Worker,
    _commands: Sender<Command>,
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
    /// If engine or ring cannot be used; an invalid disk.
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
        let doorbell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let depth = u32::from(layout.queue_size);
        let engine = Mutex::new(Some(engine));
        let make = move || {
            let engine = engine.lock().unwrap_or_else(PoisonError::into_inner).take();
            engine.ok_or_else(|| io::ErrorKind::Unsupported.into())
        };
        let base = EngineSource::new("inline", depth, Box::new(make));
        let mut worker = Worker::new(WorkerId(0), base, received, Arc::clone(&doorbell), Duration::ZERO)?;
        let start = QueueStart::alone(disk, memory, layout, ring, kick, call)?;
        let (done, started) = sync_channel(1);
        let sent = commands.send(Command::Start(Arc::new(start), done));
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        signal(&doorbell);
        worker.sleep();
        let mut inline = Self { worker, _commands: commands };
        inline.run_until_idle();
        started.try_recv().ok().flatten().ok_or(io::ErrorKind::InvalidInput)?;
        Ok(inline)
    }

    // Never inlined: profilers find the device half by this name, which no other function may have a part of.
    /// Sleeps until a kick, then serves until the queue is empty and kicks are wanted again.
    #[inline(never)]
    pub fn serve(&mut self) {
        self.worker.sleep();
        self.run_until_idle();
    }

    fn run_until_idle(&mut self) {
        while self.worker.pass(Instant::now()) || self.worker.arm() {}
    }
}
