//! Measures one disk elsewhere: directly with fio, or through a server of this host.
//!
//! `prepare → cluster or NBD server, filled disk; sample → fio | new server process → clients → the part's columns`
//!
//! - Each sample connects anew, so that only one program has the disk open.

use super::columns::{DEPTHS, HOST, OWN, PEER, TWO_QUEUES, TWO_WORKERS};
use crate::error::LabError;
use crate::experiment::{Bench, Cell, Reading, SampleError, Setup, Variant, Workload, owned};
use crate::experiments::vhost::bench::{BLOCK_BYTES, Part};
use crate::load::disk::{clients, fio, fio_jobs};
use crate::load::remote::{Place, RemoteDisk};
use crate::load::server::process::{Kind, PEER_MISSING, ServerProcess, peer_version};
use crate::load::{BlockJob, Figures};
use crate::machine::StoragePlace;
use workload::Client;

/// Tells the user how to install what the peer needs for RBD.
const PEER_WITHOUT_RBD: &str = "rbd for qemu-storage-daemon is not installed: apt install qemu-block-extra";
const ROWS: [&str; 2] = [
    "fio reaches the disk itself. In the other rows, a client (this project's driver, which sleeps until it is called) sends \
     the requests to a server, which reaches the disk.",
    "Process CPU and switches are those of fio or the server, with all threads of the library. Two queues share the depth. \
     The disk's own server uses the same processors.",
];

/// The path from the load to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// fio's engine for such a disk, without a server.
    Fio,
    /// `qemu-storage-daemon`.
    Peer,
    /// `bareblk serve`. The queues share the depth.
    Own { queues: u16, workers: u16 },
}

/// The requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub place: Place,
    pub writes: bool,
    pub depth: u32,
}

/// The ways to a disk. Two queues are measured only where each has more than one request.
pub(crate) fn ways(fio: &str, loads: &[(Workload, Ask)]) -> Vec<(Variant, Way)> {
    let deep =
        loads.iter().filter(|(_, ask)| ask.depth > DEPTHS[0]).map(|(workload, _)| workload.id.as_str());
    let deep = owned(&deep.collect::<Vec<_>>());
    let two = |id, label| Variant { only: deep.clone(), ..Variant::new(id, label) };
    vec![
        (Variant::new(HOST, fio), Way::Fio),
        (Variant::new(PEER, "qemu-storage-daemon"), Way::Peer),
        (Variant::new(OWN, "bareblk"), Way::Own { queues: 1, workers: 1 }),
        (two(TWO_QUEUES, "bareblk, 2 queues"), Way::Own { queues: 2, workers: 1 }),
        (two(TWO_WORKERS, "bareblk, 2 queues on 2 workers"), Way::Own { queues: 2, workers: 2 }),
    ]
}

/// The loads of a place: reads and writes at each depth.
pub(crate) fn loads(prefix: &str, label: &str, place: Place, depths: &[u32]) -> Vec<(Workload, Ask)> {
    let load = |writes, depth| {
        let word = if writes { "write" } else { "read" };
        let workload = Workload::new(
            &format!("{prefix}{word}-{depth}"),
            &format!("4k random {word}s, {label}, depth {depth}"),
        );
        (workload, Ask { place, writes, depth })
    };
    [false, true]
        .into_iter()
        .flat_map(|writes| depths.iter().map(move |&depth| load(writes, depth)))
        .collect()
}

/// Measures one part.
pub(crate) struct Remote {
    setup: Setup,
    part: Part<Way, Ask>,
    /// The disks, or why there is none.
    disks: Vec<(Place, Result<RemoteDisk, String>)>,
}

impl Remote {
    pub fn new(setup: &Setup, part: Part<Way, Ask>) -> Self {
        Self { setup: setup.clone(), part, disks: Vec::new() }
    }

    fn disk(&self, place: Place) -> Result<&RemoteDisk, SampleError> {
        let found = self.disks.iter().find(|(known, _)| *known == place).map(|(_, disk)| disk);
        let disk = found.ok_or_else(|| SampleError::Unavailable("not prepared".to_owned()))?;
        disk.as_ref().map_err(|why| SampleError::Unavailable(why.clone()))
    }

    fn measure(&self, way: Way, disk: &RemoteDisk, job: &BlockJob) -> Result<Figures, SampleError> {
        let (storage, stop) = (disk.storage(), &self.setup.stop);
        let (kind, queues) = match way {
            Way::Fio => return fio_jobs::measure_remote(storage, job, &self.setup.scratch, stop),
            Way::Peer => (Kind::Peer, 1),
            Way::Own { queues, workers } => {
                (Kind::Own { engine: "auto", cache: "none", workers, polls: true }, queues)
            }
        };
        let server = ServerProcess::start(kind, self.setup.program.as_deref(), storage, queues, stop);
        let server = server.map_err(|error| match error.to_string() {
            text if text.contains("Unknown driver 'rbd'") => {
                SampleError::Unavailable(PEER_WITHOUT_RBD.to_owned())
            }
            _ => error,
        })?;
        let job = BlockJob { depth: job.depth / u32::from(queues), jobs: queues, ..*job };
        let mut figures = clients::measure(&server, &job, &Client::default(), false, stop)?;
        if let (Way::Own { .. }, Some(calls)) = (way, figures.get("client-sleeps").copied()) {
            // It calls the client by `io_submit`, which is not among the counted calls of `write`.
            figures.entry("writes").and_modify(|writes| *writes += calls);
        }
        Ok(figures)
    }
}

impl Bench for Remote {
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        for place in self.part.loads.iter().map(|(_, ask)| ask.place) {
            if !self.disks.iter().any(|(known, _)| *known == place) {
                self.disks.push((place, RemoteDisk::make(place, &self.setup, tell)?));
            }
        }
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let Ask { place, writes, depth } = self.part.loads[cell.workload].1;
        let job = BlockJob {
            writes,
            block_bytes: BLOCK_BYTES,
            depth,
            jobs: 1,
            file_bytes: self.setup.effort.file_bytes,
            seconds: cell.seconds,
            seed: cell.seed,
        };
        let figures = self.measure(self.part.ways[cell.variant].1, self.disk(place)?, &job)?;
        Ok(self.part.columns.iter().map(|column| figures.get(column.id.as_str()).copied()).collect())
    }

    fn storages(&self) -> Vec<StoragePlace> {
        vec![StoragePlace::of("disk", &self.setup.storage)]
    }

    fn notes(&self) -> Vec<String> {
        let or = |version: Option<String>, missing: &str| version.unwrap_or_else(|| missing.to_owned());
        let (fio, peer) = (or(fio::version(), fio::MISSING), or(peer_version(), PEER_MISSING));
        let rows = ROWS.map(str::to_owned);
        [format!("Measured with: {fio}; {peer}.")].into_iter().chain(rows).collect()
    }
}
