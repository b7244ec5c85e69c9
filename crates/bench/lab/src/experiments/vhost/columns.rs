//! Declarations that the parts of `vhost` share: the published work and the columns.

use super::bench::{Part, Way};
use crate::experiment::{
    Column, Declaration, Difference, Effort, Published, PublishedColumn, PublishedRow, RatioForm, Source,
    Target, Variant, Yardstick, owned,
};
use crate::load::server::process::Kind;

pub(crate) const HOST: &str = "host";
pub(crate) const PEER_SLEEPS: &str = "qsd-sleep";
pub(crate) const PEER_POLLS: &str = "qsd-poll";
pub(crate) const IMG_HOST: &str = "qemu-img-host";
pub(crate) const IMG_PEER: &str = "qemu-img-qsd";
pub(crate) const IMG_OWN: &str = "qemu-img-bareblk";
pub(crate) const IOPS: &str = "iops";
pub(crate) const CPU: &str = "cpu";
pub(crate) const LATENCY: &str = "latency";
pub(crate) const WAKES: &str = "wakes";

/// The declaration common to all parts; fields that differ between parts are empty.
pub(crate) fn declaration<W, A>(
    name: &str,
    question: &str,
    part: &Part<W, A>,
    baseline: &str,
) -> Declaration {
    Declaration {
        name: name.into(),
        question: question.into(),
        source: Source {
            title: "vhost-blk: in-kernel accelerator for virtio-blk guests (RFC v2)".into(),
            year: 2022,
            setup:
                "fio --direct=1 --bs=4k --ioengine=libaio --iodepth=128 in a Linux guest, drive opened with \
                    cache=none, xfs on an SSD; and a RAM disk"
                    .into(),
        },
        published: Published {
            caption: String::new(),
            columns: Vec::new(),
            rows: Vec::new(),
            conclusion: String::new(),
        },
        differences: Vec::new(),
        variants: part.ways.iter().map(|(variant, _)| variant.clone()).collect(),
        workloads: part.loads.iter().map(|(workload, _)| workload.clone()).collect(),
        columns: part.columns.clone(),
        baseline: baseline.into(),
        compared: IOPS.into(),
        ratio_title: "of host".into(),
        ratio_form: RatioForm::Share,
        plots: Vec::new(),
        curves: Vec::new(),
        stacks: Vec::new(),
        maps: Vec::new(),
        courses: Vec::new(),
        targets: Vec::new(),
        full: Effort { rounds: 30, seconds: 0.5, file_bytes: 1 << 30 },
        quick: Effort { rounds: 1, seconds: 0.05, file_bytes: 64 << 20 },
    }
}

/// The independent client's variants: on the file, on the peer, and on `bareblk serve` with one worker. The last two
/// are compared with `against`.
pub(crate) fn independent(engine: &'static str, against: &str) -> [(Variant, Way); 3] {
    let ways = [
        (IMG_HOST, "qemu-img on the file".to_owned(), Way::QemuImg(None)),
        (IMG_PEER, "qemu-img, qemu-storage-daemon".to_owned(), Way::QemuImg(Some(Kind::Peer))),
        (IMG_OWN, format!("qemu-img, bareblk {engine}"), Way::own_by_qemu_img(engine)),
    ];
    ways.map(|(id, label, way)| {
        let variant = Variant::new(id, &label);
        (if id == against { variant } else { variant.against(against) }, way)
    })
}

/// The columns with these ids, in this order.
pub(crate) fn columns(ids: &[&str]) -> Vec<Column> {
    let known = all_columns();
    ids.iter().filter_map(|id| known.iter().find(|column| column.id == *id).cloned()).collect()
}

fn all_columns() -> [Column; 11] {
    COLUMNS.map(|(id, title, unit, decimals, measured)| Column::new(id, title, unit, decimals, measured))
}

