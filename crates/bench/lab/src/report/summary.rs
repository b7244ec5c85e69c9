//! `summary.json`: a run's medians and intervals, without samples, so the file is small enough to be kept next to the
//! code.
//!
//! - Figures have four significant digits. Each cell is one line, so that a diff of two runs is readable.

use serde_json::{Value, json};

use crate::result::{CellResult, RunResult};
use crate::stats::Summary;

/// Name of the file in the experiment's folder.
pub(super) const FILE: &str = "summary.json";

pub(super) fn to_text(result: &RunResult) -> String {
    let parts = [
        ("about", about(result).to_string()),
        ("units", units(result).to_string()),
        ("cells", lines(result.cells.iter().map(cell))),
        ("verdicts", lines(result.verdicts.iter().map(|verdict| json!(verdict)))),
    ];
    let parts: Vec<String> = parts.iter().map(|(name, text)| format!("\"{name}\": {text}")).collect();
    format!("{{\n{}\n}}\n", parts.join(",\n"))
}

/// The run's command, settings, date and machine.
fn about(result: &RunResult) -> Value {
    json!({
        "experiment": result.experiment.name,
        "program": result.program,
        "command": result.command,
        "date": result.date,
        "effort": result.effort,
        "quick": result.quick,
        "seed": result.seed,
        "machine": result.machine,
        "notes": result.notes,
        "figures": "[median, lowest and highest value of its interval], or null",
    })
}

/// The columns' units.
fn units(result: &RunResult) -> Value {
    let columns = result.cells.iter().flat_map(|cell| &cell.measures);
    columns
        .map(|measure| (measure.column.clone(), json!(measure.unit)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

fn cell(cell: &CellResult) -> Value {
    let ratio = cell.ratio.as_ref().map(|ratio| ratio.summary);
    let of_columns = cell.measures.iter().map(|measure| (measure.column.clone(), figures(measure.summary)));
    json!({
        "workload": cell.workload,
        "variant": cell.variant,
        "unavailable": cell.unavailable,
        "ratio": figures(ratio),
        "figures": of_columns.collect::<serde_json::Map<_, _>>(),
    })
}

fn figures(summary: Option<Summary>) -> Value {
    summary.map_or(Value::Null, |of| json!([of.median, of.low, of.high].map(rounded)))
}

/// Rounds to four significant digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

/// Formats an array with one element per line.
fn lines(elements: impl Iterator<Item = Value>) -> String {
    let lines: Vec<String> = elements.map(|element| element.to_string()).collect();
    format!("[\n{}\n]", lines.join(",\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    #[test]
    fn summary_has_each_cell_on_a_line_of_its_own() {
        let text = to_text(&example::result());
        let read: Value = serde_json::from_str(&text).unwrap();
        let cells = read["cells"].as_array().unwrap();
        assert_eq!(cells.len(), 3);
        assert_eq!(text.lines().filter(|line| line.contains("\"figures\":{")).count(), 3);
        assert_eq!(read["about"]["experiment"], "aio");
        assert_eq!(cells[0]["figures"]["bandwidth"], json!([100.0, 98.0, 102.0]));
        assert_eq!(read["units"]["bandwidth"], "MB/s");
    }

    #[test]
    fn variant_that_could_not_run_says_why() {
        let read: Value = serde_json::from_str(&to_text(&example::result())).unwrap();
        let absent = &read["cells"][2];
        assert_eq!(absent["unavailable"], "posix-aio: <no> such engine");
        assert_eq!(absent["ratio"], Value::Null);
    }

    #[test]
    fn figures_have_four_digits() {
        assert_eq!(rounded(2_130_666.67), 2_131_000.0);
        assert_eq!(rounded(0.000_123_456), 0.000_123_5);
        assert_eq!(rounded(0.0), 0.0);
    }
}
