//! `limits`: the question, the limits and loads, and how each figure is measured.

use crate::experiment::{
    Column, Declaration, Difference, Effort, Plot, Published, RatioForm, Scale, Source, Target, Variant,
    Workload, Yardstick, owned,
};
use crate::load::limited::guest::{Counted, QueueLoad};

/// The limit that is raised and lowered, in IOPS: before and after, and between.
pub(crate) const SLOW: u64 = 100;
pub(crate) const FAST: u64 = 10_000;
const QUIET: &str = "quiet";
const MOVED: &str = "moved";
const UPGRADED: &str = "upgraded";
const IOPS_1000: &str = "iops-1000";
const BPS: &str = "bps-100M";
const MIXED: &str = "bps-100M-mixed";
const UNEVEN: &str = "iops-20000-uneven";
const GROUP: &str = "group-of-8";
const WEIGHTS: &str = "weights-4-1";
const CHANGE: &str = "change";
const BLOCK: u32 = 4096;

/// What happens to the server while the guests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Quiet,
    /// Queues move between the workers.
    Moved,
    /// The server is replaced by a live upgrade.
    Upgraded,
}

/// Limits, and the load of the guests that have them.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    /// Per disk, the keys of its table that set limits.
    pub limits: Vec<&'static str>,
    /// The keys of the group.
    pub group: Option<&'static str>,
    /// Per disk, the load of each queue.
    pub loads: Vec<Vec<QueueLoad>>,
    pub counted: Counted,
    /// The limit: what all guests together should get.
    pub per_second: f64,
    /// The fair share of each disk, or of each queue if there is one disk; empty if shares are not compared.
    pub shares: Vec<f64>,
    /// Whether the limit is raised and lowered, which is then measured instead.
    pub changes: bool,
}

impl Scenario {
    /// One disk whose shares are not compared.
    fn disk(limit: &'static str, counted: Counted, per_second: f64, queues: Vec<QueueLoad>) -> Self {
        Self {
            limits: vec![limit],
            group: None,
            loads: vec![queues],
            counted,
            per_second,
            shares: Vec::new(),
            changes: false,
        }
    }

    fn iops(limit: &'static str, per_second: f64, queues: usize, depth: u16) -> Self {
        Self::disk(limit, Counted::Requests, per_second, vec![load(depth, BLOCK); queues])
    }

    fn with_shares(self, shares: Vec<f64>) -> Self {
        Self { shares, ..self }
    }

    /// Disks of equal load in a group.
    fn group(limits: Vec<&'static str>, shares: Vec<f64>) -> Self {
        let loads = vec![vec![load(32, BLOCK)]; limits.len()];
        let group = Some("iops = 20000");
        Self { limits, group, loads, shares, ..Self::iops("", 20_000.0, 0, 0) }
    }
}

fn load(depth: u16, block_bytes: u32) -> QueueLoad {
    QueueLoad { depth, block_bytes }
}

/// The limits and loads, in the order of the tables.
pub(crate) fn scenarios() -> Vec<(Variant, Scenario)> {
    let mib = f64::from(1 << 20);
    let large = |queues| vec![load(8, 64 << 10); queues];
    let bytes = |queues| Scenario::disk("bps = \"100M\"", Counted::Bytes, 100.0 * mib, queues);
    let uneven = std::iter::once(load(1, BLOCK)).chain(vec![load(128, BLOCK); 8]).collect();
    let uneven = Scenario::disk("iops = 20000", Counted::Requests, 20_000.0, uneven);
    let change = Scenario { changes: true, ..Scenario::iops("iops = 100", 100.0, 1, 64) };
    let one = |id, label| Variant::new(id, label).only(&[QUIET]);
    vec![
        (Variant::new(IOPS_1000, "1,000 IOPS, one queue"), Scenario::iops("iops = 1000", 1000.0, 1, 32)),
        (one("iops-1000-64", "1,000 IOPS, 64 queues"), Scenario::iops("iops = 1000", 1000.0, 64, 4)),
        (one("iops-20000", "20,000 IOPS, one queue"), Scenario::iops("iops = 20000", 20_000.0, 1, 128)),
        (
            Variant::new("iops-20000-64", "20,000 IOPS, 64 queues"),
            Scenario::iops("iops = 20000", 20_000.0, 64, 4),
        ),
        (Variant::new(UNEVEN, "20,000 IOPS, depth 1 beside 8 × 128"), uneven.with_shares(vec![1.0 / 9.0; 9])),
        (Variant::new(BPS, "100 MiB/s, one queue of 64 KiB"), bytes(large(1))),
        (one("bps-100M-64", "100 MiB/s, 64 queues of 64 KiB"), bytes(large(64))),
        (
            one(MIXED, "100 MiB/s, 1 MiB beside 4 KiB"),
            bytes(vec![load(8, 1 << 20), load(128, BLOCK)]).with_shares(vec![0.5; 2]),
        ),
        (
            one(GROUP, "group of 8 disks, 20,000 IOPS"),
            Scenario::group(vec!["group = \"all\""; 8], vec![0.125; 8]),
        ),
        (
            one(WEIGHTS, "group of 2 disks, weights 4 : 1"),
            Scenario::group(
                vec!["group = \"all\"\nweight = 400", "group = \"all\"\nweight = 100"],
                vec![0.8, 0.2],
            ),
        ),
        (one(CHANGE, "from 100 to 10,000 IOPS and back"), change),
    ]
}

