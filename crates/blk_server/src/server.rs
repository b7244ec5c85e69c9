//! The server: disks, their sockets, their sessions, and the workers; starting and stopping all of it.
//!
//! Stopping loses nothing: no further front-end is accepted, every queue stops taking requests and what
//! is in flight completes, then each image is flushed, then the sockets go. What the guests had not yet
//! been served stays in their rings for the next server. What is still in flight when the time is over is
//! given up and answered with an error: unanswered, the next server would go on at the wrong request.
//!
//! Not here: signals and options (`bareblk`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use disk_image::{CapacityChange, Opener};
use rustix::event::{EventfdFlags, eventfd};
use tracing::{error, info, warn};

use crate::admin::AdminError;
use crate::attachments::WorkerSet;
use crate::disk::{Disk, DiskConfig, InvalidDisk};
use crate::engine_source::EngineSource;
use crate::error_line::error_line;
use crate::listener::{MAX_SESSIONS, Socket, SocketConfig, SocketError, accept_all};
use crate::log_limit::Allowed;
use crate::report::{DiskReport, ServerReport};
use crate::session::{EndReason, Session, SessionShared};
use crate::signal::signal;
use crate::submissions::{SubmissionMeter, Submissions};
use crate::worker_options::{WorkerId, WorkerOptions};
use crate::workers::{AbortOnPanic, Trade};

/// A session's thread sleeps in `poll` and holds one message.
const SESSION_STACK_BYTES: usize = 256 << 10;
/// Sessions of one disk that were told to make room and are about to end.
const MAX_ENDING: usize = 8;
/// A discard may need as many operations as it has segments.
const MIN_DEPTH: u32 = 16;
const _: () = assert!(MIN_DEPTH as usize >= virtio_blk::MAX_SEGMENTS);
const _: () = assert!(disk_image::limits::MAX_SEGMENTS as usize <= virtio_blk::MAX_SEGMENTS);
/// What the last flush gets even if the requests in flight took all the time.
const LAST_FLUSH_AT_LEAST: Duration = Duration::from_secs(5);

/// How to serve.
pub struct ServerConfig {
    /// Of disks that name none of their own; also where an idle worker sleeps.
    pub engine: Arc<EngineSource>,
    /// One worker for each, at least one.
    pub workers: Vec<WorkerOptions>,
    /// Longest polling before a worker sleeps; zero never polls.
    pub poll: Duration,
}

impl std::fmt::Debug for ServerConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { engine, workers, poll } = self;
        let mut out = f.debug_struct("ServerConfig");
        out.field("engine", engine).field("workers", workers).field("poll", poll).finish()
    }
}

