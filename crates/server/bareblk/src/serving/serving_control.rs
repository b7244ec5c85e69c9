//! Passes the requests of control clients to the running server.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blk_server::{AdminError, Attached, Server, ServerReport, SlowRequest, WorkerId, WorkerOptions};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use serde_json::{Map, Value};
use signal_hook::consts::SIGTERM;
use tracing::{error, info};

use crate::config::config_file;
use crate::config::difference::Applied;
use crate::control::Control;
use crate::control::answers::jobs::JobReport;
use crate::control::answers::reports::{NotChanged, Overlaid, ReloadAnswer, Waiting};
use crate::control::disk_names::KnownDisk;
use crate::control::protocol::answer::ns;
use crate::control::protocol::verbs::{JobChange, JobStart, LiveUpgrade};
use crate::control::refused::Refused;
use crate::live_upgrade::{self, Listeners, VERSION};
use crate::serving::Serving;
use crate::serving::waiting_disk::WaitingDisk;

/// A running server, as control clients see and change it.
#[derive(Debug)]
pub struct ServingControl {
    serving: Arc<Serving>,
    /// The control socket and the monitor socket, which a live upgrade hands over.
    listeners: Listeners,
    /// A live upgrade holds this lock.
    taking: Mutex<()>,
}

impl ServingControl {
    pub fn new(serving: Arc<Serving>, listeners: Listeners) -> Self {
        Self { serving, listeners, taking: Mutex::new(()) }
    }
}

impl Control for ServingControl {
    fn disks(&self) -> Vec<KnownDisk> {
        let disks = self.serving.with_server(Server::disk_images).unwrap_or_default();
        let known = |(name, image): (String, PathBuf)| KnownDisk { name, image: image.display().to_string() };
        let waiting = self.waiting().into_iter();
        let waiting = waiting.map(|waiting| KnownDisk { name: waiting.name, image: waiting.image });
        disks.into_iter().map(known).chain(waiting).collect()
    }

    fn waiting(&self) -> Vec<Waiting> {
        let waiting = |waiting: Arc<WaitingDisk>| Waiting {
            name: waiting.disk.name.clone(),
            image: waiting.disk.settings.image.path.display().to_string(),
            socket: waiting.disk.settings.socket.path.display().to_string(),
            error: waiting.error(),
            waited_ns: ns(waiting.waited()),
        };
        self.serving.waiting().into_iter().map(waiting).collect()
    }

    fn report(&self) -> ServerReport {
        // A stopping server reports nothing.
        self.serving.with_server(|server| server.report()).unwrap_or_default()
    }

    fn slow_requests(&self, disk: &str) -> Result<(Option<Duration>, Vec<SlowRequest>), Refused> {
        Ok(self.serving.with_server(|server| server.slow_requests(disk))??)
    }

    fn add_worker(&self, options: WorkerOptions) -> Result<WorkerId, Refused> {
        Ok(self.serving.with_server(|server| server.add_worker(options))??)
    }

    fn remove_worker(&self, id: WorkerId, timeout: Duration) -> Result<(), Refused> {
        Ok(self.serving.with_server(|server| server.remove_worker(id, timeout))??)
    }

    fn attach(
        &self,
        disk: &str,
        queue: u16,
        worker: WorkerId,
        timeout: Duration,
    ) -> Result<Attached, Refused> {
        Ok(self.serving.with_server(|server| server.attach(disk, queue, worker, timeout))??)
    }

    fn set_completion_worker(
        &self,
        disk: &str,
        worker: Option<WorkerId>,
        timeout: Duration,
    ) -> Result<(), Refused> {
        Ok(self.serving.with_server(|server| server.set_completion_worker(disk, worker, timeout))??)
    }

    fn add_disk(&self, table: Map<String, Value>) -> Result<String, Refused> {
        let settings = config_file::disk(&table, self.serving.opener())
            .map_err(|error| Refused::Settings(format!("{error:#}")))?;
        let name = settings.name(self.serving.opener());
        if self.serving.disks().iter().any(|disk| disk.name == name) {
            return Err(AdminError::DiskExists { name }.into());
        }
        Ok(self.serving.add(settings)?)
    }

    fn remove_disk(&self, name: &str, force: bool, timeout: Duration) -> Result<(), Refused> {
        Ok(self.serving.remove(name, force, timeout)?)
    }

    fn resize_disk(&self, name: &str, size_bytes: u64, force: bool) -> Result<(), Refused> {
        Ok(self.serving.resize(name, size_bytes, force)?)
    }

