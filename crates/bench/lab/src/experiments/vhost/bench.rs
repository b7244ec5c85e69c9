//! Measures the parts of `vhost`: a server, the host, or a bare loop under a load of random 4k requests.
//!
//! `sample → new server process → (busy neighbours) → clients | fio | loop → Figures → the part's columns`
//!
//! - Each sample starts a new server, so that samples do not affect each other and only one server has the file open.
//! - A polling client and its server have separate cores: the first cores are for the workers, the next for the
//!   clients. The scheduler places threads that sleep.
//! - If a program is missing, its variants report how to install it; the others run.

use std::path::Path;
use std::time::{Duration, Instant};

use blk_driver::{Device, Options};

use crate::error::LabError;
use crate::experiment::{Bench, Cell, Column, Reading, SampleError, Setup, Variant, Workload};
use crate::load::disk::qemu_img::{self, QemuImg};
use crate::load::disk::test_file::TestFile;
use crate::load::disk::test_files::{Place, TMPFS, TestFiles};
use crate::load::disk::{clients, copy_loop, fio, fio_jobs};
use crate::load::neighbours::Neighbours;
use crate::load::server::cost::{Cost, resident_kib, thread_count};
use crate::load::server::process::{Kind, ServerProcess, Storage, once_it_listens, peer_version};
use crate::load::{BlockJob, Figures, cores, wake_up};
use crate::machine::StoragePlace;
use workload::Client;

/// Block size of the published measurements.
pub(crate) const BLOCK_BYTES: u32 = 4096;
const PLACES: &str = "'asleep', 'polling': how clients wait. Polling clients and their servers are bound to separate \
    cores; sleeping clients and their servers are not bound.";
/// The pause between the start of a client's queues and the measurement, after which an idle worker has stopped
/// polling.
const SETTLE: Duration = Duration::from_millis(300);
/// Time between two checks of the user's request to stop.
const LOOK: Duration = Duration::from_millis(20);

/// The subject of a part's measurement.
#[derive(Clone, Debug)]
pub(crate) struct Part<W = Way, A = Ask> {
    pub ways: Vec<(Variant, W)>,
    pub loads: Vec<(Workload, A)>,
    pub columns: Vec<Column>,
}

/// The path from the load to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Fio(fio_jobs::Engine),
    CopyLoop,
    WakeUp {
        pinned: bool,
    },
    Server {
        kind: Kind,
        client_polls: bool,
    },
    /// An independent client, which sleeps; its disk is a server's, or the file itself if `None`.
    QemuImg(Option<Kind>),
}

impl Way {
    /// `qemu-storage-daemon` as the server.
    pub const fn peer(client_polls: bool) -> Self {
        Self::Server { kind: Kind::Peer, client_polls }
    }

    /// `bareblk serve`, in the cache mode that suits its engine.
    pub const fn own(engine: &'static str, workers: u16, client_polls: bool) -> Self {
        Self::Server { kind: own(engine, workers, true), client_polls }
    }

    /// `bareblk serve` with one worker, and an independent client.
    pub const fn own_by_qemu_img(engine: &'static str) -> Self {
        Self::QemuImg(Some(own(engine, 1, true)))
    }

    /// `bareblk serve` with one worker that never polls.
    pub const fn own_asleep(engine: &'static str) -> Self {
        Self::Server { kind: own(engine, 1, false), client_polls: false }
    }
}

const fn own(engine: &'static str, workers: u16, polls: bool) -> Kind {
    let cache = if matches!(engine.as_bytes(), b"io_uring") { "none" } else { "writeback" };
    Kind::Own { engine, cache, workers, polls }
}

/// What the variant is measured with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Random requests, reads or writes.
    Requests { place: Place, writes: bool, depth: u32, queues: u16, disturbed: bool },
    /// No requests: a client is connected and has started its queues, but sends nothing.
    Silence,
}

/// Measures one part.
pub(crate) struct Vhost {
    setup: Setup,
    part: Part,
    fio: Option<String>,
    peer: Option<String>,
    qemu_img: QemuImg,
    files: TestFiles,
}

impl Vhost {
    pub fn new(setup: &Setup, part: Part) -> Self {
        let (fio, peer) = (fio::version(), peer_version());
        let qemu_img = QemuImg::find(setup.qemu_img.as_deref());
        Self { setup: setup.clone(), part, fio, peer, qemu_img, files: TestFiles::default() }
    }

    fn uses(&self, wanted: Place) -> bool {
        self.part.loads.iter().any(|(_, ask)| match ask {
            Ask::Requests { place, .. } => *place == wanted,
            Ask::Silence => wanted == Place::Tmpfs,
        })
    }

    fn server(&self, kind: Kind, file: &TestFile, queues: u16) -> Result<ServerProcess, SampleError> {
        let storage = Storage::File(file.path());
        ServerProcess::start(kind, self.setup.program.as_deref(), storage, queues, &self.setup.stop)
    }

