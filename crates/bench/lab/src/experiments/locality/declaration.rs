//! `locality`: the question, the published figures, the variants, and how each figure is measured.
//!
//! The machine's cores determine the number of workers and queues. The smallest machine gets two workers, because a
//! single worker has no other to hand over to.

use crate::experiment::{
    Beside, Column, Declaration, Difference, Effort, Plot, Published, PublishedColumn, PublishedRow,
    RatioForm, Scale, Source, Target, Variant, Workload, Yardstick,
};
use crate::load::disk::test_files::Place;
use crate::load::server::placed::{Host, Placing};

pub(crate) const BLOCK_BYTES: u32 = 4096;
/// Requests in flight per device, divided among its queues.
const DEPTH: usize = 128;
const MOST_QUEUES: u16 = 16;
const MOST_WORKERS: usize = 8;

/// How a disk is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub engine: &'static str,
    pub placing: Placing,
}

/// The load on the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    pub place: Place,
    pub devices: usize,
    /// Depth of each queue.
    pub depth: u32,
    /// Whether workers poll before they sleep.
    pub polls: bool,
}

/// Number of workers. Half of the cores are for the workers, the other half for their clients.
pub(crate) fn workers(cores: usize) -> usize {
    (cores / 2).clamp(2, MOST_WORKERS)
}

/// Number of queues: one per core, as in a guest.
pub(crate) fn queues(cores: usize) -> u16 {
    u16::try_from(cores).unwrap_or(MOST_QUEUES).clamp(2, MOST_QUEUES)
}

const IO_URING: &str = "io_uring";
const AIO: &str = "linux-aio";
const QUEUE: &str = "queue";
const SHARED: &str = "shared";
const NO_REAP: &str = "no-reap";
const ADAPTIVE: &str = "adaptive";
const APART: &str = "adaptive-apart";
const ONE_HOST: &str = "adaptive-one";
const AIO_QUEUE: &str = "aio-queue";
const AIO_SHARED: &str = "aio-shared";
const AIO_NO_REAP: &str = "aio-no-reap";
const AIO_ADAPTIVE: &str = "aio-adaptive";
/// Ids of the variants with fixed hand-over policies, and the policies.
const BATCHES: [(&str, &str); 8] = [
    ("count-1", "count:1"),
    ("count-4", "count:4"),
    ("count-8", "count:8"),
    ("count-16", "count:16"),
    ("count-32", "count:32"),
    ("time-10", "time:10"),
    ("time-50", "time:50"),
    ("time-200", "time:200"),
];

const DISK: &str = "disk-1";
const DISK_TWO: &str = "disk-2";
const DISK_ASLEEP: &str = "disk-1-asleep";
const DISK_SINGLE: &str = "disk-1-single";
const RAM: &str = "ram-1";
const RAM_TWO: &str = "ram-2";
const ON_DISK: [&str; 4] = [DISK, DISK_ASLEEP, DISK_TWO, DISK_SINGLE];

/// The variants, in the order of the tables.
pub(crate) fn ways() -> Vec<(Variant, Way)> {
    let shared = |reap_on_submit| Placing::Shared { reap_on_submit };
    let completion = |hand_over, host| Placing::Completion { hand_over, host };
    let ring = |id: &str, label: &str, placing| (Variant::new(id, label), Way { engine: IO_URING, placing });
    let mut ways = vec![
        ring(SHARED, "shared, submitter reaps", shared(true)),
        ring(NO_REAP, "shared, one worker reaps", shared(false)),
        ring(QUEUE, "queue", Placing::Queue),
    ];
    for (id, policy) in BATCHES {
        let label = match policy.strip_prefix("time:") {
            Some(us) => format!("completion, {us} µs"),
            None => format!("completion, {policy}"),
        };
        ways.push(ring(id, &label, completion(policy, Host::PerDisk)));
    }
    ways.push(ring(ADAPTIVE, "completion, adaptive", completion("adaptive", Host::PerDisk)));
    let apart = completion("adaptive", Host::PerDiskWithoutQueues);
    ways.push(ring(APART, "adaptive, host has no queue", apart));
    let (one, way) = ring(ONE_HOST, "adaptive, one host for both", completion("adaptive", Host::One));
    ways.push((one.only(&[DISK_TWO, RAM_TWO]), way));
    let aio = |id: &str, label: &str, placing| {
        // On a RAM disk, Linux AIO has completed everything when the submission returns.
        let variant = Variant::new(id, &format!("AIO: {label}")).only(&ON_DISK);
        let variant = if id == AIO_SHARED { variant } else { variant.against(AIO_SHARED) };
        (variant, Way { engine: AIO, placing })
    };
    ways.extend([
        aio(AIO_SHARED, "shared, submitter reaps", shared(true)),
        aio(AIO_NO_REAP, "shared, one worker reaps", shared(false)),
        aio(AIO_QUEUE, "queue", Placing::Queue),
        aio(AIO_ADAPTIVE, "completion, adaptive", completion("adaptive", Host::PerDisk)),
    ]);
    ways
}

