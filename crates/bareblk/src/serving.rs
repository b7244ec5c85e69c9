//! The server while it runs, with the settings of each of its disks: what a reload and the control socket change.
//!
//! `Configuration → open → start → Serving`; `changed file → Difference → remove, add, change in place → Applied`
//!
//! - One change at a time; a stop does not wait for it.
//! - A change that is refused leaves its disk as it was, and does not keep others from theirs.
//!
//! Not here: what a difference is (`difference.rs`), one disk's image and engine (`open_disk.rs`), signals (`serve.rs`).

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use blk_server::{Server, ServerConfig, SocketConfig, StopReport, WorkerId};
use disk_image::{NewImage, Opener};
use tracing::info;

use crate::config_file;
use crate::configuration::{Configuration, ServerSettings};
use crate::difference::{Applied, Changed, Difference, NamedDisk};
use crate::disk_settings::DiskSettings;
use crate::open_disk::{EngineSources, OpenImage, ReadyDisk, open_image, prepare};

/// How long a queue that moves to the workers its disk is given may take to come to rest.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);

/// All images, open and locked, before anything is served.
#[derive(Debug)]
pub struct Opened<'a> {
    opener: &'a Arc<dyn Opener>,
    configuration: Configuration,
    images: Vec<OpenImage<'a>>,
}

/// Opens every image. Those that exist come first: somebody may have them, and who is interrupted while waiting for
/// that leaves no new ones behind.
pub fn open<'a>(opener: &'a Arc<dyn Opener>, mut configuration: Configuration) -> Result<Opened<'a>> {
    let makes = |disk: &DiskSettings| disk.image.create_bytes.is_some();
    let mut images: Vec<Option<OpenImage<'a>>> = configuration.disks.iter().map(|_| None).collect();
    for new in [false, true] {
        let disks = configuration.disks.iter_mut().zip(&mut images);
        for (disk, image) in disks.filter(|(disk, _)| makes(disk) == new) {
            *image = Some(open_image(opener.as_ref(), disk)?);
        }
    }
    let images = images.into_iter().flatten().collect();
    Ok(Opened { opener, configuration, images })
}

impl Opened<'_> {
    /// Serves them. What was made for this does not survive its failure.
    pub fn start(self) -> Result<Serving> {
        let Configuration { disks, server: settings, file } = self.configuration;
        let sources = EngineSources::default();
        let workers = settings.workers.len();
        let ready = self.images.into_iter().zip(&disks);
        let ready = ready.map(|(image, disk)| prepare(image, disk, &sources, workers));
        let ready: Vec<ReadyDisk<'_>> = ready.collect::<Result<_>>()?;
        let first = ready.first().context("there is no disk to serve")?;
        let config = ServerConfig {
            engine: Arc::clone(&first.engine),
            workers: settings.workers.clone(),
            poll: settings.poll,
            balance: settings.balance,
        };
        let mut told = Vec::new();
        let mut made = Vec::new();
        let mut named = Vec::new();
        let mut served = Vec::new();
        for (ready, disk) in ready.into_iter().zip(disks) {
            named.push(NamedDisk { name: ready.config.name.clone(), settings: disk.clone() });
            served.push((ready.config, disk.socket));
            made.extend(ready.new);
            told.push(ready.told);
        }
        let server = Server::start(&config, self.opener, served)?;
        for (number, disk) in named.iter().enumerate() {
            attach_to_workers(&server, disk, number)?;
        }
        made.into_iter().for_each(NewImage::keep);
        told.iter().zip(&named).for_each(|(told, disk)| told.log(&disk.settings));
        Ok(Serving {
            server: RwLock::new(Some(server)),
            opener: Arc::clone(self.opener),
            sources,
            changes: Mutex::new(()),
            state: Mutex::new(State { disks: named, settings }),
            file,
        })
    }
}

/// What runs, and how it was wanted.
#[derive(Debug)]
struct State {
    disks: Vec<NamedDisk>,
    settings: ServerSettings,
}

/// See the file's head.
#[derive(Debug)]
pub struct Serving {
    /// `None` once it stops.
    server: RwLock<Option<Server>>,
    opener: Arc<dyn Opener>,
    sources: EngineSources,
    /// Held from the first look to the last step of a change.
    changes: Mutex<()>,
    state: Mutex<State>,
    file: Option<PathBuf>,
}

