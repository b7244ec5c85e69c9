//! An experiment: a declaration of what is measured, and a [`Bench`] that measures it.
//!
//! `Experiment { declaration, make } → Bench::prepare → Bench::sample (per variant, workload, round)`
//!
//! - The result file contains the unchanged declaration, so a report needs no other data.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::LabError;
use crate::machine::StoragePlace;
use crate::stop::Stop;

/// Converts ids of columns, workloads or variants to owned strings.
pub(crate) fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

/// Where the work was published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Title of the work.
    pub title: String,
    /// Year of publication.
    pub year: u16,
    /// Machine and load of the published figures.
    pub setup: String,
}

/// The published figures, as printed, each mapped to the corresponding figure of this run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// The table's caption.
    pub caption: String,
    /// The column headings, except that of the row names.
    pub columns: Vec<PublishedColumn>,
    /// The rows, in the original's order; rows without published figures come last.
    pub rows: Vec<PublishedRow>,
    /// The original's conclusion.
    pub conclusion: String,
}

/// A column of the published table, and the corresponding figure of this run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedColumn {
    /// Heading of the column.
    pub title: String,
    /// Id of the corresponding workload.
    pub workload: String,
    /// Id of the corresponding column of this run.
    pub column: String,
    /// True if the published figure is a ratio to the baseline: the report then shows this run's ratio as well.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_ratio: bool,
}

impl PublishedColumn {
    /// A column whose published figure is not a ratio.
    pub(crate) fn new(title: &str, workload: &str, column: &str) -> Self {
        Self { title: title.into(), workload: workload.into(), column: column.into(), is_ratio: false }
    }
}

/// A row of the published table, and the corresponding variant of this run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedRow {
    /// Name of the row.
    pub label: String,
    /// Id of the corresponding variant.
    pub variant: String,
    /// One figure per column; empty if no figures were published.
    pub figures: Vec<String>,
}

impl PublishedRow {
    pub(crate) fn new(label: &str, variant: &str, figures: &[&str]) -> Self {
        Self { label: label.into(), variant: variant.into(), figures: owned(figures) }
    }
}

/// A difference from the original.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The original's setup.
    pub original: String,
    /// This run's setup.
    pub here: String,
    /// The reason for the difference.
    pub why: String,
}

impl Difference {
    pub(crate) fn new(original: &str, here: &str, why: &str) -> Self {
        Self { original: original.into(), here: here.into(), why: why.into() }
    }
}

/// One of the variants compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variant {
    /// Id: a short name without spaces.
    pub id: String,
    /// Name in tables.
    pub label: String,
    /// Ids of the workloads under which it is measured; all if empty.
    pub only: Vec<String>,
    /// Id of the variant that it is compared with instead of the experiment's baseline. That variant itself has no
    /// baseline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<String>,
}

impl Variant {
    /// A variant that is measured with every workload.
    #[must_use]
    pub fn new(id: &str, label: &str) -> Self {
        Self { id: id.into(), label: label.into(), only: Vec::new(), against: None }
    }

    /// Restricts the variant to these workloads.
    #[must_use]
    pub fn only(mut self, workloads: &[&str]) -> Self {
        self.only = owned(workloads);
        self
    }

    /// Sets the variant that this one is compared with.
    #[must_use]
    pub fn against(mut self, variant: &str) -> Self {
        self.against = Some(variant.to_owned());
        self
    }

    /// Whether this variant is measured under `workload`.
    #[must_use]
    pub fn takes_part(&self, workload: &Workload) -> bool {
        self.only.is_empty() || self.only.contains(&workload.id)
    }
}

/// A load under which every variant is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Id: a short name without spaces, which is part of file names.
    pub id: String,
    /// Name in headings.
    pub label: String,
    /// The workload's position on the axes of the declaration's curves; empty if it is on none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub place: BTreeMap<String, f64>,
}

