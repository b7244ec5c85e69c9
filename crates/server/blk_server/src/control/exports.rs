//! The disks of a server, each with its socket and sessions. The list may change while the server runs.
//!
//! `add → list ← accept (a front-end connects → session thread); take out → socket, image and lock are released`
//!
//! - Names and sockets are unique. The image lock ensures that an image is served once, or several times read-only. The
//!   lock works within one process as well as between processes.
//! - A thread locks the list for look-ups and while it accepts a front-end, but never while it waits for a guest, a
//!   front-end or a device. The accepting thread therefore holds nothing of a removed disk.
//! - Only one thread at a time may change a disk ([`Export::take_turn`]). Each wait for this right has a time limit.

use std::collections::{HashMap, HashSet};
use std::error::Error;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use disk_image::Opener;
use guest_mem::{Budget, Limits};
use sandbox::Role;
use tracing::{error, info, warn};

use crate::control::acceptor::Acceptor;
use crate::control::session_list::SessionList;
use crate::control::throttling::Throttling;
use crate::data_path::assignment::WorkerSet;
use crate::data_path::disk::engine_source::MIN_DEPTH;
use crate::data_path::disk::log_limit::{Allowed, LogLimit};
use crate::data_path::disk::storage_thread::StorageThread;
use crate::data_path::disk::{Disk, DiskConfig};
use crate::data_path::report::DiskReport;
use crate::data_path::worker::workers::AbortOnPanic;
use crate::error::AdminError;
use crate::error::ServerError;
use crate::host::error_line::error_line;
use crate::host::listener::{Socket, SocketConfig, clear_stale};
use crate::session::Session;
use crate::session::wire::hang_up;

/// Stack size of a session's thread, which sleeps in `poll` and stores one message.
pub(crate) const SESSION_STACK_BYTES: usize = 256 << 10;
/// The pause after an `accept` that failed for lack of resources.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long a change of a disk waits for another change to end.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// One disk and its front-ends.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) disk: Arc<Disk>,
    pub(crate) socket: Socket,
    /// The socket's path with symbolic links resolved, for comparison.
    place: PathBuf,
    pub(crate) sessions: Arc<SessionList>,
    changing: Mutex<bool>,
    changed: Condvar,
}

impl Export {
    /// Waits until no other thread changes the disk.
    ///
    /// # Errors
    /// [`AdminError::Busy`]: at once if the disk is being removed, else after a timeout.
    pub(crate) fn take_turn(export: &Arc<Self>) -> Result<Turn, AdminError> {
        let changing = export.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = export
            .changed
            .wait_timeout_while(changing, TURN_TIMEOUT, |changing| *changing && !export.disk.is_retired());
        let (mut changing, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *changing, true) {
            return Err(AdminError::Busy { disk: export.disk.name().to_owned() });
        }
        Ok(Turn(Arc::clone(export)))
    }

    fn report(&self, engine: &str, throttling: &Throttling) -> DiskReport {
        let (disk, image) = (&self.disk, self.disk.image());
        DiskReport {
            name: disk.name().to_owned(),
            image: image.path().to_owned(),
            socket: self.socket.path().to_owned(),
            capacity_sectors: image.capacity_sectors(),
            layers: image.backing().volume().map(|volume| volume.layers()),
            read_only: image.read_only(),
            failed: disk.has_failed(),
            refused: disk.is_refused(),
            park: self.disk.park_policy(),
            engine: disk.engine().map_or_else(|| engine.to_owned(), |engine| engine.name.clone()),
            placement: disk.engine().map(|engine| engine.placement_report()).unwrap_or_default(),
            throttling: throttling.report(disk.name()),
            sessions: self.sessions.count(),
            queues_offered: disk.queues(),
            totals: disk.totals().read(),
            slow_limit: disk.slow().limit(),
            queues: Vec::new(),
        }
    }
}

/// The right to change a disk, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn(pub(crate) Arc<Export>);

impl Drop for Turn {
    fn drop(&mut self) {
        *self.0.changing.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.changed.notify_one();
    }
}