    fn resume_disk(&self, name: &str, timeout: Duration) -> Result<usize, Refused> {
        Ok(self.serving.with_server(|server| server.resume_disk(name, timeout))??)
    }

    fn limit_disk(&self, name: &str, set: &Map<String, Value>) -> Result<bool, Refused> {
        self.serving.limit_disk(name, set)?;
        Ok(self.serving.has_file())
    }

    fn limit_group(&self, name: &str, set: &Map<String, Value>) -> Result<bool, Refused> {
        self.serving.limit_group(name, set)?;
        Ok(self.serving.has_file())
    }

    fn flush_disk(&self, name: &str, timeout: Duration) -> Result<(), Refused> {
        Ok(self.serving.with_server(|server| server.flush_disk(name, timeout))??)
    }

    fn settings(&self, name: &str) -> Result<BTreeMap<String, String>, Refused> {
        let disk = self.serving.disks().into_iter().find(|disk| disk.name == name);
        let gone = || Refused::Server(AdminError::NoDisk { name: name.to_owned() });
        disk.map(|disk| disk.settings.shown()).ok_or_else(gone)
    }

    fn silent_workers(&self, timeout: Duration) -> Result<Vec<WorkerId>, Refused> {
        Ok(self.serving.with_server(|server| server.check_liveness().silent_after(timeout))?)
    }

    fn pause(&self, name: &str, timeout: Duration, hold: &mut dyn FnMut()) -> Result<Duration, Refused> {
        let names = [name.to_owned()];
        Ok(self.serving.with_server(|server| server.while_paused(&names, timeout, hold))??)
    }

    fn overlay(&self, files: &[(String, PathBuf)], timeout: Duration) -> Result<Overlaid, Refused> {
        Ok(self.serving.overlay(files, timeout)?)
    }

    fn snapshot(&self, files: &[(String, PathBuf)], timeout: Duration) -> Result<Duration, Refused> {
        Ok(self.serving.snapshot(files, timeout)?)
    }

    fn jobs(&self) -> Vec<JobReport> {
        self.serving.jobs()
    }

    fn start_job(&self, job: &JobStart) -> Result<(), Refused> {
        Ok(self.serving.start_job(job)?)
    }

    fn change_job(&self, change: &JobChange) -> Result<(), Refused> {
        Ok(self.serving.change_job(change)?)
    }

    fn cancel_job(&self, disk: &str) -> Result<(), Refused> {
        Ok(self.serving.cancel_job(disk)?)
    }

    fn reload(&self) -> Result<ReloadAnswer, Refused> {
        self.serving.refresh_capacities();
        if self.serving.has_file() { Ok(self.serving.reload()?.into()) } else { Ok(ReloadAnswer::default()) }
    }

    /// Ends the process once the other server owns everything.
    fn live_upgrade(
        &self,
        wanted: LiveUpgrade,
        channel: &UnixStream,
        agree: &mut dyn FnMut() -> io::Result<()>,
    ) -> Result<(), Refused> {
        if wanted.version != VERSION {
            let (theirs, ours) = (wanted.version, env!("CARGO_PKG_VERSION"));
            return Err(Refused::Settings(format!(
                "the new server uses version {theirs} of the live upgrade protocol, but this server (bareblk {ours}) uses version {VERSION}: restart it instead"
            )));
        }
        let Ok(_taking) = self.taking.try_lock() else {
            return Err(Refused::Settings(
                "another live upgrade is running: try again when it is over".into(),
            ));
        };
        live_upgrade::hand_over(&self.serving, &self.listeners, &wanted.cut, channel, agree)?;
        let pid = getsockopt(channel, PeerCredentials).map_or(0, |peer| peer.pid());
        info!(pid, "another server has taken over all disks and connections; this server ends");
        self.serving.manager().main_process(pid);
        // No destructors: the other process owns the images, sockets and sessions.
        signal_hook::low_level::exit(0)
    }

    /// Raises SIGTERM, so that every stop runs the same code.
    fn shutdown(&self) {
        if let Err(error) = signal_hook::low_level::raise(SIGTERM) {
            error!("cannot stop as a control client requested: {error}");
        }
    }
}

impl From<Applied> for ReloadAnswer {
    fn from(applied: Applied) -> Self {
        let Applied { added, removed, replaced, changed, refused, needs_restart } = applied;
        let refused = refused.into_iter().map(|refused| NotChanged { disk: refused.disk, why: refused.why });
        Self { added, removed, replaced, changed, refused: refused.collect(), needs_restart }
    }
}
