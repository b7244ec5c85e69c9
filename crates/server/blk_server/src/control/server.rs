//! The server: starts and stops disks, sockets, sessions and workers.
//!
//! Stopping loses nothing: the server accepts no further front-ends, every queue stops taking requests and completes
//! those in flight, then the server flushes each image and removes the sockets. Requests that no queue has taken stay
//! in their rings for the next server. Requests still in flight at the deadline fail with an error: without an answer,
//! the next server would continue at the wrong request.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use disk_image::Opener;
use tracing::info;

use crate::control::balance::Balance;
use crate::control::balancer::Balancer;
use crate::control::capacity;
use crate::control::exports::{Export, Exports, SESSION_STACK_BYTES};
use crate::control::pause;
use crate::control::removal;
use crate::data_path::assignment::deadline::deadline_in;
use crate::data_path::assignment::liveness::LivenessCheck;
use crate::data_path::assignment::{Attached, WorkerSet};
use crate::data_path::disk::DiskConfig;
use crate::data_path::disk::engine_source::{EngineSource, MIN_DEPTH};
use crate::data_path::disk::flush::last_flush;
use crate::data_path::disk::session_link::EndReason;
use crate::data_path::disk::slow_requests::SlowRequest;
use crate::data_path::report::ServerReport;
use crate::data_path::throttle::limits::{DiskLimits, LimitSettings};
use crate::data_path::worker::submissions::{SubmissionMeter, Submissions};
use crate::data_path::worker::worker_options::{WorkerId, WorkerOptions};
use crate::data_path::worker::workers::SharedSettings;
use crate::error::{AdminError, ServerError};
use crate::host::listener::SocketConfig;

/// The configuration of a server.
pub struct ServerConfig {
    /// The default engine of disks. An idle worker also sleeps in it.
    pub engine: Arc<EngineSource>,
    /// The options of each worker; at least one.
    pub workers: Vec<WorkerOptions>,
    /// How long a worker polls at most before it sleeps; if zero, it never polls.
    pub poll: Duration,
    /// Whether the balancer moves queues between workers.
    pub balance: Balance,
}

impl std::fmt::Debug for ServerConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { engine, workers, poll, balance } = self;
        let mut out = f.debug_struct("ServerConfig");
        out.field("engine", engine)
            .field("workers", workers)
            .field("poll", poll)
            .field("balance", balance)
            .finish()
    }
}

/// The result of stopping a server.
#[derive(Debug, Default)]
pub struct StopReport {
    /// Disks with requests still in flight at the deadline.
    pub unfinished: Vec<String>,
    /// Disks whose last flush failed, and why.
    pub not_flushed: Vec<(String, io::Error)>,
    /// Disks with `--cache unsafe`, which are never flushed.
    pub never_flushed: Vec<String>,
}

impl StopReport {
    /// Whether all acknowledged writes are on stable storage, not counting disks that are never flushed.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.unfinished.is_empty() && self.not_flushed.is_empty()
    }
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    exports: Arc<Exports>,
    workers: Arc<WorkerSet>,
    /// The default engine of disks.
    engine: Arc<EngineSource>,
    balancer: Option<Balancer>,
    /// Present only if the caller measures the request path.
    meter: Option<Arc<SubmissionMeter>>,
    acceptor: Mutex<Option<JoinHandle<()>>>,
}

impl Server {
    /// Binds every disk's socket and serves until [`Server::stop`].
    ///
    /// # Errors
    /// [`ServerError`]. Nothing stays bound or running.
    pub fn start(
        config: &ServerConfig,
        opener: &Arc<dyn Opener>,
        disks: Vec<(DiskConfig, SocketConfig)>,
    ) -> Result<Self, ServerError> {
        let server = Self::prepare(config, opener, disks)?;
        server.accept_front_ends()?;
        Ok(server)
    }

