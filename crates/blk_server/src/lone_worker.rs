//! A worker on its own thread with one queue started and no front-end: for whoever measures the request path.
//!
//! `kick → Worker::run (as in a server: poll, arm, sleep) → call`: the driver half of the queue is the
//! caller's, on another thread.
//!
//! - How long requests took to reach the kernel is counted here; a server's workers do not count it.
//! - The write cache starts as the image's cache mode says (`writethrough`, `directsync`: durable writes).
//!
//! Not here: a way to serve a disk (`server.rs`), a worker without a thread (`inline.rs`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use guest_mem::GuestMemory;
use io_engine::Engine;
use rustix::event::{EventfdFlags, eventfd};
use virtqueue::{RingFeatures, RingLayout};

use crate::disk::DiskConfig;
use crate::signal::signal;
use crate::submissions::{SubmissionMeter, Submissions};
use crate::worker::Worker;
use crate::workers::{AbortOnPanic, Command, QueueStart};

/// One queue of one disk, served by a worker of its own. Dropping it stops the queue, then the worker.
#[derive(Debug)]
pub struct LoneWorker {
    commands: Sender<Command>,
    doorbell: Arc<OwnedFd>,
    queue: Option<u32>,
    meter: Arc<SubmissionMeter>,
    thread: Option<JoinHandle<()>>,
}

impl LoneWorker {
    /// Starts queue 0 of `disk` at `layout`; `kick` and `call` are eventfds. `poll` as of a server.
    ///
    /// # Errors
    /// An invalid disk; the engine's own; `InvalidInput` if the engine does not take the image or the ring
    /// cannot be used (which of them is logged).
    #[allow(clippy::too_many_arguments)] // the same as `InlineWorker::start`, and one more
    pub fn start(
        engine: Box<dyn Engine>,
        disk: DiskConfig,
        memory: Arc<GuestMemory>,
        layout: RingLayout,
        ring: RingFeatures,
        kick: OwnedFd,
        call: OwnedFd,
        poll: Duration,
    ) -> io::Result<Self> {
        let start = QueueStart::alone(disk, memory, layout, ring, kick, call)?;
        let mut worker = Self::start_thread(engine, usize::from(layout.queue_size), poll)?;
        worker.queue = worker.ask(|done| Command::Start(Box::new(start), done))?;
        if worker.queue.is_none() {
            let what = "the engine does not take the image, or the ring cannot be used";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        Ok(worker)
    }

    fn start_thread(engine: Box<dyn Engine>, depth: usize, poll: Duration) -> io::Result<Self> {
        let (commands, received) = channel();
        let doorbell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let meter = Arc::new(SubmissionMeter::default());
        let (started, start_result) = sync_channel(1);
        let (bell, count) = (Arc::clone(&doorbell), Arc::clone(&meter));
        let body = move || {
            let _guard = AbortOnPanic;
            let made = Worker::new(engine, received, bell, depth, poll);
            run(made.map(|worker| worker.with_meter(Some(count))), &started);
        };
        let thread = std::thread::Builder::new().name("bareblk-lone".into()).spawn(body)?;
        let worker = Self { commands, doorbell, queue: None, meter, thread: Some(thread) };
        start_result.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))?;
        Ok(worker)
    }

    /// What was submitted so far.
    #[must_use]
    pub fn submissions(&self) -> Submissions {
        self.meter.read()
    }

    fn send(&self, command: Command) -> io::Result<()> {
        self.commands.send(command).map_err(|_| io::ErrorKind::BrokenPipe)?;
        signal(&self.doorbell);
        Ok(())
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> io::Result<T> {
        let (answer, answered): (SyncSender<T>, Receiver<T>) = sync_channel(1);
        self.send(command(answer))?;
        answered.recv().map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

fn run(worker: io::Result<Worker>, started: &SyncSender<io::Result<()>>) {
    match worker {
        Ok(mut worker) => {
            let _ = started.send(Ok(()));
            worker.run();
        }
        Err(error) => drop(started.send(Err(error))),
    }
}

impl Drop for LoneWorker {
    fn drop(&mut self) {
        if let Some(queue) = self.queue {
            let _ = self.ask(|done| Command::Stop(queue, done));
        }
        let _ = self.send(Command::Quit);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