/// Why the server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// An engine could not be made, or a worker not be started.
    #[error("cannot start the I/O engine")]
    Engine(#[source] io::Error),
    /// Too few requests in flight.
    #[error("engines of depth {depth}: at least {min} are needed")]
    Depth {
        /** As configured. */
        depth: u32,
        /** One request's most operations. */
        min: u32,
    },
    /// Out of threads or descriptors.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// See [`InvalidDisk`].
    #[error(transparent)]
    Disk(#[from] InvalidDisk),
    /// See [`SocketError`].
    #[error(transparent)]
    Socket(#[from] SocketError),
}

/// What a stop left behind.
#[derive(Debug, Default)]
pub struct StopReport {
    /// Disks with requests still in flight when time was up.
    pub unfinished: Vec<String>,
    /// Disks whose last flush failed, and why.
    pub not_flushed: Vec<(String, io::Error)>,
    /// Disks that are never flushed (`--cache unsafe`).
    pub never_flushed: Vec<String>,
}

impl StopReport {
    /// Whether everything acknowledged is on stable storage, but for disks that are never flushed.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.unfinished.is_empty() && self.not_flushed.is_empty()
    }
}

/// One disk and who is connected to it.
#[derive(Debug)]
struct Export {
    disk: Arc<Disk>,
    socket: Socket,
    sessions: Arc<SessionList>,
}

impl Export {
    fn report(&self, workers: &WorkerSet) -> DiskReport {
        let (disk, image) = (&self.disk, self.disk.image());
        DiskReport {
            name: disk.name().to_owned(),
            image: image.path().to_owned(),
            socket: self.socket.path().to_owned(),
            capacity_sectors: image.capacity_sectors(),
            read_only: image.read_only(),
            failed: disk.has_failed(),
            engine: disk.engine().map_or("", |engine| &engine.name).to_owned(),
            sessions: self.sessions.all().len(),
            queues_offered: disk.queues(),
            queues: workers.queue_reports(disk.id()),
        }
    }
}

/// The sessions of one disk whose threads still hold anything of it.
#[derive(Debug, Default)]
struct SessionList(Mutex<Vec<Arc<SessionShared>>>);

impl SessionList {
    fn all(&self) -> Vec<Arc<SessionShared>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// `None` if the disk has too many sessions already. One that never said anything gives its place up;
    /// for as long as nobody needs it, it may be silent: a VMM connects long before its guest starts.
    fn add(&self) -> Option<io::Result<Arc<SessionShared>>> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let full = sessions.len() >= MAX_SESSIONS;
        let silent = sessions.iter().find(|session| full && session.is_silent());
        let made_room = silent.is_some_and(|session| {
            session.end(EndReason::MadeRoom);
            sessions.len() < MAX_SESSIONS + MAX_ENDING
        });
        (!full || made_room).then(|| {
            let session = SessionShared::new(NEXT_ID.fetch_add(1, Ordering::Relaxed))?;
            sessions.push(Arc::clone(&session));
            Ok(session)
        })
    }

    fn forget(&self, session: &Arc<SessionShared>) {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|known| !Arc::ptr_eq(known, session));
    }
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    exports: Arc<Vec<Export>>,
    workers: Arc<WorkerSet>,
    /// Only where the request path is measured.
    meter: Option<Arc<SubmissionMeter>>,
    quit: Arc<OwnedFd>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    /// Binds every disk's socket and serves until [`Server::stop`].
    ///
    /// # Errors
    /// [`ServerError`]; nothing stays bound or running then.
    pub fn start(
        config: &ServerConfig,
        opener: &Arc<dyn Opener>,
        disks: Vec<(DiskConfig, SocketConfig)>,
    ) -> Result<Self, ServerError> {
        Self::start_with(config, opener, disks, None)
    }

    /// [`Server::start`], and [`Server::submissions`] has something to tell. For whoever measures: two clock
    /// readings and two shared counters per pass of a worker.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_counting(
        config: &ServerConfig,
        opener: &Arc<dyn Opener>,
        disks: Vec<(DiskConfig, SocketConfig)>,
    ) -> Result<Self, ServerError> {
        Self::start_with(config, opener, disks, Some(Arc::default()))
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
        let trade = Trade { base: Arc::clone(&config.engine), poll: config.poll, meter: meter.clone() };
        let plain = [WorkerOptions::default()];
        let workers = if config.workers.is_empty() { &plain } else { config.workers.as_slice() };
        let workers = WorkerSet::start(workers, trade).map_err(ServerError::Engine)?;
        let export = |(disk, socket): (DiskConfig, SocketConfig)| {
            let disk = Arc::new(Disk::new(disk)?);
            let socket = Socket::bind(opener, &socket)?;
            Ok::<_, ServerError>(Export { disk, socket, sessions: Arc::default() })
        };
        let exports = Arc::new(disks.into_iter().map(export).collect::<Result<Vec<_>, _>>()?);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let quit = Arc::new(eventfd(0, flags).map_err(|errno| ServerError::Thread(errno.into()))?);
        let mut server = Self { exports, workers, meter, quit, acceptor: None };
        server.acceptor = Some(server.start_acceptor().map_err(ServerError::Thread)?);
        Ok(server)
    }

    fn start_acceptor(&self) -> io::Result<JoinHandle<()>> {
        let exports = Arc::clone(&self.exports);
        let (workers, quit) = (Arc::clone(&self.workers), Arc::clone(&self.quit));
        let thread = std::thread::Builder::new().name("bareblk-accept".into());
        thread.stack_size(SESSION_STACK_BYTES).spawn(move || {
            let sockets: Vec<_> = exports.iter().map(|export| &export.socket).collect();
            accept_all(&sockets, &quit, |number, front_end| {
                start_session(&exports, number, &workers, front_end);
            });
        })
    }

    /// What all workers submitted so far; `None` unless started by [`Server::start_counting`].
    #[must_use]
    pub fn submissions(&self) -> Option<Submissions> {
        self.meter.as_deref().map(SubmissionMeter::read)
    }

    /// Reads the size of every image again; guests of images that grew are told.
    pub fn refresh_capacities(&self) {
        for export in self.exports.iter() {
            refresh_capacity(export);
        }
    }

    /// A reading of everything that is counted.
    #[must_use]
    pub fn report(&self) -> ServerReport {
        ServerReport {
            workers: self.workers.worker_reports(),
            disks: self.exports.iter().map(|export| export.report(&self.workers)).collect(),
        }
    }

    /// Serves one more disk.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn add_disk(&self, disk: DiskConfig, socket: &SocketConfig) -> Result<(), AdminError> {
        let _ = (disk, socket);
        Err(not_yet())
    }

    /// Stops serving a disk: requests in flight complete, the image is flushed, the socket goes. With `force` also
    /// when a front-end is connected.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn remove_disk(&self, name: &str, force: bool, timeout: Duration) -> Result<(), AdminError> {
        let _ = (name, force, timeout);
        Err(not_yet())
    }

    /// Gives a regular file's disk another size, and tells its guest. Smaller only with `force`.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn resize_disk(&self, name: &str, bytes: u64, force: bool) -> Result<(), AdminError> {
        let _ = (name, bytes, force);
        Err(not_yet())
    }

    /// Starts one more worker. It gets no queue by itself.
    ///
    /// # Errors
    /// [`AdminError`].
    pub fn add_worker(&self, options: WorkerOptions) -> Result<WorkerId, AdminError> {
        self.workers.add_worker(options)
    }

    /// Moves the worker's queues to the others, then ends it.
    ///
    /// # Errors
    /// [`AdminError`]; queues that were moved already stay where they went.
    pub fn remove_worker(&self, id: WorkerId, timeout: Duration) -> Result<(), AdminError> {
        self.workers.remove_worker(id, timeout)
    }

    /// Hands a queue to another worker: what is in flight completes, then the new one goes on. A queue that does
    /// not run yet will start there.
    ///
    /// # Errors
    /// [`AdminError`]; the queue then goes on where it was.
    pub fn attach(
        &self,
        disk: &str,
        queue: u16,
        worker: WorkerId,
        timeout: Duration,
    ) -> Result<(), AdminError> {
        let export = self.exports.iter().find(|export| export.disk.name() == disk);
        let export = export.ok_or_else(|| AdminError::NoDisk { name: disk.to_owned() })?;
        self.workers.attach(&export.disk, queue, worker, timeout)
    }

    /// Stops as the file's head says, within `timeout`.
    #[must_use]
    pub fn stop(mut self, timeout: Duration) -> StopReport {
        let deadline = Instant::now() + timeout;
        self.stop_accepting();
        let mut report = StopReport::default();
        let sessions: Vec<_> = self.exports.iter().map(|export| export.sessions.all()).collect();
        // All know before the first one acts: it gives up its rings, and one that waits for them must not
        // take them over now.
        sessions.iter().flatten().for_each(|session| session.note_end(EndReason::Stop));
        sessions.iter().flatten().for_each(|session| session.end(EndReason::Stop));
        self.exports.iter().for_each(|export| export.disk.wake_waiters());
        for (export, sessions) in self.exports.iter().zip(&sessions) {
            let name = export.disk.name().to_owned();
            if sessions.iter().any(|session| !session.wait_ended(deadline)) {
                report.unfinished.push(name);
            } else if export.disk.ignores_flushes() && !export.disk.image().read_only() {
                report.never_flushed.push(name);
            } else if let Err(error) = flush(&export.disk, deadline) {
                report.not_flushed.push((name, error));
            }
        }
        if !report.unfinished.is_empty() {
            self.workers.cancel(None);
        }
        self.exports.iter().for_each(|export| export.socket.remove());
        report
    }

    fn stop_accepting(&mut self) {
        signal(&self.quit);
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop_accepting();
    }
}

