//! The running server with the settings of each disk; a reload and the control socket change them.
//!
//! `Configuration → open → start → Serving`; `changed file → Difference → remove, add, change in place → Applied`
//!
//! - Only one change runs at a time. Neither a stop nor a query waits for it: the lock of `state` is held only for
//!   look-ups.
//! - A refused change leaves its disk as it was and does not prevent other changes.
//!
//! `difference.rs` computes the difference, `open_disk.rs` opens a disk's image and engine, `serve.rs` handles signals.

pub(crate) mod check;
pub(crate) mod confined;
pub(crate) mod descriptors;
pub(crate) mod layers;
pub(crate) mod limits;
pub(crate) mod open_disk;
pub(crate) mod open_watch;
pub(crate) mod remote_access;
pub(crate) mod running_server;
pub(crate) mod serve;
pub(crate) mod serving_control;
pub(crate) mod waiting;
pub(crate) mod waiting_disk;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use blk_server::{AdminError, Server, ServerConfig, SocketConfig, StopReport, WorkerId, format_cpus};
use disk_image::{NewImage, Opener, SECTOR_BYTES};
use tracing::{error, warn};

use crate::config::config_file;
use crate::config::configuration::{Configuration, ServerSettings};
use crate::config::difference::{
    Applied, Changed, Difference, NamedDisk, changed_server_keys, sizes_not_followed,
};
use crate::config::disk_settings::{DiskSettings, WorkerChoice};
use crate::service::service_manager::ServiceManager;
use crate::serving::layers::job::Jobs;
use crate::serving::open_disk::{
    DiskLogLine, EngineSources, OpenImage, Origin, ReadyDisk, is_foreign_format, most_workers, open_image,
    open_within, prepare,
};
use crate::serving::open_watch::OpenWatch;
use crate::serving::remote_access::RemoteAccess;
use crate::serving::waiting_disk::WaitingDisk;

/// How long all queues of a disk together may take to drain before they move to other workers.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a change waits for another change, which may be waiting for an image's lock.
const TURN_TIMEOUT: Duration = Duration::from_secs(60);
const TURN_PAUSE: Duration = Duration::from_millis(10);

/// All images of this host, open and locked, before anything is served.
#[derive(Debug)]
pub struct Opened {
    opener: Arc<dyn Opener>,
    /// Without the disks on other machines.
    configuration: Configuration,
    images: Vec<OpenImage>,
    /// Disks on other machines, which are opened once the server runs.
    remote: Vec<DiskSettings>,
}

/// Opens every image of this host, existing ones first, so that an interrupted wait for a lock leaves no new images behind. The log
/// names an image that hangs. If one of several images looks like another format, its disk is left out: its guest may
/// have written these bytes, and the other guests need their disks.
pub fn open(opener: &Arc<dyn Opener>, mut configuration: Configuration) -> Result<Opened> {
    let makes = |disk: &DiskSettings| disk.image.create_bytes.is_some();
    let watch = OpenWatch::start()?;
    let remote: Vec<_> = configuration.disks.extract_if(.., |disk| disk.is_remote()).collect();
    let mut left = configuration.disks.len() + remote.len();
    let mut images: Vec<Option<OpenImage>> = configuration.disks.iter().map(|_| None).collect();
    for new in [false, true] {
        let disks = configuration.disks.iter_mut().zip(&mut images);
        for (disk, image) in disks.filter(|(disk, _)| makes(disk) == new) {
            watch.begin(&disk.image.path);
            match open_image(opener, disk, Origin::New) {
                Ok(open) => *image = Some(open),
                Err(error) if left > 1 && is_foreign_format(&error) => {
                    left -= 1;
                    error!(
                        disk = disk.name(opener.as_ref()),
                        "this disk is not served, but the other disks are: {error:#}"
                    );
                }
                Err(error) => return Err(error),
            }
        }
    }
    let mut opened = images.iter().map(Option::is_some);
    configuration.disks.retain(|_| opened.next().unwrap_or(false));
    let images = images.into_iter().flatten().collect();
    Ok(Opened { opener: Arc::clone(opener), configuration, images, remote })
}