/// The loads, in the order of the report.
pub(crate) fn loads(cores: usize) -> Vec<(Workload, Ask)> {
    let queues = queues(cores);
    let usual = u32::try_from((DEPTH / usize::from(queues)).max(1)).unwrap_or(1);
    let load = |id: &str, place, devices, depth: u32, polls| {
        let name = if place == Place::Disk { "disk" } else { "RAM disk" };
        let plural = if devices == 1 { "" } else { "s" };
        let asleep = if polls { "" } else { ", workers never poll" };
        let label = format!(
            "4k random reads, {name}, {devices} device{plural}, {queues} queues of depth {depth} each{asleep}"
        );
        (Workload::new(id, &label), Ask { place, devices, depth, polls })
    };
    vec![
        load(DISK, Place::Disk, 1, usual, true),
        load(DISK_ASLEEP, Place::Disk, 1, usual, false),
        load(DISK_TWO, Place::Disk, 2, usual, true),
        load(DISK_SINGLE, Place::Disk, 1, 1, true),
        load(RAM, Place::Tmpfs, 1, usual, true),
        load(RAM_TWO, Place::Tmpfs, 2, usual, true),
    ]
}

/// Returns the declaration for a machine with `cores` cores.
pub(crate) fn declaration(cores: usize) -> Declaration {
    Declaration {
        name: "locality".into(),
        question: "On which CPU should I/O be submitted and completed, and how many requests should be \
                   handed over at once?".into(),
        source: Source {
            title: "Direct I/O submission and completion scalability issues (Linux)".into(),
            year: 2007,
            setup: "database load, direct I/O; one controller with one completion interrupt; 16 CPUs (x86-64), and a \
                    machine of two nodes"
                .into(),
        },
        published: published(),
        differences: differences(),
        variants: ways().into_iter().map(|(variant, _)| variant).collect(),
        workloads: loads(cores).into_iter().map(|(workload, _)| workload).collect(),
        columns: columns(),
        baseline: SHARED.into(),
        compared: "iops".into(),
        ratio_title: "gain".into(),
        ratio_form: RatioForm::Gain,
        plots: plots(),
        curves: Vec::new(),
        stacks: Vec::new(),
        maps: Vec::new(),
        courses: Vec::new(),
        targets: targets(),
        full: Effort { rounds: 30, seconds: 0.5, file_bytes: 1 << 29 },
        quick: Effort { rounds: 1, seconds: 0.05, file_bytes: 32 << 20 },
    }
}

fn published() -> Published {
    let column =
        |title| PublishedColumn { is_ratio: true, ..PublishedColumn::new(title, DISK_ASLEEP, "iops") };
    let row = PublishedRow::new;
    let (first, second): (&[_], &[_]) = (&["+1.36 %", "+1.5 %"], &["+2 %", "+3.3 %"]);
    Published {
        caption: "Gain over submitting and reaping on the CPU of each request".into(),
        columns: vec![column("16-CPU x86-64"), column("2-node")],
        rows: vec![
            row("1: only the completion CPU reaps", AIO_NO_REAP, first),
            row("1: only the completion CPU reaps, io_uring", NO_REAP, first),
            row("2: the completion CPU submits", AIO_ADAPTIVE, second),
            row("2: the completion CPU submits, io_uring", ADAPTIVE, second),
            row("2: the completion CPU also gets less other work", APART, &[]),
            row("wished for: a queue pair per CPU", AIO_QUEUE, &[]),
            row("wished for: a queue pair per CPU, io_uring", QUEUE, &[]),
        ],
        conclusion: "Reaping on the submission path costs 1.4 %, submitting on a different CPU from the one that \
                     handles the completion costs 2 to 3 %. The completion CPU becomes busier, so it must be given \
                     less other work; each request that is moved costs an interrupt and a context switch, so the best \
                     batch size remains open. A queue pair per CPU would solve the problem."
            .into(),
    }
}

