//! `ctl reclaim`: frees leaked clusters of the image while its guest runs.
//!
//! `steps: the tables are scanned, then leaks are freed → the job's use of the tables ends`
//!
//! The job keeps the tables open, also while no guest runs. It changes no layers, so no guest pauses. What it has freed stays
//! free if it is cancelled. A job that is started again scans the tables again.

use std::sync::Arc;

use anyhow::{Result, anyhow};
use disk_image::Image;
use disk_image::volume::merge::Merge;
use tracing::info;

use super::job::{Job, LAST_STEP_TIMEOUT};

/// Runs the job.
pub(super) fn run(job: &Job, image: &Arc<Image>) -> Result<()> {
    let volume = image.check_reclaim()?;
    job.begin(volume.size_bytes());
    let mut merge = Merge::begin(volume, LAST_STEP_TIMEOUT).map_err(|why| anyhow!(why))?;
    merge.begin_reclaim().map_err(|why| anyhow!(why))?;
    loop {
        let step = merge.reclaim().map_err(|why| anyhow!(why))?;
        let recorded = job.record(&step);
        if step.has_ended {
            let (clusters, bytes) = (step.freed_clusters, step.freed_bytes);
            info!(disk = job.disk, clusters, bytes, "leaked clusters were freed");
            return merge.end(LAST_STEP_TIMEOUT).map_err(|why| anyhow!(why));
        }
        recorded?;
        job.wait(0)?;
    }
}
