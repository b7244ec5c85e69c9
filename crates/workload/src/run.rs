//! Runs a job on a target: opens it, starts the threads together, samples what they do, collects what they measured.
//!
//! `open target → a port per thread → gate → work … every 100 ms: progress, events; every 500 ms: a sample → Outcome`
//!
//! - The first thread that fails ends the others; what was measured until then is given beside the error.
//! - Not counted: opening, connecting, filling buffers, reading back for verify.
//!
//! Not here: one thread (`worker.rs`), layouts (`text.rs`, `json.rs`).

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blk_driver::ConnectError;
use disk_image::{Access, CacheMode, HostOpener, Image, ImageError, ImageOptions, LockHolder, SECTOR_BYTES};
use io_engine::EngineKind;

use crate::connection::Connection;
use crate::cpu::ProcessTime;
use crate::job::{Job, JobError, Limits};
use crate::measured::{Measured, QueueCounts, Sample};
use crate::port::{Port, PortError};
use crate::port_file::FilePort;
use crate::stop::Stop;
use crate::target::{Client, Target};
use crate::touch::touch;
use crate::units::list;
use crate::worker::{Common, Failure, Live, Worker};

/// Between two looks at progress and events.
const TICK: Duration = Duration::from_millis(100);
/// Between two samples: fio's `bwavgtime`.
const SAMPLE: Duration = Duration::from_millis(500);

/// For a file whose last user has just ended: io_uring lets go of it a little later.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a job could not be run at all.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Does not fit the target.
    #[error(transparent)]
    Job(#[from] JobError),
    /// No such path.
    #[error("socket {path:?} does not exist: start the back-end first")]
    NoSocket {
        /** As given. */
        path: PathBuf,
    },
    /// Something else.
    #[error("{path:?} is not a socket: use --file for a file or block device")]
    NotASocket {
        /** As given. */
        path: PathBuf,
    },
    /// Cannot be looked at.
    #[error("socket {path:?}")]
    Socket {
        /** As given. */
        path: PathBuf,
        /** From the kernel. */
        source: std::io::Error,
    },
    /// Nobody listens.
    #[error("socket {path:?} refuses connections: its back-end is gone, start it again")]
    Refused {
        /** As given. */
        path: PathBuf,
    },
    /// No session.
    #[error("socket {path:?}")]
    Connect {
        /** As given. */
        path: PathBuf,
        /** From the driver. */
        source: ConnectError,
    },
    /// More than a ring holds.
    #[error(
        "iodepth={depth} does not fit: a queue of {queue_size} descriptors holds {most} requests: give iodepth={most} \
         or less, more jobs, or a larger --queue-size (1024 at most)"
    )]
    Depth {
        /** `iodepth=`. */
        depth: u32,
        /** Requests. */
        most: u32,
        /** Descriptors. */
        queue_size: u32,
    },
    /// Jobs use one queue each.
    #[error(
        "queues={queues} are more than jobs={jobs}, and a job uses one: give as many jobs, or fewer queues"
    )]
    IdleQueues {
        /** Asked for. */
        queues: u16,
        /** `numjobs=`. */
        jobs: u32,
    },
    /// The file.
    #[error(transparent)]
    Image(ImageError),
    /// Somebody else writes to it, or would not have us write.
    #[error(
        "{path:?} is in use by {}: stop that first; a server of this file lets reads in if it is read-only itself",
        who(holders)
    )]
    InUse {
        /** As given. */
        path: PathBuf,
        /** As far as /proc shows them. */
        holders: Vec<LockHolder>,
    },
    /// No such file.
    #[error("file {path:?} does not exist: check the path, or make the file first (truncate -s SIZE)")]
    NoFile {
        /** As given. */
        path: PathBuf,
    },
    /// The file system cannot.
    #[error("{path:?} cannot be opened with O_DIRECT: use direct=0, or a file on another file system")]
    NoDirect {
        /** As given. */
        path: PathBuf,
    },
    /// A CPU that is not there, or not ours.
    #[error("threads cannot be bound to CPU {cpu}: this process may use {}", list(allowed))]
    Pin {
        /** Its number. */
        cpu: usize,
        /** Those that there are, and are ours. */
        allowed: Vec<usize>,
        /** From the kernel. */
        source: std::io::Error,
    },
    /// A thread could not begin.
    #[error("{0}")]
    Begin(String),
}

