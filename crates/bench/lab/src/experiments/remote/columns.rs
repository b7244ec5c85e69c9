//! Declarations that the parts of `remote` share.

use crate::experiment::{
    Beside, Column, Declaration, Difference, Effort, Plot, Published, Scale, Source, Target, Yardstick,
};
use crate::experiments::vhost::bench::Part;
use crate::experiments::vhost::columns::{CPU, IOPS, declaration, target};

pub(crate) const HOST: &str = "host";
pub(crate) const PEER: &str = "qsd";
pub(crate) const OWN: &str = "bareblk";
pub(crate) const TWO_QUEUES: &str = "bareblk-2";
pub(crate) const TWO_WORKERS: &str = "bareblk-2-2";
/// The first one is for single requests.
pub(crate) const DEPTHS: [u32; 3] = [1, 32, 128];

/// The declaration common to the parts that compare a served disk with fio.
pub(crate) fn compared<W, L>(name: &str, question: &str, part: &Part<W, L>, setup: &str) -> Declaration {
    Declaration {
        source: own_requirement(setup),
        published: not_published("A served disk costs little more than the library that reaches it."),
        differences: vec![Difference::new(
            "disks of guests",
            "this project's driver on threads of the program; the disk's own server is on this machine",
            "this measures only the path from ring to disk; the network between hosts would hide it",
        )],
        ratio_title: "of fio".into(),
        plots: vec![
            Plot::new("iops", "IOPS", Some(IOPS), Scale::Linear),
            Plot::new("cpu", "CPU of the whole process per I/O", Some(CPU), Scale::Linear),
        ],
        targets: targets(part),
        full: Effort { rounds: 10, seconds: 2.0, file_bytes: 512 << 20 },
        quick: Effort { rounds: 1, seconds: 0.1, file_bytes: 32 << 20 },
        ..declaration(name, question, part, HOST)
    }
}

pub(crate) fn own_requirement(setup: &str) -> Source {
    Source {
        title: "No publication: this is this project's own requirement".into(),
        year: 2026,
        setup: setup.into(),
    }
}

pub(crate) fn not_published(conclusion: &str) -> Published {
    Published {
        caption: "No published figures".into(),
        columns: Vec::new(),
        rows: Vec::new(),
        conclusion: conclusion.into(),
    }
}

fn targets<W, L>(part: &Part<W, L>) -> Vec<Target> {
    let all: Vec<_> = part.loads.iter().map(|(workload, _)| workload.id.as_str()).collect();
    let beside =
        Yardstick::Beside { column: CPU.into(), variant: HOST.into(), by: Beside::Ratio, at_most: 1.1 };
    vec![
        target("bareblk has 0.95 of fio's IOPS", (&[OWN], &all), (0.95, 0.1), Yardstick::Baseline),
        target("a request costs bareblk at most 1.1 of fio's CPU", (&[OWN], &all), (0.0, 0.1), beside),
    ]
}

pub(crate) fn columns() -> Vec<Column> {
    Column::table(&COLUMNS)
}

/// The columns: id, title, unit, decimals, and what is measured.
const COLUMNS: [(&str, &str, &str, usize, &str); 8] = [
    (IOPS, "IOPS", "1/s", 0, "Requests completed in the counted time, all queues together."),
    (
        CPU,
        "process CPU",
        "µs/IO",
        1,
        "Processor time of the server's process, including all threads of the library, per request; for fio, of fio's whole \
         process, minus that of a run of 1 ms. The disk's own server is not included.",
    ),
    ("client-cpu", "client CPU", "µs/IO", 1, "Processor time of the client's threads, per request."),
    (
        "latency",
        "mean latency",
        "µs",
        0,
        "Time from submitting a request until its completion is taken; fio's lat.",
    ),
    ("p99", "99 % latency", "µs", 0, "99 % of the requests are faster than this. Excludes the submission."),
    (
        "switches",
        "switches",
        "1/IO",
        2,
        "Context switches, voluntary and involuntary, of all threads of the process that CPU is measured of.",
    ),
    (
        "writes",
        "wake-ups sent",
        "1/IO",
        2,
        "Calls of write() by all threads of the server (syscw in /proc/PID/io): they wake a worker, a thread of the library, or \
         the client; data is sent by sendmsg(). bareblk does not wake the client by write(): the client's sleeps are added.",
    ),
    ("kicks", "kicks", "1/IO", 2, "Notifications that the server requested of the client, per request."),
];
