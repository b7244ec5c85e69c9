//! `qspinlock-wakes`: compares waking a waiter once, at the unlock that gives it the lock, with also waking it earlier.
//!
//! `sample → contest over a lock that wakes once or twice → Reading`

use super::columns::{HALTS, INVOLUNTARY, KICKS, KICKS_PER_HALT, RATE, VOLUNTARY, columns, reading};
use super::locks::{Lock, ids};
use super::overcommit::Contest;
use crate::error::LabError;
use crate::experiment::{
    Axis, Bench, Cell, Courses, Declaration, Difference, Effort, Experiment, Published, PublishedColumn,
    PublishedRow, RatioForm, Reading, SampleError, Scale, Setup, Source, Workload,
};
use crate::load::cores;
use crate::load::locks::turn::Load;
use crate::machine::StoragePlace;

/// Each lock that wakes twice follows its counterpart that wakes once.
const LOCKS: [Lock; 6] =
    [Lock::Hybrid, Lock::HybridAhead, Lock::Fair, Lock::FairAhead, Lock::Fifo, Lock::FifoAhead];
const PER_CORE: [usize; 5] = [1, 2, 4, 8, 16];
const THREADS: &str = "threads";

pub(crate) fn experiment() -> Experiment {
    Experiment {
        declaration: declaration(cores::all().len()),
        make: |setup| Box::new(Wakes { setup: setup.clone() }),
    }
}

struct Wakes {
    setup: Setup,
}

impl Bench for Wakes {
    fn prepare(&mut self, _: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let threads = PER_CORE[cell.workload] * cores::all().len();
        let contest = Contest { load: Load::usual(threads), seconds: cell.seconds, stop: &self.setup.stop };
        let lock = LOCKS[cell.variant];
        Ok(reading(&lock.with(contest)?, lock.is_counted()))
    }

    fn storages(&self) -> Vec<StoragePlace> {
        Vec::new()
    }

    fn notes(&self) -> Vec<String> {
        vec![format!("{} cores; every thread is pinned to one, round robin.", cores::all().len())]
    }
}

fn declaration(cores: usize) -> Declaration {
    Declaration {
        name: "qspinlock-wakes".into(),
        question: "Does it help to wake a waiter only once, at the unlock that gives it the lock?".into(),
        source: Source {
            title: "locking/pvqspinlock: Only kick CPU at unlock time (Linux)".into(),
            year: 2015,
            setup: "a kernel in a virtual machine; the new holder woke the next waiter, which spun and could fall \
                    asleep again before the lock was free"
                .into(),
        },
        published: published(),
        differences: vec![Difference::new(
            "a virtual CPU that halts and is kicked by the hypervisor",
            "a thread that sleeps in a futex",
            "in user space, this is the equivalent of halting",
        )],
        variants: LOCKS.iter().enumerate().map(|(place, lock)| variant(place, *lock)).collect(),
        workloads: PER_CORE.map(|per_core| workload(per_core, per_core * cores)).into(),
        columns: columns(&[HALTS, KICKS, KICKS_PER_HALT, VOLUNTARY, INVOLUNTARY]),
        baseline: Lock::Hybrid.id().into(),
        compared: RATE.into(),
        ratio_title: "gain over waking once".into(),
        ratio_form: RatioForm::Gain,
        plots: Vec::new(),
        curves: Vec::new(),
        courses: courses(cores),
        stacks: Vec::new(),
        maps: Vec::new(),
        targets: Vec::new(),
        full: Effort { rounds: 9, seconds: 0.25, file_bytes: 0 },
        quick: Effort { rounds: 1, seconds: 0.03, file_bytes: 0 },
    }
}

fn variant(place: usize, lock: Lock) -> crate::experiment::Variant {
    let variant = lock.variant();
    if place % 2 == 1 { variant.against(LOCKS[place - 1].id()) } else { variant }
}

fn workload(per_core: usize, threads: usize) -> Workload {
    let s = if threads == 1 { "" } else { "s" };
    #[allow(clippy::cast_precision_loss)] // a number of threads
    Workload::new(&format!("over-{per_core}x"), &format!("{threads} thread{s}, {per_core} per core"))
        .at(THREADS, threads as f64)
}

fn courses(cores: usize) -> Vec<Courses> {
    let course = |id: &str, title: &str, column: &str| Courses {
        id: id.into(),
        title: title.into(),
        across: Axis { key: THREADS.into(), title: format!("threads on {cores} cores") },
        column: column.into(),
        scale: Scale::Log,
        variants: ids(&LOCKS),
    };
    vec![
        course("halts", "Sleeps begun per thousand acquisitions", HALTS),
        course("switches", "Voluntary context switches per thousand acquisitions", VOLUNTARY),
        course("throughput", "Acquisitions per second", RATE),
    ]
}

fn published() -> Published {
    let column = |title, column| PublishedColumn::new(title, "over-4x", column);
    let row = |lock: Lock| PublishedRow::new(&lock.variant().label, lock.id(), &[]);
    Published {
        caption: "Sleeps and wakes with 4 threads per core (no figures were published)".into(),
        columns: vec![
            column("halts per 1000", HALTS),
            column("kicks per halt", KICKS_PER_HALT),
            column("context switches per 1000", VOLUNTARY),
        ],
        rows: LOCKS.map(row).into(),
        conclusion: "Waking only at the unlock saves a sleep and a wake for each waiter that would not have spun long enough."
            .into(),
    }
}
