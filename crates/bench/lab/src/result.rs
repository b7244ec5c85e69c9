//! The result of a run: all samples, and the figures computed from them. It is stored as the result file.
//!
//! `readings per cell → Measure per column (samples, median, interval) → Ratio to the baseline, round by round`
//!
//! - A cell's samples are in the order of the rounds, with `null` for a missing one, so that samples of one round stay
//!   aligned.

use serde::{Deserialize, Serialize};

use crate::experiment::{Declaration, Effort, Reading};
use crate::machine::Machine;
use crate::stats::Summary;

/// Version of the result file. Changes when older programs can no longer read it.
pub const FORMAT: u32 = 1;

/// A finished run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Version of this layout.
    pub format: u32,
    /// The experiment's declaration.
    pub experiment: Declaration,
    /// Program and version.
    pub program: String,
    /// The command that repeats the run.
    pub command: String,
    /// Start time, UTC.
    pub date: String,
    /// How much was measured.
    pub effort: Effort,
    /// Whether the run had `--quick`.
    pub quick: bool,
    /// Seed of the variants' order and of random addresses.
    pub seed: u64,
    /// The machine on which the experiment ran.
    pub machine: Machine,
    /// Facts about this run that readers need.
    pub notes: Vec<String>,
    /// The cells, by workload and then by variant.
    pub cells: Vec<CellResult>,
    /// Verdicts on the targets.
    pub verdicts: Vec<Verdict>,
}

/// One variant under one workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CellResult {
    /// The variant's id.
    pub variant: String,
    /// The workload's id.
    pub workload: String,
    /// The reason, if there are no figures.
    pub unavailable: Option<String>,
    /// The measures, in the order of the columns.
    pub measures: Vec<Measure>,
    /// The ratio to the baseline; `None` if either has no figures.
    pub ratio: Option<Ratio>,
}

/// One column of a cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    /// The column's id.
    pub column: String,
    /// Unit of the samples.
    pub unit: String,
    /// One sample per round.
    pub samples: Vec<Option<f64>>,
    /// Median and interval of the existing samples.
    pub summary: Option<Summary>,
}

/// Variant ÷ baseline in the same round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// One ratio per round.
    pub samples: Vec<Option<f64>>,
    /// Median and interval of the existing ratios.
    pub summary: Summary,
}

/// The runner's samples of one cell.
#[derive(Clone, Debug, Default)]
pub(crate) struct Collected {
    /// One reading per round.
    pub readings: Vec<Option<Reading>>,
    pub unavailable: Option<String>,
}

impl RunResult {
    /// The figures of a variant under a workload; `None` if it is not measured there.
    #[must_use]
    pub fn cell(&self, workload: &str, variant: &str) -> Option<&CellResult> {
        self.cells.iter().find(|cell| cell.workload == workload && cell.variant == variant)
    }

    /// The cells of a workload, in the order of the variants.
    pub fn cells_of<'r>(&'r self, workload: &'r str) -> impl Iterator<Item = &'r CellResult> {
        self.cells.iter().filter(move |cell| cell.workload == workload)
    }

    /// The variant's name in tables.
    #[must_use]
    pub fn label<'r>(&'r self, variant: &'r str) -> &'r str {
        let found = self.experiment.variants.iter().find(|known| known.id == variant);
        found.map_or(variant, |known| &known.label)
    }

    /// Whether intervals have a coverage of 95%, judged by figures that every round has. (Rounds may lack some figures,
    /// for example wakes per sleep if no thread slept.)
    #[must_use]
    pub fn is_sure(&self) -> bool {
        let measures = self.cells.iter().flat_map(|cell| &cell.measures);
        let mut complete = measures.filter(|measure| measure.samples.iter().all(Option::is_some));
        complete.all(|measure| measure.summary.is_none_or(|summary| summary.is_sure()))
    }
}

impl CellResult {
    /// Median and interval of a column.
    #[must_use]
    pub fn summary(&self, column: &str) -> Option<Summary> {
        self.measures.iter().find(|measure| measure.column == column)?.summary
    }

    /// A column's figures, one per round.
    pub(crate) fn samples(&self, column: &str) -> Option<&[Option<f64>]> {
        Some(&self.measures.iter().find(|measure| measure.column == column)?.samples)
    }
}

/// Makes all cells from the samples collected by workload and variant (`None`: not measured there).
pub(crate) fn cells(declaration: &Declaration, collected: &[Vec<Option<Collected>>]) -> Vec<CellResult> {
    let of_workload = declaration.workloads.iter().zip(collected);
    let cells = of_workload.flat_map(|(workload, row)| {
        let measured = move |id: &str| {
            let place = declaration.variants.iter().position(|variant| variant.id == id)?;
            row.get(place)?.as_ref()
        };
        let taking_part = declaration.variants.iter().zip(row);
        taking_part.filter_map(move |(variant, cell)| {
            let cell = cell.as_ref()?;
            let base = declaration.baseline_of(&variant.id).and_then(measured);
            Some(CellResult {
                variant: variant.id.clone(),
                workload: workload.id.clone(),
                unavailable: cell.unavailable.clone(),
                measures: measures(declaration, cell),
                ratio: base.and_then(|base| ratio(declaration.compared_column(), cell, base)),
            })
        })
    });
    cells.collect()
}

fn measures(declaration: &Declaration, cell: &Collected) -> Vec<Measure> {
    let measure = |(place, column): (usize, &crate::experiment::Column)| {
        let samples = column_samples(cell, place);
        let present: Vec<f64> = samples.iter().copied().flatten().collect();
        let summary = Summary::of(&present);
        Measure { column: column.id.clone(), unit: column.unit.clone(), samples, summary }
    };
    declaration.columns.iter().enumerate().map(measure).collect()
}

fn column_samples(cell: &Collected, place: usize) -> Vec<Option<f64>> {
    let value = |reading: &Option<Reading>| reading.as_ref()?.get(place).copied().flatten();
    cell.readings.iter().map(|reading| value(reading).filter(|value| value.is_finite())).collect()
}

fn ratio(compared: usize, cell: &Collected, base: &Collected) -> Option<Ratio> {
    Ratio::between(&column_samples(cell, compared), &column_samples(base, compared))
}

impl Ratio {
    /// Computes the ratios round by round; `None` if no round has both figures.
    pub(crate) fn between(ours: &[Option<f64>], base: &[Option<f64>]) -> Option<Self> {
        let pairs = ours.iter().zip(base);
        let samples: Vec<_> =
            pairs.map(|(ours, base)| Some((*ours)? / base.filter(|&base| base > 0.0)?)).collect();
        let present: Vec<f64> = samples.iter().copied().flatten().collect();
        Summary::of(&present).map(|summary| Self { samples, summary })
    }
}

/// The outcome of one target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The target was reached.
    Reached,
    /// The target was measured and missed.
    Missed,
    /// There were too few rounds, or a required figure is missing.
    Undecided,
}

impl Outcome {
    /// The outcome's word in reports.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Reached => "reached",
            Self::Missed => "missed",
            Self::Undecided => "undecided",
        }
    }
}

/// A target and its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The target's text.
    pub target: String,
    /// The worst outcome of its parts.
    pub outcome: Outcome,
    /// One line per variant and workload.
    pub details: Vec<String>,
}

impl Verdict {
    /// Whether no detail could be decided. Many such lines are not worth reading before the figures.
    pub(crate) fn is_all_undecided(&self) -> bool {
        self.details.iter().all(|detail| detail.starts_with(Outcome::Undecided.word()))
    }
}
