//! Snapshots of disks: new files that share their blocks with the images, all as of one instant.
//!
//! `new files (opened by the sandbox's helper) → disks paused → cloned → disks continue → files synced → kept, or removed`

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blk_server::AdminError;
use disk_image::{Access, NewImage, OpenRequest, Opener};
use tracing::info;

use crate::serving::Serving;

/// A new file that is removed again after a failure.
type New = NewImage<Arc<dyn Opener>>;

impl Serving {
    /// Returns how long the disks were paused.
    ///
    /// # Errors
    /// After an error no file remains.
    pub fn snapshot(&self, wanted: &[(String, PathBuf)], timeout: Duration) -> Result<Duration> {
        check(wanted)?;
        let known = self.with_server(blk_server::Server::disk_names)?;
        if let Some((name, _)) = wanted.iter().find(|(name, _)| !known.contains(name)) {
            bail!(AdminError::NoDisk { name: name.clone() });
        }
        let opener = self.shared_opener();
        let (mut files, mut made): (Vec<(String, File)>, Vec<New>) = (Vec::new(), Vec::new());
        for (name, path) in wanted {
            let file = create(&opener, path)?;
            made.push(NewImage::new(Arc::clone(&opener), path, &Arc::new(file.try_clone()?)));
            files.push((name.clone(), file));
        }
        let paused = self.with_server(|server| server.snapshot(&files, timeout))??;
        for ((_, path), (_, file)) in wanted.iter().zip(&files) {
            file.sync_all().with_context(|| format!("snapshot {} cannot be synced", path.display()))?;
        }
        made.into_iter().for_each(NewImage::keep);
        for (disk, path) in wanted {
            info!(disk, file = %path.display(), paused = ?paused, "snapshot taken");
        }
        Ok(paused)
    }
}

pub(super) fn check(wanted: &[(String, PathBuf)]) -> Result<()> {
    if wanted.is_empty() {
        bail!("a snapshot needs at least one disk, with a file for its clone");
    }
    for (at, (name, path)) in wanted.iter().enumerate() {
        let earlier = wanted.iter().take(at);
        if earlier.clone().any(|(other, _)| other == name) {
            bail!("disk {name} appears twice: give it once");
        }
        if earlier.clone().any(|(_, other)| other == path) {
            bail!("file {} appears twice: give each disk its own", path.display());
        }
    }
    Ok(())
}

pub(super) fn create(opener: &Arc<dyn Opener>, path: &Path) -> Result<File> {
    let request = OpenRequest { access: Access::ReadWrite, direct: false, create: Some(0), exclusive: false };
    let shown = path.display();
    match opener.open_image(path, &request) {
        Ok(file) => Ok(file.into()),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            bail!("snapshot {shown} exists already and stays unchanged: give another path")
        }
        Err(error) => Err(error).with_context(|| format!("snapshot {shown} cannot be created")),
    }
}
