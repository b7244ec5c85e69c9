//! What `qcow2` measures, and the targets.

use crate::experiment::{
    Column, Declaration, Difference, Effort, Plot, Published, Scale, Source, Target, Variant, Workload,
    Yardstick,
};
use crate::experiments::vhost::bench::Part;
use crate::experiments::vhost::columns::{CPU, IOPS, LATENCY, columns, declaration, of, target};
use crate::load::disk::images::LAYERS;
use crate::load::disk::test_files::Place;

/// What a server serves, and which one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// `bareblk serve` on a raw file, with as many queues as workers.
    Raw { workers: u16 },
    /// The same on a qcow2 image.
    Image { workers: u16 },
    /// The same on the last image of a chain.
    Chain,
    /// qemu-storage-daemon on a qcow2 image.
    Peer,
}

/// The image when a sample begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// All blocks have data.
    Full,
    /// No block has.
    New,
    /// No block has, and the backing file has all. The raw file has all itself.
    Over,
}

/// The requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) place: Place,
    pub(super) writes: bool,
    pub(super) content: Content,
}

pub(super) const DEPTH: u32 = 64;
const RAW: &str = "raw";
const RAW_2: &str = "raw-2";
const IMAGE: &str = "qcow2";
const IMAGE_2: &str = "qcow2-2";
const CHAIN: &str = "chain";
const PEER: &str = "qsd";
const DISK: [&str; 2] = ["disk-read", "disk-write"];
const RAM: [&str; 2] = ["ram-read", "ram-write"];
const FIRST: [&str; 4] = ["disk-new", "disk-over", "ram-new", "ram-over"];

pub(super) fn part() -> Part<Way, Ask> {
    let chain = format!("qcow2, the last of {LAYERS} layers");
    Part {
        ways: vec![
            (Variant::new(RAW, "raw"), Way::Raw { workers: 1 }),
            (Variant::new(IMAGE, "qcow2"), Way::Image { workers: 1 }),
            (Variant::new(CHAIN, &chain).only(&[DISK[0], RAM[0]]), Way::Chain),
            (Variant::new(PEER, "qemu-storage-daemon, qcow2"), Way::Peer),
            (Variant::new(RAW_2, "raw ×2"), Way::Raw { workers: 2 }),
            (Variant::new(IMAGE_2, "qcow2 ×2").against(RAW_2), Way::Image { workers: 2 }),
        ],
        loads: loads(),
        columns: measured(),
    }
}

fn loads() -> Vec<(Workload, Ask)> {
    let mut loads = Vec::new();
    for (prefix, label, place) in [("disk", "disk", Place::Disk), ("ram", "RAM disk", Place::Tmpfs)] {
        let contents = [
            ("read", "4k random reads", false, Content::Full),
            ("write", "4k random writes", true, Content::Full),
            ("new", "first 4k random writes to a new image", true, Content::New),
            ("over", "first 4k random writes over a backing file", true, Content::Over),
        ];
        for (id, what, writes, content) in contents {
            let title = format!("{what}, {label}, depth {DEPTH} per queue");
            loads.push((Workload::new(&format!("{prefix}-{id}"), &title), Ask { place, writes, content }));
        }
    }
    loads
}

fn measured() -> Vec<Column> {
    columns(&[IOPS, CPU, "client-cpu", LATENCY, "p99", "switches", "kicks"])
}

pub(super) fn this() -> Declaration {
    Declaration {
        source: Source {
            title: "No publication: this is this project's own requirement".into(),
            year: 2026,
            setup: "images of qemu-img, full, new, and over a backing file".into(),
        },
        published: Published {
            caption: "No published figures".into(),
            columns: Vec::new(),
            rows: Vec::new(),
            conclusion: "A request to a cluster that has data costs as much as on a raw file.".into(),
        },
        differences: vec![Difference::new(
            "disks of guests",
            "this project's driver on threads of the program",
            "this measures only the path from ring to file",
        )],
        ratio_title: "of raw".into(),
        plots: vec![
            Plot::new("iops", "IOPS", Some(IOPS), Scale::Linear),
            Plot::new("cpu", "CPU of the server per I/O", Some(CPU), Scale::Linear),
        ],
        targets: targets(),
        full: Effort { rounds: 10, seconds: 0.5, file_bytes: 512 << 20 },
        quick: Effort { rounds: 1, seconds: 0.05, file_bytes: 16 << 20 },
        ..declaration("qcow2", "What does a qcow2 image cost beside a raw file?", &part(), RAW)
    }
}

fn targets() -> Vec<Target> {
    let full = [DISK, RAM].concat();
    vec![
        target(
            "an image whose clusters have data has 0.97 of a raw file's IOPS",
            (&[IMAGE, IMAGE_2], &full),
            (0.97, 0.03),
            Yardstick::Baseline,
        ),
        target("on the RAM disk it has 5 times the peer's IOPS", (&[IMAGE], &RAM), (5.0, 0.5), of(PEER)),
        target("on the disk it has 1.1 times the peer's IOPS", (&[IMAGE], &DISK), (1.1, 0.1), of(PEER)),
        target("first writes have twice the peer's IOPS", (&[IMAGE], &FIRST), (2.0, 0.2), of(PEER)),
        target("a chain has 0.9 of one layer's IOPS", (&[CHAIN], &[DISK[0], RAM[0]]), (0.9, 0.05), of(IMAGE)),
    ]
}
