//! Puts other images under running guests: the disks' queues are frozen, all disks get new storage or none does, and the
//! queues go on.
//!
//! `disks' turns → flushed → sessions frozen → synced → opened, compared → settled → storage replaced → sessions go on`
//!
//! - The sessions freeze as for a live upgrade, so they have closed their tables, and open those of the new image.
//! - Until all new images are open, an error changes no disk. Afterwards a queue fails only if its worker has no descriptors
//!   or memory for another engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use disk_image::Image;
use tracing::info;

use crate::control::exports::{Export, Turn};
use crate::control::live_upgrade::{Frozen, LiveUpgradeError, wait_for_tables};
use crate::control::pause::flush_now;
use crate::control::server::Server;
use crate::data_path::assignment::deadline::deadline_in;
use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::disk::flush::start_last_flush;
use crate::data_path::disk::{Disk, Storage};
use crate::error::AdminError;

/// An image that is to replace another one, with the engine for it.
#[derive(Debug)]
pub struct Replacement {
    /// Open and locked.
    pub image: Image,
    /// The engine.
    pub engine: Arc<EngineSource>,
}

impl Server {
    /// The disk's present image.
    ///
    /// # Errors
    /// [`AdminError::NoDisk`].
    pub fn image(&self, disk: &str) -> Result<Arc<Image>, AdminError> {
        Ok(self.parts().0.find(disk)?.disk.image())
    }

    /// Replaces the images of these disks, all at one instant. `open` gets their images when no write is in flight, and all are
    /// durable (with `--cache unsafe`, only complete), and returns an image for each. `settle` is called with all new images when
    /// only it can still fail. Returns how long the disks were paused.
    ///
    /// # Errors
    /// [`AdminError`], [`LiveUpgradeError`], and those of `open` and `settle`. No disk has changed.
    pub fn replace_images<E: From<AdminError> + From<LiveUpgradeError>>(
        &self,
        names: &[String],
        timeout: Duration,
        open: impl FnOnce(Vec<Arc<Image>>) -> Result<Vec<Replacement>, E>,
        settle: impl FnOnce(&[Arc<Image>]) -> Result<(), E>,
    ) -> Result<Duration, E> {
        let (exports, _) = self.parts();
        let found: Vec<Arc<Export>> =
            names.iter().map(|name| exports.find(name)).collect::<Result<_, _>>()?;
        let _turns: Vec<Turn> = found.iter().map(Export::take_turn).collect::<Result<_, _>>()?;
        let deadline = deadline_in(timeout);
        // Twice, so that little is left to sync while the guests pause.
        let flushed = || {
            found
                .iter()
                .map(|export| &export.disk)
                .filter(|disk| !disk.ignores_flushes() || disk.has_failed())
        };
        flushed().try_for_each(|disk| flush_now(disk, deadline))?;
        let begin = Instant::now();
        let frozen = self.freeze_these(found.clone(), timeout)?;
        flush_all(flushed(), deadline)?;
        let opened = open(found.iter().map(|export| export.disk.image()).collect())?;
        assert_eq!(opened.len(), found.len(), "`open` returns an image for each disk");
        let mut replacements = Vec::new();
        for (export, Replacement { image, engine }) in found.iter().zip(opened) {
            let disk = &export.disk;
            check_same(disk, &image)?;
            let system = |source| AdminError::System {
                action: format!("start a thread for disk `{}`", disk.name().escape_debug()),
                source,
            };
            let storage = Storage::started(disk.name(), image, Some(engine)).map_err(system)?;
            wait_for_tables(&storage.image, deadline_in(timeout))
                .map_err(|why| LiveUpgradeError::Stays { disk: disk.name().to_owned(), why })?;
            replacements.push((Arc::clone(disk), storage));
        }
        let images: Vec<Arc<Image>> =
            replacements.iter().map(|(_, storage)| Arc::clone(&storage.image)).collect();
        settle(&images)?;
        let has_grown = |((_, storage), export): &(&(Arc<Disk>, Storage), &Arc<Export>)| {
            storage.image.capacity_sectors() > export.disk.image().capacity_sectors()
        };
        let grown = replacements.iter().zip(&found).filter(has_grown);
        let grown: Vec<Arc<Export>> = grown.map(|(_, export)| Arc::clone(export)).collect();
        let paused = replace(replacements, frozen, begin);
        let sessions = grown.iter().flat_map(|export| export.sessions.all());
        sessions.for_each(|session| session.announce_config_change());
        info!(disks = names.join(", "), ?paused, "the disks resume with other images");
        Ok(paused)
    }
}

/// Makes the disks' writes durable, all at the same time, because guests wait.
fn flush_all<'a>(disks: impl Iterator<Item = &'a Arc<Disk>>, deadline: Instant) -> Result<(), AdminError> {
    let failed = |disk: &Disk| {
        let disk = disk.name().to_owned();
        |source| AdminError::FlushFailed { disk, source }
    };
    let started = disks.map(|disk| Ok((disk, start_last_flush(disk, deadline).map_err(failed(disk))?)));
    let started: Vec<_> = started.collect::<Result<_, AdminError>>()?;
    started.into_iter().try_for_each(|(disk, flush)| flush.wait().map_err(failed(disk)))
}

fn replace(replacements: Vec<(Arc<Disk>, Storage)>, frozen: Frozen<'_>, begin: Instant) -> Duration {
    let replaced = replacements.into_iter().map(|(disk, storage)| disk.replace_storage(storage));
    let old: Vec<Storage> = replaced.collect();
    drop(frozen);
    let paused = begin.elapsed();
    // Closing files may wait.
    drop(old);
    paused
}

/// A guest must not notice the new image, unless it is larger.
fn check_same(disk: &Disk, image: &Image) -> Result<(), AdminError> {
    let old = disk.image();
    let differs = |what: &'static str| {
        let disk = disk.name().to_owned();
        Err(AdminError::OtherImage { disk, what })
    };
    match () {
        () if old.capacity_sectors() > image.capacity_sectors() => differs("size"),
        () if old.block_size() != image.block_size() => differs("block size"),
        () if old.read_only() != image.read_only() => differs("access"),
        () if old.cache() != image.cache() => differs("cache mode"),
        () if disk.device_features_with(&old) & !disk.device_features_with(image) != 0 => differs("features"),
        () => Ok(()),
    }
}
