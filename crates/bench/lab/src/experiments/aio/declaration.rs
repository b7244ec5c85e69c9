//! `aio`: the question, the published figures, the variants, and how each figure is measured.

use disk_image::CacheMode;
use io_engine::EngineKind;

use crate::experiment::{
    Column, Declaration, Difference, Effort, Plot, Published, PublishedColumn, PublishedRow, RatioForm,
    Scale, Source, Target, Variant, Workload, Yardstick,
};
use crate::load::Pattern;
use crate::load::disk::test_files::Place;

/// The workloads, indexed as in the declaration.
pub(crate) const WORKLOADS: [(&str, &str, Place, Pattern); 4] = [
    ("disk-randwrite", "16k random writes, disk", Place::Disk, Pattern::Random),
    ("disk-write", "16k sequential writes, disk", Place::Disk, Pattern::Sequential),
    ("tmpfs-randwrite", "16k random writes, tmpfs", Place::Tmpfs, Pattern::Random),
    ("tmpfs-write", "16k sequential writes, tmpfs", Place::Tmpfs, Pattern::Sequential),
];

/// The path from the load to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Bare,
    /// Bare metal as well, but the loop submits in batches as the worker does.
    OwnLoop,
    Ring {
        engine: EngineKind,
        cache: CacheMode,
        fd_pool: u32,
        tmpfs_only: bool,
    },
}

const fn ring(engine: EngineKind, cache: CacheMode) -> Way {
    Way::Ring { engine, cache, fd_pool: 4, tmpfs_only: false }
}

const fn posix(cache: CacheMode, fd_pool: u32) -> Way {
    Way::Ring { engine: EngineKind::PosixAio, cache, fd_pool, tmpfs_only: false }
}

const fn on_tmpfs(engine: EngineKind) -> Way {
    Way::Ring { engine, cache: CacheMode::Writeback, fd_pool: 4, tmpfs_only: true }
}

/// The variants, indexed as in the declaration.
pub(crate) const VARIANTS: [(&str, &str, Way); 14] = [
    ("bare", "bare metal, O_DIRECT", Way::Bare),
    ("bare-batched", "bare metal, own batched loop", Way::OwnLoop),
    ("none-posix-aio-1", "cache=none, posix-aio, no pool", posix(CacheMode::None, 1)),
    ("none-posix-aio-4", "cache=none, posix-aio, pool of 4", posix(CacheMode::None, 4)),
    ("none-linux-aio", "cache=none, linux-aio", ring(EngineKind::LinuxAio, CacheMode::None)),
    ("none-threads", "cache=none, threads", ring(EngineKind::Threads, CacheMode::None)),
    ("none-io_uring", "cache=none, io_uring", ring(EngineKind::IoUring, CacheMode::None)),
    ("writeback-posix-aio-1", "cache=writeback, posix-aio, no pool", posix(CacheMode::Writeback, 1)),
    ("writeback-posix-aio-4", "cache=writeback, posix-aio, pool of 4", posix(CacheMode::Writeback, 4)),
    ("writeback-threads", "cache=writeback, threads", ring(EngineKind::Threads, CacheMode::Writeback)),
    ("writeback-io_uring", "cache=writeback, io_uring", ring(EngineKind::IoUring, CacheMode::Writeback)),
    (
        "writethrough-io_uring",
        "cache=writethrough, io_uring",
        ring(EngineKind::IoUring, CacheMode::Writethrough),
    ),
    ("writeback-sync", "cache=writeback, sync", on_tmpfs(EngineKind::Sync)),
    ("writeback-mmap", "cache=writeback, mmap", on_tmpfs(EngineKind::Mmap)),
];

pub(crate) fn declaration() -> Declaration {
    Declaration {
        name: "aio".into(),
        question: "Do the I/O engines, behind one interface, reach native speed?".into(),
        source: Source {
            title: "Allow multiple AIO implementations behind one block interface (QEMU)".into(),
            year: 2008,
            setup: "array of 14 disks; fio --rw=randwrite|write --bs=16k --ioengine=libaio --direct=1 --norandommap \
                    --runtime=120 --time_based --numjobs=1 --thread --size=25g --iodepth=74 in a Linux guest with \
                    I/O scheduler noop"
                .into(),
        },
        published: published(),
        differences: differences(),
        variants: VARIANTS.iter().map(|(id, label, way)| variant(id, label, *way)).collect(),
        workloads: WORKLOADS.iter().map(|(id, label, ..)| Workload::new(id, label)).collect(),
        columns: columns(),
        baseline: "bare".into(),
        compared: "bandwidth".into(),
        ratio_title: "of bare metal".into(),
        ratio_form: RatioForm::Share,
        plots: plots(),
        curves: Vec::new(),
        stacks: Vec::new(),
        maps: Vec::new(),
        courses: Vec::new(),
        targets: vec![Target {
            text: "linux-aio and io_uring equal bare metal on the disk, with both patterns".into(),
            variants: vec!["none-linux-aio".into(), "none-io_uring".into()],
            workloads: vec!["disk-randwrite".into(), "disk-write".into()],
            at_least: 1.0,
            half_width_max: 0.05,
            yardstick: Yardstick::Baseline,
        }],
        full: Effort { rounds: 30, seconds: 1.0, file_bytes: 1 << 30 },
        quick: Effort { rounds: 3, seconds: 0.15, file_bytes: 256 << 20 },
    }
}

