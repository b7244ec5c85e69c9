//! `bareblk serve`: opens the images, serves them, handles signals, stops.
//!
//! `configuration → images (locked) → server → "serving" on standard output, READY → signals → stop → exit code`
//!
//! - Signals are caught only after the images are locked, so that a signal can interrupt the wait for a lock.
//! - A start that fails removes the image that `--create` created.
//! - A reload runs on its own thread: it may wait for locks or for a file system that hangs, and the main loop must
//!   still receive a stop.
//! - The process ends after the stop, and with it any threads that hang.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use blk_server::{StopReport, WorkerOptions};
use signal_hook::iterator::Handle;
use tracing::{error, info, warn};

use crate::config::configuration::Configuration;
use crate::config::disk_settings::DiskSettings;
use crate::control::listener::{ControlServer, ControlSocket, Rights};
use crate::live_upgrade::{Listeners, Taken, Taker, Wanted};
use crate::logging::LogArgs;
use crate::service::passed_sockets;
use crate::service::service_manager::ServiceManager;
use crate::service::watchdog;
use crate::serving::confined;
use crate::serving::descriptors;
use crate::serving::running_server;
use crate::serving::serving_control::ServingControl;
use crate::serving::{self, Serving};
use crate::signals::{EndAtOnce, Request, Requests};

/// How long a stop waits for requests of control clients.
const LAST_CONTROL_REQUESTS: Duration = Duration::from_secs(2);

const RELOAD_FAILED: &str =
    "the reload failed because of a bug in this program; the disks are served as before";

/// Serves until a stop. `live_upgrade`: the server from which to take over, if any.
pub fn serve(mut configuration: Configuration, live_upgrade: Option<Wanted>, log: &LogArgs) -> Result<()> {
    let starting = EndAtOnce::catch().context("cannot catch signals")?;
    let limit = descriptors::raise_limit();
    check_workers(&configuration.server.workers)?;
    let manager = Arc::new(ServiceManager::from_environment());
    // Must come before the helper starts, because the helper must not inherit these sockets.
    let passed = passed_sockets::receive()?;
    if live_upgrade.is_none() {
        running_server::refuse_second(&configuration, &passed)?;
    }
    // Must come before the process gives up the right to connect.
    let mut taker = live_upgrade.map(|wanted| Taker::connect(wanted, &mut configuration)).transpose()?;
    let confined = confined::give_up_rights(&configuration, taker.is_some(), log)?;
    let mut opener = passed_sockets::assign(passed, &configuration, &confined.opener);
    if let Some(taker) = &mut taker {
        opener = taker.opener(&opener);
    }
    let needed = descriptors::needed(&configuration);
    let options = configuration.server.options.clone();
    let opened = serving::open(&opener, configuration)?;
    let requests = Requests::catch().context("cannot catch signals")?;
    drop(starting);
    if manager.watchdog().is_some() {
        requests.expect_questions().context("cannot catch signals")?;
    }
    let bind = |config, rights| ControlSocket::bind(&opener, config, rights);
    let control = options.control_socket().map(|config| bind(config, Rights::Control)).transpose()?;
    let monitor = options.monitor_socket().map(|config| bind(config, Rights::Monitor)).transpose()?;
    confined.limit_calls()?;
    let mut remote = opened.remote().to_vec();
    let serving = Arc::new(opened.start(Arc::clone(&confined.remote), Arc::clone(&manager))?);
    let taken = taker.map(|taker| take_over(&taker, &serving, &mut remote)).transpose()?;
    serving.accept_front_ends()?;
    serving.serve_remote(remote)?;
    let control = serve_control(control, monitor, &serving)?;
    confined.log();
    descriptors::warn_if_short(limit, needed);
    let answer = watchdog::start(&manager, &serving)?;
    if let Some(taken) = taken {
        serving.resume_jobs(&taken.jobs);
        taken.log();
        announce(&taken.lines());
    }
    announce(&ready_lines(&serving));
    manager.ready(&serving.status());
    run(Service { serving, manager, answer }, control, requests)
}

/// Completes a live upgrade. Leaves those disks in `remote` that the old server did not serve.
fn take_over(taker: &Taker, serving: &Serving, remote: &mut Vec<DiskSettings>) -> Result<Taken> {
    taker.open_remote(serving, remote)?;
    serving.with_server(|server| taker.take(server))?
}

/// Starts to serve clients of both sockets.
fn serve_control(
    control: Option<ControlSocket>,
    monitor: Option<ControlSocket>,
    serving: &Arc<Serving>,
) -> Result<Vec<ControlServer>> {
    let listener = |socket: &Option<ControlSocket>| socket.as_ref().map(ControlSocket::listener);
    let listeners = Listeners { control: listener(&control), monitor: listener(&monitor) };
    let served = Arc::new(ServingControl::new(Arc::clone(serving), listeners));
    let sockets = control.into_iter().chain(monitor);
    sockets.map(|socket| Ok(socket.serve(Arc::clone(&served) as _)?)).collect()
}

