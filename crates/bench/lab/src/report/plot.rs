//! Drawings per workload: one row per variant, with a bar or a point, whiskers for the interval, and the figure.

use std::ops::Range;

use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::drawing::{Area, Chart, Drawn, INK, in_percent, letters, text};
use crate::error::LabError;
use crate::experiment::{Plot, RatioForm, Scale, Workload};
use crate::result::{CellResult, RunResult};
use crate::stats::Summary;
use crate::table::written;

const WIDTH_PX: u32 = 860;
const ROW_PX: u32 = 30;
/// Height of the title above and the axis below.
const AROUND_PX: u32 = 120;
const LABELS_PX: u32 = 275;
/// Half of a bar's thickness, in rows.
const HALF_BAR: f64 = 0.3;
const FAINT: RGBColor = RGBColor(0x88, 0x88, 0x88);
const BASELINE: RGBColor = RGBColor(0x9a, 0xa5, 0xb1);
const BAR: RGBColor = RGBColor(0x3b, 0x7d, 0xb8);

/// The row of one variant.
struct Row<'r> {
    label: &'r str,
    summary: Option<Summary>,
    is_baseline: bool,
    /// Whether the figure is written with a sign.
    is_gain: bool,
}

/// All drawings of a run, with their file names.
pub(super) fn all(result: &RunResult) -> Result<Vec<(String, String)>, LabError> {
    let workloads = result.experiment.workloads.iter();
    let pairs =
        workloads.flat_map(|workload| result.experiment.plots.iter().map(move |plot| (workload, plot)));
    pairs.map(|(workload, plot)| Ok((name(workload, plot), svg(result, workload, plot)?))).collect()
}

fn name(workload: &Workload, plot: &Plot) -> String {
    format!("{}-{}.svg", workload.id, plot.id)
}

/// Draws a plot of one workload.
pub(super) fn svg(result: &RunResult, workload: &Workload, plot: &Plot) -> Result<String, LabError> {
    let rows: Vec<_> = result.cells_of(&workload.id).map(|cell| row(result, cell, plot)).collect();
    let title = format!("{}: {}", plot.title, workload.label);
    let even = plot.column.is_none().then(|| result.experiment.ratio_form.percent(1.0));
    let labels = (title.as_str(), axis_title(result, plot));
    text(&name(workload, plot), |text| draw(text, (labels.0, &labels.1), (plot.scale, even), &rows))
}

fn row<'r>(result: &'r RunResult, cell: &'r CellResult, plot: &Plot) -> Row<'r> {
    let is_baseline = result.experiment.baseline_of(&cell.variant).is_none();
    let form = result.experiment.ratio_form;
    let summary = match &plot.column {
        Some(column) => cell.summary(column),
        None if is_baseline => cell.summary(&result.experiment.compared).map(|_| same(form.percent(1.0))),
        None => cell.ratio.as_ref().map(|ratio| in_percent(ratio.summary, form)),
    };
    let is_gain = plot.column.is_none() && form == RatioForm::Gain;
    Row { label: result.label(&cell.variant), summary, is_baseline, is_gain }
}

fn same(value: f64) -> Summary {
    Summary { median: value, low: value, high: value, coverage: 1.0 }
}

fn axis_title(result: &RunResult, plot: &Plot) -> String {
    let Some(id) = &plot.column else {
        let has_own = result.experiment.variants.iter().any(|variant| variant.against.is_some());
        let baseline = if has_own { "its baseline" } else { result.label(&result.experiment.baseline) };
        return match result.experiment.ratio_form {
            RatioForm::Share => format!("% of {baseline}"),
            RatioForm::Gain => format!("% more than {baseline}, in the same round"),
        };
    };
    let column = result.experiment.columns.iter().find(|column| &column.id == id);
    column.map_or_else(|| id.clone(), |column| format!("{}, {}", column.title, column.unit))
}

