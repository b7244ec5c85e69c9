//! Snapshots by overlay: the guests go on in new qcow2 images, and the images so far do not change any more.
//!
//! `new files (opened by the sandbox's helper) → overlays written → disks frozen → overlays opened → disks go on → settings`

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
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
            let settings = self.overlaid_settings(name, path)?;
            let image = self.with_server(|server| server.image(name))??;
            image.check_overlay()?;
            let file = create(&opener, path)?;
            made.push(NewImage::new(Arc::clone(&opener), path, &Arc::new(file.try_clone()?)));
            image.write_overlay(file)?;
            names.push(name.clone());
            all_settings.push(settings);
        }
        let open = |index: usize, below: &Image| -> Result<Replacement> {
            let Some(settings) = all_settings.get(index) else { bail!("a disk without settings") };
            let image = below.open_overlay(opener.as_ref(), &settings.image)?;
            let config = &settings.engine_config;
            let chosen = choose(settings.engine.as_ref(), &FileSpec::of(&image), config)?;
            Ok(Replacement { image, engine: self.sources.source(&Arc::new(chosen), config) })
        };
        let paused = self.with_server(|server| server.replace_images(&names, timeout, open))??;
        made.into_iter().for_each(NewImage::keep);
        let mut state = self.state();
        let mut keys = Vec::new();
        for (name, settings) in names.iter().zip(all_settings) {
            info!(disk = name, image = %settings.image.path.display(), ?paused, "the guest goes on in an overlay");
            keys.push(keys_of(&settings));
            if let Some(disk) = state.disks.iter_mut().find(|disk| disk.name == *name) {
                disk.settings = settings;
            }
        }
        Ok(Overlaid { paused, keys })
    }

    /// The settings of a disk with its new image. Name and serial stay what they were.
    fn overlaid_settings(&self, name: &str, path: &Path) -> Result<DiskSettings> {
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
        let below = changed.image.path.parent().map(Path::to_owned).unwrap_or_default();
        let folders = &mut changed.image.backing_folders;
        if !folders.iter().any(|folder| below.starts_with(folder)) {
            folders.push(below);
        }
        changed.image.path = path.to_owned();
        changed.image.create_bytes = None;
        changed.options.create = None;
        changed.options.format = Some(Format::Qcow2);
        changed.options.name = Some(name.to_owned());
        changed.options.serial = changed.options.serial.or(serial);
        Ok(changed)
    }
}

/// In the words of a configuration file.
fn keys_of(settings: &DiskSettings) -> String {
    let folders = settings.image.backing_folders.iter().map(|folder| folder.display().to_string());
    let folders = folders.collect::<Vec<_>>().join(",");
    let serial = settings.options.serial.as_deref().unwrap_or_default();
    let name = settings.options.name.as_deref().unwrap_or_default();
    format!(
        "image={} format=qcow2 backing-folders={folders} name={name} serial={serial}",
        settings.image.path.display()
    )
}
