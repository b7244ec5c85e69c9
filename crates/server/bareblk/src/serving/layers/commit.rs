//! `ctl commit`: copies the image into its backing file, and switches the guest to that file.
//!
//! `the image below opened for writing → commit … until little is left → the guest pauses → the rest → synced → marks →
//! the guest goes on in the image below → settings`

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use blk_server::Replacement;
use disk_image::volume::link::Progress;
use disk_image::volume::merge::Merge;
use disk_image::{Image, ImageOptions, Opener};
use qcow2::DiskFormat;
use tracing::{info, warn};

use super::job::{Job, LAST_STEP_TIMEOUT};
use super::new_settings::{LateThreads, keys_of, words_of};
use crate::args::serve_args::Format;
use crate::serving::Serving;

/// What may be left when the guest pauses: this little, or more if the guest writes so much that the job does not get there.
const LITTLE_BYTES: u64 = 1 << 20;
const LAST_BYTES: u64 = 16 << 20;
/// How long the job tries to get there.
const TRY_FOR: Duration = Duration::from_millis(500);
/// How much is copied before it is synced, so that no sync takes long.
const SYNC_BYTES: u64 = 256 << 20;
/// How long other changes of disks wait while the job catches up with the guest.
const CATCH_UP: Duration = Duration::from_secs(2);

/// Runs the job. Returns the keys that the disk's next start needs.
pub(super) fn run(serving: &Arc<Serving>, job: &Job, image: &Arc<Image>) -> Result<String> {
    let volume = image.check_merge()?;
    job.begin(volume.size_bytes());
    let mut options = serving.settings_of(&job.disk)?.image;
    if !job.is_restarted {
        // Another user of the image below will not go away.
        options.lock_timeout = Duration::ZERO;
    }
    let mut merge = Merge::begin(volume, LAST_STEP_TIMEOUT).map_err(|why| anyhow!(why))?;
    image.begin_commit(serving.shared_opener().as_ref(), &options, &mut merge)?;
    let mut running =
        Running { merge: Some(merge), image: Arc::clone(image), unsynced: 0, late: LateThreads::default() };
    loop {
        running.copy(job)?;
        let _change = serving.begin_last_step(job)?;
        if running.catch_up(job)? {
            return running.go_on_below(serving, job);
        }
    }
}

/// A commit that ends without an effect when it is dropped before its last step.
struct Running {
    /// `None`: the last step has it.
    merge: Option<Merge>,
    image: Arc<Image>,
    /// Bytes that were copied since the last sync.
    unsynced: u64,
    /// The job has not ended before they have.
    late: LateThreads,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(merge) = self.merge.take() {
            abandon(&self.image, merge);
        }
    }
}

fn abandon(image: &Image, mut merge: Merge) {
    image.abandon_commit(&mut merge);
    if let Err(why) = merge.end(LAST_STEP_TIMEOUT) {
        warn!(image = %image.path().display(), "after a commit that has not ended: {why}");
    }
}

/// Whether no more than `bytes` are left. A step that must wait may hide more.
fn has_left(bytes: u64, step: &Progress, image: &Image) -> Result<bool> {
    let has_looked = step.to == image.check_merge()?.size_bytes();
    Ok(has_looked && step.pending_bytes <= bytes && !step.waits_for_requests)
}

impl Running {
    fn merge(&mut self) -> Result<&mut Merge> {
        self.merge.as_mut().context("the last step has begun")
    }

    fn step(&mut self) -> Result<Progress> {
        let step = self.merge()?.commit().map_err(|why| anyhow!(why))?;
        self.unsynced += step.copied_bytes;
        if self.unsynced >= SYNC_BYTES {
            self.sync()?;
        }
        Ok(step)
    }

    fn sync(&mut self) -> Result<()> {
        self.unsynced = 0;
        self.merge()?.sync_commit().map_err(|why| anyhow!(why))
    }

    /// Copies until little is left.
    fn copy(&mut self, job: &Job) -> Result<()> {
        loop {
            let step = self.step()?;
            job.record_and_wait(&step)?;
            if has_left(LAST_BYTES, &step, &self.image)? {
                // So that little is left to sync while the guest pauses.
                return self.sync();
            }
        }
    }

