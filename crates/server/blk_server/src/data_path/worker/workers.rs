//! Starts a worker's thread and waits for its end.

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
use crate::data_path::worker::balancer_wakeup::BalancerWakeup;
use crate::data_path::worker::command::{Address, Command};
use crate::data_path::worker::submissions::SubmissionMeter;
use crate::data_path::worker::worker_options::{WorkerId, WorkerOptions};
use crate::data_path::worker::worker_thread;
use crate::error::ServerError;

/// Settings that all workers of a server share.
#[derive(Clone, Debug)]
pub(crate) struct SharedSettings {
    /// The engine in which workers sleep. Also the default engine of disks.
    pub(crate) base: Arc<EngineSource>,
    /// The longest polling window.
    pub(crate) poll: Duration,
    /// Set only in a server that measures its request path.
    pub(crate) meter: Option<Arc<SubmissionMeter>>,
    /// Wakes the balancer; `None` if the server does not balance queues.
    pub(crate) balancer_wakeup: Option<Arc<BalancerWakeup>>,
}

/// A worker's thread. It ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct WorkerThread {
    pub(crate) address: Address,
    pub(crate) options: WorkerOptions,
    /// NUMA node of the worker's CPUs.
    pub(crate) node: Option<u32>,
    pub(crate) meter: Arc<WorkerMeter>,
    thread: Option<JoinHandle<()>>,
}

impl WorkerThread {
    /// Creates a worker that has no thread and is stepped by its owner.
    #[cfg(feature = "test-util")]
    pub(crate) fn without_thread(address: Address, options: WorkerOptions) -> Self {
        Self { address, options, node: None, meter: Arc::default(), thread: None }
    }

    /// # Errors
    /// The thread or its engine cannot start, or the thread cannot run with its options.
    pub(crate) fn start(
        id: WorkerId,
        options: WorkerOptions,
        shared: &SharedSettings,
    ) -> Result<Self, ServerError> {
        let (commands, received) = channel();
        let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wakeup = Arc::new(wakeup.map_err(|errno| ServerError::Thread(errno.into()))?);
        let meter = Arc::<WorkerMeter>::default();
        let (started, start_result) = sync_channel(1);
        let (commands_wakeup, counters, shared) = (Arc::clone(&wakeup), Arc::clone(&meter), shared.clone());
        let own_options = options.clone();
        let body = move || {
            let _guard = AbortOnPanic;
            // This thread starts the engine, so that the engine's memory comes from the thread's node.
            let start = || {
                worker_thread::apply(&own_options).map_err(|source| ServerError::Worker { id, source })?;
                let worker = Worker::new(id, shared.base, received, commands_wakeup, shared.poll);
                let worker = worker.map_err(ServerError::Engine)?;
                let node = worker_thread::log_start(id, &own_options);
                worker_thread::prepare_signals(id);
                // The thread's options are applied. From now on it only serves.
                sandbox::enter(Role::Worker).map_err(|source| ServerError::Sandbox { id, source })?;
                Ok((worker, node))
            };
            match start() {
                Ok((worker, node)) => {
                    let mut worker = worker
                        .with_meters(counters, shared.meter)
                        .with_balancer_wakeup(shared.balancer_wakeup);
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

    /// Waits until a worker that was told to end has ended.
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

/// Ends the server if a worker or session panics, because its guests would wait forever. A service manager restarts the
/// server.
pub(crate) struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            error!("a thread panicked, which is a bug in bareblk; the server aborts");
            std::process::abort();
        }
    }
}