#[allow(dead_code)] // add, remove and resize are for the control socket
impl Serving {
    /// For questions, and for changes that concern no disk's settings. Must not take long: a stop waits for it.
    pub fn with_server<T>(&self, ask: impl FnOnce(&Server) -> T) -> Result<T> {
        let server = self.server.read().unwrap_or_else(PoisonError::into_inner);
        server.as_ref().map(ask).ok_or_else(|| anyhow!("the server is stopping"))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_change(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disks that are served, in the order in which they were added.
    pub fn disks(&self) -> Vec<NamedDisk> {
        self.state().disks.clone()
    }

    /// How the process is set.
    pub fn settings(&self) -> ServerSettings {
        self.state().settings.clone()
    }

    /// Whether there is a file to read again.
    pub fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// Serves one more disk. Gives its name.
    pub fn add(&self, settings: DiskSettings) -> Result<String> {
        let _change = self.begin_change();
        let disk = NamedDisk::new(settings, self.opener.as_ref());
        for other in self.disks() {
            if other.name == disk.name {
                bail!("there is a disk {} already: choose another name", disk.name);
            }
            if let Some(shared) = disk.settings.conflict(&other.settings, self.opener.as_ref()) {
                bail!("disk {} has the same {shared} as disk {}", disk.name, other.name);
            }
        }
        if let Some(beyond) = self.beyond_workers(&disk.settings) {
            bail!("disk {}: there are no {beyond}: give workers that exist", disk.name);
        }
        let name = disk.name.clone();
        self.serve_disk(disk)?;
        Ok(name)
    }

    fn beyond_workers(&self, settings: &DiskSettings) -> Option<String> {
        let workers = self.state().settings.workers.len();
        settings.workers.as_ref().and_then(|choice| choice.beyond(workers))
    }

    fn serve_disk(&self, disk: NamedDisk) -> Result<()> {
        let image = open_image(self.opener.as_ref(), &disk.settings)?;
        let (number, workers) = {
            let state = self.state();
            (state.disks.len(), state.settings.workers.len())
        };
        let ready = prepare(image, &disk.settings, &self.sources, workers)?;
        self.with_server(|server| {
            server.add_disk(ready.config, &disk.settings.socket)?;
            attach_to_workers(server, &disk, number).inspect_err(|_| {
                let _ = server.remove_disk(&disk.name, true, ATTACH_TIMEOUT);
            })
        })??;
        ready.new.into_iter().for_each(NewImage::keep);
        ready.told.log(&disk.settings);
        self.state().disks.push(disk);
        Ok(())
    }

    /// Stops serving a disk; one that a front-end is connected to only with `force`.
    pub fn remove(&self, name: &str, force: bool, timeout: Duration) -> Result<()> {
        let _change = self.begin_change();
        self.unserve_disk(name, force, timeout)
    }

    fn unserve_disk(&self, name: &str, force: bool, timeout: Duration) -> Result<()> {
        self.with_server(|server| server.remove_disk(name, force, timeout))??;
        self.state().disks.retain(|disk| disk.name != name);
        info!(disk = name, "no longer served");
        Ok(())
    }

    /// Gives a disk another size; a smaller one only with `force`.
    pub fn resize(&self, name: &str, bytes: u64, force: bool) -> Result<()> {
        let _change = self.begin_change();
        Ok(self.with_server(|server| server.resize_disk(name, bytes, force))??)
    }

    /// Reads the size of every image again.
    pub fn refresh_capacities(&self) {
        // A server that stops has no guests to tell.
        let _ = self.with_server(Server::refresh_capacities);
    }

    /// Reads the file again and follows it. A file with a mistake changes nothing.
    pub fn reload(&self) -> Result<Applied> {
        let Some(file) = &self.file else {
            bail!("there is no file to read again: the server was started without --config");
        };
        self.apply(config_file::read(file)?)
    }

    /// Makes what is served what is wanted, as far as that goes without disturbing a guest.
    pub fn apply(&self, wanted: Configuration) -> Result<Applied> {
        let _change = self.begin_change();
        let opener = self.opener.as_ref();
        let mut applied = Applied { needs_restart: self.apply_server(&wanted.server), ..Applied::default() };
        let running = self.disks();
        let wanted: Vec<_> = wanted.disks.into_iter().map(|disk| NamedDisk::new(disk, opener)).collect();
        let in_use = self.with_server(|server| {
            let disks = server.report().disks.into_iter().filter(|disk| disk.sessions > 0);
            disks.map(|disk| disk.name).collect::<Vec<_>>()
        })?;
        let mut difference = Difference::between(&running, &wanted);
        applied.refused = difference.refuse(&running, &in_use, opener);
        self.take_over_for_opening(&wanted, &difference, &applied);
        self.carry_out(difference, &running, &mut applied);
        Ok(applied)
    }

    /// Settings that are only looked at when a disk is opened: the next time, the new ones.
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

    /// The settings that it only takes at its start.
    fn apply_server(&self, wanted: &ServerSettings) -> Vec<&'static str> {
        let mut state = self.state();
        let now = &mut state.settings;
        now.stop_timeout = wanted.stop_timeout;
        let differ = [
            ("poll-us", now.poll != wanted.poll),
            ("workers", now.workers != wanted.workers),
            ("balance", now.balance != wanted.balance),
            ("control", now.control != wanted.control),
        ];
        differ.into_iter().filter(|(_, differs)| *differs).map(|(key, _)| key).collect()
    }

    fn carry_out(&self, difference: Difference, running: &[NamedDisk], applied: &mut Applied) {
        let timeout = self.state().settings.stop_timeout;
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
            match self.serve_disk(disk) {
                Ok(()) => applied.replaced.push(name),
                Err(error) => {
                    let why = self.serve_as_before(&name, running, &error);
                    applied.refuse(&name, why);
                }
            }
        }
        for disk in difference.added {
            let name = disk.name.clone();
            match self.serve_disk(disk) {
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

    /// A disk cannot be served as it is wanted now: better as it was than not at all.
    fn serve_as_before(&self, name: &str, running: &[NamedDisk], error: &anyhow::Error) -> String {
        let Some(before) = running.iter().find(|disk| disk.name == name) else { return format!("{error:#}") };
        let mut before = before.clone();
        // Made long ago.
        before.settings.image.create_bytes = None;
        match self.serve_disk(before) {
            Ok(()) => format!("{error:#}; it is served as before"),
            Err(again) => {
                format!("{error:#}; it is not served any more, because as before is not possible: {again:#}")
            }
        }
    }

    fn change_in_place(&self, changed: Changed) -> Result<()> {
        let Changed { disk, keys } = changed;
        let has = |wanted: &str| keys.iter().any(|key| key.starts_with(wanted));
        if has("socket-") {
            self.set_socket_owner(&disk.settings.socket)?;
        }
        let mut state = self.state();
        let place = state.disks.iter().position(|known| known.name == disk.name);
        let place = place.with_context(|| format!("there is no disk {}", disk.name))?;
        if has("workers") {
            self.with_server(|server| attach_to_workers(server, &disk, place))??;
        }
        if let Some(known) = state.disks.get_mut(place) {
            *known = disk;
        }
        Ok(())
    }

    fn set_socket_owner(&self, socket: &SocketConfig) -> Result<()> {
        // Back to those who start it, if it was somebody else's.
        let uid = socket.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
        let gid = socket.gid.unwrap_or_else(|| rustix::process::getegid().as_raw());
        let set = self.opener.set_socket_owner(&socket.path, socket.mode, Some(uid), Some(gid));
        set.with_context(|| format!("cannot set owner and mode of socket {}", socket.path.display()))
    }

    /// Stops, within the time that the settings give it. `None`: somebody else has stopped it.
    pub fn stop(&self) -> Option<StopReport> {
        let timeout = self.state().settings.stop_timeout;
        let server = self.server.write().unwrap_or_else(PoisonError::into_inner).take();
        server.map(|server| server.stop(timeout))
    }
}

/// Hands the disk's queues to the workers that its settings name, in turn. `number` spreads those that name none.
fn attach_to_workers(server: &Server, disk: &NamedDisk, number: usize) -> Result<()> {
    let Some(choice) = &disk.settings.workers else { return Ok(()) };
    let known: Vec<WorkerId> = server.report().workers.iter().map(|worker| worker.id).collect();
    let places = choice.places(number, known.len());
    let workers = places.iter().map(|place| {
        known.get(*place).copied().ok_or_else(|| anyhow!("disk {}: there is no worker {place}", disk.name))
    });
    let workers = workers.collect::<Result<Vec<_>>>()?;
    for (queue, worker) in (0..disk.settings.queues).zip(workers.iter().cycle()) {
        server.attach(&disk.name, queue, *worker, ATTACH_TIMEOUT)?;
    }
    Ok(())
}
