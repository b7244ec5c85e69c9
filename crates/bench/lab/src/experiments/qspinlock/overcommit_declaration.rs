//! `qspinlock-overcommit`: the question, earlier findings, the variants, and the targets.

use super::columns::{BUSY, DICE, HALTS, KICKS_PER_HALT, LONGEST, RATE, SPURIOUS, VOLUNTARY, WAIT, columns};
use super::locks::{COMPARED, FIFO_PEERS, Lock, PEERS, ids};
use crate::experiment::{
    Axis, Courses, Declaration, Difference, Effort, Published, PublishedColumn, PublishedRow, RatioForm,
    Scale, Source, Target, Variant, Workload, Yardstick, owned,
};

/// Key of the axis: threads, on an otherwise idle machine.
const THREADS: &str = "threads";
/// Key of the axis: threads next to a busy process per core.
const THREADS_BESIDE: &str = "threads-beside";
/// Threads per core, times two.
const HALVES: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Threads per core, times two, next to busy processes.
const HALVES_BESIDE: [usize; 3] = [2, 8, 32];
/// A lock that spins in order of arrival is measured only up to this.
const MOST_HALVES_SPINNING: usize = 32;
const MOST_HALVES_SPINNING_BESIDE: usize = 8;

/// A number of threads, with or without busy processes beside them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Load {
    pub workload: Workload,
    pub threads: usize,
    pub is_beside_others: bool,
    halves: usize,
}

/// All loads, in the order of the tables.
pub(crate) fn loads(cores: usize) -> Vec<Load> {
    let alone = HALVES.map(|halves| load(halves, cores, false)).into_iter();
    alone.chain(HALVES_BESIDE.map(|halves| load(halves, cores, true))).collect()
}

fn load(halves: usize, cores: usize, is_beside_others: bool) -> Load {
    let threads = (cores * halves / 2).max(1);
    let times = if halves == 1 { "0.5".to_owned() } else { (halves / 2).to_string() };
    let s = if threads == 1 { "" } else { "s" };
    let (prefix, beside) =
        if is_beside_others { ("beside", ", beside a busy process per core") } else { ("over", "") };
    let label = format!("{threads} thread{s}, {times} per core{beside}");
    #[allow(clippy::cast_precision_loss)] // a number of threads
    let workload = Workload::new(&format!("{prefix}-{times}x"), &label)
        .at(if is_beside_others { THREADS_BESIDE } else { THREADS }, threads as f64);
    Load { workload, threads, is_beside_others, halves }
}

/// Returns the declaration for a machine with `cores` cores.
pub(crate) fn declaration(cores: usize) -> Declaration {
    let loads = loads(cores);
    Declaration {
        name: "qspinlock-overcommit".into(),
        question: "How well does a lock perform when threads outnumber cores?".into(),
        source: Source {
            title: "FlexGuard (SOSP): one lock, two cache lines, more threads than cores".into(),
            year: 2025,
            setup: "as tried before this project's locks were written: 2 virtual CPUs of an EPYC, 50 dependent steps with \
                    the lock held and 100 without, medians of 5 times 0.5 s in two runs"
                .into(),
        },
        published: published(),
        differences: differences(),
        variants: variants(&loads),
        workloads: loads.iter().map(|load| load.workload.clone()).collect(),
        columns: columns(&[DICE, WAIT, LONGEST, BUSY, VOLUNTARY, HALTS]),
        baseline: Lock::Std.id().into(),
        compared: RATE.into(),
        ratio_title: "of std".into(),
        ratio_form: RatioForm::Share,
        plots: Vec::new(),
        curves: Vec::new(),
        courses: courses(cores),
        stacks: Vec::new(),
        maps: Vec::new(),
        targets: targets(),
        full: Effort { rounds: 9, seconds: 0.25, file_bytes: 0 },
        quick: Effort { rounds: 1, seconds: 0.03, file_bytes: 0 },
    }
}

fn variants(loads: &[Load]) -> Vec<Variant> {
    let few = |load: &&Load| {
        let most = if load.is_beside_others { MOST_HALVES_SPINNING_BESIDE } else { MOST_HALVES_SPINNING };
        load.halves <= most
    };
    let few: Vec<_> = loads.iter().filter(few).map(|load| load.workload.id.as_str()).collect();
    let variant = |lock: Lock| if lock.spins_in_order() { lock.variant().only(&few) } else { lock.variant() };
    COMPARED.map(variant).into()
}