fn not_yet() -> AdminError {
    AdminError::System { action: "do that yet".into(), source: io::ErrorKind::Unsupported.into() }
}

fn start_session(exports: &Arc<Vec<Export>>, number: usize, workers: &Arc<WorkerSet>, front_end: OwnedFd) {
    let export = &exports[number];
    let disk = Arc::clone(&export.disk);
    let refuse = |why: &str| {
        if let Some(Allowed { suppressed }) = disk.log_allowed(Instant::now()) {
            warn!(disk = disk.name(), suppressed, "front-end refused: {why}");
        }
    };
    let session = match export.sessions.add() {
        Some(Ok(session)) => session,
        Some(Err(error)) => return refuse(&error.to_string()),
        None => return refuse(&format!("{MAX_SESSIONS} are connected, and no more are taken")),
    };
    let (list, known) = (Arc::clone(&export.sessions), Arc::clone(&session));
    let (served, workers) = (Arc::clone(&disk), Arc::clone(workers));
    let thread = std::thread::Builder::new().name(format!("bareblk-sess-{}", session.id()));
    let started = thread.stack_size(SESSION_STACK_BYTES).spawn(move || {
        let _guard = AbortOnPanic;
        // Gives up everything it holds before it counts as ended: whoever stops the server may then
        // open the image, or bind the socket, again.
        Session::new(served, workers, front_end, Arc::clone(&session)).run();
        session.ended();
        list.forget(&session);
    });
    if let Err(error) = started {
        refuse(&error.to_string());
        export.sessions.forget(&known);
    }
}