    /// Like [`Server::start`], but accepts no front-end until [`Server::accept_front_ends`]: new front-ends wait.
    ///
    /// # Errors
    /// The errors of [`Server::start`].
    pub fn prepare(
        config: &ServerConfig,
        opener: &Arc<dyn Opener>,
        disks: Vec<(DiskConfig, SocketConfig)>,
    ) -> Result<Self, ServerError> {
        Self::start_with(config, opener, disks, None)
    }

    /// Like [`Server::start`], and collects the figures of [`Server::submissions`]. For measurements, because this
    /// costs two clock readings and two shared counters per worker pass.
    ///
    /// # Errors
    /// The errors of [`Server::start`].
    pub fn start_counting(
        config: &ServerConfig,
        opener: &Arc<dyn Opener>,
        disks: Vec<(DiskConfig, SocketConfig)>,
    ) -> Result<Self, ServerError> {
        let server = Self::start_with(config, opener, disks, Some(Arc::default()))?;
        server.accept_front_ends()?;
        Ok(server)
    }

    fn start_with(
        config: &ServerConfig,
        opener: &Arc<dyn Opener>,
        disks: Vec<(DiskConfig, SocketConfig)>,
        meter: Option<Arc<SubmissionMeter>>,
    ) -> Result<Self, ServerError> {
        let depth = config.engine.depth;
        if depth < MIN_DEPTH {
            return Err(ServerError::Depth { depth, min: MIN_DEPTH });
        }
        let balancer = (config.balance == Balance::Auto).then(Balancer::new).transpose();
        let balancer = balancer.map_err(ServerError::Thread)?;
        let balancer_wakeup = balancer.as_ref().map(Balancer::wakeup);
        let shared = SharedSettings {
            base: Arc::clone(&config.engine),
            poll: config.poll,
            meter: meter.clone(),
            balancer_wakeup,
        };
        let plain = [WorkerOptions::default()];
        let workers = if config.workers.is_empty() { &plain } else { config.workers.as_slice() };
        let workers = WorkerSet::start(workers, shared)?;
        let exports = Exports::new(opener).map_err(ServerError::Thread)?;
        exports.add_all(disks)?;
        let (exports, workers, engine) = (Arc::new(exports), workers, Arc::clone(&config.engine));
        let server = Self { exports, workers, engine, balancer, meter, acceptor: Mutex::default() };
        server.start_balancer().map_err(ServerError::Thread)?;
        Ok(server)
    }

    /// Accepts front-ends from now on.
    ///
    /// # Errors
    /// [`ServerError::Thread`].
    pub fn accept_front_ends(&self) -> Result<(), ServerError> {
        let mut acceptor = self.acceptor.lock().unwrap_or_else(PoisonError::into_inner);
        if acceptor.is_none() {
            *acceptor = Some(self.start_acceptor().map_err(ServerError::Thread)?);
        }
        Ok(())
    }

    pub(crate) fn parts(&self) -> (&Arc<Exports>, &Arc<WorkerSet>) {
        (&self.exports, &self.workers)
    }

    /// Starts the balancer, unless there is only one worker.
    fn start_balancer(&self) -> io::Result<()> {
        match &self.balancer {
            Some(balancer) if self.workers.worker_count() > 1 => {
                balancer.start(Box::new(Arc::clone(&self.workers)))
            }
            _ => Ok(()),
        }
    }

    fn start_acceptor(&self) -> io::Result<JoinHandle<()>> {
        let (exports, workers) = (Arc::clone(&self.exports), Arc::clone(&self.workers));
        let thread = std::thread::Builder::new().name("bareblk-accept".into());
        thread.stack_size(SESSION_STACK_BYTES).spawn(move || exports.accept_all(&workers))
    }

    /// The submissions of all workers; `None` unless [`Server::start_counting`] started the server.
    #[must_use]
    pub fn submissions(&self) -> Option<Submissions> {
        self.meter.as_deref().map(SubmissionMeter::read)
    }

    /// Rereads the size of every image, and announces growth to the guests. Takes seconds at most: the log names images
    /// whose file system has not answered by then.
    pub fn refresh_capacities(&self) {
        capacity::refresh_all(self.exports.all());
    }

