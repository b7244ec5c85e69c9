//! What a run found: every sample with what it belongs to, and what follows from them. The result file is this.
//!
//! `readings per cell → Measure per column (samples, median, interval) → Ratio to the baseline, round by round`
//!
//! - A cell's samples stand in the order of the rounds, `null` where a round has none: pairs stay pairs.
//!
//! Not here: the arithmetic (`stats.rs`), files (`report/`).

use serde::{Deserialize, Serialize};

use crate::experiment::{Declaration, Effort, Reading};
use crate::machine::Machine;
use crate::stats::Summary;
use crate::verdict::Verdict;

/// Of the result file. Changes when an older program could not read it any more.
pub const FORMAT: u32 = 1;

/// A finished run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Version of this layout.
    pub format: u32,
    /// What was asked.
    pub experiment: Declaration,
    /// Program and version.
    pub program: String,
    /// How to repeat it.
    pub command: String,
    /// When it began, UTC.
    pub date: String,
    /// How much was measured.
    pub effort: Effort,
    /// With `--quick`.
    pub quick: bool,
    /// Of the order of variants, and of random addresses.
    pub seed: u64,
    /// On what.
    pub machine: Machine,
    /// What a reader must know about this run.
    pub notes: Vec<String>,
    /// By workload, then variant.
    pub cells: Vec<CellResult>,
    /// On the targets.
    pub verdicts: Vec<Verdict>,
}

/// One variant under one workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CellResult {
    /// Its id.
    pub variant: String,
    /// Its id.
    pub workload: String,
    /// Why there are no figures.
    pub unavailable: Option<String>,
    /// In the order of the columns.
    pub measures: Vec<Measure>,
    /// To the baseline; `None` where either has no figures.
    pub ratio: Option<Ratio>,
}

/// One column of a cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measure {
    /// Its id.
    pub column: String,
    /// Of the samples.
    pub unit: String,
    /// By round.
    pub samples: Vec<Option<f64>>,
    /// Of the samples there are.
    pub summary: Option<Summary>,
}

/// Variant ÷ baseline in the same round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// By round.
    pub samples: Vec<Option<f64>>,
    /// Of the ratios there are.
    pub summary: Summary,
}

/// What the runner collected for one cell.
#[derive(Clone, Debug, Default)]
pub(crate) struct Collected {
    /// By round.
    pub readings: Vec<Option<Reading>>,
    pub unavailable: Option<String>,
}

impl RunResult {
    /// The figures of a variant under a workload, where it takes part.
    #[must_use]
    pub fn cell(&self, workload: &str, variant: &str) -> Option<&CellResult> {
        self.cells.iter().find(|cell| cell.workload == workload && cell.variant == variant)
    }

    /// The cells of a workload, in the order of the variants.
    pub fn cells_of<'r>(&'r self, workload: &'r str) -> impl Iterator<Item = &'r CellResult> {
        self.cells.iter().filter(move |cell| cell.workload == workload)
    }

    /// As in tables.
    #[must_use]
    pub fn label<'r>(&'r self, variant: &'r str) -> &'r str {
        let found = self.experiment.variants.iter().find(|known| known.id == variant);
        found.map_or(variant, |known| &known.label)
    }

    /// Whether intervals of figures that each round has cover 95 %. (Some a round may be without: wakes for each sleep
    /// where nobody slept.)
    #[must_use]
    pub fn is_sure(&self) -> bool {
        let measures = self.cells.iter().flat_map(|cell| &cell.measures);
        let mut complete = measures.filter(|measure| measure.samples.iter().all(Option::is_some));
        complete.all(|measure| measure.summary.is_none_or(|summary| summary.is_sure()))
    }
}

impl CellResult {
    /// A column's figures.
    #[must_use]
    pub fn summary(&self, column: &str) -> Option<Summary> {
        self.measures.iter().find(|measure| measure.column == column)?.summary
    }

    /// A column's figures, by round.
    pub(crate) fn samples(&self, column: &str) -> Option<&[Option<f64>]> {
        Some(&self.measures.iter().find(|measure| measure.column == column)?.samples)
    }
}

/// All cells, given what was collected by workload and variant (`None`: does not take part).
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
    /// Round by round; `None` if no round has both.
    pub(crate) fn between(ours: &[Option<f64>], base: &[Option<f64>]) -> Option<Self> {
        let pairs = ours.iter().zip(base);
        let samples: Vec<_> =
            pairs.map(|(ours, base)| Some((*ours)? / base.filter(|&base| base > 0.0)?)).collect();
        let present: Vec<f64> = samples.iter().copied().flatten().collect();
        Summary::of(&present).map(|summary| Self { samples, summary })
    }
}
