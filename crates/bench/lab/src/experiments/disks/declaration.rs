//! `disks`: the question, the numbers of disks, and how each figure is measured.

use crate::experiment::{
    Beside, Column, Declaration, Difference, Effort, Plot, Published, RatioForm, Scale, Source, Target,
    Variant, Workload, Yardstick, owned,
};

pub(crate) const BLOCK_BYTES: u32 = 4096;
/// Queue depth of a busy disk.
pub(crate) const DEPTH: u32 = 16;
/// The largest number of busy disks in any variant. Each busy disk needs a filled image.
pub(crate) const MOST_BUSY: usize = 10;
const READ: &str = "randread";
const ONE: &str = "disks-1";
const TEN: &str = "disks-10-busy";
const HUNDRED: &str = "disks-100";
const THOUSAND: &str = "disks-1000";
const THOUSAND_TEN: &str = "disks-1000-busy";
const SCRAPED: &str = "disks-1000-scraped";

/// How many disks one server has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Count {
    pub disks: usize,
    /// How many of the disks have a client.
    pub busy: usize,
    /// Whether an exporter is scraped meanwhile.
    pub scraped: bool,
}

/// The variants, in the order of the tables.
pub(crate) fn counts() -> Vec<(Variant, Count)> {
    let count = |disks, busy| Count { disks, busy, scraped: false };
    let scraped = Count { scraped: true, ..count(1000, MOST_BUSY) };
    vec![
        (Variant::new(ONE, "1 disk"), count(1, 1)),
        (Variant::new("disks-10", "10 disks, 1 busy"), count(10, 1)),
        (Variant::new(HUNDRED, "100 disks, 1 busy"), count(100, 1)),
        (Variant::new(THOUSAND, "1,000 disks, 1 busy"), count(1000, 1)),
        (Variant::new(TEN, "10 disks, 10 busy"), count(10, MOST_BUSY)),
        (Variant::new(THOUSAND_TEN, "1,000 disks, 10 busy").against(TEN), count(1000, MOST_BUSY)),
        (Variant::new(SCRAPED, "1,000 disks, 10 busy, scraped").against(THOUSAND_TEN), scraped),
    ]
}

pub(crate) fn declaration() -> Declaration {
    Declaration {
        name: "disks".into(),
        question: "What do a thousand disks in one server cost the few that are busy?".into(),
        source: Source {
            title: "No publication: this is this project's own requirement".into(),
            year: 2026,
            setup: "1, 10, 100 and 1,000 disks in one server, about 1 % of them busy".into(),
        },
        published: Published {
            caption: "No published figures".into(),
            columns: Vec::new(),
            rows: Vec::new(),
            conclusion: "An idle disk costs nothing but a little memory.".into(),
        },
        differences: vec![Difference::new(
            "disks of guests",
            "sparse files on a RAM disk; the files of busy disks are filled. No front-end is connected to an idle disk",
            "this measures the cost of a disk alone, without that of a connected session",
        )],
        targets: targets(),
        variants: counts().into_iter().map(|(variant, _)| variant).collect(),
        workloads: vec![Workload::new(READ, "4k random reads, RAM disk, depth 16 per busy disk")],
        columns: columns(),
        baseline: ONE.into(),
        compared: "iops".into(),
        ratio_title: "of 1 disk".into(),
        ratio_form: RatioForm::Share,
        plots: vec![Plot::new("cpu", "Server's CPU per I/O", Some("cpu"), Scale::Linear)],
        curves: Vec::new(),
        stacks: Vec::new(),
        maps: Vec::new(),
        courses: Vec::new(),
        full: Effort { rounds: 30, seconds: 0.5, file_bytes: 16 << 20 },
        quick: Effort { rounds: 1, seconds: 0.05, file_bytes: 4 << 20 },
    }
}

fn targets() -> Vec<Target> {
    let cpu = |of: &str| Yardstick::Beside {
        column: "cpu".into(),
        variant: of.into(),
        by: Beside::Ratio,
        at_most: 1.05,
    };
    let figure = |column: &str, at_most| Yardstick::Figure { column: column.into(), at_most };
    let later = Yardstick::Beside {
        column: "max".into(),
        variant: THOUSAND_TEN.into(),
        by: Beside::Difference,
        at_most: 1000.0,
    };
    let thousand = [THOUSAND, THOUSAND_TEN];
    let target = |text: &str, variants: &[&str], half_width_max, yardstick| Target {
        text: text.into(),
        variants: owned(variants),
        workloads: owned(&[READ]),
        at_least: 0.0,
        half_width_max,
        yardstick,
    };
    vec![
        target("idle disks add at most 5 % to the CPU per I/O", &[HUNDRED, THOUSAND], 0.05, cpu(ONE)),
        target(
            "idle disks add at most 5 % to the CPU per I/O, with ten busy disks",
            &[THOUSAND_TEN],
            0.05,
            cpu(TEN),
        ),
        target("1,000 disks are served within 2 s", &thousand, 0.2, figure("start", 2.0)),
        target("an idle disk needs at most 1 KiB", &thousand, 0.1, figure("memory", 1.0)),
        target("the control socket answers a request within 50 ms", &thousand, 5.0, figure("control", 50.0)),
        target("a scrape of 1,000 disks takes at most 50 ms", &[SCRAPED], 5.0, figure("scrape", 50.0)),
        target("scrapes delay no request by more than 1 ms", &[SCRAPED], 500.0, later),
    ]
}

fn columns() -> Vec<Column> {
    Column::table(&COLUMNS)
}

/// The columns: id, title, unit, decimals, and what is measured.
const COLUMNS: [(&str, &str, &str, usize, &str); 8] = [
    ("iops", "IOPS", "1/s", 0, "Requests of all busy disks that completed in the counted time."),
    ("cpu", "server CPU", "µs/IO", 2, "Processor time of all threads of the server, per request."),
    ("p99", "99 % latency", "µs", 1, "99 % of the requests are faster than this. Excludes the submission."),
    ("max", "longest latency", "µs", 0, "The slowest request of all busy disks. Excludes the submission."),
    ("start", "start", "s", 3, "Time from the start of the program until all its sockets exist."),
    (
        "memory",
        "memory per disk",
        "KiB",
        2,
        "Private memory (RssAnon) of the server and its helper before a client connects, minus that of the same server \
         with one disk, divided by the number of further disks.",
    ),
    (
        "control",
        "control",
        "ms",
        2,
        "Duration of a request for all counters over the control socket, after the load.",
    ),
    (
        "scrape",
        "scrape",
        "ms",
        2,
        "Duration of the slowest request for all metrics to an exporter, one every 300 ms during the load.",
    ),
];