/// The columns: id, title, unit, decimals, and what is measured.
const COLUMNS: [(&str, &str, &str, usize, &str); 11] = [
    (IOPS, "IOPS", "1/s", 0, "Requests completed in the counted time, all jobs together."),
    (
        CPU,
        "server CPU",
        "µs/IO",
        2,
        "Processor time of the server's process, including all threads and the kernel threads that work for it, per \
         request. Host: fio's jobs, which are client and server in one, without kernel threads.",
    ),
    (
        "client-cpu",
        "client CPU",
        "µs/IO",
        2,
        "Processor time of the client's threads, per request. A client that polls uses all the processor time that it \
         gets.",
    ),
    (
        LATENCY,
        "mean latency",
        "µs",
        2,
        "Time from submitting a request until the client takes its completion; for the host, fio's lat; for qemu-img, its \
         run time multiplied by the depth and divided by the requests.",
    ),
    (
        "p99",
        "99 % latency",
        "µs",
        1,
        "99 % of the requests are faster than this. Excludes the submission, like fio's clat.",
    ),
    (
        "switches",
        "server switches",
        "1/IO",
        3,
        "Context switches, voluntary and involuntary, summed over the server's threads, except threads that ended \
         meanwhile.",
    ),
    ("kicks", "kicks", "1/IO", 3, "Notifications that the server requested, per request."),
    (
        WAKES,
        "wake-ups",
        "1/s",
        1,
        "Context switches, voluntary and involuntary, summed over all threads of the server, per second.",
    ),
    ("idle-cpu", "CPU", "µs/s", 1, "Processor time of all threads of the server, per second."),
    ("threads", "threads", "", 0, "Number of threads of the server's process at the end of the sample."),
    (
        "resident",
        "memory",
        "MiB",
        1,
        "Resident memory of the server's process, including its mapping of guest memory.",
    ),
];

pub(crate) fn published(
    caption: &str,
    columns: &[(&str, &str, &str)],
    rows: &[(&str, &str, &[&str])],
    conclusion: &str,
) -> Published {
    let column = |&(title, workload, column): &_| PublishedColumn::new(title, workload, column);
    let row = |&(label, variant, figures): &_| PublishedRow::new(label, variant, figures);
    Published {
        caption: caption.into(),
        columns: columns.iter().map(column).collect(),
        rows: rows.iter().map(row).collect(),
        conclusion: conclusion.into(),
    }
}

/// The differences of all parts, followed by those of one part.
pub(crate) fn differences(more: &[(&str, &str, &str)]) -> Vec<Difference> {
    let common = [
        (
            "fio in a Linux guest",
            "this project's driver on threads of the program, the same for every server; each job has its \
             own queue",
            "this measures only the path from ring to file: no guest, no exits, no guest scheduler",
        ),
        (
            "one kind of client",
            "in some parts also `qemu-img bench` over libblkio (rows \"qemu-img\") if it is installed: one queue, \
             which holds 85 requests, and a client that sleeps",
            "the figures cannot be an artefact of this project's driver",
        ),
        (
            "QEMU's virtio-blk, and a server in the host's kernel",
            "qemu-storage-daemon, which is QEMU's block layer behind vhost-user, and `bareblk serve`, each a process",
            "this project is a vhost-user server, and QEMU's own device needs a guest",
        ),
    ];
    let difference = |&(original, here, why): &_| Difference::new(original, here, why);
    common.iter().chain(more).map(difference).collect()
}

/// A target: `variants` under `workloads` reach `at_least` of the yardstick.
pub(crate) fn target(
    text: &str,
    (variants, workloads): (&[&str], &[&str]),
    (at_least, half_width_max): (f64, f64),
    yardstick: Yardstick,
) -> Target {
    Target {
        text: text.into(),
        variants: owned(variants),
        workloads: owned(workloads),
        at_least,
        half_width_max,
        yardstick,
    }
}

/// Makes the yardstick that is the ratio to one other variant.
pub(crate) fn of(variant: &str) -> Yardstick {
    Yardstick::BestOf(vec![variant.to_owned()])
}
