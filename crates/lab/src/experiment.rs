//! What an experiment is: a declaration that says everything but how, and a [`Bench`] that measures.
//!
//! `Experiment { declaration, make } → Bench::prepare → Bench::sample (per variant, workload, round)`
//!
//! - The declaration goes into the result file as it is: a report needs nothing else.
//!
//! Not here: the experiments themselves (`experiments/`), rounds and order (`runner.rs`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::LabError;
use crate::machine::StoragePlace;
use crate::stop::Stop;

/// Where it was published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Of the work.
    pub title: String,
    /// Of publication.
    pub year: u16,
    /// Machine and load of the published figures.
    pub setup: String,
}

/// The published figures, as they were printed, each with what it is to be compared with here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// What the table shows.
    pub caption: String,
    /// Without that of the rows' names.
    pub columns: Vec<PublishedColumn>,
    /// In the order of the original; what was only asked for comes last.
    pub rows: Vec<PublishedRow>,
    /// What it was concluded to say.
    pub conclusion: String,
}

/// One column of the published table, and the figure here that corresponds to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedColumn {
    /// Heading.
    pub title: String,
    /// Id of a workload.
    pub workload: String,
    /// Id of a column.
    pub column: String,
    /// What was published is a ratio to the baseline, so ours is shown here, not the column's figure.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_ratio: bool,
}

/// One row of the published table, and the variant here that corresponds to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedRow {
    /// Name.
    pub label: String,
    /// Id of a variant.
    pub variant: String,
    /// One per column; none if there are no published ones.
    pub figures: Vec<String>,
}

/// What is not as in the original.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// There.
    pub original: String,
    /// In this run.
    pub here: String,
    /// The reason.
    pub why: String,
}

/// One of the things compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variant {
    /// Short, without spaces.
    pub id: String,
    /// As in tables.
    pub label: String,
    /// Workloads it is measured with; empty: all.
    pub only: Vec<String>,
    /// The variant it is compared with, if that is not the experiment's baseline. It is itself compared with none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<String>,
}

impl Variant {
    /// Measured with every workload.
    #[must_use]
    pub fn new(id: &str, label: &str) -> Self {
        Self { id: id.into(), label: label.into(), only: Vec::new(), against: None }
    }

    /// Measured with these workloads only.
    #[must_use]
    pub fn only(mut self, workloads: &[&str]) -> Self {
        self.only = workloads.iter().map(|&id| id.to_owned()).collect();
        self
    }

    /// Compared with this variant.
    #[must_use]
    pub fn against(mut self, variant: &str) -> Self {
        self.against = Some(variant.to_owned());
        self
    }

    /// Whether it is measured with `workload`.
    #[must_use]
    pub fn takes_part(&self, workload: &Workload) -> bool {
        self.only.is_empty() || self.only.contains(&workload.id)
    }
}

/// One of the loads that every variant is put under.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Short, without spaces: part of file names.
    pub id: String,
    /// As in headings.
    pub label: String,
    /// Where it stands on the axes of the declaration's curves; empty: on none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub place: BTreeMap<String, f64>,
}

impl Workload {
    /// A workload.
    #[must_use]
    pub fn new(id: &str, label: &str) -> Self {
        Self { id: id.into(), label: label.into(), place: BTreeMap::new() }
    }

    /// At `value` of the axis `key`.
    #[must_use]
    pub fn at(mut self, key: &str, value: f64) -> Self {
        self.place.insert(key.to_owned(), value);
        self
    }
}

/// One figure of each sample.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Column {
    /// Short, without spaces.
    pub id: String,
    /// Heading, without the unit.
    pub title: String,
    /// Of the figures.
    pub unit: String,
    /// Decimals shown.
    pub decimals: usize,
    /// How it is measured, in a sentence or two.
    pub measured: String,
    /// Shown in files only: a terminal has no room for all.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub files_only: bool,
}

/// Axis of a plot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scale {
    /// From zero: bars.
    Linear,
    /// For what spans several powers of ten: points.
    Log,
}

