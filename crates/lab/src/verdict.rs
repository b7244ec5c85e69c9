//! Whether a target was reached, with the figures that say so.
//!
//! - Reached: for each variant and workload named, the 95 % interval of the paired ratio lies above the target, or
//!   includes it and is narrow enough. A wide interval includes everything and shows nothing.
//!
//! Not here: how ratio and interval come about (`result.rs`, `stats.rs`).

use serde::{Deserialize, Serialize};

use crate::experiment::{Declaration, Target};
use crate::result::CellResult;

/// Of one target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// As wanted.
    Reached,
    /// Measured, and not as wanted.
    Missed,
    /// Too few rounds, or something was not available.
    Undecided,
}

impl Outcome {
    /// For people.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Reached => "reached",
            Self::Missed => "missed",
            Self::Undecided => "undecided",
        }
    }
}

/// A target and what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The target's words.
    pub target: String,
    /// Over all its parts: the worst.
    pub outcome: Outcome,
    /// One line per variant and workload.
    pub details: Vec<String>,
}

impl Verdict {
    /// Nothing could be decided: where there are many lines, none is worth a reader's time before the figures are.
    pub(crate) fn is_all_undecided(&self) -> bool {
        self.details.iter().all(|detail| detail.starts_with(Outcome::Undecided.word()))
    }
}

/// One per target.
pub(crate) fn judge(declaration: &Declaration, cells: &[CellResult]) -> Vec<Verdict> {
    declaration.targets.iter().map(|target| judge_one(declaration, target, cells)).collect()
}

fn judge_one(declaration: &Declaration, target: &Target, cells: &[CellResult]) -> Verdict {
    let wanted = |cell: &&CellResult| {
        target.variants.contains(&cell.variant) && target.workloads.contains(&cell.workload)
    };
    let parts: Vec<_> =
        cells.iter().filter(wanted).map(|cell| judge_cell(declaration, target, cell)).collect();
    let has = |outcome| parts.iter().any(|(found, _)| *found == outcome);
    let complete = parts.len() == target.variants.len() * target.workloads.len();
    let outcome = match () {
        () if has(Outcome::Missed) => Outcome::Missed,
        () if has(Outcome::Undecided) || !complete => Outcome::Undecided,
        () => Outcome::Reached,
    };
    Verdict {
        target: target.text.clone(),
        outcome,
        details: parts.into_iter().map(|(_, detail)| detail).collect(),
    }
}

fn judge_cell(declaration: &Declaration, target: &Target, cell: &CellResult) -> (Outcome, String) {
    let label = |id: &str| {
        let variant = declaration.variants.iter().find(|variant| variant.id == id).map(|found| &found.label);
        let workload =
            declaration.workloads.iter().find(|workload| workload.id == id).map(|found| &found.label);
        variant.or(workload).cloned().unwrap_or_else(|| id.to_owned())
    };
    let name = format!("{}, {}", label(&cell.variant), label(&cell.workload));
    let Some(ratio) = &cell.ratio else {
        let why = cell.unavailable.as_deref().unwrap_or("there is no baseline to compare with");
        return (Outcome::Undecided, format!("undecided: {name}: not measured: {why}"));
    };
    let summary = ratio.summary;
    let (low, high, half_width) = (summary.low, summary.high, summary.half_width());
    let outcome = match () {
        () if !summary.is_sure() => Outcome::Undecided,
        () if low >= target.at_least => Outcome::Reached,
        () if high >= target.at_least && half_width <= target.half_width_max => Outcome::Reached,
        () => Outcome::Missed,
    };
    let covered = 100.0 * summary.coverage;
    let figures = format!(
        "{name}: {:.3} ({low:.3} to {high:.3}, which covers {covered:.1} %; ±{:.1} %, at most ±{:.0} % allowed)",
        summary.median,
        100.0 * half_width,
        100.0 * target.half_width_max
    );
    let hint = match outcome {
        Outcome::Undecided => "; too few rounds for 95 %",
        Outcome::Reached if half_width > target.half_width_max => "; wide, and all of it above the target",
        Outcome::Missed if high >= target.at_least => "; too wide: more or longer rounds narrow it",
        _ => "",
    };
    (outcome, format!("{}: {figures}{hint}", outcome.word()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments;
    use crate::result::Ratio;
    use crate::stats::Summary;

    fn outcome(low: f64, high: f64, coverage: f64) -> Outcome {
        let declaration = experiments::find("aio").unwrap().declaration;
        let target = Target {
            text: "as fast".into(),
            variants: vec!["a".into()],
            workloads: vec!["w".into()],
            at_least: 1.0,
            half_width_max: 0.05,
        };
        let summary = Summary { median: f64::midpoint(low, high), low, high, coverage };
        let cell = CellResult {
            variant: "a".into(),
            workload: "w".into(),
            unavailable: None,
            measures: Vec::new(),
            ratio: Some(Ratio { samples: Vec::new(), summary }),
        };
        judge_one(&declaration, &target, &[cell]).outcome
    }

    #[test]
    fn interval_that_includes_or_exceeds_one_and_is_narrow_is_reached() {
        assert_eq!(outcome(0.97, 1.01, 0.957), Outcome::Reached);
        assert_eq!(outcome(1.02, 1.08, 0.957), Outcome::Reached);
    }

    #[test]
    fn wide_interval_above_one_is_reached() {
        assert_eq!(outcome(1.30, 1.60, 0.957), Outcome::Reached);
    }

    #[test]
    fn interval_below_one_is_missed() {
        assert_eq!(outcome(0.95, 0.99, 0.957), Outcome::Missed);
    }

    #[test]
    fn wide_interval_is_missed_even_around_one() {
        assert_eq!(outcome(0.90, 1.10, 0.957), Outcome::Missed);
    }

    #[test]
    fn too_few_rounds_decide_nothing() {
        assert_eq!(outcome(1.0, 1.0, 0.75), Outcome::Undecided);
    }

    #[test]
    fn target_whose_variant_was_not_measured_is_undecided() {
        let declaration = experiments::find("aio").unwrap().declaration;
        let verdicts = judge(&declaration, &[]);
        assert!(verdicts.iter().all(|verdict| verdict.outcome == Outcome::Undecided), "{verdicts:?}");
        assert!(!verdicts.is_empty());
    }
}