    fn requests(&self, way: Way, place: Place, job: &BlockJob) -> Result<Figures, SampleError> {
        let (file, stop) = (self.files.one(place)?, &self.setup.stop);
        match way {
            Way::Fio(engine) => fio_jobs::measure(file.path(), job, engine, &self.setup.scratch, stop),
            Way::CopyLoop => copy_loop::measure(file.path(), job, stop),
            Way::WakeUp { pinned } => wake_up::measure(job.seconds, pinned),
            Way::QemuImg(None) => self.qemu_img.measure(qemu_img::Disk::File(file.path()), job, stop),
            Way::QemuImg(Some(kind)) => {
                let server = self.server(kind, file, job.jobs)?;
                self.qemu_img.measure(qemu_img::Disk::Served(&server), job, stop)
            }
            Way::Server { kind, client_polls } => {
                let workers = kind.workers();
                let start = || self.server(kind, file, job.jobs);
                let server = if client_polls { cores::on_the_first(workers, start) } else { start() }?;
                let own_cores = (workers..workers + usize::from(job.jobs)).map(cores::at);
                let cpus = if client_polls { own_cores.collect() } else { Vec::new() };
                let client = Client { poll: client_polls, cpus, ..Client::default() };
                let maps = matches!(kind, Kind::Own { engine: "mmap", .. });
                clients::measure(&server, job, &client, maps, stop)
            }
        }
    }

    #[allow(clippy::cast_precision_loss)] // of one sample
    fn silence(&self, way: Way, seconds: f64) -> Result<Figures, SampleError> {
        let Way::Server { kind, .. } = way else {
            return Err(SampleError::Unavailable(
                "only a server can be measured without requests".to_owned(),
            ));
        };
        let queues = u16::try_from(kind.workers()).unwrap_or(u16::MAX);
        let server = self.server(kind, self.files.one(Place::Tmpfs)?, queues)?;
        let options = Options { queues, ..Options::new(server.socket()) };
        let (device, started) = once_it_listens(|| Device::connect(&options))
            .map_err(|error| SampleError::because("connecting", &error))?;
        self.sleep(SETTLE)?;
        let (before, start) = (Cost::of(server.pid()), Instant::now());
        self.sleep(Duration::from_secs_f64(seconds))?;
        let (cost, seconds) = (Cost::of(server.pid()).since(before), start.elapsed().as_secs_f64());
        let mut figures = Figures::from([
            ("wakes", cost.switches as f64 / seconds),
            ("idle-cpu", cost.cpu_ns as f64 / 1000.0 / seconds),
            ("threads", thread_count(server.pid()) as f64),
        ]);
        figures.extend(resident_kib(server.pid()).map(|kib| ("resident", kib as f64 / 1024.0)));
        drop((started, device));
        Ok(figures)
    }

    fn sleep(&self, time: Duration) -> Result<(), SampleError> {
        let end = Instant::now() + time;
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            if self.setup.stop.is_asked() {
                return Err(SampleError::Interrupted);
            }
            std::thread::sleep(left.min(LOOK));
        }
        Ok(())
    }
}

impl Bench for Vhost {
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        let mut places = vec![Place::Disk, Place::Tmpfs];
        places.retain(|&place| self.uses(place));
        self.files = TestFiles::fill(&self.setup, (&places, 1), tell)?;
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let way = self.part.ways[cell.variant].1;
        let figures = match self.part.loads[cell.workload].1 {
            Ask::Silence => self.silence(way, cell.seconds)?,
            Ask::Requests { place, writes, depth, queues, disturbed } => {
                let job = BlockJob {
                    writes,
                    block_bytes: BLOCK_BYTES,
                    depth,
                    jobs: queues,
                    file_bytes: self.files.one(place)?.size_bytes(),
                    seconds: cell.seconds,
                    seed: cell.seed,
                };
                let _neighbours = disturbed.then(|| Neighbours::start(1)).transpose()?;
                self.requests(way, place, &job)?
            }
        };
        Ok(self.part.columns.iter().map(|column| figures.get(column.id.as_str()).copied()).collect())
    }

    fn storages(&self) -> Vec<StoragePlace> {
        let disk = self.uses(Place::Disk).then(|| StoragePlace::of("disk", &self.setup.storage));
        let ram = self.uses(Place::Tmpfs).then(|| StoragePlace::of("RAM disk", Path::new(TMPFS)));
        disk.into_iter().chain(ram).collect()
    }

    fn notes(&self) -> Vec<String> {
        let is_used = |wanted: &dyn Fn(&Way) -> bool| self.part.ways.iter().any(|(_, way)| wanted(way));
        let mut notes = Vec::new();
        if is_used(&|way| {
            matches!(way, Way::Server { kind: Kind::Peer, .. } | Way::QemuImg(Some(Kind::Peer)))
        }) {
            notes.push(match &self.peer {
                Some(version) => format!("The peer is {version}."),
                None => crate::load::server::process::PEER_MISSING.to_owned() + ".",
            });
        }
        if is_used(&|way| matches!(way, Way::QemuImg(_))) {
            notes.push(match self.qemu_img.version() {
                Ok(version) => format!("The independent client is {version}, over libblkio."),
                Err(why) => format!("There is no independent client: {why}."),
            });
        }
        if is_used(&|way| matches!(way, Way::Server { client_polls: true, .. })) {
            notes.push(PLACES.to_owned());
        }
        if is_used(&|way| matches!(way, Way::Server { kind, .. } if kind.workers() > 1)) {
            notes.push("'×2': a server with two workers.".to_owned());
        }
        if is_used(&|way| matches!(way, Way::Fio(_))) {
            notes.push(match &self.fio {
                Some(version) => format!("The host is {version}."),
                None => fio::MISSING.to_owned() + ".",
            });
        }
        if self.storages().iter().any(|place| place.label == "disk" && place.file_system.starts_with("tmpfs"))
        {
            notes.push("The disk is also a tmpfs: choose a folder on a real disk with --storage.".to_owned());
        }
        notes
    }
}