/// One drawing per workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plot {
    /// Part of the file's name.
    pub id: String,
    /// Over the drawing.
    pub title: String,
    /// What is drawn: a column's id, or `None` for the ratio to the baseline in percent.
    pub column: Option<String>,
    /// Of its axis.
    pub scale: Scale,
}

/// An axis of [`Curves`]: a number that workloads have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Axis {
    /// In the workloads' places.
    pub key: String,
    /// With the unit.
    pub title: String,
}

/// One drawing for the whole run: the ratio to the baseline over a number that the workloads have, a panel per
/// variant, a line for each value of another number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Curves {
    /// The file's name.
    pub id: String,
    /// Over the drawing.
    pub title: String,
    /// To the right.
    pub across: Axis,
    /// A line for each value.
    pub lines: Axis,
    /// Ids of variants: a panel each.
    pub panels: Vec<String>,
}

/// One drawing per workload: what a figure is made of, a bar of parts for each variant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stack {
    /// Part of the file's name.
    pub id: String,
    /// Over the drawing.
    pub title: String,
    /// With the unit.
    pub axis: String,
    /// Ids of the columns that are the parts, from left to right.
    pub columns: Vec<String>,
}

/// One drawing for the whole run: a column over a number that workloads have, a line per variant, both axes by powers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Courses {
    /// The file's name.
    pub id: String,
    /// Over the drawing.
    pub title: String,
    /// To the right: by powers of two.
    pub across: Axis,
    /// What is drawn: a column's id.
    pub column: String,
    /// Upwards.
    pub scale: Scale,
    /// Ids of variants: a line each.
    pub variants: Vec<String>,
}

/// How the ratio to the baseline is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RatioForm {
    /// 104.2: as much as that, in %.
    #[default]
    Share,
    /// +4.2: more than that, in %.
    Gain,
}

impl RatioForm {
    /// In %.
    #[must_use]
    pub fn percent(self, ratio: f64) -> f64 {
        match self {
            Self::Share => 100.0 * ratio,
            Self::Gain => 100.0 * (ratio - 1.0),
        }
    }
}

/// A figure to be reached: the ratio to the baseline in the same round, as an interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Target {
    /// What is to be shown, in words.
    pub text: String,
    /// By these.
    pub variants: Vec<String>,
    /// Under these.
    pub workloads: Vec<String>,
    /// Reached if the interval includes or exceeds this.
    pub at_least: f64,
    /// And is no wider than this to either side on average.
    pub half_width_max: f64,
    /// What is measured against what.
    #[serde(default, skip_serializing_if = "Yardstick::is_baseline")]
    pub yardstick: Yardstick,
}

/// Which figure a [`Target`] is about.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Yardstick {
    /// The ratio to the baseline.
    #[default]
    Baseline,
    /// The ratio to that of these variants that has the highest median of the compared column under the same workload.
    BestOf(Vec<String>),
    /// The ratio to the same variant under this workload.
    Workload(String),
    /// The column's own figure, no ratio: reached if it is `at_most` so much. `at_least` says nothing then.
    Figure {
        /// Its id.
        column: String,
        /// In its unit.
        at_most: f64,
    },
    /// The column's figure beside another variant's in the same round: reached if it is `at_most` so much. `at_least`
    /// says nothing then.
    Beside {
        /// Its id.
        column: String,
        /// The other variant's id.
        variant: String,
        /// How the two are put together.
        by: Beside,
        /// A ratio, or so many of the column's unit.
        at_most: f64,
    },
}

/// What becomes of two figures of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Beside {
    /// Ours ÷ theirs.
    Ratio,
    /// Ours − theirs.
    Difference,
}

impl Yardstick {
    fn is_baseline(&self) -> bool {
        *self == Self::Baseline
    }
}

