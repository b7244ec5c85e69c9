//! `kick`: measures one lock and kick policy under one load.
//!
//! `sample → in process: null device with a notify cost | socket: server, sessions → crowd → Tally → Reading`
//!
//! - Each sample makes a new queue, lock, device or server, and threads, so samples are independent.
//! - Both policies run the same machine code; the policy is a value.

mod declaration;

mod loads;

use std::time::Duration;

use blk_driver::{Device, KickPolicy, PoolOptions, SharedQueue, alone};
use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use io_engine::{EngineConfig, EngineKind, make};
use lock_api::RawMutex;
use qspinlock::{Fair, Hybrid, Metered, PvQSpinLock, QSpinLock, StdMutex, TicketLock};
use virtqueue::RingFeatures;

use self::declaration::{Lock, VARIANTS, declaration};
use self::loads::{JOB_BYTES, Jobs, Load, Way, cores, loads};
use crate::error::LabError;
use crate::experiment::{Bench, Cell, Experiment, Reading, SampleError, Setup};
use crate::load::Job;
use crate::load::disk::served::Served;
use crate::load::disk::test_file::TestFile;
use crate::load::shared_queue::crowd;
use crate::load::shared_queue::crowd::{Crowd, Idle, Station, Tally, run};
use crate::load::shared_queue::null_device::{By, ExitBell};
use crate::machine::StoragePlace;

/// Shorter samples only test the code. They have fewer jobs, because starting all threads would take longer than the
/// sample.
const SHORT_S: f64 = 0.1;
/// Jobs in a short sample, instead of the published 256.
const SHORT_JOBS: usize = 16;
/// The size of one published job, because the data of all loads is in memory.
const DISK_BYTES: u64 = JOB_BYTES;
/// A polling server requests almost no notifications; the published servers did not poll.
const NO_POLLING: Duration = Duration::ZERO;
const MOST_DISKS: usize = 12;
/// Buffer sizes are rounded up to a multiple of this.
const PAGE_BYTES: u64 = 4096;

pub(crate) fn experiment() -> Experiment {
    Experiment { declaration: declaration(cores()), make: |setup| Box::new(Kick::new(setup)) }
}

struct Kick {
    setup: Setup,
    loads: Vec<Load>,
    disks: Vec<TestFile>,
}

impl Kick {
    fn new(setup: &Setup) -> Self {
        Self { setup: setup.clone(), loads: loads(cores()), disks: Vec::new() }
    }

    fn is_short(&self) -> bool {
        self.setup.effort.seconds < SHORT_S
    }

    /// A short sample has fewer jobs and threads than published.
    fn crowd(&self, load: &Load, cell: Cell) -> Crowd {
        let most = if self.is_short() { SHORT_JOBS.max(cores()) } else { usize::MAX };
        let threads = load.threads.min(most);
        let jobs = match load.jobs {
            Jobs::PerThread => threads,
            Jobs::Fixed(jobs) => jobs.min(most).max(threads),
        };
        let job = Job {
            pattern: load.pattern,
            block_bytes: load.block_bytes,
            depth: load.depth,
            file_bytes: DISK_BYTES,
            seconds: cell.seconds,
            seed: cell.seed,
        };
        let idle = if matches!(load.way, Way::Socket { .. }) { Idle::Sleep } else { Idle::Poll };
        Crowd { job, jobs, threads, read_percent: load.read_percent, idle }
    }

    fn measure<L>(&self, load: &Load, policy: KickPolicy, crowd: Crowd) -> Result<Tally, SampleError>
    where
        L: RawMutex + Send + Sync,
    {
        match load.way {
            Way::Process { cost_us, by, event_idx } => {
                self.in_process::<L>(load.queue_size, (cost_us, by, event_idx), policy, crowd)
            }
            Way::Socket { disks } => self.over_sockets::<L>(load.queue_size, disks, policy, crowd),
        }
    }

    fn in_process<L>(
        &self,
        queue_size: u16,
        (cost_us, by, event_idx): (u32, By, bool),
        policy: KickPolicy,
        crowd: Crowd,
    ) -> Result<Tally, SampleError>
    where
        L: RawMutex + Send + Sync,
    {
        let failed = |error| SampleError::because("the queue", &error);
        let bell = ExitBell::new(Duration::from_micros(cost_us.into()), by).map_err(failed)?;
        let features = RingFeatures { event_idx, indirect: true, packed: false };
        let pool = PoolOptions { size_bytes: pool_bytes(&crowd, 1), huge_pages: false };
        let (queue, pool, end) = alone(queue_size, features, pool, bell.clone()).map_err(failed)?;
        let device = bell.attach(&end).map_err(failed)?;
        let stations = [Station { queue: SharedQueue::<L>::new(queue, policy), pool }];
        let tally = run(&stations, crowd, &self.setup.stop);
        drop(device);
        match bell.fault() {
            Some(fault) => Err(SampleError::Unavailable(format!("the null device stopped: {fault}"))),
            None => tally,
        }
    }