fn courses(cores: usize) -> Vec<Courses> {
    let across = |beside: bool| Axis {
        key: if beside { THREADS_BESIDE } else { THREADS }.into(),
        title: format!("threads on {cores} core{}", if cores == 1 { "" } else { "s" }),
    };
    let course = |id: &str, title: &str, column: &str, scale, beside| Courses {
        id: id.into(),
        title: title.into(),
        across: across(beside),
        column: column.into(),
        scale,
        variants: ids(&COMPARED),
    };
    vec![
        course("throughput", "Acquisitions per second", RATE, Scale::Log, false),
        course("dice", "Fairness (Dice: 0.5 is fair, 1 is not)", DICE, Scale::Linear, false),
        course("wait", "Waiting time that one acquisition in a thousand exceeds", WAIT, Scale::Log, false),
        course(
            "throughput-beside",
            "Acquisitions per second, beside a busy process per core",
            RATE,
            Scale::Log,
            true,
        ),
    ]
}

fn target(text: &str, variants: &[Lock], workloads: &[&str], at_least: f64, yardstick: Yardstick) -> Target {
    Target {
        text: text.into(),
        variants: ids(variants),
        workloads: owned(workloads),
        at_least,
        half_width_max: 0.15 * at_least,
        yardstick,
    }
}

fn limit(text: &str, variants: &[Lock], workloads: &[&str], column: &str, at_most: f64) -> Target {
    let yardstick = Yardstick::Figure { column: column.into(), at_most };
    Target { half_width_max: 0.1 * at_most, ..target(text, variants, workloads, 0.0, yardstick) }
}

const UP_TO_CORES: [&str; 2] = ["over-0.5x", "over-1x"];
const CROWDED: [&str; 3] = ["over-4x", "over-8x", "over-16x"];

fn targets() -> Vec<Target> {
    [targets_up_to_cores(), targets_of_hybrid(), targets_of_fair(), targets_of_halting()].concat()
}

fn rate_of(lock: Lock) -> Yardstick {
    Yardstick::BestOf(vec![lock.id().into()])
}

fn targets_up_to_cores() -> Vec<Target> {
    let best = |locks: &[Lock]| Yardstick::BestOf(ids(locks));
    vec![
        target(
            "up to one thread per core: hybrid reaches 0.95 times the throughput of the best other lock",
            &[Lock::Hybrid],
            &UP_TO_CORES,
            0.95,
            best(&PEERS),
        ),
        target(
            "up to one thread per core: fair and native equal the best other lock that keeps order",
            &[Lock::Fair, Lock::Fifo, Lock::Native],
            &UP_TO_CORES,
            1.0,
            best(&FIFO_PEERS),
        ),
    ]
}

fn targets_of_hybrid() -> Vec<Target> {
    let hybrid = &[Lock::Hybrid];
    vec![
        target(
            "4 to 16 threads per core: hybrid reaches 0.9 times the throughput of a plain futex lock",
            hybrid,
            &CROWDED,
            0.9,
            rate_of(Lock::Futex),
        ),
        target(
            "4 to 16 threads per core: hybrid reaches 0.8 times the throughput of parking_lot",
            hybrid,
            &CROWDED,
            0.8,
            rate_of(Lock::ParkingLot),
        ),
        target(
            "16 threads per core: hybrid reaches 100 times the throughput of the ticket lock",
            hybrid,
            &["over-16x"],
            100.0,
            rate_of(Lock::Ticket),
        ),
        target(
            "hybrid keeps its speed: 32 and 64 threads per core reach 0.8 times the throughput of 16 per \
             core",
            hybrid,
            &["over-32x", "over-64x"],
            0.8,
            Yardstick::Workload("over-16x".into()),
        ),
    ]
}

fn targets_of_fair() -> Vec<Target> {
    vec![
        limit(
            "4 to 16 threads per core: fair shares evenly (Dice at most 0.60)",
            &[Lock::Fair],
            &CROWDED,
            DICE,
            0.60,
        ),
        target(
            "4 to 16 threads per core: fair reaches 3 times the throughput of parking_lot's fair mutex",
            &[Lock::Fair],
            &CROWDED,
            3.0,
            rate_of(Lock::ParkingLotFair),
        ),
    ]
}