    /// All disks, in the order in which they were added.
    #[must_use]
    pub fn disk_names(&self) -> Vec<String> {
        self.exports.names()
    }

    /// All disks with their images' paths, in the order in which they were added.
    #[must_use]
    pub fn disk_images(&self) -> Vec<(String, PathBuf)> {
        let named =
            |export: &Arc<Export>| (export.disk.name().to_owned(), export.disk.image().path().to_owned());
        self.exports.all().iter().map(named).collect()
    }

    /// Reads all counters.
    #[must_use]
    pub fn report(&self) -> ServerReport {
        let disks = self.exports.reports(&self.workers, &self.engine.name);
        let balance = self.balancer.as_ref().map(Balancer::report);
        let groups = self.exports.throttling.groups();
        ServerReport { workers: self.workers.worker_reports(), disks, groups, balance }
    }

    /// Checks whether every worker still responds. The returned value waits for the responses.
    #[must_use]
    pub fn check_liveness(&self) -> LivenessCheck {
        self.workers.check_liveness()
    }

    /// Adds a disk. Its name and its socket's path must be free.
    ///
    /// # Errors
    /// [`AdminError`]. The image is then released.
    pub fn add_disk(&self, disk: DiskConfig, socket: &SocketConfig) -> Result<(), AdminError> {
        let name = disk.name.clone();
        self.exports.add(disk, socket)?;
        info!(disk = name, socket = %socket.path.display(), "disk added");
        Ok(())
    }