    /// Copies what the guest has written while the job waited for its last step. Returns whether little is left. Other changes
    /// of disks wait meanwhile, so the rate limit does not apply.
    fn catch_up(&mut self, job: &Job) -> Result<bool> {
        let begin = Instant::now();
        while begin.elapsed() < CATCH_UP {
            let step = self.step()?;
            job.record(&step)?;
            let enough = if begin.elapsed() < TRY_FOR { LITTLE_BYTES } else { LAST_BYTES };
            if has_left(enough, &step, &self.image)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The last step.
    fn go_on_below(&mut self, serving: &Serving, job: &Job) -> Result<String> {
        let settings = serving.settings_of(&job.disk)?;
        let (path, format) = self.image.image_below()?;
        let format = if format == DiskFormat::Qcow2 { Format::Qcow2 } else { Format::Raw };
        let changed = serving.settings_with(&job.disk, &path, format, &self.image)?;
        let (image, mut merge) = (Arc::clone(&self.image), self.merge.take());
        let has_switched = AtomicBool::new(false);
        let late = &mut self.late;
        let open = |old: Vec<Arc<Image>>| -> Result<Vec<Replacement>> {
            let old = old.into_iter().find(|old| Arc::ptr_eq(old, &image));
            let old = old.context("the disk has another image now")?;
            let merge = merge.take().context("the last step has begun")?;
            let (opener, sources) = (serving.shared_opener(), Arc::clone(&serving.sources));
            let (options, changed) = (settings.image.clone(), changed.clone());
            let late_image = Arc::clone(&image);
            let open = move || match open_below(&old, opener.as_ref(), &options, merge) {
                Ok(below) => sources.replacement(below, &changed).inspect_err(|_| old.lower_lock_below()),
                Err(why) => Err(why),
            };
            Ok(vec![late.run(LAST_STEP_TIMEOUT, open, move |_| late_image.lower_lock_below())?])
        };
        // Without a time limit: the guest must not go on before it is known which image the next start may serve.
        let settle = |new: &[Arc<Image>]| -> Result<()> {
            let [new] = new else { bail!("one image was expected") };
            image.mark_committed_to(new)?;
            has_switched.store(true, Ordering::Relaxed);
            Ok(())
        };
        // A stop waits until the outcome is known.
        let fate = serving.fate.lock().unwrap_or_else(PoisonError::into_inner);
        let names = [job.disk.clone()];
        let replaced =
            serving.with_server(|server| server.replace_images(&names, LAST_STEP_TIMEOUT, open, settle));
        drop(fate);
        if !has_switched.load(Ordering::Relaxed) {
            match merge.take() {
                // The guest did not pause.
                Some(merge) => abandon(&image, merge),
                None => image.lower_lock_below(),
            }
        }
        let paused = replaced??;
        let words = words_of(&keys_of(&changed));
        info!(disk = job.disk, image = %path.display(), ?paused, "the guest goes on in the image below");
        serving.set_settings(&job.disk, changed);
        Ok(words)
    }
}

/// Copies the rest, and opens the image below. No request is in flight.
fn open_below(image: &Image, opener: &dyn Opener, options: &ImageOptions, mut merge: Merge) -> Result<Image> {
    let opened =
        copy_rest(image, &mut merge).and_then(|()| Ok(image.end_commit(opener, options, &mut merge)?));
    if opened.is_err() {
        abandon(image, merge);
        return opened;
    }
    // These tables are no longer needed if the guest goes on below; if not, they must be closed.
    merge.end(LAST_STEP_TIMEOUT).map_err(|why| anyhow!(why))?;
    image.close_tables(LAST_STEP_TIMEOUT)?;
    opened
}

fn copy_rest(image: &Image, merge: &mut Merge) -> Result<()> {
    let (size_bytes, end) = (image.check_merge()?.size_bytes(), Instant::now() + LAST_STEP_TIMEOUT);
    loop {
        let step = merge.commit().map_err(|why| anyhow!(why))?;
        if step.to == size_bytes && step.pending_bytes == 0 {
            return Ok(());
        }
        if Instant::now() > end {
            bail!(
                "the last {} bytes could not be copied within {} s: check the storage, and try again",
                step.pending_bytes,
                LAST_STEP_TIMEOUT.as_secs()
            );
        }
    }
}