impl Workload {
    /// Makes a workload that is on no axis.
    #[must_use]
    pub fn new(id: &str, label: &str) -> Self {
        Self { id: id.into(), label: label.into(), place: BTreeMap::new() }
    }

    /// Sets the workload's position on the axis `key` to `value`.
    #[must_use]
    pub fn at(mut self, key: &str, value: f64) -> Self {
        self.place.insert(key.to_owned(), value);
        self
    }
}

/// One figure of each sample.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Column {
    /// Id: a short name without spaces.
    pub id: String,
    /// Heading, without the unit.
    pub title: String,
    /// Unit of the figures.
    pub unit: String,
    /// Decimals shown.
    pub decimals: usize,
    /// How the figure is measured, in one or two sentences.
    pub measured: String,
    /// The column appears only in files, because a terminal has no room for all columns.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub files_only: bool,
}

impl Column {
    pub(crate) fn new(id: &str, title: &str, unit: &str, decimals: usize, measured: &str) -> Self {
        let (id, title, unit) = (id.into(), title.into(), unit.into());
        Self { id, title, unit, decimals, measured: measured.into(), files_only: false }
    }

    /// Makes columns from rows of id, title, unit, decimals, and what is measured.
    pub(crate) fn table(rows: &[(&str, &str, &str, usize, &str)]) -> Vec<Self> {
        rows.iter()
            .map(|&(id, title, unit, decimals, measured)| Self::new(id, title, unit, decimals, measured))
            .collect()
    }

    pub(crate) fn in_files(self) -> Self {
        Self { files_only: true, ..self }
    }
}

/// Scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scale {
    /// The axis starts at zero, and figures are bars.
    Linear,
    /// A logarithmic scale with points, for figures that span several powers of ten.
    Log,
}

/// One drawing per workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plot {
    /// Part of the file's name.
    pub id: String,
    /// Title of the drawing.
    pub title: String,
    /// The id of the column that is drawn, or `None` for the ratio to the baseline in percent.
    pub column: Option<String>,
    /// Scale of the drawing's axis.
    pub scale: Scale,
}

impl Plot {
    pub(crate) fn new(id: &str, title: &str, column: Option<&str>, scale: Scale) -> Self {
        Self { id: id.into(), title: title.into(), column: column.map(str::to_owned), scale }
    }
}

/// An axis of [`Curves`]: a value that each workload sets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Axis {
    /// Key of the axis in the workloads' `place`.
    pub key: String,
    /// Title with the unit.
    pub title: String,
}

/// One drawing for the whole run: the ratio to the baseline against one parameter of the workloads. It has a panel per
/// variant, and a line for each value of a second parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Curves {
    /// The file's name.
    pub id: String,
    /// Title of the drawing.
    pub title: String,
    /// The horizontal axis.
    pub across: Axis,
    /// The axis whose values have one line each.
    pub lines: Axis,
    /// Ids of variants, one panel each.
    pub panels: Vec<String>,
}

/// One drawing per workload: the parts of a figure, as one stacked bar per variant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stack {
    /// Part of the file's name.
    pub id: String,
    /// Title of the drawing.
    pub title: String,
    /// The axis title, with the unit.
    pub axis: String,
    /// Ids of the columns with the parts, from left to right.
    pub columns: Vec<String>,
}

/// One drawing for the whole run: a column against a parameter of the workloads, one line per variant, both axes
/// logarithmic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Courses {
    /// The file's name.
    pub id: String,
    /// Title of the drawing.
    pub title: String,
    /// The horizontal axis, by powers of two.
    pub across: Axis,
    /// The id of the column that is drawn.
    pub column: String,
    /// Scale of the vertical axis.
    pub scale: Scale,
    /// Ids of variants, one line each.
    pub variants: Vec<String>,
}

