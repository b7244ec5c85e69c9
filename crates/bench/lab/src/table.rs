//! Formats a result for a terminal: the maps, a table for each workload that no map shows, then the verdicts.
//!
//! Each cell of a table has the median, and below it the 95 % confidence interval.

use std::fmt::Write;

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};

use crate::experiment::{Column, RatioForm, Workload};
use crate::grid;
pub(crate) use crate::grid::NONE;
use crate::result::{CellResult, Outcome, RunResult, Verdict};
use crate::stats::Summary;

/// Limit of the details that the table shows for a verdict; the rest are only in the report.
pub(crate) const MANY: usize = 8;

/// The entire output for a terminal.
#[must_use]
pub fn text(result: &RunResult) -> String {
    let mut text = format!("{}: {}\n", result.experiment.name, result.experiment.question);
    for note in result.notes.iter().chain(&caution(result)) {
        let _ = writeln!(text, "  {note}");
    }
    result.experiment.maps.iter().for_each(|map| text.push_str(&grid::text(result, map)));
    let workloads = result.experiment.workloads.iter();
    let (in_maps, others): (Vec<_>, Vec<_>) =
        workloads.partition(|workload| result.experiment.maps_show(workload));
    for workload in &in_maps {
        unavailable(&mut text, result, workload, &format!("{}: ", workload.label));
    }
    for workload in &others {
        let _ = write!(text, "\n{}\n{}\n", workload.label, table(result, workload));
        unavailable(&mut text, result, workload, "");
    }
    if !in_maps.is_empty() {
        text.push_str("\nThe report also has the tables of the workloads that the maps show.\n");
    }
    if !others.is_empty() {
        let (first, second) = explanation(result);
        let _ = writeln!(text, "\n{first}\n{second}");
    }
    text.push('\n');
    for verdict in &result.verdicts {
        let _ = writeln!(text, "{}: {}", verdict.outcome.word(), verdict.target);
        details(&mut text, verdict);
    }
    text
}

fn unavailable(text: &mut String, result: &RunResult, workload: &Workload, prefix: &str) {
    for cell in result.cells_of(&workload.id) {
        if let Some(why) = &cell.unavailable {
            let _ = writeln!(text, "  {prefix}{}: not available: {why}", result.label(&cell.variant));
        }
    }
}

/// Writes all details if they are few; otherwise only those that need attention.
fn details(text: &mut String, verdict: &Verdict) {
    let is_as_wanted = |detail: &&String| detail.starts_with(Outcome::Reached.word());
    let many = verdict.details.len() > MANY;
    if many && verdict.is_all_undecided() {
        let _ = writeln!(text, "  all {} of them, listed in the report", verdict.details.len());
        return;
    }
    let shown = verdict.details.iter().filter(|detail| !many || !is_as_wanted(detail));
    shown.for_each(|detail| _ = writeln!(text, "  {detail}"));
    let left_out = verdict.details.iter().filter(is_as_wanted).count();
    if many && left_out > 0 {
        let word = Outcome::Reached.word();
        let _ = writeln!(text, "  {word}: {left_out} of {}, listed in the report", verdict.details.len());
    }
}

/// Returns a warning if the run had too few rounds for meaningful intervals.
pub(crate) fn caution(result: &RunResult) -> Option<String> {
    let rounds = result.effort.rounds;
    (result.quick || !result.is_sure()).then(|| {
        format!(
            "Only {rounds} round{} of {} s: the intervals mean little. A full run has {}.",
            if rounds == 1 { "" } else { "s" },
            result.effort.seconds,
            result.experiment.full.rounds
        )
    })
}

/// Explains how to read a cell and a ratio.
pub(crate) fn explanation(result: &RunResult) -> (String, String) {
    let below = if result.is_sure() {
        "the interval that contains the true median with at least 95 % (order statistics, no distribution assumed)"
    } else {
        "the smallest and largest figure (too few rounds for an interval that contains the true median with 95 %)"
    };
    let first = format!("Medians of rounds ({}); below each, {below}.", result.effort.rounds);
    let title = &result.experiment.ratio_title;
    let has_own = result.experiment.variants.iter().any(|variant| variant.against.is_some());
    let second = if has_own {
        format!("'{title}' is computed within each round between neighbours, not from medians.")
    } else {
        let baseline = result.label(&result.experiment.baseline);
        format!("'{title}' is the ratio to '{baseline}' within the same round, not a ratio of medians.")
    };
    (first, second)
}