fn refresh_capacity(export: &Export) {
    let disk = &export.disk;
    match disk.image().refresh_capacity() {
        Ok(CapacityChange::Unchanged) => {}
        Ok(CapacityChange::Grown { from, to }) => {
            info!(disk = disk.name(), from, to, "image grew (sectors of 512 bytes)");
            export.sessions.all().iter().for_each(|session| session.announce_config_change());
        }
        Ok(CapacityChange::Shrunk { from, to }) => {
            error!(
                disk = disk.name(),
                from, to, "image shrank; the disk keeps its size and reads beyond fail"
            );
        }
        Err(error) => error!(disk = disk.name(), "size not read: {}", error_line(&error)),
    }
}

/// Syncs the image on a thread of its own: a device that hangs must not keep the server from ending.
fn flush(disk: &Arc<Disk>, deadline: Instant) -> io::Result<()> {
    if disk.image().read_only() {
        return Ok(());
    }
    let (done, flushed) = sync_channel(1);
    let file = Arc::clone(disk.image().file());
    let flush = move || {
        let result = file.sync_data();
        // Before the result: whoever starts the next server on it must not find the image locked.
        drop(file);
        let _ = done.send(result);
    };
    std::thread::Builder::new().name("bareblk-flush".into()).spawn(flush)?;
    let left = deadline.saturating_duration_since(Instant::now()).max(LAST_FLUSH_AT_LEAST);
    let flushed = flushed.recv_timeout(left).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    match flushed {
        Ok(()) if disk.has_failed() => Err(io::Error::other("an earlier sync failed, and data is lost")),
        other => other,
    }
}
