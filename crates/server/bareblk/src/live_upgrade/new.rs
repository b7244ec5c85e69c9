//! The new server's end: requests the disks, compares them with its configuration, prepares, and takes over.
//!
//! `connect (before the sandbox) → opener → … everything open … → take → Taken`
//!
//! A configuration that would change a guest's disk is refused before anything has stopped.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use blk_server::{Fact, Rebuilt, Server};
use disk_image::{Access, FileId, HostOpener, Opener};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::fs::fstat;
use rustix::process::geteuid;
use serde_json::Value;
use tracing::{error, info};

use super::messages::{Listener, Message, OfferedDisk};
use super::opener::{HandedOver, Image, Socket};
use super::terms::{AT_ONCE, EXTRAS, MONITOR, READY_TIMEOUT, VERSION, with_cure};
use super::wire::{receive, send};
use crate::config::configuration::Configuration;
use crate::config::disk_settings::{DiskSettings, real_path};
use crate::control::disk_names::{self, KnownDisk};
use crate::control::protocol::answer::ErrorKind;
use crate::control::protocol::verbs::{JobStart, LiveUpgrade, Verb};
use crate::ctl::connection::Connection;
use crate::serving::Serving;

/// The options of the command line.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The running server's control socket.
    pub control: PathBuf,
    /// Disks whose front-ends are cut off instead of taken over.
    pub cut: Vec<String>,
}

/// The disks that the old server offers.
#[derive(Debug)]
pub struct Taker {
    cut: Vec<String>,
    channel: UnixStream,
    /// The old server's process id.
    pid: i32,
    disks: Vec<(String, Vec<Fact>, u64)>,
    images: Vec<Image>,
    sockets: HashMap<PathBuf, Socket>,
    opener: Option<Arc<HandedOver>>,
}

/// The disk's name, the time when the old server froze the session, and the session.
type PreparedSession = (String, u64, Rebuilt);

/// The result of a live upgrade.
#[derive(Debug)]
pub struct Taken {
    pid: i32,
    /// For each disk: how long its guest paused, if it had one.
    pauses: Vec<(String, Option<Duration>)>,
    /// Disks whose front-ends were cut off on request.
    cut: Vec<String>,
    /// Disks with a front-end whose session could not be continued.
    lost: Vec<String>,
    /// Jobs of the old server, which this server starts again.
    pub jobs: Vec<JobStart>,
}

impl Taker {
    /// Asks the server behind this control socket for its disks, and compares them with those of the configuration. The
    /// images of its disks exist, so the configuration no longer creates them.
    pub fn connect(wanted: Wanted, configuration: &mut Configuration) -> Result<Self> {
        let Wanted { control, cut } = wanted;
        let cut = names_of(&cut, configuration);
        let control = control.as_path();
        check_control(control, configuration)?;
        let mut server = Connection::open(control)?;
        let reply = server.ask(&Verb::LiveUpgrade(LiveUpgrade { version: VERSION, cut: cut.clone() }))?;
        if let Some(fault) = reply.answer.error {
            let what = match fault.kind {
                ErrorKind::UnknownVerb => {
                    "its version does not support live upgrades: restart it instead".into()
                }
                _ => fault.message,
            };
            bail!("cannot take over the server at {}: {what}", control.display());
        }
        let extras = reply.answer.ok.as_ref().map_or(&Value::Null, |ok| &ok["extras"]);
        let extras = extras.as_array().map(Vec::as_slice).unwrap_or_default();
        let channel = server.into_stream()?;
        let pid = check_peer(&channel, configuration)?;
        let has_monitor = configuration.server.options.monitor.is_some();
        send(&channel, &begin(extras, has_monitor), &[], AT_ONCE)?;
        let (disks, images, sockets) = (Vec::new(), Vec::new(), HashMap::new());
        let mut taker = Self { cut, channel, pid, disks, images, sockets, opener: None };
        let offered = taker.receive_offers(configuration);
        offered.map_err(|error| taker.refuse(error))?;
        Ok(taker)
    }

    /// Tells the old server that the takeover failed, and returns the error.
    fn refuse(&self, error: anyhow::Error) -> anyhow::Error {
        let _ = send(&self.channel, &Message::No { why: format!("{error:#}") }, &[], AT_ONCE);
        error.context("cannot take over the running server")
    }

    fn receive_offers(&mut self, configuration: &mut Configuration) -> Result<()> {
        loop {
            let (message, fds) = receive(&self.channel, Some(AT_ONCE))?;
            match message {
                Message::Control(listener) => {
                    let path = configuration.server.options.control.as_ref();
                    self.note_listener(
                        path.context("the configuration names no control socket")?,
                        &listener,
                        fds,
                    )?;
                }
                Message::Monitor(listener) => {
                    self.note_listener(monitor_path(&listener, configuration)?, &listener, fds)?;
                }
                Message::Disk(offered) => self.note_disk(offered, fds, configuration)?,
                Message::OffersEnd => return self.check_cut(),
                Message::No { why } => bail!("the running server refused the live upgrade: {why}"),
                message => bail!("the running server sent {}, but an offer was expected", message.name()),
            }
        }
    }

