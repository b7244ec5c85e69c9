//! Decides whether a target was reached, and lists the figures behind the decision.
//!
//! - A target is reached if, for each named variant and workload, the 95% interval of the paired ratio is above the
//!   target, or includes the target and is narrow enough. A wide interval that includes the target proves nothing. For
//!   an upper limit, the condition is reversed.

use crate::experiment::{Beside, Declaration, Target, Yardstick};
use crate::result::{CellResult, Outcome, Verdict};
use crate::stats::Summary;
use crate::yardstick::{Found, found, label};

/// Makes one verdict per target.
pub(crate) fn judge(declaration: &Declaration, cells: &[CellResult]) -> Vec<Verdict> {
    declaration.targets.iter().map(|target| judge_one(declaration, target, cells)).collect()
}

fn judge_one(declaration: &Declaration, target: &Target, cells: &[CellResult]) -> Verdict {
    let wanted = |cell: &&CellResult| {
        target.variants.contains(&cell.variant) && target.workloads.contains(&cell.workload)
    };
    let parts: Vec<_> =
        cells.iter().filter(wanted).map(|cell| judge_cell(declaration, target, cells, cell)).collect();
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

fn judge_cell(
    declaration: &Declaration,
    target: &Target,
    cells: &[CellResult],
    cell: &CellResult,
) -> (Outcome, String) {
    let name = format!("{}, {}", label(declaration, &cell.variant), label(declaration, &cell.workload));
    let Some(Found { summary, against }) = found(declaration, target, cells, cell) else {
        let why = cell.unavailable.as_deref().unwrap_or("there is no baseline to compare with");
        return (Outcome::Undecided, format!("undecided: {name}: not measured: {why}"));
    };
    let (wanted, figures) = match &target.yardstick {
        Yardstick::Figure { column, at_most } => {
            (Wanted::AtMost(*at_most), figure(declaration, column, *at_most, summary))
        }
        Yardstick::Beside { column, by, at_most, .. } => {
            (Wanted::AtMost(*at_most), beside(declaration, (column, *by), *at_most, summary))
        }
        _ => (Wanted::AtLeast(target.at_least), ratio(target, summary)),
    };
    let outcome = outcome(wanted, target.half_width_max, summary);
    let hint = hint(wanted, target.half_width_max, summary, outcome);
    (outcome, format!("{}: {name}{against}: {figures}{hint}", outcome.word()))
}

/// The limit, and the side of it on which the interval must be.
#[derive(Clone, Copy)]
enum Wanted {
    AtLeast(f64),
    AtMost(f64),
}

impl Wanted {
    fn is_met_by(self, value: f64) -> bool {
        match self {
            Self::AtLeast(limit) => value >= limit,
            Self::AtMost(limit) => value <= limit,
        }
    }

    /// Whether the worse end of the interval meets the limit, and whether the better end does.
    fn is_met(self, Summary { low, high, .. }: Summary) -> (bool, bool) {
        let (worse, better) = match self {
            Self::AtLeast(_) => (low, high),
            Self::AtMost(_) => (high, low),
        };
        (self.is_met_by(worse), self.is_met_by(better))
    }
}

fn outcome(wanted: Wanted, half_width_max: f64, summary: Summary) -> Outcome {
    let (all, some) = wanted.is_met(summary);
    match () {
        () if !summary.is_sure() => Outcome::Undecided,
        () if all => Outcome::Reached,
        () if some && summary.half_width() <= half_width_max => Outcome::Reached,
        () => Outcome::Missed,
    }
}

fn hint(wanted: Wanted, half_width_max: f64, summary: Summary, outcome: Outcome) -> &'static str {
    let wide = summary.half_width() > half_width_max;
    match (outcome, wanted.is_met(summary), wanted) {
        (Outcome::Undecided, ..) => "; too few rounds for a 95 % interval",
        (Outcome::Reached, _, Wanted::AtLeast(_)) if wide => {
            "; the interval is wide, but entirely above the target"
        }
        (Outcome::Reached, _, Wanted::AtMost(_)) if wide => {
            "; the interval is wide, but entirely below the limit"
        }
        (Outcome::Missed, (_, true), _) => {
            "; the interval is too wide for a verdict: more or longer rounds make it narrower"
        }
        _ => "",
    }
}

fn ratio(target: &Target, summary: Summary) -> String {
    let Summary { median, low, high, coverage } = summary;
    format!(
        "{median:.3} ({low:.3} to {high:.3}, which covers {:.1} %; ±{:.1} %, at most ±{:.0} % allowed)",
        100.0 * coverage,
        100.0 * summary.half_width(),
        100.0 * target.half_width_max
    )
}

fn figure(declaration: &Declaration, column: &str, at_most: f64, summary: Summary) -> String {
    let Summary { median, low, high, coverage } = summary;
    let known = declaration.columns.iter().find(|known| known.id == column);
    let (title, unit, places) =
        known.map_or(("", "", 3), |known| (&known.title, &known.unit, known.decimals));
    let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
    format!(
        "{title} {median:.places$}{unit} ({low:.places$} to {high:.places$}, which covers {:.1} %), at most \
         {at_most}{unit}",
        100.0 * coverage
    )
}

fn beside(declaration: &Declaration, (column, by): (&str, Beside), at_most: f64, summary: Summary) -> String {
    let Summary { median, low, high, coverage } = summary;
    let known = declaration.columns.iter().find(|known| known.id == column);
    let (title, unit, places) =
        known.map_or((column, "", 3), |known| (&known.title, &known.unit, known.decimals));
    let (what, unit, places) = match by {
        Beside::Ratio => (format!("{title}: the ratio is"), String::new(), 3),
        Beside::Difference => (format!("{title}: the difference is"), format!(" {unit}"), places),
    };
    format!(
        "{what} {median:.places$}{unit} ({low:.places$} to {high:.places$}, which covers {:.1} %), at most \
         {at_most}{unit}",
        100.0 * coverage
    )
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
            yardstick: Yardstick::Baseline,
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
    fn figure_below_its_limit_is_reached_and_one_above_is_missed() {
        let of = |low, high| {
            let summary = Summary { median: f64::midpoint(low, high), low, high, coverage: 0.957 };
            super::outcome(Wanted::AtMost(0.6), 0.05, summary)
        };
        assert_eq!((of(0.50, 0.58), of(0.20, 0.60)), (Outcome::Reached, Outcome::Reached));
        assert_eq!((of(0.58, 0.62), of(0.40, 0.70)), (Outcome::Reached, Outcome::Missed));
        assert_eq!(of(0.61, 0.62), Outcome::Missed);
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