fn differences() -> Vec<Difference> {
    let difference = Difference::new;
    vec![
        difference(
            "a kernel's submission path and its completion interrupt, on CPUs",
            "a server's workers, each a thread bound to a core (two share one if there are too few): a ring for each, \
             or one ring for all, which is behind a lock or belongs to the completion worker",
            "the kernel has a queue per CPU now; the question still applies to devices with a single queue",
        ),
        difference(
            "the kernel's own block layer, completions in an interrupt",
            "Linux AIO, which still completes in the interrupt, and io_uring, which finishes a request in the thread \
             that submitted it",
            "io_uring's own behaviour is part of the question; each engine is compared with its own 'shared'",
        ),
        difference(
            "a database's transactions",
            "4k random reads by this project's driver; a queue per core, and clients that sleep until they are \
             notified",
            "write speeds vary by more than the expected differences",
        ),
        difference(
            "submissions are queued to a real-time worker on the completion CPU",
            "submissions are queued to a worker in the default scheduling class",
            "the real-time classes need a privilege; --worker-class fifo:1 selects one for a server",
        ),
        difference(
            "16 CPUs, and two nodes",
            "this machine's cores; the report compares both published gains with the same figure of this run, that of \
             one device whose workers never poll",
            "the kernel does not poll: an interrupt wakes it",
        ),
        difference(
            "many disks behind one controller",
            "one device or two, which are files on the same storage",
            "two devices show the cost of dividing completions among workers",
        ),
    ]
}

/// The columns, in the order of the tables. The compared column is first.
pub(crate) fn columns() -> Vec<Column> {
    let column = |(id, title, unit, decimals, files_only, measured)| Column {
        files_only,
        ..Column::new(id, title, unit, decimals, measured)
    };
    COLUMNS.into_iter().map(column).collect()
}

/// The columns: id, title, unit, decimals, whether the column is only in files, and what is measured.
const COLUMNS: [(&str, &str, &str, usize, bool, &str); 17] = [
    (
        "iops",
        "IOPS",
        "1/s",
        0,
        false,
        "Requests completed in the counted time, all queues and devices together.",
    ),
    (
        "cpu",
        "server CPU",
        "µs/IO",
        2,
        false,
        "Processor time of the server's process, all threads and the kernel's threads for it, per request.",
    ),
    (
        "switches",
        "context switches",
        "1/IO",
        3,
        false,
        "Voluntary and involuntary, summed over the server's threads, except threads that ended meanwhile.",
    ),
    (
        "wakes",
        "wake-ups by workers",
        "1/IO",
        3,
        false,
        "Wake-ups of one worker by another: of the completion worker for handed-over requests, and of other \
         workers for their completions. Excludes wake-ups by the kernel for its own completions.",
    ),
    (
        "batch",
        "per hand-over",
        "",
        1,
        false,
        "Operations that were handed over together: to the completion worker, or into the shared engine \
         under one lock.",
    ),
    ("lock-wait", "waited for lock", "ns/IO", 1, true, "Of the shared engine, estimated from samples."),
    ("p50", "50 % latency", "µs", 0, false, LATENCY),
    ("p99", "99 % latency", "µs", 0, false, LATENCY),
    ("p99.9", "99.9 % latency", "µs", 0, false, LATENCY),
    ("sleeps", "wake-ups", "1/IO", 3, true, "How often a sleeping worker was woken, for any reason."),
    (
        "latency",
        "mean latency",
        "µs",
        1,
        true,
        "From submitting a request until the client takes its completion.",
    ),
    ("client-cpu", "client CPU", "µs/IO", 2, true, "Processor time of the client's threads, per request."),
    (
        "spared",
        "spared wake-ups",
        "1/IO",
        3,
        true,
        "Adaptive hand-over: the completion worker slept, was left asleep, and woke up by its own I/O.",
    ),
    ("passed", "passed on", "1/IO", 3, true, "Completions reaped by a worker other than the request's own."),
    (
        "contended",
        "lock contended",
        "%",
        2,
        true,
        "Share of the acquisitions of the shared engine's lock that found it taken.",
    ),
    ("lock-takes", "lock taken", "1/IO", 3, true, "Acquisitions of the shared engine's lock, per request."),
    ("kicks", "kicks", "1/IO", 3, true, "Notifications that the server requested, per request."),
];