/// Everything about an experiment but how it measures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Declaration {
    /// As on the command line.
    pub name: String,
    /// In one line.
    pub question: String,
    /// Where it comes from.
    pub source: Source,
    /// The figures to stand beside.
    pub published: Published,
    /// And why ours cannot be the same.
    pub differences: Vec<Difference>,
    /// What is compared, in the order of the tables.
    pub variants: Vec<Variant>,
    /// Under which loads.
    pub workloads: Vec<Workload>,
    /// What is read off each sample.
    pub columns: Vec<Column>,
    /// The variant that others are compared with.
    pub baseline: String,
    /// The column that is compared; more is better.
    pub compared: String,
    /// Heading of the ratio, and what it means.
    pub ratio_title: String,
    /// How it is written.
    #[serde(default)]
    pub ratio_form: RatioForm,
    /// Drawings, one per workload each.
    pub plots: Vec<Plot>,
    /// Drawings over all workloads.
    #[serde(default)]
    pub curves: Vec<Curves>,
    /// Drawings of parts, one per workload each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stacks: Vec<Stack>,
    /// Drawings over all workloads, of figures instead of ratios.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub courses: Vec<Courses>,
    /// What the run gives a verdict on.
    pub targets: Vec<Target>,
    /// How much is measured unless the user says otherwise.
    pub full: Effort,
    /// With `--quick`.
    pub quick: Effort,
}

impl Declaration {
    /// Place of the compared column.
    #[must_use]
    pub fn compared_column(&self) -> usize {
        self.columns.iter().position(|column| column.id == self.compared).unwrap_or(0)
    }

    /// Id of what `variant` is compared with; `None` for a baseline.
    #[must_use]
    pub fn baseline_of<'d>(&'d self, variant: &'d str) -> Option<&'d str> {
        let against = |known: &'d Variant| known.against.as_deref();
        if self.variants.iter().filter_map(against).any(|baseline| baseline == variant) {
            return None;
        }
        let known = self.variants.iter().find(|known| known.id == variant);
        Some(known.and_then(against).unwrap_or(&self.baseline)).filter(|&baseline| baseline != variant)
    }
}

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effort {
    /// Samples of each variant under each workload.
    pub rounds: usize,
    /// Of each sample.
    pub seconds: f64,
    /// Of test files.
    pub file_bytes: u64,
}

/// Where and how a bench runs.
#[derive(Clone, Debug)]
pub struct Setup {
    /// A folder for small temporary files; removed afterwards.
    pub scratch: PathBuf,
    /// Where test files go: on the disk to be measured. They are removed afterwards.
    pub storage: PathBuf,
    /// How much is measured.
    pub effort: Effort,
    /// `bareblk`, for experiments that measure it as a process.
    pub program: Option<PathBuf>,
    /// When to give up.
    pub stop: Stop,
}

/// What to measure now.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    /// Place in the declaration.
    pub variant: usize,
    /// Place in the declaration.
    pub workload: usize,
    /// For addresses that are random and the same for every variant of the round.
    pub seed: u64,
    /// Of the sample, warm-up not included.
    pub seconds: f64,
}

/// One sample: a figure per column, in their order; `None` where there is none to be had.
pub type Reading = Vec<Option<f64>>;

/// Why there is no sample.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// This variant cannot run here under this workload; not asked again.
    #[error("{0}")]
    Unavailable(String),
    /// The user wants the end.
    #[error("interrupted")]
    Interrupted,
}

impl SampleError {
    /// With the kernel's words for it.
    pub(crate) fn because(what: &str, error: &dyn std::fmt::Display) -> Self {
        Self::Unavailable(format!("{what}: {error}"))
    }
}

/// Measures.
pub trait Bench {
    /// Makes what all samples need (test files); `tell` gets what it is doing and the share that is done.
    ///
    /// # Errors
    /// When nothing can be measured, or the user wants the end.
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError>;

    /// Measures one variant under one workload once.
    ///
    /// # Errors
    /// [`SampleError`].
    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError>;

    /// Where data goes, for the report.
    fn storages(&self) -> Vec<StoragePlace>;

    /// What a reader of the figures must know about this run ("bare metal is fio 3.33").
    fn notes(&self) -> Vec<String>;
}

/// An experiment that can be run.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// What it is.
    pub declaration: Declaration,
    /// How it measures.
    pub make: fn(&Setup) -> Box<dyn Bench>,
}