/// `even` is the value of a ratio that means "no difference".
fn draw(
    text: &mut String,
    (title, axis): (&str, &str),
    (scale, even): (Scale, Option<f64>),
    rows: &[Row<'_>],
) -> Drawn {
    let count = u32::try_from(rows.len()).unwrap_or(u32::MAX).max(1);
    let height_px = count.saturating_mul(ROW_PX).saturating_add(AROUND_PX);
    let area = SVGBackend::with_string(text, (WIDTH_PX, height_px)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut builder = ChartBuilder::on(&area);
    builder
        .caption(title, ("sans-serif", 19).into_font().color(&INK))
        .margin(14)
        .set_label_area_size(LabelAreaPosition::Left, LABELS_PX)
        .set_label_area_size(LabelAreaPosition::Bottom, 46);
    let y = 0.0..f64::from(count);
    match scale {
        Scale::Linear => {
            let mut chart = builder.build_cartesian_2d(with_zero(rows), y)?;
            axes(&mut chart, axis)?;
            if let Some(even) = even {
                chart.draw_series([PathElement::new(vec![(even, 0.0), (even, f64::from(count))], INK)])?;
            }
            bars(&mut chart, rows)?;
            figures(&area, &chart, rows)?;
        }
        Scale::Log => {
            let mut chart = builder.build_cartesian_2d(powers_of_ten(rows).log_scale(), y)?;
            axes(&mut chart, axis)?;
            points(&mut chart, rows)?;
            figures(&area, &chart, rows)?;
        }
    }
    area.present()?;
    Ok(())
}

/// The horizontal range. It leaves room for the figures on the right, and on the left only if there are losses.
fn with_zero(rows: &[Row<'_>]) -> Range<f64> {
    let present = || rows.iter().filter_map(|row| row.summary);
    let lowest = present().map(|summary| summary.low).fold(0.0, f64::min);
    let highest = present().map(|summary| summary.high).fold(0.0, f64::max);
    let span = highest - lowest;
    if span > 0.0 { lowest * 1.04..highest + 0.22 * span } else { 0.0..1.0 }
}

fn powers_of_ten(rows: &[Row<'_>]) -> Range<f64> {
    let present = || rows.iter().filter_map(|row| row.summary).filter(|summary| summary.low > 0.0);
    let lowest = present().map(|summary| summary.low).fold(f64::INFINITY, f64::min);
    let highest = present().map(|summary| summary.high).fold(0.0, f64::max);
    if highest <= 0.0 {
        return 1.0..10.0;
    }
    let (low, high) = (10_f64.powf(lowest.log10().floor()), 10_f64.powf((highest * 2.0).log10().ceil()));
    // Slightly below the power of ten; otherwise its label would be missing.
    low * 0.99..high.max(low * 10.0)
}

fn axes<X>(chart: &mut Chart<'_, '_, X>, title: &str) -> Drawn
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let small = ("sans-serif", 13).into_font().color(&INK);
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(0)
        .x_labels(8)
        .x_label_formatter(&|value| short(*value))
        .x_desc(title)
        .label_style(small.clone())
        .axis_desc_style(small)
        .light_line_style(WHITE.mix(0.0))
        .draw()?;
    Ok(())
}

/// Formats a number with as few digits as possible.
fn short(value: f64) -> String {
    let digits = if value == 0.0 || value.abs() >= 100.0 { 0 } else { 4 };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// The vertical middle of a row; the first row is at the top.
fn middle(rows: &[Row<'_>], place: usize) -> f64 {
    let from_top = u32::try_from(rows.len() - place).unwrap_or(u32::MAX);
    f64::from(from_top) - 0.5
}

fn present<'r>(rows: &'r [Row<'r>]) -> impl Iterator<Item = (f64, Summary, RGBColor)> + 'r {
    rows.iter().enumerate().filter_map(|(place, row)| {
        let color = if row.is_baseline { BASELINE } else { BAR };
        row.summary.map(|summary| (middle(rows, place), summary, color))
    })
}

fn bars<X: Ranged<ValueType = f64>>(chart: &mut Chart<'_, '_, X>, rows: &[Row<'_>]) -> Drawn {
    chart.draw_series(present(rows).map(|(y, summary, color)| {
        Rectangle::new([(0.0, y - HALF_BAR), (summary.median, y + HALF_BAR)], color.filled())
    }))?;
    whiskers(chart, rows)
}

fn points<X: Ranged<ValueType = f64>>(chart: &mut Chart<'_, '_, X>, rows: &[Row<'_>]) -> Drawn {
    whiskers(chart, rows)?;
    chart.draw_series(
        present(rows).map(|(y, summary, color)| Circle::new((summary.median, y), 5, color.filled())),
    )?;
    Ok(())
}

/// The intervals, as lines with a cap at each end.
fn whiskers<X: Ranged<ValueType = f64>>(chart: &mut Chart<'_, '_, X>, rows: &[Row<'_>]) -> Drawn {
    let cap = HALF_BAR / 2.0;
    chart.draw_series(present(rows).flat_map(|(y, Summary { low, high, .. }, _)| {
        let line = |from, to| PathElement::new(vec![from, to], INK.stroke_width(1));
        [
            line((low, y), (high, y)),
            line((low, y - cap), (low, y + cap)),
            line((high, y - cap), (high, y + cap)),
        ]
    }))?;
    Ok(())
}

/// Writes the names on the left, and each median to the right of its whisker, where there is room.
fn figures<X>(area: &Area<'_>, chart: &Chart<'_, '_, X>, rows: &[Row<'_>]) -> Drawn
where
    X: Ranged<ValueType = f64>,
{
    let (left_px, _) = chart.plotting_area().get_pixel_range();
    for (place, row) in rows.iter().enumerate() {
        let y = middle(rows, place);
        // The figure is next to the bar; for a loss, it is on the other side of zero.
        let at = row.summary.map_or(f64::MIN_POSITIVE, |summary| summary.high.max(f64::MIN_POSITIVE));
        let (x_px, y_px) = chart.backend_coord(&(at, y));
        let name = letters(14, INK, HPos::Right);
        area.draw(&Text::new(row.label.to_owned(), (left_px.start - 10, y_px), name))?;
        let (figure, color, x_px) = match row.summary {
            Some(summary) if row.is_gain => (written(RatioForm::Gain, summary.median), INK, x_px + 8),
            Some(summary) => (significant(summary.median), INK, x_px + 8),
            None => ("not available".to_owned(), FAINT, left_px.start + 8),
        };
        area.draw(&Text::new(figure, (x_px, y_px), letters(13, color, HPos::Left)))?;
    }
    Ok(())
}

/// Formats a number with three digits, or with all digits before the decimal point if there are more.
fn significant(value: f64) -> String {
    let decimals = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    #[test]
    fn drawing_names_every_variant_the_title_and_the_unit() {
        let drawings = all(&example::result()).unwrap();
        let names: Vec<_> = drawings.iter().map(|(name, _)| name.as_str()).collect();
        let expected =
            ["disk-randwrite-bandwidth.svg", "disk-randwrite-ratio.svg", "disk-randwrite-latency.svg"];
        assert_eq!(names, expected);
        for part in
            ["bare metal, O_DIRECT", "cache=none, posix-aio, no pool", "not available", "bandwidth, MB/s"]
        {
            assert!(drawings[0].1.contains(part), "no {part}");
        }
        assert!(drawings[2].1.contains("completion latency, ms"));
    }

    #[test]
    fn text_in_a_drawing_is_escaped() {
        let drawings = all(&example::result()).unwrap();
        assert!(drawings[0].1.contains("random &lt;writes&gt; &amp; more"), "{}", drawings[0].1);
    }

    #[test]
    fn axis_of_powers_of_ten_encloses_what_is_drawn() {
        let rows = [Row { label: "a", summary: Some(same(0.3)), is_baseline: false, is_gain: false }];
        let range = powers_of_ten(&rows);
        assert!((0.09..=0.1).contains(&range.start) && (range.end - 1.0).abs() < 1e-9, "{range:?}");
        assert_eq!(powers_of_ten(&[]), 1.0..10.0);
    }

    #[test]
    fn gains_are_drawn_from_zero_with_their_sign_and_losses_to_the_left() {
        let mut result = example::result();
        result.experiment.ratio_form = RatioForm::Gain;
        let ratio = result.cells[1].ratio.as_mut().unwrap();
        ratio.summary = Summary { median: 0.95, low: 0.9, high: 0.99, ..ratio.summary };
        let plot = &result.experiment.plots[1];
        let found = row(&result, &result.cells[1], plot);
        let range = with_zero(&[found]);
        assert!((range.start + 10.4).abs() < 1e-9 && range.end > 0.0, "{range:?}");
        let drawing = svg(&result, &result.experiment.workloads[0], plot).unwrap();
        assert!(drawing.contains("-5.0") && drawing.contains("% more than bare metal"), "{drawing}");
    }

    #[test]
    fn figures_have_about_three_digits() {
        let figures = [1234.5, 45.67, 4.567, 0.4567].map(significant);
        assert_eq!(figures, ["1234", "45.7", "4.57", "0.457"]);
    }
}