    fn check_cut(&self) -> Result<()> {
        let is_there = |name: &&String| self.disks.iter().any(|(known, ..)| known == *name);
        match self.cut.iter().find(|name| !is_there(name)) {
            None => Ok(()),
            Some(name) => bail!("--take-over-cut {name}: the running server has no such disk"),
        }
    }

    fn note_listener(&mut self, path: &Path, listener: &Listener, fds: Vec<OwnedFd>) -> Result<()> {
        let [fd] = <[OwnedFd; 1]>::try_from(fds).map_err(wrong)?;
        self.sockets.insert(path.to_owned(), Socket::new(fd, listener.managed));
        Ok(())
    }

    fn note_disk(
        &mut self,
        offered: OfferedDisk,
        fds: Vec<OwnedFd>,
        configuration: &mut Configuration,
    ) -> Result<()> {
        let name = &offered.name;
        let known = configuration.disks.iter_mut().find(|disk| disk.name(&HostOpener) == *name);
        let known = known.with_context(|| {
            format!("the running server has disk `{name}`, which is not in the new configuration: add it there, or remove it \
                     from the server with bareblk ctl remove")
        })?;
        let mut fds = fds.into_iter();
        compare(&offered, known)?;
        let mut next = || fds.next().ok_or_else(|| wrong(Vec::new()));
        let file = known.comes_with_lock().then(&mut next).transpose()?;
        let listener = next()?;
        match file {
            Some(file) => {
                compare_files(&offered, &file, known)?;
                let claim = fds.next().filter(|_| offered.claimed);
                self.images.push(Image { path: known.image.path.clone(), file, claim });
            }
            None => compare_names(&offered, known)?,
        }
        known.image.create_bytes = None;
        self.sockets.insert(known.socket.path.clone(), Socket::new(listener, offered.socket.managed));
        self.disks.push((offered.name, offered.facts, offered.capacity_sectors));
        Ok(())
    }

    /// The opener that returns the old server's descriptors.
    pub fn opener(&mut self, inner: &Arc<dyn Opener>) -> Arc<dyn Opener> {
        let (images, sockets) = (std::mem::take(&mut self.images), std::mem::take(&mut self.sockets));
        let opener = HandedOver::new(inner, images, sockets);
        self.opener = Some(Arc::clone(&opener));
        opener
    }

    /// Opens those of the disks on other machines that the old server serves, and leaves the others in `remote`. Their
    /// storage is not locked before their guests' rings start here. To be called before [`Taker::take`].
    pub fn open_remote(&self, serving: &Serving, remote: &mut Vec<DiskSettings>) -> Result<()> {
        let is_theirs = |disk: &mut DiskSettings| {
            let name = disk.name(serving.opener());
            self.disks.iter().any(|(theirs, ..)| *theirs == name)
        };
        let theirs = remote.extract_if(.., is_theirs).collect::<Vec<_>>();
        let opened = theirs.into_iter().try_for_each(|disk| serving.serve_at_once(disk));
        opened.map_err(|error| self.refuse(error))
    }

    /// Completes the live upgrade. To be called when everything is open and `server` accepts no front-end yet. After
    /// success, the old server has given up everything, and this server serves the guests.
    pub fn take(&self, server: &Server) -> Result<Taken> {
        let (prepared, jobs) = self.prepare(server).map_err(|error| self.refuse(error))?;
        match receive(&self.channel, None) {
            Ok((Message::Yours, _)) => {}
            Ok((Message::No { why }, _)) => bail!("the running server refused the live upgrade: {why}"),
            Ok((message, _)) => {
                bail!("cannot take over: the running server sent {}, but Yours was expected", message.name())
            }
            Err(error) => return Err(anyhow!(error).context("cannot take over the running server")),
        }
        prepared.iter().for_each(|(_, _, session)| session.go());
        let mut pauses: Vec<_> = self.disks.iter().map(|(name, ..)| (name.clone(), None)).collect();
        let mut lost = Vec::new();
        for (disk, frozen_ns, session) in &prepared {
            let started_ns = match session.wait_started() {
                Ok(started_ns) => started_ns,
                Err(why) => {
                    error!(disk, "disk taken over, but one of its front-ends is not served: {why}");
                    lost.push(disk.clone());
                    continue;
                }
            };
            let pause = Duration::from_nanos(started_ns.saturating_sub(*frozen_ns));
            if let Some((_, longest)) = pauses.iter_mut().find(|(name, _)| name == disk) {
                *longest = Some(longest.map_or(pause, |longest: Duration| longest.max(pause)));
            }
        }
        self.opener.iter().for_each(|opener| opener.commit());
        let grown =
            |(name, _, sectors): &&(String, Vec<Fact>, u64)| server.capacity_sectors(name) != *sectors;
        self.disks.iter().filter(grown).for_each(|(name, ..)| server.announce_size(name));
        Ok(Taken { pid: self.pid, pauses, cut: self.cut.clone(), lost, jobs })
    }

