//! Jobs that merge a disk's layers, or free leaked clusters: at most one for each disk, on a thread of its own.
//!
//! ```text
//! start → thread: step, pause or rate limit, step, … → the last step, with the guest paused → outcome
//!            ▲ change, cancel, suspend (live upgrade: the new server starts the job again)
//! ```
//!
//! - What a job has copied stays in the image. A stream that is started again skips it; a commit or a reclaim starts from
//!   the beginning.
//! - The outcome of a disk's last job is kept until the next one.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use disk_image::volume::link::Progress;
use tracing::{error, info};

use crate::control::answers::jobs::{JobReport, JobState};
use crate::control::protocol::verbs::{JobChange, JobKind, JobStart};

/// How long a cancelled job may take for its last step.
pub(super) const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);
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
    pub is_restarted: bool,
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
    progress: Progress,
    copied_bytes: u64,
    /// What the disk's next start needs, or why the job has failed.
    outcome: Option<Result<Option<String>, Ended>>,
}

/// How a job has ended that has not done its work.
#[derive(Clone, Debug)]
enum Ended {
    Cancelled,
    /// For people.
    Failed(String),
}

/// The job was cancelled.
#[derive(Debug, thiserror::Error)]
#[error("cancelled")]
pub(super) struct Cancelled;

impl Job {
    pub(super) fn new(new: &JobStart, is_restarted: bool) -> Self {
        let state = State {
            rate: new.rate,
            is_paused: new.paused,
            is_cancelled: false,
            size_bytes: 0,
            progress: Progress::default(),
            copied_bytes: 0,
            outcome: None,
        };
        let (disk, kind) = (new.disk.clone(), new.kind);
        Self { disk, kind, is_restarted, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, size_bytes: u64) {
        self.state().size_bytes = size_bytes;
    }

    /// Records a step, and waits until the next one may begin.
    pub(super) fn record_and_wait(&self, step: &Progress) -> Result<(), Cancelled> {
        self.record(step)?;
        self.wait(step.copied_bytes)
    }

    /// Records a step.
    pub(super) fn record(&self, step: &Progress) -> Result<(), Cancelled> {
        let mut state = self.state();
        state.progress = *step;
        state.copied_bytes += step.copied_bytes;
        let is_cancelled = state.is_cancelled;
        drop(state);
        if step.waits_for_requests {
            std::thread::sleep(SOON);
        }
        if is_cancelled { Err(Cancelled) } else { Ok(()) }
    }

    /// Waits as long as the rate limit requires after this many bytes, and while the job is paused.
    pub(super) fn wait(&self, copied_bytes: u64) -> Result<(), Cancelled> {
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

    pub(super) fn is_running(&self) -> bool {
        self.state().outcome.is_none()
    }

    pub(super) fn change(&self, change: &JobChange) {
        let mut state = self.state();
        state.is_paused = change.paused.unwrap_or(state.is_paused);
        state.rate = change.rate.unwrap_or(state.rate);
        drop(state);
        self.changed.notify_all();
    }

    pub(super) fn end(&self, outcome: Result<Option<String>>) {
        let (disk, kind) = (&self.disk, self.kind.word());
        let outcome = match outcome {
            Ok(keys) => {
                info!(disk, job = kind, "the job has completed");
                Ok(keys)
            }
            Err(why) if why.is::<Cancelled>() => {
                info!(disk, job = kind, "the job was cancelled");
                Err(Ended::Cancelled)
            }
            Err(why) => {
                error!(disk, job = kind, "the job has failed, and the guest stays in its image: {why:#}");
                Err(Ended::Failed(format!("{why:#}")))
            }
        };
        self.state().outcome = Some(outcome);
        self.changed.notify_all();
    }

    pub(super) fn tell_to_end(&self) {
        self.state().is_cancelled = true;
        self.changed.notify_all();
    }

    /// Waits until the job has ended. Returns whether it has done its work.
    pub(super) fn wait_ended(&self, deadline: Instant) -> Result<bool> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(self.state(), left, |state| state.outcome.is_none());
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &state.outcome {
            Some(outcome) => Ok(outcome.is_ok()),
            None => bail!(
                "the {} of disk {} has not ended after {} s: check the storage of its images",
                self.kind.word(),
                self.disk,
                CANCEL_TIMEOUT.as_secs()
            ),
        }
    }

    /// Cancels the job, and waits until it has ended. Returns whether it has done its work nevertheless.
    pub(super) fn cancel(&self) -> Result<bool> {
        self.tell_to_end();
        self.wait_ended(Instant::now() + CANCEL_TIMEOUT)
    }

    pub(super) fn report(&self) -> JobReport {
        let state = self.state();
        let (progress, is_reclaim) = (state.progress, self.kind == JobKind::Reclaim);
        let state_word = match &state.outcome {
            None if state.is_paused => JobState::Paused,
            None => JobState::Running,
            Some(Ok(_)) => JobState::Completed,
            Some(Err(Ended::Cancelled)) => JobState::Cancelled,
            Some(Err(Ended::Failed(_))) => JobState::Failed,
        };
        let (error, keys) = match &state.outcome {
            Some(Err(Ended::Failed(why))) => (Some(why.clone()), None),
            Some(Ok(keys)) => (None, keys.clone()),
            _ => (None, None),
        };
        JobReport {
            disk: self.disk.clone(),
            kind: self.kind,
            state: state_word,
            size_bytes: state.size_bytes,
            scanned_bytes: progress.to,
            pending_bytes: progress.pending_bytes,
            copied_bytes: state.copied_bytes,
            freed_clusters: is_reclaim.then_some(progress.freed_clusters),
            freed_bytes: is_reclaim.then_some(progress.freed_bytes),
            rate: Some(state.rate).filter(|rate| *rate > 0),
            error,
            keys,
        }
    }

    /// The same job, to be started again.
    pub(super) fn restart_request(&self) -> JobStart {
        let state = self.state();
        let (disk, kind, rate) = (self.disk.clone(), self.kind, state.rate);
        JobStart { disk, kind, rate, paused: state.is_paused }
    }
}

/// If a job's thread panics, the job has failed.
pub(super) struct EndOnPanic<'a>(pub &'a Job);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.end(Err(anyhow!("its thread has panicked")));
        }
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
    pub(super) fn list(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Job>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn find(&self, disk: &str) -> Option<Arc<Job>> {
        self.list().get(disk).map(Arc::clone)
    }

    pub(super) fn running(&self) -> Vec<Arc<Job>> {
        self.list().values().filter(|job| job.is_running()).map(Arc::clone).collect()
    }
}