fn variant(id: &str, label: &str, way: Way) -> Variant {
    let variant = Variant::new(id, label);
    match way {
        Way::Ring { tmpfs_only: true, .. } => variant.only(&["tmpfs-randwrite", "tmpfs-write"]),
        _ => variant,
    }
}

fn published() -> Published {
    let column = PublishedColumn::new;
    let row = PublishedRow::new;
    Published {
        caption: "16k writes, 1 thread, queue depth 74".into(),
        columns: vec![
            column("randwrite MB/s", "disk-randwrite", "bandwidth"),
            column("submit lat µs", "disk-randwrite", "submit"),
            column("complete lat ms", "disk-randwrite", "complete"),
            column("write MB/s", "disk-write", "bandwidth"),
            column("submit lat µs", "disk-write", "submit"),
            column("complete lat ms", "disk-write", "complete"),
        ],
        rows: vec![
            row("bare metal, O_DIRECT", "bare", &["61.2", "13.07", "19.59", "128.1", "10.90", "9.45"]),
            row(
                "guest, cache=off, posix-aio",
                "none-posix-aio-1",
                &["4.7", "3467.44", "254.08", "5.1", "3152.00", "231.06"],
            ),
            row(
                "guest, cache=off, linux-aio",
                "none-linux-aio",
                &["61.1", "75.35", "19.57", "130.0", "83.83", "8.99"],
            ),
            row(
                "guest, cache=on, posix-aio before",
                "writeback-posix-aio-1",
                &["127.0", "115.78", "9.19", "184.0", "80.46", "6.35"],
            ),
            row(
                "guest, cache=on, posix-aio after",
                "writeback-posix-aio-4",
                &["126.0", "67.35", "9.30", "165.0", "70.90", "7.09"],
            ),
            row("requested: sync=on", "writethrough-io_uring", &[]),
            row("not yet available: io_uring", "none-io_uring", &[]),
        ],
        conclusion: "posix-aio that bypasses the page cache has 7.6 % of native speed (random) and 3.9 % (sequential), \
                     because it runs the requests of one descriptor one after the other; linux-aio has 100 % and \
                     101.4 %."
            .into(),
    }
}

fn differences() -> Vec<Difference> {
    let difference = Difference::new;
    vec![
        difference(
            "fio in a Linux guest",
            "the driver half of a virtqueue on one thread, a server's worker on another thread of the same process",
            "this measures only the path from ring to file: no guest, no exits, no guest scheduler",
        ),
        difference(
            "14-disk array, a file of 25 GB",
            "one file on the given disk, 1 GiB by default, and one on tmpfs",
            "the question is about engines, and this way every machine can run the experiment",
        ),
        difference(
            "one run of 120 s for each figure",
            "many short rounds; each round runs every variant once, in a different order",
            "a disk's speed drifts by more than the engines differ; ratios within a round are free of this \
             drift",
        ),
        difference(
            "cache=on, posix-aio before and after the change",
            "writeback, posix-aio with one descriptor (before) and with a pool of four (after)",
            "the change introduced the pool",
        ),
        difference(
            "bare metal submits one request per call",
            "fio also does so in this run; a second row of bare metal is this program's own loop over \
             io_uring, which submits in batches",
            "the kernel merges neighbouring requests of a batch, so sequential writes exceed 100 % of fio",
        ),
        difference(
            "O_SYNC through the page cache was requested, but not measured",
            "writethrough, io_uring: each write is durable when it completes (RWF_DSYNC)",
            "the publication left this question open",
        ),
    ]
}

fn columns() -> Vec<Column> {
    let column = Column::new;
    vec![
        column(
            "bandwidth",
            "bandwidth",
            "MB/s",
            1,
            "Bytes of requests completed in the counted time, in units of 10^6.",
        ),
        column("iops", "IOPS", "1/s", 0, "Requests completed in the counted time."),
        column(
            "submit",
            "submit latency",
            "µs",
            2,
            "Mean per request, in the server: from the start of the pass that took it out of the ring until the \
             engine's submit returned (requests of a pass are submitted together). Bare metal: fio's slat, per request.",
        ),
        column(
            "client-submit",
            "client's submit",
            "µs",
            2,
            "Mean per request, in the client: time to fill in, add and publish the request, and to kick. \
             Bare metal has no such figure.",
        ),
        column(
            "complete",
            "completion latency",
            "ms",
            3,
            "Mean, in the client: from adding a request to the ring until the client takes it from the used \
             ring. Bare metal: fio's lat, which also includes the submission.",
        ),
        column(
            "cpu",
            "CPU per I/O",
            "µs",
            2,
            "Processor time of the process without the client's thread, per request: the worker, its helpers, and the \
             kernel threads that work for them. Bare metal: all of fio's job, which is client and server in one.",
        ),
    ]
}

fn plots() -> Vec<Plot> {
    let plot = Plot::new;
    vec![
        plot("bandwidth", "Bandwidth", Some("bandwidth"), Scale::Linear),
        plot("ratio", "Bandwidth, share of bare metal in the same round", None, Scale::Linear),
        plot("latency", "Completion latency", Some("complete"), Scale::Log),
    ]
}