const LATENCY: &str = "This share of the requests is faster; excludes the submission, like fio's clat.";

fn plots() -> Vec<Plot> {
    let plot = Plot::new;
    vec![
        plot("gain", "Gain in IOPS", None, Scale::Linear),
        plot("cpu", "Server's CPU per I/O", Some("cpu"), Scale::Linear),
        plot("switches", "Server's context switches per I/O", Some("switches"), Scale::Linear),
        plot("p99", "99 % latency", Some("p99"), Scale::Linear),
    ]
}

fn targets() -> Vec<Target> {
    let owned = |ids: &[&str]| ids.iter().map(|&id| id.to_owned()).collect();
    let target = |text: &str, variants: &[&str], workloads: &[&str], at_least, yardstick| Target {
        text: text.into(),
        variants: owned(variants),
        workloads: owned(workloads),
        at_least,
        half_width_max: 0.02,
        yardstick,
    };
    let others = ways().into_iter().map(|(variant, _)| variant.id);
    let others = others.filter(|id| id != QUEUE && !id.starts_with("aio-")).collect();
    vec![
        target(
            "1, as published: 1.36 % more if only the completion worker reaps",
            &[AIO_NO_REAP, NO_REAP],
            &[DISK_ASLEEP],
            1.0136,
            Yardstick::Baseline,
        ),
        target(
            "2, as published: 2 % more if the completion worker submits",
            &[AIO_ADAPTIVE, ADAPTIVE],
            &[DISK_ASLEEP],
            1.02,
            Yardstick::Baseline,
        ),
        target(
            "1 and 2 with Linux AIO: at no more CPU per I/O",
            &[AIO_NO_REAP, AIO_ADAPTIVE],
            &[DISK_ASLEEP],
            0.0,
            cpu_of(AIO_SHARED),
        ),
        target(
            "1 and 2 with io_uring: at no more CPU per I/O",
            &[NO_REAP, ADAPTIVE],
            &[DISK_ASLEEP],
            0.0,
            cpu_of(SHARED),
        ),
        target(
            "as the publication recommends: a queue and a ring per worker reach at least the best of the \
             others",
            &[QUEUE],
            &[DISK, DISK_ASLEEP, DISK_TWO, DISK_SINGLE, RAM, RAM_TWO],
            1.0,
            Yardstick::BestOf(others),
        ),
    ]
}

/// If the storage is the bottleneck, all variants have the same IOPS, and the gain is the saved CPU time.
fn cpu_of(baseline: &str) -> Yardstick {
    let (column, variant) = ("cpu".to_owned(), baseline.to_owned());
    Yardstick::Beside { column, variant, by: Beside::Ratio, at_most: 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_machine_has_two_workers_and_a_large_one_half_its_cores() {
        assert_eq!([1, 2, 4, 16, 200].map(workers), [2, 2, 2, 8, 8]);
        assert_eq!([1, 2, 4, 16, 200].map(queues), [2, 2, 4, 16, 16]);
    }

    #[test]
    fn requests_in_flight_are_as_many_whatever_the_number_of_queues() {
        let depths = [2, 16].map(|cores| loads(cores)[0].1.depth * u32::from(queues(cores)));
        assert_eq!(depths, [128, 128]);
    }

    #[test]
    fn each_engine_is_compared_with_its_own_shared_placement() {
        let declaration = declaration(2);
        for (variant, way) in ways() {
            let own = if way.engine == AIO { AIO_SHARED } else { SHARED };
            let expected = (variant.id != own).then_some(own);
            // The experiment's own baseline has no baseline: it would be compared with itself.
            assert_eq!(declaration.baseline_of(&variant.id), expected, "{}", variant.id);
        }
    }
}
