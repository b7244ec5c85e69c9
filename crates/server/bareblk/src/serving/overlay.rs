//! Snapshots by overlay: the guests go on in new qcow2 images, and the images so far do not change any more.
//!
//! `new files (opened by the sandbox's helper) → overlays written → disks frozen → overlays opened → disks go on → settings`

use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blk_server::{Placement, Replacement};
use disk_image::{Image, NewImage};
use io_engine::{FileSpec, choose};
use tracing::info;

use super::snapshot::{check, create};
use crate::args::serve_args::Format;
use crate::config::difference::NamedDisk;
use crate::config::disk_settings::DiskSettings;
use crate::control::answers::reports::Overlaid;
use crate::serving::Serving;

impl Serving {
    /// Puts new images over those of several disks, all at one instant.
    ///
    /// # Errors
    /// After an error no file remains, and no disk has changed.
    pub fn overlay(&self, wanted: &[(String, PathBuf)], timeout: Duration) -> Result<Overlaid> {
        check(wanted)?;
        let _change = self.begin_change()?;
        let opener = self.shared_opener();
        let (mut names, mut all_settings, mut made) = (Vec::new(), Vec::new(), Vec::new());
        for (name, path) in wanted {
            let image = self.with_server(|server| server.image(name))??;
            let settings = self.overlaid_settings(name, path, &image)?;
            image.check_overlay()?;
            let file = create(&opener, path)?;
            made.push(NewImage::new(Arc::clone(&opener), path, &Arc::new(file.try_clone()?)));
            image.write_overlay(file)?;
            names.push(name.clone());
            all_settings.push(settings);
        }
        let open = |index: usize, below: Arc<Image>| -> Result<Replacement> {
            let Some(settings) = all_settings.get(index).cloned() else { bail!("a disk without settings") };
            let (opener, sources) = (Arc::clone(&opener), Arc::clone(&self.sources));
            // The guests are paused, and a stop waits.
            on_a_thread(timeout, move || {
                let image = below.open_overlay(opener.as_ref(), &settings.image)?;
                let config = &settings.engine_config;
                let chosen = choose(settings.engine.as_ref(), &FileSpec::of(&image), config)?;
                Ok(Replacement { image, engine: sources.source(&Arc::new(chosen), config) })
            })
        };
        // A stop waits until the outcome is known.
        let fate = self.fate.lock().unwrap_or_else(PoisonError::into_inner);
        let paused = self.with_server(|server| server.replace_images(&names, timeout, open))??;
        made.into_iter().for_each(NewImage::keep);
        drop(fate);
        let mut state = self.state();
        let mut keys = Vec::new();
        for (name, settings) in names.iter().zip(all_settings) {
            info!(disk = name, image = %settings.image.path.display(), ?paused, "the guest goes on in an overlay");
            let words = keys_of(&settings).map(|(key, value)| format!("{key}={value}"));
            keys.push(words.join(" "));
            if let Some(disk) = state.disks.iter_mut().find(|disk| disk.name == *name) {
                disk.settings = settings;
            }
        }
        Ok(Overlaid { paused, keys })
    }

    /// The settings of a disk with its new image. Name and serial stay what they were.
    fn overlaid_settings(&self, name: &str, path: &Path, below: &Image) -> Result<DiskSettings> {
        let disks = self.disks();
        let Some(NamedDisk { settings, .. }) = disks.into_iter().find(|disk| disk.name == name) else {
            bail!(blk_server::AdminError::NoDisk { name: name.to_owned() })
        };
        if settings.placement != Placement::Queue {
            bail!("disk {name}: an overlay needs placement queue, and the disk has {}", settings.placement);
        }
        let facts = self.with_server(|server| server.facts(name))?;
        let serial = facts.into_iter().find(|fact| fact.key == "serial").map(|fact| fact.value);
        let mut changed = settings;
        // The overlay stores the real path of its backing file.
        let folder = below.path().parent().map(Path::to_owned).unwrap_or_default();
        let folders = &mut changed.image.backing_folders;
        if !folders.iter().any(|known| folder.starts_with(known)) {
            folders.push(folder);
        }
        changed.image.block_size = Some(below.block_size());
        changed.options.block_size = Some(below.block_size());
        changed.image.path = path.to_owned();
        changed.image.create_bytes = None;
        changed.options.create = None;
        changed.options.format = Some(Format::Qcow2);
        changed.options.name = Some(name.to_owned());
        changed.options.serial = changed.options.serial.or(serial);
        for (key, value) in keys_of(&changed) {
            changed.words.set(key, &value);
        }
        Ok(changed)
    }
}

/// Runs `open`, which may hang in a file system. If it ends late, what it has opened is closed.
fn on_a_thread<T: Send + 'static>(
    timeout: Duration,
    open: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (done, ready) = sync_channel(1);
    let thread = std::thread::Builder::new().name("bareblk-open".into());
    let run = move || _ = done.send(open());
    thread.spawn(run).context("cannot start the thread that opens the overlay")?;
    let seconds = timeout.as_secs_f64();
    ready.recv_timeout(timeout).unwrap_or_else(|_| {
        bail!("the overlay and the images below could not be opened within {seconds} s: check their file systems")
    })
}

/// The keys that an overlay changes, with their values.
fn keys_of(settings: &DiskSettings) -> [(&'static str, String); 6] {
    let (options, image) = (&settings.options, &settings.image);
    let folders = image.backing_folders.iter().map(|folder| folder.display().to_string());
    [
        ("image", image.path.display().to_string()),
        ("format", "qcow2".to_owned()),
        ("backing-folders", folders.collect::<Vec<_>>().join(":")),
        ("name", options.name.clone().unwrap_or_default()),
        ("serial", options.serial.clone().unwrap_or_default()),
        ("block-size", image.block_size.unwrap_or_default().to_string()),
    ]
}
