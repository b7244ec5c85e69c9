//! `remote-neighbour`: what a disk of this host notices when another disk of its worker loses its server for a while.
//!
//! `sample → server with both disks → load on the other disk → its server hangs or is killed → client of this disk`

use std::io;
use std::thread;
use std::time::Duration;

use workload::{Client, Progress, Watch};

use super::columns::{not_published, own_requirement};
use crate::error::LabError;
use crate::experiment::{
    Bench, Beside, Cell, Column, Declaration, Effort, Experiment, Reading, SampleError, Setup, Variant,
    Workload, Yardstick,
};
use crate::experiments::vhost::bench::{BLOCK_BYTES, Part};
use crate::experiments::vhost::columns::{IOPS, declaration, target};
use crate::load::disk::clients;
use crate::load::disk::test_file::TestFile;
use crate::load::remote::{Ceph, Nbdkit, Stopped, Store};
use crate::load::server::configured::{ConfiguredServer, Sockets, quoted};
use crate::load::{BlockJob, Figures};
use crate::machine::StoragePlace;

const BUSY: &str = "busy";
const TROUBLE: &str = "trouble";
const IMAGE: &str = "other";
/// Requests in flight of the measured disk, and of the other one.
const DEPTH: u32 = 4;
const OTHER_DEPTH: u32 = 32;
/// How long the other disk's load runs before the trouble begins, and after the measurement.
const AROUND: Duration = Duration::from_millis(300);

/// What the other disk does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Other {
    Idle,
    Busy,
    /// It is busy, and has lost its server.
    InTrouble,
}

/// What happens to the other disk's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    NbdStopped,
    NbdKilled,
    OsdStopped,
}

/// The other disk's server.
enum Far<'c> {
    Nbd(Nbdkit),
    Ceph(&'c Ceph),
}

pub(super) fn experiment() -> Experiment {
    let make = |setup: &Setup| {
        let ceph = Err("not prepared".to_owned());
        Box::new(Neighbour { setup: setup.clone(), part: part(), file: None, ceph }) as Box<_>
    };
    Experiment { declaration: this(), make }
}

fn part() -> Part<Other, Trouble> {
    let load = |id: &str, label: &str, trouble| (Workload::new(id, label), trouble);
    Part {
        ways: vec![
            (Variant::new(BUSY, "the other disk is busy"), Other::Busy),
            (Variant::new(TROUBLE, "its server is in trouble"), Other::InTrouble),
            (Variant::new("idle", "the other disk is idle"), Other::Idle),
        ],
        loads: vec![
            load("nbd-stopped", "beside an NBD disk; nbdkit hangs", Trouble::NbdStopped),
            load("nbd-killed", "beside an NBD disk; nbdkit is killed and started again", Trouble::NbdKilled),
            load("osd-stopped", "beside an RBD disk; the OSD hangs", Trouble::OsdStopped),
        ],
        columns: Column::table(&COLUMNS),
    }
}

fn this() -> Declaration {
    let all = ["nbd-stopped", "nbd-killed", "osd-stopped"];
    let slower = |column: &str| {
        let text = format!(
            "{column} of a disk of this host is at most 1.5 times that beside a busy disk without trouble"
        );
        let (column, variant) = (column.to_owned(), BUSY.to_owned());
        target(
            &text,
            (&[TROUBLE], &all),
            (0.0, 0.5),
            Yardstick::Beside { column, variant, by: Beside::Ratio, at_most: 1.5 },
        )
    };
    Declaration {
        source: own_requirement("one worker with a disk of this host and a disk elsewhere"),
        published: not_published("A disk that has lost its server delays no other disk."),
        ratio_title: "of busy".into(),
        targets: vec![slower("p50"), slower("p99")],
        full: Effort { rounds: 10, seconds: 3.0, file_bytes: 256 << 20 },
        quick: Effort { rounds: 1, seconds: 0.1, file_bytes: 16 << 20 },
        ..declaration(
            "remote-neighbour",
            "Does a disk that has lost its server delay another one?",
            &part(),
            BUSY,
        )
    }
}

/// The columns: id, title, unit, decimals, and what is measured.
const COLUMNS: [(&str, &str, &str, usize, &str); 4] = [
    (IOPS, "IOPS", "1/s", 0, "Requests of the disk of this host that completed in the counted time."),
    ("p50", "50 % latency", "µs", 1, "Half of this disk's requests are faster than this."),
    ("p99", "99 % latency", "µs", 1, "99 % of this disk's requests are faster than this."),
    (
        "other",
        "other disk",
        "requests",
        0,
        "Requests of the other disk that completed, with those before and after.",
    ),
];

struct Neighbour {
    setup: Setup,
    part: Part<Other, Trouble>,
    file: Option<TestFile>,
    /// The cluster, or why there is none.
    ceph: Result<Ceph, String>,
}

/// Counts nothing while the other disk's load runs.
struct Unwatched;

impl Watch for Unwatched {
    fn tick(&mut self, _: &Progress) {}

    fn event(&mut self, _: &str) {}
}

