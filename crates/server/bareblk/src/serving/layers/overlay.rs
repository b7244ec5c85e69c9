//! Snapshots by overlay: the guests go on in new qcow2 images, and the images so far do not change any more.
//!
//! `new files (opened by the sandbox's helper) → overlays written → disks frozen → overlays opened → disks go on → settings`

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use anyhow::Result;
use blk_server::Replacement;
use disk_image::{Image, NewImage};
use tracing::info;

use super::new_settings::{keys_of, start, words_of};
use super::snapshot::{check, create};
use crate::args::serve_args::Format;
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
            self.refuse_job(name)?;
            let image = self.with_server(|server| server.image(name))??;
            let settings = self.overlaid_settings(name, path, &image)?;
            image.check_overlay()?;
            let file = create(&opener, path)?;
            made.push(NewImage::new(Arc::clone(&opener), path, &Arc::new(file.try_clone()?)));
            image.write_overlay(file)?;
            names.push(name.clone());
            all_settings.push(settings);
        }
        // All at the same time: the guests are paused, and a stop waits.
        let open = |images: Vec<Arc<Image>>| -> Result<Vec<Replacement>> {
            let started: Vec<_> = images
                .into_iter()
                .zip(&all_settings)
                .map(|(below, settings)| {
                    let (opener, sources) = (Arc::clone(&opener), Arc::clone(&self.sources));
                    let settings = settings.clone();
                    let open = move || {
                        below.close_tables(timeout)?;
                        let image = below.open_overlay(opener.as_ref(), &settings.image)?;
                        sources.replacement(image, &settings)
                    };
                    start(open, drop)
                })
                .collect::<Result<_>>()?;
            started.into_iter().map(|started| started.wait(timeout)).collect()
        };
        // A stop waits until the outcome is known.
        let fate = self.fate.lock().unwrap_or_else(PoisonError::into_inner);
        let paused =
            self.with_server(|server| server.replace_images(&names, timeout, open, |_| Ok(())))??;
        made.into_iter().for_each(NewImage::keep);
        drop(fate);
        let mut keys = Vec::new();
        for (name, settings) in names.iter().zip(all_settings) {
            info!(disk = name, image = %settings.image.path.display(), ?paused, "the guest goes on in an overlay");
            keys.push(words_of(&keys_of(&settings)));
            self.set_settings(name, settings);
        }
        Ok(Overlaid { paused, keys })
    }

    /// The settings of a disk with its overlay.
    fn overlaid_settings(&self, name: &str, path: &Path, below: &Image) -> Result<DiskSettings> {
        let mut changed = self.settings_with(name, path, Format::Qcow2, below)?;
        // The overlay stores the real path of its backing file.
        let folder = below.path().parent().map(Path::to_owned).unwrap_or_default();
        let folders = &mut changed.image.backing_folders;
        if !folders.iter().any(|known| folder.starts_with(known)) {
            folders.push(folder);
        }
        for (key, value) in keys_of(&changed) {
            changed.words.set(key, &value);
        }
        Ok(changed)
    }
}