#[derive(Debug, Default)]
struct List {
    disks: Vec<Arc<Export>>,
    /// Whether the server is stopping.
    closed: bool,
    /// Whether the server accepts no front-ends, which then wait in their sockets' queues.
    paused: bool,
    /// Ids of the disks whose front-ends wait in their socket's queue.
    paused_disks: Vec<u64>,
    /// Ids of the disks whose front-ends wait until another thread has closed the descriptors of earlier front-ends.
    clogged: Vec<u64>,
}

/// The disks of a server. See the module documentation.
#[derive(Debug)]
pub(crate) struct Exports {
    opener: Arc<dyn Opener>,
    /// Limits the resources that the front-ends of all disks use together.
    budget: Arc<Budget>,
    acceptor: Acceptor,
    pub(crate) throttling: Throttling,
    list: Mutex<List>,
    /// A thread that adds a disk holds this lock, so that disks are added one at a time.
    adding: Mutex<()>,
}

impl Exports {
    /// # Errors
    /// The process has no free descriptors.
    pub(crate) fn new(opener: &Arc<dyn Opener>) -> std::io::Result<Self> {
        let (opener, acceptor) = (Arc::clone(opener), Acceptor::new()?);
        let budget = Budget::new(Limits::of_process());
        let (list, adding) = (Mutex::default(), Mutex::default());
        Ok(Self { opener, budget, acceptor, throttling: Throttling::default(), list, adding })
    }

    /// Adds all disks or none: if one fails, dropping the list removes the earlier ones.
    ///
    /// # Errors
    /// The [`ServerError`] of the first disk that fails.
    pub(crate) fn add_all(&self, disks: Vec<(DiskConfig, SocketConfig)>) -> Result<(), ServerError> {
        self.refuse_twice(&disks)?;
        // Checked all together, because each check takes time.
        let paths: Vec<&Path> = disks.iter().map(|(_, socket)| socket.path.as_path()).collect();
        clear_stale(self.opener.as_ref(), &paths)?;
        disks.into_iter().try_for_each(|(disk, socket)| self.add(disk, &socket))
    }

    /// Adds a disk.
    ///
    /// # Errors
    /// [`ServerError`]. The image is released.
    pub(crate) fn add(&self, disk: DiskConfig, socket: &SocketConfig) -> Result<(), ServerError> {
        let _adding = self.adding.lock().unwrap_or_else(PoisonError::into_inner);
        let place = self.place(&socket.path);
        self.refuse_second(&disk.name, &place, &socket.path)?;
        if let Some(engine) = disk.engine.as_ref().filter(|engine| engine.depth < MIN_DEPTH) {
            return Err(ServerError::Depth { depth: engine.depth, min: MIN_DEPTH });
        }
        let mut disk = Disk::new(disk, &self.opener, &self.budget)?;
        disk.start_storage().map_err(ServerError::Thread)?;
        let disk = Arc::new(disk);
        disk.set_throttle(self.throttling.throttle(disk.name()));
        let socket = Socket::bind(&self.opener, socket)?;
        let id = disk.id();
        let (sessions, changing, changed) = (Arc::default(), Mutex::default(), Condvar::new());
        let export = Arc::new(Export { disk, socket, place, sessions, changing, changed });
        // Adds the disk to the list first, so that a front-end that connects at once finds its disk.
        self.enter(&export)?;
        let watched = self.acceptor.add(&export.socket, id);
        watched.inspect_err(|_| self.take_out(&export)).map_err(ServerError::Thread)
    }

    fn enter(&self, export: &Arc<Export>) -> Result<(), ServerError> {
        let mut list = self.lock();
        if list.closed {
            return Err(ServerError::Stopping);
        }
        list.disks.push(Arc::clone(export));
        Ok(())
    }

    /// Accepts no further disks. Returns all disks.
    pub(crate) fn close(&self) -> Vec<Arc<Export>> {
        let mut list = self.lock();
        list.closed = true;
        list.disks.clone()
    }

    /// Drops the list's references to all images, sockets and locks. Each is released when no other thread uses it.
    pub(crate) fn forget_all(&self) {
        let disks = std::mem::take(&mut self.lock().disks);
        disks.iter().for_each(|export| self.acceptor.remove(&export.socket));
    }