impl Opened {
    /// The disks on other machines, for [`Serving::serve_remote`].
    pub fn remote(&self) -> &[DiskSettings] {
        &self.remote
    }

    /// Prepares the server; front-ends can connect after [`Serving::accept_front_ends`]. If this fails, the images that
    /// this start created are removed. `manager` is notified whenever the number of disks changes.
    pub fn start(self, remote: Arc<RemoteAccess>, manager: Arc<ServiceManager>) -> Result<Serving> {
        let Configuration { disks, server: settings, groups, file } = self.configuration;
        let sources = Arc::<EngineSources>::default();
        let workers = settings.workers.len();
        let ready = self.images.into_iter().zip(&disks);
        let ready = ready.map(|(image, disk)| prepare(image, disk, &sources, workers));
        let ready: Vec<ReadyDisk> = ready.collect::<Result<_>>()?;
        let first = ready.first().map(|first| Arc::clone(&first.engine));
        let first = first.or_else(|| sources.for_remote(self.remote.first()?));
        let engine = first.context("there is no disk to serve")?;
        confined::limit_engines(&settings, file.is_some(), ready.iter().map(ReadyDisk::engine_kind));
        let config = ServerConfig {
            engine,
            workers: settings.workers.clone(),
            poll: settings.options.poll(),
            balance: settings.options.balance,
        };
        let mut log_lines = Vec::new();
        let mut made = Vec::new();
        let mut named = Vec::new();
        let mut served = Vec::new();
        for (ready, disk) in ready.into_iter().zip(disks) {
            named.push(NamedDisk { name: ready.config.name.clone(), settings: disk.clone() });
            served.push((ready.config, disk.socket));
            made.extend(ready.new);
            log_lines.push(ready.log_line);
        }
        let server = Server::prepare(&config, &self.opener, served)?;
        named.iter().try_for_each(|disk| set_up(&server, disk))?;
        server.limit_all(&groups, &named.iter().map(NamedDisk::limits).collect::<Vec<_>>())?;
        Ok(Serving {
            server,
            manager,
            stopping: AtomicBool::new(false),
            opener: self.opener,
            remote,
            sources,
            first: Mutex::new(Some(First { made, log_lines })),
            jobs: Jobs::default(),
            fate: Mutex::new(()),
            changes: Mutex::new(()),
            state: Mutex::new(State { disks: named, waiting: Vec::new(), settings }),
            file,
        })
    }
}

/// The disks, and the settings.
#[derive(Debug)]
struct State {
    disks: Vec<NamedDisk>,
    /// Disks on other machines that are not served yet.
    waiting: Vec<Arc<WaitingDisk>>,
    settings: ServerSettings,
}

/// The first disks' new images and log lines, kept until the disks are served.
#[derive(Debug)]
struct First {
    made: Vec<NewImage<Arc<dyn Opener>>>,
    log_lines: Vec<DiskLogLine>,
}

/// The running server with its settings.
#[derive(Debug)]
pub struct Serving {
    server: Server,
    manager: Arc<ServiceManager>,
    /// True once a stop has begun.
    stopping: AtomicBool,
    opener: Arc<dyn Opener>,
    remote: Arc<RemoteAccess>,
    sources: Arc<EngineSources>,
    first: Mutex<Option<First>>,
    /// Those that merge layers.
    jobs: Jobs,
    /// A stop and a live upgrade lock this when they begin: only one of them ends this process.
    fate: Mutex<()>,
    /// Each change holds this lock.
    changes: Mutex<()>,
    state: Mutex<State>,
    file: Option<PathBuf>,
}

#[allow(dead_code)] // add, remove and resize are for the control socket
impl Serving {
    /// Runs a query, or a change that does not concern a disk's settings. A stop does not wait for it.
    pub fn with_server<T>(&self, ask: impl FnOnce(&Server) -> T) -> Result<T> {
        if self.is_stopping() { Err(anyhow!("the server is stopping")) } else { Ok(ask(&self.server)) }
    }