/// One drawing for the whole run: the ratio to the baseline by two parameters of the workloads, as colour and figure.
/// It has a grid for each variant and layer. The terminal shows these grids instead of the workloads' tables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Map {
    /// The file's name.
    pub id: String,
    /// Title of the drawing.
    pub title: String,
    /// One column of cells per value of this axis.
    pub across: Axis,
    /// One row of cells per value of this axis.
    pub down: Axis,
    /// Ids of variants, one column of grids each.
    pub variants: Vec<String>,
    /// The layers, one row of grids each.
    pub layers: Vec<Layer>,
}

/// The workloads of a [`Map`] that share its grids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Label that says what the workloads have in common.
    pub label: String,
    /// Ids of the workloads. No two workloads have the same position on both axes.
    pub workloads: Vec<String>,
}

/// Notation of the ratio to the baseline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RatioForm {
    /// The share of the baseline, in %, such as 104.2.
    #[default]
    Share,
    /// The gain over the baseline, in %, such as +4.2.
    Gain,
}

impl RatioForm {
    /// The ratio in %.
    #[must_use]
    pub fn percent(self, ratio: f64) -> f64 {
        match self {
            Self::Share => 100.0 * ratio,
            Self::Gain => 100.0 * (ratio - 1.0),
        }
    }
}

/// A goal for a figure, usually the ratio to the baseline in the same round. It is judged by the figure's interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Target {
    /// The claim as text.
    pub text: String,
    /// The variants that must reach the goal.
    pub variants: Vec<String>,
    /// The workloads under which the goal must be reached.
    pub workloads: Vec<String>,
    /// The goal is reached if the interval includes or exceeds this.
    pub at_least: f64,
    /// The interval's half width must not exceed this.
    pub half_width_max: f64,
    /// The figure that is judged.
    #[serde(default, skip_serializing_if = "Yardstick::is_baseline")]
    pub yardstick: Yardstick,
}

/// The figure that a [`Target`] is judged by.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Yardstick {
    /// The ratio to the baseline.
    #[default]
    Baseline,
    /// The ratio to the one of these variants that has the highest median of the compared column under the same
    /// workload.
    BestOf(Vec<String>),
    /// The ratio to the variant with the highest median of the compared column under the same workload, among the
    /// variants whose median of another column is at most `at_most`. That variant may be the judged one itself.
    BestWithin {
        /// The other column's id.
        column: String,
        /// Upper limit, in that column's unit.
        at_most: f64,
    },
    /// The ratio to the same variant under this workload.
    Workload(String),
    /// The column's own figure, not a ratio. Reached if it is at most `at_most`; `at_least` is not used.
    Figure {
        /// The column's id.
        column: String,
        /// Upper limit, in the column's unit.
        at_most: f64,
    },
    /// The column's figure compared with another variant's in the same round. Reached if the result is at most
    /// `at_most`; `at_least` is not used.
    Beside {
        /// The column's id.
        column: String,
        /// The other variant's id.
        variant: String,
        /// How the two figures are combined.
        by: Beside,
        /// Upper limit of the ratio, or of the difference in the column's unit.
        at_most: f64,
    },
}

/// How two figures of a round are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Beside {
    /// The judged variant's figure ÷ the other variant's figure.
    Ratio,
    /// The judged variant's figure − the other variant's figure.
    Difference,
}

impl Yardstick {
    fn is_baseline(&self) -> bool {
        *self == Self::Baseline
    }
}

/// The description of an experiment, without the code that measures it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Declaration {
    /// Name on the command line.
    pub name: String,
    /// The question, in one line.
    pub question: String,
    /// The published work.
    pub source: Source,
    /// The published figures.
    pub published: Published,
    /// Differences from the original, with their reasons.
    pub differences: Vec<Difference>,
    /// The variants, in the order of the tables.
    pub variants: Vec<Variant>,
    /// The workloads, in the order of the tables.
    pub workloads: Vec<Workload>,
    /// The figures of each sample.
    pub columns: Vec<Column>,
    /// The variant that the others are compared with.
    pub baseline: String,
    /// The column that is compared; higher is better.
    pub compared: String,
    /// Heading of the ratio, and its meaning.
    pub ratio_title: String,
    /// How the ratio is written.
    #[serde(default)]
    pub ratio_form: RatioForm,
    /// Drawings that are made once per workload.
    pub plots: Vec<Plot>,
    /// Drawings of ratios over all workloads.
    #[serde(default)]
    pub curves: Vec<Curves>,
    /// Drawings of a figure's parts, made once per workload.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stacks: Vec<Stack>,
    /// Drawings over all workloads, of figures instead of ratios.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub courses: Vec<Courses>,
    /// Drawings over all workloads, of ratios by two parameters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub maps: Vec<Map>,
    /// The goals that the run is judged by.
    pub targets: Vec<Target>,
    /// The default effort.
    pub full: Effort,
    /// The effort with `--quick`.
    pub quick: Effort,
}

