//! Runs a job on a target: opens it, starts the threads together, takes samples, collects the measurements.
//!
//! `open target → a port per thread → gate → work … every 100 ms: progress, events; every 500 ms: a sample → Outcome`
//!
//! - The first thread that fails ends the others; the outcome then has the error and the measurements so far.
//! - Opening, connecting, filling buffers and reading back for verify are not measured.
//!
//! See also: one thread (`worker.rs`), sampling (`watcher.rs`).

pub(crate) mod offsets;

mod opened;

pub(crate) mod outcome;

mod pace;

mod touch;

pub(crate) mod verify;

mod watcher;

pub(crate) mod worker;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use io_engine::EngineKind;

use self::opened::{Opened, Start};
use self::outcome::{Outcome, Watch};
use self::touch::touch;
use self::watcher::{Ended, Watcher};
use self::worker::{Common, Failure, Live, Worker};
use crate::error::RunError;
use crate::job::{Job, Limits};
use crate::measured::{Measured, QueueCounts};
use crate::stop::Stop;
use crate::target::connection::Connection;
use crate::target::port::PortError;
use crate::target::{Client, Target};

/// Runs `job` on `target` until it ends or the user stops it.
///
/// # Errors
/// [`RunError`] if the job could not begin. Later failures are in the [`Outcome`].
pub fn run(
    job: &Job,
    target: &Target,
    client: &Client,
    stop: &Stop,
    watch: &mut dyn Watch,
) -> Result<Outcome, RunError> {
    let job = &as_engine_can(job, target, watch);
    job.check()?;
    check_cpus(client)?;
    let mut opened = Opened::open(job, target, client)?;
    let limits = opened.limits();
    job.check_on(&limits)?;
    let begin = |error: PortError| RunError::Begin(error.0);
    let starts: Result<Vec<_>, _> = (0..job.jobs).map(|clone| opened.start(job, clone)).collect();
    let starts = starts.map_err(begin)?;

    let failed = AtomicBool::new(false);
    let lives: Vec<Live> = (0..job.jobs).map(|_| Live::default()).collect();
    let batch = job.batch.unwrap_or_else(|| opened.usual_batch(job));
    let common = Common { job, stop, failed: &failed, poll: client.poll, patience: client.patience(), batch };
    let crew = Crew { common, client, lives: &lives, device_bytes: limits.size_bytes, gate: Gate::default() };
    let server = opened.connection().and_then(Connection::peer_pid).filter(|&pid| !is_own(pid));
    let watcher =
        Watcher { job, target, opened: &opened, lives: &lives, server, stop, total: total(job, &limits) };
    std::thread::scope(|scope| {
        let (sender, ended) = channel();
        for (clone, start) in (0_u32..).zip(starts) {
            let (sender, crew) = (sender.clone(), &crew);
            let thread = std::thread::Builder::new().name(format!("bench-{clone}"));
            let spawned = thread.spawn_scoped(scope, move || crew.work(clone, start, &sender));
            if let Err(error) = spawned {
                failed.store(true, Relaxed);
                crew.gate.open();
                let why = format!("thread {clone} of {} cannot be started: {error}", job.jobs);
                return Err(RunError::Begin(why));
            }
        }
        drop(sender);
        crew.gate.wait_for(job.jobs);
        watch.began();
        crew.gate.open();
        let outcome = watcher.collect(&ended, watch);
        watch.ended();
        outcome
    })
}

/// As in fio, an engine with synchronous calls has one request in flight; the job's depth has no effect.
fn as_engine_can(job: &Job, target: &Target, watch: &mut dyn Watch) -> Job {
    let engine = match target {
        Target::File(_, engine) => Some(engine.unwrap_or(job.engine)),
        Target::Socket(_) => None,
    };
    if engine != Some(EngineKind::Sync) || job.depth == 1 {
        return job.clone();
    }
    watch.event(&format!("note: psync makes one call at a time, so iodepth={} becomes 1", job.depth));
    Job { depth: 1, ..job.clone() }
}

/// Makes threads wait until all are ready.
#[derive(Debug, Default)]
struct Gate {
    /// How many threads wait, and whether the gate is open.
    state: Mutex<(u32, bool)>,
    bell: Condvar,
}

impl Gate {
    /// Waits until the gate opens.
    fn pass(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 += 1;
        self.bell.notify_all();
        drop(self.bell.wait_while(state, |(_, open)| !*open));
    }

    /// Waits until `threads` threads wait at the gate.
    fn wait_for(&self, threads: u32) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.bell.wait_while(state, |(waiting, _)| *waiting < threads));
    }

    fn open(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.bell.notify_all();
    }
}

/// The data that all threads need at their start.
struct Crew<'r> {
    common: Common<'r>,
    client: &'r Client,
    lives: &'r [Live],
    device_bytes: u64,
    gate: Gate,
}

impl Crew<'_> {
    /// A thread's entire run.
    fn work(&self, clone: u32, start: Start, sender: &Sender<Ended>) {
        let failed = self.common.failed;
        let worker = self.prepare(clone, start);
        if worker.is_err() {
            failed.store(true, Relaxed);
        }
        self.gate.pass();
        let nothing = |failure| (Measured::default(), QueueCounts::default(), Err(failure));
        let (measured, counts, result) = worker.map_or_else(nothing, |worker| worker.run(Instant::now()));
        if result.is_err() {
            failed.store(true, Relaxed);
        }
        // Fails only if the run has ended already and dropped the receiver.
        let _ = sender.send(Ended { clone: clone as usize, measured, counts, result });
    }

    fn prepare(&self, clone: u32, start: Start) -> Result<Worker<'_>, Failure> {
        pin(self.client, clone).map_err(|error| Failure::Target(error.to_string()))?;
        let mut port = start.port(self.common.job)?;
        let Common { job, stop, patience, .. } = self.common;
        let span = job.span(clone, self.device_bytes);
        if job.touch {
            touch(port.as_mut(), job, span, patience, stop)?;
        }
        let mut worker = Worker::new(self.common, clone, span, &self.lives[clone as usize], port);
        worker.prepare(clone)?;
        Ok(worker)
    }
}

fn is_own(pid: i32) -> bool {
    u32::try_from(pid) == Ok(std::process::id())
}

/// Transfers that all threads together will make; `None` if only the time limit ends the run.
fn total(job: &Job, limits: &Limits) -> Option<u64> {
    let each = |clone| job.span(clone, limits.size_bytes).blocks.saturating_mul(job.loops.into());
    (!job.time_based).then(|| (0..job.jobs).map(each).fold(0, u64::saturating_add))
}

fn pin(client: &Client, clone: u32) -> Result<(), RunError> {
    let Some(&cpu) = client.cpus.get(clone as usize % client.cpus.len().max(1)) else { return Ok(()) };
    let source = |error: rustix::io::Errno| RunError::Pin { cpu, allowed: allowed(), source: error.into() };
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(source(rustix::io::Errno::INVAL)); // more than a set holds: `set` would panic
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).map_err(source)
}

/// The CPUs that this process may use, as the kernel reports them.
fn allowed() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None);
    set.map(|set| (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
        .unwrap_or_default()
}

/// Checks the CPUs on a separate thread, before anything else happens.
fn check_cpus(client: &Client) -> Result<(), RunError> {
    for (clone, _) in (0..).zip(&client.cpus) {
        let tried = std::thread::scope(|scope| scope.spawn(|| pin(client, clone)).join());
        tried.unwrap_or_else(|_| Err(RunError::Begin("a thread ended unexpectedly".to_owned())))?;
    }
    Ok(())
}
