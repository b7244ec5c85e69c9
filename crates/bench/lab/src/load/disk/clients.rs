//! A load on a server's socket, sent by this project's driver with one thread and one queue per job, and the server's
//! cost.
//!
//! `warm up (own connection) → connect → touch (whole file) → server's cost → job → server's cost → Figures`
//! - A server that maps its file takes a page fault on each page's first use, in every new session. The client
//!   therefore reads the whole file before the sample.

use std::path::Path;
use std::time::{Duration, Instant};

use workload::{Client, Failure, Mix, Order, Pattern, Progress, RunError, Target, Watch, run};

use crate::experiment::SampleError;
use crate::load::server::cost::Cost;
use crate::load::server::process::ServerProcess;
use crate::load::{BlockJob, Figures, WARM_UP};
use crate::stop::Stop;

/// A server that has created its socket may not listen on it yet.
const PATIENCE: Duration = Duration::from_secs(5);
/// Shortest warm-up in seconds: the first requests always run with cold caches.
const WARM_UP_MIN: f64 = 0.02;

/// Measures a load of clients. If `touches`, reads the whole file first.
pub(crate) fn measure(
    server: &ServerProcess,
    job: &BlockJob,
    client: &Client,
    touches: bool,
    stop: &Stop,
) -> Result<Figures, SampleError> {
    let mut meter = Meter { pid: server.pid(), began: Cost::default(), ended: Cost::default() };
    go(server.socket(), &timed(job, warm_up_seconds(job)), client, stop, &mut meter)?;
    let measured = workload::Job { touch: touches, ..timed(job, job.seconds) };
    let outcome = go(server.socket(), &measured, client, stop, &mut meter)?;
    Ok(figures(&outcome, meter.ended.since(meter.began)))
}

/// Measures the server's process when the requests begin and when they have ended.
struct Meter {
    pid: u32,
    began: Cost,
    ended: Cost,
}

impl Watch for Meter {
    fn began(&mut self) {
        self.began = Cost::of(self.pid);
    }

    fn ended(&mut self) {
        self.ended = Cost::of(self.pid);
    }

    fn tick(&mut self, _: &Progress) {}

    fn event(&mut self, _: &str) {}
}

/// Returns the duration of the uncounted warm-up.
pub(crate) fn warm_up_seconds(job: &BlockJob) -> f64 {
    (job.seconds * WARM_UP).max(WARM_UP_MIN)
}

/// Runs `job` once. If the run fails, the sample fails.
pub(crate) fn go(
    socket: &Path,
    job: &workload::Job,
    client: &Client,
    stop: &Stop,
    watch: &mut dyn Watch,
) -> Result<workload::Outcome, SampleError> {
    let outcome = go_on(socket, job, client, stop, watch)?;
    match &outcome.failure {
        Some(failure) => Err(SampleError::because("the load ended", failure)),
        None => Ok(outcome),
    }
}

/// Runs `job` once. An unanswered request ends the run but is no error: the outcome records it.
pub(crate) fn go_on(
    socket: &Path,
    job: &workload::Job,
    client: &Client,
    stop: &Stop,
    watch: &mut dyn Watch,
) -> Result<workload::Outcome, SampleError> {
    let target = Target::Socket(socket.to_path_buf());
    let end = Instant::now() + PATIENCE;
    let outcome = loop {
        match run(job, &target, client, stop, watch) {
            Err(RunError::Refused { .. }) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(5))
            }
            other => break other.map_err(|error| SampleError::because("the load", &words(&error)))?,
        }
    };
    match &outcome.failure {
        _ if stop.is_asked() => Err(SampleError::Interrupted),
        None | Some(Failure::Silence { .. }) => Ok(outcome),
        Some(failure) => Err(SampleError::because("the load ended", failure)),
    }
}

/// The error with its causes: without them, a connection's error names only the socket.
fn words(error: &RunError) -> String {
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// A copy of the job that lasts `seconds`.
pub(crate) fn timed(job: &BlockJob, seconds: f64) -> workload::Job {
    workload::Job {
        pattern: Pattern { order: Order::Random, mix: if job.writes { Mix::Write } else { Mix::Read } },
        block_bytes: job.block_bytes,
        depth: job.depth,
        jobs: job.jobs.into(),
        runtime: Some(Duration::from_secs_f64(seconds)),
        time_based: true,
        seed: job.seed,
        group_reporting: true,
        ..workload::Job::default()
    }
}

#[allow(clippy::cast_precision_loss)] // counts and times of one sample
fn figures(outcome: &workload::Outcome, server: Cost) -> Figures {
    let group = outcome.group();
    let ios = group.ios().max(1) as f64;
    let client = group.cpu.user + group.cpu.system;
    let mut spread = group.directions[0].clat.clone();
    spread.merge(&group.directions[1].clat);
    let mut figures = Figures::from([
        ("iops", group.iops()),
        ("cpu", server.cpu_ns as f64 / 1000.0 / ios),
        ("client-cpu", client.as_nanos() as f64 / 1000.0 / ios),
        ("latency", group.mean_lat_ns() / 1000.0),
        ("p50", spread.percentile_ns(50.0) as f64 / 1000.0),
        ("p99", spread.percentile_ns(99.0) as f64 / 1000.0),
        ("switches", server.switches as f64 / ios),
        ("kicks", outcome.queues.kicks as f64 / ios),
        ("client-sleeps", outcome.queues.sleeps as f64 / ios),
    ]);
    figures.extend(server.writes.map(|writes| ("writes", writes as f64 / ios)));
    figures
}
