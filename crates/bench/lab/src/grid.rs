//! The grids of a map: the ratios of one variant to the baseline, by two parameters of a layer's workloads.
//!
//! `result, map → Grid per layer and variant → terminal (this file) | drawing (report/maps.rs)`

use std::fmt::Write;

use comfy_table::{Table, presets};

use crate::experiment::{Layer, Map};
use crate::result::RunResult;
use crate::stats::Summary;

/// The text for a missing figure.
pub(crate) const NONE: &str = "–";

/// Width of a figure in a terminal, with the space before it.
const FIGURE_CHARS: usize = 7;

/// The ratios of one variant under the workloads of one layer.
#[derive(Debug, PartialEq)]
pub(crate) struct Grid {
    /// The values of the columns, ascending.
    pub across: Vec<f64>,
    /// The values of the rows, ascending.
    pub down: Vec<f64>,
    /// The ratios by row, then by column; `None` if not measured.
    pub ratios: Vec<Vec<Option<Summary>>>,
}

impl Grid {
    pub fn of(result: &RunResult, map: &Map, layer: &Layer, variant: &str) -> Self {
        let of_layer = result.experiment.workloads.iter();
        let placed =
            of_layer.filter(|workload| layer.workloads.contains(&workload.id)).filter_map(|workload| {
                let at = |key: &str| workload.place.get(key).copied();
                let ratio = result.cell(&workload.id, variant).and_then(|cell| cell.ratio.as_ref());
                Some((at(&map.down.key)?, at(&map.across.key)?, ratio.map(|ratio| ratio.summary)))
            });
        let placed: Vec<_> = placed.collect();
        let down = ascending(placed.iter().map(|(down, ..)| *down));
        let across = ascending(placed.iter().map(|(_, across, _)| *across));
        let mut ratios = vec![vec![None; across.len()]; down.len()];
        for (y, x, ratio) in placed {
            let place = |values: &[f64], value: f64| values.partition_point(|known| *known < value);
            ratios[place(&down, y)][place(&across, x)] = ratio;
        }
        Self { across, down, ratios }
    }
}

/// Sorts the values, and keeps each value once.
fn ascending(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    values
}

/// The ratio with two or three digits; preceded by `~` if its interval contains 1.
pub(crate) fn figure(ratio: Option<Summary>) -> String {
    let Some(Summary { median, low, high, .. }) = ratio else { return NONE.to_owned() };
    let decimals = match median {
        ratio if ratio < 0.0995 => 3,
        ratio if ratio < 9.995 => 2,
        ratio if ratio < 99.95 => 1,
        _ => 0,
    };
    let about = if (low..=high).contains(&1.0) { "~" } else { "" };
    format!("{about}{median:.decimals$}")
}

/// Explains the figures of a map.
pub(crate) fn explanation(result: &RunResult) -> String {
    let experiment = &result.experiment;
    let compared = experiment.columns.get(experiment.compared_column()).map_or("", |column| &column.title);
    let baseline = result.label(&experiment.baseline);
    format!("'{compared}' ÷ that of '{baseline}' in the same round; ~ marks an interval that contains 1")
}

/// A table per layer: one line per row of the grids, and one block of figures per variant.
pub(crate) fn text(result: &RunResult, map: &Map) -> String {
    let mut text = format!("\n{}\n  {}.\n", map.title, explanation(result));
    let _ = writeln!(text, "  Rows: {}. Columns: {}.", map.down.title, map.across.title);
    for layer in &map.layers {
        let _ = write!(text, "\n{}\n{}\n", layer.label, table(result, map, layer));
    }
    text
}

fn table(result: &RunResult, map: &Map, layer: &Layer) -> Table {
    let grids: Vec<_> = map.variants.iter().map(|variant| Grid::of(result, map, layer, variant)).collect();
    let blocks = map.variants.iter().zip(&grids);
    let headings = blocks.map(|(variant, grid)| {
        format!("{}\n{}", result.label(variant), block(grid.across.iter().map(f64::to_string)))
    });
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(std::iter::once(String::new()).chain(headings));
    for (place, down) in grids.first().map_or(&[][..], |grid| &grid.down).iter().enumerate() {
        let figures = grids.iter().map(|grid| block(grid.ratios[place].iter().copied().map(figure)));
        table.add_row(std::iter::once(down.to_string()).chain(figures));
    }
    table
}

fn block(figures: impl Iterator<Item = String>) -> String {
    figures.map(|figure| format!("{figure:>FIGURE_CHARS$}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    #[test]
    fn ratio_stands_in_the_row_and_the_column_of_its_workload() {
        let (result, map) = example::with_map();
        let grid = Grid::of(&result, &map, &map.layers[0], "none-posix-aio-1");
        assert_eq!((&grid.across[..], &grid.down[..]), (&[0.0, 20.0][..], &[1.0, 4.0][..]));
        let shown: Vec<Vec<_>> =
            grid.ratios.iter().map(|row| row.iter().copied().map(figure).collect()).collect();
        assert_eq!(shown, [[NONE, "~1.01"], ["2.50", NONE]]);
    }

    #[test]
    fn figures_have_two_or_three_digits_and_tell_of_an_interval_that_contains_one() {
        let around =
            |median, room| Some(Summary { median, low: median - room, high: median + room, coverage: 1.0 });
        let figures =
            [around(0.014, 0.0), around(0.97, 0.1), around(1.0, 0.0), around(12.34, 1.0), around(250.4, 1.0)];
        assert_eq!(figures.map(figure), ["0.014", "~0.97", "~1.00", "12.3", "250"]);
    }

    #[test]
    fn terminal_shows_a_block_for_each_variant() {
        let (result, map) = example::with_map();
        let text = text(&result, &map);
        let line = text.lines().find(|line| line.contains("2.50")).unwrap();
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>(),
            ["│", "4", "┆", "2.50", "–", "┆", "–", "–", "│"]
        );
        assert!(text.contains("'bandwidth' ÷ that of 'bare metal, O_DIRECT'"), "{text}");
        assert!(
            text.contains("Rows: threads per core. Columns: pauses outside.")
                && text.contains("held <briefly>")
        );
    }
}
