//! Turns a disk's settings into what the server needs: its image, open and locked, and its engine source.
//!
//! `DiskSettings → image → engine (tried on it) → DiskConfig`; then the "serving" line
//!
//! - In a running server this happens on another thread: a file system that hangs must not delay a stop or other
//!   changes.
//! - Disks with the same engine and options share one [`EngineSource`], and thereby one engine in each worker.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blk_server::{DiskConfig, EngineSource, LimitKind, Placement};
use disk_image::{Image, ImageError, ImageOptions, Location, NewImage, Opener, SECTOR_BYTES};
use io_engine::{
    Chosen, EngineConfig, EngineKind, EngineOptions, FileSpec, IoUringOptions, PosixAioOptions, choose,
};
use tracing::{info, warn};

use crate::args::placement_args::engine_source;
use crate::args::serve_args::WceChoice;
use crate::config::disk_settings::{DiskSettings, WorkerChoice};
use crate::serving::remote_access::RemoteAccess;

/// How long opening an image and trying an engine on it may take, not counting the wait for its lock.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum wait of a request in a full queue without a warning, in seconds: Linux's default timeout for many disks.
const LONGEST_WAIT_S: u64 = 30;
/// The pause between two checks whether the server is stopping.
const STOP_PAUSE: Duration = Duration::from_millis(50);

/// The engine sources that disks use now.
#[derive(Debug, Default)]
pub struct EngineSources {
    /// The key is the kind and options in debug form, which includes every option.
    known: Mutex<Vec<(String, Weak<EngineSource>)>>,
}

impl EngineSources {
    /// The source of engines that were chosen in this way.
    pub fn source(&self, chosen: &Arc<Chosen>, config: &EngineConfig) -> Arc<EngineSource> {
        // A raw disk must not get the engine of a mapped one, nor the other way round.
        let key = format!("{:?} {} {config:?}", chosen.options, chosen.is_mapped);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(_, source)| source.strong_count() > 0);
        let same = known.iter().find(|(other, _)| *other == key);
        if let Some(source) = same.and_then(|(_, source)| source.upgrade()) {
            return source;
        }
        let maker = Arc::clone(chosen);
        let source = EngineSource::new(chosen.kind().name(), config.depth, Box::new(move || maker.make()));
        known.push((key, Arc::downgrade(&source)));
        source
    }

    /// The engine in which workers sleep if no disk of this host has chosen one.
    pub fn for_remote(&self, disk: &DiskSettings) -> Option<Arc<EngineSource>> {
        let kind = match disk.image.location {
            Location::Nbd(_) => EngineKind::Nbd,
            Location::Rbd(_) => EngineKind::Rbd,
            Location::Host => return None,
        };
        let chosen = Arc::new(Chosen::untried(kind, &disk.engine_config));
        Some(self.source(&chosen, &disk.engine_config))
    }
}

/// An open image. A failed start removes the image if this start created it.
#[derive(Debug)]
pub struct OpenImage {
    image: Image,
    new: Option<New>,
}

type New = NewImage<Arc<dyn Opener>>;

