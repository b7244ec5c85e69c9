//! `bareblk serve`: open the images, serve them, obey signals, stop.
//!
//! `configuration → images (locked) → server → "serving" on standard output, READY → signals → stop → exit code`
//!
//! - Signals are caught only once the images are ours: whoever waits for a lock can still be interrupted.
//! - An image made by `--create` does not survive a start that fails.
//! - A reload, be it only of sizes, has a thread of its own: it may wait for locks, or for a file system that hangs, and
//!   a stop must be heard meanwhile.
//! - The stop ends with what it has to do: what still runs then, or hangs, ends with the process.
//!
//! Not here: which disks there are and how that changes (`serving.rs`), what is done with requests (`blk_server`).

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use blk_server::{StopReport, WorkerOptions};
use signal_hook::iterator::Handle;
use tracing::{error, info, warn};

use crate::config::configuration::Configuration;
use crate::control::listener::{ControlServer, ControlSocket};
use crate::live_upgrade::{Taker, Wanted};
use crate::logging::LogArgs;
use crate::service::passed_sockets;
use crate::service::service_manager::ServiceManager;
use crate::service::watchdog;
use crate::serving::confined;
use crate::serving::descriptors;
use crate::serving::serving_control::ServingControl;
use crate::serving::{self, Serving};
use crate::signals::{EndAtOnce, Request, Requests};

/// What control clients' requests that run get before a stop cuts them short.
const LAST_CONTROL_REQUESTS: Duration = Duration::from_secs(2);

const RELOAD_FAILED: &str =
    "the reload failed in a way that is a bug of this program; what was served is served on";

/// Serves until told to stop. `live_upgrade`: from which server, if from one.
pub fn serve(mut configuration: Configuration, live_upgrade: Option<Wanted>, log: &LogArgs) -> Result<()> {
    let starting = EndAtOnce::catch().context("cannot catch signals")?;
    let limit = descriptors::raise_limit();
    check_workers(&configuration.server.workers)?;
    let manager = Arc::new(ServiceManager::from_environment());
    // Before the helper is started, which is to have none of them.
    let passed = passed_sockets::receive()?;
    // Before the rights to connect are given up.
    let mut taker = live_upgrade.map(|wanted| Taker::connect(wanted, &mut configuration)).transpose()?;
    let confined = confined::give_up_rights(&configuration, taker.is_some(), log)?;
    let mut opener = passed_sockets::assign(passed, &configuration, &confined.opener);
    if let Some(taker) = &mut taker {
        opener = taker.opener(&opener);
    }
    let lines = ready_lines(&configuration);
    let needed = descriptors::needed(&configuration);
    let control = configuration.server.options.control.clone();
    let opened = serving::open(&opener, configuration)?;
    let requests = Requests::catch().context("cannot catch signals")?;
    drop(starting);
    if manager.watchdog().is_some() {
        requests.expect_questions().context("cannot catch signals")?;
    }
    let control = control.map(|path| ControlSocket::bind(&opener, &path)).transpose()?;
    confined.limit_calls()?;
    let serving = Arc::new(opened.start(Arc::clone(&manager))?);
    let taken = taker.map(|taker| serving.with_server(|server| taker.take(server))?).transpose()?;
    serving.open_doors()?;
    let control = control.map(|socket| serve_control(socket, &serving)).transpose()?;
    confined.log();
    descriptors::warn_if_short(limit, needed);
    let answer = watchdog::start(&manager, &serving)?;
    if let Some(taken) = taken {
        taken.log();
        announce(&taken.lines());
    }
    announce(&lines);
    manager.ready(&serving.status());
    obey(Service { serving, manager, answer }, control, requests)
}

fn serve_control(socket: ControlSocket, serving: &Arc<Serving>) -> Result<ControlServer> {
    let door = socket.door();
    Ok(socket.serve(Arc::new(ServingControl::new(Arc::clone(serving), door)))?)
}