fn targets_of_halting() -> Vec<Target> {
    vec![
        limit(
            "4 to 16 threads per core: a sleep costs one wake (at most 1.05)",
            &[Lock::Hybrid, Lock::Fair],
            &CROWDED,
            KICKS_PER_HALT,
            1.05,
        ),
        limit(
            "4 to 16 threads per core: at most 5 % of the sleeps end in a wake for no reason",
            &[Lock::Hybrid, Lock::Fair],
            &CROWDED,
            SPURIOUS,
            5.0,
        ),
    ]
}

fn published() -> Published {
    let column = PublishedColumn::new;
    let row = |label, lock: Lock, figures: &[&str]| PublishedRow::new(label, lock.id(), figures);
    Published {
        caption: "Thousand acquisitions per second, and Dice's fairness".into(),
        columns: vec![
            column("1 thread on 2 cores", "over-0.5x", RATE),
            column("4 per core", "over-4x", RATE),
            column("16 per core", "over-16x", RATE),
            column("Dice, 16 per core", "over-16x", DICE),
        ],
        rows: vec![
            row("std::Mutex", Lock::Std, &["7700", "3800, 8700", "5400, 4300", "0.71–0.93"]),
            row("parking_lot", Lock::ParkingLot, &["7700", "5100, 7400", "7300, 7300", "0.84"]),
            row("pthread_mutex", Lock::PthreadMutex, &["7300", "3900, 5900", "7600, 7300", "0.67–0.73"]),
            row("futex, no spinning", Lock::Futex, &["7700", "4600, 5700", "4500, 5800", "0.54–0.60"]),
            row(
                "parking_lot::FairMutex",
                Lock::ParkingLotFair,
                &["7700", "1000, 370", "1000, 900", "0.77–0.81"],
            ),
            row("pthread_spin", Lock::PthreadSpin, &["7400", "1800, 2100", "790, 560", "0.99"]),
            row("spin::Ticket", Lock::SpinTicket, &["7800", "23, 13", "1.4, 4.3", "1.0"]),
            row("mcslock", Lock::Mcs, &["7700", "16, 9", "4.5, 2.9", "1.0"]),
            row("mcslock, sched_yield", Lock::McsYield, &["7700", "140, 85", "36, 34", "0.50"]),
            row("not published: queued, hybrid", Lock::Hybrid, &[]),
            row("not published: queued, fair", Lock::Fair, &[]),
            row("not published: queued, strict order", Lock::Fifo, &[]),
            row("not published: queued, only spins", Lock::Native, &[]),
            row("not published: this project's ticket lock", Lock::Ticket, &[]),
            row("not published: spin, in no order", Lock::Spin, &[]),
        ],
        conclusion: "With 16 threads per core, locks that spin in order of arrival are a thousand times \
                     slower than locks that sleep, and no lock was both fair and fast."
            .into(),
    }
}

fn differences() -> Vec<Difference> {
    let difference = Difference::new;
    vec![
        difference(
            "0.5 s, five times, each lock separately",
            "0.25 s, nine times, all locks in turn in each round",
            "a virtual machine's speed drifts; ratios are formed within a round",
        ),
        difference(
            "each observed wait counts once",
            "each timed wait also stands for the acquisitions that were not timed in between",
            "otherwise a thread that rarely gets the lock would count as much as one that often gets it",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_half_the_cores_to_sixty_four_times_as_many() {
        let threads = |cores| loads(cores).iter().map(|load| load.threads).collect::<Vec<_>>();
        assert_eq!(threads(2), [1, 2, 4, 8, 16, 32, 64, 128, 2, 8, 32]);
        assert_eq!(threads(16)[..8], [8, 16, 32, 64, 128, 256, 512, 1024]);
        assert_eq!(threads(1)[..2], [1, 1]);
    }

    #[test]
    fn lock_that_spins_in_order_stops_at_sixteen_threads_per_core() {
        let declaration = declaration(2);
        let of = |id: &str| declaration.variants.iter().find(|variant| variant.id == id).unwrap();
        let ticket = &of("ticket").only;
        assert!(ticket.contains(&"over-16x".into()) && !ticket.contains(&"over-32x".into()), "{ticket:?}");
        assert!(of("hybrid").only.is_empty());
    }
}
