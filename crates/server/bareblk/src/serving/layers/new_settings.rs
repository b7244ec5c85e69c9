//! The settings of a disk whose image is replaced while guests use it.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blk_server::{Placement, Replacement};
use disk_image::Image;
use io_engine::{FileSpec, choose};

use crate::args::serve_args::Format;
use crate::config::difference::NamedDisk;
use crate::config::disk_settings::DiskSettings;
use crate::serving::Serving;
use crate::serving::open_disk::EngineSources;

impl Serving {
    /// # Errors
    /// There is no such disk.
    pub(super) fn settings_of(&self, name: &str) -> Result<DiskSettings> {
        let disks = self.disks();
        match disks.into_iter().find(|disk| disk.name == name) {
            Some(NamedDisk { settings, .. }) => Ok(settings),
            None => bail!(blk_server::AdminError::NoDisk { name: name.to_owned() }),
        }
    }

    /// The settings of a disk with another image. What the guest knows stays what it was: name, serial, block size.
    ///
    /// # Errors
    /// There is no such disk; its placement allows no other image.
    pub(super) fn settings_with(
        &self,
        name: &str,
        path: &Path,
        format: Format,
        present: &Image,
    ) -> Result<DiskSettings> {
        let mut changed = self.settings_of(name)?;
        if changed.placement != Placement::Queue {
            bail!("disk {name}: another image needs placement queue, and the disk has {}", changed.placement);
        }
        let facts = self.with_server(|server| server.facts(name))?;
        let serial = facts.into_iter().find(|fact| fact.key == "serial").map(|fact| fact.value);
        changed.image.block_size = Some(present.block_size());
        changed.options.block_size = Some(present.block_size());
        changed.image.path = path.to_owned();
        changed.image.create_bytes = None;
        changed.options.create = None;
        (changed.image.new_backing, changed.options.backing, changed.options.backing_format) =
            (None, None, None);
        changed.options.format = Some(format);
        changed.options.name = Some(name.to_owned());
        changed.options.serial = changed.options.serial.or(serial);
        for (key, value) in keys_of(&changed) {
            changed.words.set(key, &value);
        }
        Ok(changed)
    }

    pub(super) fn set_settings(&self, name: &str, settings: DiskSettings) {
        if let Some(disk) = self.state().disks.iter_mut().find(|disk| disk.name == name) {
            disk.settings = settings;
        }
    }
}

impl EngineSources {
    /// The image with its engine.
    pub(super) fn replacement(&self, image: Image, settings: &DiskSettings) -> Result<Replacement> {
        let config = &settings.engine_config;
        let chosen = choose(settings.engine.as_ref(), &FileSpec::of(&image), config)?;
        Ok(Replacement { image, engine: self.source(&Arc::new(chosen), config) })
    }
}

/// The keys that another image changes, with their values.
pub(super) fn keys_of(settings: &DiskSettings) -> Vec<(&'static str, String)> {
    let (options, image) = (&settings.options, &settings.image);
    let folders = image.backing_folders.iter().map(|folder| folder.display().to_string());
    let folders = folders.collect::<Vec<_>>().join(":");
    let format = if options.is_qcow2() { "qcow2" } else { "raw" };
    let keys = [
        ("image", image.path.display().to_string()),
        ("format", format.to_owned()),
        ("backing-folders", folders),
        ("name", options.name.clone().unwrap_or_default()),
        ("serial", options.serial.clone().unwrap_or_default()),
        ("block-size", image.block_size.unwrap_or_default().to_string()),
    ];
    keys.into_iter().filter(|(_, value)| !value.is_empty()).collect()
}

/// The keys as a user writes them.
pub(super) fn words_of(keys: &[(&str, String)]) -> String {
    let words = keys.iter().map(|(key, value)| format!("{key}={value}"));
    words.collect::<Vec<_>>().join(" ")
}

/// Threads of a job that run calls with time limits. Waits for those that are late when it is dropped, because they may still
/// use the job's images.
#[derive(Default)]
pub(super) struct LateThreads(Vec<JoinHandle<()>>);

impl Drop for LateThreads {
    fn drop(&mut self) {
        for thread in self.0.drain(..) {
            let _ = thread.join();
        }
    }
}

impl LateThreads {
    /// [`start`], and the wait for the end.
    pub fn run<T: Send + 'static>(
        &mut self,
        timeout: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
        undo: impl FnOnce(T) + Send + 'static,
    ) -> Result<T> {
        let Started { thread, ready } = start(work, undo)?;
        self.0.push(thread);
        wait(&ready, timeout)
    }
}

/// Work that runs on a thread.
pub(super) struct Started<T> {
    thread: JoinHandle<()>,
    ready: Receiver<Result<T>>,
}

impl<T> Started<T> {
    /// Waits for the work, and lets go of a thread that is late.
    pub fn wait(self, timeout: Duration) -> Result<T> {
        wait(&self.ready, timeout)
    }
}

fn wait<T>(ready: &Receiver<Result<T>>, timeout: Duration) -> Result<T> {
    let seconds = timeout.as_secs_f64();
    ready.recv_timeout(timeout).unwrap_or_else(|_| {
        bail!("the storage of the images has not answered within {seconds} s: check it, and start the command again")
    })
}

/// Starts `work`, which may hang in a file system, on a thread. If it ends too late, `undo` gets what it has made.
pub(super) fn start<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
    undo: impl FnOnce(T) + Send + 'static,
) -> Result<Started<T>> {
    // Without room: the thread learns whether its result was taken.
    let (done, ready) = sync_channel(0);
    let run = move || {
        if let Err(SendError(Ok(late))) = done.send(work()) {
            undo(late);
        }
    };
    let thread = std::thread::Builder::new().name("bareblk-open".into()).spawn(run);
    let thread = thread.context("cannot start the thread that opens the image")?;
    Ok(Started { thread, ready })
}