/// Before anything is opened, made or waited for.
fn check_workers(workers: &[WorkerOptions]) -> Result<()> {
    workers
        .iter()
        .enumerate()
        .try_for_each(|(number, options)| options.check().with_context(|| format!("worker {number}")))
}

/// For scripts, which wait for the last one.
fn ready_lines(configuration: &Configuration) -> String {
    let disks = configuration.disks.iter().map(|disk| {
        let (image, socket) = (disk.image.path.display(), disk.socket.path.display());
        format!("bareblk: serving {image} on {socket}\n")
    });
    let last = configuration.file.as_ref().map(|_| {
        let count = configuration.disks.len();
        format!("bareblk: serving {count} disk{}\n", if count == 1 { "" } else { "s" })
    });
    disks.chain(last).collect()
}

fn announce(lines: &str) {
    let mut out = io::stdout();
    if let Err(error) = out.write_all(lines.as_bytes()).and_then(|()| out.flush()) {
        warn!("not announced on standard output: {error}");
    }
}

/// What the main loop acts on, and whom it tells.
struct Service {
    serving: Arc<Serving>,
    manager: Arc<ServiceManager>,
    /// Where there is a watchdog.
    answer: Option<SyncSender<()>>,
}

fn obey(service: Service, control: Option<ControlServer>, mut requests: Requests) -> Result<()> {
    let mut reloads = None;
    loop {
        match requests.next() {
            Some(Request::Refresh) => reload(&service, &mut reloads),
            // Full: it has an answer that it did not wait for.
            Some(Request::Answer) => drop(service.answer.as_ref().map(|answer| answer.try_send(()))),
            Some(Request::Stop) => return stop(service, control, requests),
            Some(Request::Abort(code)) => std::process::exit(code),
            None => bail!("signals can no longer be received"),
        }
    }
}

/// Told to the thread that does it, which is there from the first time on; to a new one if it has died.
fn reload(service: &Service, reloads: &mut Option<SyncSender<()>>) {
    service.manager.reloading();
    // Full: one that has not begun yet will see what this one should.
    let is_told =
        |reloads: &SyncSender<()>| !matches!(reloads.try_send(()), Err(TrySendError::Disconnected(())));
    if reloads.as_ref().is_some_and(is_told) {
        return;
    }
    match start_reloader(service) {
        Ok(new) => {
            is_told(&new);
            *reloads = Some(new);
        }
        Err(error) => {
            service.manager.ready(&format!("not reloaded: {error:#}"));
            error!("nothing is reloaded: {error:#}");
        }
    }
}

/// Says that a reload is over, however it ended: who reloads waits for that.
struct ToldAtTheEnd<'a> {
    manager: &'a ServiceManager,
    status: String,
}

impl<'a> ToldAtTheEnd<'a> {
    fn new(manager: &'a ServiceManager) -> Self {
        Self { manager, status: RELOAD_FAILED.to_owned() }
    }
}

impl Drop for ToldAtTheEnd<'_> {
    fn drop(&mut self) {
        self.manager.ready(&self.status);
    }
}

/// A thread that looks at sizes, and at the configuration file if there is one, each time it is told.
fn start_reloader(service: &Service) -> Result<SyncSender<()>> {
    let (sender, wishes) = sync_channel(1);
    let (serving, manager) = (Arc::clone(&service.serving), Arc::clone(&service.manager));
    let thread = std::thread::Builder::new().name("bareblk-reload".into()).spawn(move || {
        for () in wishes {
            let mut told = ToldAtTheEnd::new(&manager);
            serving.refresh_capacities();
            let failed = if serving.has_file() { follow_file(&serving) } else { "" };
            told.status = format!("{}{failed}", serving.status());
        }
    });
    thread.context("cannot start the thread that reloads")?;
    Ok(sender)
}

