//! `qspinlock-plane`: the question, the points of the plane, the variants, the map, and the targets.

use super::columns::{DICE, HALTS, KICKS, LONGEST, RATE, WAIT, columns};
use super::locks::{Lock, ids};
use crate::experiment::{
    Axis, Beside, Declaration, Difference, Effort, Layer, Map, Published, PublishedColumn, PublishedRow,
    RatioForm, Source, Target, Workload, Yardstick,
};
use crate::load::locks::turn::{Held, Load, Outside};

/// The compared locks, in the order of the tables.
pub(crate) const LOCKS: [Lock; 5] = [Lock::Hybrid, Lock::Fair, Lock::ParkingLot, Lock::Std, Lock::Futex];
const PER_CORE: [usize; 4] = [1, 4, 16, 32];
const PAUSES: [u32; 4] = [0, 4, 20, 100];
/// Keys of the axes.
const THREADS_PER_CORE: &str = "per-core";
const PAUSES_OUTSIDE: &str = "pauses";
/// A lock is fair if its Dice value is at most this.
const FAIR_DICE: f64 = 0.6;

/// A slice of the plane: the points with one hold time, by threads and pauses.
struct Slice {
    /// First part of the slice's workload ids.
    id: &'static str,
    label: &'static str,
    held: Held,
    is_pinned: bool,
    is_beside_others: bool,
}

const fn slice(id: &'static str, label: &'static str, held: Held) -> Slice {
    Slice { id, label, held, is_pinned: false, is_beside_others: false }
}

const SLICES: [Slice; 5] = [
    slice("short", "held a few ns", Held::Step),
    slice("medium", "held some 50 ns", Held::Steps50),
    slice("long", "held some 500 ns", Held::Steps500),
    Slice { is_pinned: true, ..slice("pinned", "held a few ns, pinned threads", Held::Step) },
    Slice {
        is_beside_others: true,
        ..slice("beside", "held a few ns, beside a busy process per core", Held::Step)
    },
];

/// One cell of the map.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Point {
    pub workload: Workload,
    pub load: Load,
    pub is_beside_others: bool,
}

/// All points, in the order of the tables.
pub(crate) fn points(cores: usize) -> Vec<Point> {
    SLICES.iter().flat_map(|slice| points_of(slice, cores)).collect()
}

fn points_of(slice: &Slice, cores: usize) -> impl Iterator<Item = Point> {
    let places = PER_CORE.into_iter().flat_map(|per_core| PAUSES.map(|pauses| (per_core, pauses)));
    places.map(move |(per_core, pauses)| point(slice, cores, per_core, pauses))
}

fn point(slice: &Slice, cores: usize, per_core: usize, pauses: u32) -> Point {
    let threads = cores * per_core;
    let (s, ses) = (if threads == 1 { "" } else { "s" }, if pauses == 1 { "" } else { "s" });
    let label =
        format!("{}: {threads} thread{s}, {per_core} per core, {pauses} pause{ses} outside", slice.label);
    #[allow(clippy::cast_precision_loss)] // a number of threads
    let workload = Workload::new(&id(slice, per_core, pauses), &label)
        .at(THREADS_PER_CORE, per_core as f64)
        .at(PAUSES_OUTSIDE, f64::from(pauses));
    let (held, is_pinned) = (slice.held, slice.is_pinned);
    let load = Load { threads, held, outside: Outside::Pauses(pauses), is_pinned };
    Point { workload, load, is_beside_others: slice.is_beside_others }
}

fn id(slice: &Slice, per_core: usize, pauses: u32) -> String {
    format!("{}-{per_core}x-{pauses}p", slice.id)
}

/// Returns the declaration for a machine with `cores` cores.
pub(crate) fn declaration(cores: usize) -> Declaration {
    Declaration {
        name: "qspinlock-plane".into(),
        question:
            "For which hold times, times outside and numbers of threads is a lock better than parking_lot?"
                .into(),
        source: Source {
            title: "parking_lot's benchmark of mutexes".into(),
            year: 2016,
            setup: "the user chooses the number of threads, and the work with the lock held and between \
                    two acquisitions; the author's figures are for one step with the lock held and none between \
                    acquisitions"
                .into(),
        },
        published: published(),
        differences: differences(),
        variants: LOCKS.map(Lock::variant).into(),
        workloads: points(cores).into_iter().map(|point| point.workload).collect(),
        columns: columns(&[DICE, WAIT, LONGEST, HALTS, KICKS]),
        baseline: Lock::ParkingLot.id().into(),
        compared: RATE.into(),
        ratio_title: "of parking_lot".into(),
        ratio_form: RatioForm::Share,
        plots: Vec::new(),
        curves: Vec::new(),
        stacks: Vec::new(),
        courses: Vec::new(),
        maps: vec![map(cores)],
        targets: targets(cores),
        full: Effort { rounds: 7, seconds: 0.25, file_bytes: 0 },
        quick: Effort { rounds: 1, seconds: 0.03, file_bytes: 0 },
    }
}

fn map(cores: usize) -> Map {
    let others = LOCKS.iter().copied().filter(|lock| *lock != Lock::ParkingLot);
    let layer = |slice: &Slice| Layer {
        label: slice.label.into(),
        workloads: points_of(slice, cores).map(|point| point.workload.id).collect(),
    };
    Map {
        id: "plane".into(),
        title: format!("Throughput on {cores} core{}, by lock", if cores == 1 { "" } else { "s" }),
        across: Axis { key: PAUSES_OUTSIDE.into(), title: "pauses between two acquisitions".into() },
        down: Axis { key: THREADS_PER_CORE.into(), title: "threads per core".into() },
        variants: ids(&others.collect::<Vec<_>>()),
        layers: SLICES.iter().map(layer).collect(),
    }
}