/// Checks the options of all workers. To be called before the server opens, creates or waits for anything.
pub fn check_workers(workers: &[WorkerOptions]) -> Result<()> {
    workers
        .iter()
        .enumerate()
        .try_for_each(|(number, options)| options.check().with_context(|| format!("worker {number}")))
}

/// The lines that announce the disks. Scripts wait for the last line.
fn ready_lines(serving: &Serving) -> String {
    let served = serving.disks().into_iter().map(|disk| {
        let (image, socket) = (disk.settings.image.path.display(), disk.settings.socket.path.display());
        format!("bareblk: serving {image} on {socket}\n")
    });
    let waiting = serving.waiting().into_iter().map(|waiting| {
        let settings = &waiting.disk.settings;
        let (image, socket) = (settings.image.path.display(), settings.socket.path.display());
        format!("bareblk: not yet serving {image} on {socket}: {}\n", waiting.error())
    });
    let last = serving.has_file().then(|| format!("bareblk: {}\n", serving.status()));
    served.chain(waiting).chain(last).collect()
}

fn announce(lines: &str) {
    let mut out = io::stdout();
    if let Err(error) = out.write_all(lines.as_bytes()).and_then(|()| out.flush()) {
        warn!("cannot write to standard output: {error}");
    }
}

/// The server, and the service manager that the main loop notifies.
struct Service {
    serving: Arc<Serving>,
    manager: Arc<ServiceManager>,
    /// Answers the watchdog, if there is one.
    answer: Option<SyncSender<()>>,
}

fn run(service: Service, control: Vec<ControlServer>, mut requests: Requests) -> Result<()> {
    let mut reloads = None;
    loop {
        match requests.next() {
            Some(Request::Refresh) => reload(&service, &mut reloads),
            // If the channel is full, an earlier answer still waits for the watchdog.
            Some(Request::Answer) => drop(service.answer.as_ref().map(|answer| answer.try_send(()))),
            Some(Request::Stop) => return stop(service, control, requests),
            Some(Request::Abort(code)) => std::process::exit(code),
            None => bail!("signals can no longer be received"),
        }
    }
}

/// Wakes the reloading thread. Starts it on the first call, and again if it has died.
fn reload(service: &Service, reloads: &mut Option<SyncSender<()>>) {
    service.manager.reloading();
    // If the channel is full, a reload that has not begun yet will also see this change.
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
            error!("cannot reload: {error:#}");
        }
    }
}

/// Notifies the service manager that a reload is over, even after a panic.
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

/// Starts the thread that, on each request, reads the sizes, and the configuration file if there is one.
fn start_reloader(service: &Service) -> Result<SyncSender<()>> {
    let (sender, requests) = sync_channel(1);
    let (serving, manager) = (Arc::clone(&service.serving), Arc::clone(&service.manager));
    let thread = std::thread::Builder::new().name("bareblk-reload".into()).spawn(move || {
        for () in requests {
            let mut told = ToldAtTheEnd::new(&manager);
            serving.refresh_capacities();
            let failed = if serving.has_file() { follow_file(&serving) } else { "" };
            told.status = format!("{}{failed}", serving.status());
        }
    });
    thread.context("cannot start the thread for reloads")?;
    Ok(sender)
}

/// Reloads the configuration. Returns the service's status line.
fn follow_file(serving: &Serving) -> &'static str {
    match serving.reload() {
        Ok(applied) if applied.refused.is_empty() => {
            info!("configuration reloaded: {applied}");
            ""
        }
        Ok(applied) => {
            warn!("configuration reloaded in part: {applied}");
            "; some changes of the configuration were refused, see the log"
        }
        Err(error) => {
            error!("configuration not reloaded, nothing has changed: {error:#}");
            "; the configuration has a mistake and was not applied, see the log"
        }
    }
}

/// Stops on another thread, so that this one can receive a second signal.
fn stop(service: Service, mut control: Vec<ControlServer>, mut requests: Requests) -> Result<()> {
    let Service { serving, manager, answer } = service;
    manager.stopping();
    let timeout = serving.settings().options.stop_timeout();
    info!(timeout = ?timeout, "stopping");
    let (sender, reports) = mpsc::channel();
    let stopped = WakeOnDrop(requests.closer());
    let stopper = std::thread::Builder::new().name("bareblk-stop".into()).spawn(move || {
        let closed: Vec<bool> =
            control.iter_mut().map(|socket| socket.close(LAST_CONTROL_REQUESTS)).collect();
        if closed.contains(&false) {
            warn!("the stop interrupts a control client's request");
        }
        let report = serving.stop();
        // Clients that wait for the stop now see their connections end.
        drop(control);
        let _ = sender.send(report);
        drop(stopped);
        // If a worker hangs, only the end of the process ends it.
        drop(serving);
    });
    stopper.context("cannot start the thread that stops the server")?;
    // Ends the watchdog.
    drop(answer);
    while let Some(request) = requests.next() {
        if let Request::Abort(code) = request {
            warn!("a second signal ends the server at once; requests may be in flight");
            std::process::exit(code);
        }
    }
    let report = reports.recv().ok().flatten();
    judge(&report.context("the server did not stop cleanly; see the lines above")?, timeout)
}

/// Ends the wait for signals, whether or not the stop succeeded.
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
