//! `ctl commit`: copies the image into the one below it, in which the guest goes on.
//!
//! `the image below opened for writing → commit … until little is left → the guest pauses → the rest → synced → marks →
//! the guest goes on in the image below → settings`

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use blk_server::Replacement;
use disk_image::volume::link::Merged;
use disk_image::volume::merge::Merge;
use disk_image::{Image, ImageOptions, Opener};
use qcow2::DiskFormat;
use tracing::{info, warn};

use super::job::{Job, LAST_STEP_TIMEOUT};
use super::new_settings::{keys_of, within, words_of};
use crate::args::serve_args::Format;
use crate::serving::Serving;

/// What may be left when the guest pauses.
const LAST_BYTES: u64 = 16 << 20;
/// How much is copied before it is synced, so that no sync takes long.
const SYNC_BYTES: u64 = 256 << 20;
/// How long other changes of disks wait while the job catches up with the guest.
const CATCH_UP: Duration = Duration::from_secs(2);

/// Runs the job. Returns the keys that the disk's next start needs.
pub(super) fn run(serving: &Arc<Serving>, job: &Job, image: &Arc<Image>) -> Result<String> {
    let volume = image.check_merge()?;
    job.begin(volume.size_bytes());
    let mut options = serving.settings_of(&job.disk)?.image;
    if !job.goes_on {
        // Another user of the image below will not go away.
        options.lock_timeout = Duration::ZERO;
    }
    let mut merge = Merge::begin(volume, LAST_STEP_TIMEOUT).map_err(|why| anyhow!(why))?;
    image.begin_commit(serving.shared_opener().as_ref(), &options, &mut merge)?;
    let mut running = Running { merge: Some(merge), image: Arc::clone(image), unsynced: 0 };
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

/// Whether the guest can pause for what is left. A step that must wait may hide more.
fn is_little(step: &Merged, image: &Image) -> Result<bool> {
    let has_looked = step.to == image.check_merge()?.size_bytes();
    Ok(has_looked && step.left_bytes <= LAST_BYTES && !step.must_wait)
}

impl Running {
    fn merge(&mut self) -> Result<&mut Merge> {
        self.merge.as_mut().context("the last step has begun")
    }

    fn step(&mut self) -> Result<Merged> {
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
            job.note(&step)?;
            if is_little(&step, &self.image)? {
                // So that little is left to sync while the guest pauses.
                return self.sync();
            }
        }
    }

    /// Copies what the guest has written while the job waited for its last step. Returns whether little is left.
    fn catch_up(&mut self, job: &Job) -> Result<bool> {
        let end = Instant::now() + CATCH_UP;
        while Instant::now() < end {
            let step = self.step()?;
            job.note(&step)?;
            if is_little(&step, &self.image)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The last step.
    fn go_on_below(mut self, serving: &Serving, job: &Job) -> Result<String> {
        let settings = serving.settings_of(&job.disk)?;
        let (path, format) = self.image.image_below()?;
        let format = if format == DiskFormat::Qcow2 { Format::Qcow2 } else { Format::Raw };
        let changed = serving.settings_with(&job.disk, &path, format, &self.image)?;
        let (image, mut merge) = (Arc::clone(&self.image), self.merge.take());
        let has_switched = Arc::new(AtomicBool::new(false));
        let open = |_: usize, old: Arc<Image>| -> Result<Replacement> {
            let merge = merge.take().context("the disk's image is opened twice")?;
            if !Arc::ptr_eq(&old, &image) {
                abandon(&image, merge);
                bail!("the disk has another image now");
            }
            let (opener, sources) = (serving.shared_opener(), Arc::clone(&serving.sources));
            let (options, changed) = (settings.image.clone(), changed.clone());
            let late = Arc::clone(&image);
            let open = move || match open_below(&old, opener.as_ref(), &options, merge) {
                Ok(below) => sources.replacement(below, &changed).inspect_err(|_| old.free_below()),
                Err(why) => Err(why),
            };
            within(LAST_STEP_TIMEOUT, open, move |_| late.free_below())
        };
        let settle = |new: &[Arc<Image>]| -> Result<()> {
            let [new] = new else { bail!("one image was expected") };
            let (old, new, late) = (Arc::clone(&image), Arc::clone(new), Arc::clone(&image));
            within(LAST_STEP_TIMEOUT, move || Ok(old.give_up_for(&new)?), move |()| late.take_back())?;
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
                None => image.free_below(),
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
    // These tables are not needed any more if the guest goes on below; if not, they must be closed.
    merge.end(LAST_STEP_TIMEOUT).map_err(|why| anyhow!(why))?;
    opened
}

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
