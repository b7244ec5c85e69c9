//! Jobs that merge a disk's layers: at most one for each disk, on a thread of its own.
//!
//! ```text
//! start → thread: step, pause or rate limit, step, … → the last step, with the guest paused → outcome
//!            ▲ change, cancel, suspend (live upgrade: the new server starts the job again)
//! ```
//!
//! - What a job has done stays in the image. So a job that was cancelled, or whose server was killed, goes on from there when
//!   it is started again; a commit copies again.
//! - The outcome of a disk's last job is kept until the next one.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use disk_image::volume::link::Merged;
use tracing::{error, info};

use super::{commit, stream};
use crate::control::answers::jobs::{JobReport, JobState};
use crate::control::protocol::verbs::{JobChange, JobKind, JobStart};
use crate::serving::Serving;

/// How long a cancelled job may take for its last step.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a waiting job looks whether it was cancelled.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How long to wait for requests that a step must wait for.
const SOON: Duration = Duration::from_millis(1);
/// The longest sleep of a job that nothing wakes.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// How long the guest's requests may take before the last step, which the guest waits for.
pub(super) const LAST_STEP_TIMEOUT: Duration = Duration::from_secs(10);

/// The jobs, by disk.
#[derive(Debug, Default)]
pub struct Jobs(Mutex<BTreeMap<String, Arc<Job>>>);

/// A job.
#[derive(Debug)]
pub struct Job {
    pub disk: String,
    pub kind: JobKind,
    /// It ran in another server, which may hold locks for a moment.
    pub goes_on: bool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// 0: no limit.
    rate: u64,
    is_paused: bool,
    is_cancelled: bool,
    size_bytes: u64,
    progress: Merged,
    copied_bytes: u64,
    /// What the disk's next start needs, or why the job has failed.
    outcome: Option<Result<Option<String>, String>>,
}

/// The job was cancelled.
#[derive(Debug, thiserror::Error)]
#[error("cancelled")]
pub(super) struct Cancelled;