    fn prepare(&self, server: &Server) -> Result<(Vec<PreparedSession>, Vec<JobStart>)> {
        self.disks
            .iter()
            .try_for_each(|(name, facts, sectors)| compare_opened(server, name, facts, *sectors))?;
        send(&self.channel, &Message::Ready, &[], AT_ONCE)?;
        let (mut prepared, mut jobs) = (Vec::new(), Vec::new());
        loop {
            // The old server's own time limits for this step are shorter.
            let (message, fds) = receive(&self.channel, Some(READY_TIMEOUT))?;
            match message {
                Message::State { disk, state } => server.restore_disk(&disk, &state)?,
                Message::Session { disk, frozen_ns, state } => {
                    // The session's thread maps its memory while the next state is received.
                    let session = server.rebuild(&disk, state, fds).map_err(with_cure)?;
                    prepared.push((disk, frozen_ns, session));
                }
                Message::Totals { disk, totals } => server.restore_totals(&disk, &totals)?,
                Message::Job(job) => jobs.push(job),
                Message::StatesEnd => break,
                Message::No { why } => bail!("the running server refused the live upgrade: {why}"),
                message => bail!("the running server sent {}, but a session was expected", message.name()),
            }
        }
        prepared.iter().try_for_each(|(_, _, session)| session.wait_prepared().map_err(with_cure))?;
        send(&self.channel, &Message::Prepared, &[], AT_ONCE)?;
        Ok((prepared, jobs))
    }
}

/// Asks for those of the old server's extras that this server knows and needs. Older servers offer no extras, and know
/// only `Begin`.
fn begin(theirs: &[Value], has_monitor: bool) -> Message {
    let is_needed = |extra: &&str| EXTRAS.contains(extra) && (*extra != MONITOR || has_monitor);
    let known = theirs.iter().filter_map(Value::as_str).filter(is_needed);
    let extras: Vec<_> = known.map(str::to_owned).collect();
    if extras.is_empty() { Message::Begin } else { Message::BeginWith { extras } }
}

/// The disks of `--take-over-cut`, which may be given by the end of their paths. A word that matches no disk stays as
/// it is, and is compared with the running server's offers.
fn names_of(cut: &[String], configuration: &Configuration) -> Vec<String> {
    let known = |disk: &DiskSettings| KnownDisk {
        name: disk.name(&HostOpener),
        image: disk.real_image(&HostOpener).display().to_string(),
    };
    let known: Vec<KnownDisk> = configuration.disks.iter().map(known).collect();
    cut.iter().map(|disk| disk_names::resolve(disk, &known).unwrap_or_else(|_| disk.clone())).collect()
}

/// Checks the old server's user, because its images are served without checking their locks again. Returns its process
/// id.
fn check_peer(channel: &UnixStream, configuration: &Configuration) -> Result<i32> {
    let peer = getsockopt(channel, PeerCredentials).context("cannot find out who owns the control socket")?;
    let user = configuration.server.options.confinement.user.as_ref().map(|user| user.id);
    let trusted = [Some(0), Some(geteuid().as_raw()), user];
    if !trusted.contains(&Some(peer.uid())) {
        bail!(
            "cannot take over: the control socket belongs to user {}, who is neither root, nor you, nor the user of --user",
            peer.uid()
        );
    }
    Ok(peer.pid())
}

fn wrong(fds: Vec<OwnedFd>) -> anyhow::Error {
    anyhow!("the running server sent an offer with {} descriptors, which is the wrong number", fds.len())
}

/// The control socket is handed over with the disks, so its path must stay.
fn check_control(control: &Path, configuration: &Configuration) -> Result<()> {
    let theirs = control.display();
    match &configuration.server.options.control {
        Some(ours) if real_path(&HostOpener, ours) == real_path(&HostOpener, control) => Ok(()),
        Some(ours) => bail!(
            "the control socket is taken over too, so its path {} must be that of --take-over, {theirs}",
            ours.display()
        ),
        None => bail!("the control socket is taken over too: add --control {theirs}"),
    }
}

