//! Starts, changes and ends jobs.
//!
//! `start → thread: stream.rs | commit.rs | reclaim.rs → outcome`

use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use tracing::error;

use super::job::{CANCEL_TIMEOUT, Cancelled, EndOnPanic, Job};
use super::{commit, reclaim, stream};
use crate::control::answers::jobs::JobReport;
use crate::control::protocol::verbs::{JobChange, JobKind, JobStart};
use crate::serving::Serving;

/// How often a waiting job looks whether it was cancelled.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A reclaim copies nothing.
fn refuse_rate(kind: JobKind, rate: u64) -> Result<()> {
    if kind == JobKind::Reclaim && rate > 0 {
        bail!(
            "a reclaim copies nothing, so it has no rate limit: pause it instead (bareblk ctl job DISK --pause)"
        );
    }
    Ok(())
}

impl Serving {
    /// Starts a job. `self`: the job's thread uses the server until the job's end.
    ///
    /// # Errors
    /// The disk has nothing to merge or no tables, or a job already.
    pub fn start_job(self: &Arc<Self>, new: &JobStart) -> Result<()> {
        self.start(new, false)
    }

    fn start(self: &Arc<Self>, new: &JobStart, is_restarted: bool) -> Result<()> {
        let _change = self.begin_change()?;
        self.refuse_job(&new.disk)?;
        let image = self.with_server(|server| server.image(&new.disk))??;
        refuse_rate(new.kind, new.rate)?;
        match new.kind {
            JobKind::Stream | JobKind::Commit => image.check_merge()?,
            JobKind::Reclaim => image.check_reclaim()?,
        };
        let job = Arc::new(Job::new(new, is_restarted));
        let (serving, own) = (Arc::clone(self), Arc::clone(&job));
        let run = move || {
            let end = EndOnPanic(&own);
            let outcome = match own.kind {
                JobKind::Stream => stream::run(&serving, &own, &image).map(|()| None),
                JobKind::Commit => commit::run(&serving, &own, &image).map(Some),
                JobKind::Reclaim => reclaim::run(&own, &image).map(|()| None),
            };
            // Its lock must be free when the job counts as ended.
            drop(image);
            own.end(outcome);
            drop(end);
        };
        let mut list = self.jobs.list();
        std::thread::Builder::new()
            .name("bareblk-job".into())
            .spawn(run)
            .context("cannot start the job's thread")?;
        list.insert(new.disk.clone(), job);
        Ok(())
    }

    /// Refuses a change of a disk that has a running job.
    pub(super) fn refuse_job(&self, disk: &str) -> Result<()> {
        match self.jobs.find(disk).filter(|job| job.is_running()) {
            None => Ok(()),
            Some(job) => bail!(
                "disk {disk} has a running job ({}): wait until it has ended, or cancel it (bareblk ctl job {disk} --cancel)",
                job.kind.word()
            ),
        }
    }

    /// All jobs, also those that have ended.
    pub fn jobs(&self) -> Vec<JobReport> {
        self.jobs.list().values().map(|job| job.report()).collect()
    }

    /// Changes a running job.
    ///
    /// # Errors
    /// The disk has none, or it has no rate.
    pub fn change_job(&self, change: &JobChange) -> Result<()> {
        let job = self.running_job(&change.disk)?;
        refuse_rate(job.kind, change.rate.unwrap_or_default())?;
        job.change(change);
        Ok(())
    }

    /// Cancels a running job, and waits until it has ended.
    ///
    /// # Errors
    /// The disk has none; its storage hangs.
    pub fn cancel_job(&self, disk: &str) -> Result<()> {
        let job = self.running_job(disk)?;
        if job.cancel()? {
            bail!(
                "the {} of disk {disk} had completed already: bareblk ctl jobs shows what the next start needs",
                job.kind.word()
            );
        }
        Ok(())
    }

    fn running_job(&self, disk: &str) -> Result<Arc<Job>> {
        let running = self.jobs.find(disk).filter(|job| job.is_running());
        running.ok_or_else(|| anyhow!("disk {disk} has no running job: bareblk ctl jobs lists the jobs"))
    }

    /// Before a disk is removed: ends its job if that must be, else refuses.
    pub(in crate::serving) fn cancel_or_refuse_job(&self, disk: &str, force: bool) -> Result<()> {
        match self.jobs.find(disk).filter(|job| force && job.is_running()) {
            Some(job) => job.cancel().map(drop),
            None => self.refuse_job(disk),
        }
    }

    /// After a disk was removed.
    pub(in crate::serving) fn forget_job(&self, disk: &str) {
        self.jobs.list().remove(disk);
    }

    /// Ends all jobs, and adds those that have not done their work to `jobs`, to be started again. The caller has begun a
    /// change, so no job starts meanwhile.
    ///
    /// # Errors
    /// A job does not end in time; `jobs` has it, too.
    pub fn suspend_jobs(&self, jobs: &mut Vec<JobStart>) -> Result<()> {
        let running = self.jobs.running();
        running.iter().for_each(|job| job.tell_to_end());
        let deadline = Instant::now() + CANCEL_TIMEOUT;
        let mut ended = Ok(());
        for job in running {
            match job.wait_ended(deadline) {
                Ok(true) => continue,
                Ok(false) => {}
                Err(why) => ended = Err(why),
            }
            jobs.push(job.restart_request());
        }
        ended
    }

    /// Starts jobs again after [`Serving::suspend_jobs`], or of another server.
    pub fn resume_jobs(self: &Arc<Self>, jobs: &[JobStart]) {
        for job in jobs {
            if let Err(why) = self.start(job, true) {
                error!(disk = job.disk, job = job.kind.word(), "cannot start the job again: {why:#}");
            }
        }
    }

    /// Waits until the job is not paused, and no other change runs.
    pub(super) fn begin_last_step(&self, job: &Job) -> Result<MutexGuard<'_, ()>, Cancelled> {
        loop {
            job.wait(0)?;
            match self.try_change() {
                Some(change) => return Ok(change),
                None => std::thread::sleep(LOOK_AGAIN),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_reclaim_has_no_rate() {
        assert!(refuse_rate(JobKind::Reclaim, 1).unwrap_err().to_string().contains("--pause"));
        assert!(refuse_rate(JobKind::Reclaim, 0).is_ok() && refuse_rate(JobKind::Stream, 1).is_ok());
    }
}