    /// Refuses duplicate names and sockets, before a socket is bound or a stale file removed.
    fn refuse_twice(&self, disks: &[(DiskConfig, SocketConfig)]) -> Result<(), ServerError> {
        let (mut names, mut places) = (HashSet::new(), HashMap::new());
        for (DiskConfig { name, .. }, SocketConfig { path, .. }) in disks {
            if !names.insert(name) {
                return Err(ServerError::NameTwice { name: name.clone() });
            }
            if let Some(other) = places.insert(self.place(path), name) {
                return Err(ServerError::SocketTwice { path: path.clone(), other: other.clone() });
            }
        }
        Ok(())
    }

    fn refuse_second(&self, name: &str, place: &Path, path: &Path) -> Result<(), ServerError> {
        let list = &self.lock().disks;
        if list.iter().any(|known| known.disk.name() == name) {
            return Err(ServerError::NameTwice { name: name.to_owned() });
        }
        match list.iter().find(|known| known.place == place) {
            None => Ok(()),
            Some(known) => {
                let (path, other) = (path.to_owned(), known.disk.name().to_owned());
                Err(ServerError::SocketTwice { path, other })
            }
        }
    }

    /// The path with its folders resolved. If a folder does not exist, `bind` reports it.
    fn place(&self, path: &Path) -> PathBuf {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let (folder, name) = (self.opener.canonical_path(folder), path.file_name());
        folder.ok().zip(name).map_or_else(|| path.to_owned(), |(folder, name)| folder.join(name))
    }

    /// Makes running queues of these disks apply the disks' limits.
    pub(crate) fn apply_limits(&self, workers: &WorkerSet, changed: &[String]) {
        for export in self.all().iter().filter(|export| changed.iter().any(|name| name == export.disk.name()))
        {
            export.disk.set_throttle(self.throttling.throttle(export.disk.name()));
            workers.renew_gates(export.disk.id());
        }
    }

    /// Removes the disk from the list: no front-end can connect, and the disk's name and socket path become free.
    pub(crate) fn take_out(&self, export: &Arc<Export>) {
        self.acceptor.remove(&export.socket);
        export.socket.remove();
        self.lock().disks.retain(|known| !Arc::ptr_eq(known, export));
    }

    /// Returns the disks in the order in which they were added.
    pub(crate) fn all(&self) -> Vec<Arc<Export>> {
        self.lock().disks.clone()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.lock().disks.iter().map(|export| export.disk.name().to_owned()).collect()
    }

    /// # Errors
    /// [`AdminError::NoDisk`].
    pub(crate) fn find(&self, name: &str) -> Result<Arc<Export>, AdminError> {
        let list = self.lock();
        let export = list.disks.iter().find(|export| export.disk.name() == name);
        export.map(Arc::clone).ok_or_else(|| AdminError::NoDisk { name: name.to_owned() })
    }

    /// `engine`: the default engine of disks.
    pub(crate) fn reports(&self, workers: &WorkerSet, engine: &str) -> Vec<DiskReport> {
        let reports = self.all().into_iter().map(|export| DiskReport {
            queues: workers.queue_reports(export.disk.id()),
            ..export.report(engine, &self.throttling)
        });
        reports.collect()
    }

    /// Starts a session for each front-end that connects, until [`Exports::stop_accepting`].
    pub(crate) fn accept_all(&self, workers: &Arc<WorkerSet>) {
        let mut limit = LogLimit::new(Instant::now());
        let accept = |id| {
            if let Err(error) = self.accept(id, workers) {
                if limit.allow(Instant::now()).is_some() {
                    error!("cannot accept a front-end: {error}");
                }
                std::thread::sleep(ACCEPT_PAUSE);
            }
        };
        self.acceptor.run(accept, || self.accept_clogged());
    }

    /// Accepts no front-ends until [`Exports::resume_accepting`]. New front-ends wait.
    pub(crate) fn pause_accepting(&self) -> Vec<Arc<Export>> {
        let mut list = self.lock();
        list.paused = true;
        list.disks.iter().for_each(|export| self.acceptor.remove(&export.socket));
        list.disks.clone()
    }

