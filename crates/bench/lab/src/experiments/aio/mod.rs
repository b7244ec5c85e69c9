//! `aio`: measures one engine and cache mode, through a virtqueue or on bare metal.
//!
//! `sample → file (disk or tmpfs) → bare: fio, or this crate's loop | ring: image, engine, server → Measured → Reading`
//!
//! - Each sample opens the image, makes an engine and starts a server, so samples are independent.
//! - A variant that cannot run reports why: the engine is tried before a worker is started with it.

pub(super) mod declaration;

use std::io;
use std::path::Path;

use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use io_engine::{
    EngineConfig, EngineError, EngineKind, EngineOptions, FileSpec, PosixAioOptions, choose, make,
};

use self::declaration::{VARIANTS, WORKLOADS, Way, declaration};
use crate::error::LabError;
use crate::experiment::{Bench, Cell, Experiment, Reading, SampleError, Setup};
use crate::load::disk::driver::RingLoad;
use crate::load::disk::test_file::TestFile;
use crate::load::disk::test_files::{Place, TMPFS, TestFiles};
use crate::load::disk::{bare, fio};
use crate::load::{Job, Measured};
use crate::machine::StoragePlace;

const BLOCK_BYTES: u32 = 16 << 10;
/// Queue depth of the published measurements.
const DEPTH: u16 = 74;
const FIO_IS_ONE_BY_ONE: &str = "fio submits one request per call, as in the published job. The worker \
                                 submits in batches, and the kernel merges neighbouring requests, so \
                                 sequential writes can exceed 100 %.";

pub(crate) fn experiment() -> Experiment {
    Experiment { declaration: declaration(), make: |setup| Box::new(Aio::new(setup)) }
}

struct Aio {
    setup: Setup,
    fio: Option<String>,
    files: TestFiles,
    /// Variants and workloads whose engine was already tried.
    asked: Vec<(usize, usize)>,
}

impl Aio {
    fn new(setup: &Setup) -> Self {
        Self { setup: setup.clone(), fio: fio::version(), files: TestFiles::default(), asked: Vec::new() }
    }

    fn bare(&self, place: Place, job: &Job) -> Result<Measured, SampleError> {
        let file = self.files.one(place)?;
        let no_direct = |error| SampleError::because("O_DIRECT is not possible on this storage", &error);
        file.check_direct().map_err(no_direct)?;
        if self.fio.is_some() {
            return fio::run(file.path(), job, &self.setup.scratch, &self.setup.stop);
        }
        bare::run(open(file, CacheMode::None)?, *job, &self.setup.stop)
    }

    fn own_loop(&self, place: Place, job: Job) -> Result<Measured, SampleError> {
        if self.fio.is_none() {
            return Err(SampleError::Unavailable(
                "this loop already is the baseline, because fio is not installed".to_owned(),
            ));
        }
        let file = self.files.one(place)?;
        let no_direct = |error| SampleError::because("O_DIRECT is not possible on this storage", &error);
        file.check_direct().map_err(no_direct)?;
        bare::run(open(file, CacheMode::None)?, job, &self.setup.stop)
    }

    fn ring(
        &mut self,
        cell: Cell,
        job: Job,
        (engine, cache, fd_pool): (EngineKind, CacheMode, u32),
    ) -> Result<Measured, SampleError> {
        let file = self.files.one(WORKLOADS[cell.workload].2)?;
        let unavailable = |error: io::Error| SampleError::Unavailable(format!("{engine}: {error}"));
        if !self.asked.contains(&(cell.variant, cell.workload)) {
            let image = open(file, cache)?;
            ask(engine, fd_pool, &image)?;
        }
        let (image, stop) = (open(file, cache)?, self.setup.stop.clone());
        let (options, config) = (options(engine, fd_pool), EngineConfig::default());
        let depth = config.depth;
        let load = RingLoad::start(Box::new(move || make(options.clone(), &config)), depth, image, job);
        let measured = load.map_err(unavailable)?.run(&stop)?;
        if !cache.is_direct() {
            file.settle().map_err(|error| SampleError::because("sync after the sample", &error))?;
        }
        self.asked.push((cell.variant, cell.workload));
        Ok(measured)
    }
}

impl Bench for Aio {
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        self.files = TestFiles::fill(&self.setup, (&[Place::Disk, Place::Tmpfs], 1), tell)?;
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let (_, _, place, pattern) = WORKLOADS[cell.workload];
        let file_bytes = self.files.one(place)?.size_bytes();
        let job = Job {
            pattern,
            block_bytes: BLOCK_BYTES,
            depth: DEPTH,
            file_bytes,
            seconds: cell.seconds,
            seed: cell.seed,
        };
        let measured = match VARIANTS[cell.variant].2 {
            Way::Bare => self.bare(place, &job)?,
            Way::OwnLoop => self.own_loop(place, job)?,
            Way::Ring { engine, cache, fd_pool, .. } => self.ring(cell, job, (engine, cache, fd_pool))?,
        };
        Ok(reading(&measured))
    }

    fn storages(&self) -> Vec<StoragePlace> {
        vec![StoragePlace::of("disk", &self.setup.storage), StoragePlace::of("tmpfs", Path::new(TMPFS))]
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = match &self.fio {
            Some(version) => {
                vec![format!("Bare metal is {version} with libaio."), FIO_IS_ONE_BY_ONE.to_owned()]
            }
            None => {
                vec!["Bare metal is this program's own loop over io_uring: fio is not installed.".to_owned()]
            }
        };
        if self.storages()[0].file_system.starts_with("tmpfs") {
            notes.push("The disk is also a tmpfs: choose a folder on a real disk with --storage.".to_owned());
        }
        notes
    }
}

/// Returns the figures in the order of the columns.
fn reading(measured: &Measured) -> Reading {
    #[allow(clippy::cast_precision_loss)] // requests of one sample
    let iops = measured.requests as f64 / measured.seconds;
    vec![
        Some(iops * f64::from(BLOCK_BYTES) / 1e6),
        Some(iops),
        measured.submit_us,
        measured.client_submit_us,
        measured.complete_ms,
        measured.cpu_us_per_io,
    ]
}

fn open(file: &TestFile, cache: CacheMode) -> Result<Image, SampleError> {
    let options = ImageOptions { cache, ..ImageOptions::new(file.path()) };
    Image::open(&HostOpener, &options).map_err(|error| SampleError::because("the test file", &error))
}

fn options(kind: EngineKind, fd_pool: u32) -> EngineOptions {
    match EngineOptions::from(kind) {
        EngineOptions::PosixAio(_) => EngineOptions::PosixAio(PosixAioOptions { fd_pool }),
        without => without,
    }
}

/// Checks whether the engine starts and accepts the image, because a worker would only log the reason.
fn ask(kind: EngineKind, fd_pool: u32, image: &Image) -> Result<(), SampleError> {
    let spec = FileSpec::of(image);
    match choose(Some(&options(kind, fd_pool)), &spec, &EngineConfig::default()) {
        Ok(_) => Ok(()),
        Err(EngineError::Named { source, .. }) => Err(SampleError::because(kind.name(), &source)),
        Err(other) => Err(SampleError::because(kind.name(), &other)),
    }
}
