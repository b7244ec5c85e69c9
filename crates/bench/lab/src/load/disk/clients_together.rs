//! A load on several disks of a server at once, and its total cost to the server.
//!
//! `a thread per disk: connect → wait for the others → cost of the server → … all have ended → cost again → Figures`
//!
//! - The loads start together, so that their rates can be added.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use workload::{Client, Failure, Measured, Outcome, Progress, Watch};

use super::clients::{go_on, timed, warm_up_seconds};
use crate::experiment::SampleError;
use crate::load::server::cost::Cost;
use crate::load::server::placed::PlacedServer;
use crate::load::server::stats::Stats;
use crate::load::{BlockJob, Figures};
use crate::stop::Stop;

/// Number of runs that ended because a request had no answer within the client's patience.
const UNANSWERED: &str = "unanswered";

/// Runs `job` on each disk of `server`, with clients that sleep.
pub(crate) fn measure(server: &PlacedServer, job: &BlockJob, stop: &Stop) -> Result<Figures, SampleError> {
    let figures = measure_on(server, server.sockets(), job, stop)?;
    match figures.get(UNANSWERED) {
        Some(&guests) if guests > 0.0 => {
            Err(SampleError::because("the load ended", &"a request was not answered"))
        }
        _ => Ok(figures),
    }
}

/// Runs `job` on some of the disks. Counts unanswered requests in a figure instead of failing.
pub(crate) fn measure_on(
    server: &PlacedServer,
    sockets: &[PathBuf],
    job: &BlockJob,
    stop: &Stop,
) -> Result<Figures, SampleError> {
    let warm_up = together(server, sockets, &timed(job, warm_up_seconds(job)), stop)?;
    let mut figures = together(server, sockets, &timed(job, job.seconds), stop)?;
    *figures.entry(UNANSWERED).or_default() += warm_up.get(UNANSWERED).copied().unwrap_or_default();
    Ok(figures)
}

fn together(
    server: &PlacedServer,
    sockets: &[PathBuf],
    job: &workload::Job,
    stop: &Stop,
) -> Result<Figures, SampleError> {
    let start = Start { server, disks: sockets.len(), state: Mutex::default(), bell: Condvar::new() };
    let run = |socket: &Path| {
        let outcome = go_on(socket, job, &Client::default(), stop, &mut Runner(&start));
        if outcome.is_err() {
            start.give_up();
        }
        outcome
    };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let runs: Vec<_> = sockets.iter().map(|socket| scope.spawn(|| run(socket))).collect();
        let broken = |_| Err(SampleError::Unavailable("a thread of the load panicked".to_owned()));
        runs.into_iter().map(|run| run.join().unwrap_or_else(broken)).collect()
    });
    let outcomes = outcomes.into_iter().collect::<Result<Vec<_>, _>>()?;
    let spent = start.spent().map_err(|error| SampleError::because("the server's counters", &error))?;
    Ok(figures(&outcomes, spent))
}

/// The server's cost and counts at one moment.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    cost: Cost,
    stats: Stats,
}

/// A barrier for the loads. One of the threads measures the server on behalf of all.
struct Start<'s> {
    server: &'s PlacedServer,
    disks: usize,
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Default)]
struct State {
    ready: usize,
    ended: usize,
    /// Set if a load failed and will never be ready.
    given_up: bool,
    before: Option<io::Result<Spent>>,
    after: Option<io::Result<Spent>>,
}

impl Start<'_> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when all loads are ready.
    fn ready(&self) {
        let mut state = self.state();
        state.ready += 1;
        if state.ready == self.disks {
            // Queried before the clock is read, so that the cost of the query is not counted.
            let stats = Stats::ask(self.server.control());
            state.before = Some(stats.map(|stats| Spent { cost: Cost::of(self.server.pid()), stats }));
            self.bell.notify_all();
        }
        drop(self.bell.wait_while(state, |state| state.ready < self.disks && !state.given_up));
    }

    fn ended(&self) {
        let mut state = self.state();
        state.ended += 1;
        if state.ended == self.disks {
            let cost = Cost::of(self.server.pid());
            state.after = Some(Stats::ask(self.server.control()).map(|stats| Spent { cost, stats }));
        }
    }

    fn give_up(&self) {
        self.state().given_up = true;
        self.bell.notify_all();
    }

    /// The server's cost and counts from the first request to the last.
    fn spent(self) -> io::Result<Spent> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (Some(before), Some(after)) = (state.before, state.after) else {
            return Err(io::Error::other("one of the loads did not start"));
        };
        let (before, after) = (before?, after?);
        Ok(Spent { cost: after.cost.since(before.cost), stats: after.stats.since(before.stats) })
    }
}

/// A watcher of one of the loads.
struct Runner<'s>(&'s Start<'s>);

impl Watch for Runner<'_> {
    fn began(&mut self) {
        self.0.ready();
    }

    fn ended(&mut self) {
        self.0.ended();
    }

    fn tick(&mut self, _: &Progress) {}

    fn event(&mut self, _: &str) {}
}

#[allow(clippy::cast_precision_loss)] // counts and times of one sample
fn figures(outcomes: &[Outcome], Spent { cost, stats }: Spent) -> Figures {
    let mut all = Measured::default();
    outcomes.iter().for_each(|outcome| all.merge(&outcome.group()));
    let mut spread = all.directions[0].clat.clone();
    spread.merge(&all.directions[1].clat);
    let percentile_us = |percent| spread.percentile_ns(percent) as f64 / 1000.0;
    let ios = all.ios().max(1) as f64;
    let per_io = |count: u64| count as f64 / ios;
    let kicks = outcomes.iter().map(|outcome| outcome.queues.kicks).sum();
    let client = all.cpu.user + all.cpu.system;
    let mut figures = Figures::from([
        ("iops", all.iops()),
        ("worst", outcomes.iter().map(|outcome| outcome.group().iops()).fold(f64::INFINITY, f64::min)),
        ("cpu", per_io(cost.cpu_ns) / 1000.0),
        ("client-cpu", client.as_nanos() as f64 / 1000.0 / ios),
        ("latency", all.mean_lat_ns() / 1000.0),
        ("p50", percentile_us(50.0)),
        ("p99", percentile_us(99.0)),
        ("p99.9", percentile_us(99.9)),
        ("max", percentile_us(100.0)),
        ("switches", per_io(cost.switches)),
        ("sleeps", per_io(stats.sleeps)),
        ("wakes", per_io(stats.completion_worker_wake_ups + stats.worker_wake_ups)),
        ("spared", per_io(stats.spared_wake_ups)),
        ("passed", per_io(stats.passed)),
        ("kicks", per_io(kicks)),
    ]);
    let silent = outcomes.iter().filter(|outcome| matches!(outcome.failure, Some(Failure::Silence { .. })));
    figures.insert(UNANSWERED, silent.count() as f64);
    let share = |part: u64, of: u64| (of > 0).then(|| part as f64 / of as f64);
    figures.extend(share(stats.ops, stats.hand_overs).map(|batch| ("batch", batch)));
    figures.extend(share(stats.contended, stats.locked).map(|share| ("contended", 100.0 * share)));
    if stats.locked > 0 {
        figures.extend([("lock-wait", per_io(stats.lock_wait_ns)), ("lock-takes", per_io(stats.locked))]);
    }
    figures
}