impl Job {
    fn new(new: &JobStart, goes_on: bool) -> Self {
        let state = State {
            rate: new.rate,
            is_paused: new.paused,
            is_cancelled: false,
            size_bytes: 0,
            progress: Merged::default(),
            copied_bytes: 0,
            outcome: None,
        };
        let (disk, kind) = (new.disk.clone(), new.kind);
        Self { disk, kind, goes_on, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, size_bytes: u64) {
        self.state().size_bytes = size_bytes;
    }

    /// Notes a step, and waits until the next one may begin.
    pub(super) fn note(&self, step: &Merged) -> Result<(), Cancelled> {
        let mut state = self.state();
        state.progress = *step;
        state.copied_bytes += step.copied_bytes;
        drop(state);
        if step.must_wait {
            std::thread::sleep(SOON);
        }
        self.wait(step.copied_bytes)
    }

    /// Waits as long as the rate limit requires after this many bytes, and while the job is paused.
    fn wait(&self, copied_bytes: u64) -> Result<(), Cancelled> {
        let begin = Instant::now();
        let mut state = self.state();
        loop {
            let left = time_of(copied_bytes, state.rate).saturating_sub(begin.elapsed());
            match left {
                _ if state.is_cancelled => return Err(Cancelled),
                Duration::ZERO if !state.is_paused => return Ok(()),
                _ => {}
            }
            let left = if state.is_paused { LONGEST_WAIT } else { left.min(LONGEST_WAIT) };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn is_running(&self) -> bool {
        self.state().outcome.is_none()
    }

    fn change(&self, change: &JobChange) {
        let mut state = self.state();
        state.is_paused = change.paused.unwrap_or(state.is_paused);
        state.rate = change.rate.unwrap_or(state.rate);
        drop(state);
        self.changed.notify_all();
    }

    fn end(&self, outcome: Result<Option<String>>) {
        let (disk, kind) = (&self.disk, self.kind.word());
        let outcome = match outcome {
            Ok(keys) => {
                info!(disk, job = kind, "the job has ended");
                Ok(keys)
            }
            Err(why) if why.is::<Cancelled>() => {
                info!(disk, job = kind, "the job was cancelled");
                Err("cancelled".to_owned())
            }
            Err(why) => {
                error!(disk, job = kind, "the job has failed, and the disk goes on as before: {why:#}");
                Err(format!("{why:#}"))
            }
        };
        self.state().outcome = Some(outcome);
        self.changed.notify_all();
    }

    /// Cancels the job, and waits until it has ended.
    fn cancel(&self) -> Result<()> {
        let mut state = self.state();
        state.is_cancelled = true;
        self.changed.notify_all();
        let waited = self.changed.wait_timeout_while(state, CANCEL_TIMEOUT, |state| state.outcome.is_none());
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match state.outcome {
            Some(_) => Ok(()),
            None => bail!(
                "the {} of disk {} has not ended after {} s: check the storage of its images",
                self.kind.word(),
                self.disk,
                CANCEL_TIMEOUT.as_secs()
            ),
        }
    }

    fn report(&self) -> JobReport {
        let state = self.state();
        let (progress, state_word) = (
            state.progress,
            match &state.outcome {
                None if state.is_paused => JobState::Paused,
                None => JobState::Running,
                Some(Ok(_)) => JobState::Ended,
                Some(Err(_)) => JobState::Failed,
            },
        );
        JobReport {
            disk: self.disk.clone(),
            kind: self.kind,
            state: state_word,
            size_bytes: state.size_bytes,
            looked_bytes: progress.to,
            left_bytes: progress.left_bytes,
            copied_bytes: state.copied_bytes,
            rate: Some(state.rate).filter(|rate| *rate > 0),
            error: state.outcome.as_ref().and_then(|outcome| outcome.clone().err()),
            keys: state.outcome.as_ref().and_then(|outcome| outcome.clone().ok().flatten()),
        }
    }

    /// The same job, to be started again.
    fn again(&self) -> JobStart {
        let state = self.state();
        let (disk, kind, rate) = (self.disk.clone(), self.kind, state.rate);
        JobStart { disk, kind, rate, paused: state.is_paused }
    }
}

/// `rate`: 0 is no limit.
fn time_of(bytes: u64, rate: u64) -> Duration {
    if rate == 0 {
        return Duration::ZERO;
    }
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

impl Jobs {
    fn list(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Job>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, disk: &str) -> Option<Arc<Job>> {
        self.list().get(disk).map(Arc::clone)
    }

    fn running(&self) -> Vec<Arc<Job>> {
        self.list().values().filter(|job| job.is_running()).map(Arc::clone).collect()
    }
}

impl Serving {
    /// Starts a job. `self`: the job's thread uses the server until the job's end.
    ///
    /// # Errors
    /// The disk has nothing to merge, or a job already.
    pub fn start_job(self: &Arc<Self>, new: &JobStart) -> Result<()> {
        self.start(new, false)
    }

    fn start(self: &Arc<Self>, new: &JobStart, goes_on: bool) -> Result<()> {
        let _change = self.begin_change()?;
        self.refuse_job(&new.disk)?;
        let image = self.with_server(|server| server.image(&new.disk))??;
        image.check_merge()?;
        let job = Arc::new(Job::new(new, goes_on));
        let (serving, own) = (Arc::clone(self), Arc::clone(&job));
        let run = move || {
            let outcome = match own.kind {
                JobKind::Stream => stream::run(&serving, &own, &image).map(|()| None),
                JobKind::Commit => commit::run(&serving, &own, image).map(Some),
            };
            own.end(outcome);
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
    /// The disk has none.
    pub fn change_job(&self, change: &JobChange) -> Result<()> {
        self.running_job(&change.disk)?.change(change);
        Ok(())
    }

    /// Cancels a running job, and waits until it has ended.
    ///
    /// # Errors
    /// The disk has none; its storage hangs.
    pub fn cancel_job(&self, disk: &str) -> Result<()> {
        self.running_job(disk)?.cancel()
    }

    fn running_job(&self, disk: &str) -> Result<Arc<Job>> {
        let running = self.jobs.find(disk).filter(|job| job.is_running());
        running.ok_or_else(|| anyhow!("disk {disk} has no running job: bareblk ctl jobs shows all"))
    }

    /// Before a disk is removed: ends its job if that must be, else refuses.
    pub(in crate::serving) fn end_job(&self, disk: &str, force: bool) -> Result<()> {
        match self.jobs.find(disk).filter(|job| force && job.is_running()) {
            Some(job) => job.cancel(),
            None => self.refuse_job(disk),
        }
    }

    /// After a disk was removed.
    pub(in crate::serving) fn forget_job(&self, disk: &str) {
        self.jobs.list().remove(disk);
    }

    /// Ends all jobs, and returns them, to be started again. The caller has begun a change, so no job starts meanwhile.
    pub fn suspend_jobs(&self) -> Result<Vec<JobStart>> {
        let running = self.jobs.running();
        let new: Vec<JobStart> = running.iter().map(|job| job.again()).collect();
        running.iter().try_for_each(|job| job.cancel())?;
        Ok(new)
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