impl From<ImageError> for RunError {
    fn from(error: ImageError) -> Self {
        match error {
            // Their own words name options of the server.
            ImageError::Locked { path, holders, .. } => Self::InUse { path, holders },
            ImageError::DirectRefused { path } => Self::NoDirect { path },
            ImageError::Missing { path } => Self::NoFile { path },
            other => Self::Image(other),
        }
    }
}

fn who(holders: &[LockHolder]) -> String {
    let names: Vec<_> = holders.iter().map(ToString::to_string).collect();
    if names.is_empty() { "a process that /proc does not show".to_owned() } else { names.join(", ") }
}

/// Who wants to know how far it is.
pub trait Watch {
    /// All threads are ready, and start now.
    fn began(&mut self) {}

    /// All have ended; the target is still open.
    fn ended(&mut self) {}

    /// Every now and then.
    fn tick(&mut self, progress: &Progress);

    /// Something happened to the target.
    fn event(&mut self, text: &str);
}

/// Nobody.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quiet;

impl Watch for Quiet {
    fn tick(&mut self, _: &Progress) {}
    fn event(&mut self, _: &str) {}
}

/// How far it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Since the start.
    pub elapsed: Duration,
    /// Of the time or of the work, whichever is further; 0 to 1.
    pub share: f64,
    /// Of all threads, by direction.
    pub bytes: [u64; 2],
    /// Of all threads, by direction.
    pub ios: [u64; 2],
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// As it was asked for.
    pub job: Job,
    /// Where.
    pub target: Target,
    /// By clone.
    pub clones: Vec<Measured>,
    /// Of a socket.
    pub queues: QueueCounts,
    /// Processor time of a back-end that is another process of this host.
    pub server: Option<ProcessTime>,
    /// The user ended it.
    pub interrupted: bool,
    /// What ended it.
    pub failure: Option<Failure>,
}

impl Outcome {
    /// All clones together.
    #[must_use]
    pub fn group(&self) -> Measured {
        let mut group = Measured::default();
        self.clones.iter().for_each(|clone| group.merge(clone));
        group
    }
}

enum Opened {
    File(Arc<Image>, EngineKind),
    Socket(Box<Connection>),
}

impl Opened {
    fn open(job: &Job, target: &Target, client: &Client) -> Result<Self, RunError> {
        match target {
            Target::Socket(path) => Ok(Self::Socket(Box::new(Connection::open(path, job, client)?))),
            Target::File(path, engine) => {
                let options = ImageOptions {
                    access: if job.pattern.writes() { Access::ReadWrite } else { Access::ReadOnly },
                    cache: if job.direct { CacheMode::None } else { CacheMode::Writeback },
                    discard: false,
                    lock_timeout: LOCK_TIMEOUT,
                    ..ImageOptions::new(path)
                };
                let image = Image::open(&HostOpener, &options)?;
                Ok(Self::File(Arc::new(image), engine.unwrap_or(job.engine)))
            }
        }
    }

    fn limits(&self) -> Limits {
        match self {
            Self::File(image, _) => Limits {
                size_bytes: image.capacity_sectors().saturating_mul(SECTOR_BYTES),
                block_bytes: image.block_size(),
                read_only: image.read_only(),
                flush: true,
            },
            Self::Socket(connection) => connection.limits(),
        }
    }

    /// One for files, as in fio; everything that is ready for rings, where a batch is one index.
    fn usual_batch(&self, job: &Job) -> u32 {
        match self {
            Self::File(..) => 1,
            Self::Socket(_) => job.depth,
        }
    }