    fn is_stopping(&self) -> bool {
        // Relaxed: it orders no other data. The server itself refuses calls that come too late.
        self.stopping.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts front-ends from now on.
    pub fn accept_front_ends(&self) -> Result<()> {
        self.with_server(Server::accept_front_ends)??;
        let Some(First { made, log_lines }) =
            self.first.lock().unwrap_or_else(PoisonError::into_inner).take()
        else {
            return Ok(());
        };
        made.into_iter().for_each(NewImage::keep);
        log_lines.iter().zip(self.disks()).for_each(|(line, disk)| line.log(&disk.settings));
        Ok(())
    }

    /// Waits until no other change runs.
    pub fn begin_change(&self) -> Result<MutexGuard<'_, ()>> {
        let begin = Instant::now();
        loop {
            match self.try_change() {
                Some(change) => return Ok(change),
                None if self.is_stopping() => bail!("the server is stopping"),
                None if begin.elapsed() >= TURN_TIMEOUT => {
                    let timeout_s = TURN_TIMEOUT.as_secs();
                    bail!("another change of the disks is still in progress after {timeout_s} s: try again")
                }
                None => std::thread::sleep(TURN_PAUSE),
            }
        }
    }

    /// Begins a change, unless another one runs.
    fn try_change(&self) -> Option<MutexGuard<'_, ()>> {
        match self.changes.try_lock() {
            Ok(change) => Some(change),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The numbers of the current workers.
    fn workers(&self) -> Result<Vec<u32>> {
        self.with_server(|server| server.report().workers.iter().map(|worker| worker.id.0).collect())
    }

    /// The disks, in the order in which they were added.
    pub fn disks(&self) -> Vec<NamedDisk> {
        self.state().disks.clone()
    }

    /// The state in one line, for the service manager.
    pub fn status(&self) -> String {
        let (served, waiting) = {
            let state = self.state();
            (state.disks.len(), state.waiting.len())
        };
        let served =
            if served == 1 { "serving 1 disk".to_owned() } else { format!("serving {served} disks") };
        match waiting {
            0 => served,
            1 => format!("{served}; 1 disk waits for its server"),
            count => format!("{served}; {count} disks wait for their servers"),
        }
    }

    /// The service manager, for notifications about the whole service.
    pub fn manager(&self) -> &ServiceManager {
        &self.manager
    }

    /// The server's access to the file system.
    pub fn opener(&self) -> &dyn Opener {
        self.opener.as_ref()
    }

    fn shared_opener(&self) -> Arc<dyn Opener> {
        Arc::clone(&self.opener)
    }

    /// The settings of the process.
    pub fn settings(&self) -> ServerSettings {
        self.state().settings.clone()
    }

    /// Whether a reload reads a file.
    pub fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// Adds a disk. Returns its name.
    pub fn add(&self, settings: DiskSettings) -> Result<String> {
        let disk = NamedDisk::new(settings, self.opener.as_ref());
        self.check_new(&disk)?;
        // Opened without a lock, because a file system that hangs must not delay other changes.
        let ready = self.open_disk(&disk, Origin::New)?;
        let _change = self.begin_change()?;
        let name = disk.name.clone();
        // This fails if another disk has taken the name or socket meanwhile. The image is already locked for this disk.
        self.serve_ready(disk, ready)?;
        Ok(name)
    }

    fn check_new(&self, disk: &NamedDisk) -> Result<()> {
        let waiting = self.waiting().into_iter().map(|waiting| waiting.disk.clone());
        for other in self.disks().into_iter().chain(waiting) {
            if other.name == disk.name {
                bail!("there is already a disk named {}: choose another name", disk.name);
            }
            if let Some(shared) = disk.settings.conflict(&other.settings, self.opener.as_ref()) {
                bail!("disk {} has the same {shared} as disk {}", disk.name, other.name);
            }
        }
        let workers = self.workers()?;
        if let Some(beyond) = disk.settings.workers.as_ref().and_then(|choice| choice.beyond(&workers)) {
            let (name, count, known) = (&disk.name, workers.len(), format_cpus(&workers));
            bail!("disk {name}: {beyond}, and the server has {count}, numbered {known}");
        }
        Ok(())
    }

    fn open_disk(&self, disk: &NamedDisk, origin: Origin) -> Result<ReadyDisk> {
        let workers = self.state().settings.workers.len();
        open_within(
            &self.opener,
            &self.remote,
            &disk.settings,
            origin,
            &self.sources,
            workers,
            &self.stopping,
        )
    }

    fn serve_disk(&self, disk: NamedDisk, origin: Origin) -> Result<()> {
        let ready = self.open_disk(&disk, origin)?;
        self.serve_ready(disk, ready)
    }

    fn serve_ready(&self, disk: NamedDisk, ready: ReadyDisk) -> Result<()> {
        self.with_server(|server| {
            server.add_limited_disk(ready.config, &disk.settings.socket, disk.settings.limits.clone())?;
            set_up(server, &disk).inspect_err(|_| {
                let _ = server.remove_disk(&disk.name, true, ATTACH_TIMEOUT);
            })
        })??;
        ready.new.into_iter().for_each(NewImage::keep);
        ready.log_line.log(&disk.settings);
        self.state().disks.push(disk);
        self.manager.status(&self.status());
        Ok(())
    }

    /// Removes a disk; `force` removes it even if a front-end is connected.
    pub fn remove(&self, name: &str, force: bool, timeout: Duration) -> Result<()> {
        let _change = self.begin_change()?;
        if !self.stop_waiting(|disk| disk.name == name).is_empty() {
            self.manager.status(&self.status());
            return Ok(());
        }
        self.unserve_disk(name, force, timeout)
    }

    fn unserve_disk(&self, name: &str, force: bool, timeout: Duration) -> Result<()> {
        self.cancel_or_refuse_job(name, force)?;
        let removed = self.with_server(|server| server.remove_disk(name, force, timeout))?;
        // A disk is removed although its last flush failed.
        if matches!(removed, Ok(()) | Err(AdminError::NotFlushed { .. })) {
            self.state().disks.retain(|disk| disk.name != name);
            self.forget_job(name);
            self.manager.status(&self.status());
        }
        Ok(removed?)
    }

    /// Resizes a disk; `force` allows a smaller size.
    pub fn resize(&self, name: &str, bytes: u64, force: bool) -> Result<()> {
        let _change = self.begin_change()?;
        let image = self.with_server(|server| server.image(name))??;
        if image.backing().volume().is_some_and(|volume| volume.is_writable()) {
            return self.grow_qcow2(name, bytes);
        }
        Ok(self.with_server(|server| server.resize_disk(name, bytes, force))??)
    }

    /// Reads the size of every image again.
    pub fn refresh_capacities(&self) {
        // Fails if the server is stopping: then there are no guests to tell.
        let _ = self.with_server(Server::refresh_capacities);
    }

    /// Reads the file again and applies it. A file with a mistake changes nothing.
    pub fn reload(&self) -> Result<Applied> {
        let Some(file) = &self.file else {
            bail!("there is no configuration file to read again: the server was started without --config");
        };
        self.apply(config_file::read(file, &self.workers()?, self.opener.as_ref())?)
    }

    /// Applies the parts of a configuration that disturb no guest.
    pub fn apply(&self, wanted: Configuration) -> Result<Applied> {
        let _change = self.begin_change()?;
        let opener = self.opener.as_ref();
        let mut applied = Applied { needs_restart: self.apply_server(&wanted.server), ..Applied::default() };
        let running = self.disks();
        let groups = wanted.groups;
        let wanted = wanted.disks.into_iter().map(|disk| NamedDisk::new(disk, opener)).collect();
        let (wanted, no_longer_waiting) = self.follow_waiting(wanted);
        applied.removed.extend(no_longer_waiting);
        let report = self.with_server(Server::report)?.disks;
        let in_use = report.iter().filter(|disk| disk.sessions > 0).map(|disk| disk.name.clone());
        let in_use: Vec<String> = in_use.collect();
        let size_bytes = |name: &str| {
            let disk = report.iter().find(|disk| disk.name == name);
            disk.map(|disk| disk.capacity_sectors.saturating_mul(SECTOR_BYTES))
        };
        let sizes = sizes_not_followed(&running, &wanted, size_bytes);
        let mut difference = Difference::between(&running, &wanted);
        applied.refused = difference.refuse(&running, &in_use, opener);
        self.take_over_for_opening(&wanted, &difference, &applied);
        // New disks need the new groups, and disks that stay in use may need the old ones.
        self.add_groups(&groups)?;
        self.carry_out(difference, &running, &mut applied);
        self.limit_as_configured(groups, &mut applied)?;
        applied.refused.extend(sizes);
        Ok(applied)
    }

    /// Records new values of keys that matter only when a disk is opened.
    fn take_over_for_opening(&self, wanted: &[NamedDisk], difference: &Difference, applied: &Applied) {
        let mut state = self.state();
        let touched = |name: &str| {
            let replaced = difference.replaced.iter().chain(&difference.in_place);
            replaced.into_iter().any(|changed| changed.disk.name == name)
                || applied.refused.iter().any(|refused| refused.disk == name)
        };
        for disk in state.disks.iter_mut().filter(|disk| !touched(&disk.name)) {
            if let Some(new) = wanted.iter().find(|new| new.name == disk.name) {
                disk.settings = new.settings.clone();
            }
        }
    }

    /// Applies the settings that can change now. Returns the changed keys that need a restart.
    fn apply_server(&self, wanted: &ServerSettings) -> Vec<String> {
        let mut state = self.state();
        state.settings.follow(wanted);
        changed_server_keys(&state.settings, wanted)
    }

    fn carry_out(&self, difference: Difference, running: &[NamedDisk], applied: &mut Applied) {
        let timeout = self.state().settings.options.stop_timeout();
        for name in &difference.removed {
            match self.unserve_disk(name, false, timeout) {
                Ok(()) => applied.removed.push(name.clone()),
                Err(error) => applied.refuse(name, format!("{error:#}")),
            }
        }
        let mut gone = Vec::new();
        for changed in difference.replaced {
            match self.unserve_disk(&changed.disk.name, false, timeout) {
                Ok(()) => gone.push(changed),
                Err(error) => applied.refuse(&changed.disk.name, format!("{error:#}")),
            }
        }
        for Changed { disk, .. } in gone {
            let name = disk.name.clone();
            match self.serve_disk(disk, Origin::ServedBefore) {
                Ok(()) => applied.replaced.push(name),
                Err(error) => {
                    let why = self.serve_as_before(&name, running, &error);
                    applied.refuse(&name, why);
                }
            }
        }
        for disk in difference.added {
            let name = disk.name.clone();
            match self.serve_disk(disk, Origin::New) {
                Ok(()) => applied.added.push(name),
                Err(error) => applied.refuse(&name, format!("{error:#}")),
            }
        }
        for changed in difference.in_place {
            let name = changed.disk.name.clone();
            match self.change_in_place(changed) {
                Ok(()) => applied.changed.push(name),
                Err(error) => applied.refuse(&name, format!("{error:#}")),
            }
        }
    }

    /// Serves a disk with its old settings after the new ones failed.
    fn serve_as_before(&self, name: &str, running: &[NamedDisk], error: &anyhow::Error) -> String {
        let Some(before) = running.iter().find(|disk| disk.name == name) else { return format!("{error:#}") };
        let mut before = before.clone();
        // The image exists by now.
        before.settings.image.create_bytes = None;
        match self.serve_disk(before, Origin::ServedBefore) {
            Ok(()) => format!("{error:#}; the disk is served as before"),
            Err(again) => {
                format!(
                    "{error:#}; the disk is no longer served, because its old settings fail too: {again:#}"
                )
            }
        }
    }

    fn change_in_place(&self, changed: Changed) -> Result<()> {
        let Changed { disk, keys } = changed;
        let has = |wanted: &str| keys.iter().any(|key| key.starts_with(wanted));
        if has("socket-") {
            self.set_socket_owner(&disk.settings.socket)?;
        }
        if has("slow-ms") {
            self.with_server(|server| set_slow_limit(server, &disk))??;
        }
        if has("workers") {
            self.with_server(|server| change_workers(server, &disk))??;
        }
        let mut state = self.state();
        if let Some(known) = state.disks.iter_mut().find(|known| known.name == disk.name) {
            *known = disk;
        }
        Ok(())
    }

    fn set_socket_owner(&self, socket: &SocketConfig) -> Result<()> {
        // Without an owner in the settings, the socket belongs to the user that starts bareblk.
        let uid = socket.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
        let gid = socket.gid.unwrap_or_else(|| rustix::process::getegid().as_raw());
        let set = self.opener.set_socket_owner(&socket.path, socket.mode, Some(uid), Some(gid));
        set.with_context(|| format!("cannot set owner and mode of socket {}", socket.path.display()))
    }

    /// Runs `act` unless the server is stopping; a stop that begins meanwhile waits.
    pub fn unless_stopping(&self, act: impl FnOnce() -> Result<()>) -> Result<()> {
        let fate = self.fate.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_stopping() {
            bail!("the server is stopping");
        }
        act()?;
        // Kept until the process ends: a waiting stop must not touch images and sockets that now belong to another
        // process.
        std::mem::forget(fate);
        Ok(())
    }

    /// Stops within the stop timeout. `None`: another thread has stopped the server.
    pub fn stop(&self) -> Option<StopReport> {
        let timeout = self.state().settings.options.stop_timeout();
        // A job in its last step ends the step first.
        if let Err(error) = self.suspend_jobs(&mut Vec::new()) {
            warn!("a job still runs while the server stops: {error:#}");
        }
        let _fate = self.fate.lock().unwrap_or_else(PoisonError::into_inner);
        // Relaxed: see `is_stopping`.
        let first = !self.stopping.swap(true, Ordering::Relaxed);
        first.then(|| self.server.shut_down(timeout))
    }
}

/// Applies the settings that the server can change on a running disk.
fn set_up(server: &Server, disk: &NamedDisk) -> Result<()> {
    set_slow_limit(server, disk)?;
    attach_to_named_workers(server, disk)
}

fn set_slow_limit(server: &Server, disk: &NamedDisk) -> Result<()> {
    Ok(server.set_slow_limit(&disk.name, disk.settings.options.slow_limit())?)
}

/// Attaches the disk's queues in turn to the workers that its settings list. A number of workers is applied by the
/// server itself.
fn attach_to_named_workers(server: &Server, disk: &NamedDisk) -> Result<()> {
    let Some(WorkerChoice::These(numbers)) = &disk.settings.workers else { return Ok(()) };
    let workers: Vec<_> = numbers.iter().copied().map(WorkerId).collect();
    let attached = server.attach_all(&disk.name, &workers, ATTACH_TIMEOUT);
    attached
        .with_context(|| format!("cannot move the queues of disk {}, which stay on their workers", disk.name))
}

/// Like [`attach_to_named_workers`], for a disk that other workers have served until now.
fn change_workers(server: &Server, disk: &NamedDisk) -> Result<()> {
    match &disk.settings.workers {
        Some(WorkerChoice::These(_)) => attach_to_named_workers(server, disk),
        other => Ok(server.spread(&disk.name, most_workers(other.as_ref()), ATTACH_TIMEOUT)?),
    }
}

#[cfg(test)]
#[path = "serving_tests.rs"]
mod tests;