impl Neighbour {
    fn far(&self, trouble: Trouble) -> Result<Far<'_>, SampleError> {
        if trouble == Trouble::OsdStopped {
            let ceph = self.ceph.as_ref().map_err(|why| SampleError::Unavailable(why.clone()))?;
            return Ok(Far::Ceph(ceph));
        }
        Nbdkit::start(self.setup.effort.file_bytes, &self.setup.stop).map(Far::Nbd)
    }

    fn configuration(&self, far: &Far<'_>, sockets: &Sockets) -> io::Result<String> {
        let near = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let other = match far {
            Far::Nbd(nbdkit) => format!("image = \"nbd+unix:///?socket={}\"\n", nbdkit.socket().display()),
            Far::Ceph(ceph) => {
                format!("image = \"rbd:rbd/{IMAGE}\"\nrbd-conf = {}\n", quoted(ceph.configuration())?)
            }
        };
        Ok(format!(
            "control = {}\nworkers = 1\n[[disk]]\nname = \"near\"\nimage = {}\nsocket = {}\n\
             [[disk]]\nname = \"far\"\nsocket = {}\n{other}",
            quoted(&sockets.control)?,
            quoted(near.path())?,
            quoted(&sockets.disks[0])?,
            quoted(&sockets.disks[1])?,
        ))
    }

    fn job(&self, cell: &Cell, writes: bool, depth: u32, seconds: f64) -> BlockJob {
        let file_bytes = self.setup.effort.file_bytes;
        BlockJob { writes, block_bytes: BLOCK_BYTES, depth, jobs: 1, file_bytes, seconds, seed: cell.seed }
    }

    fn measure(&self, server: &ConfiguredServer, cell: &Cell) -> Result<Figures, SampleError> {
        let job = self.job(cell, false, DEPTH, cell.seconds);
        clients::measure(&server.process, &job, &Client::default(), false, &self.setup.stop)
    }

    /// Measures while the trouble lasts.
    fn in_trouble(
        &self,
        (trouble, far): (Trouble, &Far<'_>),
        server: &ConfiguredServer,
        cell: &Cell,
    ) -> Result<Figures, SampleError> {
        let pid = match far {
            Far::Nbd(nbdkit) => nbdkit.pid(),
            Far::Ceph(ceph) => ceph.osd(),
        };
        match (trouble, far) {
            (Trouble::NbdKilled, Far::Nbd(nbdkit)) => thread::scope(|scope| {
                nbdkit.kill();
                let measured = scope.spawn(|| self.measure(server, cell));
                thread::sleep(Duration::from_secs_f64(cell.seconds / 2.0));
                // nbdkit ends with the thread that has started it.
                let started = nbdkit.start_again(&self.setup.stop);
                let measured = measured
                    .join()
                    .unwrap_or_else(|_| Err(SampleError::Unavailable("the client panicked".to_owned())));
                started?;
                measured
            }),
            _ => {
                let pid =
                    pid.ok_or_else(|| SampleError::Unavailable("its server does not run".to_owned()))?;
                let _stopped = Stopped::new(pid)?;
                self.measure(server, cell)
            }
        }
    }
}

impl Bench for Neighbour {
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        let Setup { storage, effort, stop, .. } = &self.setup;
        let fill = &mut |share| tell("filling the disk of this host", share);
        self.file = Some(TestFile::fill(storage, effort.file_bytes, stop, fill)?);
        let ceph = Ceph::start(&self.setup, Store::Memstore, tell)
            .and_then(|ceph| ceph.create_image(IMAGE, effort.file_bytes).map(|()| ceph));
        if self.setup.stop.is_asked() {
            return Err(LabError::Interrupted);
        }
        self.ceph = ceph.map_err(|error| error.to_string());
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let (other, trouble) = (self.part.ways[cell.variant].1, self.part.loads[cell.workload].1);
        let (far, program) = (self.far(trouble)?, self.setup.program.as_deref());
        let text = |sockets: &Sockets| self.configuration(&far, sockets);
        let server = ConfiguredServer::start(program, 2, text, &self.setup.stop)?;
        let figures = if other == Other::Idle {
            self.measure(&server, &cell)?
        } else {
            let lasts = cell.seconds * 1.2 + 2.0 * AROUND.as_secs_f64();
            let job = clients::timed(&self.job(&cell, true, OTHER_DEPTH, lasts), lasts);
            thread::scope(|scope| {
                let load = scope.spawn(|| {
                    clients::go(
                        &server.sockets.disks[1],
                        &job,
                        &Client::default(),
                        &self.setup.stop,
                        &mut Unwatched,
                    )
                });
                thread::sleep(AROUND);
                let measured = match other {
                    Other::InTrouble => self.in_trouble((trouble, &far), &server, &cell),
                    _ => self.measure(&server, &cell),
                };
                let load =
                    load.join().map_err(|_| SampleError::Unavailable("the load panicked".to_owned()))??;
                #[allow(clippy::cast_precision_loss)] // requests of one sample
                measured.map(|mut figures| {
                    figures.insert("other", load.group().ios() as f64);
                    figures
                })
            })?
        };
        Ok(self.part.columns.iter().map(|column| figures.get(column.id.as_str()).copied()).collect())
    }

    fn storages(&self) -> Vec<StoragePlace> {
        vec![StoragePlace::of("disk", &self.setup.storage)]
    }

    fn notes(&self) -> Vec<String> {
        vec![
            "Both disks are on one worker. This disk: 4k random reads, depth 4. The other: 4k random writes, depth 32. The \
             trouble lasts for the whole measurement; nbdkit starts again after half of it."
                .to_owned(),
        ]
    }
}