    /// Like [`Exports::pause_accepting`], but only for these disks.
    pub(crate) fn pause_accepting_for(&self, disks: &[Arc<Export>]) {
        let mut list = self.lock();
        list.paused_disks.extend(disks.iter().map(|export| export.disk.id()));
        disks.iter().for_each(|export| self.acceptor.remove(&export.socket));
    }

    /// # Errors
    /// Errors of [`Acceptor::add`]. The other sockets are watched nevertheless.
    pub(crate) fn resume_accepting(&self) -> std::io::Result<()> {
        let mut list = self.lock();
        list.paused = false;
        list.paused_disks.clear();
        let added: Vec<_> =
            list.disks.iter().map(|export| self.acceptor.add(&export.socket, export.disk.id())).collect();
        added.into_iter().collect()
    }

    /// May be called before a thread accepts front-ends, or if none does.
    pub(crate) fn stop_accepting(&self) {
        self.acceptor.quit();
    }

    /// Drops `_front_end` after it unlocks the list, because closing may wait.
    fn accept(&self, id: u64, workers: &Arc<WorkerSet>) -> std::io::Result<()> {
        let _front_end;
        let mut list = self.lock();
        if list.paused || list.paused_disks.contains(&id) {
            return Ok(());
        }
        // The disk may have been removed since the kernel reported it.
        let Some(export) = list.disks.iter().find(|export| export.disk.id() == id).map(Arc::clone) else {
            return Ok(());
        };
        if export.disk.quota().is_clogged() {
            self.acceptor.remove(&export.socket);
            list.clogged.push(id);
            error!(
                disk = export.disk.name(),
                "the disk accepts no new front-ends, because closing a descriptor of an earlier front-end hangs"
            );
            return Ok(());
        }
        if let Some(front_end) = export.socket.accept()? {
            let front_end = Arc::new(front_end);
            start_session(&export, workers, &front_end);
            _front_end = front_end;
        }
        drop(list);
        Ok(())
    }

    /// Accepts front-ends of clogged disks again once enough of their descriptors have been closed. Returns whether any
    /// disk is still clogged.
    fn accept_clogged(&self) -> bool {
        let mut list = self.lock();
        let List { disks, clogged, .. } = &mut *list;
        clogged.retain(|id| {
            let Some(export) = disks.iter().find(|export| export.disk.id() == *id) else { return false };
            if export.disk.quota().is_clogged() || self.acceptor.add(&export.socket, *id).is_err() {
                return true;
            }
            info!(disk = export.disk.name(), "the disk accepts front-ends again");
            false
        });
        !list.clogged.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn start_session(export: &Export, workers: &Arc<WorkerSet>, front_end: &Arc<OwnedFd>) {
    let disk = &export.disk;
    let session = match export.sessions.add() {
        Ok(session) => session,
        Err(error) => {
            hang_up(front_end, disk.quota());
            return refuse(disk, &error);
        }
    };
    let (list, known) = (Arc::clone(&export.sessions), Arc::clone(&session));
    let (served, workers, socket) = (Arc::clone(disk), Arc::clone(workers), Arc::clone(front_end));
    let thread = std::thread::Builder::new().name(format!("bareblk-sess-{}", session.id()));
    let started = thread.stack_size(SESSION_STACK_BYTES).spawn(move || {
        let _guard = AbortOnPanic;
        let storage = StorageThread::start(&served);
        match (storage, sandbox::enter(Role::Session)) {
            // The session releases everything before it counts as ended, so that the operator can then open the image
            // or bind the socket at once.
            (Ok(storage), Ok(())) => {
                Session::new(served, workers, socket, Arc::clone(&session), storage).run();
            }
            (Err(error), _) => refuse(&served, &error),
            (_, Err(error)) => refuse(&served, &error),
        }
        session.ended();
        list.forget(&session);
    });
    if let Err(error) = started {
        hang_up(front_end, disk.quota());
        refuse(disk, &error);
        export.sessions.forget(&known);
    }
}

fn refuse(disk: &Disk, why: &dyn Error) {
    if let Some(Allowed { suppressed }) = disk.log_allowed(Instant::now()) {
        warn!(disk = disk.name(), suppressed, "front-end refused: {}", error_line(why));
    }
}
