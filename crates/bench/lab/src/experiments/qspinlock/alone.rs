//! `qspinlock-alone`: the cost of an uncontended lock.
//!
//! `sample → one pinned thread: lock, unlock, in blocks → the median block → Reading`
//!
//! - Uses a separate thread, so that no library treats the process as single-threaded.

use std::time::{Duration, Instant};

use super::locks::{COMPARED, Lock, WithLock, ids};
use crate::error::LabError;
use crate::experiment::{
    Bench, Cell, Column, Declaration, Difference, Effort, Experiment, Plot, Published, PublishedColumn,
    PublishedRow, RatioForm, Reading, SampleError, Scale, Source, Target, Workload, Yardstick,
};
use crate::load::cores;
use crate::load::locks::exclusive::Exclusive;
use crate::machine::StoragePlace;
use crate::stats;

/// Acquisitions between two readings of the clock.
const BLOCK: u32 = 10_000;
const ALONE: &str = "alone";
const RATE: &str = "rate";
const COST: &str = "cost";
/// The rate that corresponds to at most 1.05 times the duration.
const AT_LEAST: f64 = 1.0 / 1.05;

pub(crate) fn experiment() -> Experiment {
    Experiment { declaration: declaration(), make: |_| Box::new(Alone) }
}

struct Alone;

/// Measures the duration of an acquisition and release, in ns.
struct Blocks {
    seconds: f64,
}

impl WithLock for Blocks {
    type Out = Option<f64>;

    fn with<L: Exclusive>(self) -> Option<f64> {
        let lock = L::new();
        let end = Instant::now() + Duration::from_secs_f64(self.seconds);
        let mut blocks_ns = Vec::new();
        while blocks_ns.is_empty() || Instant::now() < end {
            let start = Instant::now();
            for _ in 0..BLOCK {
                std::hint::black_box(&lock).with(|lines| lines.first.0 = lines.first.0.wrapping_add(1));
            }
            #[allow(clippy::cast_precision_loss)] // some µs
            blocks_ns.push(start.elapsed().as_nanos() as f64 / f64::from(BLOCK));
        }
        stats::median(&blocks_ns)
    }
}

impl Bench for Alone {
    fn prepare(&mut self, _: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let blocks = Blocks { seconds: cell.seconds };
        let thread = std::thread::spawn(move || {
            cores::pin_this_thread(0);
            COMPARED[cell.variant].with(blocks)
        });
        let panicked = |_| SampleError::Unavailable("the thread panicked".into());
        let cost_ns = thread.join().map_err(panicked)?;
        Ok(vec![cost_ns.map(|ns| 1000.0 / ns), cost_ns])
    }

    fn storages(&self) -> Vec<StoragePlace> {
        Vec::new()
    }

    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}

fn declaration() -> Declaration {
    let column = |id, title, unit, measured| Column::new(id, title, unit, 2, measured);
    Declaration {
        name: "qspinlock-alone".into(),
        question: "What does an uncontended lock cost?".into(),
        source: Source {
            title: "std and parking_lot: their fast paths".into(),
            year: 2025,
            setup: "an exchange to lock and one to unlock".into(),
        },
        published: published(),
        differences: vec![Difference::new(
            "no published figures",
            "all locks in turn in each round, one pinned thread that adds one to the locked value",
            "the question is about a few per cent, less than the drift of a virtual machine's speed",
        )],
        variants: COMPARED.map(Lock::variant).into(),
        workloads: vec![Workload::new(ALONE, "one thread, lock and unlock")],
        columns: vec![
            column(RATE, "pairs", "M/s", "Acquisitions with their releases per second, of the median block."),
            column(COST, "pair", "ns", "The median block of 10,000, per acquisition with its release."),
        ],
        baseline: Lock::Std.id().into(),
        compared: RATE.into(),
        ratio_title: "of std".into(),
        ratio_form: RatioForm::Share,
        plots: vec![Plot::new("cost", "Lock and unlock", Some(COST), Scale::Linear)],
        curves: Vec::new(),
        courses: Vec::new(),
        stacks: Vec::new(),
        maps: Vec::new(),
        targets: vec![Target {
            text: "lock and unlock take at most 1.05 times as long as the faster of std and parking_lot (0.952 of its rate)"
                .into(),
            variants: ids(&[Lock::Hybrid, Lock::Fair, Lock::Fifo, Lock::Native]),
            workloads: vec![ALONE.into()],
            at_least: AT_LEAST,
            half_width_max: 0.03,
            yardstick: Yardstick::BestOf(ids(&[Lock::Std, Lock::ParkingLot])),
        }],
        full: Effort { rounds: 30, seconds: 0.03, file_bytes: 0 },
        quick: Effort { rounds: 3, seconds: 0.005, file_bytes: 0 },
    }
}

fn published() -> Published {
    let row = |lock: &Lock| PublishedRow::new("not published", lock.id(), &[]);
    Published {
        caption: "Nanoseconds for one lock and unlock".into(),
        columns: vec![PublishedColumn::new("one thread", ALONE, COST)],
        rows: COMPARED.iter().map(row).collect(),
        conclusion: "Two exchanges of one word; the rest is noise.".into(),
    }
}