fn table(result: &RunResult, workload: &Workload) -> Table {
    let experiment = &result.experiment;
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Disabled);
    // One word per line, so that the figures determine a column's width.
    let heading = |title: &str, unit: &str| format!("{}\n{unit}", title.replace(' ', "\n"));
    let shown = experiment.columns.iter().filter(|column| !column.files_only);
    let mut headings: Vec<_> = shown.map(|column| heading(&column.title, &column.unit)).collect();
    headings.insert(1.min(headings.len()), heading(&experiment.ratio_title, "%"));
    table.set_header(std::iter::once(String::new()).chain(headings));
    // Unavailable variants are listed below the table.
    for cell in result.cells_of(&workload.id).filter(|cell| cell.unavailable.is_none()) {
        table.add_row(row(result, cell));
    }
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

fn row(result: &RunResult, cell: &CellResult) -> Vec<Cell> {
    let columns = result.experiment.columns.iter().zip(&cell.measures);
    let shown = columns.filter(|(column, _)| !column.files_only);
    let mut cells: Vec<_> =
        shown.map(|(column, measure)| Cell::new(figure(measure.summary, column, "\n"))).collect();
    cells.insert(1.min(cells.len()), Cell::new(percent(result, cell, "\n")));
    cells.insert(0, Cell::new(result.label(&cell.variant)));
    cells
}

/// Median and interval of a column's figure.
pub(crate) fn figure(summary: Option<Summary>, column: &Column, between: &str) -> String {
    summary.map_or_else(|| NONE.to_owned(), |summary| figures(summary, column.decimals, between))
}

/// Median and interval of the ratio to the baseline.
pub(crate) fn percent(result: &RunResult, cell: &CellResult, between: &str) -> String {
    let form = result.experiment.ratio_form;
    cell.ratio.as_ref().map_or_else(
        || NONE.to_owned(),
        |ratio| {
            let Summary { median, low, high, .. } = ratio.summary;
            let [median, low, high] = [median, low, high].map(|ratio| written(form, form.percent(ratio)));
            let to = if form == RatioForm::Gain { "…" } else { "–" };
            format!("{median}{between}{low}{to}{high}")
        },
    )
}

/// Formats a ratio in percent; a gain is shown with its sign.
pub(crate) fn written(form: RatioForm, percent: f64) -> String {
    match form {
        RatioForm::Share => format!("{percent:.1}"),
        // Avoids "-0.0".
        RatioForm::Gain => format!("{:+.1}", if percent.abs() < 0.05 { 0.0 } else { percent }),
    }
}

fn figures(Summary { median, low, high, .. }: Summary, decimals: usize, between: &str) -> String {
    format!("{median:.decimals$}{between}{low:.decimals$}–{high:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    #[test]
    fn table_has_median_and_interval_of_what_was_measured() {
        let text = text(&example::result());
        let line = text.lines().find(|line| line.contains("posix-aio, no pool")).unwrap();
        assert!(line.contains("100.0") && line.contains("101.1"), "{text}");
        assert!(text.contains("90.0–110.0") && text.contains("90.0–112.2"), "{text}");
    }

    #[test]
    fn what_is_not_available_is_told_with_its_reason_once() {
        let text = text(&example::result());
        let about: Vec<_> = text.lines().filter(|line| line.contains("pool of 4")).collect();
        assert_eq!(about, ["  cache=none, posix-aio, pool of 4: not available: posix-aio: <no> such engine"]);
    }

    #[test]
    fn workload_in_a_map_has_no_table_but_its_reasons() {
        let (result, _) = example::with_map();
        let text = text(&result);
        assert!(text.contains("held <briefly>") && text.contains("2.50"), "{text}");
        assert!(!text.contains("90.0–110.0"), "a table: {text}");
        let reason = "  second: cache=none, posix-aio, pool of 4: not available: posix-aio: <no> such engine";
        assert!(text.lines().any(|line| line == reason), "{text}");
    }

    #[test]
    fn of_many_details_those_as_wanted_are_only_counted() {
        let mut result = example::result();
        let detail = |place| format!("{}: {place}", if place == 3 { "missed" } else { "reached" });
        result.verdicts[0].details = (0..10).map(detail).collect();
        let text = text(&result);
        assert!(text.contains("  missed: 3\n  reached: 9 of 10, listed in the report"), "{text}");
        assert!(!text.contains("reached: 4"), "{text}");
    }

    #[test]
    fn many_details_that_decide_nothing_are_only_counted() {
        let mut result = example::result();
        result.verdicts[0].details = (0..10).map(|place| format!("undecided: {place}")).collect();
        let text = text(&result);
        assert!(
            text.contains("  all 10 of them, listed in the report") && !text.contains("undecided: 4"),
            "{text}"
        );
    }

    #[test]
    fn few_rounds_are_called_few() {
        let text = text(&example::result());
        assert!(text.contains("Only 3 rounds of 0.15 s: the intervals mean little."), "{text}");
        assert!(text.contains("undecided: linux-aio and io_uring equal bare metal"), "{text}");
    }
}
