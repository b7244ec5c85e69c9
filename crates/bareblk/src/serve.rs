//! `bareblk serve`: open the image, serve it, obey signals, stop.
//!
//! `configuration → image (locked) → server → "serving" on standard output → signals → stop → exit code`
//!
//! - Signals are caught only once the image is ours: whoever waits for its lock can still be interrupted.
//! - An image made by `--create` does not survive a start that fails.
//!
//! Not here: what is done with requests (`blk_server`, `io_engine`).

use std::io::{self, Write};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use blk_server::{DiskConfig, EngineSource, Server, ServerConfig, StopReport, Wce, WorkerOptions};
use disk_image::{HostOpener, Image, NewImage, Opener, SECTOR_BYTES};
use io_engine::{Chosen, FileSpec, choose};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::iterator::Handle;
use tracing::{debug, info, warn};

use crate::cli::ServeConfig;
use crate::signals::{Request, Requests};

/// Serves until told to stop.
pub fn serve(config: ServeConfig) -> Result<()> {
    raise_descriptor_limit();
    check_workers(&config.workers)?;
    let opener: Arc<dyn Opener> = Arc::new(HostOpener);
    let image = Image::open(opener.as_ref(), &config.image)?;
    warn_of_foreign_format(&image);
    let new_image =
        config.image.create_bytes.map(|_| NewImage::new(opener.as_ref(), image.path(), image.file()));
    let requests = Requests::catch().context("cannot catch signals")?;
    let stop_timeout = config.stop_timeout;
    let server = start(&config, &opener, image)?;
    new_image.into_iter().for_each(NewImage::keep);
    announce(&config);
    obey(server, requests, stop_timeout)
}

/// Before anything is opened, made or waited for.
fn check_workers(workers: &[WorkerOptions]) -> Result<()> {
    workers.iter().enumerate().try_for_each(|(number, options)| {
        options.check().with_context(|| format!("worker {number} cannot run as it is told"))
    })
}

/// Not refused: a guest may write any bytes to its raw disk, and must get it back.
fn warn_of_foreign_format(image: &Image) {
    if let Some(format) = image.foreign_format() {
        warn!(
            image = %image.path().display(),
            "looks like a {format} image; it is served as raw, and a guest that writes destroys it: \
             convert it with qemu-img convert -O raw"
        );
    }
}

fn warn_of_unsafe_cache(config: &ServeConfig) {
    if config.image.cache.ignores_flushes() && config.image.access == disk_image::Access::ReadWrite {
        let image = config.image.path.display();
        warn!(%image, "--cache unsafe: flushes are ignored, and what was written is lost if the host goes down");
    }
}

fn start(config: &ServeConfig, opener: &Arc<dyn Opener>, image: Image) -> Result<Server> {
    let size_bytes = image.capacity_sectors() * SECTOR_BYTES;
    let (block_size, discard) = (image.block_size(), image.discard_limits().is_some());
    let file = FileSpec { file: Arc::clone(image.file()), alignment: image.alignment() };
    let chosen = Arc::new(choose(config.engine, &file, &config.engine_config)?);
    // The image's lock must not outlive the server.
    drop(file);
    let engine = Arc::clone(&chosen);
    let disk = DiskConfig {
        name: image.path().display().to_string(),
        serial: config.serial.clone().unwrap_or_else(|| image.default_serial()),
        queues: config.queues,
        queue_size: config.queue_size,
        wce: config.wce,
        engine: None,
        workers: None,
        image,
    };
    let (name, serial) = (disk.name.clone(), disk.serial.clone());
    let server = ServerConfig {
        engine: EngineSource::new(
            chosen.kind.name(),
            config.engine_config.depth,
            Box::new(move || engine.make()),
        ),
        workers: config.workers.clone(),
        poll: config.poll,
        balance: config.balance,
    };
    let server = Server::start(&server, opener, vec![(disk, config.socket.clone())])?;
    warn_of_passed_over(&chosen);
    warn_of_unsafe_cache(config);
    info!(
        image = name,
        size_bytes,
        block_size,
        readonly = config.image.access == disk_image::Access::ReadOnly,
        cache = %config.image.cache,
        wce = %if config.wce == Wce::Fixed { "fixed" } else { "guest" },
        discard,
        serial,
        engine = %chosen.kind,
        engine_because = chosen.why,
        queues = config.queues,
        queue_size = config.queue_size,
        workers = config.workers.len(),
        socket = %config.socket.path.display(),
        "serving"
    );
    Ok(server)
}

/// Engines that would have been better. Told once the server runs: a start that fails says one line.
fn warn_of_passed_over(chosen: &Chosen) {
    for passed_over in &chosen.passed_over {
        warn!("engine {} is not used, {} is: {}", passed_over.kind, chosen.kind, passed_over.error);
    }
}

/// For scripts, which wait for this line.
fn announce(config: &ServeConfig) {
    let (image, socket) = (config.image.path.display(), config.socket.path.display());
    let mut out = io::stdout();
    if let Err(error) = writeln!(out, "bareblk: serving {image} on {socket}").and_then(|()| out.flush()) {
        warn!("not announced on standard output: {error}");
    }
}

fn obey(server: Server, mut requests: Requests, stop_timeout: Duration) -> Result<()> {
    loop {
        match requests.next() {
            Some(Request::Refresh) => server.refresh_capacities(),
            Some(Request::Stop) => return stop(server, requests, stop_timeout),
            Some(Request::Abort(code)) => std::process::exit(code),
            None => bail!("signals can no longer be received"),
        }
    }
}

/// Stops on another thread, so that a second signal is heard on this one.
fn stop(server: Server, mut requests: Requests, timeout: Duration) -> Result<()> {
    info!(timeout = ?timeout, "stopping");
    let (sender, reports) = mpsc::channel();
    let stopped = WakeOnDrop(requests.closer());
    let stopper = std::thread::Builder::new().name("bareblk-stop".into()).spawn(move || {
        let _stopped = stopped;
        let _ = sender.send(server.stop(timeout));
    });
    stopper.context("cannot start the thread that stops the server")?;
    while let Some(request) = requests.next() {
        if let Request::Abort(code) = request {
            warn!("ending at once, requests in flight or not");
            std::process::exit(code);
        }
    }
    let report = reports.recv().context("the server did not stop in order; see the lines above")?;
    judge(&report, timeout)
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

/// Each queue has three descriptors, each region of guest memory one; the usual soft limit is 1024.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        debug!("the limit of open files stays at {:?}: {error}", limit.current);
    }
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