    /// What a thread needs to make its port.
    fn start(&mut self, job: &Job, clone: u32) -> Result<Start, PortError> {
        match self {
            Self::File(image, kind) => Ok(Start::File(Arc::clone(image), *kind)),
            Self::Socket(connection) => Ok(Start::Ready(connection.port(job, clone)?)),
        }
    }

    fn connection(&self) -> Option<&Connection> {
        match self {
            Self::Socket(connection) => Some(connection),
            Self::File(..) => None,
        }
    }
}

/// An engine is made on the thread that uses it; a queue comes with the session.
enum Start {
    File(Arc<Image>, EngineKind),
    Ready(Box<dyn Port + Send>),
}

impl Start {
    fn port(self, job: &Job) -> Result<Box<dyn Port>, PortError> {
        match self {
            Self::File(image, kind) => Ok(Box::new(FilePort::open(image, kind, job.block_bytes, job.depth)?)),
            Self::Ready(port) => Ok(port),
        }
    }
}

/// From a thread, when it has ended.
struct Ended {
    clone: usize,
    measured: Measured,
    counts: QueueCounts,
    result: Result<(), Failure>,
}

/// Runs `job` on `target` to its end, the user's or its own.
///
/// # Errors
/// [`RunError`] if it could not begin. What went wrong later is in the [`Outcome`].
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
                let why = format!("thread {clone} of {} cannot be made: {error}", job.jobs);
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

/// As fio: an engine that makes one call after the other has one request in flight, whatever was asked for.
fn as_engine_can(job: &Job, target: &Target, watch: &mut dyn Watch) -> Job {
    let engine = match target {
        Target::File(_, engine) => Some(engine.unwrap_or(job.engine)),
        Target::Socket(_) => None,
    };
    if engine != Some(EngineKind::Sync) || job.depth == 1 {
        return job.clone();
    }
    watch.event(&format!("note: psync makes one call after the other: iodepth={} becomes 1", job.depth));
    Job { depth: 1, ..job.clone() }
}

/// Where threads wait until all are ready.
#[derive(Debug, Default)]
struct Gate {
    /// How many wait, and whether they need not.
    state: Mutex<(u32, bool)>,
    bell: Condvar,
}

impl Gate {
    /// Waits until it opens.
    fn pass(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 += 1;
        self.bell.notify_all();
        drop(self.bell.wait_while(state, |(_, open)| !*open));
    }

    /// Waits for `threads` to wait.
    fn wait_for(&self, threads: u32) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.bell.wait_while(state, |(waiting, _)| *waiting < threads));
    }

    fn open(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.bell.notify_all();
    }
}

/// What all threads are started with.
struct Crew<'r> {
    common: Common<'r>,
    client: &'r Client,
    lives: &'r [Live],
    device_bytes: u64,
    gate: Gate,
}

impl Crew<'_> {
    /// A thread's whole life.
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
        // Nobody listens any more only if the run has ended already.
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

/// Transfers that all threads together will make; `None` if only the time ends it.
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

/// As far as the kernel tells.
fn allowed() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None);
    set.map(|set| (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
        .unwrap_or_default()
}

/// Tried out on a thread of its own, before anything else is done.
fn check_cpus(client: &Client) -> Result<(), RunError> {
    for (clone, _) in (0..).zip(&client.cpus) {
        let tried = std::thread::scope(|scope| scope.spawn(|| pin(client, clone)).join());
        tried.unwrap_or_else(|_| Err(RunError::Begin("a thread ended unexpectedly".to_owned())))?;
    }
    Ok(())
}

/// The thread that looks on.
struct Watcher<'r> {
    job: &'r Job,
    target: &'r Target,
    opened: &'r Opened,
    lives: &'r [Live],
    server: Option<i32>,
    stop: &'r Stop,
    total: Option<u64>,
}