impl Declaration {
    /// Whether a map shows the workload.
    #[must_use]
    pub fn maps_show(&self, workload: &Workload) -> bool {
        self.maps.iter().flat_map(|map| &map.layers).any(|layer| layer.workloads.contains(&workload.id))
    }

    /// Index of the compared column.
    #[must_use]
    pub fn compared_column(&self) -> usize {
        self.columns.iter().position(|column| column.id == self.compared).unwrap_or(0)
    }

    /// Id of the variant that `variant` is compared with; `None` for a baseline.
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

/// The number and length of the samples, and the size of test files.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effort {
    /// Samples of each variant under each workload.
    pub rounds: usize,
    /// Length of each sample.
    pub seconds: f64,
    /// Size of test files.
    pub file_bytes: u64,
}

/// What a bench needs to know about the run.
#[derive(Clone, Debug)]
pub struct Setup {
    /// A directory for small temporary files, which is removed afterwards.
    pub scratch: PathBuf,
    /// The directory for test files, on the disk to be measured. The files are removed afterwards.
    pub storage: PathBuf,
    /// How much is measured.
    pub effort: Effort,
    /// Path of `bareblk`, for experiments that measure it as a process.
    pub program: Option<PathBuf>,
    /// Path of the `qemu-img` to use as a client; `None`: the one in PATH.
    pub qemu_img: Option<PathBuf>,
    /// The user's request to stop.
    pub stop: Stop,
}

/// One sample to measure.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    /// The variant's index in the declaration.
    pub variant: usize,
    /// The workload's index in the declaration.
    pub workload: usize,
    /// Seed for random addresses, the same for every variant of the round.
    pub seed: u64,
    /// Length of the sample, without the warm-up.
    pub seconds: f64,
}

/// One sample: a figure per column, in the columns' order; `None` for missing figures.
pub type Reading = Vec<Option<f64>>;

/// The reason for a missing sample.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// This variant cannot run on this machine under this workload. The run skips its further samples.
    #[error("{0}")]
    Unavailable(String),
    /// The user interrupted the run.
    #[error("interrupted")]
    Interrupted,
}

impl SampleError {
    /// Makes [`Self::Unavailable`] from another error and a text that says what failed.
    pub(crate) fn because(what: &str, error: &dyn std::fmt::Display) -> Self {
        Self::Unavailable(format!("{what}: {error}"))
    }
}

/// Measures an experiment's samples.
pub trait Bench {
    /// Prepares the resources that all samples need, such as test files. `tell` receives the current step and the
    /// completed share.
    ///
    /// # Errors
    /// Nothing can be measured, or the user interrupted the run.
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError>;

    /// Measures one variant under one workload once.
    ///
    /// # Errors
    /// [`SampleError`].
    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError>;

    /// The storage of test data, for the report.
    fn storages(&self) -> Vec<StoragePlace>;

    /// Facts about this run that readers of the figures need ("bare metal is fio 3.33").
    fn notes(&self) -> Vec<String>;
}

/// An experiment that can be run.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// The declaration.
    pub declaration: Declaration,
    /// Makes the bench that measures the experiment.
    pub make: fn(&Setup) -> Box<dyn Bench>,
}
