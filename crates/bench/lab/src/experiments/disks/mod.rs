//! `disks`: measures a server with many disks of which few are busy.
//!
//! `sample → bareblk serve with one disk (its memory) → with all disks (start, memory) → clients → control → Figures`

mod declaration;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use self::declaration as declared;
use self::declaration::{BLOCK_BYTES, Count, DEPTH, MOST_BUSY};
use crate::error::LabError;
use crate::experiment::{Bench, Cell, Experiment, Reading, SampleError, Setup};
use crate::load::disk::clients_together;
use crate::load::disk::test_file::TestFile;
use crate::load::disk::test_files::{Place, TMPFS, TestFiles};
use crate::load::server::cost::private_kib;
use crate::load::server::placed::{Layout, PlacedServer, Placing};
use crate::load::server::scraper::Scraper;
use crate::load::server::stats::Stats;
use crate::load::{BlockJob, Figures};
use crate::machine::StoragePlace;

/// Pause between the start of a server and the reading of its memory, in which the server frees what only its start
/// needed.
const SETTLE: Duration = Duration::from_millis(300);

pub(crate) fn experiment() -> Experiment {
    Experiment { declaration: declared::declaration(), make: |setup| Box::new(Disks::new(setup)) }
}

struct Disks {
    setup: Setup,
    counts: Vec<Count>,
    columns: Vec<String>,
    busy: TestFiles,
    /// Empty images for the disks that are never busy, or the reason why there are none.
    idle: Result<(TempDir, Vec<PathBuf>), String>,
}

impl Disks {
    fn new(setup: &Setup) -> Self {
        let declaration = declared::declaration();
        Self {
            setup: setup.clone(),
            counts: declared::counts().into_iter().map(|(_, count)| count).collect(),
            columns: declaration.columns.into_iter().map(|column| column.id).collect(),
            busy: TestFiles::default(),
            idle: Err("not prepared".to_owned()),
        }
    }

    /// The images of `count` disks, the filled ones first.
    fn images(&self, count: usize) -> Result<Vec<&Path>, SampleError> {
        let (_, idle) = self.idle.as_ref().map_err(|why| SampleError::Unavailable(why.clone()))?;
        let busy = self.busy.all(Place::Tmpfs)?.iter().map(TestFile::path);
        Ok(busy.chain(idle.iter().map(PathBuf::as_path)).take(count).collect())
    }

    fn start(&self, count: usize, scraped: bool) -> Result<PlacedServer, SampleError> {
        let layout = Layout {
            engine: "mmap",
            cache: "writeback",
            placing: Placing::Queue,
            workers: 1,
            queues: 64,
            polls: true,
            monitored: scraped,
        };
        let images = self.images(count)?;
        PlacedServer::start(&layout, self.setup.program.as_deref(), &images, &self.setup.stop)
    }

    /// Measures the clients while an exporter is scraped.
    fn measure_scraped(
        &self,
        server: &PlacedServer,
        clients: &[PathBuf],
        job: &BlockJob,
    ) -> Result<Figures, SampleError> {
        let scraper = Scraper::start(self.setup.program.as_deref(), server.monitor())?;
        let ended = AtomicBool::new(false);
        let (figures, longest) = std::thread::scope(|scope| {
            let scrapes = scope.spawn(|| scraper.run(&ended));
            let figures = clients_together::measure_on(server, clients, job, &self.setup.stop);
            ended.store(true, Relaxed);
            let panicked = |_| Err(std::io::Error::other("the scraper's thread panicked"));
            (figures, scrapes.join().unwrap_or_else(panicked))
        });
        let longest = longest.map_err(|error| SampleError::because("a scrape", &error))?;
        let mut figures = figures?;
        figures.insert("scrape", longest.as_secs_f64() * 1000.0);
        Ok(figures)
    }

    /// Private memory of an idle server, in KiB.
    fn memory(server: &PlacedServer) -> Option<f64> {
        std::thread::sleep(SETTLE);
        #[allow(clippy::cast_precision_loss)] // of one server
        private_kib(server.pid()).map(|kib| kib as f64)
    }
}

/// Makes empty images for all disks that are never busy.
fn idle_images(size_bytes: u64) -> std::io::Result<(TempDir, Vec<PathBuf>)> {
    let most = declared::counts().into_iter().map(|(_, count)| count.disks).max().unwrap_or(0);
    let folder = tempfile::Builder::new().prefix(".bareblk-lab-").tempdir_in(TMPFS)?;
    let make = |disk| {
        let path = folder.path().join(format!("idle-{disk}.raw"));
        File::create_new(&path)?.set_len(size_bytes)?;
        Ok(path)
    };
    let paths = (MOST_BUSY..most).map(make).collect::<std::io::Result<_>>()?;
    Ok((folder, paths))
}

impl Bench for Disks {
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        self.busy = TestFiles::fill(&self.setup, (&[Place::Tmpfs], MOST_BUSY), tell)?;
        let idle = idle_images(self.setup.effort.file_bytes);
        self.idle = idle.map_err(|error| format!("no images in {TMPFS}: {error}"));
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let Count { disks, busy, scraped } = self.counts[cell.variant];
        let alone = Self::memory(&self.start(1, scraped)?);
        let began = Instant::now();
        let server = self.start(disks, scraped)?;
        let start = began.elapsed();
        let memory = Self::memory(&server);
        let job = BlockJob {
            writes: false,
            block_bytes: BLOCK_BYTES,
            depth: DEPTH,
            jobs: 1,
            file_bytes: self.setup.effort.file_bytes,
            seconds: cell.seconds,
            seed: cell.seed,
        };
        let clients = &server.sockets()[..busy];
        let mut figures = match scraped {
            true => self.measure_scraped(&server, clients, &job)?,
            false => clients_together::measure_on(&server, clients, &job, &self.setup.stop)?,
        };
        let asked = Instant::now();
        Stats::ask(server.control()).map_err(|error| SampleError::because("the control socket", &error))?;
        figures.insert("control", asked.elapsed().as_secs_f64() * 1000.0);
        figures.insert("start", start.as_secs_f64());
        if let (Some(alone), Some(memory), true) = (alone, memory, disks > 1) {
            #[allow(clippy::cast_precision_loss)] // disks
            figures.insert("memory", (memory - alone) / (disks - 1) as f64);
        }
        Ok(self.columns.iter().map(|column| figures.get(column.as_str()).copied()).collect())
    }

    fn storages(&self) -> Vec<StoragePlace> {
        vec![StoragePlace::of("RAM disk", Path::new(TMPFS))]
    }

    fn notes(&self) -> Vec<String> {
        vec!["One worker, engine mmap, 64 queues offered per disk; clients sleep.".to_owned()]
    }
}
