//! `ctl stream`: copies the data of all backing files into the image, which then no longer needs them.
//!
//! `steps … → the guest pauses → tables closed → the image alone → header without a backing file → the guest goes on`

use std::sync::{Arc, PoisonError};

use anyhow::{Context, Result, anyhow};
use blk_server::Replacement;
use disk_image::Image;
use disk_image::volume::merge::Merge;
use tracing::info;

use super::job::{Job, LAST_STEP_TIMEOUT};
use super::new_settings::LateThreads;
use crate::serving::Serving;

/// Runs the job.
pub(super) fn run(serving: &Serving, job: &Job, image: &Arc<Image>) -> Result<()> {
    let volume = image.check_merge()?;
    job.begin(volume.size_bytes());
    let mut merge = Merge::begin(volume, LAST_STEP_TIMEOUT).map_err(|why| anyhow!(why))?;
    let mut at = 0;
    while at < volume.size_bytes() {
        let step = merge.stream(at).map_err(|why| anyhow!(why))?;
        at = step.to;
        job.record_and_wait(&step)?;
    }
    separate(serving, job, image, merge)
}

fn separate(serving: &Serving, job: &Job, image: &Arc<Image>, merge: Merge) -> Result<()> {
    // The job has not ended before its late threads have. Dropped after the change, for which others wait.
    let mut late = LateThreads::default();
    let _change = serving.begin_last_step(job)?;
    let settings = serving.settings_of(&job.disk)?;
    let open = |old: Vec<Arc<Image>>| -> Result<Vec<Replacement>> {
        let old = old.into_iter().find(|old| Arc::ptr_eq(old, image));
        let old = old.context("the disk has another image now")?;
        let (sources, settings) = (Arc::clone(&serving.sources), settings.clone());
        let open = move || {
            merge.end(LAST_STEP_TIMEOUT).map_err(|why| anyhow!(why))?;
            old.close_tables(LAST_STEP_TIMEOUT)?;
            sources.replacement(old.without_backing()?, &settings)
        };
        Ok(vec![late.run(LAST_STEP_TIMEOUT, open, drop)?])
    };
    // Without a time limit: while the header is written, no guest may use the image.
    let settle = |_: &[Arc<Image>]| Ok(image.remove_backing()?);
    // A stop waits until the outcome is known.
    let _fate = serving.fate.lock().unwrap_or_else(PoisonError::into_inner);
    let names = [job.disk.clone()];
    let paused =
        serving.with_server(|server| server.replace_images(&names, LAST_STEP_TIMEOUT, open, settle))??;
    info!(disk = job.disk, ?paused, "the image no longer needs a backing file");
    Ok(())
}
