//! A server that has one disk and no threads, for tests and fuzzers. Its caller steps the sessions and the worker.
//!
//! `socket → InlineSession::serve (Session::step) → Address::ask → worker, on the same thread → answer`
//!
//! - Sessions and the worker are those of the real server. Without threads, the server never waits.
//! - Each thread has at most one such server: a worker cannot leave its thread, so a thread-local variable holds it.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use disk_image::{HostOpener, Opener};
use guest_mem::{Budget, Limits};
use rustix::event::{EventfdFlags, eventfd};

use crate::data_path::assignment::WorkerSet;
use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::disk::storage_thread::StorageThread;
use crate::data_path::disk::{Disk, DiskConfig};
use crate::data_path::worker::Worker;
use crate::data_path::worker::command::{Address, STEPS_WORKER};
use crate::data_path::worker::worker_options::{WorkerId, WorkerOptions};
use crate::data_path::worker::workers::{SharedSettings, WorkerThread};
use crate::host::signal::signal;
use crate::session::shared::SessionShared;
use crate::session::{Progress, Session};

thread_local! {
    static WORKER: RefCell<Option<(Arc<OwnedFd>, Worker)>> = const { RefCell::new(None) };
}

/// Steps this thread's worker if `wakeup` is its wakeup fd. The answer to a command is ready afterwards.
fn serve_commands(wakeup: &Arc<OwnedFd>) {
    WORKER.with_borrow_mut(|worker| {
        if let Some((_, worker)) = worker.as_mut().filter(|(own, _)| Arc::ptr_eq(own, wakeup)) {
            // The command has already signalled the wakeup, so this returns at once.
            worker.sleep();
            while worker.pass(Instant::now()) || worker.arm() {}
        }
    });
}

/// A server that has one disk and no threads.
#[derive(Debug)]
pub struct InlineServer {
    disk: Arc<Disk>,
    workers: Arc<WorkerSet>,
    wakeup: Arc<OwnedFd>,
}

impl InlineServer {
    /// # Errors
    /// The engine cannot be used, or the disk is invalid.
    ///
    /// # Panics
    /// This thread already has an inline server.
    pub fn start(engine: &Arc<EngineSource>, disk: DiskConfig) -> io::Result<Self> {
        let opener: Arc<dyn Opener> = Arc::new(HostOpener);
        let budget = Budget::new(Limits::of_process());
        let disk = Arc::new(Disk::new(disk, &opener, &budget).map_err(io::Error::other)?);
        let wakeup = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (commands, received) = channel();
        let (id, poll) = (WorkerId(0), Duration::ZERO);
        let worker = Worker::new(id, Arc::clone(engine), received, Arc::clone(&wakeup), poll)?;
        let before = WORKER.replace(Some((Arc::clone(&wakeup), worker)));
        assert!(before.is_none(), "a thread can have only one inline server");
        STEPS_WORKER.set(Some(serve_commands));
        let shared = SharedSettings { base: Arc::clone(engine), poll, meter: None, balancer_wakeup: None };
        let address = Address::new(id, commands, Arc::clone(&wakeup));
        let worker = WorkerThread::without_thread(address, WorkerOptions::default());
        Ok(Self { disk, workers: WorkerSet::of_one(worker, shared), wakeup })
    }

    /// Opens a session for the front-end at the other end of `socket`.
    ///
    /// # Errors
    /// The process has no free descriptors.
    pub fn connect(&self, socket: OwnedFd) -> io::Result<InlineSession> {
        let shared = SessionShared::new(1)?;
        let (disk, workers) = (Arc::clone(&self.disk), Arc::clone(&self.workers));
        let storage = StorageThread::start(&disk)?;
        let session = Session::new(disk, workers, Arc::new(socket), shared, storage);
        Ok(InlineSession(Some(session)))
    }

    /// Serves the worker's kicks and rings until the worker would sleep.
    pub fn serve(&self) {
        signal(&self.wakeup);
        serve_commands(&self.wakeup);
    }

    /// Number of queues that are running.
    #[must_use]
    pub fn running_queues(&self) -> usize {
        self.workers.queue_reports(self.disk.id()).len()
    }
}

impl Drop for InlineServer {
    fn drop(&mut self) {
        WORKER.take();
    }
}

/// One front-end's session. Dropping this value ends the session as if its front-end had disconnected.
pub struct InlineSession(Option<Session>);

impl std::fmt::Debug for InlineSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InlineSession").field("has_ended", &self.0.is_none()).finish()
    }
}

impl InlineSession {
    /// Handles the messages that have arrived, without waiting for more. Returns whether the session continues.
    pub fn serve(&mut self) -> bool {
        while let Some(session) = self.0.as_mut().filter(|session| session.is_ready()) {
            if session.step() == Progress::Ended {
                self.0 = None;
            }
        }
        self.0.is_some()
    }
}
