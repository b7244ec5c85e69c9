//! `locality`: measures a placement under a load; each sample has its own server with one or two disks.
//!
//! `sample → new bareblk serve, workers on separate cores → clients on every disk at once → Figures → columns`
//!
//! See also: the variants and why (`declaration.rs`), the load (`load/disk/clients_together.rs`).

mod declaration;

use std::path::Path;

use self::declaration as declared;
use self::declaration::{Ask, BLOCK_BYTES, Way};
use crate::error::LabError;
use crate::experiment::{Bench, Cell, Experiment, Reading, SampleError, Setup};
use crate::load::disk::clients_together;
use crate::load::disk::test_file::TestFile;
use crate::load::disk::test_files::{Place, TMPFS, TestFiles};
use crate::load::server::placed::{Layout, PlacedServer};
use crate::load::{BlockJob, cores};
use crate::machine::StoragePlace;

/// Number of test files: one per disk of the largest load.
const FILES: usize = 2;

pub(crate) fn experiment() -> Experiment {
    Experiment {
        declaration: declared::declaration(cores::all().len()),
        make: |setup| Box::new(Locality::new(setup)),
    }
}

struct Locality {
    setup: Setup,
    cores: usize,
    ways: Vec<Way>,
    loads: Vec<Ask>,
    columns: Vec<String>,
    files: TestFiles,
}

impl Locality {
    fn new(setup: &Setup) -> Self {
        let cores = cores::all().len();
        Self {
            setup: setup.clone(),
            cores,
            ways: declared::ways().into_iter().map(|(_, way)| way).collect(),
            loads: declared::loads(cores).into_iter().map(|(_, ask)| ask).collect(),
            columns: declared::columns().into_iter().map(|column| column.id).collect(),
            files: TestFiles::default(),
        }
    }

    fn files(&self, ask: Ask) -> Result<Vec<&Path>, SampleError> {
        Ok(self.files.all(ask.place)?.iter().take(ask.devices).map(TestFile::path).collect())
    }
}

impl Bench for Locality {
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        self.files = TestFiles::fill(&self.setup, (&[Place::Disk, Place::Tmpfs], FILES), tell)?;
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let (way, ask) = (self.ways[cell.variant], self.loads[cell.workload]);
        let queues = declared::queues(self.cores);
        let layout = Layout {
            engine: way.engine,
            cache: "none",
            placing: way.placing,
            workers: declared::workers(self.cores),
            queues,
            polls: ask.polls,
            monitored: false,
        };
        let stop = &self.setup.stop;
        let server = PlacedServer::start(&layout, self.setup.program.as_deref(), &self.files(ask)?, stop)?;
        let job = BlockJob {
            writes: false,
            block_bytes: BLOCK_BYTES,
            depth: ask.depth,
            jobs: queues,
            file_bytes: self.setup.effort.file_bytes,
            seconds: cell.seconds,
            seed: cell.seed,
        };
        let figures = clients_together::measure(&server, &job, stop)?;
        Ok(self.columns.iter().map(|column| figures.get(column.as_str()).copied()).collect())
    }

    fn storages(&self) -> Vec<StoragePlace> {
        vec![StoragePlace::of("disk", &self.setup.storage), StoragePlace::of("RAM disk", Path::new(TMPFS))]
    }

    fn notes(&self) -> Vec<String> {
        let (workers, queues) = (declared::workers(self.cores), declared::queues(self.cores));
        let cores = self.cores;
        let mut notes = vec![format!(
            "{workers} workers on {} of {cores} cores, {queues} queues per device: worker i mod {workers} \
             serves queue i.",
            workers.min(cores)
        )];
        if cores < workers + usize::from(queues) {
            notes.push(
                "Workers and clients share cores on this machine, so each uses the processor time that the \
                 other saves."
                    .to_owned(),
            );
        }
        let disk = StoragePlace::of("disk", &self.setup.storage);
        if disk.file_system.starts_with("tmpfs") {
            notes.push("The disk is also a tmpfs: choose a folder on a real disk with --storage.".to_owned());
        }
        notes
    }
}