fn targets(cores: usize) -> Vec<Target> {
    let points = points(cores);
    let where_threads = |is_wanted: fn(usize) -> bool| -> Vec<String> {
        let wanted = points.iter().filter(|point| is_wanted(point.load.threads / cores));
        wanted.map(|point| point.workload.id.clone()).collect()
    };
    let (all, crowded) = (where_threads(|_| true), where_threads(|per_core| per_core > 1));
    let target = |text: &str, lock: Lock, workloads: &[String], at_least: f64, yardstick| Target {
        text: text.into(),
        variants: ids(&[lock]),
        workloads: workloads.into(),
        at_least,
        half_width_max: 0.15 * at_least,
        yardstick,
    };
    let limit = |text: &str, lock, workloads: &[String], at_most: f64, yardstick| Target {
        half_width_max: 0.1 * at_most,
        ..target(text, lock, workloads, 0.0, yardstick)
    };
    let of_std = Yardstick::Beside {
        column: LONGEST.into(),
        variant: Lock::Std.id().into(),
        by: Beside::Ratio,
        at_most: 0.1,
    };
    let even = Yardstick::Figure { column: DICE.into(), at_most: FAIR_DICE };
    let best_fair = Yardstick::BestWithin { column: DICE.into(), at_most: FAIR_DICE };
    vec![
        target(
            "everywhere: hybrid reaches 0.95 times the throughput of parking_lot",
            Lock::Hybrid,
            &all,
            0.95,
            Yardstick::Baseline,
        ),
        limit(
            "more threads than cores: hybrid's longest wait is a tenth of std's at most",
            Lock::Hybrid,
            &crowded,
            0.1,
            of_std,
        ),
        limit("everywhere: fair shares evenly (Dice at most 0.60)", Lock::Fair, &all, FAIR_DICE, even),
        target(
            "everywhere: fair equals the best of the locks that share evenly (Dice at most 0.60)",
            Lock::Fair,
            &all,
            1.0,
            best_fair,
        ),
    ]
}

fn published() -> Published {
    let [short, medium, long, pinned, beside] = &SLICES;
    let column = |title: &str, slice, per_core, pauses| PublishedColumn {
        is_ratio: true,
        ..PublishedColumn::new(title, &id(slice, per_core, pauses), RATE)
    };
    let row = |lock: Lock| PublishedRow::new(&lock.variant().label, lock.id(), &[]);
    Published {
        caption: "16 threads per core and 20 pauses outside: ratio to parking_lot (no ratios were published)"
            .into(),
        columns: vec![
            column("a few ns", short, 16, 20),
            column("50 ns", medium, 16, 20),
            column("500 ns", long, 16, 20),
            column("a few ns, pinned", pinned, 16, 20),
            column("a few ns, beside busy processes", beside, 16, 20),
        ],
        rows: LOCKS.map(row).into(),
        conclusion: "Which lock is fastest depends on the work done with the lock held, on the work \
                     between acquisitions, and on the number of threads."
            .into(),
    }
}

fn differences() -> Vec<Difference> {
    let difference = Difference::new;
    vec![
        difference(
            "1 s for each lock, one after another",
            "0.25 s, seven times, all locks in turn in each round",
            "a virtual machine's speed drifts; ratios are formed within a round",
        ),
        difference(
            "dependent steps between two acquisitions",
            "pause instructions, whose duration depends on the processor",
            "spinning locks pause in the same way, so their spin limits can be compared with the axis",
        ),
        difference(
            "a number of threads that the user chooses",
            "1 to 32 threads per core; one part of the runs with pinned threads, one beside busy processes",
            "placement and other load decide how often a thread that holds the lock is preempted",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn plane_has_every_combination_once_and_two_slices_more() {
        let points = points(2);
        let loads: BTreeSet<_> =
            points.iter().map(|point| format!("{:?} {}", point.load, point.is_beside_others)).collect();
        let ids: BTreeSet<_> = points.iter().map(|point| &point.workload.id).collect();
        assert_eq!((points.len(), loads.len(), ids.len()), (80, 80, 80));
        let threads: BTreeSet<_> = points.iter().map(|point| point.load.threads).collect();
        assert_eq!(threads, [2, 8, 32, 64].into());
        assert_eq!(points.iter().filter(|point| point.load.is_pinned).count(), 16);
        assert_eq!(points.iter().filter(|point| point.is_beside_others).count(), 16);
    }

    #[test]
    fn map_shows_every_workload_in_one_cell() {
        let declaration = declaration(2);
        let layers = declaration.maps[0].layers.iter().flat_map(|layer| &layer.workloads);
        let mut shown: Vec<_> = layers.collect();
        shown.sort();
        let mut all: Vec<_> = declaration.workloads.iter().map(|workload| &workload.id).collect();
        all.sort();
        assert_eq!(shown, all);
        assert!(!declaration.maps[0].variants.contains(&declaration.baseline), "it is 1 everywhere");
    }

    #[test]
    fn longest_waits_are_judged_where_threads_outnumber_cores() {
        let targets = targets(2);
        assert_eq!(targets.iter().map(|target| target.workloads.len()).collect::<Vec<_>>(), [80, 60, 80, 80]);
        assert!(!targets[1].workloads.contains(&"short-1x-0p".into()));
    }
}
