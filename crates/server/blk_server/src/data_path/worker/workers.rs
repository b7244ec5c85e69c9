//! A worker from outside: its thread.
//!
//! Not here: what other threads ask of it (`command.rs`), which queue goes to which worker (`assignment/mod.rs`), the loop
//! that obeys (`worker/mod.rs`).

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use sandbox::Role;
use tracing::error;

use crate::data_path::counters::WorkerMeter;
use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::worker::Worker;
use crate::data_path::worker::bell::Bell;
use crate::data_path::worker::command::{Address, Command};
use crate::data_path::worker::submissions::SubmissionMeter;
use crate::data_path::worker::worker_options::{WorkerId, WorkerOptions};
use crate::data_path::worker::worker_thread;
use crate::error::ServerError;

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
        let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wakeup = Arc::new(wakeup.map_err(|errno| ServerError::Thread(errno.into()))?);
        let meter = Arc::<WorkerMeter>::default();
        let (started, start_result) = sync_channel(1);
        let (bell, counters, trade) = (Arc::clone(&wakeup), Arc::clone(&meter), trade.clone());
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
        let address = Address::new(id, commands, wakeup);
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