    fn over_sockets<L>(
        &self,
        queue_size: u16,
        disks: usize,
        policy: KickPolicy,
        crowd: Crowd,
    ) -> Result<Tally, SampleError>
    where
        L: RawMutex + Send + Sync,
    {
        let failed = |error| SampleError::because("the server", &error);
        let images = self.disks[..disks].iter().map(open).collect::<Result<_, _>>()?;
        // The in-flight requests of two of the largest queues; further requests wait in the ring.
        let config = EngineConfig { depth: 2048, ..EngineConfig::default() };
        let (depth, engine) = (config.depth, Box::new(move || make(EngineKind::IoUring, &config)));
        let served = Served::start(engine, depth, NO_POLLING, queue_size, images).map_err(failed)?;
        let pool_bytes = pool_bytes(&crowd, disks);
        let (mut devices, mut stations) = (Vec::<Device>::new(), Vec::new());
        for number in 0..disks {
            let (device, queue) = served.connect(number, pool_bytes).map_err(failed)?;
            stations
                .push(Station { queue: SharedQueue::<L>::new(queue, policy), pool: device.pool().clone() });
            devices.push(device);
        }
        let tally = crowd::run(&stations, crowd, &self.setup.stop);
        drop((stations, devices));
        tally
    }
}

/// Memory for the jobs of one station.
fn pool_bytes(crowd: &Crowd, stations: usize) -> u64 {
    let each = (u64::from(crowd.job.depth) * u64::from(crowd.job.block_bytes)).next_multiple_of(PAGE_BYTES);
    each * crowd.jobs.div_ceil(stations) as u64
}

fn open(file: &TestFile) -> Result<Image, SampleError> {
    let options = ImageOptions { cache: CacheMode::Writeback, ..ImageOptions::new(file.path()) };
    Image::open(&HostOpener, &options).map_err(|error| SampleError::because("the test file", &error))
}

impl Bench for Kick {
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        let (storage, stop) = (self.setup.storage.clone(), self.setup.stop.clone());
        for number in 0..MOST_DISKS {
            #[allow(clippy::cast_precision_loss)] // a share
            tell("filling the disks", number as f64 / MOST_DISKS as f64);
            self.disks.push(TestFile::fill(&storage, DISK_BYTES, &stop, &mut |_| {})?);
        }
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let load = &self.loads[cell.workload];
        let (_, _, lock, policy) = VARIANTS[cell.variant];
        let crowd = self.crowd(load, cell);
        let tally = match lock {
            Lock::Ticket => self.measure::<Metered<TicketLock>>(load, policy, crowd)?,
            Lock::Native => self.measure::<Metered<QSpinLock>>(load, policy, crowd)?,
            Lock::Fair => self.measure::<Metered<PvQSpinLock<Fair>>>(load, policy, crowd)?,
            Lock::Hybrid => self.measure::<Metered<PvQSpinLock<Hybrid>>>(load, policy, crowd)?,
            Lock::Std => self.measure::<Metered<StdMutex>>(load, policy, crowd)?,
            Lock::ParkingLot => self.measure::<Metered<parking_lot::RawMutex>>(load, policy, crowd)?,
        };
        Ok(reading(&tally, load))
    }

    fn storages(&self) -> Vec<StoragePlace> {
        vec![StoragePlace::of("disks", &self.setup.storage)]
    }

    fn notes(&self) -> Vec<String> {
        let cores = cores();
        let mut notes = vec![format!(
            "{cores} cores. The ticket lock and the native queued lock only spin, and are not measured with \
             more threads than cores."
        )];
        if self.is_short() {
            notes.push(format!(
                "Short samples: {} jobs instead of the published {}.",
                SHORT_JOBS,
                crate::experiments::kick::loads::JOBS
            ));
        }
        notes
    }
}

/// Returns the figures in the order of the columns.
#[allow(clippy::cast_precision_loss)] // counts of one sample
fn reading(tally: &Tally, load: &Load) -> Reading {
    let (iops, latency, usage) = (tally.iops(), tally.latency_us, tally.usage);
    let kicks = (tally.pushed > 0).then(|| tally.kicks as f64 / tally.pushed as f64);
    vec![
        Some(iops),
        Some(iops * f64::from(load.block_bytes) / 1e6),
        load.requests.filter(|_| iops > 0.0).map(|requests| requests as f64 / iops),
        latency.max(),
        latency.mean(),
        latency.deviation(),
        latency.min(),
        tally.share(usage.system),
        tally.share(usage.user),
        Some(usage.switches() as f64),
        Some(usage.major_faults as f64),
        Some(usage.minor_faults as f64),
        kicks,
        tally.per_io(tally.lock.held_ns()),
        tally.per_io(tally.lock.waited_ns()),
    ]
}