/// What whoever looks at the service should know of it.
fn follow_file(serving: &Serving) -> &'static str {
    match serving.reload() {
        Ok(applied) if applied.refused.is_empty() => {
            info!("configuration reloaded: {applied}");
            ""
        }
        Ok(applied) => {
            warn!("configuration reloaded, but for some of it: {applied}");
            "; the configuration is followed but for some of it, see the log"
        }
        Err(error) => {
            error!("configuration not reloaded, nothing has changed: {error:#}");
            "; the configuration has a mistake and is not followed, see the log"
        }
    }
}

/// Stops on another thread, so that a second signal is heard on this one.
fn stop(service: Service, mut control: Option<ControlServer>, mut requests: Requests) -> Result<()> {
    let Service { serving, manager, answer } = service;
    manager.stopping();
    let timeout = serving.settings().options.stop_timeout();
    info!(timeout = ?timeout, "stopping");
    let (sender, reports) = mpsc::channel();
    let stopped = WakeOnDrop(requests.closer());
    let stopper = std::thread::Builder::new().name("bareblk-stop".into()).spawn(move || {
        if control.as_mut().is_some_and(|control| !control.close(LAST_CONTROL_REQUESTS)) {
            warn!("a control client's request is still being carried out; the stop cuts it short");
        }
        let report = serving.stop();
        // Clients that wait for the server's end see it now.
        drop(control);
        let _ = sender.send(report);
        drop(stopped);
        // A worker that hangs ends with the process.
        drop(serving);
    });
    stopper.context("cannot start the thread that stops the server")?;
    // Nobody is asked any more whether all is well.
    drop(answer);
    while let Some(request) = requests.next() {
        if let Request::Abort(code) = request {
            warn!("ending at once, requests in flight or not");
            std::process::exit(code);
        }
    }
    let report = reports.recv().ok().flatten();
    judge(&report.context("the server did not stop in order; see the lines above")?, timeout)
}

/// Ends the wait for signals, however the stop went.
struct WakeOnDrop(Handle);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn judge(report: &StopReport, timeout: Duration) -> Result<()> {
    if report.is_clean() {
        match report.never_flushed.as_slice() {
            [] => info!("stopped; everything is on stable storage"),
            disks => warn!("stopped; nothing was flushed (--cache unsafe): {}", disks.join(", ")),
        }
        return Ok(());
    }
    let timeout_s = timeout.as_secs();
    let unfinished = report
        .unfinished
        .iter()
        .map(|disk| format!("{disk} had requests in flight after {timeout_s} s (--stop-timeout)"));
    let not_flushed =
        report.not_flushed.iter().map(|(disk, error)| format!("{disk} could not be flushed: {error}"));
    let reasons: Vec<_> = unfinished.chain(not_flushed).collect();
    Err(anyhow!("stopped, but not cleanly: {}", reasons.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unclean_stop_names_each_disk_and_what_became_of_it() {
        let report = StopReport {
            unfinished: vec!["/a.raw".into()],
            not_flushed: vec![("/b.raw".into(), io::Error::from_raw_os_error(5))],
            ..StopReport::default()
        };
        let line = judge(&report, Duration::from_secs(7)).unwrap_err().to_string();
        assert!(line.contains("/a.raw had requests in flight after 7 s"), "{line}");
        assert!(line.contains("/b.raw could not be flushed: Input/output error"), "{line}");
    }

    #[test]
    fn reload_that_breaks_off_is_told_to_be_over() {
        let (manager, messages) = ServiceManager::for_tests();
        let reload = std::thread::spawn(move || {
            let _told = ToldAtTheEnd::new(&manager);
            panic!("as a bug would");
        });
        assert!(reload.join().is_err());
        let mut message = [0; 200];
        let length = messages.recv(&mut message).unwrap();
        assert_eq!(message[..length], *format!("READY=1\nSTATUS={RELOAD_FAILED}").as_bytes());
    }

    #[test]
    fn clean_stop_is_no_error() {
        assert!(judge(&StopReport::default(), Duration::ZERO).is_ok());
    }
}