impl Watcher<'_> {
    fn collect(&self, ended: &Receiver<Ended>, watch: &mut dyn Watch) -> Result<Outcome, RunError> {
        let (start, before) = (Instant::now(), self.server.and_then(ProcessTime::of));
        let shared = self.opened.connection().map(Connection::counts).unwrap_or_default();
        let mut sampler = Sampler::new(self.lives, start);
        let mut server = None;
        let mut outcome = Outcome {
            job: self.job.clone(),
            target: self.target.clone(),
            clones: vec![Measured::default(); self.lives.len()],
            queues: QueueCounts::default(),
            server: None,
            interrupted: false,
            failure: None,
        };
        loop {
            match ended.recv_timeout(TICK.min(sampler.due())) {
                Ok(ended) => take(&mut outcome, ended),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            sampler.sample();
            self.news(watch);
            watch.tick(&self.progress(start));
            // Of a server that goes away, the last that could be read.
            server = self.server.and_then(ProcessTime::of).or(server);
        }
        self.news(watch);
        sampler.give(&mut outcome.clones);
        if let Some(connection) = self.opened.connection() {
            outcome.queues.merge(&connection.counts().since(&shared));
        }
        outcome.server = before.and_then(|before| Some(server?.since(&before)));
        outcome.interrupted = self.stop.is_asked();
        Ok(outcome)
    }

    fn news(&self, watch: &mut dyn Watch) {
        while let Some(text) = self.opened.connection().and_then(Connection::news) {
            watch.event(&text);
        }
    }

    #[allow(clippy::cast_precision_loss)] // a share
    fn progress(&self, start: Instant) -> Progress {
        let elapsed = start.elapsed();
        let mut progress = Progress { elapsed, ..Progress::default() };
        for live in self.lives {
            for direction in 0..2 {
                progress.bytes[direction] += live.bytes[direction].load(Relaxed);
                progress.ios[direction] += live.ios[direction].load(Relaxed);
            }
        }
        let of_time = self.job.runtime.map_or(0.0, |runtime| elapsed.as_secs_f64() / runtime.as_secs_f64());
        let ios: u64 = progress.ios.iter().sum();
        let of_work = self.total.map_or(0.0, |total| ios as f64 / total.max(1) as f64);
        progress.share = of_time.max(of_work).clamp(0.0, 1.0);
        progress
    }
}

fn take(outcome: &mut Outcome, ended: Ended) {
    if let Some(place) = outcome.clones.get_mut(ended.clone) {
        *place = ended.measured;
    }
    outcome.queues.merge(&ended.counts);
    if outcome.failure.is_none() {
        outcome.failure = ended.result.err();
    }
}

/// Looks at the threads' counters every half second.
struct Sampler<'r> {
    lives: &'r [Live],
    last: Instant,
    seen: Vec<[(u64, u64); 2]>,
    samples: Vec<[Vec<Sample>; 2]>,
}

impl<'r> Sampler<'r> {
    fn new(lives: &'r [Live], start: Instant) -> Self {
        let (seen, samples) = (vec![[(0, 0); 2]; lives.len()], vec![[const { Vec::new() }; 2]; lives.len()]);
        Self { lives, last: start, seen, samples }
    }

    fn due(&self) -> Duration {
        SAMPLE.saturating_sub(self.last.elapsed())
    }

    fn sample(&mut self) {
        let elapsed = self.last.elapsed();
        if elapsed < SAMPLE {
            return;
        }
        self.last += elapsed;
        let of_clone = self.lives.iter().zip(&mut self.seen).zip(&mut self.samples);
        for ((live, seen), samples) in of_clone {
            for (direction, (seen, samples)) in seen.iter_mut().zip(samples).enumerate() {
                let now = (live.bytes[direction].load(Relaxed), live.ios[direction].load(Relaxed));
                let (bytes, ios) = (now.0 - seen.0, now.1 - seen.1);
                samples.push(Sample { seconds: elapsed.as_secs_f64(), bytes, ios });
                *seen = now;
            }
        }
    }

    fn give(self, clones: &mut [Measured]) {
        for (clone, samples) in clones.iter_mut().zip(self.samples) {
            for (direction, samples) in clone.directions.iter_mut().zip(samples) {
                // A direction that was never used has none, as in fio.
                if direction.ios > 0 {
                    direction.samples = samples;
                }
            }
        }
    }
}