/// The path of the monitor socket, which is handed over and must therefore stay.
fn monitor_path<'c>(listener: &Listener, configuration: &'c Configuration) -> Result<&'c Path> {
    let theirs = Path::new(&listener.path);
    let ours = configuration.server.options.monitor.as_deref();
    let ours = ours.context("the configuration names no monitor socket")?;
    if real_path(&HostOpener, ours) != real_path(&HostOpener, theirs) {
        bail!(
            "the monitor socket is taken over too, so its path {} must be the running server's, {}",
            ours.display(),
            theirs.display()
        );
    }
    Ok(ours)
}

/// Compares what must be equal before anything is opened.
fn compare(offered: &OfferedDisk, ours: &DiskSettings) -> Result<()> {
    let name = &offered.name;
    let differ = |key: &str, theirs: &dyn std::fmt::Display, ours: &dyn std::fmt::Display| {
        anyhow!(
            "disk `{name}`: {key} is {theirs} in the running server but {ours} in the new one: make them the same, or \
             restart the server without --take-over"
        )
    };
    let cache = ours.image.cache.to_string();
    let readonly = (ours.image.access == Access::ReadOnly).to_string();
    // Without this fact, the image is raw. It says whether the message carries the image.
    let format = offered.facts.iter().find(|fact| fact.key == "format").map_or("raw", |fact| &fact.value);
    let our_format = if ours.options.is_qcow2() { "qcow2" } else { "raw" };
    if format != our_format {
        return Err(differ("format", &format, &our_format));
    }
    for (key, ours) in [("readonly", &readonly), ("cache", &cache)] {
        match offered.facts.iter().find(|fact| fact.key == key) {
            Some(fact) if fact.value == *ours => {}
            Some(fact) => return Err(differ(key, &fact.value, ours)),
            None => bail!("disk `{name}`: the running server does not report its {key}"),
        }
    }
    let socket = Path::new(&offered.socket.path);
    if real_path(&HostOpener, socket) != real_path(&HostOpener, &ours.socket.path) {
        return Err(differ("socket", &socket.display(), &ours.socket.path.display()));
    }
    Ok(())
}

/// Compares the names of an image that is opened again.
fn compare_names(offered: &OfferedDisk, ours: &DiskSettings) -> Result<()> {
    let (theirs, image) = (Path::new(&offered.image), ours.real_image(&HostOpener));
    if theirs != image {
        bail!(
            "disk `{}`: image {} is not the one that the running server serves, {}",
            offered.name,
            image.display(),
            theirs.display()
        );
    }
    Ok(())
}

/// Checks that the path names the file that the running server serves.
fn compare_files(offered: &OfferedDisk, file: &OwnedFd, ours: &DiskSettings) -> Result<()> {
    let name = &offered.name;
    let stat = fstat(file)?;
    let path = ours.real_image(&HostOpener);
    let named =
        HostOpener.file_id(&path).with_context(|| format!("disk `{name}`: image {}", path.display()))?;
    if named != (FileId { dev: stat.st_dev, ino: stat.st_ino }) {
        let image = Path::new(&offered.image).display();
        bail!(
            "disk `{name}`: image {} is not the file that the running server serves, {image}",
            path.display()
        );
    }
    Ok(())
}

/// Compares what is known only after the image is open.
fn compare_opened(server: &Server, name: &str, theirs: &[Fact], sectors: u64) -> Result<()> {
    let ours = server.facts(name);
    for fact in theirs {
        let Fact { key, value } = fact;
        let here = ours.iter().find(|ours| ours.key == *key).map_or("not known", |ours| ours.value.as_str());
        if !fact.holds_with(here) {
            bail!(
                "disk `{name}`: {key} is {value} in the running server but {here} in the new one: make them \
                 the same, or restart the server without --take-over"
            );
        }
    }
    let here = server.capacity_sectors(name);
    if here < sectors {
        bail!(
            "disk `{name}` has {sectors} sectors for its guest but only {here} in its image: a disk must not shrink under its guest"
        );
    }
    Ok(())
}

impl Taken {
    /// For standard output: one line for each disk.
    pub fn lines(&self) -> String {
        let line = |(name, pause): &(String, Option<Duration>)| match pause {
            _ if self.lost.contains(name) => {
                format!("bareblk: took over disk {name}; not all of its front-ends are served, see the log\n")
            }
            Some(pause) => {
                format!(
                    "bareblk: took over disk {name}; its guest paused for {:.3} ms\n",
                    milliseconds(*pause)
                )
            }
            None if self.cut.contains(name) => {
                format!(
                    "bareblk: took over disk {name}; its front-ends were cut off, and have to reconnect\n"
                )
            }
            None => format!("bareblk: took over disk {name}; no front-end was connected\n"),
        };
        self.pauses.iter().map(line).collect()
    }

    pub fn log(&self) {
        let pid = self.pid;
        for (disk, pause) in &self.pauses {
            info!(disk, pid, pause_ms = pause.map(milliseconds), "disk taken over from another server");
        }
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