    /// As [`Server::add_disk`], with limits.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn add_limited_disk(
        &self,
        disk: DiskConfig,
        socket: &SocketConfig,
        limits: DiskLimits,
    ) -> Result<(), AdminError> {
        let name = disk.name.clone();
        if self.exports.find(&name).is_ok() {
            return Err(AdminError::DiskExists { name });
        }
        self.limit_disk(&name, limits)?;
        self.add_disk(disk, socket).inspect_err(|_| {
            let shared = self.exports.throttling.forget(&name);
            self.exports.apply_limits(&self.workers, &shared);
        })
    }

    /// Replaces the limits of all groups and disks. Returns the names of the disks whose limits are now different. The
    /// disks need not exist yet.
    ///
    /// # Errors
    /// [`AdminError`]. Nothing has changed.
    pub fn limit_all(
        &self,
        groups: &[(String, LimitSettings)],
        disks: &[(String, DiskLimits)],
    ) -> Result<Vec<String>, AdminError> {
        let changed = self.exports.throttling.set_all(groups, disks)?;
        self.exports.apply_limits(&self.workers, &changed);
        Ok(changed)
    }

    /// Changes the limits of a disk, with immediate effect.
    ///
    /// # Errors
    /// [`AdminError`]. Nothing has changed.
    pub fn limit_disk(&self, disk: &str, limits: DiskLimits) -> Result<(), AdminError> {
        let changed = self.exports.throttling.set_disk(disk, limits)?;
        self.exports.apply_limits(&self.workers, &changed);
        Ok(())
    }

    /// Changes the limits of a group, with immediate effect.
    ///
    /// # Errors
    /// [`AdminError`]. Nothing has changed.
    pub fn limit_group(&self, group: &str, settings: LimitSettings) -> Result<(), AdminError> {
        let changed = self.exports.throttling.set_group(group, settings)?;
        self.exports.apply_limits(&self.workers, &changed);
        Ok(())
    }

    /// Stops serving a disk. Requests in flight complete within `timeout` or are cancelled. The server then flushes the
    /// image, releases its lock and removes the socket; name, socket and image are free on return. With `force`, also
    /// removes a disk that a connected front-end's guest has used.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn remove_disk(&self, name: &str, force: bool, timeout: Duration) -> Result<(), AdminError> {
        removal::remove(&self.exports, &self.workers, name, force, timeout)
    }

    /// Immediately retries the requests that the disk has parked ([`crate::ParkPolicy`]). Returns their number.
    ///
    /// # Errors
    /// [`AdminError`]. Some queues may have retried their requests.
    pub fn resume_disk(&self, name: &str, timeout: Duration) -> Result<usize, AdminError> {
        let resumed = self.workers.resume(&self.exports.find(name)?.disk, timeout)?;
        info!(disk = name, requests = resumed, "retrying parked requests");
        Ok(resumed)
    }

    /// Sets the time from which the disk's requests count as slow; `None`: none does. The log and
    /// [`Server::slow_requests`] show slow requests.
    ///
    /// # Errors
    /// [`AdminError::NoDisk`].
    pub fn set_slow_limit(&self, name: &str, limit: Option<Duration>) -> Result<(), AdminError> {
        self.exports.find(name)?.disk.slow().set_limit(limit);
        Ok(())
    }

    /// Returns the time from which the disk's requests count as slow, and the latest slow requests, oldest first.
    ///
    /// # Errors
    /// [`AdminError::NoDisk`].
    pub fn slow_requests(&self, name: &str) -> Result<(Option<Duration>, Vec<SlowRequest>), AdminError> {
        let export = self.exports.find(name)?;
        let slow = export.disk.slow();
        Ok((slow.limit(), slow.latest()))
    }

    /// Makes durable all writes that the disk has completed, whatever its cache mode. A sync that fails marks the disk
    /// as failed, also after `timeout` (docs/decisions/0012).
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn flush_disk(&self, name: &str, timeout: Duration) -> Result<(), AdminError> {
        pause::flush_disk(self.exports.find(name)?.as_ref(), timeout)
    }

    /// Runs `act` while the disks take no requests, have none in flight, and are flushed. Guests wait meanwhile, as for
    /// a slow disk. `timeout` limits the wait for requests in flight and for the flushes. Returns how long the disks were paused.
    ///
    /// # Errors
    /// [`AdminError`]; `act` has then not run.
    pub fn while_paused(
        &self,
        names: &[String],
        timeout: Duration,
        act: impl FnOnce(),
    ) -> Result<Duration, AdminError> {
        let paused = pause::while_paused(&self.exports, &self.workers, names, timeout, |_| act());
        paused.map(|((), paused)| paused)
    }

    /// Clones the images of these disks into empty files, all at one instant, while the disks are paused as for
    /// [`Server::while_paused`]. The clones are not synced. Returns how long the disks were paused.
    ///
    /// # Errors
    /// [`AdminError`]. Some files may nevertheless be clones already.
    pub fn snapshot(&self, clones: &[(String, File)], timeout: Duration) -> Result<Duration, AdminError> {
        pause::snapshot(&self.exports, &self.workers, clones, timeout)
    }

    /// Changes the size of a regular file's disk, in whole blocks, and announces it to the guest. Shrinks the disk only
    /// with `force`: the data beyond the new end is lost, and requests for it fail. For a block device, only rereads
    /// the size.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn resize_disk(&self, name: &str, bytes: u64, force: bool) -> Result<(), AdminError> {
        capacity::resize(&self.exports.find(name)?, bytes, force)
    }

    /// Adds a worker. No queue moves to it automatically.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn add_worker(&self, options: WorkerOptions) -> Result<WorkerId, AdminError> {
        let id = self.workers.add_worker(options)?;
        let action = "start the balancer".into();
        self.start_balancer().map_err(|source| AdminError::System { action, source })?;
        Ok(id)
    }

    /// Moves the worker's queues to other workers, then ends the worker.
    ///
    /// # Errors
    /// [`AdminError`]. Queues that had already moved stay on their new workers.
    pub fn remove_worker(&self, id: WorkerId, timeout: Duration) -> Result<(), AdminError> {
        self.workers.remove_worker(id, timeout)
    }

    /// Moves a queue to another worker: requests in flight complete, then the new worker continues. A queue that is not
    /// running will start on that worker.
    ///
    /// # Errors
    /// [`AdminError`]. The queue then continues on its worker.
    pub fn attach(
        &self,
        disk: &str,
        queue: u16,
        worker: WorkerId,
        timeout: Duration,
    ) -> Result<Attached, AdminError> {
        self.workers.attach(&self.exports.find(disk)?.disk, queue, worker, timeout)
    }

    /// Sets the completion worker of a disk whose placement has one; `None`: the workers choose. If a queue of the disk
    /// runs, its requests in flight complete first, within `timeout`.
    ///
    /// # Errors
    /// [`AdminError`]. The completion worker is then unchanged.
    pub fn set_completion_worker(
        &self,
        disk: &str,
        worker: Option<WorkerId>,
        timeout: Duration,
    ) -> Result<(), AdminError> {
        self.workers.set_completion_worker(&self.exports.find(disk)?.disk, worker, timeout)
    }

    /// Distributes the disk's queues over these workers round-robin, like [`Server::attach`], all within `timeout`.
    ///
    /// # Errors
    /// [`AdminError`]. Queues that had already moved stay on their new workers.
    pub fn attach_all(&self, disk: &str, workers: &[WorkerId], timeout: Duration) -> Result<(), AdminError> {
        self.workers.attach_all(&self.exports.find(disk)?.disk, workers, timeout)
    }

    /// Forgets which queues of the disk an operator attached, and spreads the disk's queues over at most this many
    /// workers, or over all, within `timeout`. The balancer may then move them.
    ///
    /// # Errors
    /// The errors of [`Server::attach_all`]. The limit takes effect nevertheless.
    pub fn spread(
        &self,
        disk: &str,
        most_workers: Option<NonZeroUsize>,
        timeout: Duration,
    ) -> Result<(), AdminError> {
        self.workers.spread(&self.exports.find(disk)?.disk, most_workers, timeout)
    }

    /// Stops as the module documentation describes, within `timeout`, and releases the images.
    #[must_use]
    pub fn stop(self, timeout: Duration) -> StopReport {
        self.shut_down(timeout)
    }

    /// Stops a server that other threads still use. Ends the waits of these threads, refuses their later operations,
    /// and does not wait for them. Releases the images unless an operation hangs; dropping the server then waits for
    /// the hanging worker.
    #[must_use]
    pub fn shut_down(&self, timeout: Duration) -> StopReport {
        let deadline = deadline_in(timeout);
        self.workers.stop_changes();
        if let Some(balancer) = &self.balancer {
            balancer.quit();
        }
        self.stop_accepting();
        let mut report = StopReport::default();
        let exports = self.exports.close();
        let sessions: Vec<_> = exports.iter().map(|export| export.sessions.all()).collect();
        // Marks all sessions before the first one acts. Otherwise, when that session gives up its rings, another
        // session that waits for them would take them over.
        sessions.iter().flatten().for_each(|session| session.note_end(EndReason::Stop));
        sessions.iter().flatten().for_each(|session| session.end(EndReason::Stop));
        exports.iter().for_each(|export| export.disk.wake_waiters());
        for (export, sessions) in exports.iter().zip(&sessions) {
            let name = export.disk.name().to_owned();
            if sessions.iter().any(|session| !session.wait_ended(deadline)) {
                report.unfinished.push(name);
                continue;
            }
            if export.disk.ignores_flushes() && !export.disk.image().read_only() {
                report.never_flushed.push(name);
            } else if let Err(error) = last_flush(&export.disk, deadline) {
                report.not_flushed.push((name, error));
            }
            export.disk.close_tables(deadline);
        }
        if !report.unfinished.is_empty() {
            self.workers.cancel(None);
        }
        exports.iter().for_each(|export| export.socket.remove());
        self.exports.forget_all();
        report
    }

    fn stop_accepting(&self) {
        self.exports.stop_accepting();
        let acceptor = self.acceptor.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = acceptor.map(JoinHandle::join);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop_accepting();
    }
}
