//! `bareblk serve`: open the images, serve them, obey signals, stop.
//!
//! `configuration → images (locked) → server → "serving" on standard output → signals → stop → exit code`
//!
//! - Signals are caught only once the images are ours: whoever waits for a lock can still be interrupted.
//! - An image made by `--create` does not survive a start that fails.
//! - A reload has a thread of its own: it may wait for locks, and a stop must be heard meanwhile.
//!
//! Not here: which disks there are and how that changes (`serving.rs`), what is done with requests (`blk_server`).

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use blk_server::StopReport;
use disk_image::{HostOpener, Opener};
use signal_hook::iterator::Handle;
use tracing::{error, info, warn};

use crate::cli::ServeConfig;
use crate::control::listener::{ControlServer, ControlSocket};
use crate::server_control::ServerControl;
use crate::signals::{Request, Requests};

/// Serves until told to stop.
pub fn serve(configuration: Configuration) -> Result<()> {
    let limit = descriptors::raise_limit();
    let opener: Arc<dyn Opener> = Arc::new(HostOpener);
    let lines = ready_lines(&configuration);
    let needed = descriptors::needed(&configuration);
    let opened = serving::open(&opener, configuration)?;
    let requests = Requests::catch().context("cannot catch signals")?;
    let stop_timeout = config.stop_timeout;
    let control = config.control.as_deref().map(|path| ControlSocket::bind(&opener, path)).transpose()?;
    let server = Arc::new(start(&config, &opener, image)?);
    let control =
        control.map(|socket| socket.serve(Arc::new(ServerControl::new(Arc::clone(&server))))).transpose()?;
    new_image.into_iter().for_each(NewImage::keep);
    announce(&config);
    obey(server, control, requests, stop_timeout)
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

fn obey(
    server: Arc<Server>,
    control: Option<ControlServer>,
    mut requests: Requests,
    stop_timeout: Duration,
) -> Result<()> {
    loop {
        match requests.next() {
            Some(Request::Refresh) => server.refresh_capacities(),
            Some(Request::Stop) => return stop(server, control, requests, stop_timeout),
            Some(Request::Abort(code)) => std::process::exit(code),
            None => bail!("signals can no longer be received"),
        }
    }
}

/// A thread that looks at sizes, and at the configuration file, each time it is told.
fn start_reloader(serving: &Arc<Serving>) -> Result<SyncSender<()>> {
    let (sender, wishes) = sync_channel(1);
    let serving = Arc::clone(serving);
    let thread = std::thread::Builder::new().name("bareblk-reload".into()).spawn(move || {
        for () in wishes {
            serving.refresh_capacities();
            match serving.reload() {
                Ok(applied) if applied.refused.is_empty() => info!("configuration reloaded: {applied}"),
                Ok(applied) => warn!("configuration reloaded, but for some of it: {applied}"),
                Err(error) => error!("configuration not reloaded, nothing has changed: {error:#}"),
            }
        }
    });
    thread.context("cannot start the thread that reloads the configuration")?;
    Ok(sender)
}

/// Stops on another thread, so that a second signal is heard on this one.
fn stop(
    server: Arc<Server>,
    mut control: Option<ControlServer>,
    mut requests: Requests,
    timeout: Duration,
) -> Result<()> {
    info!(timeout = ?timeout, "stopping");
    let (sender, reports) = mpsc::channel();
    let stopped = WakeOnDrop(requests.closer());
    let serving = Arc::clone(serving);
    let stopper = std::thread::Builder::new().name("bareblk-stop".into()).spawn(move || {
        let _stopped = stopped;
        if control.as_mut().is_some_and(|control| !control.close(timeout)) {
            warn!("a control client's request did not end in time");
        }
        let _ = Arc::into_inner(server).map(|server| sender.send(server.stop(timeout)));
        // Now the clients that wait for the end see it.
        drop(control);
    });
    stopper.context("cannot start the thread that stops the server")?;
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
    fn clean_stop_is_no_error() {
        assert!(judge(&StopReport::default(), Duration::ZERO).is_ok());
    }
}
