//! `hostile`: measures nine guests next to a tenth, each with its own disk on one server.
//!
//! `sample → new bareblk serve, ten disks → the tenth guest starts → nine clients at once → the tenth ends → Figures`
//!
//! - Hanging storage is released before the guest and the server end, whatever the sample's result, because both would
//!   wait for it.

mod declaration;

use std::path::{Path, PathBuf};
use std::time::Instant;

use self::declaration as declared;
use self::declaration::{BLOCK_BYTES, DEPTH, GOOD};
use crate::error::LabError;
use crate::experiment::{Bench, Cell, Experiment, Reading, SampleError, Setup};
use crate::load::disk::clients_together;
use crate::load::disk::test_file::TestFile;
use crate::load::disk::test_files::{Place, TMPFS, TestFiles};
use crate::load::hostile::frozen_disk::{FrozenDisk, IMAGE_BYTES};
use crate::load::hostile::guest::{Attack, HostileGuest};
use crate::load::server::placed::{Layout, PlacedServer, Placing};
use crate::load::{BlockJob, cores};
use crate::machine::StoragePlace;

pub(crate) fn experiment() -> Experiment {
    Experiment { declaration: declared::declaration(), make: |setup| Box::new(Hostile::new(setup)) }
}

struct Hostile {
    setup: Setup,
    /// The attacks, each with the cache mode of its disks.
    attacks: Vec<(Attack, &'static str)>,
    loads: Vec<Place>,
    columns: Vec<String>,
    files: TestFiles,
    /// The frozen disk, or the reason why there is none.
    frozen: Result<FrozenDisk, String>,
}

impl Hostile {
    fn new(setup: &Setup) -> Self {
        Self {
            setup: setup.clone(),
            attacks: declared::attacks().into_iter().map(|(_, attack, cache)| (attack, cache)).collect(),
            loads: declared::loads().into_iter().map(|(_, place)| place).collect(),
            columns: declared::columns().into_iter().map(|column| column.id).collect(),
            files: TestFiles::default(),
            frozen: Err("not prepared".to_owned()),
        }
    }

    fn files(&self, place: Place) -> Result<Vec<&Path>, SampleError> {
        Ok(self.files.all(place)?.iter().map(TestFile::path).collect())
    }

    /// `files`: one per disk; the tenth has `tenth_bytes`. Calls `hang` once the server is serving, and drops its
    /// result before the server.
    #[allow(clippy::cast_precision_loss)] // counts of one sample
    fn measure<H>(
        &self,
        (attack, cache): (Attack, &'static str),
        files: &[PathBuf],
        cell: Cell,
        tenth_bytes: u64,
        hang: impl FnOnce() -> Result<H, SampleError>,
    ) -> Result<Reading, SampleError> {
        let stop = &self.setup.stop;
        let layout = Layout {
            engine: "io_uring",
            cache,
            placing: Placing::Queue,
            workers: declared::workers(cores::all().len()),
            queues: if let Attack::Queues(count) = attack { count } else { 1 },
            polls: true,
            monitored: false,
        };
        let paths: Vec<_> = files.iter().map(PathBuf::as_path).collect();
        let server = PlacedServer::start(&layout, self.setup.program.as_deref(), &paths, stop)?;
        let job = BlockJob {
            writes: false,
            block_bytes: BLOCK_BYTES,
            depth: DEPTH,
            jobs: 1,
            file_bytes: self.setup.effort.file_bytes,
            seconds: cell.seconds,
            seed: cell.seed,
        };
        // The tenth disk shares its worker with some of the others.
        let (good, tenth) = server.sockets().split_at(GOOD);
        let hung = hang()?;
        let of_tenth = BlockJob { file_bytes: tenth_bytes, ..job };
        let (began, guest) = (Instant::now(), HostileGuest::start(attack, &tenth[0], &of_tenth)?);
        let mut figures = clients_together::measure_on(&server, good, &job, stop)?;
        if !matches!(attack, Attack::Busy | Attack::LargeReads) {
            figures.insert("attacks", guest.done() as f64 / began.elapsed().as_secs_f64());
        }
        drop(hung);
        guest.end()?;
        figures.insert("log", server.log_bytes() as f64);
        Ok(self.columns.iter().map(|column| figures.get(column.as_str()).copied()).collect())
    }
}

/// Fails on kernels before 6.12, where io_uring waits for frozen storage in the server's own system call.
fn frozen_disk(storage: &Path) -> Result<FrozenDisk, String> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse().unwrap_or(0_u32));
    if (numbers.next(), numbers.next()) < (Some(6), Some(12)) {
        return Err(format!(
            "there is no file system to freeze: on Linux {release}, io_uring_enter waits for a write to a \
             frozen file system; use Linux 6.12 or newer"
        ));
    }
    FrozenDisk::make(storage)
}

impl Bench for Hostile {
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        self.files = TestFiles::fill(&self.setup, (&[Place::Disk, Place::Tmpfs], GOOD + 1), tell)?;
        self.frozen = frozen_disk(&self.setup.storage);
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let ((attack, cache), place) = (self.attacks[cell.variant], self.loads[cell.workload]);
        let mut files: Vec<_> = self.files(place)?.into_iter().map(Path::to_path_buf).collect();
        if attack != Attack::Hung {
            return self.measure((attack, cache), &files, cell, self.setup.effort.file_bytes, || Ok(()));
        }
        // Takes the disk out of its field, so that the disk can be frozen while the other fields are borrowed.
        let unprepared = Err("the frozen disk is in use".to_owned());
        let mut disk = std::mem::replace(&mut self.frozen, unprepared).map_err(SampleError::Unavailable)?;
        files[GOOD] = disk.image().to_path_buf();
        let reading = self.measure((attack, cache), &files, cell, IMAGE_BYTES, || {
            disk.freeze().map_err(|error| SampleError::because("the file system cannot be frozen", &error))
        });
        self.frozen = Ok(disk);
        reading
    }

    fn storages(&self) -> Vec<StoragePlace> {
        vec![StoragePlace::of("disk", &self.setup.storage), StoragePlace::of("RAM disk", Path::new(TMPFS))]
    }

    fn notes(&self) -> Vec<String> {
        let cores = cores::all().len();
        let workers = declared::workers(cores);
        let mut notes = vec![
            format!("{workers} workers on {cores} cores for ten disks of one queue each."),
            declared::busy_guest(),
        ];
        if cores < 2 * workers + 2 {
            notes.push(
                "Workers, sessions and guests share cores on this machine, so each takes processor time \
                 from the others."
                    .to_owned(),
            );
        }
        notes
    }
}
