//! `remote-disks`: what many RBD disks cost in one server, with a connection to the cluster each, or one for all.
//!
//! `sample → bareblk serve with one disk (its memory and threads) → with all disks → client of one → Figures`

use std::fmt::Write;
use std::io;
use std::time::{Duration, Instant};

use workload::Client;

use super::columns::{not_published, own_requirement};
use crate::error::LabError;
use crate::experiment::{
    Bench, Cell, Column, Declaration, Effort, Experiment, Reading, SampleError, Setup, Variant, Workload,
};
use crate::experiments::vhost::bench::{BLOCK_BYTES, Part};
use crate::experiments::vhost::columns::{CPU, IOPS, declaration};
use crate::load::BlockJob;
use crate::load::disk::clients;
use crate::load::remote::{Ceph, Store};
use crate::load::server::configured::{ConfiguredServer, Sockets, quoted};
use crate::load::server::cost::{private_kib, thread_count};
use crate::machine::StoragePlace;

const ONE: &str = "disks-1";
const DEPTH: u32 = 32;
/// Pause before a server's memory is read, in which it frees what only its start needed.
const SETTLE: Duration = Duration::from_millis(300);

/// How many disks a server has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Count {
    disks: usize,
    /// Whether the disks share one connection.
    shared: bool,
}

pub(super) fn experiment() -> Experiment {
    let make = |setup: &Setup| {
        let ceph = Err("not prepared".to_owned());
        Box::new(Disks { setup: setup.clone(), part: part(), ceph }) as Box<_>
    };
    Experiment { declaration: this(), make }
}

fn part() -> Part<Count, ()> {
    let count = |id: &str, label: &str, disks, shared| (Variant::new(id, label), Count { disks, shared });
    Part {
        ways: vec![
            count(ONE, "1 disk", 1, false),
            count("disks-16", "16 disks, a connection each", 16, false),
            count("disks-16-shared", "16 disks, one connection", 16, true),
            count("disks-64", "64 disks, a connection each", 64, false),
            count("disks-64-shared", "64 disks, one connection", 64, true),
        ],
        loads: vec![(Workload::new("randread", "4k random reads of one disk, depth 32"), ())],
        columns: Column::table(&COLUMNS),
    }
}

fn this() -> Declaration {
    Declaration {
        source: own_requirement("RBD images in one server, of which one is busy"),
        published: not_published("A shared connection saves threads and memory."),
        ratio_title: "of 1 disk".into(),
        full: Effort { rounds: 10, seconds: 0.5, file_bytes: 16 << 20 },
        quick: Effort { rounds: 1, seconds: 0.05, file_bytes: 4 << 20 },
        ..declaration("remote-disks", "What does each RBD disk of a server cost?", &part(), ONE)
    }
}

/// The columns: id, title, unit, decimals, and what is measured.
const COLUMNS: [(&str, &str, &str, usize, &str); 6] = [
    (IOPS, "IOPS", "1/s", 0, "Requests of the busy disk that completed in the counted time."),
    (CPU, "process CPU", "µs/IO", 1, "Processor time of all threads of the server, per request."),
    ("threads", "threads", "", 0, "Threads of the server before a client connects."),
    (
        "threads-more",
        "threads per disk",
        "",
        2,
        "Threads of the server, minus those with one disk, divided by the number of further disks.",
    ),
    (
        "memory",
        "memory per disk",
        "MiB",
        2,
        "Private memory (RssAnon) of the server and its helper before a client connects, minus that with one disk, divided \
         by the number of further disks.",
    ),
    ("start", "start", "s", 2, "Time from the start of the program until all its disks accept clients."),
];

struct Disks {
    setup: Setup,
    part: Part<Count, ()>,
    /// The cluster, or why there is none.
    ceph: Result<Ceph, String>,
}

/// A server before a client connects.
struct Idle {
    server: ConfiguredServer,
    threads: f64,
    memory_mib: Option<f64>,
    start: Duration,
}

impl Disks {
    fn start(&self, Count { disks, shared }: Count) -> Result<Idle, SampleError> {
        let ceph = self.ceph.as_ref().map_err(|why| SampleError::Unavailable(why.clone()))?;
        let (began, program) = (Instant::now(), self.setup.program.as_deref());
        let text = |sockets: &Sockets| configuration(ceph, sockets, shared);
        let server = ConfiguredServer::start(program, disks, text, &self.setup.stop)?;
        let start = began.elapsed();
        std::thread::sleep(SETTLE);
        let pid = server.process.pid();
        #[allow(clippy::cast_precision_loss)] // of one server
        let (threads, memory) = (thread_count(pid) as f64, private_kib(pid).map(|kib| kib as f64 / 1024.0));
        Ok(Idle { server, threads, memory_mib: memory, start })
    }
}

fn image(disk: usize) -> String {
    format!("disk-{disk}")
}

/// The configuration file's text.
fn configuration(ceph: &Ceph, sockets: &Sockets, shared: bool) -> io::Result<String> {
    let mut text = format!("control = {}\n", quoted(&sockets.control)?);
    for (disk, socket) in sockets.disks.iter().enumerate() {
        let (image, conf) = (image(disk), quoted(ceph.configuration())?);
        let _ = write!(
            text,
            "\n[[disk]]\nname = \"lab-{disk}\"\nimage = \"rbd:rbd/{image}\"\nsocket = {}\nrbd-conf = {conf}\n\
             rbd-share-connection = {shared}\n",
            quoted(socket)?
        );
    }
    Ok(text)
}

impl Bench for Disks {
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        let most = self.part.ways.iter().map(|(_, count)| count.disks).max().unwrap_or(0);
        let ceph = Ceph::start(&self.setup, Store::Memstore, tell).and_then(|ceph| {
            let make = |disk| ceph.create_image(&image(disk), self.setup.effort.file_bytes);
            (0..most).try_for_each(make).map(|()| ceph)
        });
        if self.setup.stop.is_asked() {
            return Err(LabError::Interrupted);
        }
        self.ceph = ceph.map_err(|error| error.to_string());
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let count = self.part.ways[cell.variant].1;
        let alone = self.start(Count { disks: 1, shared: count.shared })?;
        let (threads, memory_mib) = (alone.threads, alone.memory_mib);
        drop(alone);
        let idle = self.start(count)?;
        let job = BlockJob {
            writes: false,
            block_bytes: BLOCK_BYTES,
            depth: DEPTH,
            jobs: 1,
            file_bytes: self.setup.effort.file_bytes,
            seconds: cell.seconds,
            seed: cell.seed,
        };
        let process = &idle.server.process;
        let mut figures = clients::measure(process, &job, &Client::default(), false, &self.setup.stop)?;
        figures.extend([("threads", idle.threads), ("start", idle.start.as_secs_f64())]);
        if count.disks > 1 {
            #[allow(clippy::cast_precision_loss)] // disks
            let more = (count.disks - 1) as f64;
            figures.insert("threads-more", (idle.threads - threads) / more);
            let memory = idle.memory_mib.zip(memory_mib);
            figures.extend(memory.map(|(all, one)| ("memory", (all - one) / more)));
        }
        Ok(self.part.columns.iter().map(|column| figures.get(column.id.as_str()).copied()).collect())
    }

    fn storages(&self) -> Vec<StoragePlace> {
        vec![StoragePlace::of("disk", &self.setup.storage)]
    }

    fn notes(&self) -> Vec<String> {
        vec!["One worker; the images are empty; a cluster with memstore. No client is connected to an idle disk.".to_owned()]
    }
}
