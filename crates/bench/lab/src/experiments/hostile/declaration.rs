//! `hostile`: the question, the attacks, and how each figure is measured.
//!
//! - The baseline is a busy but harmless tenth guest, which takes its fair share. There is a second baseline for disks
//!   that use the page cache.

use crate::experiment::{
    Beside, Column, Declaration, Difference, Effort, Plot, Published, RatioForm, Scale, Source, Target,
    Variant, Workload, Yardstick, owned,
};
use crate::load::disk::test_files::Place;
use crate::load::hostile::guest::{Attack, BUSY_DEPTH};

/// Number of guests that are measured.
pub(crate) const GOOD: usize = 9;
pub(crate) const BLOCK_BYTES: u32 = 4096;
/// Queue depth of a good guest, which does not need the maximum throughput.
pub(crate) const DEPTH: u32 = 4;
/// The share of their IOPS that the good guests must keep.
const KEPT: f64 = 0.95;
const MOST_WORKERS: usize = 4;
const RAM: &str = "ram";
const DISK: &str = "disk";
const BUSY: &str = "busy";
const BUSY_CACHED: &str = "busy-cached";
const LARGE_CACHED: &str = "large-cached";
/// Upper limit of the good guests' 99% latency, relative to that next to an ordinary busy guest.
const P99_RAM: f64 = 2.0;
const P99_DISK: f64 = 1.5;
/// Number of queues of the guest with many queues.
const QUEUES: u16 = 64;

/// Fewer workers than guests on any machine, so that the tenth guest shares its worker with good guests.
pub(crate) fn workers(cores: usize) -> usize {
    (cores / 2).clamp(1, MOST_WORKERS)
}

/// The variants in the order of the tables, each with the tenth guest's behaviour and the cache mode of all disks.
pub(crate) fn attacks() -> Vec<(Variant, Attack, &'static str)> {
    let past_the_cache = [
        (BUSY, "an ordinary busy guest", Attack::Busy),
        ("invalid", "a queue full of invalid requests", Attack::InvalidRequests),
        ("loops", "a queue full of chains without an end", Attack::Loops),
        ("kicks", "kicks without work", Attack::Kicks),
        ("scribble", "rings that change while they are read", Attack::Scribble),
        ("reconnects", "a front-end that reconnects", Attack::Reconnects),
        ("refusals", "messages that are refused and logged", Attack::Refusals),
        ("large", "reads of 4 MiB", Attack::LargeReads),
        ("queues", "64 queues full of reads", Attack::Queues(QUEUES)),
        ("tables", "memory tables while a queue runs", Attack::MemoryTables),
        ("logs", "in-flight logs, each with a queue that starts", Attack::Logs),
        ("hung", "writes to storage that hangs", Attack::Hung),
    ];
    let through = [
        (Variant::new(BUSY_CACHED, "an ordinary busy guest, page cache"), Attack::Busy),
        (Variant::new(LARGE_CACHED, "reads of 4 MiB, page cache").against(BUSY_CACHED), Attack::LargeReads),
    ];
    let past_the_cache = past_the_cache.map(|(id, label, attack)| (Variant::new(id, label), attack, "none"));
    let through = through.map(|(variant, attack)| (variant.only(&[DISK]), attack, "writeback"));
    past_the_cache.into_iter().chain(through).collect()
}

/// The loads, in the order of the report.
pub(crate) fn loads() -> Vec<(Workload, Place)> {
    vec![
        (Workload::new(RAM, "4k random reads of nine guests, RAM disk, depth 4 each"), Place::Tmpfs),
        (Workload::new(DISK, "4k random reads of nine guests, disk, depth 4 each"), Place::Disk),
    ]
}

pub(crate) fn declaration() -> Declaration {
    let attacks = attacks();
    let workloads: Vec<_> = loads().into_iter().map(|(workload, _)| workload).collect();
    Declaration {
        name: "hostile".into(),
        question: "How much performance do nine guests lose if a tenth guest is hostile?".into(),
        source: Source {
            title: "No publication: this is this project's own requirement".into(),
            year: 2026,
            setup: "one server with nine good guests and a hostile one".into(),
        },
        published: Published {
            caption: "No published figures".into(),
            columns: Vec::new(),
            rows: Vec::new(),
            conclusion: "A hostile guest may slow the others down no more than an ordinary busy guest does."
                .into(),
        },
        differences: vec![Difference::new(
            "guests, each on its own processors",
            "threads of this program; the tenth never sleeps, whether it is hostile or ordinary (the ordinary one \
             polls)",
            "the scheduler, not the server, decides how much processor time a spinning virtual CPU takes \
             from its neighbours",
        )],
        targets: targets(&attacks),
        variants: attacks.into_iter().map(|(variant, ..)| variant).collect(),
        workloads,
        columns: columns(),
        baseline: BUSY.into(),
        compared: "iops".into(),
        ratio_title: "kept".into(),
        ratio_form: RatioForm::Share,
        plots: vec![Plot::new("iops", "IOPS of the nine", Some("iops"), Scale::Linear)],
        curves: Vec::new(),
        stacks: Vec::new(),
        maps: Vec::new(),
        courses: Vec::new(),
        full: Effort { rounds: 30, seconds: 0.5, file_bytes: 64 << 20 },
        quick: Effort { rounds: 1, seconds: 0.05, file_bytes: 8 << 20 },
    }
}

