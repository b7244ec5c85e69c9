//! Repeats published experiments on this project's code, and compares the figures with the published ones.
//!
//! `experiments (declaration + bench) → runner (interleaved rounds) → stats, verdict → table | report`
//!
//! - An experiment is a declaration (question, published table, variants, workloads, columns, targets) and a [`Bench`]
//!   that measures one variant once. All other code is common to the experiments.
//! - Every variant runs once per round, in a new order each round, so that drift affects all variants. Comparisons are
//!   ratios within one round.
//! - An interrupted run reports nothing.
//!
//! See also: the measured parts (`blk_server`, `io_engine`), the command line (`bareblk`).
#![forbid(unsafe_code)]

mod experiment;

mod experiments;

mod load;

mod runner;

mod result;

mod verdict;

mod yardstick;

mod machine;

mod table;

mod grid;

mod report;

mod error;

pub use error::LabError;
pub use experiment::{
    Axis, Bench, Beside, Cell, Column, Courses, Curves, Declaration, Difference, Effort, Experiment, Layer,
    Map, Plot, Published, PublishedColumn, PublishedRow, RatioForm, Reading, SampleError, Scale, Setup,
    Source, Stack, Target, Variant, Workload, Yardstick,
};
pub use experiments::{all, find, find_all};
pub use machine::{Machine, StoragePlace};
pub use report::{Output, write_all};
pub use result::{CellResult, Measure, Outcome, Ratio, RunResult, Verdict};
pub use runner::{Progress, Quiet, run, shuffled};
pub use table::text as table_text;
pub use workload::stats::{Summary, median};
pub use workload::stop::Stop;

use workload::{stats, stop};
