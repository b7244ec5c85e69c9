//! `ctl resize` of qcow2 disks: the size is in the image's header, so the guest goes on in the image opened anew.

use std::sync::{Arc, PoisonError};

use anyhow::{Result, bail};
use blk_server::{Placement, Replacement};
use disk_image::{Image, SECTOR_BYTES};
use tracing::info;

use super::job::LAST_STEP_TIMEOUT;
use crate::serving::Serving;

impl Serving {
    /// Makes a written qcow2 disk larger. The caller has begun a change.
    ///
    /// # Errors
    /// The served disk keeps its size; the header may have the new one already, which the next start uses.
    pub(in crate::serving) fn grow_qcow2(&self, name: &str, bytes: u64) -> Result<()> {
        self.refuse_job(name)?;
        let settings = self.settings_of(name)?;
        if settings.placement != Placement::Queue {
            bail!(
                "disk {name}: a qcow2 disk is resized only with placement queue, and the disk has {}",
                settings.placement
            );
        }
        if self.with_server(|server| server.capacity_sectors(name))? * SECTOR_BYTES == bytes {
            return Ok(());
        }
        let open = |old: Vec<Arc<Image>>| -> Result<Vec<Replacement>> {
            let [old] = &old[..] else { bail!("one image was expected") };
            old.close_tables(LAST_STEP_TIMEOUT)?;
            Ok(vec![self.sources.replacement(old.grown(bytes)?, &settings)?])
        };
        let _fate = self.fate.lock().unwrap_or_else(PoisonError::into_inner);
        let names = [name.to_owned()];
        let paused =
            self.with_server(|server| server.replace_images(&names, LAST_STEP_TIMEOUT, open, |_| Ok(())))??;
        info!(disk = name, bytes, ?paused, "the qcow2 disk has grown");
        Ok(())
    }
}