fn targets(attacks: &[(Variant, Attack, &str)]) -> Vec<Target> {
    let ids = |wanted: fn(&str) -> bool| -> Vec<_> {
        attacks.iter().map(|(variant, ..)| variant.id.clone()).filter(|id| wanted(id)).collect()
    };
    let others = ids(|id| ![BUSY, BUSY_CACHED, LARGE_CACHED].contains(&id));
    let cached = ids(|id| id == LARGE_CACHED);
    let target = |text: String, variants: &[String], workloads: &[&str], yardstick| Target {
        text,
        variants: variants.to_vec(),
        workloads: owned(workloads),
        at_least: KEPT,
        half_width_max: 0.05,
        yardstick,
    };
    let kept = "the nine guests keep 95 % of the IOPS that they have beside an ordinary busy guest";
    let p99 = |variants, place, what, busy: &str, at_most: f64| {
        let text = format!(
            "{what}: the nine guests' 99th percentile of latency is at most {at_most} times that beside an \
             ordinary busy guest"
        );
        let (column, variant) = ("p99".to_owned(), busy.to_owned());
        target(text, variants, &[place], Yardstick::Beside { column, variant, by: Beside::Ratio, at_most })
    };
    let answered = |variants, workloads, what: &str| {
        let yardstick = Yardstick::Figure { column: "unanswered".into(), at_most: 0.0 };
        target(format!("{what}every request of the nine guests is answered"), variants, workloads, yardstick)
    };
    vec![
        target(kept.to_owned(), &others, &[RAM, DISK], Yardstick::Baseline),
        target(format!("page cache: {kept}"), &cached, &[DISK], Yardstick::Baseline),
        p99(&others, RAM, "RAM disk", BUSY, P99_RAM),
        p99(&others, DISK, "disk", BUSY, P99_DISK),
        p99(&cached, DISK, "page cache", BUSY_CACHED, P99_DISK),
        answered(&others, &[RAM, DISK], ""),
        answered(&cached, &[DISK], "page cache: "),
    ]
}

/// Text for the report: the harmless tenth guest's behaviour.
pub(crate) fn busy_guest() -> String {
    format!("The ordinary busy guest: 4k random reads at depth {BUSY_DEPTH}, polling.")
}

pub(crate) fn columns() -> Vec<Column> {
    Column::table(&COLUMNS)
}

/// The columns: id, title, unit, decimals, and what is measured.
const COLUMNS: [(&str, &str, &str, usize, &str); 10] = [
    ("iops", "IOPS of nine", "1/s", 0, "Requests of all nine guests that completed in the counted time."),
    (
        "worst",
        "of the worst",
        "1/s",
        0,
        "Requests of the slowest of the nine guests that completed in the counted time.",
    ),
    (
        "latency",
        "mean latency",
        "µs",
        1,
        "Time from submitting a request until the client takes its completion, over all nine guests.",
    ),
    (
        "p50",
        "50 % latency",
        "µs",
        1,
        "Half of the nine guests' requests are faster than this. Excludes the submission.",
    ),
    (
        "p99",
        "99 % latency",
        "µs",
        1,
        "99 % of the nine guests' requests are faster than this. Excludes the submission.",
    ),
    ("max", "longest latency", "µs", 1, "The slowest of the nine guests' requests. Excludes the submission."),
    (
        "unanswered",
        "unanswered",
        "guests",
        0,
        "Good guests whose run ended because a request was not answered for 30 s, including the warm-up.",
    ),
    (
        "cpu",
        "server CPU",
        "µs/IO",
        2,
        "Processor time of all threads of the server, per request of the nine guests. Includes the cost of the \
         tenth guest.",
    ),
    (
        "attacks",
        "attacks",
        "1/s",
        0,
        "Actions of the tenth guest from its start to its end: chains offered, kicks, sessions, memory \
         tables, logs, or refused messages. Not counted for ordinary busy guests and for reads of 4 MiB.",
    ),
    ("log", "log", "bytes", 0, "Size of the server's log since its start, including the warm-up."),
];