/// [`open_image`] and [`prepare`] with a time limit. A thread that takes longer undoes its work itself.
pub fn open_within(
    opener: &Arc<dyn Opener>,
    remote: &Arc<RemoteAccess>,
    settings: &DiskSettings,
    origin: Origin,
    sources: &Arc<EngineSources>,
    workers: usize,
    stopping: &AtomicBool,
) -> Result<ReadyDisk> {
    let limit = settings.image.lock_timeout.saturating_add(OPEN_TIMEOUT);
    let begin = Instant::now();
    let (done, ready) = sync_channel(1);
    let (opener, remote) = (Arc::clone(opener), Arc::clone(remote));
    let (sources, own) = (Arc::clone(sources), settings.clone());
    let thread = std::thread::Builder::new().name("bareblk-open".into()).spawn(move || {
        let opened = open_any(&opener, &remote, &own, origin)
            .and_then(|image| prepare(image, &own, &sources, workers));
        let _ = done.send(opened);
    });
    thread.context("cannot start the thread that opens the image")?;
    let image = settings.image.path.display();
    loop {
        match ready.recv_timeout(STOP_PAUSE) {
            Ok(opened) => return opened,
            Err(RecvTimeoutError::Disconnected) => {
                bail!("image {image}: the thread that opens it has panicked")
            }
            // Relaxed: it orders no other data.
            Err(RecvTimeoutError::Timeout) if stopping.load(Ordering::Relaxed) => {
                bail!("the server is stopping")
            }
            Err(RecvTimeoutError::Timeout) if begin.elapsed() >= limit => {
                let limit_s = limit.as_secs();
                bail!("image {image} could not be opened within {limit_s} s: is its file system responding?")
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// Whether this server has served the disk before: then its guest may have written the image's first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    New,
    ServedBefore,
}

fn open_any(
    opener: &Arc<dyn Opener>,
    remote: &RemoteAccess,
    settings: &DiskSettings,
    origin: Origin,
) -> Result<OpenImage> {
    if settings.is_remote() {
        return Ok(OpenImage { image: remote.open(&settings.image)?, new: None });
    }
    open_image(opener, settings, origin)
}

/// Opens and locks an image of this host; waits for its lock as long as the settings allow.
pub fn open_image(opener: &Arc<dyn Opener>, settings: &DiskSettings, origin: Origin) -> Result<OpenImage> {
    if settings.options.is_qcow2() {
        let options = ImageOptions { create_bytes: None, ..settings.image.clone() };
        let makes = settings.image.create_bytes.is_some();
        let new = makes.then(|| Image::create_qcow2(Arc::clone(opener), &settings.image)).transpose()?;
        return Ok(OpenImage { image: Image::open_qcow2(opener.as_ref(), &options)?, new });
    }
    let image = Image::open(opener.as_ref(), &settings.image)?;
    check_format(&image, settings, origin)?;
    let made = settings.image.create_bytes.and_then(|_| image.file());
    let new = made.map(|file| NewImage::new(Arc::clone(opener), image.path(), file));
    Ok(OpenImage { image, new })
}

/// Refuses an image that looks like another format, unless the operator says that it is raw. Only warns about a disk
/// that has been served: its guest may write any bytes, and must be able to use them again
/// (docs/decisions/0054-images-of-another-format.md).
fn check_format(image: &Image, settings: &DiskSettings, origin: Origin) -> Result<(), ImageError> {
    let Some(format) = image.foreign_format().filter(|_| !settings.options.is_known_raw()) else {
        return Ok(());
    };
    if origin == Origin::New && !image.is_adopted() {
        return Err(ImageError::ForeignFormat { path: image.path().to_owned(), format });
    }
    warn!(
        image = %image.path().display(),
        "the image looks like {format}, but is served as raw as before: the next start refuses it without format = raw"
    );
    Ok(())
}

/// Whether the error is [`ImageError::ForeignFormat`].
pub fn is_foreign_format(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ImageError::ForeignFormat { .. }))
}

/// A disk that is ready for the server, with its log line.
#[derive(Debug)]
pub struct ReadyDisk {
    pub config: DiskConfig,
    /// The engine in which workers sleep; never one with a placement.
    pub engine: Arc<EngineSource>,
    pub log_line: DiskLogLine,
    pub new: Option<New>,
}

/// Tries the engine on the image. `workers`: the server's number of workers.
pub fn prepare(
    open: OpenImage,
    settings: &DiskSettings,
    sources: &EngineSources,
    workers: usize,
) -> Result<ReadyDisk> {
    let OpenImage { image, new } = open;
    let options = &settings.options;
    let file = FileSpec::of(&image);
    let chosen = Arc::new(choose(settings.engine.as_ref(), &file, &settings.engine_config)?);
    // The image's lock must not outlive the server.
    drop(file);
    let engine = sources.source(&chosen, &settings.engine_config);
    // An engine with a placement belongs to one disk and knows its workers.
    let placed = engine_source(settings.placement, &chosen.options, &settings.engine_config, workers)?;
    let path = image.path().display().to_string();
    let serial = options.serial.clone().unwrap_or_else(|| image.default_serial());
    let log_line = DiskLogLine {
        image: path.clone(),
        size_bytes: image.capacity_sectors() * SECTOR_BYTES,
        block_size: image.block_size(),
        discard: image.discard_limits().is_some(),
        layers: image.backing().volume().map(|volume| volume.layers()),
        serial: serial.clone(),
        chosen,
    };
    let config = DiskConfig {
        name: options.name.clone().unwrap_or(path),
        serial,
        queues: options.queues,
        queue_size: options.queue_size,
        wce: options.wce.into(),
        engine: Some(placed.unwrap_or_else(|| Arc::clone(&engine))),
        workers: most_workers(settings.workers.as_ref()),
        coalescing: options.coalesce,
        park: options.park(),
        image,
    };
    Ok(ReadyDisk { config, engine, log_line, new })
}

impl ReadyDisk {
    /// The engine that was chosen.
    pub fn engine_kind(&self) -> EngineKind {
        self.log_line.chosen.kind()
    }
}

/// The maximum number of workers, if the choice is a number. A list sets none: `serving/mod.rs` attaches the disk to
/// its workers.
pub fn most_workers(choice: Option<&WorkerChoice>) -> Option<NonZeroUsize> {
    match choice {
        Some(WorkerChoice::Count(count)) => NonZeroUsize::new(*count),
        Some(WorkerChoice::These(_)) | None => None,
    }
}

/// Facts for a disk's log line, collected before the server gets the image.
#[derive(Debug)]
pub struct DiskLogLine {
    image: String,
    size_bytes: u64,
    block_size: u32,
    discard: bool,
    /// `None`: the image is raw.
    layers: Option<usize>,
    serial: String,
    chosen: Arc<Chosen>,
}

impl DiskLogLine {
    /// Logs the line. To be called once the disk is served, so that a failed start writes only its error.
    pub fn log(&self, settings: &DiskSettings) {
        warn_of_passed_over(&self.chosen);
        warn_of_unsafe_cache(settings);
        warn_of_long_waits(settings);
        let options = &settings.options;
        let (threads, usual) = (settings.engine_config.threads, EngineConfig::default().threads);
        let ring = match &self.chosen.options {
            EngineOptions::IoUring(options) => options.clone(),
            _ => IoUringOptions::default(),
        };
        let usual_pool = PosixAioOptions::default();
        let fd_pool = match &self.chosen.options {
            EngineOptions::PosixAio(pool) if *pool != usual_pool => Some(pool.fd_pool),
            _ => None,
        };
        info!(
            disk = options.name,
            image = self.image,
            size_bytes = self.size_bytes,
            block_size = self.block_size,
            readonly = settings.read_only(),
            cache = %settings.image.cache,
            wce = %if options.wce == WceChoice::Fixed { "fixed" } else { "guest" },
            discard = self.discard,
            format = self.layers.map(|_| "qcow2"),
            layers = self.layers,
            serial = self.serial,
            engine = %self.chosen.kind(),
            engine_because = self.chosen.why,
            sqpoll_ms = ring.sqpoll_idle.map(|idle| u64::try_from(idle.as_millis()).unwrap_or(u64::MAX)),
            iopoll = ring.iopoll.then_some(true),
            pin_guest_memory = ring.pin_guest_memory.then_some(true),
            fd_pool,
            io_threads = (threads != usual).then_some(threads),
            placement = (settings.placement != Placement::Queue).then(|| settings.placement.to_string()),
            on_error = options.park().map(|park| park.what.to_string()),
            queues = options.queues,
            queue_size = options.queue_size,
            socket = %settings.socket.path.display(),
            "serving"
        );
    }
}

/// Warns about better engines that do not work on this host.
fn warn_of_passed_over(chosen: &Chosen) {
    for passed_over in &chosen.passed_over {
        warn!("engine {} is used instead of {}: {}", chosen.kind(), passed_over.kind, passed_over.error);
    }
}

/// Warns if a full queue waits so long for its limit that guests report stuck requests.
fn warn_of_long_waits(settings: &DiskSettings) {
    let rates = settings.limits.own.rates.iter().zip(LimitKind::ALL).filter(|(_, kind)| !kind.is_bytes());
    let Some(iops) = rates.filter_map(|(settings, _)| settings.rate).min() else { return };
    let (queue_size, image) = (settings.options.queue_size, settings.image.path.display());
    let waits_s = u64::from(queue_size) / iops;
    if waits_s > LONGEST_WAIT_S {
        warn!(
            %image,
            "with {iops} IOPS the last of {queue_size} requests in a queue waits {waits_s} s, and guests report stuck \
             requests: use a smaller --queue-size, or a higher limit"
        );
    }
}

fn warn_of_unsafe_cache(settings: &DiskSettings) {
    if settings.image.cache.ignores_flushes() && !settings.read_only() {
        let image = settings.image.path.display();
        warn!(%image, "--cache unsafe: flushes are ignored, and writes are lost if the host crashes");
    }
}