/// What happens meanwhile, in the order of the report.
pub(crate) fn conditions() -> Vec<(Workload, Condition)> {
    vec![
        (Workload::new(QUIET, "random reads on a RAM disk"), Condition::Quiet),
        (Workload::new(MOVED, "random reads, a queue moves every 100 ms"), Condition::Moved),
        (Workload::new(UPGRADED, "random reads, one live upgrade"), Condition::Upgraded),
    ]
}

pub(crate) fn declaration() -> Declaration {
    Declaration {
        name: "limits".into(),
        question: "How exactly does a disk get its limit of IOPS or bandwidth?".into(),
        source: Source {
            title: "No publication: this is this project's own requirement".into(),
            year: 2026,
            setup: "limits of a disk and of a group, from one queue to 64".into(),
        },
        published: Published {
            caption: "No published figures".into(),
            columns: Vec::new(),
            rows: Vec::new(),
            conclusion: "A limit holds in every second, and a group's disks get their shares.".into(),
        },
        differences: vec![Difference::new(
            "guests",
            "threads of this program, one per queue, on the server's cores",
            "a completion is counted when the client's thread runs, so the scheduler adds to the deviations",
        )],
        targets: targets(),
        variants: scenarios().into_iter().map(|(variant, _)| variant).collect(),
        workloads: conditions().into_iter().map(|(workload, _)| workload).collect(),
        columns: columns(),
        baseline: IOPS_1000.into(),
        compared: "kept".into(),
        ratio_title: "of 1,000 IOPS".into(),
        ratio_form: RatioForm::Share,
        plots: vec![Plot::new("worst", "Largest deviation in 1 s", Some("worst-1s"), Scale::Linear)],
        curves: Vec::new(),
        stacks: Vec::new(),
        maps: Vec::new(),
        courses: Vec::new(),
        full: Effort { rounds: 10, seconds: 3.0, file_bytes: 16 << 20 },
        quick: Effort { rounds: 1, seconds: 0.6, file_bytes: 4 << 20 },
    }
}

fn targets() -> Vec<Target> {
    let target =
        |text: &str, variants: Vec<String>, workloads: &[&str], (column, at_most): (&str, f64)| Target {
            text: text.into(),
            variants,
            workloads: owned(workloads),
            at_least: 0.0,
            half_width_max: at_most,
            yardstick: Yardstick::Figure { column: column.into(), at_most },
        };
    let held = |counted: Counted, everywhere: bool| -> Vec<_> {
        let held =
            scenarios().into_iter().filter(|(_, scenario)| !scenario.changes && scenario.counted == counted);
        held.filter(|(variant, _)| !everywhere || variant.only.is_empty())
            .map(|(variant, _)| variant.id)
            .collect()
    };
    let (requests, bytes) = (Counted::Requests, Counted::Bytes);
    let meanwhile = [MOVED, UPGRADED];
    let mut targets = Vec::new();
    for (what, everywhere, workloads) in
        [("", false, &[QUIET][..]), ("with moves or a live upgrade, ", true, &meanwhile[..])]
    {
        let all = [held(requests, everywhere), held(bytes, everywhere)].concat();
        let text = |rest: &str| format!("{what}{rest}");
        targets.extend([
            target(
                &text("any second differs from the limit by at most 1 %"),
                all,
                workloads,
                ("worst-1s", 1.0),
            ),
            target(
                &text("any 100 ms differ from a limit of IOPS by at most 5 %"),
                held(requests, everywhere),
                workloads,
                ("worst-100ms", 5.0),
            ),
            target(
                &text("any 100 ms differ from a limit of bandwidth by at most 10 %"),
                held(bytes, everywhere),
                workloads,
                ("worst-100ms-bytes", 10.0),
            ),
        ]);
    }
    let shared = owned(&[UNEVEN, MIXED, GROUP, WEIGHTS]);
    let change = || owned(&[CHANGE]);
    targets.extend([
        target("shares are within 3 % of the fair ones", shared, &[QUIET], ("share", 3.0)),
        target("a higher limit takes effect within 10 ms", change(), &[QUIET], ("raise", 10.0)),
        target("a lower limit takes effect within 10 ms", change(), &[QUIET], ("lower", 10.0)),
    ]);
    targets
}

pub(crate) fn columns() -> Vec<Column> {
    Column::table(&COLUMNS)
}

/// The columns: id, title, unit, decimals, and what is measured.
const COLUMNS: [(&str, &str, &str, usize, &str); 9] = [
    ("kept", "of the limit", "%", 2, "What the clients got in the counted time, relative to the limit."),
    ("iops", "IOPS", "1/s", 0, "Requests of all clients that completed in the counted time."),
    ("bandwidth", "bandwidth", "MiB/s", 2, "Bytes of all requests that completed in the counted time."),
    ("worst-1s", "worst 1 s", "%", 2, "Largest deviation of any second from the limit, in either direction."),
    ("worst-100ms", "worst 100 ms", "%", 2, "Largest deviation of any 100 ms from a limit of IOPS."),
    (
        "worst-100ms-bytes",
        "worst 100 ms (bytes)",
        "%",
        2,
        "Largest deviation of any 100 ms from a limit of bandwidth.",
    ),
    (
        "share",
        "unfair by",
        "%",
        2,
        "Largest deviation of a disk's share (or of a queue's, if there is one disk) from its fair share.",
    ),
    (
        "raise",
        "raise",
        "ms",
        2,
        "From the request on the control socket until the higher limit applies, computed from the requests that are \
         missing in the next 200 ms.",
    ),
    (
        "lower",
        "lower",
        "ms",
        2,
        "From the request on the control socket until the lower limit applies, computed from the surplus of requests in \
         the next 200 ms.",
    ),
];
