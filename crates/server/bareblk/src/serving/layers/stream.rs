//! `ctl stream`: copies what the layers below have into the image, which then needs them no more.
//!
//! `pull … → the guest pauses → tables closed → the image alone → header without a backing file → the guest goes on`

use std::sync::{Arc, PoisonError};

use anyhow::{Context, Result, anyhow};
use blk_server::Replacement;
use disk_image::Image;
use disk_image::volume::merge::Merge;
use tracing::info;

use super::job::{Job, LAST_STEP_TIMEOUT};
use super::new_settings::within;
use crate::serving::Serving;

/// Runs the job.
pub(super) fn run(serving: &Serving, job: &Job, image: &Arc<Image>) -> Result<()> {
    let volume = image.check_merge()?;
    job.begin(volume.size_bytes());
    let mut merge = Merge::begin(volume, LAST_STEP_TIMEOUT).map_err(|why| anyhow!(why))?;
    let mut at = 0;
    while at < volume.size_bytes() {
        let step = merge.pull(at).map_err(|why| anyhow!(why))?;
        at = step.to;
        job.note(&step)?;
    }
    separate(serving, job, image, merge)
}

fn separate(serving: &Serving, job: &Job, image: &Arc<Image>, merge: Merge) -> Result<()> {
    let _change = serving.begin_last_step(job)?;
    let settings = serving.settings_of(&job.disk)?;
    let mut merge = Some(merge);
    let open = |_: usize, old: Arc<Image>| -> Result<Replacement> {
        let merge = merge.take().filter(|_| Arc::ptr_eq(&old, image));
        let merge = merge.context("the disk has another image now")?;
        let (sources, settings) = (Arc::clone(&serving.sources), settings.clone());
        let open = move || {
            merge.end(LAST_STEP_TIMEOUT).map_err(|why| anyhow!(why))?;
            sources.replacement(old.without_backing()?, &settings)
        };
        within(LAST_STEP_TIMEOUT, open, drop)
    };
    let settle = |_: &[Arc<Image>]| {
        let old = Arc::clone(image);
        // If it ends late, the old image goes on, which needs the name no more.
        within(LAST_STEP_TIMEOUT, move || Ok(old.separate()?), drop)
    };
    // A stop waits until the outcome is known.
    let _fate = serving.fate.lock().unwrap_or_else(PoisonError::into_inner);
    let names = [job.disk.clone()];
    let paused =
        serving.with_server(|server| server.replace_images(&names, LAST_STEP_TIMEOUT, open, settle))??;
    info!(disk = job.disk, ?paused, "the image needs no backing file any more");
    Ok(())
}
