//! `ctl commit`: copies the image into the one below it, in which the guest goes on.
//!
//! `the image below opened for writing → commit … until little is left → the guest pauses → the rest → synced → marks →
//! the guest goes on in the image below → settings`

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use blk_server::Replacement;
use disk_image::Image;
use disk_image::volume::merge::Merge;
use qcow2::DiskFormat;
use tracing::info;

use super::job::{Job, LAST_STEP_TIMEOUT};
use super::new_settings::{keys_of, words_of};
use crate::args::serve_args::Format;
use crate::serving::Serving;

/// What may be left when the guest pauses.
const LAST_BYTES: u64 = 16 << 20;

/// Runs the job. Returns the keys that the disk's next start needs.
pub(super) fn run(serving: &Arc<Serving>, job: &Job, image: Arc<Image>) -> Result<String> {
    let volume = Arc::clone(image.check_merge()?);
    job.begin(volume.size_bytes());
    let mut options = serving.settings_of(&job.disk)?.image;
    if !job.goes_on {
        // Another user of the image below will not go away.
        options.lock_timeout = Duration::ZERO;
    }
    let mut merge = Merge::begin(&volume, LAST_STEP_TIMEOUT).map_err(|why| anyhow!(why))?;
    drop(volume);
    let opener = serving.shared_opener();
    image.begin_commit(opener.as_ref(), &options, &mut merge)?;
    let done = copy(job, &image, &mut merge).and_then(|()| go_on_below(serving, job, &image, &mut merge));
    if done.is_err() {
        image.abandon_commit(&mut merge);
    }
    drop(image);
    // If the guest goes on in the image below, these tables are not needed any more.
    let _ = merge.end(LAST_STEP_TIMEOUT);
    done
}

fn copy(job: &Job, image: &Image, merge: &mut Merge) -> Result<()> {
    let size_bytes = image.check_merge()?.size_bytes();
    loop {
        let step = merge.commit().map_err(|why| anyhow!(why))?;
        job.note(&step)?;
        if step.to == size_bytes && step.left_bytes <= LAST_BYTES && !step.must_wait {
            // So that little is left to sync while the guest pauses.
            return merge.sync_commit().map_err(|why| anyhow!(why));
        }
    }
}

fn go_on_below(serving: &Serving, job: &Job, image: &Arc<Image>, merge: &mut Merge) -> Result<String> {
    let _change = serving.begin_last_step(job)?;
    let settings = serving.settings_of(&job.disk)?;
    let (path, format) = image.image_below()?;
    let format = if format == DiskFormat::Qcow2 { Format::Qcow2 } else { Format::Raw };
    let changed = serving.settings_with(&job.disk, &path, format, image)?;
    let opener = serving.shared_opener();
    let open = |_: usize, old: Arc<Image>| -> Result<Replacement> {
        if !Arc::ptr_eq(&old, image) {
            bail!("the disk has another image now");
        }
        copy_rest(image, merge)?;
        serving.sources.replacement(image.end_commit(opener.as_ref(), &settings.image, merge)?, &changed)
    };
    let settle = |new: &[Arc<Image>]| match new {
        [new] => Ok(image.give_up_for(new)?),
        _ => bail!("one image was expected"),
    };
    // A stop waits until the outcome is known.
    let fate = serving.fate.lock().unwrap_or_else(PoisonError::into_inner);
    let names = [job.disk.clone()];
    let paused =
        serving.with_server(|server| server.replace_images(&names, LAST_STEP_TIMEOUT, open, settle))??;
    drop(fate);
    let words = words_of(&keys_of(&changed));
    info!(disk = job.disk, image = %path.display(), ?paused, "the guest goes on in the image below");
    serving.set_settings(&job.disk, changed);
    Ok(words)
}

/// No request is in flight.
fn copy_rest(image: &Image, merge: &mut Merge) -> Result<()> {
    let (size_bytes, end) = (image.check_merge()?.size_bytes(), Instant::now() + LAST_STEP_TIMEOUT);
    loop {
        let step = merge.commit().map_err(|why| anyhow!(why))?;
        if step.to == size_bytes && step.left_bytes == 0 {
            return Ok(());
        }
        if Instant::now() > end {
            bail!(
                "the last {} bytes could not be copied within {} s: check the storage, and try again",
                step.left_bytes,
                LAST_STEP_TIMEOUT.as_secs()
            );
        }
    }
}
